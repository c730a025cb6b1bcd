"""
Red flags: what is wrong in an iteration, or between two evaluations, and what to do about it.

Each flag is (kind, sentence); a new one is an `if` and a `yield` in the function of its subject. A
metric that only some runs have is read under its setting, so a misspelled name raises an error and
silences no warning.
"""
import math
import statistics

import torch

from run.metrics import std


def in_groups(groups, most=4):
    """The rewards (B, G) of the first groups, as text."""
    rows = ["[" + " ".join(f"{x:.4g}" for x in row) + "]" for row in groups[:most].tolist()]
    return ", ".join(rows) + ", ..." * (len(groups) > most)


def times_the_median(x, earlier):
    """x as a multiple of the median of earlier numbers; 0.0 where there are fewer than four."""
    return x / statistics.median(earlier) if len(earlier) >= 4 else 0.0


def has_risen(m, first):
    """True if the reward is above the first iteration's by half of its std. The mean of many
    completions does not get there by chance."""
    return m["reward"] > first["reward"] + 0.5 * first["reward_std"]


def is_solved(m, first):
    """True if the task is solved, or the reward capped, given that all rewards are equal: they have
    risen, or none in the first iteration was higher."""
    varied = first["reward_std"] > 0
    return has_risen(m, first) or varied and m["reward_min"] >= first["reward_max"]


def constant_rewards(m, first, cfg):
    """Of several reward functions, the names of those that gave every completion the same score.
    One that varied at first and has risen is left out: it may be solved."""
    if len(cfg.reward_funcs) < 2:
        return []
    constant = [name for name in cfg.reward_funcs if m[f"rewards/{name}/std"] == 0]
    return [name for name in constant         # a resumed run may have begun with different ones
            if first.get(f"rewards/{name}/std", 0) == 0
            or m[f"rewards/{name}/mean"] <= first[f"rewards/{name}/mean"]]


def signs_of_collapse(m, first):
    """Signs that the policy repeats one text -> [(kind, words)]."""
    signs = []
    if m["identical_completions"] > 0.5:
        signs.append(("identical", (
            f"{m['identical_completions']:.0%} of the completions occur in their group again, word "
            "for word")))
    # without tokens there is no entropy; log-probs near zero have a warning of their own
    if m["num_completion_tokens"] and m["logp"] <= -1e-3 and m["entropy"] < 0.2 * first["entropy"]:
        signs.append(("entropy", (
            f"the entropy has collapsed, from {first['entropy']:.3f} to {m['entropy']:.3f} nats a "
            "token")))
    return signs


def largest_advantage(m):
    return max(-m["advantage_min"], m["advantage_max"])


def problems_of_baseline(m, cfg):
    """Do the advantages of a group sum to 0? A critic, or a function of the config file, has a
    different baseline."""
    if cfg.critic or "advantage" in cfg.functions:
        return
    if m["advantage_group_mean"] > max(1e-6, 1e-3 * largest_advantage(m)):
        yield "baseline", (
            "the advantages of a group do not add up to 0, their mean is up to "
            f"{m['advantage_group_mean']:.2g}: is the baseline the mean of the whole batch, or is "
            "a completion left out? For a baseline of your own write a function advantage")


