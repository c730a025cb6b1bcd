"""The page holds what trainings without some rollouts gave, and loads nothing."""
import json
import re

import pytest
import torch

import grpo
import tracin
from common.files import ROOT
from run.settings import load_settings
from tape import inner
from worlds import printed

pytest.importorskip("extras.explain")       # which tints the words
from extras.slider import __main__ as slider


@pytest.fixture(scope="module")
def world():
    """The lessons' world, one iteration of it, and its start."""
    cfg = load_settings([f"{ROOT}/config/lesson.py", "--max_iters=1"])
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
    return setup, cfg, {name: x.clone() for name, x in setup.policy.state_dict().items()}


def test_influence_is_the_product_of_a_rollouts_gradient_and_the_held_out_rewards(world):
    setup, cfg, start = world
    setup.policy.load_state_dict(start)
    batch = grpo.collect_iteration(setup, 0, cfg)
    influence, by_token = slider.influence_of(setup, batch, cfg)
    _, surrogate = slider.held_out_reward(setup, setup.eval_prompts[:slider.FOR_TARGET], cfg)
    slope = dict(zip(setup.trained, torch.autograd.grad(surrogate(), setup.trained)))
    step = next(grpo.optimizer_steps(batch, cfg, seed=0))
    expected = torch.stack([
        -inner(tracin.gradient_of(setup, cfg, batch, one, "policy"), slope)
        for one in (step._replace(rows=row[None]) for row in step.rows)])
    assert torch.allclose(influence, expected, rtol=1e-3, atol=1e-5)
    assert torch.allclose(by_token().sum(1).to(influence), influence, rtol=1e-3, atol=1e-5)


def test_the_slope_of_the_held_out_reward_is_what_a_step_along_it_gains(world):
    """In the reward that is measured, not in its estimate: many completions, a short step."""
    setup, cfg, start = world
    setup.policy.load_state_dict(start)
    prompts = setup.eval_prompts * 8
    before, surrogate = slider.held_out_reward(setup, prompts, cfg)
    slope = torch.autograd.grad(surrogate(), setup.trained)
    with torch.no_grad():
        for p, g in zip(setup.trained, slope):
            p += 3 * g
    after, _ = slider.held_out_reward(setup, prompts, cfg)
    assert after > before + 0.01, "a step along the slope does not raise the held-out reward"


def test_without_any_left_out_it_is_the_training_and_without_all_nothing_moves(world):
    setup, cfg, start = world
    whole, _, shown = slider.train(setup, start, cfg, show=True)
    assert whole == slider.train(setup, start, cfg)[0], "what the page shows changes the training"
    curves = {rule: slider.train(setup, start, cfg, rule, 12)[0] for rule in slider.RULES}
    assert len({tuple(curve) for curve in (whole, *curves.values())}) == 5, "a rule does nothing"
    nothing, texts, _ = slider.train(setup, start, cfg, "random", 24)
    assert nothing == [whole[0]] * 2 and len(texts) == 3
    for it, now in enumerate(shown):
        influence, rewards, advantages = (
            torch.tensor([row[name] for row in now["rollouts"]])
            for name in ("influence", "reward", "advantage"))
        assert torch.allclose(
            advantages, grpo.group_advantages(rewards, cfg.num_generations), atol=0.1)
        low, high, worst, any_order = (now["orders"][rule] for rule in slider.RULES)
        assert (influence[low].diff() >= 0).all() and (influence[high].diff() <= 0).all()
        assert (rewards[worst].diff() >= 0).all() and sorted(any_order) == list(range(24))
        for row in now["rollouts"]:
            assert sum(x for _, x in row["words"]) == pytest.approx(row["influence"], abs=2e-4)


def test_the_page_holds_the_trainings_and_loads_nothing(world, tmp_path):
    setup, cfg, _ = world
    content = slider.content_of(setup, cfg, [0, 24])
    evil = "</script><img src=x onerror=alert(1)>"
    content["iterations"][0]["rollouts"][0]["words"][0][0] = evil
    path = str(tmp_path / "page.html")
    printed(slider.write_page, path, content)
    with open(path, encoding="utf-8") as f:
        page = f.read()
    data = re.search('<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data) == content, "what a policy wrote can end the page's data"
    assert list(json.loads(data)["rules"]) == list(slider.RULES)
    assert page.count("</script>") == 2 and "http" not in page.replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""), "the page loads something"
    for used in re.findall(r'\$\("(\w+)"\)', page):
        assert f'id="{used}"' in page, f"the page's script looks for {used}, which is not there"
