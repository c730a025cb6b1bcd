"""The policy's prompts: starts of held-out comments, or the rows of a file or of a function."""
import copy
import operator
import random
from typing import NamedTuple

import torch

from common.errors import BadInput, shown
from common.files import ending_of, read_rows
from common.hooks import select_arguments
from common.processes import all_gather
from common.seeds import seed_for
from data.comments import as_text, field_of, load_splits
from data.tokenizer import special_tokens

SEED = 0                # for the config file's `questions`
NUM_QUESTIONS = 4096


class Prompt(NamedTuple):
    text: str
    ids: list   # its tokens
    row: dict   # all columns of its row, for rewards; {"text": text} if there are none


def starts_of(comments, cfg):
    """Take the first words of each comment, as many as drawn from prompt_words. Skip comments that
    leave nothing to complete."""
    rows = []
    for text, _ in comments:
        words = text.split(" ")
        count = random.Random(text).randint(*cfg.prompt_words)
        if len(words) > count:
            rows.append({"text": " ".join(words[:count])})
    return rows


def encode_prompt(tokenizer, content, where):
    """Encode a prompt, a text or a list of messages for a chat model -> (its text for rewards and
    logs, its ids). If the model's own tokenizer begins a text with <bos>, so do the ids. where:
    names the prompt in a BadInput."""
    # a chat, in the model's own template
    if isinstance(content, list):
        if getattr(tokenizer, "chat_template", None) is None:   # only a published model has one
            raise BadInput(f"{where} is {shown(content)}: must be text: a list is for messages, "
                           "and this policy has no chat template")
        return tokenizer.encode_chat(content, where)

    # or a plain text
    ids = tokenizer.encode_ordinary(content)
    before = getattr(tokenizer, "before_text", [])
    return content, [*before, *ids] if ids else []      # an empty prompt stays empty


def note_texts(tokenizer, texts, source):
    """Print a note where the tokens of texts may not be what the user means."""
    # a policy has hardly seen a word after a separate blank
    if count := sum(text.endswith((" ", "\t")) for text in texts):
        print(f"note: {source}: {count} of {len(texts)} end in a blank, but a word's token begins "
              "with one: remove the blanks")

    # as text, a mark is a dozen tokens of brackets and bars
    marks = [mark for text in texts for mark in special_tokens(tokenizer) if mark in text]
    if marks:
        print(f"note: {source}: hold a mark such as {marks[0]}, which stays text: give a chat as a "
              "list of messages")


def read_prompt(tokenizer, row, field, where):
    """Make the Prompt of a row: a text, or a list of messages. `where` names it in a BadInput."""
    content = field_of(row, field)
    if content is None:
        raise BadInput(f"{where} is {shown(row)}: must hold the prompt as {field!r}")

    # a reward takes a chat as `messages`, unless that is a column, and a text by its column
    if isinstance(content, list):
        row = {"messages": content} | row
    else:
        content = as_text(content, field, where)
    text, ids = encode_prompt(tokenizer, content, where)
    return Prompt(text, ids, row)


def rows_from(path, comments, cfg):
    """-> (name of the source, its rows as dicts, the field that holds the prompt). The source is a
    file, else the config file's `questions`, else comments. questions(n, seed) returns about n
    dicts, each with the prompt's "text" and whatever rewards need."""
    if path:
        return path, read_rows(path), "text" if ending_of(path) == ".txt" else cfg.prompt_field
    if "questions" in cfg.functions:
        return "questions", list(cfg.functions["questions"](NUM_QUESTIONS, SEED)), "text"
    return "comments", starts_of(comments, cfg), "text"


def prompts_from(path, comments, cfg, tokenizer, limit):
    """Prompts of 1 to `limit` tokens, so that there is room for a completion; see rows_from."""
    source, rows, field = rows_from(path, comments, cfg)
    prompts = [read_prompt(tokenizer, row, field, f"{source}: row {number}")
               for number, row in enumerate(rows, 1)]
    texts = [prompt.text for prompt in prompts if "messages" not in prompt.row]     # no chats
    note_texts(tokenizer, texts, f"{source}: prompts")
    fitting = [prompt for prompt in prompts if 1 <= len(prompt.ids) <= limit]
    left_out = len(prompts) - len(fitting)
    if left_out and source != "comments":       # there are plenty of comments
        print(f"{source}: {left_out} of {len(rows)} prompts are empty or longer than {limit} "
              "tokens (block_size - max_completion_length) and are left out")
    return fitting


def is_held_out(text):
    """True for a fifth of all texts, by a hash."""
    return seed_for(text) % 5 == 0


