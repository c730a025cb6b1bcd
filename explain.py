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
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from config import load_settings
from grpo import (collect, collect_target, draw_prompts, loss_of, micro_batches, optimizer_steps,
                  prepare, read_inputs, sort_key)
from model import completion_logprobs
from pretrain import get_tokenizer, policy_of
from run.checkpoint import load_checkpoint, set_random_state
from run.content import read_checkpoint
from run.device import pick_device
from run.files import read_rows
from run.script import BadInput, hash_of, run_script, seed_for

USAGE = ("usage: python tracin.py out/toxicity_tracin [--method=ghost|brute|jvp|finite_difference] "
         "[--rows=8] [--show=5] [--prompt=TEXT --completion=TEXT] [--setting=value ...]")
METHODS = ("ghost", "brute", "jvp", "finite_difference")

# ------------------------------------------------------------------------------------------------
# what the logs tell


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
    forms = dict(iteration="", reward=".3f", advantage="+.2f", influence="+.1e", weight=".2g")
    about = []
    for name, form in forms.items():
        if name in row:
            value = math.nan if row[name] is None else row[name]
            about.append(f"{name} {value:{form}}")
    prompt, completion = shorten(row["prompt"]), shorten(row["completion"])
    return f"  {z:+7.2f} std, {', '.join(about)}: {prompt!r} -> {completion!r}"


def shorten(text):
    return text if len(text) <= 48 else text[:45] + "..."


def relation(x, z, kept):
    """x, z, kept (n,) -> text: correlations of x and z, then by fifths of x the mean z and the
    share kept. NaN is skipped."""
    known = ~x.isnan()
    x, z, kept = x[known].double(), z[known].double(), kept[known].double()
    cells = [f"{correlation(x, z):+10.2f}", f"{correlation(ranks(x), ranks(z)):+10.2f}"]
    fifth = 5 * ranks(x) // len(x)
    for j in range(5):
        here = fifth == j
        cell = f"{'-':>14}"
        if here.any():
            cell = f"{z[here].mean():+8.2f} {100 * kept[here].mean():3.0f} %"
        cells.append(cell)
    return "".join(cells)


