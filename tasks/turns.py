"""
Several turns: an environment answers completions while they are sampled.

    def environment(prompts, transcripts):      # in a config file; docs/tasks.md
        return [" Warm." if text.endswith("?") else None for text in transcripts]

Its answer is written behind the token that it answers, and the rollout's sampled_mask is False
there. The policy reads these forced tokens like any others and samples on from its cache, so
nothing is tokenised twice. force_text is forced in the same way, at the start of a completion.
Shapes: N rows of a rollout, n that still run, m that are answered at this token, T tokens at most.
"""
import functools
import itertools
from typing import NamedTuple

import torch

from data.tokenizer import end_tokens
from judge.rewards import arguments_of, call
from run.script import BadInput, seed_for, shown
from tasks.tools import check_prompts_name

# --------------------------------------------------------------------------------------------------
# before a rollout


def answering(tokenizer, prompts, cfg, num_generations):
    """The `respond` of sample.generate for these prompts. None without an environment."""
    if not cfg.answers:
        return None
    asked = [prompt for prompt in prompts for _ in range(num_generations)]
    return functools.partial(respond, tokenizer, asked, cfg)


def openings(tokenizer, cfg, num_prompts, seed):
    """The `forced` of sample.generate (N, T): a share force_rate of the rows begins with
    force_text. Which rows do is drawn from the seed. None if no row does."""
    if not cfg.force_rate:
        return None
    N = num_prompts * cfg.num_generations
    ids = tokenizer.encode_ordinary(cfg.force_text)
    if not len(ids) < cfg.max_completion_length:
        raise BadInput(f"force_text = {shown(cfg.force_text)}: its {len(ids)} tokens leave no room "
                       f"in max_completion_length = {cfg.max_completion_length}")
    generator = torch.Generator().manual_seed(seed_for(seed, "force"))
    opened = torch.rand(N, generator=generator) < cfg.force_rate
    forced = torch.full((N, cfg.max_completion_length), -1)
    forced[:, :len(ids)] = torch.where(opened[:, None], torch.tensor(ids), -1)
    return forced


def try_environment(cfg, prompts, tokenizer):
    """Try the environment and force_text before anything is trained.

    Every prompt must have the columns that the environment asks for. Then it answers a few prompts
    in place of transcripts, an empty transcript, and one of each stop string.
    """
    openings(tokenizer, cfg, 1, seed=0)
    if not cfg.answers:
        return
    if cfg.tools:
        check_prompts_name(cfg.tools, [prompt.text for prompt in prompts])
    function = cfg.functions["environment"]
    arguments_of("environment", function, prompts, [])
    some = prompts[:8]
    transcripts = [*(prompt.text for prompt in some), "", *cfg.stop_strings]
    asked = list(itertools.islice(itertools.cycle(some), len(transcripts)))
    ask(function, asked, transcripts)


# --------------------------------------------------------------------------------------------------
# after a token


def respond(tokenizer, asked, cfg, first, r, rows, t, column):
    """Let the environment answer those of the rows (n,) of r that end a turn with token t.

    Row i of r completes asked[first + i]. column: where token t stands in r.tokens. An answer's
    tokens are forced as far as there is room, and the row goes on. The row has ended where the
    answer is None, where it is "" after an end token, and where it would be one more than
    max_turns.
    """
    turns = ended_turns(tokenizer, cfg.stop_strings, r, rows, t, column)
    if not turns:
        return
    prompts = [asked[first + turn.row] for turn in turns]
    answers = ask(cfg.functions["environment"], prompts, [turn.text for turn in turns])
    room = r.sampled_mask.shape[1] - t - 1
    answer_ids = torch.full((len(turns), room), -1)
    over = []
    for i, (turn, answer) in enumerate(zip(turns, answers)):
        if answer:
            over.append(turn.num_answers == cfg.max_turns)
        else:
            over.append(answer is None or turn.at_end)
        ids = [] if over[i] else tokenizer.encode_ordinary(answer)[:room]
        answer_ids[i, :len(ids)] = torch.tensor(ids)

    device = r.tokens.device
    rows = torch.tensor([turn.row for turn in turns], device=device)                # (m,)
    answer_ids = answer_ids.to(device)                                              # (m, room)
    places = slice(column + 1, column + 1 + room)
    r.ended[rows] = torch.tensor(over, device=device)
    r.tokens[rows, places] = answer_ids.where(answer_ids >= 0, r.tokens[rows, places])
    r.sampled_mask[rows, t + 1:] &= answer_ids < 0


