"""
The story of a sentence: how its log-prob went along a run, which rollouts did that, and what it
would be without them. account.py has the arithmetic.
"""
import math
from dataclasses import replace

import torch
from torch.nn.utils import vector_to_parameters

import grpo
from common.files import read_rows
from common.script import BadInput, hash_of, own_flags, seed_for, shown
from data.prompts import check_text, read_prompt
from explain.account import account, by_parameter, replay, row_of, walk_back
from explain.page import facts_of, show
from explain.sentences import best_and_worst
from explain.words import logprob_changes, pieces_of, token_slopes
from rollout import concatenate, of_logits, truncate
from run.checkpoint import (
    changed_settings, checkpoints, iterations_of, load_checkpoint, newest_checkpoint,
    read_checkpoint)
from run.loop import sample_rows
from run.sampling import sample_completions
from run.settings import load_settings, read_run

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
    folder = argv[0]
    cfg = load_settings([folder, *flags])
    if own["hessian"] and cfg.loss_type == "cispo":
        raise BadInput("loss_type = 'cispo': has no Hessian, since its ratio is a constant: add "
                       "--hessian=False")
    path = newest_checkpoint(folder)
    last = read_checkpoint(path)
    end = last["iteration"]
    since = own["since"]
    if since >= end:
        raise BadInput(f"--since={since}: must be below {end}, the iterations of {path}")
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg), may_train=False)
    check_run(setup, cfg, folder, path, last)
    asked = sentences_asked(setup, cfg, own)

    start = go_to(setup, cfg, folder, since)
    states, taken = replay(setup, cfg, start, since, end, folder)
    if not taken:
        raise BadInput(f"{path}: no optimizer step was taken since iteration {since}")
    weights = setup.policy.state_dict()
    if not all(torch.equal(x.cpu(), last["policy"][name]) for name, x in weights.items()):
        print(f"warning: the replay ends at other weights than {path}: made on a GPU, by another "
              "machine or version, or with settings that changed on the way, or a reward draws "
              "random numbers")
    sentences = concatenate([sentence for _, sentence in asked])
    found = account(setup, cfg, states, taken, sentences, own["hessian"], own["parts"])

    curved = "with" if own["hessian"] else "without"
    about = (f"{folder}, iterations {since + 1} to {end}. The target is a sentence's log-prob. "
             "`without it` is what it would be at the end had the rollout been left out: by the "
             f"derivative through AdamW, damped, {curved} the Hessian.")
    lines = []
    cards = {}
    for i, (prompt, sentence) in enumerate(asked):
        lines += lines_of(found, i, since)
        own_cards = cards_of(setup, cfg, states, taken, prompt, sentence, found, i, own["parts"])
        cards |= {f"{i + 1}. {heading}": some for heading, some in own_cards.items()}
    show(folder, "account", about, lines, cards)


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


def sentences_asked(setup, cfg, own):
    """[(the prompt's text, a Rollout of one row)]."""
    rows = read_rows(own["prompts"]) if own["prompts"] else []
    if own["prompt"] or own["completion"]:
        rows.append(own)
    asked = [read_sentence(setup, cfg, row) for row in rows]
    if own["account"]:      # completions of lowest reward, by the policy before training
        seed = seed_for(cfg.seed, "account")
        samples = sample_completions(setup, setup.policy, setup.eval_prompts, cfg, seed)
        batch = grpo.score_batch(setup, samples, cfg)
        rollout = replace(batch.rollout, allowed=None)
        asked += [(batch.prompts[i].text, rollout[[i]])
                  for i in batch.rewards.argsort()[:WORST].tolist()]
    if not asked:
        raise BadInput("no sentence is given: add --prompt=TEXT --completion=TEXT, --prompts=FILE "
                       "or --account=True")
    return asked


