"""Call reward functions, the judge's and those of a config file, and environments.

What such a function raises is Python's to say, with the function's own file and line.
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
    """Refuse a user's function that does not take `name`, or asks for a column that one of the
    prompts lacks. given: what it may ask for beside columns."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if name not in signature.parameters and not takes_all:
        raise BadInput(f"{what} takes {signature}: must take (prompts, {name}), by these names; "
                       "columns of the prompts' file may follow")

    # every column that it must have is in every prompt's row
    needed = {p.name for p in parameters
              if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    asked = sorted(needed - {"prompts", name, *given})
    for prompt in prompts:
        for column in asked:
            if column in prompt.row:
                continue
            if column in ONLY_IN_TRL:
                raise BadInput(f"{what} asks for {column!r}, which TRL has and this project has "
                               f"not: there are prompts, {name}, {', '.join(given)}, and columns "
                               "of the prompts' file")
            raise BadInput(f"{what} asks for the column {column!r}: add it to the prompts' file; "
                           f"the prompt {shown(prompt.text)} has {sorted(map(str, prompt.row))}")


def arguments_of(what, function, prompts, texts, name="completions", facts=None):
    """Collect the arguments of a user's function -> {name of a parameter: argument}.

    As in TRL all go by name: prompts, completions (for an environment: transcripts), columns of the
    prompts' file, and what `facts` holds. **kwargs takes all of these. Each row has a copy of its
    own, so that a function that changes one changes no other row, call or log.
    """
    facts = facts or {}
    check_arguments(what, function, prompts, name, facts)

    # all that there is: facts, columns, prompts and completions
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    columns = {column for prompt in prompts for column in prompt.row}
    known = {column: [prompt.row.get(column) for prompt in prompts] for column in columns}
    known |= facts | {"prompts": [prompt.text for prompt in prompts], name: texts}

    # what it asks for, copied value by value: one deepcopy of a list keeps what its rows share
    asked = {column: x for column, x in known.items() if takes_all or column in parameters}
    return {column: [copy.deepcopy(value) for value in x] if isinstance(x, list) else x
            for column, x in asked.items()}


def call(what, function, prompts, texts, name="completions", facts=None):
    """Call a user's function with the arguments that it asks for."""
    arguments = arguments_of(what, function, prompts, texts, name, facts)
    with contextlib.chdir("."):     # one that runs programs may go to another folder
        return function(**arguments)


def rows_of(facts, rows):
    """What `facts` holds of some rows."""
    return facts and {name: x[rows] if isinstance(x, list) else x for name, x in facts.items()}


def reward_facts(rollout, iteration, num_generations):
    """What a reward may ask for by name beside columns: the ids of each completion, its end token
    included; whether it ended by itself; the iteration, from 1, and in an evaluation the number of
    those that are done; how many completions of a prompt stand side by side."""
    return {"completion_ids": rollout.completions(()), "ended": rollout.ended.tolist(),
            "iteration": iteration, "num_generations": num_generations}


def score_by(name, function, prompts, completions, facts=None):
    """Score the completions with one reward function -> list of N floats."""
    if not completions:     # of several processes one may have none
        return []
    found = call(f"reward {name!r}", function, prompts, completions, facts=facts)

    # None abstains; all else is one finite number for each completion
    values = list(found) if hasattr(found, "__iter__") else [found]
    known = [value for value in values if value is not None]
    count = len(completions) - (len(values) - len(known))
    checked = iter(numbers(f"reward {name!r}", known, (count,)).tolist())
    return [math.nan if value is None else next(checked) for value in values]


@torch.no_grad()
def score(reward_funcs, prompts, completions, facts=None):
    """Score the completions of N prompts (data.prompts.Prompt) with every function -> (N, K), in
    float64, where 1e8 + 1 is not 1e8.

    A function returns one number per completion, higher is better. None abstains and becomes NaN.
    facts: what reward_facts() returns of these completions.
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
    """Before anything is trained: every prompt must have the columns that the config file's rewards
    ask for."""
    functions = reward_functions(cfg, judges={})
    functions.pop("judge", None)

    # what a step knows goes before a column of its name
    given = {"prompts", "completions", *FACTS}
    hidden = sorted(given & {column for prompt in prompts for column in prompt.row})
    if functions and hidden:
        print(f"note: a reward never gets the column {hidden[0]!r} of the prompts' file: the name "
              "is that of something the step gives; rename the column")

    # does every prompt have what they ask for?
    for name, function in functions.items():
        check_arguments(f"reward {name!r}", function, prompts, given=FACTS)
        for parameter in set(ONLY_IN_TRL) & set(inspect.signature(function).parameters):
            if not any(parameter in prompt.row for prompt in prompts):
                print(f"note: reward {name!r} takes {parameter!r}, which TRL has and this project "
                      f"has not; it keeps its default. There are {', '.join(FACTS)}")


# ------------------------------------------------------------------------------------------------
# several scores, one reward


def all_equal(groups, rounding=0.0):
    """(B,) True for groups of rewards (B, G) that are all the same number, up to 1e-9 of their size
    or up to `rounding` (B,), if that is more. NaN is left out."""
    # NaN is never the least or the greatest; of NaN alone the spread is -inf
    spread = groups.nan_to_num(-math.inf).amax(1) - groups.nan_to_num(math.inf).amin(1)
    size = groups.nan_to_num(0.0).abs().amax(1)
    return (spread <= 1e-9 * size) | (spread <= rounding)


def counted_scores(scores, weights):
    """The scores (N, k) and weights (k,) of functions of a weight other than 0, in float64: a
    function that is only watched must change nothing."""
    weights = torch.tensor(weights, dtype=torch.float64)
    return scores[:, weights != 0].double(), weights[weights != 0]


def without_rounding(sums, terms):
    """Sums (B, G) of terms (B, G, k): those of a group that differ by rounding alone become one
    number, since a group of equal rewards must teach nothing, and rounding divided by its own
    standard deviation would."""
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
