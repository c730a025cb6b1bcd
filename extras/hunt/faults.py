"""
The ten faults. READ NO FURTHER if you want to hunt them: each is told here.

Every one is a line that somebody had, or nearly; `who` names the project and where it is told.
"""
import math
import re
from typing import NamedTuple

# held-out rollouts as target, one step on each batch
INFLUENCE = ("--tracin=reward", "--tracin_val_prompts=8", "--tracin_val_size=16",
             "--mini_batch_size=0", "--num_iterations=1")


class Seen(NamedTuple):
    """What a run has shown."""
    printed: str        # all of it, warnings too
    metrics: list       # rows of metrics.jsonl, of samples.jsonl, of eval.jsonl
    samples: list
    evaluations: list
    code: int = 0       # the exit code


# ------------------------------------------------------------------------------------------------
# what gives a fault away: of a Seen a number, and whether it is what the fault makes of it


def nats_apart(seen):
    """By how many nats sampler and trainer disagree, where that has stopped the run; else 0."""
    found = re.search("disagree by (.*) nats", seen.printed)
    return float(found[1]) if found else 0.0


def left_out_temperature(seen):
    return nats_apart(seen), 0 < nats_apart(seen) < 4


def other_token(seen):
    return nats_apart(seen), nats_apart(seen) >= 4


def tokens_without_loss(seen):
    """The most of an iteration."""
    most = max((m["tokens_without_loss"] for m in seen.metrics), default=math.nan)
    return most, most > 0


def least_kl_loss(seen):
    least = min((m["kl_loss"] for m in seen.metrics), default=math.nan)
    return least, least < -1e-4


def mean_of_a_group(seen):
    """Of its advantages, the largest one of an iteration; the least of the run."""
    least = min((m["advantage_group_mean"] for m in seen.metrics), default=math.nan)
    return least, least > 0.01


def spread_of_ratio(seen):
    """Over the four steps of an iteration."""
    most = max((m["ratio_std"] for m in seen.metrics if m["num_steps"] > 1), default=math.nan)
    return most, most < 1e-5


def two_rewards(seen):
    """How far the mean of what is learned from is from that of what the function returned."""
    most = max((abs(m["reward"] - m["rewards/reward/mean"]) for m in seen.metrics),
               default=math.nan)
    return most, most > 1e-3


def two_kls(seen):
    """The KL of the last iterations beside that of the evaluation."""
    if len(seen.evaluations) < 2:
        return math.nan, False
    logged = sum(m["kl"] for m in seen.metrics[-3:]) / 3
    share = logged / seen.evaluations[-1]["kl"]
    return share, share < 0.2


def contrast(seen):
    """Mean over the iterations; NaN without influence."""
    values = [m.get("tracin/target_contrast", math.nan) for m in seen.metrics]
    mean = sum(values) / len(values) if values else math.nan
    return mean, mean < 0.7


def mean_influence_below_0(seen):
    """Share of the iterations."""
    if not seen.metrics or "tracin/mean_ip" not in seen.metrics[0]:
        return math.nan, False
    share = sum(m["tracin/mean_ip"] < 0 for m in seen.metrics) / len(seen.metrics)
    return share, share > 0.75


# ------------------------------------------------------------------------------------------------
# the faults


class Fault(NamedTuple):
    complaint: str      # what its user says
    place: str          # where to look
    file: str           # the line that is wrong, `new`, and what it should be
    old: str
    new: str
    why: str
    who: str
    number: str         # what gives it away
    sign: object        # the function above that measures this
    neighbours: tuple   # (file, line) of the project where a mistake has the same effect
    flags: tuple = ()


