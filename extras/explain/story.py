"""
The story of a run: how the held-out reward, or the log-prob of a sentence, went along it, which
rollouts did that, and what it would be without them. account.py has the arithmetic, target.py what
is explained, told.py what is said.
"""
import inspect
import math
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import grpo
from common.cli import own_flags
from common.errors import BadInput, shown
from common.files import read_json, read_log, read_rows
from common.seeds import hash_of, seed_for
from data.prompts import read_prompt
from extras.explain import told
from extras.explain.account import account, flat, parts_of, replay, smoothness, walk_back
from extras.explain.groups import rows_of, splits_of
from extras.explain.number import total
from extras.explain.page import Told, show
from extras.explain.target import Function, HeldOut, Sentences, follow
from extras.explain.words import pieces_of
from loss import by_micro_batch, objective_of
from rollout import concatenate, empty_rollout
from run.checkpoint import (
    changed_settings, checkpoints, iterations_of, load_checkpoint, newest_checkpoint,
    read_checkpoint)
from run.inputs import changed_inputs, what_was_read
from run.settings import load_settings, read_run, settings_that_are

FLAGS = dict(target="", prompt="", completion="", prompts="", account=False, by="", held_out=0,
             exact=False, since=0, parts=1, hessian=True)
WORST = 3           # completions that are told of with --account=True
OTHER = 0.1         # of the change that a replay may be off
# CPU time, where a rollout that the run samples and learns from takes 1 (config/toxicity.py)
SLOWER = 2.2        # the same rollout, replayed and on the tape
PASS = 0.7          # a further pass, for a part of the rest of the loss
PREDICTION = 5      # effects and smoothness
TOKENS = 4.3        # shares of its tokens, with their errors
HELD_OUT = 0.38     # a held-out completion
EVALUATED = 0.5     # a completion of an evaluation
LEAST = 64          # held-out completions at each point
SMOOTH = 0.70       # below it nothing is said of single rollouts left out (docs/account.md)

# ------------------------------------------------------------------------------------------------
# which run


def check_run(setup, cfg, folder, path, last):
    """Refuse a run that is not the one that was made -> names of what has changed and may compute
    the same: code, versions, and what changed when the run itself went on."""
    if last["base_hash"] != hash_of(setup.base):
        raise BadInput(f"{path}: this run began from another policy than the settings name now; "
                       "the policy must be the one that it began from")
    if "after" in cfg.functions:
        raise BadInput("after: changes the loop between iterations, and an account repeats it as "
                       f"the settings of {folder} have it")
    harmless = settings_that_are("harmless")
    for name, (was, now) in changed_settings(last["settings"], cfg).items():
        is_harmless = name in harmless or name == "micro_batch_size" and not by_micro_batch(cfg)
        if not is_harmless:
            raise BadInput(f"{name} = {now!r}: must be {was!r} as in {path}, whose run is repeated")
    # what the names stand for
    inputs = changed_inputs(last["has_read"], what_was_read(setup, cfg))
    for name in inputs:
        if not name.startswith(("code in", "device", "dtype", "torch", "threads")):
            raise BadInput(f"{name}: not what this run has read, by the hash in {path}: the run is "
                           "repeated with what it had")
    if read_run(folder)["source"] != cfg.source:
        raise BadInput(f"{folder}: is repeated with the config file that it had; name its own "
                       f"copy, {folder}/config.py, or none if it had none")
    midway = [f"{name} changed after iteration {done}" for done, name, *_ in last["changes"]
              if name not in (*harmless, "max_iters")]
    return [*midway, *inputs]


def go_to(setup, cfg, folder, since):
    """Load the last checkpoint up to iteration `since`, if there is one -> its iteration, or 0."""
    earlier = [path for path in checkpoints(folder) if iterations_of(path) <= since]
    if not earlier:
        return 0
    return load_checkpoint(earlier[-1], setup, cfg)["iteration"]


# ------------------------------------------------------------------------------------------------
# what it costs, and whether what was repeated is the run


class Price(NamedTuple):
    """What an account takes in CPU time, in rollouts that the run samples and learns from."""
    run: float          # the run itself, with its evaluations
    account: float      # without held-out completions
    tokens: float       # their shares
    prediction: float
    steps: int
    points: int         # where held-out completions are drawn

    def times(self, completions, more=0.0):
        """The CPU time of the account, in those of the run."""
        return (self.account + HELD_OUT * self.points * completions + more) / self.run

    @property
    def affordable(self):
        """Held-out completions at each point for twice the run, but LEAST."""
        return max(LEAST, int((2 * self.run - self.account) / HELD_OUT / self.points))


