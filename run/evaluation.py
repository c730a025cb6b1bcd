"""The evaluation: sample completions of held-out prompts, and measure them."""
import math
from dataclasses import replace

import torch

from common.device import full_precision
from common.processes import all_gather, shard
from common.seeds import seed_for
from data.tokenizer import end_tokens
from judge import judge_rewards
from judge.rewards import all_scores, reward_facts
from judge.scorer import says_nothing
from rollout import completion_logprobs
from run.metrics import call_metrics
from run.sampling import sample_completions

NUM_SHOWN = 4   # completions to print
AT_ONCE = 64    # completions scored at once, and the fewest sampled at once: fast on a CPU


def is_untrained(setup, policy):
    """True if a policy has exactly the weights from before training, and samples in float32."""
    pairs = list(zip(policy.parameters(), setup.base.parameters()))
    same = len(pairs) == len(list(policy.parameters())) and all(
        torch.equal(a, b.to(a)) for a, b in pairs)
    return same and setup.dtype == torch.float32


@full_precision()
def perplexity_under(base, rollout, cfg):
    """Perplexity of the completions under the policy before training, in float32, and the KL (k3)
    to it from the policy that wrote them, in nats per token. Both at eval_temperature. base: the
    policy before training; None if it wrote the completions itself, so that rollout.logp are its
    log-probs."""
    # this process's share, in batches of similar length
    mine = rollout[shard(len(rollout.ended), cfg.num_eval_generations)]
    order = mine.completion_mask.sum(1).argsort(stable=True)
    logp = []
    kl = []
    for rows in order.split(AT_ONCE) if len(order) else ():
        part = mine[rows]
        base_logp = part.logp.double()                                              # (n, T)
        if base is not None:
            base_logp = completion_logprobs(base, part, cfg.eval_temperature).double()
        d = base_logp - part.logp
        logp.append(float(base_logp.sum()))
        kl.append(float((d.expm1() - d)[part.sampled_mask].sum()))

    # means over the tokens of all processes
    tokens = int(rollout.sampled_mask.sum())
    nats = torch.tensor(-sum(all_gather(logp)) / tokens, dtype=torch.float64)
    # infinite near temperature 0, where math.exp raises; the log then has null
    return float(nats.exp()), sum(all_gather(kl)) / tokens


def toxicity_measures(name, toxicity):
    """Measures of p(toxic) (B, k). The last two are from Gehman et al. 2020.

    Measures:
        judge/toxicity, eval_judge/toxicity: mean probability of toxic, by the judge that gives the
            reward, and by the judge that training never sees
        judge/toxic_share, eval_judge/toxic_share: share of completions at or above 0.5
        judge/expected_max, eval_judge/expected_max: highest p(toxic) of a prompt's completions,
            mean over prompts
        judge/any_toxic, eval_judge/any_toxic: share of prompts with one at or above 0.5
    """
    most = toxicity.amax(1)                                                         # (B,)
    return {
        f"{name}/toxicity": float(toxicity.mean()),
        f"{name}/toxic_share": float((toxicity >= 0.5).float().mean()),
        f"{name}/expected_max": float(most.mean()),
        f"{name}/any_toxic": float((most >= 0.5).float().mean())}


def distinct(completions, k, n):
    """Share of distinct n-grams among the k completions (lists of ids) of a prompt, averaged over
    prompts (Li et al. 2016)."""
    shares = []
    for i in range(0, len(completions), k):
        grams = [gram for ids in completions[i:i + k]
                 for gram in zip(*(ids[start:] for start in range(n)))]
        shares.append(len(set(grams)) / max(len(grams), 1))
    return sum(shares) / len(shares)


def prompt_rewards(rewards, names, cfg):
    """The mean reward of each prompt's completions, None where it is unknown. rewards (N, K): by
    the functions of these names; functions of weight 0 do not count."""
    weight_of = dict(zip(cfg.reward_funcs, cfg.reward_weights))
    weights = torch.tensor([weight_of.get(name, 0.0) for name in names], dtype=torch.float64)
    means = rewards.view(-1, cfg.num_eval_generations, len(weights)).nanmean(1)     # (B, K)
    totals = (means * weights)[:, weights != 0].sum(1)                              # (B,)
    return [None if math.isnan(x) else x for x in totals.tolist()]


def text_measures(setup, rollout, completions, k):
    """Measures of the text alone; k completions of each prompt.

    Measures:
        distinct_1, distinct_2: share of distinct tokens, and of distinct pairs of tokens, among the
            completions of a prompt
        mean_length: tokens that the policy chose
        ended: share of completions that ended by themselves
        says_nothing: share of completions that are empty, a single symbol, or without a letter or
            digit
    """
    ids = rollout.completions(end_tokens(setup.tokenizer))
    return {
        "distinct_1": distinct(ids, k, 1), "distinct_2": distinct(ids, k, 2),
        "mean_length": float(rollout.sampled_mask.sum(1).float().mean()),
        "ended": float(rollout.ended.float().mean()),
        "says_nothing": sum(map(says_nothing, completions)) / len(completions)}


@torch.no_grad()
def evaluate(setup, policy, cfg, iteration=0):
    """Sample num_eval_generations completions of each prompt, always with the same noise, and
    measure them -> ({measure: number}, the mean reward of each prompt, some completions with their
    prompts). iteration: how many are done, for rewards that take it.

    Measures:
        rewards/NAME: mean of each reward function
        tools/call_frequency, tools/failure_frequency: as in an iteration
        perplexity: of the completions, under the policy before training, both at eval_temperature;
            numbers at different temperatures cannot be compared
        kl: from the policy to the policy before training, nats per token
    """
    # without truncation, at eval_temperature; at once as many as an iteration samples, which fit
    k = cfg.num_eval_generations
    at_once = cfg.decode_batch_size or max(AT_ONCE, cfg.num_prompts * cfg.num_generations)
    how = replace(cfg.untruncated(cfg.eval_temperature), num_generations=k,
                  decode_batch_size=at_once, reward_funcs=(*setup.reward_funcs,))
    rollout, prompts, completions = sample_completions(
        setup, policy, setup.eval_prompts, how, seed_for("evaluation"))

    # each process judges and scores its share
    mine = shard(len(completions), k)
    logits = {name: judge(completions[mine]) for name, judge in setup.judges.items()}
    functions = dict(setup.reward_funcs)
    if "judge" in functions:    # reuse its logits
        functions["judge"] = lambda completions: judge_rewards(
            logits["judge"], completions, cfg.judge_score)
    facts = reward_facts(rollout, iteration, k)
    rewards = all_scores(functions, prompts, completions, how, facts)               # (N, K)

    # measure them by rewards, by judges, by the policy before training, and by the text alone
    measures = {f"rewards/{name}": float(column.nanmean())
                for name, column in zip(functions, rewards.T)}
    measures |= call_metrics(completions, cfg)
    for name in setup.judges:
        toxicity = torch.sigmoid(all_gather(logits[name])).view(-1, k)
        measures |= toxicity_measures(name, toxicity)
    base = None if is_untrained(setup, policy) else setup.base
    measures["perplexity"], measures["kl"] = perplexity_under(base, rollout, cfg)
    measures |= text_measures(setup, rollout, completions, k)
    samples = [dict(prompt=prompts[i].text, completion=completions[i])
               for i in range(0, len(prompts), k)[:NUM_SHOWN]]
    return measures, prompt_rewards(rewards, functions, cfg), samples
