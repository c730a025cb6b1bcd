"""Draft of the script half of tracin.py. To append it: the imports go to the top, these lines away."""
import copy
import math
import os
import time
from dataclasses import replace

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracin import Tape, adam_scale, choose_targets

# ---------------------------------------------------------------------------------------------------------------
# the script: explains a run. It alone uses the rest of the project, imported where it is needed


def one_line(score, r):
    """A rollout in one line, after what is said about it."""
    texts = (x if len(x) <= 48 else x[:45] + "..." for x in (r["prompt"], r["completion"]))
    return (f"  {score}, iteration {r['iteration']}, reward {math.nan if r['reward'] is None else r['reward']:.3f}, advantage "
            f"{r['advantage']:+.2f}, " + (f"weight {r['weight']:.2g}, " if "weight" in r else "") + "{!r} -> {!r}".format(*texts))


def extremes(rows, z, show):
    """Lines: the `show` rollouts of highest and of lowest z (n,), their influence in standard deviations of its iteration."""
    order = z.argsort(descending=True)
    found = {"helpful": order[z[order] > 0][:show], "harmful": order[z[order] < 0].flip(0)[:show]}
    return [line for name, best in found.items() for line in [f"  most {name}" + ("" if len(best) else ": none")] + [
        "  " + one_line(f"{z[i]:+6.2f} std, influence {rows[i]['influence']:+.1e}", rows[i]) for i in best.tolist()]]


def relation(x, z, kept):
    """x, z, kept (n,) -> correlations of x and z, then in each fifth of x the mean z and the share kept. Skips NaN in x."""
    def ranks(x):  # equal values share one, and so stay in one fifth
        _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
        return (counts.cumsum(0) - (counts + 1) / 2)[inverse]

    x, z, kept = (y[~x.isnan()].double() for y in (x, z, kept))
    pairs, fifth = ((x, z), (ranks(x), ranks(z))), (5 * ranks(x) / len(x)).long()
    cells = [f"{float(torch.corrcoef(torch.stack(pair))[0, 1]):+.2f}" for pair in pairs] + [
        f"{z[here].mean():+.2f} ({100 * kept[here].mean():.0f} %)" if here.any() else "-" for here in (fifth == j for j in range(5))]
    return "".join(f"{cell:>{10 if j < 2 else 15}}" for j, cell in enumerate(cells)).replace("+nan", "   -")


def history(rows, names=("positive_ratio", "selected_ratio", "self_share", "target_cosine", "invariant_error")):
    """Lines: means over ten stretches of iterations of some tracin/ metrics, of the invariant's error the largest."""
    lines, rows = ["  iterations" + "".join(f"{name:>17}" for name in names)], [r for r in rows if "tracin/positive_ratio" in r]
    for part in torch.arange(len(rows)).tensor_split(min(10, len(rows))):
        some = [rows[i] for i in part.tolist()]
        values = {name: [r[f"tracin/{name}"] for r in some if r[f"tracin/{name}"] is not None] for name in names}
        cells = [f"{max(v):.0e}" if name == names[-1] else f"{sum(v) / len(v):.2f}" if v else "-" for name, v in values.items()]
        lines.append(f"  {some[0]['iteration']:>4} - {some[-1]['iteration']:<3}" + "".join(f"{cell:>17}" for cell in cells))
    return lines


