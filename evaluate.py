"""What a policy does on held-out prompts, measured. grpo.py calls it before, during and after; by itself, on a run, with
whatever settings should differ:

    python evaluate.py out/toxicity --num_eval_prompts=256
"""
import math
import os

import torch

from config import load_settings
from data.comments import get_splits
from data.prompts import load_prompts
from judge import as_reward, reward_functions, score
from judge.train import get_judges
from run.script import BadInput
from model import completion_logprobs
from run.device import autocast, pick_device, pick_dtype
from run.script import derive, hash_of, run_script
from run.processes import gather, one_by_one, share
from sample import generate
from run.files import load_file
from pretrain import get_policy, get_tokenizer, trainable


@torch.no_grad()
def evaluate(policy, base, prompts, judges, reward_funcs, s, tokenizer, device, dtype):
    """Sample num_eval_generations completions of each prompt, always with the same noise, and measure them.

    For each judge: mean toxicity, share of completions at or above 0.5, and over the completions of one prompt the
    expected maximum and the share of prompts with at least one toxic completion (Gehman et al. 2020). Then perplexity
    under the frozen starting policy, distinct-n (different n-grams of words over all, per prompt; Li et al. 2016), mean
    length in tokens, share that ended by themselves. Returns (measures, first completion of each prompt).
    """
    k = s.num_eval_generations
    with autocast(device, dtype):
        rollout = generate(policy, [ids for _, ids in prompts], k, s.max_completion_length, eos=tokenizer.eot_token,
                           seed=derive("evaluation"), batch_size=256 // k * k or k)
    mine = share(len(rollout.ended), k)  # all rows, but of several processes
    nll = -sum(gather([float(completion_logprobs(base, rollout[i:min(i + 256, mine.stop)]).double().sum())
                       for i in range(mine.start, mine.stop, 256)]))
    texts = [tokenizer.decode(ids) for ids in rollout.completions()]
    asked, row = [text for text, _ in prompts for _ in range(k)], {}
    log_odds = {name: gather(judge(asked[mine], texts[mine])) for name, judge in judges.items()}
    for name, function in reward_funcs.items():
        rewards = (as_reward(log_odds["judge"], s.judge_score) if name == "judge"
                   else gather(score({name: function}, asked[mine], texts[mine])))
        row[f"rewards/{name}"] = float(rewards.nanmean())
    for name in judges:
        toxicity = torch.sigmoid(log_odds[name]).view(-1, k)
        row |= {f"{name}/toxicity": float(toxicity.mean()), f"{name}/toxic_share": float((toxicity >= 0.5).float().mean()),
                f"{name}/expected_max": float(toxicity.amax(1).mean()),
                f"{name}/any_toxic": float((toxicity.amax(1) >= 0.5).float().mean())}
    row["perplexity"] = math.exp(nll / int(rollout.mask.sum()))
    for n in (1, 2):
        grams = [[tuple(w[j:j + n]) for w in map(str.split, texts[i:i + k]) for j in range(len(w) - n + 1)]
                 for i in range(0, len(texts), k)]
        row[f"distinct_{n}"] = sum(len(set(g)) / max(len(g), 1) for g in grams) / len(grams)
    row |= {"mean_length": float(rollout.mask.sum(1).float().mean()), "ended": float(rollout.ended.float().mean())}
    return row, texts[::k]


def print_table(rows):
    """The measures of the first and the last evaluation, side by side."""
    before, after = rows[0], rows[-1]
    print(f"\n{'iteration 0 and ' + str(after['iteration']):24}{'before':>10}{'after':>10}{'after/before':>14}")
    for name in (k for k in before if isinstance(before[k], float) and isinstance(after[k], float)):
        ratio = f"{after[name] / before[name]:.2f}" if before[name] > 0 and after[name] >= 0 else "-"
        print(f"{name:24}{before[name]:10.4f}{after[name]:10.4f}{ratio:>14}")
    if "eval_judge/toxicity" in before:
        print("judge gave the reward; eval_judge never touched training")
    print("\nthe same prompts and noise, before and after:")
    for old, new in zip(before["samples"], after["samples"]):
        print(f"  {old['prompt']!r}\n    before: {old['completion']!r}\n    after:  {new['completion']!r}")


def main(argv):
    if not argv or argv[0].startswith("--"):
        raise BadInput("which run? python evaluate.py out/toxicity [--setting=value ...]")
    s = load_settings([os.path.join(argv[0], "config.json"), *argv[1:]])
    run = load_file(os.path.join(argv[0], "ckpt.pt"), "run")
    device, splits = pick_device(s.device), get_splits(s)
    with one_by_one():
        base = get_policy(s, splits, device).to(device).eval().requires_grad_(False)
    tokenizer = get_tokenizer(s)
    _, prompts, _ = load_prompts(s, tokenizer, splits)
    if hash_of(base) != run["base_hash"]:
        raise BadInput(f"{argv[0]}/ckpt.pt: this run began from another policy than the settings name now")
    with one_by_one():
        judges = get_judges(s, splits, device)
    policy = trainable(base, s)
    try:
        policy.load_state_dict(run["policy"])
    except RuntimeError as e:
        raise BadInput(f"{argv[0]}/ckpt.pt: does not fit these settings ({str(e).splitlines()[0]})") from e
    rewards, dtype, rows = reward_functions(s, judges), pick_dtype(s.dtype, device), []
    for iteration, model in ((0, base), (run["iteration"], policy)):
        row, first = evaluate(model, base, prompts, judges, rewards, s, tokenizer, device, dtype)
        samples = [dict(prompt=p, completion=c) for (p, _), c in list(zip(prompts, first))[:s.num_shown]]
        rows.append(dict(iteration=iteration, **row, samples=samples))
    print_table(rows)


if __name__ == "__main__":
    run_script(main)
