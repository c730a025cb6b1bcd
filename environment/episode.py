"""
Several turns: an environment answers completions while they are sampled.

    def environment(prompts, transcripts):      # in a config file; docs/environments.md
        return [" Warm." if text.endswith("?") else None for text in transcripts]

Its words are written behind the token that it answers, where the rollout's `chosen` is False. The
next steps read them like any token, so sampling goes on from the cache and nothing is tokenised
twice. Openings (force_text) are forced in the same way, at the start. Shapes: N rows of a rollout,
n that still run, m that stopped at this token, T tokens at most.
"""
import functools
import itertools
from typing import NamedTuple

import torch

from data.tokenizer import end_tokens
from environment.tools import check_prompts_name
from judge.rewards import arguments_of, call
from run.script import BadInput, seed_for, shown

# --------------------------------------------------------------------------------------------------
# before a rollout


def answering(tokenizer, prompts, cfg, num_generations):
    """The `respond` of sample.generate for these prompts; None without an environment."""
    if not cfg.answers:
        return None
    asked = [prompt for prompt in prompts for _ in range(num_generations)]
    return functools.partial(respond, tokenizer, asked, cfg)


def openings(tokenizer, cfg, num_prompts, seed):
    """The `forced` of sample.generate (N, T): force_text at the start of a share force_rate of the
    rows, drawn from the seed. None if nothing is forced."""
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
    in place of transcripts, an empty one, and one of each stop string.
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
    """Let the environment answer those of the rows (n,) of r whose token t calls for it: the
    policy's end token, or one that completes a stop string.

    Row i of r completes asked[first + i]. column: where token t stands in r.tokens. The answer's
    tokens are forced, as far as there is room, and the row goes on. It has ended where the answer
    is None, is "" after an end token, or would be one more than max_turns.
    """
    rows = rows_to_read(tokenizer, cfg.stop_strings, r, rows, t, column)    # a GPU is waited for
    spoken = read(tokenizer, r, rows, t, column) if len(rows) else []
    spoken = [s for s in spoken if s.ended or reaches_stop(tokenizer, s.turn, cfg.stop_strings)]
    if not spoken:
        return
    prompts = [asked[first + s.row] for s in spoken]
    answers = ask(cfg.functions["environment"], prompts, [s.text for s in spoken])
    room = r.completion_mask.shape[1] - t - 1
    said = []
    for s, answer in zip(spoken, answers):
        if answer:
            over = s.num_answers == cfg.max_turns
        else:
            over = answer is None or s.ended
        ids = [] if over else tokenizer.encode_ordinary(answer)[:room]
        said.append([s.row, over, *ids, *[-1] * (room - len(ids))])
    force_behind(r, torch.tensor(said).to(r.tokens.device), t, column)


def force_behind(r, said, t, column):
    """Force what was said (m, 2 + room) behind token t: a row, whether it is over, ids or -1."""
    rows = said[:, 0]
    ids = said[:, 2:]
    forced = ids >= 0
    places = slice(column + 1, column + 1 + ids.shape[1])
    r.ended[rows] = said[:, 1] > 0
    r.tokens[rows, places] = ids.where(forced, r.tokens[rows, places])
    r.sampled_mask[rows, t + 1:] &= ~forced


def rows_to_read(tokenizer, stop_strings, r, rows, t, column):
    """Those of the rows (n,) whose token t is the policy's own and may call the environment."""
    may_stop = tokens_that_may_stop(tokenizer, stop_strings, r.tokens.device)
    token = r.tokens[rows, column].clamp(max=len(may_stop) - 1)   # a model may have more than these
    drawn = r.completion_mask[rows, t] & r.sampled_mask[rows, t]
    return rows[drawn & (r.ended[rows] | may_stop[token])]


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


class Spoken(NamedTuple):
    """A row so far."""
    row: int            # of the rollout
    ended: bool         # its last token is an end token
    text: str           # the whole completion, without end tokens
    turn: list          # ids behind the last forced token
    num_answers: int


def read(tokenizer, r, rows, t, column):
    """Spoken of each of the rows (m,), up to token t."""
    ids = r.tokens[rows, column - t:column + 1]                                     # (m, t + 1)
    chosen = r.sampled_mask[rows, :t + 1]
    columns = torch.cat([rows[:, None], r.ended[rows, None], ids, chosen], 1)   # fetched at once
    ends = end_tokens(tokenizer)
    spoken = []
    for row, ended, *rest in columns.tolist():
        ids = rest[:t + 1]
        chosen = rest[t + 1:]
        text = tokenizer.decode([i for i, own in zip(ids, chosen) if not (own and i in ends)])
        forced = [i for i, own in enumerate(chosen) if not own]
        turn = ids[forced[-1] + 1:] if forced else ids
        num_answers = sum(own and not after for own, after in itertools.pairwise(chosen))
        spoken.append(Spoken(row, bool(ended), text, turn, num_answers))
    return spoken


def reaches_stop(tokenizer, turn, stop_strings):
    """Tell whether the last token of a turn completes a stop string."""
    text = tokenizer.decode(turn)
    before = tokenizer.decode(turn[:-1])
    return any(text.count(stop) > before.count(stop) for stop in stop_strings)


def ask(function, prompts, transcripts):
    """Call the environment -> a text or None for each transcript. BadInput for anything else."""
    answers = call("environment", function, prompts, transcripts)
    if not isinstance(answers, (list, tuple)):
        raise BadInput(f"environment returned {shown(answers)}: must be a list with a text, or "
                       "None, for each transcript")
    if len(answers) != len(transcripts):
        raise BadInput(f"environment returned {len(answers)} answers for {len(transcripts)} "
                       "transcripts")
    for answer, transcript in zip(answers, transcripts):
        if answer is not None and not is_plain_text(answer):
            raise BadInput(f"environment returned {shown(answer)} for the transcript "
                           f"{shown(transcript)}: must be a text, or None where the episode is "
                           "over")
    return answers


def is_plain_text(answer):
    """Tell whether an answer is a text that can be encoded: no bytes, no lone surrogate."""
    try:
        answer.encode()
    except (AttributeError, UnicodeEncodeError):
        return False
    return isinstance(answer, str)
