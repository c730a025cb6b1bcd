"""
Explains a run that selected its rollouts by influence: which helped, which hurt, which words, and
is the arithmetic right.

    python tracin.py out/toxicity_tracin [--method=ghost|brute|jvp|finite_difference] [--rows=8]
                                         [--show=5]
    python tracin.py out/toxicity_tracin --html             # writes influence.html there
    python tracin.py out/toxicity_tracin --token=" you"     # where was this word pushed?
    python tracin.py out/toxicity_tracin --prompt="You are" --completion=" a good editor"

The last asks which rollouts made the model say this: TracIn over the saved checkpoints.
"""
import contextlib
import copy
import io
import math
import os
import re
import textwrap
import time
from typing import Any, NamedTuple

import torch

from config import load_settings
from data.chat import encode_prompt
from data.prompts import draw_prompts, field_of
from data.tokenizer import end_tokens
import grpo
from grpo import collect, loss_of, micro_batches, optimizer_steps
from sample import completion_logprobs
from pretrain import get_tokenizer, policy_of
from run.build import prepare, read_inputs
from run.checkpoint import load_checkpoint, set_random_state
from run.device import pick_device
from run.files import load_file, read_rows, replacing
from run.findings import (OVER_TIME, best_and_worst, extremes, history, logs_of, relations,
                          sentences_of, shorten)
from run.metrics import bound_of, is_exact
from run.page import MEASURES, METRICS, page, visible, words_section
from selection import collect_target
from run.script import BadInput, hash_of, run_script, seed_for
from run.words import (Row, derivative, logprob_changes, pieces_of, places_of, row_alone,
                       row_logprobs)

USAGE = ("usage: python tracin.py out/toxicity_tracin [--method=ghost|brute|jvp|finite_difference] "
         "[--rows=8] [--show=5] [--html] [--token=TEXT] [--prompt=TEXT --completion=TEXT] "
         "[--setting=value ...]")
METHODS = ("ghost", "brute", "jvp", "finite_difference")
UNIT = "standard deviations of the iteration"

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


