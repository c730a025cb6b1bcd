"""What an evaluation measures does not depend on how many rows are computed together."""
import math

import pytest
import torch

from rollout import Sampling
from run import evaluation
from run.evaluation import evaluate, perplexity_under
from run.sampling import sample_completions
from worlds import WORD_PROMPTS, WORDS, letters, setup_of, shaken, skip_without, word_gpt, words


def world_of(**knobs):
    cfg = words(num_eval_generations=5, **knobs)
    return setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS), cfg


def measures_of(setup, policy, cfg):
    return evaluate(setup, policy, cfg)[0]


def test_rows_that_are_computed_together_change_no_measure(monkeypatch):
    setup, cfg = world_of(eval_temperature=.6)
    policy = shaken(word_gpt(), .05)
    whole = measures_of(setup, policy, cfg)
    assert whole["kl"] > 1e-4
    monkeypatch.setattr(evaluation, "AT_ONCE", 1)
    for rows in (1, 7):
        cfg.decode_batch_size = rows
        assert measures_of(setup, policy, cfg) == pytest.approx(whole, rel=1e-5)


def test_the_policy_before_training_knows_its_own_log_probs():
    """The very weights alone, and in float32: what samples in bfloat16 has other log-probs."""
    setup, cfg = world_of()
    assert evaluation.is_untrained(setup, word_gpt())
    assert not evaluation.is_untrained(setup, shaken(word_gpt(), 1e-6))
    rollout = sample_completions(setup, setup.base, WORD_PROMPTS, cfg, 3).rollout
    assert perplexity_under(None, rollout, cfg) == pytest.approx(
        perplexity_under(setup.base, rollout, cfg), rel=1e-5, abs=1e-6)
    setup.dtype = torch.bfloat16
    assert not evaluation.is_untrained(setup, word_gpt())


def test_a_perplexity_beyond_all_numbers_is_infinite():
    setup, cfg = world_of(eval_temperature=1e-6)
    rollout = sample_completions(setup, setup.policy, WORD_PROMPTS, cfg, 1).rollout
    perplexity, _ = perplexity_under(setup.base, rollout, cfg)
    assert perplexity == math.inf, "tokens that are not the likeliest ones have probability 0"


def test_the_rewards_of_the_prompts_are_those_of_the_measures():
    """Of a function of weight 0, or one that abstains, a prompt's reward does not depend."""
    def half(prompts, completions):
        return [None if i % 2 or prompt == "what" else float(len(text))
                for i, (prompt, text) in enumerate(zip(prompts, completions))]

    def watched(completions):
        return [None] * len(completions)

    functions = {"half": half, "letters": letters, "watched": watched}
    cfg = words(functions, (0.5, 2.0, 0.0), num_eval_generations=4)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    measures, found, _ = evaluate(setup, setup.policy, cfg)
    assert [x is None for x in found] == [prompt.text == "what" for prompt in WORD_PROMPTS]
    cfg.reward_weights = (0.0, 1.0, 0.0)
    measures, found, _ = evaluate(setup, setup.policy, cfg)
    assert sum(found) / 4 == pytest.approx(measures["rewards/letters"])


def held_out_sample(setup, policy, cfg):
    skip_without("explain")
    from extras.explain.target import HeldOut
    HeldOut("reward", setup, cfg, setup.reward_funcs, [1.0], setup.eval_prompts, 3).sample()


def train_sample(setup, policy, cfg):
    sample_completions(setup, policy, setup.prompts, cfg, 1)


RULES = Sampling._fields[2:]        # below eos and temperature: one that is new is asked, too
ANOTHER = {int: 3, float: .5, tuple: (5,), bool: True}     # of what no rule has by default


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sample, is_on", [
    (train_sample, True), (evaluate, False), (held_out_sample, False)])
def test_rules_of_sampling_are_those_of_training_alone(rule, sample, is_on):
    """Evaluations, and the held-out completions of an account, are of whole distributions."""
    setup, cfg = world_of()
    setattr(cfg, rule, ANOTHER[type(getattr(Sampling((0,)), rule))])
    drawn = []
    plain = setup.generate

    def generate(*args, **how):
        drawn.append(plain(*args, **how))
        return drawn[-1]

    setup.generate = generate
    sample(setup, setup.policy, cfg)
    assert [r.allowed is not None for r in drawn] == [is_on], f"{rule}: on or off in {sample}"
