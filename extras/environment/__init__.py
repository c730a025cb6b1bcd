"""
Several turns: an environment answers completions while they are sampled.

    def environment(prompts, transcripts):      # in a config file
        return [" Warm." if text.endswith("?") else None for text in transcripts]

Its answer is written behind the token that it answers, and the rollout's sampled_mask is False
there. The policy reads these forced tokens like any others and samples on from its cache, so
nothing is tokenised twice.
Shapes: N rows of a rollout, n that still run, T tokens at most.
"""
import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import torch

from data.tokenizer import end_tokens
from judge.rewards import arguments_of, call
from common.script import BadInput, shown
from extras.environment.tools import (
    STOP, check_prompts_name, check_tools, tool_environment)


def answering(tokenizer, cfg, prompts, num_generations):
    """The `respond` of rollout.generate for these prompts."""
    asked = [prompt for prompt in prompts for _ in range(num_generations)]
    return functools.partial(respond, tokenizer, asked, with_environment(cfg))


def with_environment(cfg):
    """The settings, with a table of tools made into an environment: the end of a call asks it."""
    if not cfg.tools:
        return cfg
    functions = cfg.functions | {"environment": tool_environment(cfg.tools)}
    stop_strings = tuple(dict.fromkeys([*cfg.stop_strings, STOP]))
    return replace(cfg, functions=functions, stop_strings=stop_strings)


def try_environment(cfg, prompts):
    """Try the environment before anything is trained: every prompt must have the columns that it
    asks for, and an empty transcript and each stop string an answer."""
    if cfg.tools:
        check_tools(cfg.tools)
        check_prompts_name(cfg.tools, [prompt.text for prompt in prompts])
    cfg = with_environment(cfg)
    function = cfg.functions["environment"]
    arguments_of("environment", function, prompts, [], "transcripts")
    transcripts = ["", *cfg.stop_strings]
    ask(function, prompts[:1] * len(transcripts), transcripts)


def respond(tokenizer, asked, cfg, first, r, rows, t, column):
    """Let the environment answer those of the rows (n,) of r that end a turn with token t.

    Row i of r completes asked[first + i]. column: where token t stands in r.tokens. An answer's
    tokens are forced as far as there is room. The row has ended where the answer is None, where it
    is "" after an end token, and where it would be one more than max_turns.
    """
    turns = ended_turns(tokenizer, cfg.stop_strings, r, rows, t, column)
    if not turns:
        return
    prompts = [asked[first + turn.row] for turn in turns]
    answers = ask(cfg.functions["environment"], prompts, [turn.text for turn in turns])
    room = r.sampled_mask.shape[1] - t - 1
    for turn, answer in zip(turns, answers):
        goes_on = turn.num_answers < cfg.max_turns if answer else answer == "" and not turn.at_end
        ids = tokenizer.encode_ordinary(answer)[:room] if goes_on else []
        r.ended[turn.row] = not goes_on
        r.tokens[turn.row, column + 1:column + 1 + len(ids)] = torch.tensor(ids)
        r.sampled_mask[turn.row, t + 1:t + 1 + len(ids)] = False


class Turn(NamedTuple):
    """A row whose token t calls for an answer."""
    row: int            # of the rollout
    at_end: bool        # token t is an end token
    text: str           # the whole completion, without the policy's end tokens
    num_answers: int    # before this one


def ended_turns(tokenizer, stop_strings, r, rows, t, column):
    """A Turn for each of the rows (n,) whose token t is the policy's end token, or completes a
    stop string in the policy's own words."""
    stops = tokens_that_may_stop(tokenizer, stop_strings).to(rows.device)
    may_stop = r.ended[rows] | torch.isin(r.tokens[rows, column], stops)
    drawn = r.completion_mask[rows, t] & r.sampled_mask[rows, t]
    rows = rows[drawn & may_stop]                                   # waits for a GPU
    columns = (rows, r.ended[rows], r.tokens[rows, column - t:column + 1],
               r.sampled_mask[rows, :t + 1])
    ends = end_tokens(tokenizer)
    turns = []
    for row, at_end, ids, sampled in zip(*(x.tolist() for x in columns)):
        forced = [i for i, own in enumerate(sampled) if not own]
        own_ids = ids[forced[-1] + 1:] if forced else ids
        if at_end or reaches_stop(tokenizer, own_ids, stop_strings):
            text = tokenizer.decode([i for i, own in zip(ids, sampled) if not (own and i in ends)])
            num_answers = sum(own and not after for own, after in itertools.pairwise(sampled))
            turns.append(Turn(row, at_end, text, num_answers))
    return turns


@functools.lru_cache(maxsize=1)
def tokens_that_may_stop(tokenizer, stop_strings):
    """Ids of the tokens that hold the last byte of a stop string."""
    last = {text.encode()[-1] for text in stop_strings}
    found = []
    for i in range(tokenizer.n_vocab):
        try:
            if not last.isdisjoint(tokenizer.decode_single_token_bytes(i)):
                found.append(i)
        except KeyError:    # an id without a token
            continue
    return torch.tensor(found)


def reaches_stop(tokenizer, ids, stop_strings):
    """Tell whether the last of the ids completes a stop string."""
    text = tokenizer.decode(ids)
    before = tokenizer.decode(ids[:-1])
    return any(text.count(stop) > before.count(stop) for stop in stop_strings)


def ask(function, prompts, transcripts):
    """Call the environment -> a text or None for each transcript. BadInput for anything else."""
    answers = call("environment", function, prompts, transcripts, "transcripts")
    is_list = isinstance(answers, (list, tuple)) and len(answers) == len(transcripts)
    if not is_list or not all(answer is None or isinstance(answer, str) for answer in answers):
        raise BadInput(f"environment returned {shown(answers)}: must be a list with a text, or "
                       f"None, for each of {len(transcripts)} transcripts")
    return answers
