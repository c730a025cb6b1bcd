"""Call reward functions, the judge's and those of a config file, and environments.

A mistake in a user's function ends in one line that names the function and an example.
"""
import copy
import inspect
import math
import time

import torch

from common.script import BadInput, shown, user_error, users_code
from judge import reward_functions

LARGEST = 1e16      # the square of a reward must fit into float32
SEARCH_SECONDS = 10     # for the example that makes a function fail
FACTS = ("completion_ids", "ended", "iteration")     # see reward_facts
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
    """Call a user's function. If it raises, BadInput names the first example that makes it raise,
    called alone; the function's own traceback is a note of the BadInput."""
    arguments = arguments_of(what, function, prompts, texts, name, facts)
    try:
        with users_code():
            return function(**arguments)
    except BadInput:
        raise
    except (Exception, SystemExit) as e:
        error = e

    # which of the examples makes it fail?
    if len(texts) == 1:
        example = f", for the prompt {shown(prompts[0].text)} and completion {shown(texts[0])}"
        raise user_error(what, error, example)
    until = time.monotonic() + SEARCH_SECONDS
    for i, (prompt, text) in enumerate(zip(prompts, texts)):
        if time.monotonic() < until:
            call(what, function, [prompt], [text], name, rows_of(facts, slice(i, i + 1)))
    raise user_error(what, error)       # each alone is fine


def rows_of(facts, rows):
    """What `facts` holds of some rows."""
    return facts and {name: x[rows] if isinstance(x, list) else x for name, x in facts.items()}


def reward_facts(rollout, iteration):
    """What a reward may ask for by name beside columns: the ids of each completion, its end token
    included; whether it ended by itself; the iteration, from 1, and in an evaluation the number of
    those that are done."""
    return {"completion_ids": rollout.completions(()), "ended": rollout.ended.tolist(),
            "iteration": iteration}


def score_by(name, function, prompts, completions, facts=None):
    """Score the completions with one reward function -> list of N floats."""
    if not completions:     # of several processes one may have none
        return []
    if name == "judge":     # ours: its errors, such as out of memory, are reported elsewhere
        return [math.nan if x is None else x for x in function(completions)]
    values = call(f"reward {name!r}", function, prompts, completions, facts=facts)

    # None abstains; all else is a number
    try:
        if isinstance(values, (dict, bytes, bytearray)):    # a list of it has the keys, the bytes
            raise TypeError
        values = list(values)
        numbers = [math.nan if v is None else float(v) for v in values]
    except (TypeError, ValueError, RuntimeError, OverflowError) as e:
        raise BadInput(f"reward {name!r} returned {shown(values)}: must be one number per "
                       "completion") from e

    # one for each completion, finite, and with a square that is finite too
    if len(numbers) != len(completions):
        raise BadInput(f"reward {name!r} returned {len(numbers)} numbers for {len(completions)} "
                       "completions")
    for value, number, completion in zip(values, numbers, completions):
        is_number = not isinstance(value, str) and abs(number) <= LARGEST
        if value is not None and not is_number:
            raise BadInput(f"reward {name!r} returned {shown(value)} for the completion "
                           f"{completion!r}: must be a finite number up to {LARGEST:g}, or None")
    return numbers


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


def try_rewards(cfg, prompts):
    """Try the config file's rewards before anything is trained: every prompt must have the columns
    that they ask for. They score two whole groups, since a reward may compare the completions of a
    prompt: none, one, two ... words of prompts in place of completions."""
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

    # and do they answer? Completions are not there yet: take words of prompts
    if not functions:
        return
    G = cfg.num_generations
    asked = [prompt for prompt in (prompts[0], prompts[-1]) for _ in range(G)]
    counts = [i % 64 for i in range(2 * G)]
    words = [word for prompt in prompts[:8] for word in prompt.text.split()] * 64
    ids = [i for prompt in prompts[:8] for i in prompt.ids] * 64
    facts = {"completion_ids": [ids[:count] for count in counts], "ended": [True] * 2 * G,
            "iteration": 0}
    score(functions, asked, [" ".join(words[:count]) for count in counts], facts)


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
