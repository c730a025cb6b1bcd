"""
Explains a run that selected its rollouts by influence: which helped, which hurt, and is the
arithmetic right.

    python tracin.py out/toxicity_tracin [--method=ghost|brute|jvp|finite_difference] [--rows=8]
                                         [--show=5]
    python tracin.py out/toxicity_tracin --prompt="You are" --completion=" a good editor"

The second asks which rollouts made the model say this: TracIn over the saved checkpoints.
"""
import contextlib
import copy
import io
import math
import os
import re
import textwrap
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from config import load_settings
from data.chat import encode_prompt
from data.prompts import draw_prompts, field_of
from grpo import (collect, collect_target, loss_of, micro_batches, optimizer_steps, prepare,
                  read_inputs, sort_key)
from model import completion_logprobs
from pretrain import get_tokenizer, policy_of
from run.checkpoint import load_checkpoint, set_random_state
from run.content import read_checkpoint
from run.device import pick_device
from run.files import read_rows
from run.metrics import bound_of, is_exact
from run.script import BadInput, hash_of, run_script, seed_for
from run.threads import threads_of, use_threads

USAGE = ("usage: python tracin.py out/toxicity_tracin [--method=ghost|brute|jvp|finite_difference] "
         "[--rows=8] [--show=5] [--prompt=TEXT --completion=TEXT] [--setting=value ...]")
METHODS = ("ghost", "brute", "jvp", "finite_difference")

# ------------------------------------------------------------------------------------------------
# what the logs tell


def read_log(folder, name, numbers, texts=()):
    """Rows of a log of a run, without fields that are null. BadInput for what no run writes: a log
    may have been edited, or come from elsewhere."""
    path = os.path.join(folder, name)
    rows = [{k: x for k, x in row.items() if x is not None} for row in read_rows(path)]
    for i, row in enumerate(rows, 1):
        odd = [k for k in texts if not is_text(row.get(k))]
        odd += [k for k in numbers if k in row and not is_number(row[k])]
        if type(row.get("iteration")) is not int:
            odd.append("iteration")
        if odd:
            found = shorten(repr(row.get(odd[0])))
            raise BadInput(f"{path}: row {i} has {odd[0]} = {found}, which no run writes")
    return rows


def is_number(x):
    return type(x) in (int, float) and abs(x) < 1e30


def is_text(x):
    """A lone surrogate has no bytes, and so no tokens."""
    return type(x) is str and not any("\ud800" <= c <= "\udfff" for c in x)


def find_columns(rows, encode):
    """{name: (n,)} of what rows of samples.jsonl have; NaN where it is unknown."""
    columns = {}
    for name in ("reward", "advantage"):
        values = [row.get(name, math.nan) for row in rows]
        columns[name] = torch.tensor(values, dtype=torch.float64)
    columns["|advantage|"] = columns["advantage"].abs()
    columns["tokens"] = torch.tensor([len(encode(row["completion"])) for row in rows]).double()
    return columns


def own_units(its, influence):
    """Influence (n,) in the standard deviations of its iteration, since scales drift in a run."""
    z = influence.clone()
    for it in its.unique():
        z[its == it] /= z[its == it].std(correction=0) or 1.0
    return z


def less_mean(its, x):
    """x (n,) less its mean in the iteration, so that what drifts in a run is not compared."""
    rest = x.clone()
    for it in its.unique():
        rest[its == it] -= x[its == it].nanmean()
    rounding = 1e-9 * x.nan_to_num().abs().max()
    return rest.masked_fill(rest.abs() < rounding, 0)


def rank_correlation(x, z):
    """Spearman's, of x and z (n,), NaN in x left out; NaN if there is nothing to compare."""
    known = ~x.isnan()
    both = torch.stack([ranks(x[known]), ranks(z[known])])
    return float(torch.corrcoef(both)[0, 1]) if known.sum() > 1 else math.nan