def print_logs(folder, cfg, logs, show):
    """The sentences, then sections 1 to 3: rollouts, influence against the rest, over time."""
    print(f"{about_logs(folder, cfg, logs)}\n")
    for text in sentences_of(logs):
        print(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  "))

    print("\n1. Rollouts")
    num_iterations = len(logs.its.unique())
    late = logs.its > logs.its.max() - max(1, num_iterations // 5)
    whole = extremes(logs.rows, logs.z, show)
    recent = [row for row, is_late in zip(logs.rows, late) if is_late]
    recent = extremes(recent, logs.z[late], show)
    print("\n".join(whole))
    if recent != whole:
        print("\n".join(["  and of late", *recent]))

    print("\n2. Influence against the rest, each less its mean in the iteration: rank correlation; "
          "then by\n   fifths, the lowest first, mean influence and share kept")
    print("\n".join(relations(logs.z, logs.kept, logs.columns)))

    print("\n3. Over time")
    print("\n".join(history(logs.metrics)))


def about_logs(folder, cfg, logs):
    return (f"{folder}: {len(logs.rows)} rollouts of {len(logs.its.unique())} iterations; tracin = "
            f"{cfg.tracin!r}, {cfg.tracin_select} kept\n"
            "Influence is counted in standard deviations of its iteration; above 0 is helpful, "
            "below it harmful.")


# ------------------------------------------------------------------------------------------------
# a step taken again


def error(found, true):
    """The largest error, relative to the largest of the true values."""
    return float((found - true).abs().max() / true.abs().max().clamp(min=1e-30))


def checkpoints(folder):
    """(name, content) of those that the run left, the older first."""
    for name in ("ckpt_prev.pt", "ckpt.pt"):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            yield name, load_file(path, "run")


class Again(NamedTuple):
    """The first step after a checkpoint, taken again."""
    nets: Any           # grpo.Nets, with the step on the tape
    batch: Any          # grpo.Batch
    step: Any           # grpo.Step
    target: Any         # held-out rollouts, or None
    pieces: list        # the positions of its micro-batches
    scored: Any         # tracin.Scored
    recorded: list      # rows of samples.jsonl, those of the batch


def take_again(folder, cfg, rows):
    """Again, and a line about it; None, and why, where there is nothing to go on from."""
    for name, checkpoint in checkpoints(folder):
        it = checkpoint["iteration"]
        recorded = [row for row in rows if row["iteration"] == it + 1]
        if len(recorded) != cfg.num_prompts * cfg.num_generations:
            continue
        nets, batch, target = rollouts_after(os.path.join(folder, name), checkpoint, cfg)
        step = next(optimizer_steps(batch, cfg, seed_for(cfg.seed, "rows", it)), None)
        if step is None:
            return None, f"no rollout of iteration {it + 1} carried loss"
        pieces = list(micro_batches(batch.lengths[step.rows], cfg))
        with nets.influence.record(batch, step, on_policy=True):
            for positions in pieces:
                nets.influence.forward_backward(positions)
        scored = nets.influence.score(target)
        again = Again(nets, batch, step, target, pieces, scored, recorded)
        same = sum(is_recorded(again, i) for i in range(len(recorded)))
        note = "" if same == len(recorded) else (
            "; another device, dtype or torch? The record is not of these")
        return again, (f"iteration {it + 1} again, from {name}: {same} of {len(recorded)} "
                       f"completions are those recorded{note}")
    return None, ("no checkpoint has the rollouts of its next iteration in samples.jsonl; a "
                  "save_interval below max_iters gives one")


def is_recorded(again, i):
    return again.batch.completions[i] == again.recorded[i]["completion"]


def rollouts_after(path, checkpoint, cfg):
    """(nets, Batch, target) of the iteration that follows a checkpoint."""
    with contextlib.redirect_stdout(io.StringIO()) as said:     # what a run says of its models
        nets = prepare(cfg, read_inputs(cfg), grpo)
    print(*re.findall("note: .*\n", said.getvalue()), sep="", end="")
    load_checkpoint(checkpoint, path, nets, cfg, hash_of(nets.base))
    set_random_state(checkpoint["random"], nets.device)
    it = checkpoint["iteration"]
    prompts = draw_prompts(nets.prompts, it, cfg.num_prompts, cfg.seed)
    batch = collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", it))
    return nets, batch, collect_target(nets, it, cfg, collect)


def slopes_of(again, cfg):
    """{position in the step: d loss / d log-prob of its tokens (T,)}, in float64, of the part of
    the loss that is scored. With these constants a row alone has the gradient that it has in the
    batch."""
    slopes = {}
    for positions in again.pieces:
        rows = again.step.rows[positions]
        out = loss_of(again.nets, again.nets.policy, again.batch, rows, again.step, cfg)
        slope, = torch.autograd.grad(out.policy, out.logp)
        slopes |= dict(zip(positions.tolist(), slope.double()))
    return slopes


def direction_for(again, cfg, j):
    """What the row at position j of the step is scored against: {name: tensor} in float64."""
    tape = again.nets.influence.tape
    scored = again.scored
    D = scored.G
    if cfg.tracin_leave_one_out:
        own = tape.gradient(torch.arange(tape.n, device=scored.self_coef.device) == j)
        D = {p: g - scored.self_coef[j] * scored.scale.get(p, 1) * own[p] for p, g in D.items()}
    return {tape.names[p]: d.double() for p, d in D.items()}


def in_float64(policy):
    policy = copy.deepcopy(policy).double()
    policy.recompute = False
    return policy


# ------------------------------------------------------------------------------------------------
# is the arithmetic right?


def check_arithmetic(again, about, cfg, method, count):
    """Section 4: the influences of the step that was taken again beside those of samples.jsonl and,
    for `count` rollouts, beside those by another method in float64."""
    print("\n4. Is the arithmetic right? Errors are relative to the largest influence")
    if more_than_logprobs(cfg) and method != "ghost":
        print(f"  {more_than_logprobs(cfg)}: {method} knows log-probs only: left out")
        method = "ghost"
    print(f"  {about}")
    if again is None:
        return
    nets, batch, step, target, _, scored, _ = again
    influence = nets.influence
    ghost = scored.scores.cpu().double()
    if target is None and cfg.loss_type != "bnpo":      # which depends on how the rows are split
        halves, _ = influence.target_gradient((batch, step.rows))
        worst = max(error(sum(half[p] for half in scored.halves), sum(half[p] for half in halves))
                    for p in scored.G)
        print(f"  gradient of the target, tape beside ordinary autograd: error {worst:.1e}")

    record = [again.recorded[i].get("influence", 0.0) for i in step.rows.tolist()]
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
    found, each = by_method(method, again, cfg, chosen.tolist())
    errors = {"the tape": error(ghost[chosen], found),
              "samples.jsonl": error(record[chosen], found)}
    print(f"  {method + ', float64':27}{len(chosen):9}{each:13.2f}"
          f"{errors['the tape']:19.1e}{errors['samples.jsonl']:18.1e}")
    bound = bound_of(is_exact(nets, cfg))
    wrong = " and ".join(name for name, x in errors.items() if not x < bound)
    verdict = f"No: {method} contradicts {wrong}" if wrong else f"Yes: {method} agrees with both"
    print(f"  {verdict}.")


def more_than_logprobs(cfg):
    """The setting that makes more of a scored loss than the log-probs of its tokens, or ""."""
    return ""


def by_method(method, again, cfg, chosen):
    """Influence of the chosen rows by another method in float64, and the median time in ms."""
    slopes = slopes_of(again, cfg)
    policy = in_float64(again.nets.policy)
    found, spent = [], []
    for j in chosen:
        row = row_alone(again.batch.rollout, again.step.rows[j], cfg.temperature)
        D = direction_for(again, cfg, j)
        began = time.time()
        found.append(derivative(method, policy, D, row, slopes[j][:len(row.chosen)]))
        spent.append(1000 * (time.time() - began))
    return torch.tensor(found, dtype=torch.float64), sorted(spent)[len(spent) // 2]


# ------------------------------------------------------------------------------------------------
# which words


def words_of(again, cfg, chosen):
    """{position in the step: the row's Pieces}, for the chosen positions."""
    slopes = slopes_of(again, cfg)
    policy = in_float64(again.nets.policy)
    tokenizer = again.nets.tokenizer
    words = {}
    for j in chosen:
        row = row_alone(again.batch.rollout, again.step.rows[j], cfg.temperature)
        change = logprob_changes(policy, direction_for(again, cfg, j), row)
        influence = slopes[j][:len(change)] * change / unit_of(again)
        words[j] = pieces_of(row, influence, change, tokenizer, end_tokens(tokenizer))
    return words


def unit_of(again):
    """What influences are counted in, as in the logs: their standard deviation."""
    return float(again.scored.scores.double().std(correction=0)) or 1.0


def about_words(about, cfg):
    """The line on the step, and what a reader of its words has to know."""
    more = more_than_logprobs(cfg)
    if more:
        about += f"; {more}: the tokens have the part of their log-probs only"
    if cfg.critic:
        about += "; critic = True: each token has its own advantage, their mean is shown"
    return about


def print_token(again, about, cfg, word):
    """Where a text was pushed up or down, in the step that was taken again."""
    print(about_words(about, cfg))
    if again is None:
        return
    rows = again.step.rows.tolist()
    having = [j for j, i in enumerate(rows) if word in again.batch.completions[i]]
    words = words_of(again, cfg, having)
    found = [(place, again.recorded[rows[j]]) for j in having
             for place in places_of(word, words[j])]
    if any(place.exact for place, _ in found):      # " you" is a token, and a part of " your"
        found = [(place, row) for place, row in found if place.exact]
    if not found:
        print(f"{word!r} occurs in none of the {len(rows)} completions that were scored.")
        return
    up = sum(place.change < 0 for place, _ in found)
    total = sum(place.influence for place, _ in found)
    print(f"{word!r} in {len(found)} places: a step on the target pushes it up in {up}, down in "
          f"{len(found) - up}.\nIts influence is {total:+.4f} {UNIT} in all: above 0\nwhere the "
          "rollout, by its advantage, pushes it the same way as the target.\n\n"
          f"  {'influence':>9}{'advantage':>11}  target")
    for place, row in sorted(found, key=lambda one: -one[0].influence):
        print(f"  {place.influence:+9.4f}{row.get('advantage', math.nan):+11.2f}  "
              f"{'up' if place.change < 0 else 'down':6}  {shorten(row['prompt'])!r} -> "
              f"{place.text!r}")


def write_page(folder, cfg, logs, again, about, show):
    """Writes influence.html; returns its path."""
    words = f"<p>{visible(about)}</p>"
    if again is not None:
        words = words_section(about_words(about, cfg), cards_of(again, cfg, show), UNIT)
    rows = [row | {"z": z} for row, z in zip(logs.rows, logs.z.tolist())]
    evaluations = []
    if os.path.exists(os.path.join(folder, "eval.jsonl")):
        evaluations = read_log(folder, "eval.jsonl", MEASURES)
    text = page(f"Influence: {folder}", about_logs(folder, cfg, logs).replace("\n", ". "),
                sentences_of(logs), words, rows, logs.metrics, evaluations)
    path = os.path.join(folder, "influence.html")
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(text)
    return path


def cards_of(again, cfg, show):
    """What the page shows of the most helpful and harmful rows: see run.page.words_section."""
    z = again.scored.scores.cpu().double() / unit_of(again)
    best, worst = best_and_worst(z, show)
    words = words_of(again, cfg, best + worst)
    cards = {}
    for heading, places in (("Most helpful", best), ("Most harmful", worst)):
        cards[heading] = []
        for j in places:
            i = int(again.step.rows[j])
            row = again.recorded[i]
            if not is_recorded(again, i):       # what is known of another completion is no use
                row = {"prompt": row["prompt"]}
            cards[heading].append((row, float(z[j]), words[j]))
    return cards


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
    device = pick_device(cfg.device)
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
        chosen = torch.ones(len(completion), dtype=torch.bool, device=device)
        tokens = torch.tensor(prompt + completion, device=device)
        return Row(tokens, chosen, None, cfg.temperature)

    scores = torch.zeros(len(rows))
    for run in runs:
        policy = policy_of(folder, run)[0].to(device)
        policy.value_head = None        # no part of a log-prob
        weights = {k: p for k, p in policy.named_parameters() if p.requires_grad}
        loss = row_logprobs(policy, weights, as_row(prompt, completion)).mean()
        D = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        rate = run["optimizer"]["param_groups"][0]["lr"]
        for i, r in enumerate(rows):
            ids = (encode(r["completion"]) + [tokenizer.eot_token])[:cfg.max_completion_length]
            _, read = encode_prompt(tokenizer, asked_of(r, cfg), f"{folder}: a prompt")
            product = derivative("brute", policy, D, as_row(read, ids), 1 / len(ids))
            scores[i] += rate * r.get("weight", 1) * r.get("advantage", 0) * product
    return rows, scores


def main(argv):
    own = dict(method="brute", rows="8", show="5", prompt="", completion="", token=None)
    html = "--html" in argv[1:]
    flags = []
    for arg in argv[1:]:
        name, _, value = arg[2:].partition("=")
        if name in own:
            own[name] = value
        elif arg != "--html":
            flags.append(arg)
    numbers = own["rows"].isdecimal() and own["show"].isdecimal() and int(own["rows"]) > 0
    if (not argv or argv[0].startswith("--") or own["method"] not in METHODS or not numbers
            or own["token"] == ""):
        raise BadInput(USAGE)
    if sum([html, own["token"] is not None, bool(own["prompt"] or own["completion"])]) > 1:
        raise BadInput("--html, --token and --prompt ask different questions: ask one at a time")
    folder, show = argv[0], int(own["show"])
    cfg = load_settings([folder, *flags])
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
    if not own["token"]:
        metrics = read_log(folder, "metrics.jsonl", [f"tracin/{x}" for x in OVER_TIME] + METRICS)
        logs = logs_of(scored, metrics, get_tokenizer(cfg).encode_ordinary)
        print_logs(folder, cfg, logs, show)
    device = pick_device(cfg.device)
    if True:
        again, about = take_again(folder, cfg, rows)
        if own["token"]:
            print_token(again, about, cfg, own["token"])
            return
        check_arithmetic(again, about, cfg, own["method"], int(own["rows"]))
        if html:
            path = write_page(folder, cfg, logs, again, about, show)
            print(f"\n{path}: open it in a browser")


if __name__ == "__main__":
    run_script(main)