class Turn(NamedTuple):
    """A row whose token t calls for an answer."""
    row: int            # of the rollout
    at_end: bool        # token t is an end token
    text: str           # the whole completion, without the policy's end tokens
    num_answers: int    # before this one


def ended_turns(tokenizer, stop_strings, r, rows, t, column):
    """A Turn for each of the rows (n,) whose token t is the policy's end token, or completes a
    stop string in the policy's own words."""
    may_stop = tokens_that_may_stop(tokenizer, stop_strings, r.tokens.device)
    token = r.tokens[rows, column].clamp(max=len(may_stop) - 1)     # a model may have more
    drawn = r.completion_mask[rows, t] & r.sampled_mask[rows, t]
    rows = rows[drawn & (r.ended[rows] | may_stop[token])]          # waits for a GPU
    if not len(rows):
        return []
    ids = r.tokens[rows, column - t:column + 1]                                     # (n, t + 1)
    sampled = r.sampled_mask[rows, :t + 1]
    columns = torch.cat([rows[:, None], r.ended[rows, None], ids, sampled], 1)      # fetched once
    ends = end_tokens(tokenizer)
    turns = []
    for row, at_end, *rest in columns.tolist():
        ids = rest[:t + 1]
        sampled = rest[t + 1:]
        forced = [i for i, own in enumerate(sampled) if not own]
        own_ids = ids[forced[-1] + 1:] if forced else ids
        if at_end or reaches_stop(tokenizer, own_ids, stop_strings):
            text = tokenizer.decode([i for i, own in zip(ids, sampled) if not (own and i in ends)])
            num_answers = sum(own and not after for own, after in itertools.pairwise(sampled))
            turns.append(Turn(row, bool(at_end), text, num_answers))
    return turns


@functools.lru_cache(maxsize=1)
def tokens_that_may_stop(tokenizer, stop_strings, device):
    """(n_vocab,) True for tokens that hold the last byte of a stop string."""
    last = {text.encode()[-1] for text in stop_strings}
    found = torch.zeros(tokenizer.n_vocab, dtype=torch.bool)
    for i in range(tokenizer.n_vocab if last else 0):
        try:
            found[i] = not last.isdisjoint(tokenizer.decode_single_token_bytes(i))
        except KeyError:    # an id without a token
            continue
    return found.to(device)


def reaches_stop(tokenizer, ids, stop_strings):
    """Tell whether the last of the ids completes a stop string."""
    text = tokenizer.decode(ids)
    before = tokenizer.decode(ids[:-1])
    return any(text.count(stop) > before.count(stop) for stop in stop_strings)


def ask(function, prompts, transcripts):
    """Call the environment -> a text or None for each transcript. BadInput for anything else."""
    answers = call("environment", function, prompts, list(transcripts))
    if not isinstance(answers, (list, tuple)) or len(answers) != len(transcripts):
        raise BadInput(f"environment returned {shown(answers)}: must be a list with a text, or "
                       f"None, for each of {len(transcripts)} transcripts")
    for answer, transcript in zip(answers, transcripts):
        if answer is not None and not is_plain_text(answer):
            raise BadInput(f"environment returned {shown(answer)} for the transcript "
                           f"{shown(transcript)}: must be a text, or None to end the episode")
    return answers


def is_plain_text(answer):
    """Tell whether an answer is a text that can be encoded: no bytes, no lone surrogate."""
    try:
        answer.encode()
    except (AttributeError, UnicodeEncodeError):
        return False
    return isinstance(answer, str)
