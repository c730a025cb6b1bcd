"""
The story of a sentence: how its log-prob went along a run, which rollouts did that, and what it
would be without them. __init__.py has the arithmetic.
"""
import math
from dataclasses import replace

import torch
from torch.nn.utils import vector_to_parameters

import grpo
from common.files import read_rows
from common.script import BadInput, hash_of, own_flags, seed_for, shown
from config import load_settings, read_run
from data.prompts import encode_prompt
from explain.page import as_lines, write_page
from explain.sentences import best_and_worst
from explain.words import pieces_of, token_influences
from extras.account import account, by_parameter, replay, row_of, walk_back
from rollout import completion_states, truncate
from run.checkpoint import (
    changed_settings, checkpoints, iterations_of, load_checkpoint, newest_checkpoint,
    read_checkpoint)

FLAGS = dict(prompt="", completion="", prompts="", account=False, since=0, parts=1, hessian=True)
WORST = 3           # completions that are told of where no sentence is given
TOO_FAR = 0.05      # the sum from the true change
BLOCKS = "▁▂▃▄▅▆▇█"
# settings that change no training
HARMLESS = ("cache_dir", "device", "decode_batch_size", "activation_checkpointing",
            "save_interval", "eval_interval", "num_eval_generations", "expect_rise")


def main(argv):
    """Print the account of the sentences that are asked for and write RUN/account.html."""
    own, flags = own_flags(argv[1:], FLAGS)
    is_asked = own["account"] or own["prompts"] or own["completion"]
    if bool(own["prompt"]) != bool(own["completion"]) or not is_asked:
        raise BadInput("usage: python tracin.py RUN [CONFIG.py] --prompt=TEXT --completion=TEXT, "
                       "--prompts=FILE or --account=True, with [--since=N] [--parts=N] "
                       "[--hessian=False]")
    folder = argv[0]
    cfg = load_settings([folder, *flags])
    path = newest_checkpoint(folder)
    last = read_checkpoint(path)
    end = last["iteration"]
    since = own["since"]
    if since >= end:
        raise BadInput(f"--since={since}: must be below {end}, the iterations of {path}")
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg), may_train=False)
    check_run(setup, cfg, folder, path, last)
    rollouts = rollouts_asked(setup, cfg, own)

    start = go_to(setup, cfg, folder, since)
    states, taken = replay(setup, cfg, start, since, end, folder)
    if not taken:
        raise BadInput(f"{path}: no optimizer step was taken since iteration {since}")
    weights = setup.policy.state_dict()
    if not all(torch.equal(x.cpu(), last["policy"][name]) for name, x in weights.items()):
        print(f"warning: the replay ends at other weights than {path}: made on a GPU, by another "
              "machine or version, or with settings that changed on the way, or a reward draws "
              "random numbers")
    found = account(setup, cfg, states, taken, rollouts, own["hessian"], own["parts"])

    curved = "with" if own["hessian"] else "without"
    about = (f"{folder}, iterations {since + 1} to {end}. The target is a sentence's log-prob. "
             "`without it` is what it would be at the end had the rollout been left out: by the "
             f"derivative through AdamW, damped, {curved} the Hessian.")
    print(about)
    stories = []
    pages = {}
    for i, rollout in enumerate(rollouts):
        cards = cards_of(setup, cfg, states, taken, rollout, found, i, own["parts"])
        lines = lines_of(found, i, cards, since)
        print("", *lines, sep="\n")
        stories += lines
        pages |= {f"{i + 1}. {heading}": some for heading, some in cards.items()}
    write_page(folder, "account", about, stories, pages)


# ------------------------------------------------------------------------------------------------
# which run


def check_run(setup, cfg, folder, path, last):
    """Refuse a run that is not the one that was made."""
    if last["base_hash"] != hash_of(setup.base):
        raise BadInput(f"{path}: this run began from another policy than the settings name now; "
                       "the policy must be the one that it began from")
    for name, (was, now) in changed_settings(last["settings"], cfg).items():
        is_harmless = name in HARMLESS or name == "micro_batch_size" and cfg.loss_type != "bnpo"
        if not is_harmless:
            raise BadInput(f"{name} = {now!r}: must be {was!r} as in {path}, whose run is repeated")
    if read_run(folder)["source"] != cfg.source:
        raise BadInput(f"{folder}: is repeated with the config file that it had; name its own "
                       f"copy, {folder}/config.py, or none if it had none")


def go_to(setup, cfg, folder, since):
    """Load the last checkpoint up to iteration `since`, if there is one -> its iteration, or 0."""
    earlier = [path for path in checkpoints(folder) if iterations_of(path) <= since]
    if not earlier:
        return 0
    return load_checkpoint(earlier[-1], setup, cfg)["iteration"]


# ------------------------------------------------------------------------------------------------
# which sentences


def rollouts_asked(setup, cfg, own):
    """A Rollout of one row for each sentence."""
    path = own["prompts"]
    if path and not path.endswith((".csv", ".jsonl")):
        raise BadInput(f"--prompts={path}: must end in .csv or .jsonl, with columns prompt and "
                       "completion")
    asked = read_rows(path) if path else []
    if path and not asked:
        raise BadInput(f"--prompts={path}: holds no sentence")
    if own["completion"]:
        asked.append(own)
    if not asked:
        return worst(setup, cfg)
    return [read_sentence(setup, cfg, row.get("prompt"), row.get("completion")) for row in asked]