def price_of(setup, folder, cfg, since, end, parts):
    """The Price of an account of iterations since + 1 to end."""
    log = f"{folder}/metrics.jsonl"
    steps = sum(row.get("num_steps", 1) for row in (read_log(log) if os.path.exists(log) else [])
                if since < row["iteration"] <= end) or end - since
    learned = (end - since) * cfg.num_prompts * cfg.num_generations
    evaluations = 1 + math.ceil((end - since) / (cfg.eval_interval or end))
    evaluated = evaluations * len(setup.eval_prompts) * cfg.num_eval_generations
    passes = PASS * len(parts_of(setup, cfg)[0])
    return Price(learned + EVALUATED * evaluated, (SLOWER + passes) * learned, TOKENS * learned,
                 PREDICTION * learned, int(steps), int(steps) * parts + 1)


def say_cost(price, target, since, end, predicts, exact):
    """Print what the account will cost before it starts, and what more or less would."""
    times = price.times(target.rollouts, price.prediction * predicts + price.tokens * exact)
    sampled = ""
    other = f"--hessian=False, which predicts nothing: {price.times(0):.1f} times"
    if target.is_sampled:
        sampled = f" with {target.rollouts} held-out completions at {price.points} points"
        other = ("--held_out=N for less noise: by half with "
                 f"{4 * target.rollouts}, {price.times(4 * target.rollouts):.1f} times; --exact "
                 "for as many as the evaluation has, and for shares of tokens")
    print(f"account: replaying iterations {since + 1} to {end}{sampled}, back over {price.steps} "
          f"steps: about {times:.1f} times the CPU time of the run ({other})", flush=True)


def far_from_run(setup, target, course, states, folder, path, last, changed):
    """A line on how far the replay is from the run, in the number that is explained; "" where it is
    the same to the bit. BadInput where it is too far. changed: what check_run returned."""
    names = {p: name for name, p in setup.policy.named_parameters()}
    saved = flat(last["policy"][names[p]].to(states[-1][0]) for p in setup.trained)
    if torch.equal(saved, states[-1][0].cpu()):
        return ""
    off = target.at(saved, with_slope=False).value - course.values[-1]              # (K,)
    change = course.values[-1] - course.values[0]
    if target.is_sampled:       # its columns are folds of one number
        off, change = off.sum(), change.sum()
    off = float((off.abs() / change.abs().clamp(min=1e-30)).max())
    threads = read_json(f"{folder}/config.json").get("threads")
    causes = ", ".join(changed) or (
        f"threads (then {threads}, now {torch.get_num_threads()}: --threads={threads}), a GPU, "
        "another machine or version, settings that changed, a reward that draws random numbers")
    far = f"{100 * off:.2g} % of the change, by {causes}"
    if not off <= OTHER:
        raise BadInput(f"{path}: the replay is another run, off by {far}")
    return f"warning: the replay ends at other weights than {path}, and is off by {far}"


# ------------------------------------------------------------------------------------------------
# what is explained


def reward_named(setup, cfg, name):
    """A reward function or a judge by its name."""
    if name in setup.reward_funcs:
        return setup.reward_funcs[name]
    if name in setup.judges:
        return lambda completions: (1 - torch.sigmoid(setup.judges[name](completions))).tolist()
    known = {"reward", *setup.reward_funcs, *setup.judges, *cfg.functions.keys() & {"target"}}
    raise BadInput(f"--target={name}: must be one of {', '.join(sorted(known))}; a sentence is "
                   "given by --prompt and --completion")