def correlation(x, y):
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def ranks(x):
    """Rank of each value; equal values share one, and so stay in one fifth."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts + 1) / 2)[inverse]


OVER_TIME = ("positive_ratio", "selected_ratio", "self_share", "target_cosine", "invariant_error")


def history(rows):
    """Lines: means of tracin/ metrics over ten stretches of iterations; the largest of the last."""
    lines = ["  iterations  " + "".join(f"{name:>16}" for name in OVER_TIME)]
    n = len(rows)
    for j in range(10):
        part = rows[j * n // 10:(j + 1) * n // 10]
        if not part:
            continue
        cells = ""
        for name in OVER_TIME:
            values = [row.get(f"tracin/{name}") for row in part]
            values = [v for v in values if v is not None] or [math.nan]
            if name == "invariant_error":
                cells += f"{max(values):16.0e}"
            else:
                cells += f"{sum(values) / len(values):16.2f}"
        lines.append(f"  {part[0]['iteration']:4} to {part[-1]['iteration']:<4}{cells}")
    return lines


def print_logs(folder, cfg, scored, show):
    """Sections 1 to 3: the rollouts, influence against the rest, the metrics over time."""
    its, z, kept = (torch.tensor([row[name] for row in scored]).double()
                    for name in ("iteration", "influence", "weight"))
    for it in its.unique():     # scales drift in a run: count in the iteration's own deviations
        z[its == it] /= z[its == it].std(correction=0) or 1.0
    num_iterations = len(its.unique())
    print(f"{folder}: {len(scored)} rollouts of {num_iterations} iterations; tracin = "
          f"{cfg.tracin!r}, {cfg.tracin_select} kept")

    print("\n1. Rollouts")
    late = its > its.max() - max(1, num_iterations // 5)
    whole = extremes(scored, z, show)
    recent = extremes([row for row, is_late in zip(scored, late) if is_late], z[late], show)
    print("\n".join(whole))
    if recent != whole:
        print("\n".join(["  and of late", *recent]))

    print("\n2. Influence against the rest; then its mean and the share kept by fifths, the "
          "lowest first")
    fifths = "".join(f"{f'fifth {j}':>14}" for j in range(1, 6))
    print(f"  {'':12}{'Pearson':>10}{'Spearman':>10}{fifths}")
    encode = get_tokenizer(cfg).encode_ordinary
    columns = {name: [math.nan if row[name] is None else row[name] for row in scored]
               for name in ("reward", "advantage")}
    columns["tokens"] = [len(encode(row["completion"])) for row in scored]
    for name, x in columns.items():
        print(f"  {name:12}" + relation(torch.tensor(x), z, kept > 0))

    print("\n3. Over time")
    print("\n".join(history(read_rows(os.path.join(folder, "metrics.jsonl")))))


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
    return (slope * logits.log_softmax(-1).gather(1, targets)[:, 0]).sum()


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
    with contextlib.redirect_stdout(io.StringIO()):     # what a run says of its models
        nets = prepare(cfg, read_inputs(cfg))
    load_checkpoint(checkpoint, path, nets, cfg, hash_of(nets.base))
    set_random_state(checkpoint["random"])
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
    if target is None and cfg.loss_type != "bnpo":      # which depends on how the rows are split
        halves, _, _ = influence.target_gradient((batch, step.rows))
        plain = {p: (halves[0][p] + halves[1][p]) * scored.scale.get(p, 1) for p in scored.G}
        worst = max(error(g, plain[p]) for p, g in scored.G.items())
        print(f"  gradient of the target, tape beside ordinary autograd: error {worst:.1e}")

    record = [recorded[i].get("influence") or 0.0 for i in step.rows.tolist()]
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
    print(f"  {method + ', float64':27}{len(chosen):9}{each:13.2f}"
          f"{error(ghost[chosen], found):19.1e}{error(record[chosen], found):18.1e}")


def by_method(method, nets, batch, step, cfg, scored, pieces, chosen):
    """Influence of the chosen rows by another method in float64, and the median time in ms."""
    slopes = {}     # with these constants a row alone has the gradient that it has in the batch
    for positions in pieces:
        rows = step.rows[positions]
        out = loss_of(nets, nets.policy, batch, rows, step, cfg, logprobs=completion_logprobs)
        slope, = torch.autograd.grad(out.loss, out.logp)
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


def classic(folder, cfg, rows, prompt, completion):
    """The rows recorded near the checkpoints and their TracIn scores (n,) on the mean log-prob of
    `completion`: the sum over checkpoints of learning rate x weight x advantage x <its gradient,
    that of the row's log-prob>. Tokens are read from the text."""
    runs = [run for _, run in checkpoints(folder)]
    tokenizer = get_tokenizer(cfg)
    encode = tokenizer.encode_ordinary
    device = pick_device(cfg.device)
    last = rows[-1]["iteration"] if rows else 0
    near = sorted({min(run["iteration"] + 1, last) for run in runs})
    rows = [row for it in near for row in [r for r in rows if r["iteration"] == it][:256]]
    prompt, completion = encode(prompt), encode(completion)
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
        weights = {k: p for k, p in policy.named_parameters() if p.requires_grad}
        loss = row_loss(policy, weights, *as_row(prompt, completion))
        D = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        rate = run["optimizer"]["param_groups"][0]["lr"]
        for i, r in enumerate(rows):
            ids = (encode(r["completion"]) + [tokenizer.eot_token])[:cfg.max_completion_length]
            product = derivative("brute", policy, D, *as_row(encode(r["prompt"]), ids))
            scores[i] += rate * r.get("weight", 1) * r["advantage"] * product
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
    rows = read_rows(os.path.join(folder, "samples.jsonl"))
    if own["prompt"] or own["completion"]:
        print_culprits(folder, cfg, rows, own["prompt"], own["completion"], show)
        return
    if cfg.tracin == "off":
        raise BadInput(f"{folder}: a run with tracin = 'off' selects nothing; python grpo.py "
                       "config/toxicity_tracin.py does")
    scored = [row for row in rows if row.get("influence") is not None]
    if len(scored) < 10:
        raise BadInput(f"{folder}/samples.jsonl: {len(scored)} rollouts with an influence, at "
                       "least 10 are needed")
    print_logs(folder, cfg, scored, show)
    check_arithmetic(folder, cfg, rows, own["method"], int(own["rows"]))


if __name__ == "__main__":
    run_script(main)
