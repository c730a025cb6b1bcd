"""
Explains a run: which rollouts helped, which hurt, which words, and is the arithmetic right.

    python tracin.py out/toxicity_tracin                    # prints it, writes influence.html there
    python tracin.py out/toxicity --tracin=reward           # a run that was made without influence
    python tracin.py out/toxicity --before                  # from ckpt_prev.pt, before the end
    python tracin.py out/toxicity config/mine.py --tracin=target    # the function in mine.py
    python tracin.py out/toxicity --prompt="You are" --completion=" a good editor"
                                                            # what makes the model say this?

The sentences are about all rollouts that the run has scored. Words need gradients: they are of the
iteration that follows the last checkpoint, which is sampled and scored here and changes nothing.
With --prompt they are of the iterations that follow both checkpoints.

--show=5: rollouts in a list. --words=64: rollouts whose words are counted.
"""
import collections
import contextlib
import io
import math
import os
import textwrap
from typing import Any, NamedTuple

import torch

import grpo
import selection
from config import load_settings
from data.chat import encode_prompt
from data.prompts import draw_prompts
from data.tokenizer import end_tokens
from explain import own_flags
from explain.page import page
from explain.sentences import best_and_worst, own_units, sentences_of
from explain.words import logprob_changes, pieces_of, row_alone
from run.checkpoint import load_checkpoint, set_random_state
from run.files import load_file, read_json, read_rows, replacing
from run.loop import sample_rows
from run.metrics import bound_of
from run.script import BadInput, hash_of, run_script, seed_for
from tracin import inner

USAGE = ("usage: python tracin.py RUN [CONFIG.py] [--before] [--show=5] [--words=64] "
         "[--prompt=TEXT --completion=TEXT] [--setting=value ...]")
CHECKED = 8         # rollouts whose influence is computed by a plain backward, too
PANELS = ("reward", "toxicity", "kl", "selected", "cosine")

# ------------------------------------------------------------------------------------------------
# one iteration more, from a checkpoint


class Again(NamedTuple):
    """An optimizer step that is scored and not taken."""
    nets: Any           # grpo.Nets
    tape: Any           # tracin.Tape
    batch: Any          # grpo.Batch
    step: Any           # grpo.Step
    micros: list        # its rows, by micro-batch
    found: Any          # tracin.Findings
    rows: list          # as in samples.jsonl


def iteration_after(nets, path, cfg, asked):
    """The iteration that grpo.py would do next from this checkpoint -> Again. asked: its target is
    none of the run's, whose average over steps is left out."""
    content = load_file(path, "run")
    if asked or content["settings"]["tracin"] != cfg.tracin:
        content["influence"] = None
    load_checkpoint(content, path, nets, cfg, hash_of(nets.base))
    set_random_state(content["random"], nets.device)
    it = content["iteration"]
    prompts = draw_prompts(nets.prompts, it, cfg.num_prompts, cfg.seed)
    batch = grpo.collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", it))
    target = None
    if cfg.tracin_val_prompts:
        target = selection.collect_target(nets, it, cfg, grpo.collect)
    seed = seed_for(cfg.seed, "rows", it)
    step = next(grpo.optimizer_steps(batch, cfg, seed), None)
    if step is None:
        raise BadInput(f"{path}: no rollout of iteration {it + 1} carries loss; try --before")
    micros = list(grpo.micro_batches(batch.lengths, step.rows, cfg))
    with nets.influence.start_tape(batch, step, fresh=True) as tape:
        for rows in micros:
            nets.influence.forward_backward(rows)
    found = nets.influence.keep_helpful(target, seed_for(seed, "select", 0))
    nets.policy.zero_grad(set_to_none=True)     # no step is taken
    rows = sample_rows(it, prompts, batch, cfg)
    batch.weights.fill_(1.0)                    # they would weigh the loss
    scored = [rows[i] for i in step.rows.tolist()]
    return Again(nets, tape, batch, step, micros, found, scored)


def saying(prompt, completion):
    """A target: the mean log-prob of a completion after a prompt."""
    def target(policy, tokenizer, batch):
        _, before = encode_prompt(tokenizer, prompt, "--prompt")
        said = tokenizer.encode_ordinary(completion)
        size = len(before) + len(said)
        most = policy.config.block_size
        if not before or not said or size > most:
            raise BadInput(f"--prompt and --completion have {len(before)} and {len(said)} tokens: "
                           f"must be 1 or more each, {most} together at most")
        ids = torch.tensor([before + said], device=policy.wte.weight.device)
        h = policy(ids[:, :-1])[0, -len(said):]                                 # (T, C)
        logp = policy.lm_head(h).float().log_softmax(-1)                        # (T, V)
        return logp.gather(1, ids[0, -len(said):, None]).mean()

    return target