def target_asked(setup, cfg, own, sentences, count):
    """The target of the account. count: completions of each held-out prompt, without --held_out."""
    name = own["target"]
    if sentences and name:
        raise BadInput(f"--target={name}: leave it out, or --prompt, --completion, --prompts and "
                       "--account: one or the other is explained")
    if sentences:
        return Sentences(setup, cfg, concatenate([row for _, row in sentences]))
    if name == "target" and "target" in cfg.functions:
        return Function(setup, cfg, None)       # its batch is not there yet
    functions = {name: setup.reward_funcs[name] for name in cfg.reward_funcs}
    weights = list(cfg.reward_weights)
    if name and not (name == "reward" and len(functions) == 1):
        functions = {name: reward_named(setup, cfg, name)}
        weights = [1.0]
    prompts = setup.eval_prompts
    if own["held_out"]:     # over prompts first
        count = max(2, own["held_out"] // len(prompts))
        prompts = prompts[:max(1, own["held_out"] // count)]
    return HeldOut(name or "reward", setup, cfg, functions, weights, prompts, count)


def row_of(before, said, device):
    """A Rollout of one row, by the ids of a prompt and of a completion."""
    prompt = torch.tensor([before], device=device)
    row = empty_rollout(prompt, torch.ones_like(prompt) > 0, 1, len(said), 0)
    row.tokens[0, len(before):] = torch.tensor(said)
    row.completion_mask |= True
    return row


def read_sentence(setup, cfg, row):
    """(the prompt's text, a Rollout of one row)."""
    text, before, _ = read_prompt(setup.tokenizer, row, "prompt", "a sentence")
    completion = row.get("completion")
    if type(completion) is not str:
        raise BadInput(f"completion {shown(completion)}: must be text, in a column `completion`")
    said = setup.tokenizer.encode_ordinary(completion)
    most = setup.policy.block_size
    if not before or not said or len(before) + len(said) > most:
        raise BadInput(f"prompt {shown(text)}, completion {shown(completion)}: {len(before)} and "
                       f"{len(said)} tokens; must be at least 1 each, together {most} at most")
    return text, row_of(before, said, setup.device)


def sentences_asked(setup, cfg, own):
    """[(the prompt's text, a Rollout of one row)]."""
    rows = read_rows(own["prompts"]) if own["prompts"] else []
    if own["prompts"] and not rows:
        raise BadInput(f"{own['prompts']}: has no row: must have the columns prompt and completion")
    if own["prompt"] or own["completion"]:
        rows.append(own)
    asked = [read_sentence(setup, cfg, row) for row in rows]
    if own["account"]:      # completions of lowest reward, by the policy before training
        batch = grpo.sample_and_score(
            setup, setup.eval_prompts, cfg, seed_for(cfg.seed, "account"))
        rollout = replace(batch.rollout, allowed=None)
        asked += [(batch.prompts[i].text, rollout[[i]])
                  for i in batch.rewards.argsort()[:WORST].tolist()]
    return asked


def labels_by(folder, cfg, taken, by):
    """What the reader groups the rollouts by, for each of them: the function group(prompt,
    completion, reward, row) of the config file, a column of the prompts' file, or one of
    samples.jsonl."""
    rows = [(it, prompt, text, reward) for it, batch in {k.it: k.batch for k in taken}.items()
            for prompt, text, reward in
            zip(batch.prompts, batch.completions, batch.rewards.tolist())]
    if by == "group" and by in cfg.functions:
        return [cfg.functions[by](prompt.text, text, reward, prompt.row)
                for _, prompt, text, reward in rows]
    columns = rows[0][1].row
    if by in columns:
        return [prompt.row.get(by) for _, prompt, *_ in rows]
    logged = {(row["iteration"], row["prompt"], row["completion"]): row
              for row in read_log(f"{folder}/samples.jsonl")}
    known = {*columns, *next(iter(logged.values()), {}), *{"group"} & cfg.functions.keys()}
    if by not in known:
        raise BadInput(f"--by={by}: must be a column of the prompts' file or of samples.jsonl, or "
                       f"`group`, a function of the config file: {', '.join(sorted(known))}")
    return [logged.get((it + 1, prompt.text, text), {}).get(by) for it, prompt, text, _ in rows]


# ------------------------------------------------------------------------------------------------
# what is told


class Replayed(NamedTuple):
    """A run, once more, and its account."""
    setup: Any
    cfg: Any
    since: int
    target: Any
    states: list        # of account.replay
    taken: list
    course: Any         # target.Course
    account: Any        # account.Account
    smooth: float       # account.smoothness; NaN: nothing is predicted
    by: str             # what the reader groups the rollouts by, or ""
    labels: Any         # of all rollouts, by that; or None
    with_tokens: bool   # their shares

    def column(self, x, i):
        """Of (.., K, ..) by columns first: those of number i."""
        return x if self.target.is_sampled else x[i:i + 1]


def story_of(run, i):
    """The Story of sentence i, or of the one number."""
    target, course, found = run.target, run.course, run.account
    return told.Story(
        target.title, run.taken, run.since, run.column(course.values.T, i).T,
        run.column(course.gains.T, i).T, run.column(found.shares, i),
        None if found.effects is None else found.effects[i],
        {name: run.column(x, i) for name, x in found.rest.items()}, course.ends, target.rollouts,
        target.folds_of)


def told_of(run, i, sentence, number):
    """What is Told of number i. sentence: (prompt, a Rollout of one row), or None where the number
    is no sentence's. number: before its lists, where there are several."""
    setup, cfg, course = run.setup, run.cfg, run.course
    story = story_of(run, i)
    rows = rows_of(run.taken, story.shares)
    splits = splits_of(rows, run.by, run.labels)
    tables = [told.by_group(rows, splits, story.digits), told.by_iteration(story)]
    if run.by:
        tables.insert(0, told.over_time(rows, splits[run.by], run.since, story.digits))
    cards = []
    if sentence:
        text, row = sentence
        change = pieces_of(row, course.ends[1][i] - course.ends[0][i], setup.tokenizer)
        cards.append({"The sentence": [(total(story.change).text(3), text, change)]})

    # the tokens, and the rollouts
    tokens = None
    if story.is_useful:
        by_share = [run.column(G, i) for *_, G in walk_back(
            setup, run.states, run.taken, course.means)][::-1]
        if run.with_tokens:
            tokens = told.by_token(story, setup, cfg, run.states, by_share)
            tables.insert(-1, tokens)
        is_smooth = run.smooth >= SMOOTH
        directions = [G.sum(0) for G in by_share]
        if is_smooth:
            directions = [L[i] for L in run.account.directions]
        cards.append(told.cards_of(story, setup, cfg, run.states, directions, is_smooth))
    lines = told.lines_of(story, rows, splits, run.by, tokens)
    cards = [{number + heading: some for heading, some in lists.items()} for lists in cards]
    return Told(lines, told.chart_of(story), tables, cards)


def reward_in_words(cfg, name):
    """What a reward is: its name, and what its own docstring says first."""
    if name == "judge" and cfg.judge_score == "probability":
        return f"the probability of not toxic by {cfg.judge}"
    function = cfg.functions.get(name)      # None: a judge whose score is a logit
    text = function and inspect.getdoc(function) or ""
    first = " ".join(text.partition("\n\n")[0].split()).rstrip(".")
    return f"{name} ({first})" if first else name


def about_run(folder, cfg, target, taken, since, end):
    """What an account is, of which run and which number."""
    names = [reward_in_words(cfg, name) for name in cfg.reward_funcs]
    rollouts = sum(len(batch.row_weights) for batch in {k.it: k.batch for k in taken}.values())
    return (f"An account says which of the rollouts that a run was trained on made a number rise "
            f"or fall. The run: {folder}, trained for {', '.join(names)} (higher is better) on "
            f"{rollouts} rollouts, iterations {since + 1} to {end}. The number: {target.about}. "
            "A rollout's share is an accounting entry along the run as it happened, not a "
            "counterfactual: shares add up to the change, single ones may be large and cancel, and "
            "none says what the number would be without the rollout.")


def main(argv):
    """Print the account of what is asked for and write RUN/account.html."""
    # which run, and which number
    own, flags = own_flags(argv[1:], FLAGS)
    folder = argv[0]
    cfg = load_settings([folder, *flags])
    path = newest_checkpoint(folder)
    last = read_checkpoint(path)
    since, end = own["since"], last["iteration"]
    if since >= end:
        raise BadInput(f"--since={since}: must be below {end}, the iterations of {path}")
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg, may_train=False))
    changed = check_run(setup, cfg, folder, path, last)
    sentences = sentences_asked(setup, cfg, own)
    price = price_of(setup, folder, cfg, since, end, own["parts"])
    count = max(2, cfg.num_eval_generations)        # completions of each held-out prompt
    if not own["exact"]:
        own["held_out"] = own["held_out"] or min(price.affordable, count * len(setup.eval_prompts))
    target = target_asked(setup, cfg, own, sentences, count)
    # where a prediction can be trusted: docs/account.md. A factor that is detached is a constant to
    # the Hessian, so a prediction would be wrong
    detaches = getattr(objective_of(cfg), "detaches", False)
    predicts = not target.is_sampled and own["hessian"] and not detaches
    say_cost(price, target, since, end, predicts, own["exact"])

    # the run once more, and its account
    start = go_to(setup, cfg, folder, since)
    states, taken = replay(setup, cfg, start, since, end, folder)
    if not taken:
        raise BadInput(f"{path}: no optimizer step was taken since iteration {since}")
    if own["target"] == "target":
        target = target._replace(batch=taken[0].batch)
    course = follow(target, states, folder, own["parts"])
    note = far_from_run(setup, target, course, states, folder, path, last, changed)
    found = account(setup, cfg, states, taken, course, folder, predicts=predicts)
    smooth = smoothness(setup, cfg, states, taken) if predicts else math.nan

    # what is told of it
    labels = labels_by(folder, cfg, taken, own["by"]) if own["by"] else None
    run = Replayed(setup, cfg, since, target, states, taken, course, found, smooth, own["by"],
                   labels, own["exact"] or not target.is_sampled)
    numbers = [told_of(run, i, sentence, f"{i + 1}. " * (len(sentences) > 1))
               for i, sentence in enumerate(sentences or [None])]
    closing = [text for text in (told.say_smooth(smooth, SMOOTH), note) if text]
    show(folder, about_run(folder, cfg, target, taken, since, end), numbers, closing)