def ranks(x):
    """Rank of each value; equal values share one, and so stay in one fifth."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts + 1) / 2)[inverse].double()


# in sentences: z (n,) is influence in its own units, columns {name: (n,)} as of find_columns, less
# their means; each function returns one sentence, or "" where there is nothing to say


def say_shares(z, kept):
    """Do a few rollouts hold the influence, and what did those hold that were dropped?"""
    share = z.abs() / z.abs().sum().clamp(min=1e-30)
    few = max(1, len(z) // 100)
    top = float(share.topk(few).values.sum())
    word = "A few rollouts decide" if top > 0.25 else "Many rollouts count"
    text = (f"{word}: the {few} of most influence, for or against ({100 * few / len(z):.0f} %), "
            f"hold {100 * top:.0f} % of it")
    dropped = ~kept
    if dropped.any():
        held = float(share[dropped].sum())
        verdict = ", so leaving them out changed little" if held < 0.1 else ""
        part = float(dropped.double().mean())
        text += (f"; the {int(dropped.sum())} dropped ({100 * part:.0f} %) held {100 * held:.0f} %"
                 f"{verdict}")
    return text + "."


def say_target(cosines):
    """Is the target signal or noise? cosines: of its two halves, by iteration."""
    if not cosines:
        return ""
    mean = sum(cosines) / len(cosines)
    word = "part signal, part noise"
    if mean < 0.1:
        word = "mostly noise (more prompts would help)"
    elif mean > 0.5:
        word = "mostly signal"
    third = -(-len(cosines) // 3)
    first, last = (sum(part) / third for part in (cosines[:third], cosines[-third:]))
    drift = f", from {first:.2f} early to {last:.2f} late" if abs(first - last) > 0.1 else ""
    return (f"The target is {word}: the gradients of its two halves have a cosine of {mean:.2f} on "
            f"average{drift} (0 is noise, 1 is signal).")


def say_likeness(z, columns):
    """Does influence say more than reward and advantage do?"""
    found = {name: rank_correlation(columns[name], z)
             for name in ("reward", "advantage", "|advantage|")}
    found = {name: r for name, r in found.items() if not math.isnan(r)}
    if not found:
        return ""
    like = max(found, key=lambda name: abs(found[name]))
    word = "says something else than reward and advantage"
    if abs(found[like]) > 0.8:
        word = f"says hardly more than {like}"
    elif abs(found[like]) > 0.4:
        word = f"goes partly with {like}"
    numbers = ", ".join(f"{r:+.2f} with {name}" for name, r in found.items())
    return f"Influence {word}: rank correlation {numbers}."


def say_difference(z, columns):
    """What was different about the helpful? Differences of 0.2 standard deviations and more."""
    helpful, harmful = z > 0, z < 0
    if not helpful.any() or not harmful.any():
        return ""
    found = []
    for name, x in columns.items():
        gap = float(x[helpful].nanmean() - x[harmful].nanmean())
        spread = float(x[~x.isnan()].std(correction=0))
        if abs(gap) > 0.2 * spread:
            more, less = ("more", "fewer") if name == "tokens" else ("higher", "lower")
            found.append(f"{more if gap > 0 else less} {name} (by {abs(gap):.2g})")
    if not found:
        return "The helpful were like the harmful in reward, advantage and length."
    return f"Compared with the harmful of the same iteration, the helpful had {', '.join(found)}."


# in tables


def extremes(rows, z, show, names=("helpful", "harmful")):
    """Lines on the `show` rows of highest z (n,) above 0, then on those of lowest z below 0."""
    order = z.argsort(descending=True)
    best = order[z[order] > 0][:show]
    worst = order[z[order] < 0].flip(0)[:show]
    lines = []
    for name, found in zip(names, (best, worst)):
        lines.append(f"  most {name}" + ("" if len(found) else ": none"))
        lines += [describe_row(rows[i], float(z[i])) for i in found.tolist()]
    return lines


def describe_row(row, z):
    """A row of samples.jsonl in a line; z: its influence in standard deviations."""
    forms = dict(iteration="", reward=".3f", advantage="+.2f", weight=".2g")
    about = [f"{name} {row[name]:{form}}" for name, form in forms.items() if name in row]
    prompt, completion = shorten(row["prompt"]), shorten(row["completion"])
    return f"  {z:+7.2f}  {', '.join(about)}: {prompt!r} -> {completion!r}"


def shorten(text):
    return text if len(text) <= 48 else text[:45] + "..."


def relation(x, z, kept):
    """x, z, kept (n,) -> text: rank correlation of x and z, then by fifths of x the mean z and the
    share kept. NaN is skipped; a fifth whose values are all in another one stays blank."""
    known = ~x.isnan()
    x, z, kept = x[known], z[known], kept[known].double()
    cells = [f"{rank_correlation(x, z):+10.2f}"]
    fifth = 5 * ranks(x) // len(x)
    for j in range(5):
        here = fifth == j
        cell = " " * 14
        if here.any():
            cell = f"{z[here].mean():+8.2f} {100 * kept[here].mean():3.0f} %"
        cells.append(cell)
    return "".join(cells).rstrip()


def relations(z, kept, columns):
    """Lines: a table of relation(), without columns that are all equal."""
    fifths = "".join(f"{f'fifth {j}':>14}" for j in range(1, 6))
    lines = [f"  {'':12}{'rank corr':>10}{fifths}"]
    for name, x in columns.items():
        if len(x[~x.isnan()].unique()) > 1:
            lines.append(f"  {name:12}" + relation(x, z, kept))
        else:
            lines.append(f"  {name:12} the same in all rollouts of an iteration")
    return lines


OVER_TIME = ("positive_ratio", "selected_ratio", "self_share", "target_cosine", "invariant_error")


def history(rows):
    """Lines: means of tracin/ metrics over ten stretches of iterations; the largest of the last."""
    measured = [name for name in OVER_TIME
                if any(f"tracin/{name}" in row for row in rows)]
    if not measured:
        return ["  metrics.jsonl says nothing of influence"]
    lines = ["  iterations  " + "".join(f"{name:>16}" for name in measured)]
    n = len(rows)
    for j in range(10):
        part = rows[j * n // 10:(j + 1) * n // 10]
        if not part:
            continue
        cells = ""
        for name in measured:
            values = [row[f"tracin/{name}"] for row in part if f"tracin/{name}" in row]
            if not values:
                cells += " " * 16
            elif name == "invariant_error":
                cells += f"{max(values):16.0e}"
            else:
                cells += f"{sum(values) / len(values):16.2f}"
        lines.append(f"  {part[0]['iteration']:4} to {part[-1]['iteration']:<4}{cells.rstrip()}")
    if "self_share" not in measured:
        lines.append("  (self_share is not known for this target)")
    return lines


def print_logs(folder, cfg, scored, metrics, show):
    """The sentences, then sections 1 to 3: rollouts, influence against the rest, over time."""
    its, influence, weights = (torch.tensor([row[name] for row in scored], dtype=torch.float64)
                               for name in ("iteration", "influence", "weight"))
    z, kept = own_units(its, influence), weights != 0
    columns = find_columns(scored, get_tokenizer(cfg).encode_ordinary)
    columns = {name: less_mean(its, x) for name, x in columns.items()}
    num_iterations = len(its.unique())
    print(f"{folder}: {len(scored)} rollouts of {num_iterations} iterations; tracin = "
          f"{cfg.tracin!r}, {cfg.tracin_select} kept")
    print("Influence is counted in standard deviations of its iteration; above 0 is helpful, below "
          "it harmful.\n")
    name = "tracin/target_cosine"
    cosines = [row[name] for row in metrics if name in row]
    sentences = [say_shares(z, kept), say_target(cosines), say_likeness(z, columns),
                 say_difference(z, columns)]
    for text in filter(None, sentences):
        print(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  "))

    print("\n1. Rollouts")
    late = its > its.max() - max(1, num_iterations // 5)
    whole = extremes(scored, z, show)
    recent = extremes([row for row, is_late in zip(scored, late) if is_late], z[late], show)
    print("\n".join(whole))
    if recent != whole:
        print("\n".join(["  and of late", *recent]))

    print("\n2. Influence against the rest, each less its mean in the iteration: rank correlation; "
          "then by\n   fifths, the lowest first, mean influence and share kept")
    print("\n".join(relations(z, kept, columns)))

    print("\n3. Over time")
    print("\n".join(history(metrics)))


# ------------------------------------------------------------------------------------------------
# one row by itself, without the tape


def row_loss(policy, weights, tokens, slope, allowed, temperature):
    """Sum of slope (T,) x log-prob (T,) over the last T tokens of a row, under other weights
    {name: tensor}; no batch, no padding."""
    with sdpa_kernel(SDPBackend.MATH):  # the one that has a forward derivative
        h = torch.func.functional_call(policy, weights, tokens[None, :-1])
    h = h[0, -len(slope):]                                                          # (T, C)
    head = "wte.weight" if policy.config.tied else "lm_head.weight"
    logits = h @ weights.get(head, policy.get_parameter(head)).T / temperature      # (T, V)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    targets = tokens[-len(slope):, None]
    logp = logits.log_softmax(-1).gather(1, targets)[:, 0]
    return (slope * logp.masked_fill(slope == 0, 0)).sum()      # a forced token may not be allowed


def derivative(method, policy, D, *row):
    """<gradient of row_loss, D> for a direction D {name of a parameter: tensor}, by one method."""
    weights = {k: policy.get_parameter(k).detach().requires_grad_(method == "brute") for k in D}
    if method == "brute":
        gradient = torch.autograd.grad(row_loss(policy, weights, *row), list(weights.values()))
        return float(sum((g * d).sum() for g, d in zip(gradient, D.values())))
    if method == "jvp":
        _, tangent = torch.func.jvp(lambda w: row_loss(policy, w, *row), (weights,), (D,))
        return float(tangent.detach())
    norm = float(sum(d.square().sum() for d in D.values())) ** 0.5
    eps = 1e-4 / max(norm, 1e-30)       # the weights move by 1e-4 in all
    ahead = row_loss(policy, {k: w + eps * D[k] for k, w in weights.items()}, *row)
    behind = row_loss(policy, {k: w - eps * D[k] for k, w in weights.items()}, *row)
    return float((ahead - behind).detach()) / (2 * eps)


def error(found, true):
    """The largest error, relative to the largest of the true values."""
    return float((found - true).abs().max() / true.abs().max().clamp(min=1e-30))


# ------------------------------------------------------------------------------------------------
# is the arithmetic right?


def checkpoints(folder):
    """(name, content) of those that the run left, the older first."""
    for name in ("ckpt_prev.pt", "ckpt.pt"):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            yield name, read_checkpoint(path)


def check_arithmetic(folder, cfg, rows, method, count):
    """Section 4: takes the first step after a checkpoint again and prints its influences beside
    those of samples.jsonl and, for `count` rollouts, beside those by another method in float64."""
    print("\n4. Is the arithmetic right? Errors are relative to the largest influence")
    if (cfg.entropy_coef or cfg.critic) and method != "ghost":
        more = "critic = True" if cfg.critic else f"entropy_coef = {cfg.entropy_coef:g}"
        print(f"  {more}: {method} knows log-probs only: left out")
        method = "ghost"
    for name, checkpoint in checkpoints(folder):
        it = checkpoint["iteration"]
        recorded = [row for row in rows if row["iteration"] == it + 1]
        if len(recorded) == cfg.num_prompts * cfg.num_generations:
            nets, batch, target = rollouts_after(os.path.join(folder, name), checkpoint, cfg)
            step = next(optimizer_steps(batch, cfg, seed_for(cfg.seed, "rows", it)), None)
            if step is None:
                print(f"  no rollout of iteration {it + 1} carried loss")
                return
            same = sum(text == row["completion"] for text, row in zip(batch.completions, recorded))
            note = "" if same == len(recorded) else (
                "; another device, dtype or torch? The last column says nothing")
            print(f"  iteration {it + 1} again, from {name}: {same} of {len(recorded)} completions "
                  f"are those recorded{note}")
            compare(nets, batch, step, target, cfg, recorded, method, count)
            return
    print("  no checkpoint has the rollouts of its next iteration in samples.jsonl; a "
          "save_interval below max_iters gives one")


def rollouts_after(path, checkpoint, cfg):
    """(nets, Batch, target) of the iteration that follows a checkpoint."""
    with contextlib.redirect_stdout(io.StringIO()) as said:     # what a run says of its models
        nets = prepare(cfg, read_inputs(cfg))
    print(*re.findall("note: .*\n", said.getvalue()), sep="", end="")
    load_checkpoint(checkpoint, path, nets, cfg, hash_of(nets.base))
    set_random_state(checkpoint["random"], nets.device)
    it = checkpoint["iteration"]
    prompts = draw_prompts(nets.prompts, it, cfg.num_prompts, cfg.seed)
    batch = collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", it))
    return nets, batch, collect_target(nets, it, cfg)


def compare(nets, batch, step, target, cfg, recorded, method, count):
    """Prints the table of methods."""
    influence = nets.influence
    pieces = list(micro_batches(sort_key(batch, step, cfg), cfg))
    with influence.record(batch, step, on_policy=True):
        for positions in pieces:
            influence.forward_backward(positions)
    scored = influence.score(target, torch.Generator().manual_seed(0))
    ghost = scored.scores.cpu().double()
    # bnpo depends on how the rows are split, an average on the steps before
    if target is None and cfg.loss_type != "bnpo" and not cfg.tracin_target_ema:
        halves, _, _ = influence.target_gradient((batch, step.rows))
        plain = {p: sum(half[p] for half in halves) * scored.scale.get(p, 1) for p in scored.G}
        worst = max(error(g, plain[p]) for p, g in scored.G.items())
        print(f"  gradient of the target, tape beside ordinary autograd: error {worst:.1e}")

    record = [recorded[i].get("influence", 0.0) for i in step.rows.tolist()]
    record = torch.tensor(record).double()
    began = time.time()
    influence.tape.dot(scored.G).tolist()
    each = 1000 * (time.time() - began) / len(step.rows)
    print(f"  {'method':27}{'rollouts':>9}{'ms for each':>13}{'error of the tape':>19}"
          f"{'of samples.jsonl':>18}")
    print(f"  {'ghost, after the backward':27}{len(step.rows):9}{each:13.2f}{'':19}"
          f"{error(record, ghost):18.1e}")
    if method == "ghost":
        return
    chosen = ghost.argsort()[torch.linspace(0, len(ghost) - 1, count).long()].unique()
    found, each = by_method(method, nets, batch, step, cfg, scored, pieces, chosen.tolist())
    errors = {"the tape": error(ghost[chosen], found),
              "samples.jsonl": error(record[chosen], found)}
    print(f"  {method + ', float64':27}{len(chosen):9}{each:13.2f}"
          f"{errors['the tape']:19.1e}{errors['samples.jsonl']:18.1e}")
    bound = bound_of(is_exact(nets, cfg))
    wrong = " and ".join(name for name, x in errors.items() if not x < bound)
    verdict = f"No: {method} contradicts {wrong}" if wrong else f"Yes: {method} agrees with both"
    print(f"  {verdict}.")


def by_method(method, nets, batch, step, cfg, scored, pieces, chosen):
    """Influence of the chosen rows by another method in float64, and the median time in ms."""
    slopes = {}     # with these constants a row alone has the gradient that it has in the batch
    for positions in pieces:
        rows = step.rows[positions]
        out = loss_of(nets, nets.policy, batch, rows, step, cfg, logprobs=completion_logprobs)
        slope, = torch.autograd.grad(out.scored, out.logp)
        slopes |= dict(zip(positions.tolist(), slope.double()))                     # (T,) each
    policy = copy.deepcopy(nets.policy).double()
    policy.recompute = False
    tape = nets.influence.tape
    found, spent = [], []
    for j in chosen:
        r = batch.rollout[step.rows[j]]
        T = int(r.mask.sum())
        end = len(r.tokens) - len(r.mask) + T
        tokens = r.tokens[:end][r.attention_mask[:end]]
        allowed = None if r.allowed is None else r.allowed[:T]
        D = scored.G
        if cfg.tracin_leave_one_out:
            D = {p: g - scored.self_coef[j] * scored.scale.get(p, 1) * tape.per_row(p, [j])[0]
                 for p, g in D.items()}
        D = {tape.names[p]: d.double() for p, d in D.items()}
        began = time.time()
        found.append(derivative(method, policy, D, tokens, slopes[j][:T], allowed, cfg.temperature))
        spent.append(1000 * (time.time() - began))
    return torch.tensor(found, dtype=torch.float64), sorted(spent)[len(spent) // 2]


# ------------------------------------------------------------------------------------------------
# who made the model say this?


def print_culprits(folder, cfg, rows, prompt, completion, show):
    rows, scores = classic(folder, cfg, rows, prompt, completion)
    print(f"Which of {len(rows)} rollouts made the model say {completion!r} after {prompt!r}?")
    print("\n".join(extremes(rows, scores / scores.std(), show, ("for it", "against it"))))


def asked_of(r, cfg):
    """The prompt of a row of samples.jsonl: its text, or the list of messages that it was."""
    name = (cfg.prompt_field or cfg.text_field) if cfg.prompts else "text"
    row = r.get("row")
    content = field_of(row, name, "samples.jsonl") if row else None
    return content if isinstance(content, list) else r["prompt"]


def classic(folder, cfg, rows, prompt, completion):
    """The rows recorded near the checkpoints and their TracIn scores (n,) on the mean log-prob of
    `completion`: the sum over checkpoints of learning rate x weight x advantage x <its gradient,
    that of the row's log-prob>. Tokens are read from the text."""
    runs = [run for _, run in checkpoints(folder)]
    tokenizer = get_tokenizer(cfg)
    encode = tokenizer.encode_ordinary
    device = pick_device(cfg.device, cfg.allow_tf32, cfg.deterministic)
    last = rows[-1]["iteration"] if rows else 0
    near = sorted({min(run["iteration"] + 1, last) for run in runs})
    rows = [row for it in near for row in [r for r in rows if r["iteration"] == it][:256]]
    _, prompt = encode_prompt(tokenizer, prompt, "--prompt")
    completion = encode(completion)
    too_long = len(prompt) + len(completion) > cfg.block_size
    if not rows or not prompt or not completion or too_long:
        raise BadInput(
            f"--prompt and --completion are {len(prompt)} and {len(completion)} tokens, {folder} "
            f"has {len(rows)} rollouts by a checkpoint: none may be 0, and block_size = "
            f"{cfg.block_size} tokens are the most")

    def as_row(prompt, completion):
        n = len(completion)
        mean = torch.full((n,), 1 / n, device=device)
        return torch.tensor(prompt + completion, device=device), mean, None, cfg.temperature

    scores = torch.zeros(len(rows))
    for run in runs:
        policy = policy_of(folder, run)[0].to(device)
        policy.value_head = None        # no part of a log-prob
        weights = {k: p for k, p in policy.named_parameters() if p.requires_grad}
        loss = row_loss(policy, weights, *as_row(prompt, completion))
        D = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        rate = run["optimizer"]["param_groups"][0]["lr"]
        for i, r in enumerate(rows):
            ids = (encode(r["completion"]) + [tokenizer.eot_token])[:cfg.max_completion_length]
            _, read = encode_prompt(tokenizer, asked_of(r, cfg), f"{folder}: a prompt")
            product = derivative("brute", policy, D, *as_row(read, ids))
            scores[i] += rate * r.get("weight", 1) * r.get("advantage", 0) * product
    return rows, scores