def scored_against(again, cfg, j):
    """{parameter: tensor}: what the row at position j of the step is scored against."""
    found = again.found
    if not cfg.tracin_leave_one_out or found.target_coef is None:
        return found.G
    i = int(again.step.rows[j])
    own = again.tape.gradient(torch.arange(len(found.target_coef), device=found.scores.device) == i)
    return {p: g - found.target_coef[i] * found.scale.get(p, 1) * own[p]
            for p, g in found.G.items()}


def check(again, cfg):
    """A sentence: the tape's influences beside those by a plain backward for each rollout."""
    if cfg.loss_type == "bnpo":
        return "Not checked: with loss_type = 'bnpo' a rollout alone has another loss."
    nets, _, batch, step, _, found, _ = again
    order = found.scores.argsort()
    chosen = order[torch.linspace(0, len(order) - 1, CHECKED).long()].unique().tolist()
    plain = []
    for j in chosen:
        g = nets.influence.gradient_of(batch, step.rows[[j]], step, "policy")
        plain.append(inner(g, scored_against(again, cfg, j)))
    plain = torch.stack(plain).to(found.scores)
    error = (found.scores[chosen] - plain).abs().max() / plain.abs().max().clamp(min=1e-30)
    agrees = float(error) < bound_of(nets.dtype)
    verdict = "agrees with" if agrees else "CONTRADICTS"
    return (f"Iteration {again.rows[0]['iteration']}: the tape {verdict} a plain backward for each "
            f"of {len(chosen)} rollouts (error {float(error):.0e} of the largest influence).")


# ------------------------------------------------------------------------------------------------
# words


def words_of(again, cfg, chosen):
    """{position in the step: the row's Pieces}, influence in standard deviations."""
    nets, _, batch, step, micros, found, _ = again
    unit = float(found.scores.std(correction=0)) or 1.0
    names = {p: name for name, p in nets.policy.named_parameters()}
    ends = end_tokens(nets.tokenizer)
    position = {row: j for j, row in enumerate(step.rows.tolist())}
    words = {}
    for rows in micros:
        loss = grpo.loss_of(nets, nets.policy, batch, rows, step, cfg)
        slopes, = torch.autograd.grad(loss.policy, loss.logp)                   # (n, T)
        for i, slope in zip(rows.tolist(), slopes):
            j = position[i]
            if j in chosen:
                row = row_alone(batch.rollout, i, cfg.temperature)
                D = {names[p]: g for p, g in scored_against(again, cfg, j).items()}
                change = logprob_changes(nets.policy, D, row)
                influence = slope[:len(change)] * change / unit
                words[j] = pieces_of(row, influence, change, nets.tokenizer, ends)
    return words


def strongest(words, count=20):
    """[(text, its influence in all rows)] of the words that helped or harmed most."""
    total = collections.Counter()
    for pieces in words:
        for piece in pieces:
            total[piece.text or "(end)"] += piece.influence
    return sorted(total.items(), key=lambda item: -abs(item[1]))[:count]


def cards_of(again, cfg, show, count):
    """([(row with its z, its Pieces)], the Pieces of `count` rows) of an iteration: those that the
    page may show, and those whose words are counted."""
    z = own_units(again.rows)
    shown = sum(best_and_worst(z, show), [])
    counted = z.abs().argsort(descending=True)[:count].tolist()
    words = words_of(again, cfg, {*shown, *counted})
    cards = [(again.rows[j] | {"z": float(z[j])}, words[j]) for j in shown]
    return cards, [words[j] for j in counted]


# ------------------------------------------------------------------------------------------------
# what is printed and written


def print_rollouts(rows, show):
    z = own_units(rows)
    for name, places in zip(("helpful", "harmful"), best_and_worst(z, show)):
        print(f"\nmost {name}")
        for i in places:
            row = rows[i]
            print(f"  {z[i]:+7.2f}  iteration {row['iteration']}, reward {row['reward']:.3f}, "
                  f"advantage {row['advantage']:+.2f}, weight {row['weight']:.2g}: "
                  f"{row['prompt'][:48]!r} -> {row['completion'][:48]!r}")


