"""
The story of a sentence: how its log-prob went along a run, which rollouts did that, and what it
would be without them. explain/account.py has the arithmetic.
"""
import glob
import math
import os
from dataclasses import replace

import torch
from torch.nn.utils import vector_to_parameters

import grpo
from common.files import load_file, read_rows, replacing, undamaged
from common.processes import rank_and_size
from common.script import BadInput, hash_of
from config import load_settings
from data.prompts import draw_prompts, encode_prompt
from data.tokenizer import end_tokens, texts_of
from evaluate import sample_evaluation
from explain.account import (
    Sentence, account, by_parameter, flat, replay, sentence_of, walk_back)
from explain.page import page
from explain.sentences import best_and_worst
from explain.words import pieces_of, row_alone, token_influences
from judge.rewards import score
from rollout import completion_states, truncate
from run.checkpoint import load_checkpoint, read_newest, set_random_state
from run.folder import FREE
from run.loop import sample_rows

SHOWN = 5           # rollouts in each direction
TOXIC = 3           # completions of the evaluation
TOO_FAR = 0.05      # the sum from the true change
BLOCKS = "▁▂▃▄▅▆▇█"


def tell(folder, flags, own):
    """Print the account of the sentences that are asked for and write RUN/account.html."""
    cfg = load_settings([folder, *flags])
    path, last = read_newest(folder, mmap=True)
    end = last["iteration"]
    since = number(own, "since", 0, end - 1)
    refined = number(own, "pieces", 1, 1000)
    nets = grpo.prepare(cfg, grpo.read_inputs(cfg), may_train=False)
    check_run(nets, cfg, path, last)
    sentences = sentences_asked(nets, cfg, own)

    start = go_to(nets, cfg, folder, since)
    states, taken = replay(nets, cfg, start, since, end, folder)
    if not taken:
        raise BadInput(f"{path}: no optimizer step was taken since iteration {since}")
    check_end(nets, states, path, last)
    found = account(nets, cfg, states, taken, sentences, own["hessian"], refined)

    curved = "with" if own["hessian"] else "without"
    about = (f"{folder}, iterations {since + 1} to {end}. The target is the sentence's log-prob. "
             "`without it` is what it would be at the end had the rollout been left out: by the "
             f"derivative through AdamW, damped, {curved} the Hessian.")
    print(about)
    stories = []
    cards = {}
    for i, sentence in enumerate(sentences):
        lists = strongest(nets, cfg, taken, found, i)
        lines = lines_of(cfg, taken, sentence, found, i, lists)
        print("", *lines, sep="\n")
        stories += lines
        itself = row_alone(sentence.rollout, 0, cfg.temperature)
        change = found.logp[i][-1] - found.logp[i][0]
        cards[f"{i + 1}: the sentence"] = [
            (lines[-1], sentence.prompt, pieces(nets, itself, change))]
        places = [row["place"] for rows in lists.values() for row in rows]
        words = words_of(nets, cfg, states, taken, sentence, places)
        for heading, rows in lists.items():
            cards[f"{i + 1}: {heading}"] = [
                (row["facts"], row["prompt"], words[row["place"]]) for row in rows]
    path = os.path.join(folder, "account.html")
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(page(f"Account: {folder}", about, stories, cards))
    print(f"\n{path}: open it in a browser to see the words")


# ------------------------------------------------------------------------------------------------
# which run