def main(argv):
    own = dict(method="brute", rows="8", show="5", prompt="", completion="")
    flags = []
    for arg in argv[1:]:
        name, _, value = arg[2:].partition("=")
        if name in own:
            own[name] = value
        else:
            flags.append(arg)
    numbers = own["rows"].isdecimal() and own["show"].isdecimal() and int(own["rows"]) > 0
    if not argv or argv[0].startswith("--") or own["method"] not in METHODS or not numbers:
        raise BadInput(USAGE)
    folder, show = argv[0], int(own["show"])
    cfg = load_settings([os.path.join(folder, "config.json"), *flags])
    numbers = ("iteration", "reward", "advantage", "influence", "weight")
    rows = read_log(folder, "samples.jsonl", numbers, texts=("prompt", "completion"))
    if own["prompt"] or own["completion"]:
        print_culprits(folder, cfg, rows, own["prompt"], own["completion"], show)
        return
    if cfg.tracin == "off":
        raise BadInput(f"{folder}: a run with tracin = 'off' selects nothing; python grpo.py "
                       "config/toxicity_tracin.py does")
    scored = [row for row in rows if "influence" in row and "weight" in row]
    if len(scored) < 10:
        raise BadInput(f"{folder}/samples.jsonl: {len(scored)} rollouts with an influence, at "
                       "least 10 are needed")
    metrics = read_log(folder, "metrics.jsonl", [f"tracin/{name}" for name in OVER_TIME])
    print_logs(folder, cfg, scored, metrics, show)
    device = pick_device(cfg.device, cfg.allow_tf32, cfg.deterministic)
    with use_threads(cfg, device, threads_of(folder)):  # for the same digits
        check_arithmetic(folder, cfg, rows, own["method"], int(own["rows"]))


if __name__ == "__main__":
    run_script(main)
