"""Explains a run that selected its rollouts by influence: which helped, which hurt, and is the arithmetic right.

    python tracin.py out/toxicity_tracin [--method=ghost|brute|jvp|finite_difference] [--rows=8] [--show=5]
    python tracin.py out/toxicity_tracin --prompt="You are" --completion=" a good editor"

The second asks which rollouts of the run made the model say this: TracIn over the saved checkpoints.
"""
import contextlib
import copy
import io
import math
import os
import shutil
import tempfile
import time
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import grpo
from config import load_settings
from pretrain import get_tokenizer, policy_of
from run.device import pick_device
from run.files import load_file, read_rows
from run.script import BadInput, run_script
from tracin import adam_scale, filter_rows


def extremes(rows, z, show, names=("helpful", "harmful")):
    """Lines on the rows of samples.jsonl with the `show` highest z (n,) above 0, then with the lowest below."""
    lines, order = [], z.argsort(descending=True)
    for name, found in zip(names, (order[z[order] > 0][:show], order[z[order] < 0].flip(0)[:show])):
        lines.append(f"  most {name}" + ("" if len(found) else ": none"))
        for i in found.tolist():
            about = [f"{k} {math.nan if rows[i][k] is None else rows[i][k]:{form}}" for k, form in dict(
                iteration="", reward=".3f", advantage="+.2f", influence="+.1e", weight=".2g").items() if k in rows[i]]
            texts = (x if len(x) <= 48 else x[:45] + "..." for x in (rows[i]["prompt"], rows[i]["completion"]))
            lines.append(f"  {z[i]:+7.2f} std, {', '.join(about)}: " + "{!r} -> {!r}".format(*texts))
    return lines