def problems_of_rewards(m, cfg, first, groups):
    """Do rewards and advantages teach anything? groups: (B, G) the rewards."""
    if math.isnan(m["reward"]):
        yield "reward", (
            "no reward function scored any completion: all returned None; check them")
        return
    if "advantage" in cfg.functions:        # rewards need not teach
        if largest_advantage(m) < 1e-6:
            yield "advantages", (
                "all advantages that the config file's function advantage returned are near zero, "
                "so they teach nothing: check it")
        elif cfg.zero_std_groups != "keep" and m["frac_reward_zero_std"] == 1:
            yield "dropped", (
                f"zero_std_groups = {cfg.zero_std_groups!r} drops every rollout, since the rewards "
                "of each group are equal, whatever advantage returned: set 'keep'")
        return
    if constant := constant_rewards(m, first, cfg):
        values = ", ".join(f"{name!r} {m[f'rewards/{name}/mean']:.4g}" for name in constant)
        yield "constant", (
            f"these rewards are the same for every completion, so they teach nothing: {values}; "
            "check these functions, or drop them")
    if getattr(cfg.hook("advantage"), "by_score", False):
        return      # it learns even from scores that cancel in the sum
    if m["reward_min"] == m["reward_max"]:
        if is_solved(m, first):
            return      # a note says so
        yield "equal", (
            f"all rewards of the batch are {m['reward_min']:.4g}, so they teach nothing: read "
            "samples.jsonl, check the judge or the reward function")
        return
    if cfg.critic:
        return      # the group is not its baseline
    if m["frac_reward_zero_std"] == 1 or largest_advantage(m) < 1e-6:
        yield "advantages", (
            "all advantages are near zero, since the rewards of each group are equal, so they "
            f"teach nothing: raise temperature or num_generations. Rewards by group: "
            f"{in_groups(groups)}")
        return
    # the 1e-4 that is added to the std of rewards hides what is smaller
    spread = std((groups - groups.nanmean(1, keepdim=True)).flatten())
    if cfg.scale_rewards in ("group", "batch") and 0 < spread < 1e-4:
        yield "rounding", (
            f"the rewards of a group spread by {spread:.1e}, less than the 1e-4 that is added to "
            "their std: is that rounding? If not, multiply the reward")


def problems_of_exploration(m, cfg, first):
    """Does the policy repeat one text? If the reward has risen, that may be the right answer: then
    a note says so instead."""
    solved = has_risen(m, first)
    remedy = "raise temperature or beta, or go back to an earlier checkpoint"
    for kind, words in () if solved else signs_of_collapse(m, first):
        yield kind, f"{words}, and the reward has not risen: exploration has collapsed; {remedy}"
    if m["num_completion_tokens"] == 0:
        return
    if m["logp"] > -1e-3:
        yield "logp", (
            f"all log-probs are near zero (mean {m['logp']:.1e}): the policy is certain of every "
            f"token; {remedy}")
    if m["completions/clipped_ratio"] == 1 and not solved:
        yield "length", (
            f"every completion was truncated at {cfg.max_completion_length} tokens: the "
            "policy never learns to stop: raise max_completion_length")


def problems_of_step(m, cfg, first, norms):
    """Are log-probs, KL and gradient plausible?"""
    # look at log-probs: the mean of the ratio stays near 1, whatever is wrong
    difference = m["sampling/sampling_logp_difference/mean"]
    if difference > 0.05:
        yield "ratio", (
            "ratio off on the first pass: sampler and trainer disagree by "
            f"{difference:.3f} nats a token; try dtype = 'float32'")
    if not m["num_steps"]:
        return
    # rounding is enough for AdamW to take a full step
    teaches = m["advantage_max"] > m["advantage_min"]
    least = max(1e-6, 1e-6 * first["grad_norm"])
    if teaches and m["grad_norm"] < least:
        yield "gradient", (
            f"the gradient is near zero (grad_norm {m['grad_norm']:.1e}), the advantages are not: "
            "does the policy still explore (entropy, logp)? Is the loss cut off from it?")
    # the median leaves out iterations whose gradient was zero
    times = times_the_median(m["grad_norm"], [norm for norm in norms if norm > 1e-9])
    if times > 100:
        yield "explosive", (
            f"grad_norm {m['grad_norm']:.3g} is {times:.0f} times the median of the run so far: "
            "lower learning_rate, and look at what was new in samples.jsonl"
            + ("" if cfg.max_grad_norm else "; max_grad_norm = 0 cuts nothing"))
    # from the second step on the policy differs from the one that sampled
    distance = max(m["ratio_max"] - 1, 1 - m["ratio_min"])
    if teaches and m["num_steps"] > 1 and distance < 1e-5:
        yield "steps", (
            f"the ratio is 1 in all {m['num_steps']} steps, so the clip does nothing: are the old "
            "log-probs computed anew after each step, instead of once by the sampler? Does a step "
            "move the weights (learning_rate)?")
    if cfg.beta:
        yield from problems_of_kl(m, cfg, first, teaches)


