"""Rollouts of others' runs, in the form of the public organisms: the same gradient, row by row."""
import pytest
import torch

from extras.study.organisms import KEYS, groups_of, read_batches
from loss import Step
from tape import inner
from tracin import gradient_of
from worlds import assert_refused, settings, world, write_rows

CFG = settings(mini_batch_size=0)


def rows_of(batch, step, short):
    """A made-up file's rows. short: log-probs of the sampled tokens alone."""
    rows = []
    r = batch.rollout
    for i in range(len(r.logp)):
        P = r.tokens.shape[1] - r.logp.shape[1]
        said = r.completion_mask[i]
        before = r.tokens[i, :P][r.attention_mask[i, :P]].tolist()
        logp = r.logp[i][said].tolist()
        rows.append(dict(
            step=step, group=f"g{i // CFG.num_generations}", reward=float(batch.rewards[i]),
            tokens=before + r.tokens[i, P:][said].tolist(),
            loss_mask=[0] * len(before) + [1] * len(logp),
            old_logprobs=logp if short else [0.0] * len(before) + logp,
            advantage=float(batch.advantages[i])))
    return rows


@pytest.mark.parametrize("short", [False, True])
def test_what_is_read_has_the_gradient_of_what_was_written(short, tmp_path):
    setup, batch = world(CFG)
    path = tmp_path / "rollouts.jsonl"
    # steps may stand in any order
    write_rows(path, [row for step in (1, 0) for row in rows_of(batch, step, short)])
    found = read_batches(path, lambda row: (row["step"], row["group"]) == (1, "g1"))
    assert len(found) == 2
    N = len(batch.rewards)
    tokens = int(batch.loss_mask.sum())
    for i in range(N):
        step = Step(0, torch.tensor([i]), N, tokens)
        ours, theirs = (gradient_of(setup, CFG, b, step) for b in (batch, found[1]))
        off = {p: ours[p] - theirs[p] for p in ours}
        assert inner(off, off) <= 1e-10 * inner(ours, ours), f"row {i} has another gradient"
    units, guilty = groups_of(found)
    assert guilty.tolist() == [False, False, False, True]
    assert units[1].tolist() == [2 + i // CFG.num_generations for i in range(N)]


@pytest.mark.parametrize("change, name", [
    ({"loss_mask": [0, 1]}, "belong together"), ({"old_logprobs": [0.1]}, "belong together"),
    ({"loss_mask": [0] * 4, "old_logprobs": []}, "nothing sampled"),
    ({"advantages": 1}, "advantage")])
def test_a_file_of_another_form_is_refused_by_row(change, name, tmp_path):
    row = dict(step=0, group=1, tokens=[3, 4, 5, 6], loss_mask=[0, 0, 1, 1], advantage=1.0,
               old_logprobs=[-1.0, -2.0], reward=0.5)
    good = tmp_path / "good.jsonl"
    write_rows(good, [row])
    assert torch.equal(read_batches(good)[0].rollout.logp, torch.tensor([[-1.0, -2.0]]))
    bad = tmp_path / "bad.jsonl"
    if "advantages" in change:
        del row[KEYS["advantage"]]
    write_rows(bad, [row | change])
    assert_refused(name, read_batches, bad)