def load_prompts(cfg, tokenizer, block_size):
    """-> training prompts, evaluation prompts, and the remaining held-out prompts, lists of Prompt.
    Each has at least one token, and leaves room for a completion in the policy's block_size."""
    limit = block_size - cfg.max_completion_length
    from_comments = not cfg.prompts and "questions" not in cfg.functions
    splits = load_splits(cfg) if from_comments else {}
    train = prompts_from(cfg.prompts, splits.get("train_prompts"), cfg, tokenizer, limit)
    if cfg.eval_prompts or from_comments:
        held_out = prompts_from(cfg.eval_prompts, splits.get("eval_prompts"), cfg, tokenizer, limit)
    else:       # a fifth of a single source
        held_out = [prompt for prompt in train if is_held_out(prompt.text)]
        train = [prompt for prompt in train if not is_held_out(prompt.text)]

    if not train or not held_out:
        raise BadInput(f"prompts = {cfg.prompts!r}, eval_prompts = {cfg.eval_prompts!r}: "
                       f"{len(train)} prompts for training and {len(held_out)} for evaluation, of "
                       f"1 to {limit} tokens (block_size - max_completion_length); give more, or a "
                       "file for each")

    # as many as the settings say; the remaining held-out prompts are for a target
    train = train[:cfg.max_prompts or None]
    n = cfg.num_eval_prompts
    trained_on = {prompt.text for prompt in train}
    used = held_out if cfg.tracin_val_prompts else held_out[:n]
    count = sum(prompt.text in trained_on for prompt in used)
    if count > len(used) / 20:      # a few beginnings of comments are alike
        print(f"note: {count} of {len(used)} held-out prompts are trained on, too: they do not "
              "measure what the policy does on new prompts")
    if len(held_out) < n:
        print(f"note: num_eval_prompts = {n}: there are only {len(held_out)}")
    if cfg.tracin_val_prompts and cfg.tracin != "off" and len(held_out) <= n:
        raise BadInput(f"tracin_val_prompts = {cfg.tracin_val_prompts}: no held-out prompts are "
                       f"left beside num_eval_prompts = {n}")
    return train, held_out[:n], held_out[n:]


def draw_prompts(prompts, it, num_prompts, seed):
    """The prompts of iteration it. Every epoch goes through all prompts in a new random order."""
    n = len(prompts)
    epoch, first = divmod(it * num_prompts, n)
    order = []      # indices of this epoch, and of the epochs that the iteration runs into
    while len(order) < first + num_prompts:
        generator = torch.Generator().manual_seed(seed_for(seed, "prompts", epoch))
        order += torch.randperm(n, generator=generator).tolist()
        epoch += 1
    return [prompts[i] for i in order[first:first + num_prompts]]


def record_rewards(seen, prompts, batch, cfg):
    """Add the rewards of a Batch to seen, {index of a prompt: [rewards of a group, ...]}, if there
    is a function `choose` to use them. Held-out prompts are not among `prompts`, and not noted."""
    if "choose" not in cfg.functions:
        return
    index = {id(prompt): i for i, prompt in enumerate(prompts)}
    groups = batch.rewards.view(-1, cfg.num_generations).tolist()
    for prompt, rewards in zip(batch.prompts[::cfg.num_generations], groups):
        if id(prompt) in index:
            seen.setdefault(index[id(prompt)], []).append(rewards)


def choose_prompts(prompts, seen, it, cfg):
    """The prompts that the config file's `choose` picks for iteration `it`. It returns num_prompts
    indices, and may take, by name,

        prompts     [text], all prompts to train on
        rows        [dict], the columns of each
        rewards     for each prompt the rewards of its groups so far, oldest first: [[r_1 .. r_G],
                    ...], NaN where all functions abstained; [] if it was never drawn
        n           num_prompts
        iteration   from 1
        random      a random.Random of this iteration, so that a repeated run draws the same
    """
    # call it with the arguments it takes
    offered = dict(
        prompts=[prompt.text for prompt in prompts], rows=[prompt.row for prompt in prompts],
        rewards=[seen.get(i, []) for i in range(len(prompts))],
        n=cfg.num_prompts, iteration=it + 1,
        random=random.Random(seed_for(cfg.seed, "choose", it)))
    choose = cfg.functions["choose"]
    # copies: what choose changes in a row must not reach the rewards
    chosen = list(choose(**copy.deepcopy(select_arguments("choose", choose, offered))))
    if len(chosen) != cfg.num_prompts or not all(0 <= i < len(prompts) for i in chosen):
        raise BadInput(f"choose returned {shown(chosen)}: must be num_prompts = {cfg.num_prompts} "
                       f"indices from 0 to {len(prompts) - 1}")
    indices = [operator.index(i) for i in chosen]       # Python's error, if one is not an index
    indices = all_gather([indices])[0]      # rank 0's: a set may be ordered differently elsewhere
    return [prompts[i] for i in indices]


def prompts_of(setup, it, cfg):
    """The B prompts of iteration `it`: shuffled, unless the config file defines `choose`."""
    if "choose" in cfg.functions:
        return choose_prompts(setup.prompts, setup.seen, it, cfg)
    return draw_prompts(setup.prompts, it, cfg.num_prompts, cfg.seed)
