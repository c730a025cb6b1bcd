"""
Several turns: an environment answers completions while they are sampled.

    def environment(prompts, transcripts):      # in a config file
        return [" Warm." if text.endswith("?") else None for text in transcripts]

The answer is written after the token that ended the turn, with the rollout's sampled_mask False.
The policy reads these forced tokens like its own and samples on from its cache, so nothing is
tokenised twice.
Shapes: N rows of a rollout, n that still run, m that end a turn, T tokens at most.
"""
import functools
from dataclasses import replace

import torch

from common.errors import BadInput, shown
from data.tokenizer import texts_of
from judge.rewards import call, check_columns
from extras.environment.tools import STOP, answer_calls, check_prompts_name


def answering(tokenizer, cfg, prompts):
    """The `respond` of rollout.generate. prompts: the prompt of each completion (N)."""
    return functools.partial(respond, tokenizer, prompts, *environment_of(cfg), cfg.max_turns)


def environment_of(cfg):
    """The function that answers, and the stop strings at which it is called. Tools are called at
    the end of a call in the text."""
    if cfg.tools:
        return functools.partial(answer_calls, cfg.tools), (*cfg.stop_strings, STOP)
    return cfg.functions["environment"], cfg.stop_strings


def check_environment(cfg, prompts):
    """Before training: every prompt must have the columns that the environment takes."""
    if cfg.tools:
        check_prompts_name(cfg.tools, [prompt.text for prompt in prompts])
    function, _ = environment_of(cfg)
    check_columns("environment", function, prompts, ["transcripts"])


def respond(tokenizer, prompts, function, stop_strings, max_turns, first, r, rows, t, column):
    """Let the environment answer the rows (n,) of r that end a turn with token t.

    Row i of r completes prompts[first + i]. column: the column of token t in r.tokens.
    """
    turns = ended_turns(tokenizer, stop_strings, r, rows, t, column)
    if not turns:
        return
    transcripts = texts_of(tokenizer, replace(r, allowed=None)[turns])
    answers = ask(function, [prompts[first + row] for row in turns], transcripts)
    # count earlier answers: the mask changes at the beginning and at the end of each
    num_answers = r.sampled_mask[turns, :t + 1].diff().sum(1) // 2                  # (m,)
    room = r.sampled_mask.shape[1] - t - 1
    for row, n, answer in zip(turns, num_answers.tolist(), answers):
        if answer is None:          # the episode is over
            goes_on = False
        elif answer == "":          # silence: the policy goes on, unless the row has ended
            goes_on = not r.ended[row]
        else:                       # is a turn left for this answer?
            goes_on = n < max_turns

        # write its tokens, as far as there is room
        ids = tokenizer.encode_ordinary(answer)[:room] if goes_on else []
        r.ended[row] = not goes_on
        r.tokens[row, column + 1:column + 1 + len(ids)] = torch.tensor(ids)
        r.sampled_mask[row, t + 1:t + 1 + len(ids)] = False


def ended_turns(tokenizer, stop_strings, r, rows, t, column):
    """List the rows (n,) whose token t is the policy's end token, or completes a stop string in the
    policy's own words."""
    longest = max((len(stop.encode()) for stop in stop_strings), default=1)
    first = max(0, t + 1 - longest)     # a token has at least one byte
    drawn = r.completion_mask[rows, t] & r.sampled_mask[rows, t]
    rows = rows[drawn]                                              # waits for a GPU
    ids = r.tokens[rows, column - t + first:column + 1]
    num_own = r.sampled_mask[rows, first:t + 1].flip(1).cumprod(1).sum(1)   # the last ones
    columns = (rows, r.ended[rows], ids, num_own)
    return [row for row, at_end, ids, n in zip(*(x.tolist() for x in columns))
            if at_end or reaches_stop(tokenizer, ids[-n:], stop_strings)]


def reaches_stop(tokenizer, ids, stop_strings):
    """Whether the last of the ids completes a stop string."""
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