def problems_of_kl(m, cfg, first, teaches):
    if m["kl"] > 5:
        yield "kl", (
            f"KL {m['kl']:.1f} nats per token is exploding: lower learning_rate or raise beta")
    if cfg.kl_estimator == "k3":        # k1 is below 0 by chance, k2 is a square
        if m["kl"] < -1e-6:
            yield "negative", (
                f"KL {m['kl']:.2g} is negative, which k3 cannot be: check its formula (exp(d) - 1 "
                "- d, with d = ref_logp - logp)")
        if cfg.kl_in_loss and m["kl"] > 1e-6 and m["kl_loss"] < 0:
            yield "kl sign", (
                f"beta * KL in the loss is {m['kl_loss']:.2g}, while the KL is {m['kl']:.2g}: what "
                "is minimised rewards distance from the reference; check the sign")
    share = m.get("kl_grad_share", math.nan)    # only some iterations have it
    # where the advantages are 0, or the task is learned, the KL's gradient is the larger one anyway
    if share > 1 and teaches and not has_risen(m, first):
        yield "kl share", (
            f"the KL's gradient is {share:.1f} times the policy's, and the reward has not risen: "
            "lower beta. A tenth to a third is a rule of thumb, no more")
    elif share < 1e-3 and m["kl"] > 0.1:
        yield "kl share", (
            f"the KL's gradient is {share:.0e} times the policy's and holds nothing back, at a KL "
            f"of {m['kl']:.2f}: raise beta. A tenth to a third is a rule of thumb, no more")


def problems_of_critic(m, cfg):
    if m["iteration"] > 2 and m["val/std"] == 0:
        yield "values", (
            f"the critic's values do not move, all are {m['val/mean']:.4g}: raise value_coef or "
            "learning_rate, and look at val/grad_norm")
    elif m["val/var_explained"] < 0 and m["iteration"] > 20:
        yield "critic", (
            f"the critic explains {m['val/var_explained']:.2f} of the returns' variance, less than "
            "a constant (0): sample more completions an iteration, or lower learning_rate")


def problems_of_influence(m, cfg):
    if m["tracin/empty_steps"] > 0:
        yield "empty", (
            "influence kept no rollout, so a step had no policy gradient. Are all rewards of the "
            "target equal? Take more tracin_val_prompts, or a different reward")
    if m["tracin/fallback"] > 0:
        yield "fallback", (
            f"only {m['tracin/positive_ratio']:.0%} of the rollouts have positive influence: kept "
            "the better half instead; is the target too small, or unlike the rollouts?")
    if cfg.tracin != "target" and m["tracin/target_contrast"] < 0.3:
        yield "contrast", (
            f"the target's rewards spread {m['tracin/target_contrast']:.2f} times as wide as the "
            "rewards of all candidates: use tracin_val_select = 'random' or 'balanced', or more "
            "prompts")
    # where it has 128 rollouts or more, these numbers are in the line of influence alone
    if cfg.tracin == "target" or m["tracin/target_rows"] >= 128:
        return
    if m["tracin/target_cosine"] < 0.1:
        yield "noise", (
            "the target's rollouts are too few: the gradients of its two halves have cosine "
            f"{m['tracin/target_cosine']:.2f}; raise num_prompts, or tracin_val_prompts and "
            "tracin_val_size")
    if m["tracin/self_share"] > 0.5 and not cfg.hook("without_own_part"):
        yield "self", (
            "the rollouts' own parts in the target add up to "
            f"{m['tracin/self_share']:.2f} times all influence: set tracin_leave_one_out = True")


def problems_of_sync(m, cfg):
    """Has the reference really followed the policy? A whole copy is exact."""
    expected = 1 - cfg.ref_model_mixup_alpha
    is_wrong_copy = expected == 0 and m["ref_tensors_differing"]
    if is_wrong_copy or m["ref_distance_left"] > expected + 0.01:
        yield "sync", (
            f"after a sync {m['ref_tensors_differing']} tensors of the reference differ from the "
            f"policy, at {m['ref_distance_left']:.2f} of the distance before, where it should be "
            f"{expected:.2f}: the sync has a bug, do not trust the KL")