FAULTS = [
    Fault(
        "It learns, but not from all that it writes.",
        "loss", "grpo.py",
        "    loss_mask = rollout.sampled_mask\n",
        "    loss_mask = rollout.sampled_mask & rollout.sampled_mask.roll(-1, 1)\n",
        "The end token is sampled like any other. Without loss on it the policy is never told that "
        "it was good to stop there.",
        "nanochat, issue 810 (the sampled end token is masked as padding); reasoning-from-scratch, "
        "pull request 185.",
        "tokens_without_loss is not 0, and a note says so. At first it is some 60 with 64 rows: "
        "a token is missing in every completion but the longest, where it wraps. "
        "--debug_step=True shows that it is the last one.",
        tokens_without_loss,
        (("loss.py", "    mask = b.loss_mask\n"),)),
    Fault(
        "It drifts away from the text it knew. With a higher beta it only drifts faster.",
        "loss", "loss.py",
        "loss.kl = cfg.beta * aggregate(",
        "loss.kl = -cfg.beta * aggregate(",
        "The KL is a cost, so it is added to what is minimised. With a minus it is a prize, and "
        "beta says how large.",
        "verl, pull request 179; Logic-RL had it from there (issue 58), and TinyZero (pull request "
        "72).",
        "beta*kl in the line of each iteration is below 0, which beta times a KL by k3 cannot be; "
        "kl is above 0. A warning says so.",
        least_kl_loss,
        (("loss.py", "kl = kl_estimate(logp, b.ref_logp"),
         ("loss.py", "return kl * ratio"),
         ("loss.py", "return torch.expm1(bounded(d)) - d"))),
    Fault(
        "It does not even start, and what disagrees is off by a little.",
        "rollout", "rollout.py",
        "        if temperature != 1:\n            logits = logits / temperature\n",
        "",
        "Tokens are drawn from softmax(logits / temperature). The trainer asks how likely they "
        "were under softmax(logits), which is another distribution.",
        "simple_GRPO samples at 0.9 and scores at 1; TRL, pull request 3029.",
        "The run stops: the ratio is not 1, by 0.2 to 2.5 nats. With --temperature=1 it "
        "starts. --debug_step=True shows that trainer and sampler differ a little at every token.",
        left_out_temperature,
        (("rollout.py", "model.lm_head(h).float() / sampling.temperature"),
         ("loss.py", "logp = completion_logprobs(policy, b.rollout, cfg.temperature"))),
    Fault(
        "It learned the judge, not the task: the reward rises and rises, that of the evaluation "
        "does not.",
        "score", "judge/rewards.py",
        "masked_fill(groups.isnan().all(2), math.nan)",
        "masked_fill(groups.isnan().all(2), 0.0)",
        "A reward that is not known (None) is no reward of 0. All other rewards here are below 0, "
        "so what the judge does not know is the best that one can write.",
        "TRL: nansum made 0 of a completion that no function could score (pull request 5902).",
        "reward and rewards/reward/mean differ, though there is one function of weight 1. "
        "reward_max is 0, and rewards/reward/abstained rises.",
        two_rewards,
        (("judge/rewards.py", "columns.append(column.masked_fill(abstains, math.nan))"),)),
    Fault(
        "beta holds nothing: the log says that the policy has hardly moved, the table says that it "
        "is far away.",
        "step", "run/setup.py",
        "reference=reference_for(policy, inputs.base, cfg),",
        "reference=policy,",
        "Two names of one model. What the optimizer does to the policy it does to the reference, "
        "so the KL never grows beyond what one iteration does.",
        "theLMbook copies the policy into its reference in every iteration, about which issue 8 "
        "asks (its author means to); TRL has a setting for how often (issue 2908).",
        "kl of the iterations stays small, kl of the table, to the policy before training, does "
        "not: a warning says so. --debug_step=True shows that after the update the reference has "
        "the trainer's log-probs.",
        two_kls,
        (("run/policy.py", "    return base\n"),
         ("grpo.py", "setup.fast(setup.reference), rollout[rows], cfg.temperature)"))),
    Fault(
        "Some prompts teach everything, and their answers are only praised or only blamed.",
        "advantage", "grpo.py",
        "advantages = r - r.nanmean(1, keepdim=True)",
        "advantages = r - r.nanmean()",
        "The baseline is the mean of the batch. So all answers to an easy prompt are praised and "
        "all to a hard one blamed; what tells them apart is a small difference between these.",
        "grpo-flat, issue 2 (mean and std over all rows).",
        "The advantages of a prompt do not add up to 0: advantage_group_mean, and a warning. Later "
        "advantage_max or advantage_min are beyond 2.47, the most that one of 8 rewards can be "
        "away from their mean.",
        mean_of_a_group,
        (("grpo.py", "advantages = group_advantages(rewards, cfg.num_generations"),)),
    Fault(
        "Nothing is ever clipped, however many passes I make over a batch.",
        "loss", "loss.py",
        "log_ratio = logp - old_logp",
        "log_ratio = logp - logp.detach()",
        "The old log-probs are those of the sampler. Taken again before each step they are always "
        "those of now, the ratio is 1, and epsilon bounds nothing.",
        "torchforge, pull request 571 (logprobs - logprobs.detach()). It is right where a batch "
        "serves one step alone, as in TRL at first (issue 2769).",
        "ratio_std is 0, ratio_min and ratio_max are 1, also in the second, third and fourth step: "
        "a warning says so.",
        spread_of_ratio,
        (("loss.py", "old_logp = b.rollout.logp.masked_fill(~mask, 0)"),
         ("loss.py", "token_ratio = bounded(log_ratio).exp()"))),
    Fault(
        "It does not even start, and what disagrees is off by a lot.",
        "rollout", "rollout.py",
        "input_mask)[:, -T:]  ",
        "input_mask)[:, -T - 1:-1]  ",
        "The hidden state of a token predicts the next one. One place too early, each token is "
        "asked of the state that predicted the one before.",
        "TRL, issue 3681 (the wrong slice of the logits, of models that return all of them).",
        "The run stops: the ratio is not 1, a token is many nats off, at any temperature. "
        "--debug_step=True shows a trainer that finds most tokens unlikely.",
        other_token,
        (("rollout.py", "return States(h[where], tokens[:, -T:][where], allowed, where)"),)),
    Fault(
        "Influence keeps every other rollout. It might as well throw a coin.",
        "influence", "extras/variants/tracin_val_select.py",
        "    how = cfg.tracin_val_select\n",
        '    how = "best"\n',
        "The target is made of the best held-out rollouts alone. Rewards that are nearly equal "
        "show no direction: what is normalised and summed up is their noise.",
        "a port of influence to GRPO found it in its own notes: a validation set of good answers "
        "alone has no contrast.",
        "tracin/target_contrast is about half of a healthy run's, on average over iterations; "
        "below 0.3 a warning says so. tracin/target_advantage_min of the first iteration is above "
        "0. --tracin_val_select=worst changes nothing.",
        contrast,
        (("extras/variants/tracin_val_select.py",
          "return torch.randperm(n, generator=generator)[:cfg.tracin_val_size or n]"),), INFLUENCE),
    Fault(
        "With influence on, the reward hardly moves.",
        "influence", "tracin.py",
        "coef[rows] = -value / len(rows)",
        "coef[rows] = value / len(rows)",
        "A target is a loss, which falls where good completions get likelier. Without the minus "
        "it falls where they get less likely, and the rollouts that do this are kept.",
        "DataInf, pull request 3 (the minus was missing, so importance was turned round).",
        "tracin/mean_ip is below 0 from the first iteration: to learn from all rollouts would harm "
        "the target, although both want the same reward. tracin/positive_ratio is below 0.3.",
        mean_influence_below_0,
        (("tracin.py", "value = (r - r.mean()) / (r.std() + 1e-4)"),
         ("tracin.py", "scalar = (coef[rows].view(len(rows), -1) * ratio).sum()")), INFLUENCE)]