class RowLoss(nn.Module):
    """The part of one rollout in the loss, by itself, as a function of the weights: no batch, no padding. slope (T,): the
    derivative of the loss by each log-prob at the weights that sampled, so that the gradient there is the one of the run."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, tokens, slope, kept, temperature):
        logits = self.policy.lm_head(self.policy(tokens[None, :-1])[0, -len(slope):]) / temperature                 # (T, V)
        logits = logits if kept is None else logits.masked_fill(~kept, -math.inf)
        return (slope * logits.log_softmax(-1).gather(1, tokens[-len(slope):, None])[:, 0]).sum()


def derivative(method, loss, weights, D):
    """<gradient of loss, D> for loss({name: weight}) -> scalar and a direction D {name: tensor}, in one of three ways."""
    if method == "brute":
        return sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss(weights), list(weights.values())), D.values()))
    if method == "jvp":
        return torch.func.jvp(loss, (weights,), (D,))[1]
    eps = 1e-4 / max(float(sum(d.square().sum() for d in D.values())) ** 0.5, 1e-30)  # in all the weights move by 1e-4
    with torch.no_grad():
        ahead, behind = (loss({k: w + step * D[k] for k, w in weights.items()}) for step in (eps, -eps))
    return (ahead - behind) / (2 * eps)


def open_run(s):
    """-> tokenizer, splits, the starting policy, and a function: path of a checkpoint -> (what it holds, the policy in it)."""
    from grpo import BadInput, add_lora, get_policy, hash_of, load_comments, load_tokenizer, pick_device, split_comments
    from model import load_file
    splits = split_comments(load_comments(s.comments, s.text_field, s.label_field))
    base = get_policy(s, splits, pick_device(s.device)).to(pick_device(s.device)).eval().requires_grad_(False)

    def load(path):
        run, policy = load_file(path, "run"), copy.deepcopy(base).requires_grad_(True)
        policy = add_lora(policy, s.lora_rank, s.lora_alpha, s.lora_layers) if s.lora_rank else policy
        try:
            policy.load_state_dict(run["policy"])
        except RuntimeError as e:
            raise BadInput(f"{path}: does not fit these settings ({str(e).splitlines()[0]})") from e
        if run["base_hash"] != hash_of(base):
            raise BadInput(f"{path}: this run began from another policy than the settings name now")
        return run, policy

    return load_tokenizer(s.vocab_size), splits, base, load


def step_again(folder, s, rows, method, count):
    """Lines: the first optimiser step after a checkpoint, from its seeds. Its influences beside those of samples.jsonl, and
    beside those of `count` rollouts by another method, in float64."""
    from grpo import (collect, derive, get_judges, load_prompts, loss_of, one_backward, pick, pick_dtype, reward_functions, target_of,
                      zero_spread)
    tokenizer, splits, reference, load = open_run(s)
    for name in ("ckpt_prev.pt", "ckpt.pt"):
        run, policy = load(os.path.join(folder, name)) if os.path.exists(os.path.join(folder, name)) else (None, None)
        recorded = [r for r in rows if run and r["iteration"] == run["iteration"] + 1]
        if len(recorded) == s.num_prompts * s.num_generations:
            break
    else:
        return ["  no checkpoint has its next iteration in samples.jsonl: a run needs save_interval below max_iters for this"]
    if run["reference"]:
        reference = copy.deepcopy(policy).requires_grad_(False)
        reference.load_state_dict(run["reference"])
    it, device, dtype = run["iteration"], policy.wte.weight.device, pick_dtype(s.dtype, policy.wte.weight.device)
    prompts, _, val_prompts = load_prompts(s, tokenizer, splits)
    b = collect(policy, reference, pick(prompts, it, s), {"recorded": lambda *_: [r["reward"] for r in recorded]},
                replace(s, reward_weights=(1.0,)), tokenizer, derive(s.seed, "rollout", it), dtype)
    same = sum(text == r["completion"] for text, r in zip(b.completions, recorded))
    held_out = None
    if s.tracin_val_prompts:
        t = collect(policy, reference, pick(val_prompts, it, replace(s, num_prompts=s.tracin_val_prompts)),
                    reward_functions(s, get_judges(s, splits, device)), s, tokenizer, derive(s.seed, "target", it), dtype)
        held_out = t, choose_targets(t.rewards, s.tracin_val_size, s.tracin_val_select,
                                     torch.Generator().manual_seed(derive(s.seed, "chosen", it))).to(device)
    mini = torch.arange(len(recorded), device=device)
    if s.zero_std_groups == "drop":
        mini = mini[~zero_spread(b.rewards.view(-1, s.num_generations)).repeat_interleave(s.num_generations).to(device)]
    if 0 < s.mini_batch_size < len(recorded):
        shuffle = torch.Generator().manual_seed(derive(derive(s.seed, "rows", it), 0))
        mini = mini[torch.randperm(len(mini), generator=shuffle).to(device)][:s.mini_batch_size]
    tokens = int(b.mask[mini].sum())
    lines = [f"  iteration {it + 1} again, from {name}: {same} of {len(recorded)} completions are those recorded; advantages differ by "
             f"{max(abs(x - r['advantage']) for x, r in zip(b.advantages.tolist(), recorded)):.0e}"
             + ("" if same == len(recorded) else "; with another device or torch, leave the last column aside")]
    if not tokens:
        return lines + ["  no rollout of its first step carried loss"]

    began, slopes, unit = time.time(), [], one_backward(s, b)
    with Tape(policy) as tape:  # as grpo.update does it
        for micro in mini.split(s.micro_batch_size):
            tape.rows(len(micro), b.rollout.mask[micro].nonzero()[:, 0])
            loss, _, _, logp = loss_of(policy, b, micro, s, dtype, len(mini), tokens)
            slopes.append(torch.autograd.grad(loss, logp, retain_graph=True)[0])
            ((logp * b.mask[micro]).sum() if unit else loss).backward()
    slopes = torch.cat(slopes)                                                                                      # (n, T)
    coefficients = slopes.sum(1) / b.mask[mini].sum(1).clamp(min=1) if unit else torch.ones(len(mini), device=device)
    halves, own, _ = target_of(policy, tape, coefficients, b, mini, held_out, unit, s, dtype)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], betas=(s.adam_beta1, s.adam_beta2))
    optimizer.load_state_dict(run["optimizer"])
    scale = adam_scale(optimizer) if s.tracin_adam else {}
    G = {p: (g + halves[1][p]) * scale.get(p, 1) for p, g in halves[0].items()
         if not s.tracin_layers or any(part in tape.names[p] for part in s.tracin_layers)}
    ghost = coefficients * tape.dot(G)
    if s.tracin_leave_one_out:
        ghost = ghost - coefficients * own * tape.norms(range(len(mini)), scale, G).to(ghost)
    ghost, spent = ghost.cpu().double(), time.time() - began

    def off(found, true):
        return f"{float((found - true).abs().max() / true.abs().max().clamp(min=1e-30)):.1e}"

    if held_out is None and s.loss_type != "bnpo":  # bnpo depends on how the target is split
        plain, _, _ = target_of(policy, tape, coefficients, b, mini, (b, mini), False, s, dtype)
        lines.append("  target gradient, tape against ordinary autograd: error "
                     + max((off(g * scale.get(p, 1), plain[0][p] * scale.get(p, 1) + plain[1][p]) for p, g in G.items()), key=float))
    return lines
