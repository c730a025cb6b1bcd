"""Call reward functions, from the judge or a config file, and environments.

An error inside such a function keeps Python's own message, with the function's file and line.
"""
import contextlib
import copy
import inspect
import math

import torch

from common.processes import all_gather, shard
from common.script import BadInput, numbers, shown
from judge import reward_functions

FACTS = ("completion_ids", "ended", "iteration", "num_generations")     # see reward_facts
ONLY_IN_TRL = ("trainer_state", "log_metric", "log_extra")


def check_arguments(what, function, prompts, name="completions", given=()):
    """Refuse a user's function that does not take `name`, or needs a column that a prompt lacks.
    given: names that it may take beside columns."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if name not in signature.parameters and not takes_all:
        raise BadInput(f"{what} takes {signature}: must take (prompts, {name}), by these names; "
                       "columns of the prompts' file may follow")

    # does every prompt's row have the columns that the function needs?
    needed = {p.name for p in parameters
              if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    columns = sorted(needed - {"prompts", name, *given})
    for prompt in prompts:
        for column in columns:
            if column in prompt.row:
                continue
            if column in ONLY_IN_TRL:
                raise BadInput(f"{what} asks for {column!r}, which TRL has and this project lacks: "
                               f"there are prompts, {name}, {', '.join(given)}, and columns of the "
                               "prompts' file")
            raise BadInput(f"{what} asks for the column {column!r}: add it to the prompts' file; "
                           f"the prompt {shown(prompt.text)} has {sorted(map(str, prompt.row))}")


def arguments_of(what, function, prompts, texts, name="completions", facts=None):
    """Collect the arguments of a user's function -> {name of a parameter: argument}.

    As in TRL they go by name: prompts, completions (for an environment: transcripts), columns of
    the prompts' file, and the entries of `facts`. **kwargs takes all of these. Each row is a copy,
    so that a function that changes its argument changes nothing else.
    """
    facts = facts or {}
    check_arguments(what, function, prompts, name, facts)

    # everything on offer: facts, columns, prompts and completions
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    columns = {column for prompt in prompts for column in prompt.row}
    offered = {column: [prompt.row.get(column) for prompt in prompts] for column in columns}
    offered |= facts | {"prompts": [prompt.text for prompt in prompts], name: texts}

    # its parameters, copied value by value: in one deepcopy of a list, rows would still share
    arguments = {column: x for column, x in offered.items() if takes_all or column in parameters}
    return {column: [copy.deepcopy(value) for value in x] if isinstance(x, list) else x
            for column, x in arguments.items()}


def call(what, function, prompts, texts, name="completions", facts=None):
    """Call a user's function with the arguments it takes."""
    arguments = arguments_of(what, function, prompts, texts, name, facts)
    with contextlib.chdir("."):     # come back, if the function changes the working directory
        return function(**arguments)


def rows_of(facts, rows):
    """The facts of some rows."""
    return facts and {name: x[rows] if isinstance(x, list) else x for name, x in facts.items()}


def reward_facts(rollout, iteration, num_generations):
    """The arguments that a reward may take beside columns: completion_ids, each with its end token;
    ended, whether a completion ended by itself; the iteration, from 1 (in an evaluation: iterations
    done so far); num_generations, how many completions of a prompt stand side by side."""
    return {"completion_ids": rollout.completions(()), "ended": rollout.ended.tolist(),
            "iteration": iteration, "num_generations": num_generations}


def score_by(name, function, prompts, completions, facts=None):
    """Score the completions with one reward function -> list of N floats."""
    if not completions:     # this process's share may be empty
        return []
    returned = call(f"reward {name!r}", function, prompts, completions, facts=facts)

    # None abstains; all else is one finite number for each completion
    values = list(returned) if hasattr(returned, "__iter__") else [returned]
    known = [value for value in values if value is not None]
    count = len(completions) - (len(values) - len(known))
    checked = iter(numbers(f"reward {name!r}", known, (count,)).tolist())
    return [math.nan if value is None else next(checked) for value in values]


@torch.no_grad()
def score(reward_funcs, prompts, completions, facts=None):
    """Score the completions of N prompts (data.prompts.Prompt) with every function -> (N, K), in
    float64: in float32, 1e8 + 1 would be 1e8.

    A function returns one number per completion, higher is better. None abstains and becomes NaN.
    facts: from reward_facts().
    """
    columns = [score_by(name, function, prompts, completions, facts)
               for name, function in reward_funcs.items()]
    return torch.tensor(columns, dtype=torch.float64).T


def all_scores(reward_funcs, prompts, completions, cfg, facts=None):
    """Scores (N, K): each reward function on each completion. prompts: one for each of them. facts:
    what reward_facts returns of them."""
    # those of cfg, not all: held-out rollouts for influence may have a reward of their own
    used = {name: reward_funcs[name] for name in cfg.reward_funcs}
    # each process scores its share, in whole groups, since a reward may compare them
    mine = shard(len(completions), cfg.num_generations)
    return all_gather(score(used, prompts[mine], completions[mine], rows_of(facts, mine)))


def check_columns(cfg, prompts):
    """Before training: every prompt must have the columns that the config file's rewards take."""
    functions = reward_functions(cfg, judges={})
    functions.pop("judge", None)

    # what the step passes under a name hides a column of the same name
    reserved = {"prompts", "completions", *FACTS}
    hidden = sorted(reserved & {column for prompt in prompts for column in prompt.row})
    if functions and hidden:
        print(f"note: a reward never gets the column {hidden[0]!r} of the prompts' file: the step "
              "itself passes something of that name; rename the column")

    # does every prompt have the columns they take?
    for name, function in functions.items():
        check_arguments(f"reward {name!r}", function, prompts, given=FACTS)
        for parameter in set(ONLY_IN_TRL) & set(inspect.signature(function).parameters):
            if not any(parameter in prompt.row for prompt in prompts):
                print(f"note: reward {name!r} takes {parameter!r}, which TRL has and this project "
                      f"lacks; it keeps its default. There are {', '.join(FACTS)}")


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


def without_rounding(sums, terms):
    """Make the sums (B, G) of terms (B, G, k) equal in a group where they differ only by rounding.
    A group of equal rewards must teach nothing, and rounding divided by its own standard deviation
    would teach."""
    # rounding is in proportion to the terms, which may cancel in the sum
    rounding = 1e-14 * terms.abs().nansum(2).amax(1)                                # (B,)
    are_equal = all_equal(sums, rounding)[:, None] & ~sums.isnan()                  # (B, G)
    greatest = sums.nan_to_num(-math.inf).amax(1, keepdim=True)                     # (B, 1)
    return sums.where(~are_equal, greatest)


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
    return without_rounding(sums, terms).flatten()