def read_sentence(setup, cfg, row):
    """(the prompt's text, a Rollout of one row)."""
    text, before, _ = read_prompt(setup.tokenizer, row, "prompt", "a sentence")
    completion = row.get("completion")
    if type(completion) is not str:
        raise BadInput(f"completion {shown(completion)}: must be text, in a column `completion`")
    check_text(completion, "completion")
    said = setup.tokenizer.encode_ordinary(completion)
    most = setup.policy.block_size
    if not before or not said or len(before) + len(said) > most:
        raise BadInput(f"prompt {shown(text)}, completion {shown(completion)}: {len(before)} and "
                       f"{len(said)} tokens; must be at least 1 each, together {most} at most")
    sentence = row_of(before, said, setup.device)

    def truncated(logits, targets):
        return truncate(logits, cfg.top_k, cfg.top_p, cfg.min_p).gather(1, targets)

    with torch.no_grad():       # before training
        logits = of_logits(truncated, setup.policy, sentence, cfg.temperature, None)
    if logits.min() == -math.inf:
        raise BadInput(f"completion {shown(completion)}: before training the run cannot draw one "
                       f"of its tokens, by top_k = {cfg.top_k}, top_p = {cfg.top_p}, min_p = "
                       f"{cfg.min_p}")
    return text, sentence


# ------------------------------------------------------------------------------------------------
# what is told


def cards_of(setup, cfg, states, taken, prompt, sentence, found, i, parts):
    """{heading: [(facts, prompt, Pieces)]}: sentence i, and the rollouts that did most to it."""
    shares = found.shares[i]                                                        # (I, N)
    logp = found.logp[:, i]                                                         # (S + 1, T)
    batches = {k.it: k.batch for k in taken}
    lists = {heading: [divmod(x, shares.shape[1]) for x in some]
             for heading, some in best_and_worst(shares.flatten()).items()}
    words = token_shares(setup, cfg, states, taken, sentence, sum(lists.values(), []), parts)

    def card(it, j):
        batch = batches[it]
        row = sample_rows(it, batch, cfg)[j]
        without = logp[-1].sum() - found.effects[i, it, j]
        facts = facts_of(row, f"{shares[it, j]:+.3f}", f"without it {without:.2f}")
        return facts, row["prompt"], pieces_of(batch.rollout[[j]], words[it, j], setup.tokenizer)

    change = pieces_of(sentence, logp[-1] - logp[0], setup.tokenizer)
    cards = {"The sentence": [(f"{found.change[i]:+.3f}", prompt, change)]}
    for heading, places in lists.items():
        cards[heading] = [card(*place) for place in places]
    return cards


def token_shares(setup, cfg, states, taken, sentence, places, parts):
    """{place: shares (T,) of its tokens} of rollouts, whose places are (iteration, number)."""
    shares = dict.fromkeys(places, 0.0)
    for k, before, _, _, G in walk_back(setup, cfg, states, taken, sentence, parts):
        here = [j for it, j in places if it == k.it]
        if here:
            vector_to_parameters(before[0], setup.trained)
            slopes = token_slopes(setup, cfg, k.batch, k.step)                      # (N, T)
            changes = logprob_changes(setup.policy, by_parameter(setup, G[0]),
                                      k.batch.rollout[here], cfg.temperature)
            for j, words in zip(here, slopes[here] * changes):
                shares[k.it, j] += words
    return shares


def lines_of(found, i, since):
    """The story of sentence i."""
    shares = found.shares[i].sum(1)                                                 # (I,)
    together = float(found.together[i])
    change = float(found.change[i])
    error = abs(together - change) / max(abs(change), 1e-30)
    lines = [course(found.logp[:, i].sum(1)), *bars(shares[since:].tolist(), since + 1)]
    if error > TOO_FAR:
        lines.append("warning: the steps are too large for a straight line; --parts=4 looks at "
                     "four parts of each step")
    lines += [f"  {name} {x[i]:+.3f}" for name, x in found.rest.items() if x[i]]
    rollouts = float(shares.sum())
    lines.append(f"account: rollouts {rollouts:+.3f}, rest {together - rollouts:+.3f}, together "
                 f"{together:+.3f} nats; true change {change:+.3f} ({100 * error:.1f} % off)")
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
