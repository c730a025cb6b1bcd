"""
The iteration that a run would do next: it is sampled and scored here, changes nothing, and is not a
part of the run. Which of its rollouts would help a target, which words, and is the arithmetic of
the influence right? The sentences are about all rollouts that the run has scored, where it has.
"""
import os
from typing import Any, NamedTuple

import torch

import grpo
from common.files import read_log, undamaged
from common.guards import tolerance_of
from common.script import BadInput, own_flags, seed_for
from extras.explain.page import facts_of, show
from extras.explain.sentences import best_and_worst, own_units, sentences_of
from extras.explain.words import logprob_changes, pieces_of, token_slopes
from run.checkpoint import load_checkpoint, newest_checkpoint
from run.log import sample_rows
from run.settings import load_settings, read_run
from tracin import Recording, find_influence, remember, true_error


class Scored(NamedTuple):
    """An optimizer step that is scored and not taken."""
    setup: Any           # run.setup.Setup
    recording: Any      # tracin.Recording
    found: Any          # tracin.Influence
    error: float        # by tracin.true_error
    rows: list          # as in samples.jsonl
    slopes: Any         # (N, T) of the loss by the log-probs of tokens


def next_iteration(setup, path, cfg):
    """The iteration that grpo.py would do next from this checkpoint -> Scored."""
    it = load_checkpoint(path, setup, cfg)["iteration"]
    batch = grpo.collect_iteration(setup, it, cfg)
    held_out = grpo.collect_held_out(setup, it, cfg)
    seed = seed_for(cfg.seed, "rows", it)
    step = next(grpo.optimizer_steps(batch, cfg, seed), None)
    if step is None:
        raise BadInput(f"{path}: no rollout of the next iteration carries loss; try --before")
    batch.policy_mask = grpo.policy_mask_of(setup, batch, step, True, cfg)
    with Recording(setup, batch, step, True, cfg) as recording:
        for loss, rows in recording.passes():
            recording.backward(loss, rows)
    found = find_influence(recording, held_out, seed_for(seed, "select", 0))
    slopes = token_slopes(setup, cfg, batch, step)
    error = float(true_error(recording, found))
    remember(batch, step.rows, found)
    rows = sample_rows(it, batch, cfg)
    rows = [rows[i] for i in step.rows.tolist()]
    if found.target.has_parts:     # every rollout is a part of it
        for row, own in zip(rows, own_parts(recording, found.scores).tolist()):
            row["own_part"] = own
    return Scored(setup, recording, found, error, rows, slopes)


def own_parts(recording, scores):
    """Of a step's rollouts (n,): the influence of each on its own part of the target."""
    rows = recording.step.rows
    norms = recording.tape.squared_norms(rows, scores.scale)
    return (recording.policy_coef * scores.coef)[rows] * norms


def scored_against(scored, cfg, j):
    """{parameter: tensor}: what the rollout at position j of the step is scored against."""
    scores = scored.found.scores
    if not cfg.door("without_own_part"):
        return scores.direction
    i = int(scored.recording.step.rows[j])
    itself = torch.arange(len(scores.coef), device=scores.raw.device) == i
    own = scored.recording.tape.gradient(itself)
    return {p: g - scores.coef[i] * scores.scale.get(p, 1) * own[p]
            for p, g in scores.direction.items()}


def check(scored):
    """A sentence: the tape's influences beside a plain backward."""
    agrees = scored.error < tolerance_of(scored.setup.dtype)
    verdict = "agrees with" if agrees else "CONTRADICTS"
    return (f"Iteration {scored.rows[0]['iteration']}: the tape {verdict} a plain backward pass "
            f"(relative error {scored.error:.0e}).")


def words_of(scored, cfg, j):
    """Pieces of the rollout at position j of the step, influence in standard deviations."""
    i = scored.recording.step.rows[[j]]
    row = scored.recording.batch.rollout[i]
    direction = scored_against(scored, cfg, j)
    changes = logprob_changes(scored.setup.policy, direction, row, cfg.temperature)         # (1, T)
    unit = float(scored.found.scores.influence.std(correction=0)) or 1.0
    influence = (scored.slopes[i] * changes)[0] / unit
    return pieces_of(row, influence, scored.setup.tokenizer)


def cards_of(scored, cfg):
    """{heading: [(facts, prompt, Pieces)]} of the rollouts that help and harm most."""
    z = own_units(scored.rows)

    def card(j):
        row = scored.rows[j]
        weight = "" if row["weight"] == 1 else f"weight {row['weight']:.3g}"
        facts = facts_of(row, f"influence {z[j]:+.2f}", weight)
        return facts, row["prompt"], words_of(scored, cfg, j)

    return {heading: list(map(card, some)) for heading, some in best_and_worst(z).items()}


def settings_of(folder, flags):
    """The run's settings with a target. By one that is not the run's own nothing is dropped."""
    cfg = load_settings([folder, *flags])
    if cfg.tracin == "off":
        cfg.tracin = "reward"
    if cfg.tracin != read_run(folder)["settings"]["tracin"]:
        cfg.tracin_select = "all"
    return cfg


def main(argv):
    """Print the next iteration and write RUN/influence.html."""
    own, flags = own_flags(argv[1:], dict(next_iteration=True, before=False))
    folder = argv[0]
    cfg = settings_of(folder, flags)
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg, may_train=False))
    path = newest_checkpoint(folder, own["before"])
    scored = next_iteration(setup, path, cfg)
    recorded = [row for row in read_log(os.path.join(folder, "samples.jsonl"))
                if None not in (row.get("reward"), row.get("influence"))]
    rows = recorded or scored.rows
    metrics = read_log(os.path.join(folder, "metrics.jsonl")) if recorded else []

    which = "that the run has scored" if recorded else "of an iteration that the run has not done"
    about = (f"{folder}: the sentences are about {len(rows)} rollouts {which}, the lists about "
             f"the iteration that would come next; target {cfg.tracin!r}. Influence is in standard "
             "deviations of its iteration: above 0 helps the target, below 0 harms it.")
    with undamaged(folder):
        if not recorded:
            metrics = [{"tracin/self_share": float(scored.found.scores.self_share)}]
        sentences = sentences_of(rows, metrics, setup.tokenizer.encode_ordinary)
        sentences.append(check(scored))
    show(folder, "influence", about, sentences, [cards_of(scored, cfg)])