def relation(x, z, kept):
    """x, z, kept (n,) -> text: correlations of x and z, then in each fifth of x the mean z and the share kept. Skips NaN."""
    def ranks(x):  # equal values share one, and so stay in one fifth
        _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
        return (counts.cumsum(0) - (counts + 1) / 2)[inverse]

    x, z, kept = (y[~x.isnan()].double() for y in (x, z, kept))
    cells = [f"{float(torch.corrcoef(torch.stack(pair))[0, 1]):+10.2f}" for pair in ((x, z), (ranks(x), ranks(z)))]
    for here in (5 * ranks(x) // len(x) == j for j in range(5)):
        cells.append(f"{z[here].mean():+8.2f} {100 * kept[here].mean():3.0f} %" if here.any() else f"{'-':>14}")
    return "".join(cells)


def history(rows, names=("positive_ratio", "selected_ratio", "self_share", "target_cosine", "invariant_error")):
    """Lines: means of tracin/ metrics in up to ten stretches of iterations; of the last one the largest value."""
    lines, n = ["  iterations  " + "".join(f"{name:>16}" for name in names)], len(rows)
    for part in filter(None, (rows[j * n // 10:(j + 1) * n // 10] for j in range(10))):
        values = [[r[f"tracin/{name}"] for r in part if r.get(f"tracin/{name}") is not None] or [math.nan] for name in names]
        lines.append(f"  {part[0]['iteration']:4} to {part[-1]['iteration']:<4}"
                     + "".join(f"{sum(v) / len(v):16.2f}" for v in values[:-1]) + f"{max(values[-1]):16.0e}")
    return lines


def row_loss(policy, weights, tokens, slope, kept, temperature):
    """Sum of slope (T,) x log-prob (T,) over a row's last T tokens under other weights {name: tensor}; no batch, no padding."""
    with sdpa_kernel(SDPBackend.MATH):  # the one that has a forward derivative
        h = torch.func.functional_call(policy, weights, tokens[None, :-1])[0, -len(slope):]                         # (T, C)
    head = "wte.weight" if policy.config.tied else "lm_head.weight"
    logits = h @ weights.get(head, policy.get_parameter(head)).T / temperature                                       # (T, V)
    logits = logits if kept is None else logits.masked_fill(~kept, -math.inf)
    return (slope * logits.log_softmax(-1).gather(1, tokens[-len(slope):, None])[:, 0]).sum()


def derivative(method, policy, D, *row):
    """<gradient of row_loss, D> for a direction D {name of a parameter: tensor}, in one of three ways."""
    weights = {k: policy.get_parameter(k).detach().requires_grad_(method == "brute") for k in D}
    if method == "brute":
        gradient = torch.autograd.grad(row_loss(policy, weights, *row), list(weights.values()))
        return float(sum((g * d).sum() for g, d in zip(gradient, D.values())))
    if method == "jvp":
        return float(torch.func.jvp(lambda w: row_loss(policy, w, *row), (weights,), (D,))[1].detach())
    eps = 1e-4 / max(float(sum(d.square().sum() for d in D.values())) ** 0.5, 1e-30)  # the weights move by 1e-4 in all
    ahead, behind = ({k: w + e * D[k] for k, w in weights.items()} for e in (eps, -eps))
    return float((row_loss(policy, ahead, *row) - row_loss(policy, behind, *row)).detach()) / (2 * eps)


def off(found, true):
    """The largest error, relative to the largest of the true values."""
    return float((found - true).abs().max() / true.abs().max().clamp(min=1e-30))


def checkpoints(folder):
    """(name, content) of those that the run left, the older first."""
    names = [name for name in ("ckpt_prev.pt", "ckpt.pt") if os.path.exists(os.path.join(folder, name))]
    return ((name, load_file(os.path.join(folder, name), "run")) for name in names)


def arithmetic(folder, name, recorded, flags, method, count):
    """Takes the first step after a checkpoint again and prints its influences beside those of samples.jsonl and, for `count`
    rollouts, beside those by another method in float64."""
    with tempfile.TemporaryDirectory() as there:  # the run goes on until it selects; in a copy, since resuming cuts the logs
        for log in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
            shutil.copy(os.path.join(folder, log), there)
        os.symlink(os.path.abspath(os.path.join(folder, name)), os.path.join(there, "ckpt.pt"))
        with (patch.object(grpo, "target_of", wraps=grpo.target_of) as target, contextlib.suppress(InterruptedError),
              patch.object(grpo, "filter_rows", side_effect=InterruptedError) as selection,
              patch.object(grpo, "report", side_effect=InterruptedError), contextlib.redirect_stdout(io.StringIO())):
            grpo.main([f"{folder}/config.json", *flags, f"--out_dir={there}", "--resume=True", "--wandb_project=None"])
    if not selection.called:
        return print(f"  no rollout of iteration {recorded[0]['iteration']} carried loss")
    policy, tape, coefficients, b, mini, held_out, _, s, dtype = target.call_args.args
    _, _, halves, own, _, optimizer, *_ = selection.call_args.args
    ghost = filter_rows(*selection.call_args.args)[1].cpu().double()
    scale = adam_scale(optimizer, tape.gradient(coefficients)) if s.tracin_adam else {}
    G = {p: (g + halves[1][p]) * scale.get(p, 1) for p, g in halves[0].items()
         if not s.tracin_layers or any(part in tape.names[p] for part in s.tracin_layers)}
    same = sum(text == r["completion"] for text, r in zip(b.completions, recorded))
    print(f"  iteration {recorded[0]['iteration']} again, from {name}: {same} of {len(recorded)} completions are those recorded"
          + ("" if same == len(recorded) else "; another device, dtype or torch? The last column says nothing"))
    if held_out is None and s.loss_type != "bnpo":  # which depends on how the rows are split
        plain, _, _ = grpo.target_of(policy, tape, coefficients, b, mini, (b, mini), False, s, dtype)
        worst = max(off(g, (plain[0][p] + plain[1][p]) * scale.get(p, 1)) for p, g in G.items())
        print(f"  gradient of the target, tape beside ordinary autograd: error {worst:.1e}")
    record, began = torch.tensor([recorded[i].get("influence") or 0.0 for i in mini.tolist()]).double(), time.time()
    tape.dot(G).tolist()
    print(f"  {'method':27}{'rollouts':>9}{'ms for each':>13}{'error of the tape':>19}{'of samples.jsonl':>18}\n"
          f"  {'ghost, after the backward':27}{len(mini):9}{1000 * (time.time() - began) / len(mini):13.2f}{'':19}"
          f"{off(record, ghost):18.1e}")
    if method == "ghost":
        return
    slopes, place = [], tape.where.argsort().tolist()  # where the tape has them
    for micro in mini[tape.where].split(s.micro_batch_size):
        loss, _, _, logp = grpo.loss_of(policy, b, micro, s, dtype, len(mini), int(b.mask[mini].sum()))
        slopes += torch.autograd.grad(loss, logp)[0].double()                                                       # (T,) each
    slopes = [slopes[i] for i in place]  # with these constants a row alone has the gradient that it has in the batch
    chosen = ghost.argsort()[torch.linspace(0, len(mini) - 1, count).long()].unique()
    double, found, spent = copy.deepcopy(policy).double(), [], []
    double.recompute = False
    for j in chosen.tolist():
        r, T = b.rollout[mini[j]], int(b.rollout.mask[mini[j]].sum())
        end, kept = len(r.tokens) - len(r.mask) + T, None if r.kept is None else r.kept[:T]
        D = G if not s.tracin_leave_one_out else {
            p: g - own[j] * scale.get(p, 1) * tape.per_row(p, [place[j]])[0] for p, g in G.items()}
        D, began = {tape.names[p]: d.double() for p, d in D.items()}, time.time()
        found.append(derivative(method, double, D, r.tokens[:end][r.real[:end]], slopes[j][:T], kept, s.temperature))
        spent.append(1000 * (time.time() - began))
    found = torch.tensor(found, dtype=torch.float64)
    print(f"  {method + ', float64':27}{len(chosen):9}{sorted(spent)[len(spent) // 2]:13.2f}{off(ghost[chosen], found):19.1e}"
          f"{off(record[chosen], found):18.1e}")


def classic(folder, s, rows, prompt, completion):
    """-> the rows recorded near the checkpoints, their TracIn score (n,) on the mean log-prob of `completion`: the sum over
    checkpoints of learning rate x weight x advantage x <its gradient, that of the row's>. Tokens are read from the text."""
    runs, tokenizer, device = [run for _, run in checkpoints(folder)], get_tokenizer(s), pick_device(s.device)
    near = sorted({min(run["iteration"] + 1, rows[-1]["iteration"]) for run in runs} if rows else {})
    rows, encode = [r for it in near for r in [r for r in rows if r["iteration"] == it][:256]], tokenizer.encode_ordinary
    asked = encode(prompt), encode(completion)
    if not rows or not all(asked) or len(asked[0] + asked[1]) > s.block_size:
        raise BadInput(f"--prompt and --completion are {len(asked[0])} and {len(asked[1])} tokens, {folder} has {len(rows)} "
                       f"rollouts by a checkpoint: none may be 0, and block_size = {s.block_size} tokens are the most")

    def as_row(prompt, completion):
        tokens, n = torch.tensor(prompt + completion, device=device), len(completion)
        return tokens, torch.full((n,), 1 / n, device=device), None, s.temperature

    scores = torch.zeros(len(rows))
    for run in runs:
        policy = policy_of(folder, run)[0].to(device)
        weights = {k: p for k, p in policy.named_parameters() if p.requires_grad}
        D = dict(zip(weights, torch.autograd.grad(row_loss(policy, weights, *as_row(*asked)), list(weights.values()))))
        for i, r in enumerate(rows):
            row = as_row(encode(r["prompt"]), (encode(r["completion"]) + [tokenizer.eot_token])[:s.max_completion_length])
            scores[i] += run["optimizer"]["param_groups"][0]["lr"] * r.get("weight", 1) * r["advantage"] * derivative(
                "brute", policy, D, *row)
    return rows, scores


def main(argv):
    own = dict(method="brute", rows="8", show="5", prompt="", completion="")
    flags = [arg for arg in argv[1:] if arg[2:].partition("=")[0] not in own]
    own |= {arg[2:].partition("=")[0]: arg.partition("=")[2] for arg in argv[1:] if arg not in flags}
    if not argv or argv[0].startswith("--") or own["method"] not in ("ghost", "brute", "jvp", "finite_difference") or not (
            own["rows"].isdecimal() and own["show"].isdecimal() and int(own["rows"])):
        raise BadInput("usage: python tracin.py out/toxicity_tracin [--method=ghost|brute|jvp|finite_difference] [--rows=8] "
                       "[--show=5] [--prompt=TEXT --completion=TEXT] [--setting=value ...]")
    folder, show, s = argv[0], int(own["show"]), load_settings([os.path.join(argv[0], "config.json"), *flags])
    rows = read_rows(os.path.join(folder, "samples.jsonl"))
    if own["prompt"] or own["completion"]:
        rows, scores = classic(folder, s, rows, own["prompt"], own["completion"])
        print(f"Which of {len(rows)} rollouts made the model say {own['completion']!r} after {own['prompt']!r}?")
        return print("\n".join(extremes(rows, scores / scores.std(), show, ("for it", "against it"))))
    if s.tracin == "off":
        raise BadInput(f"{folder}: a run with tracin = 'off' selects nothing; python grpo.py config/toxicity_tracin.py does")
    scored = [r for r in rows if r.get("influence") is not None]
    if len(scored) < 10:
        raise BadInput(f"{folder}/samples.jsonl: {len(scored)} rollouts with an influence, at least 10 are needed")
    its, z, kept = (torch.tensor([r[k] for r in scored]).double() for k in ("iteration", "influence", "weight"))
    for it in its.unique():  # scales drift in a run, so influence is told in standard deviations of its iteration
        z[its == it] /= z[its == it].std(correction=0) or 1.0
    late = its > its.max() - max(1, len(its.unique()) // 5)
    print(f"{folder}: {len(scored)} rollouts of {len(its.unique())} iterations; tracin = {s.tracin!r}, {s.tracin_select} kept")
    whole, recent = extremes(scored, z, show), extremes([r for r, x in zip(scored, late) if x], z[late], show)
    print("\n".join(["\n1. Rollouts", *whole] + (["  and of late"] + recent if recent != whole else [])))
    print("\n2. Influence against the rest; then its mean and the share kept by fifths, the lowest first\n"
          f"  {'':12}{'Pearson':>10}{'Spearman':>10}" + "".join(f"{f'fifth {j}':>14}" for j in range(1, 6)))
    encode = get_tokenizer(s).encode_ordinary
    for name in ("reward", "advantage", "tokens"):
        x = [len(encode(r["completion"])) if name == "tokens" else math.nan if r[name] is None else r[name] for r in scored]
        print(f"  {name:12}" + relation(torch.tensor(x), z, kept > 0))
    print("\n".join(["\n3. Over time", *history(read_rows(os.path.join(folder, "metrics.jsonl")))]))
    print("\n4. Is the arithmetic right? Errors are relative to the largest influence")
    for name, run in checkpoints(folder):
        recorded = [r for r in rows if r["iteration"] == run["iteration"] + 1]
        if len(recorded) == s.num_prompts * s.num_generations:
            return arithmetic(folder, name, recorded, flags, own["method"], int(own["rows"]))
    print("  no checkpoint has the rollouts of its next iteration in samples.jsonl; a save_interval below max_iters gives one")


if __name__ == "__main__":
    run_script(main)
