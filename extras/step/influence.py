"""
Influence in a step that is not taken yet: of the rollouts that help and harm most, and of their
tokens.

The step will score its rollouts itself. Here they are scored before it: a token's influence needs
the gradient that its rollout was scored against, and the tape if a rollout's part is left out.
"""
import copy
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import torch

import grpo
from common.seeds import seed_for
from tracin import find_influence, record


def scored_against(recording, scores, row):
    """{parameter: tensor}: the gradient that a row was scored against."""
    direction, coef, scale = scores.direction
    if coef is None or not recording.cfg.hook("without_own_part"):
        return direction
    own = recording.tape.gradient(torch.arange(len(coef), device=coef.device) == row)
    return {p: g - coef[row] * scale.get(p, 1) * own[p] for p, g in direction.items()}


def token_influence(recording, scores, row):
    """Influence (T,) of the tokens of a row, which adds up to the row's; None without
    extras/explain, which has the derivatives."""
    if not find_spec("extras.explain"):
        return None
    from extras.explain.tokens import logprob_changes, token_slopes
    setup, cfg, batch = recording.setup, recording.cfg, recording.batch
    slopes = token_slopes(setup, cfg, batch, recording.step)                        # (N, T)
    direction = scored_against(recording, scores, row)
    changes = logprob_changes(setup.policy, direction, batch.rollout[[row]], cfg.temperature)
    return slopes[row] * changes[0]


class Scored(NamedTuple):
    """A step, scored before it is taken."""
    helps: int          # row of the highest influence
    harms: int          # of the lowest
    words: dict         # {row: influence (T,) of its tokens, or None} of both
    self_share: float   # the part of all influence that rows have on their own part of the target;
                        # NaN: not known


def scored_step(setup, batch, held_out, cfg, seed):
    """The first step of an update -> Scored; None if there is none."""
    step = next(grpo.optimizer_steps(batch, cfg, seed), None)
    if step is None:
        return None
    # the update will average its target, too
    setup = replace(setup, target_average=copy.copy(setup.target_average))
    fresh = not batch.is_replayed
    batch = replace(batch, row_weights=torch.ones_like(batch.row_weights),
                    policy_mask=grpo.policy_mask_of(setup, batch, step.rows, fresh, cfg))
    recording = record(setup, batch, step, fresh, cfg)
    scores = find_influence(recording, held_out, seed_for(seed, "select", 0)).scores
    ends = [int(step.rows[i]) for i in (scores.influence.argmax(), scores.influence.argmin())]
    words = {row: token_influence(recording, scores, row) for row in ends}
    return Scored(*ends, words, float(scores.self_share))