def curves(folder):
    """The run over time as an SVG; without matplotlib a line that says so."""
    try:
        import plot
        runs = {folder: plot.read_run(folder)}
        there = plot.choose_panels(None, runs)
        svg = io.BytesIO()
        chosen = [name for name in PANELS if name in there] or there
        plot.draw(svg, "svg", plot.draw_runs, runs, chosen)
    except BadInput as e:
        return f"<p>{e}</p>"
    text = svg.getvalue().decode()
    return text[text.index("<svg"):]


def checkpoints_of(folder, before, both):
    """Paths of the checkpoints to go on from, the older first."""
    newest = os.path.join(folder, "ckpt.pt")
    older = os.path.join(folder, "ckpt_prev.pt")
    if both:
        return [path for path in (older, newest) if os.path.exists(path)] or [newest]
    return [older if before else newest]


def scored_rows(folder):
    """The rows of samples.jsonl that have an influence; NaN for a reward that is null."""
    rows = [row for row in read_rows(os.path.join(folder, "samples.jsonl"))
            if row.get("influence") is not None]
    return [row | {k: math.nan for k in ("reward", "advantage") if row[k] is None} for row in rows]


def read_arguments(argv):
    before = "--before" in argv
    own, flags = own_flags(argv[1:], {"show": "5", "words": "64", "prompt": "", "completion": ""})
    flags = [flag for flag in flags if flag != "--before"]
    numbers = own["show"].isdecimal() and own["words"].isdecimal()
    both = bool(own["prompt"]) == bool(own["completion"])
    if not argv or argv[0].startswith("--") or not numbers or not both:
        raise BadInput(USAGE)
    return argv[0], own, before, flags


def settings_of(folder, flags, prompt, completion):
    """The run's settings with a target: the run's, or the one that the question asks for."""
    cfg = load_settings([folder, *flags])
    if completion:
        cfg.functions["target"] = saying(prompt, completion)
        cfg.tracin = "target"
        cfg.tracin_val_prompts = 0
        cfg.tracin_target_ema = 0.0
        cfg.tracin_leave_one_out = False
    elif cfg.tracin == "off":
        cfg.tracin = "reward"
    threads = read_json(os.path.join(folder, "config.json")).get("threads")
    torch.set_num_threads(cfg.threads or threads or torch.get_num_threads())
    return cfg


def main(argv):
    folder, own, before, flags = read_arguments(argv)
    show = int(own["show"])
    asked = own["completion"]
    cfg = settings_of(folder, flags, own["prompt"], asked)
    paths = checkpoints_of(folder, before, bool(asked))
    for path in paths:
        load_file(path, "run", mmap=True)   # what is wrong with it is said first
    recorded = [] if asked else scored_rows(folder)
    metrics = read_rows(os.path.join(folder, "metrics.jsonl")) if recorded else []
    with contextlib.redirect_stdout(io.StringIO()):     # what a run says of its models
        nets = grpo.prepare(cfg, grpo.read_inputs(cfg), grpo, may_train=False)

    sampled = []
    cards = []
    counted = []
    checks = []
    for path in paths:
        again = iteration_after(nets, path, cfg, bool(asked))
        shown, pieces = cards_of(again, cfg, show, int(own["words"]))
        sampled += again.rows
        cards += shown
        counted += pieces
        checks.append(check(again, cfg))
    rows = recorded or sampled

    target = f"{asked!r} after {own['prompt']!r}" if asked else f"{cfg.tracin!r}"
    about = (f"{folder}: {len(rows)} rollouts of {len({row['iteration'] for row in rows})} "
             f"iterations, target {target}. Influence is in standard deviations of its iteration: "
             "above 0 helps the target, below 0 harms it.")
    sentences = sentences_of(rows, metrics, nets.tokenizer.encode_ordinary) + checks
    print(textwrap.fill(about, 100))
    for text in sentences:
        print(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  "))
    print_rollouts(rows, show)
    words = strongest(counted)
    where = " and ".join(str(it) for it in sorted({row["iteration"] for row in sampled}))
    print(f"\nwords of iteration {where}:", ", ".join(f"{text!r} {x:+.2f}" for text, x in words))

    about_words = f"The rollouts below are of iteration {where}, scored after {' and '.join(paths)}."
    best, worst = best_and_worst(torch.tensor([row["z"] for row, _ in cards]), show)
    lists = {"Most helpful": [cards[j] for j in best], "Most harmful": [cards[j] for j in worst]}
    text = page(f"Influence: {folder}", about, sentences, about_words, words, lists, curves(folder))
    path = os.path.join(folder, "influence.html")
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(text)
    print(f"\n{path}: open it in a browser")


if __name__ == "__main__":
    run_script(main)
