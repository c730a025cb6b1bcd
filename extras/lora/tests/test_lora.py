"""LoRA: what adapters compute, which layers get them, and what a step trains."""
import copy

import pytest
import torch

from extras.lora import LoRA, add_lora
from grpo import Meter, collect, update
from run.policy import trainable
from worlds import (
    WORDS, WORD_PROMPTS, assert_near, random_gpt, random_ids, setup_of, skip_without, with_lora,
    word_gpt, words)


def adapted_layers(model):
    return {name for name, module in model.named_modules() if isinstance(module, LoRA)}


def test_adapter_of_every_linear_adds_alpha_over_rank_times_b_a():
    model = random_gpt()
    idx = random_ids(2, 7)
    assert torch.equal(add_lora(copy.deepcopy(model), 3, 6)(idx), model(idx))
    adapted = with_lora(model, rank=3, alpha=7.5)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for name in adapted_layers(adapted):
            layer = adapted.get_submodule(name)
            plain.get_submodule(name).weight += 7.5 / 3 * layer.B.weight @ layer.A.weight
    assert (adapted(idx) - model(idx)).abs().max() > 0.1
    assert_near(adapted(idx), plain(idx), 1e-5)
    assert adapted_layers(adapted) == {f"h.{i}.{name}" for i in range(2) for name in (
        "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}


def test_a_policy_starts_from_the_same_numbers_on_every_device():
    """All are drawn on the CPU: each device has a generator of its own."""
    def after(device):
        trainable(random_gpt().to(device), words(lora_rank=2, critic=True))
        return torch.get_rng_state()

    skip_without("critic")
    assert torch.equal(after("cpu"), after("meta")), "adapters are drawn on the device"


def test_a_step_moves_the_adapters_only():
    cfg = words(lora_rank=2, lora_alpha=7.0, beta=.1)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    batch = collect(setup, WORD_PROMPTS, cfg, 7)
    before = {name: x.clone() for name, x in setup.policy.state_dict().items()}
    m = update(setup, batch, None, cfg, 3, Meter(setup, cfg, check=True))
    changed = {name for name, x in setup.policy.state_dict().items() if (x != before[name]).any()}
    assert changed == {name for name in before if name.endswith("B.weight")}    # A's gradient is 0
    assert m["kl"] == pytest.approx(0, abs=1e-6)
    assert {layer.scale for layer in setup.policy.modules() if isinstance(layer, LoRA)} == {3.5}, (
        "lora_alpha of the settings does nothing")