def number(own, name, least, most):
    text = own[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise BadInput(f"--{name}={text}: must be a whole number from {least} to {most}")
    return int(text)


def check_run(nets, cfg, path, last):
    """Refuses a run that is not the one that was made."""
    if rank_and_size()[1] > 1:
        raise BadInput("an account is made by one process: start it without torchrun")
    if last["base_hash"] != hash_of(nets.base):
        raise BadInput(f"{path}: this run began from another policy than the settings name now")
    for name, x in cfg.public().items():
        was = last["settings"].get(name, x)
        if was != x and name not in FREE:
            raise BadInput(f"{name} = {x!r}: must be {was!r} as in {path}, whose run is repeated")


def go_to(nets, cfg, folder, since):
    """Loads the last checkpoint up to iteration `since`, if there is one -> its iteration, or 0."""
    start = 0
    for path in glob.glob(os.path.join(glob.escape(folder), "ckpt*.pt")):
        content = load_file(path, "run", mmap=True)
        if start < content["iteration"] <= since:
            with undamaged(path):
                load_checkpoint(content, path, nets, cfg, hash_of(nets.base))
                set_random_state(content["random"])
            start = content["iteration"]
    return start


def check_end(nets, states, path, last):
    """Says so where the replay ends elsewhere."""
    trained = [name for name, p in nets.policy.named_parameters() if p.requires_grad]
    weights = flat(last["policy"][name] for name in trained)
    gap = float((weights - states[-1][0].cpu()).abs().max())
    if gap > 0:
        print(f"warning: the replay ends at other weights than {path}, by up to {gap:.1g}: made on "
              "another machine, on a GPU or by other versions, or settings changed on the way, or "
              "a reward draws random numbers")


# ------------------------------------------------------------------------------------------------
# which sentences


def sentences_asked(nets, cfg, own):
    if own["completion"]:
        return [read_sentence(nets, cfg, own["prompt"], own["completion"])]
    if own["prompts"]:
        return [read_sentence(nets, cfg, row.get("prompt", ""), row.get("completion", ""))
                for row in read_rows(own["prompts"])]
    return most_toxic(nets, cfg)


@torch.no_grad()
def read_sentence(nets, cfg, prompt, completion):
    _, before = encode_prompt(nets.tokenizer, prompt, "the prompt")
    said = nets.tokenizer.encode_ordinary(completion)
    most = nets.policy.block_size
    if not before or not said or len(before) + len(said) > most:
        raise BadInput(f"prompt {prompt!r}, completion {completion!r}: {len(before)} and "
                       f"{len(said)} tokens; must be at least 1 each, together {most} at most")
    sentence = sentence_of(prompt, completion, before, said, nets.device)
    states = completion_states(nets.policy, sentence.rollout)
    logits = nets.policy.lm_head(states.h).float() / cfg.temperature
    drawn = truncate(logits, cfg.top_k, cfg.top_p, cfg.min_p).gather(1, states.targets[:, None])
    if (drawn == -math.inf).any():
        token = nets.tokenizer.decode([said[int(drawn[:, 0].argmin())]])
        raise BadInput(f"completion {completion!r}: the run never draws {token!r} there, by top_k "
                       f"= {cfg.top_k}, top_p = {cfg.top_p}, min_p = {cfg.min_p}")
    return sentence


def most_toxic(nets, cfg):
    """The evaluation's most toxic completions before training; by the rewards without a judge."""
    rollout = sample_evaluation(nets, nets.policy, cfg)
    completions = texts_of(nets.tokenizer, rollout)
    prompts = [prompt for prompt in nets.eval_prompts for _ in range(cfg.num_eval_generations)]
    if nets.judges:
        judge = nets.judges.get("eval_judge") or nets.judges["judge"]
        toxic = judge([prompt.text for prompt in prompts], completions)
    else:
        toxic = -score(nets.reward_funcs, prompts, completions).nansum(1)
    return [Sentence(prompts[i].text, completions[i], rollout[[i]])
            for i in toxic.argsort(descending=True)[:TOXIC].tolist()]


# ------------------------------------------------------------------------------------------------
# what is told


def strongest(nets, cfg, taken, found, i):
    """{heading: rows as in samples.jsonl} of the rollouts that did most to sentence i. A row has
    its facts and its place, too: (iteration, number of the rollout)."""
    batches = {k.it: k.batch for k in taken}
    shares = found.shares[i]
    last = float(found.logp[i][-1].sum())
    lists = {"made it likelier": [], "made it less likely": []}
    for rows, places in zip(lists.values(), best_and_worst(shares.flatten(), SHOWN).values()):
        for place in places:
            since, j = divmod(place, shares.shape[1])
            it = taken[0].it + since
            prompts = draw_prompts(nets.prompts, it, cfg.num_prompts, cfg.seed)
            row = sample_rows(it, prompts, batches[it], cfg)[j]
            without = last - float(found.effects[i, since, j])
            facts = (f"{shares[since, j]:+.3f}, iteration {it + 1}, reward {row['reward']:.3f}, "
                     f"advantage {row['advantage']:+.2f}, without it {without:.2f}")
            rows.append(row | dict(facts=facts, place=(it, j)))
    return lists


def lines_of(cfg, taken, sentence, found, i, lists):
    """The story of sentence i."""
    logp = found.logp[i].sum(1)
    first, last = logp[[0, -1]].tolist()
    word = "likelier" if last > first else "less likely"
    times = math.exp(min(700.0, abs(last - first)))
    lines = [f"{sentence.prompt!r} -> {sentence.completion!r}",
             f"log p {first:.2f} {curve(logp)} {last:.2f}: training made it {times:.3g} times {word}"]
    by_iteration = found.shares[i].sum(1)
    longest = float(by_iteration.abs().max())
    for since, x in enumerate(by_iteration.tolist()):
        bar = "█" * round(20 * abs(x) / (longest or 1.0))
        lines.append(f"iteration {taken[0].it + since + 1:3} {x:+9.3f} {bar}")
    for heading, rows in lists.items():
        lines += [heading] + [f"  {row['facts']}: {row['prompt'][:48]!r} -> "
                              f"{row['completion'][:72]!r}" for row in rows]
    error = float(found.error[i])
    if error > TOO_FAR:
        lines.append("warning: the steps are too large for a straight line; refine it with "
                     "--pieces=4, which looks at four places more of each step")
    others = {name: float(x[i]) for name, x in found.others.items()}
    parts = [f"{name} {x:+.3f}" for name, x in others.items() if x or name == "rest"]
    lines.append(f"account: rollouts {float(by_iteration.sum()):+.3f}, {', '.join(parts)}, together "
                 f"{float(found.together[i]):+.3f} nats; true change {last - first:+.3f} "
                 f"({100 * error:.1f} % off)")
    return lines


def curve(values):
    """Numbers as a line of blocks."""
    low = values.min()
    scaled = (values - low) / (values.max() - low).clamp(min=1e-30)
    return "".join(BLOCKS[round(7 * x)] for x in scaled.tolist())


def words_of(nets, cfg, states, taken, sentence, places):
    """{place: Pieces} of rollouts, whose tokens add up to their shares."""
    names = {p: name for name, p in nets.policy.named_parameters()}
    totals = {}
    for k, before, _, _, _, G in walk_back(nets, cfg, states, taken, [sentence]):
        vector_to_parameters(before[0], nets.trained)
        D = {names[p]: g for p, g in by_parameter(nets, G[0]).items()}
        batch = replace(k.batch, row_weights=k.row_weights)
        for it, j in places:
            i = k.step.rows[k.step.rows == j]
            if it == k.it and len(i):
                loss = grpo.loss_of(nets, nets.policy, batch, i, k.step, cfg)
                row = row_alone(batch.rollout, j, cfg.temperature)
                share = token_influences(nets.policy, loss, D, row)
                _, total = totals.get((it, j), (row, 0.0))
                totals[it, j] = row, total + share
    return {place: pieces(nets, *both) for place, both in totals.items()}


def pieces(nets, row, shares):
    return pieces_of(row, shares, nets.tokenizer, end_tokens(nets.tokenizer))
