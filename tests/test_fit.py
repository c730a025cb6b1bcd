"""run/fit.py: the supervised loop."""
import functools
import math
import os

import pytest
import torch
import torch.nn as nn

from by_hand import random_gpt, random_ids
from pretrain import optimizers
from run.fit import fit, trapezoid


def train(partial, steps=8, until=None, crash=False):
    """A GPT trained on random tokens -> it and the steps made. until: the step before which it is
    stopped or crashes."""
    model, made = random_gpt(seed=0 if not os.path.exists(partial) else 1), []

    def loss_at(step):
        if crash and step == until:
            raise RuntimeError("power cut")
        made.append(step)
        idx = random_ids(4, 9, seed=step)
        logits = model.lm_head(model(idx[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten())

    stop = (lambda: made[-1:] == [until - 1]) if until and not crash else lambda: False
    schedule = functools.partial(trapezoid, warmup=0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("run.fit.SAVE_SECONDS", -1 if crash else 1e9)
        try:
            fit(model, optimizers(model), loss_at, steps, partial, "test", schedule, stop)
        except (KeyboardInterrupt, RuntimeError) as e:
            made.append(str(e))
    return model, made


@pytest.mark.parametrize("crash", [False, True])
def test_interrupted_fit_goes_on_as_if_it_had_not_been(tmp_path, crash):
    whole, made = train(str(tmp_path / "whole.pt"))
    assert made == list(range(8)) and not (tmp_path / "whole.pt").exists()
    partial = str(tmp_path / "partial.pt")
    _, first = train(partial, until=1, crash=crash)  # while the learning rate still goes up
    _, second = train(partial, until=6, crash=crash)  # and while it goes down
    model, third = train(partial)
    assert (first[:-1], second[:-1], third) == ([0], [1, 2, 3, 4, 5], [6, 7])
    assert ("power cut" if crash else "test is saved") in first[-1]
    for (name, a), b in zip(whole.state_dict().items(), model.state_dict().values()):
        assert torch.equal(a, b), name
    assert not any(torch.equal(a, b) for a, b in zip(whole.parameters(), random_gpt().parameters()))


def test_fit_interrupted_after_its_last_step_is_done(tmp_path):
    partial = str(tmp_path / "partial.pt")
    _, made = train(partial, until=8)
    assert made[:-1] == list(range(8)) and "saved" in made[-1]
    model, made = train(partial)
    whole, _ = train(str(tmp_path / "whole.pt"))
    assert made == [] and torch.equal(model.wte.weight, whole.wte.weight)


def test_learning_rate_goes_up_stays_and_goes_down_to_nearly_zero(tmp_path, capsys):
    model, rates = nn.Linear(2, 1), []
    groups = [dict(params=[model.weight], lr=0.1), dict(params=[model.bias], lr=0.02)]
    optimizer = torch.optim.SGD(groups)

    def loss_at(step):
        rates.append([group["lr"] for group in optimizer.param_groups])
        return (model(torch.tensor([1.0, -2.0])) - 3).square().sum()

    schedule = functools.partial(trapezoid, warmup=0.1, decay=0.4)
    final = fit(model, [optimizer], loss_at, 100, str(tmp_path / "p"), "test", schedule)
    expected = [(i + 1) / 10 for i in range(10)] + [1.0] * 50 + [(40 - i) / 40 for i in range(40)]
    for rate, scale in zip(rates, expected, strict=True):
        assert rate == pytest.approx([0.1 * scale, 0.02 * scale])
    assert loss_at(0) < 1e-6 and math.isfinite(final)
    assert "test: step 100/100, loss" in capsys.readouterr().out


def test_fit_reports_a_loss_that_starts_at_its_full_height(tmp_path, capsys):
    model = nn.Linear(1, 1)

    def loss_at(step):
        return 0 * model.weight.sum() + 1.25

    fit(model, [torch.optim.SGD(model.parameters(), lr=0.1)], loss_at, 3, str(tmp_path / "p"), "x")
    assert "x: step 3/3, loss 1.250, 0 s left" in capsys.readouterr().out


def test_optimizers_share_the_weights_between_them():
    model = random_gpt()
    muon, adam = optimizers(model)
    names = {id(p): name for name, p in model.named_parameters()}
    of = [[names[id(p)] for group in o.param_groups for p in group["params"]] for o in (muon, adam)]
    assert sorted(of[0] + of[1]) == sorted(names.values())
    assert len(of[0]) == 8
    for name in of[0]:
        assert name.startswith("h.") and name.endswith("weight") and ".ln_" not in name