def problems(m, cfg, earlier=(), groups=None):
    """Yield what is wrong in the metrics m of an iteration. earlier: metrics of the iterations
    before it, from the run's first. groups (B, G): the rewards, shown in a warning."""
    first = (*earlier, m)[0]
    groups = torch.empty(0, 1) if groups is None else groups
    yield from problems_of_rewards(m, cfg, first, groups)
    yield from problems_of_baseline(m, cfg)
    if m["num_completion_tokens"] == 0:
        yield "tokens", (
            "no completion token is under the loss, so there was no step: raise "
            "max_completion_length or unset mask_truncated_completions")
    yield from problems_of_exploration(m, cfg, first)
    yield from problems_of_step(m, cfg, first, [row["grad_norm"] for row in earlier])
    if cfg.tools and cfg.answers and m["tools/failure_frequency"] == 1:
        yield "tools", (
            "every call was answered with an error: read samples.jsonl, a tool may have a bug")
    if cfg.critic:
        yield from problems_of_critic(m, cfg)
    if "ref_tensors_differing" in m:        # in iterations that end with a sync
        yield from problems_of_sync(m, cfg)
    if "tracin/selected_ratio" in m:        # influence has scored a step
        yield from problems_of_influence(m, cfg)


def problems_of_evaluation(before, after, cfg, earlier=()):
    """Yield what is wrong in the evaluation `after`, compared with the run's first, `before`: rows
    of eval.jsonl. earlier: metrics of the iterations so far."""
    # training moves the completions of a prompt together, so the noise is that between prompts
    pairs = zip(before["prompt_rewards"], after["prompt_rewards"])
    changes = [new - old for old, new in pairs if None not in (old, new)]
    if len(changes) >= 4:
        change = statistics.fmean(changes)
        noise = statistics.stdev(changes) / math.sqrt(len(changes))
        if change < -3 * noise:
            yield "fell", (
                f"the held-out reward fell by {-change:.4f} ± {noise:.4f}: lower learning_rate, "
                "raise beta or num_prompts; does training raise the reward of its own rollouts "
                "(reward in metrics.jsonl)?")
    kls = [row["kl"] for row in earlier if "kl" in row]
    is_far = len(kls) >= 5 and after["kl"] > max(0.05, 5 * max(kls))
    if is_far and not cfg.hook("follow"):
        yield "reference", (
            f"the KL to the policy before training is {after['kl']:.3f}, but the iterations logged "
            f"at most {max(kls):.3f}: does the reference learn too, or are its log-probs the "
            "policy's?")
    if after["distinct_2"] < 0.2 * before["distinct_2"]:
        yield "distinct", (
            f"the text has collapsed: distinct_2 fell from {before['distinct_2']:.3f} to "
            f"{after['distinct_2']:.3f}, whatever the reward says; read the samples below, raise "
            "beta or stop earlier")


def notes(m, cfg, earlier=(), warned=False):
    """Yield what looks wrong in the metrics m of an iteration but may be right. earlier: metrics of
    the iterations before it; warned: True if this one has warnings."""
    first = (*earlier, m)[0]
    all_equal = m["reward_min"] == m["reward_max"] and "advantage" not in cfg.functions
    solved = all_equal and is_solved(m, first)
    if solved:
        yield "solved", (
            f"all rewards are {m['reward_min']:.4g}: the task is solved, or the reward capped, so "
            "they teach nothing more; try a harder task")
    if m["tokens_without_loss"] and not cfg.mask_truncated_completions:
        yield "mask", (
            f"{m['tokens_without_loss']} sampled tokens carry no loss, by grpo.loss_mask_of. If "
            "that is not meant: is the end token dropped, or the mask off by one? "
            "--debug_step=True shows which tokens")
    signs = signs_of_collapse(m, first) if has_risen(m, first) else []
    if signs:
        yield "one answer", (
            f"{'; '.join(words for _, words in signs)}, while the reward rose from "
            f"{first['reward']:.4g} to {m['reward']:.4g}: is there one right answer? If not, "
            "exploration has collapsed: raise temperature or beta")
    # one step on fresh rollouts, and a gradient that prints as more than 0
    is_plain = m["num_steps"] == 1 and not cfg.critic and m["grad_norm"] >= 5e-4
    if abs(m["loss"]) < 5e-5 and is_plain and not (warned or solved or signs):
        yield "zero", (
            "a loss of 0.0000 is right here: the ratio is 1 and the advantages of a group sum to "
            "0. Its gradient is not 0: watch reward and grad_norm")
    times = times_the_median(m["step_time"], [row["step_time"] for row in earlier])
    if times > 4:
        yield "slow", (
            f"this iteration took {m['step_time']:.1f} s, {times:.1f} times the median: does "
            "torch.compile compile again (compile = False)? Is the machine busy?")
