"""
What a policy does on held-out prompts, measured. grpo.py calls this before, during and after a run;
by itself it measures a run again, with whatever settings should differ:

    python evaluate.py out/toxicity --num_eval_prompts=256
"""
import math

from common.script import BadInput, hash_of, run_script, seed_for   # before torch: sets its threads

import torch

from config import load_settings
from data.tokenizer import end_tokens
from judge import as_reward
from judge.rewards import score
from judge.scorer import says_nothing
from judge.train import get_judges
from pretrain import get_policy
from run.build import build, read_inputs
from run.checkpoint import read_newest
from run.metrics import call_metrics
from run.report import print_table
from common.device import autocast
from common.files import load_weights
from common.processes import all_gather, all_gather_rollout, shard
from rollout import completion_logprobs, concatenate

NUM_SHOWN = 4   # completions that are printed
AT_ONCE = 64    # completions that are sampled or scored together: memory


@torch.no_grad()
def evaluate(nets, policy, cfg):
    """Samples num_eval_generations completions of each prompt, always with the same noise, at
    temperature 1, and measures them -> (measures, the first completions beside their prompts).

    Perplexity and the KL per token (k3) are those under the frozen starting policy.
    """
    k = cfg.num_eval_generations
    rollout = sample_evaluation(nets, policy, cfg)
    ids = rollout.completions(end_tokens(nets.tokenizer))
    completions = [nets.tokenizer.decode(row) for row in ids]
    asked = [prompt for prompt in nets.eval_prompts for _ in range(k)]
    prompts = [prompt.text for prompt in asked]
    mine = shard(len(completions), k)
    log_odds = {name: all_gather(judge(prompts[mine], completions[mine]))           # (N,)
                for name, judge in nets.judges.items()}
    measures = {}
    for name, function in nets.reward_funcs.items():
        if name == "judge":     # it has been asked above
            silent = torch.tensor([says_nothing(text) for text in completions])
            rewards = as_reward(log_odds["judge"], cfg.judge_score).masked_fill(silent, math.nan)
        else:
            rewards = all_gather(score({name: function}, asked[mine], completions[mine]))
        measures[f"rewards/{name}"] = float(rewards.nanmean())
    measures |= call_metrics(completions, cfg)
    for name in nets.judges:
        measures |= toxicity_measures(name, torch.sigmoid(log_odds[name]).view(-1, k))
    measures["perplexity"], measures["kl"] = perplexity_under(nets.base, rollout, k)
    measures["distinct_1"] = distinct(ids, k, 1)
    measures["distinct_2"] = distinct(ids, k, 2)
    measures["mean_length"] = float(rollout.sampled_mask.sum(1).float().mean())
    measures["ended"] = float(rollout.ended.float().mean())
    measures["says_nothing"] = sum(map(says_nothing, completions)) / len(completions)
    samples = [dict(prompt=prompts[i], completion=completions[i])
               for i in range(0, len(prompts), k)[:NUM_SHOWN]]
    return measures, samples


def sample_evaluation(nets, policy, cfg):
    prompts = nets.eval_prompts
    eos = end_tokens(nets.tokenizer)
    with autocast(nets.device, nets.dtype):
        rollout = nets.generate(
            policy, [prompt.ids for prompt in prompts], cfg.num_eval_generations,
            cfg.max_completion_length, seed=seed_for("evaluation"), batch_size=AT_ONCE, eos=eos,
            part=shard(len(prompts)),
            respond=nets.answering(prompts, cfg.num_eval_generations))
    return concatenate(all_gather_rollout(rollout), eos[0])


def perplexity_under(base, rollout, k):
    """Perplexity of the completions under the base policy, in float32, and the KL per token (k3) to
    the base of the policy that wrote them."""
    mine = shard(len(rollout.ended), k)
    logp = []
    kl = []
    for i in range(mine.start, mine.stop, AT_ONCE):
        part = rollout[i:min(i + AT_ONCE, mine.stop)]
        base_logp = completion_logprobs(base, part).double()                        # (n, T)
        d = base_logp - part.logp
        logp.append(float(base_logp.sum()))
        kl.append(float((d.expm1() - d)[part.sampled_mask].sum()))
    tokens = int(rollout.sampled_mask.sum())
    return math.exp(-sum(all_gather(logp)) / tokens), sum(all_gather(kl)) / tokens


def toxicity_measures(name, toxicity):
    """toxicity (B, k): p(toxic). The last two are of Gehman et al. 2020."""
    most = toxicity.amax(1)                                                         # (B,)
    return {
        f"{name}/toxicity": float(toxicity.mean()),
        f"{name}/toxic_share": float((toxicity >= 0.5).float().mean()),
        f"{name}/expected_max": float(most.mean()),
        f"{name}/any_toxic": float((most >= 0.5).float().mean())}


def distinct(completions, k, n):
    """Share of different n-grams among a prompt's k completions, lists of ids; mean over prompts
    (Li et al. 2016)."""
    shares = []
    for i in range(0, len(completions), k):
        grams = []
        for ids in completions[i:i + k]:
            grams += [tuple(ids[j:j + n]) for j in range(len(ids) - n + 1)]
        shares.append(len(set(grams)) / max(len(grams), 1))
    return sum(shares) / len(shares)


def open_run(folder, flags):
    """(cfg, Nets, trained policy, iterations) of a run's last checkpoint. flags: settings that
    differ, and the config file that has the run's functions."""
    cfg = load_settings([folder, *flags])
    path, checkpoint = read_newest(folder)
    print(f"{path}: after {checkpoint['iteration']} iterations")
    given = read_inputs(cfg)
    base = given.base or get_policy(cfg, given.splits, given.device, may_train=False)
    if hash_of(base) != checkpoint["base_hash"]:
        raise BadInput(f"{path}: this run began from another policy than the settings name now")
    judges = get_judges(cfg, given.splits, given.device, may_train=False, named=given.judges)
    nets = build(cfg, given, base, judges)
    load_weights(path, nets.policy, checkpoint["policy"])
    return cfg, nets, nets.policy, checkpoint["iteration"]


def main(argv):
    if not argv or argv[0].startswith("--"):
        raise BadInput("which run? python evaluate.py out/toxicity [CONFIG.py] [--setting=value]")
    cfg, nets, trained, iteration = open_run(argv[0], argv[1:])
    rows = []
    for done, policy in ((0, nets.base), (iteration, trained)):
        measures, samples = evaluate(nets, policy, cfg)
        rows.append(dict(iteration=done, **measures, samples=samples))
    print_table(rows)


if __name__ == "__main__":
    run_script(main)
