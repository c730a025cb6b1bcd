"""
Rewards: call each reward function, the judge's or a config file's, and weigh what they return.

An error inside such a function keeps Python's own message, with the function's file and line.
"""
import contextlib
import copy
import math

import torch

from common.errors import shown
from common.hooks import numbers, select_arguments
from common.processes import all_gather, shard
from judge import reward_functions

FACTS = ("completion_ids", "ended", "iteration", "num_generations")     # see reward_facts


def call(what, function, prompts, texts, name="completions", facts=None):
    """Call a user's function, a reward or an environment, with the arguments that it names.

    As in TRL there are prompts, completions (for an environment: transcripts), columns of the
    prompts' file, and the entries of `facts`. **kwargs takes all of these. Each value is a copy, so
    that a function that changes its argument changes nothing else.
    """
    # everything on offer. Facts come after columns, which may have the same name
    columns = {column for prompt in prompts for column in prompt.row}
    offered = {column: [prompt.row.get(column) for prompt in prompts] for column in columns}
    offered |= (facts or {}) | {"prompts": [prompt.text for prompt in prompts], name: texts}

    # copied value by value: in one deepcopy of a list, rows would still share
    arguments = {key: [copy.deepcopy(value) for value in x] if isinstance(x, list) else x
                 for key, x in select_arguments(what, function, offered).items()}
    with contextlib.chdir("."):     # come back if it leaves for another folder: a run's is relative
        return function(**arguments)


def check_columns(what, function, prompts, offered):
    """Before training: has every prompt the columns that a user's function takes? offered: names of
    what it may take beside columns."""
    prompt_with = {frozenset(prompt.row): prompt for prompt in prompts}
    for columns, prompt in prompt_with.items():
        select_arguments(f"{what} (prompt {shown(prompt.text)})", function,
                         dict.fromkeys([*columns, "prompts", *offered]))


def check_rewards(cfg, prompts):
    """The same for all rewards of the config file."""
    for name, function in reward_functions(cfg, judges={}).items():
        if name != "judge":
            check_columns(f"reward {name!r}", function, prompts, ["completions", *FACTS])


def reward_facts(rollout, iteration, num_generations):
    """The arguments that a reward may take beside columns: completion_ids, each with its end token;
    ended, whether a completion ended by itself; the iteration, from 1 (in an evaluation: iterations
    done so far); num_generations, how many completions of a prompt stand side by side."""
    return {"completion_ids": rollout.completions(()), "ended": rollout.ended.tolist(),
            "iteration": iteration, "num_generations": num_generations}


@torch.no_grad()
def score(reward_funcs, prompts, completions, facts=None):
    """Score the completions of N prompts (data.prompts.Prompt) with every function -> (N, K), in
    float64: in float32, 1e8 + 1 would be 1e8.

    A function returns one finite number per completion, higher is better, or None to abstain, which
    becomes NaN. facts: from reward_facts().
    """
    if not completions:     # this process's share may be empty
        return torch.zeros(0, len(reward_funcs), dtype=torch.float64)
    columns = []
    for name, function in reward_funcs.items():
        what = f"reward {name!r}"
        returned = call(what, function, prompts, completions, facts=facts)
        values = list(returned) if hasattr(returned, "__iter__") else [returned]
        abstains = torch.tensor([value is None for value in values])
        column = numbers(what, [0.0 if value is None else value for value in values],
                         (len(completions),))
        columns.append(column.masked_fill(abstains, math.nan))
    return torch.stack(columns, 1)                                                  # (N, K)


def all_scores(reward_funcs, prompts, completions, cfg, facts=None):
    """Scores (N, K): each reward function of cfg on each completion. prompts: one per completion.
    facts: from reward_facts, of all completions."""
    # each process scores its share, in whole groups, since a reward may compare them
    mine = shard(len(completions), cfg.num_generations)
    facts = {name: x[mine] if isinstance(x, list) else x for name, x in (facts or {}).items()}
    used = {name: reward_funcs[name] for name in cfg.reward_funcs}
    return all_gather(score(used, prompts[mine], completions[mine], facts))


# ------------------------------------------------------------------------------------------------
# several scores, one reward


def all_equal(groups, rounding=0.0):
    """True (B,) for groups (B, G) whose rewards are equal, up to 1e-9 of their size or up to
    `rounding` (B,), whichever is more. NaN is ignored."""
    # NaN never wins min or max; an all-NaN group has spread -inf
    spread = groups.nan_to_num(-math.inf).amax(1) - groups.nan_to_num(math.inf).amin(1)
    size = groups.nan_to_num(0.0).abs().amax(1)
    return (spread <= 1e-9 * size) | (spread <= rounding)


def counted_scores(scores, weights):
    """The scores (N, k) and weights (k,) of functions with a nonzero weight, in float64: a function
    of weight 0 is only logged and must change nothing."""
    weights = torch.tensor(weights, dtype=torch.float64)
    return scores[:, weights != 0].double(), weights[weights != 0]


def total_reward(scores, weights, num_generations):
    """Weighted sum (N,) of scores (N, K), in float64; NaN where every function that counts
    abstains."""
    scores, weights = counted_scores(scores, weights)                               # (N, k), (k,)
    if len(weights) == 0:
        return torch.zeros(len(scores), dtype=torch.float64)

    # where one abstains (NaN), the mean of its group stands in, which changes no advantage
    groups = scores.view(-1, num_generations, len(weights))                         # (B, G, k)
    filled = groups.where(~groups.isnan(), groups.nanmean(1, keepdim=True))
    terms = filled * weights                                                        # (B, G, k)
    sums = terms.nansum(2).masked_fill(groups.isnan().all(2), math.nan)             # (B, G)

    # equal rewards must teach nothing, but sums of different terms may differ by rounding, which is
    # in proportion to the terms: divided by its own standard deviation it would teach
    rounding = 1e-14 * terms.abs().nansum(2).amax(1)                                # (B,)
    are_equal = all_equal(sums, rounding)[:, None] & ~sums.isnan()                  # (B, G)
    greatest = sums.nan_to_num(-math.inf).amax(1, keepdim=True)                     # (B, 1)
    return sums.where(~are_equal, greatest).flatten()
