"""The drawing of the algorithm: its numbers are those of a step, and the drawing that is kept adds
up."""
import os
import re
from xml.etree import ElementTree

import pytest
import torch

from common.files import ROOT
from docs import drawing
from worlds import WORD_PROMPTS, WORDS, setup_of, word_gpt, words


def drawn_of(**knobs):
    cfg = words(**knobs)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    return drawing.first_iteration(setup, cfg)


def texts_of(svg):
    return [node.text for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")]


def numbers_of(texts):
    """Rewards, advantages and factors of the completions, and the group's mean."""
    rewards = [float(x) for x in texts if re.fullmatch(r"\d\.\d{3}", x)]
    advantages = [float(x.replace("−", "-")) for x in texts if re.fullmatch(r"[+−]\d\.\d\d", x)]
    factors = [float(x[2:]) for x in texts if x.startswith("× ")]
    return torch.tensor(rewards[:-1]), torch.tensor(advantages), torch.tensor(factors), rewards[-1]


def test_the_drawing_that_is_kept_adds_up():
    """A number that was edited by hand, or a column of another run, is seen."""
    with open(os.path.join(ROOT, "docs/algorithm.svg"), encoding="utf-8") as f:
        texts = texts_of(f.read())
    rewards, advantages, factors, mean = numbers_of(texts)
    spread = float(re.search(r"/ (0\.\d{3})", " ".join(texts))[1])
    assert len(rewards) == len(advantages) == len(factors) == 8, "a completion lacks a number"
    assert abs(rewards.mean() - mean) < 0.001, "the mean is not that of the rewards"
    off = (advantages - (rewards - mean) / spread).abs().max()
    assert off < 0.01, f"an advantage is {off:.3f} off (reward - mean) / spread"


def test_what_is_drawn_is_the_group_of_a_step():
    """Of a batch that is one group: a small step makes likelier what is better, in the sum."""
    drawn = drawn_of(num_prompts=1, scale_rewards="batch", learning_rate=1e-3)
    expected = (drawn.rewards - drawn.rewards.mean()) / (drawn.spread + 1e-4)
    assert drawn.advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    gained = (drawn.advantages * drawn.likelier.log()).sum()
    assert gained > 0, f"the step goes against the advantages: {gained:.2g}"


def test_a_step_that_moves_nothing_makes_nothing_likelier():
    still = drawn_of(learning_rate=1e-12).likelier
    assert still.tolist() == pytest.approx([1] * len(still), abs=1e-5)


def test_any_text_can_be_drawn():
    """What would be markup, an empty completion, one without a reward."""
    drawn = drawn_of()
    odd = ["<b> & </b>", "", *drawn.completions[2:]]
    rewards = drawn.rewards.clone()
    rewards[1] = torch.nan
    texts = texts_of(drawing.drawing(drawn._replace(completions=odd, rewards=rewards)))
    assert {"…<b> & </b>", "(nothing)", "none"} <= set(texts)
    assert f"{rewards.nanmean():.3f}" in texts, "the mean counts a completion without a reward"
