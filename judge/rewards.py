"""Calls reward functions, the judge's and those of a config file, and environments.

A mistake in a user's function ends in one line that names the function and an example.
"""
import contextlib
import inspect
import itertools
import math
import time

import torch

from common.script import BadInput, own_torch, panics_as_errors, shown, user_error
from judge import reward_functions

LARGEST = 1e16      # the square of a reward must fit into float32
SEARCH_SECONDS = 10     # for the example that makes a function fail


def arguments_of(what, function, prompts, texts, name="completions"):
    """Collect the arguments of a user's function -> {name of a parameter: argument}.

    As in TRL all go by name: prompts, completions (for an environment: transcripts), and columns of
    the prompts' file. **kwargs takes all of these.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if name not in parameters and not takes_all:
        raise BadInput(f"{what} takes {signature}: must take (prompts, {name}), by these names; "
                       "columns of the prompts' file may follow")
    needed = {p.name for p in parameters.values()
              if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for prompt in prompts:
        for column in sorted(needed - {"prompts", name} - set(prompt.row)):
            raise BadInput(f"{what} asks for the column {column!r}: add it to the prompts' file; "
                           f"the prompt {shown(prompt.text)} has {sorted(map(str, prompt.row))}")
    columns = {column for prompt in prompts for column in prompt.row}
    known = {column: [prompt.row.get(column) for prompt in prompts] for column in columns}
    known |= {"prompts": [prompt.text for prompt in prompts], name: texts}
    return {column: x for column, x in known.items() if takes_all or column in parameters}


def call(what, function, prompts, texts, name="completions"):
    """Call a user's function. If it raises, BadInput names the first example that makes it raise,
    called alone; the function's own traceback is a note of the BadInput."""
    arguments = arguments_of(what, function, prompts, list(texts), name)    # it may change its list
    try:
        with contextlib.chdir("."), own_torch(), panics_as_errors():    # it may leave the folder
            return function(**arguments)
    except BadInput:
        raise
    except (Exception, SystemExit) as e:
        error = e
    if len(texts) == 1:
        example = f", for the prompt {shown(prompts[0].text)} and completion {shown(texts[0])}"
        raise user_error(what, error, example)
    until = time.monotonic() + SEARCH_SECONDS
    for prompt, text in zip(prompts, texts):
        if time.monotonic() < until:
            call(what, function, [prompt], [text], name)
    raise user_error(what, error)       # each alone is fine


def score_by(name, function, prompts, completions):
    """Score the completions with one reward function -> list of N floats."""
    if not completions:     # of several processes one may have none
        return []
    if name == "judge":     # ours: what it raises, such as out of memory, is said elsewhere
        return [math.nan if x is None else x for x in function(completions)]
    values = call(f"reward {name!r}", function, prompts, completions)
    try:
        if isinstance(values, (dict, bytes, bytearray)):    # a list of it has the keys, the bytes
            raise TypeError
        values = list(itertools.islice(values, len(completions) + 1))   # it may have no end
        numbers = [math.nan if v is None else float(v) for v in values]
    except (TypeError, ValueError, RuntimeError, OverflowError) as e:
        raise BadInput(f"reward {name!r} returned {shown(values)}: must be one number per "
                       "completion") from e
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
def score(reward_funcs, prompts, completions):
    """Score the completions of N prompts (data.prompts.Prompt) with every function -> (N, K).

    A function returns one number per completion, higher is better. None abstains and becomes NaN.
    """
    columns = [score_by(name, function, prompts, completions)
               for name, function in reward_funcs.items()]
    return torch.tensor(columns).T


def try_rewards(cfg, prompts):
    """Try the config file's rewards before anything is trained: every prompt must have the columns
    that they ask for. They score a few prompts in place of completions, and an empty one."""
    functions = reward_functions(cfg, judges={})
    functions.pop("judge", None)
    for name, function in functions.items():
        arguments_of(f"reward {name!r}", function, prompts, [])
    texts = [prompt.text for prompt in prompts[:8]]
    if functions:
        score(functions, prompts[:8] + prompts[:1], [*texts, ""])