def read_sentence(setup, cfg, prompt, completion):
    """A Rollout of one row."""
    if type(completion) is not str:
        raise BadInput(f"completion {shown(completion)}: must be text, in a column `completion`")
    if not isinstance(prompt, (str, list)):     # a list of messages
        raise BadInput(f"prompt {shown(prompt)}: must be text, in a column `prompt`")
    _, before = encode_prompt(setup.tokenizer, prompt, "the prompt")
    said = setup.tokenizer.encode_ordinary(completion)
    most = setup.policy.block_size
    if not before or not said or len(before) + len(said) > most:
        raise BadInput(f"prompt {prompt!r}, completion {completion!r}: {len(before)} and "
                       f"{len(said)} tokens; must be at least 1 each, together {most} at most")
    rollout = row_of(before, said, setup.device)
    with torch.no_grad():       # before training
        states = completion_states(setup.policy, rollout)
        logits = setup.policy.lm_head(states.h).float() / cfg.temperature
    allowed = truncate(logits, cfg.top_k, cfg.top_p, cfg.min_p) > -math.inf         # (T, V)
    if not allowed.gather(1, states.targets[:, None]).all():
        raise BadInput(f"completion {completion!r}: before training the run cannot draw one of its "
                       f"tokens, by top_k = {cfg.top_k}, top_p = {cfg.top_p}, min_p = {cfg.min_p}")
    return rollout


def worst(setup, cfg):
    """Completions of the evaluation's prompts, of lowest reward, by the policy before training."""
    batch = grpo.sample_batch(setup, setup.eval_prompts, cfg, seed_for(cfg.seed, "account"))
    rollout = replace(batch.rollout, allowed=None)
    return [rollout[[i]] for i in batch.rewards.argsort()[:WORST].tolist()]


# ------------------------------------------------------------------------------------------------
# what is told


def cards_of(setup, cfg, states, taken, rollout, found, i, parts):
    """{heading: [(facts, prompt, Pieces)]}: sentence i, and the rollouts that did most to it."""
    shares = found.shares[i]                                                        # (I, N)
    lists = [[divmod(x, shares.shape[1]) for x in some]
             for some in best_and_worst(shares.flatten()).values()]
    words = token_shares(setup, cfg, states, taken, rollout, sum(lists, []), parts)
    logp = found.logp[i]
    batches = {k.it: k.batch for k in taken}

    def card(it, j):
        batch = batches[it]
        without = logp[-1].sum() - found.effects[i, it, j]
        facts = (f"{shares[it, j]:+.3f}, iteration {it + 1}, reward {batch.rewards[j]:.3f}, "
                 f"advantage {batch.row_advantages[j]:+.2f}, without it {without:.2f}")
        pieces = pieces_of(batch.rollout[[j]], words[it, j], setup.tokenizer)
        return facts, batch.prompts[j].text, pieces

    P = rollout.tokens.shape[1] - rollout.logp.shape[1]
    said = setup.tokenizer.decode(rollout.tokens[0, :P][rollout.attention_mask[0, :P]].tolist())
    change = pieces_of(rollout, logp[-1] - logp[0], setup.tokenizer)
    cards = {"The sentence": [(f"{found.change[i]:+.3f}", said, change)]}
    for heading, places in zip(("Made it likelier", "Made it less likely"), lists):
        cards[heading] = [card(*place) for place in places]
    return cards


def token_shares(setup, cfg, states, taken, rollout, places, parts):
    """{place: shares (T,) of its tokens} of rollouts, whose places are (iteration, number)."""
    shares = dict.fromkeys(places, 0.0)
    for k, before, _, _, U in walk_back(setup, cfg, states, taken, [rollout], parts):
        vector_to_parameters(before[0], setup.trained)
        G = by_parameter(setup, (1 - k.b1) * k.clip * U[0])
        for it, j in places:
            i = k.step.rows[k.step.rows == j]
            if it == k.it and len(i):
                shares[it, j] += token_influences(setup, cfg, k.batch, i, k.step, G)
    return shares


def lines_of(found, i, cards, since):
    """The story of sentence i."""
    lines = as_lines(cards)
    shares = found.shares[i].sum(1)                                                 # (I,)
    lines[2:2] = [course(found.logp[i].sum(1)), *bars(shares[since:].tolist(), since + 1)]
    together = float(found.together[i])
    change = float(found.change[i])
    error = abs(together - change) / max(abs(change), 1e-30)
    if error > TOO_FAR:
        lines.append("warning: the steps are too large for a straight line; --parts=4 looks at "
                     "four parts of each step")
    lines += [f"  {part} in the loss {x[i]:+.3f}" for part, x in found.rest.items()]
    rest = sum(float(x[i]) for x in found.rest.values())
    others = [f"{name} {x[i]:+.3f}, " for name, x in found.others.items() if x[i]]
    lines.append(f"account: rollouts {shares.sum():+.3f}, rest {rest:+.3f}, {''.join(others)}"
                 f"together {together:+.3f} nats; true change {change:+.3f} "
                 f"({100 * error:.1f} % off)")
    return lines


def course(logp):
    """The line of log-probs (S + 1,) along the run."""
    height = (logp - logp.min()) / (logp.max() - logp.min()).clamp(min=1e-30)
    curve = "".join(BLOCKS[round(7 * x)] for x in height.tolist())
    change = float(logp[-1] - logp[0])
    word = "likelier" if change > 0 else "less likely"
    return (f"  log p {logp[0]:.2f} {curve} {logp[-1]:.2f}: training made it "
            f"{math.exp(min(700, abs(change))):.3g} times {word}")


def bars(shares, first):
    """A line for each iteration, numbered from `first`."""
    longest = max(map(abs, shares)) or 1.0
    return [f"  iteration {it:3} {x:+9.3f} {round(20 * abs(x) / longest) * '█'}"
            for it, x in enumerate(shares, first)]
