"""
Tokens that the policy did not choose, anywhere in a completion: read like any token, without
log-prob, loss, KL, entropy, length or influence, on every path.
"""
from dataclasses import replace

import pytest
import torch

from grpo import Batch, Step, group_advantages, kl_penalty, loss_masks, loss_of, reference_logprobs
from sample import completion_entropies, completion_logprobs
from run.decoder import Decoder
from run.metrics import batch_metrics
from sample import decode, generate
from test_grpo import END, PROMPTS, gpt, letters, moved, nets_of, plain_logps, settings
from test_influence import UNIT, close, flat, flat_grad, rest_gradient, row_gradients, step
from selection import target_coefficients

PROMPT_IDS = [ids for _, ids, _ in PROMPTS]
T = 8


def forced_ids(seed=2, share=.3):
    """(16, T) ids, -1 where the policy draws. Row 1 is forced from its first token to its last, row
    2 begins with the end token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 100, (16, T), generator=generator)
    forced = ids.where(torch.rand(16, T, generator=generator) < share, -1)
    forced[1] = ids[1]
    forced[2] = -1
    forced[2, 0] = END
    return forced


def rollout_of(policy, **more):
    return generate(policy, PROMPT_IDS, 4, T, seed=7, eos=END, forced=forced_ids(), **more)


@torch.no_grad()
def batch_of(policy, cfg, reference):
    """A Batch as grpo.collect makes it, from a rollout with forced tokens."""
    nets = nets_of(policy, cfg, reference)
    rollout = rollout_of(policy)
    texts = [str(ids) for ids in rollout.completions(END)]
    rewards = torch.tensor(letters(texts, texts))
    ref_logp = reference_logprobs(nets, rollout, cfg) if cfg.beta else None
    penalty, kl = kl_penalty(rollout, ref_logp, cfg)
    mask, policy_mask = loss_masks(rollout, cfg)
    advantages = group_advantages(rewards - penalty, 4)
    return Batch(
        rollout, advantages, mask, policy_mask, ref_logp, texts, rewards[:, None], rewards, kl)


def test_forced_tokens_stand_where_they_were_put_and_the_rest_is_drawn():
    r, forced = rollout_of(gpt()), forced_ids()
    width = r.completion_mask.shape[1]
    tokens = r.tokens[:, -width:]
    is_forced = (forced[:, :width] >= 0) & r.completion_mask
    assert torch.equal(tokens[is_forced], forced[:, :width][is_forced])
    assert torch.equal(r.sampled_mask, r.completion_mask & ~is_forced) and 10 < r.sampled_mask.sum() < r.completion_mask.sum() - 10
    assert not r.sampled_mask[1].any() and r.completion_mask[1].all(), "a row may be forced from end to end"
    assert tokens[2, 0] == END and r.completion_mask[2, 1], "a forced end token ends no completion"
    assert (tokens[~r.completion_mask] == END).all()
    for x in (r.logp, r.entropy):
        assert (x[~r.sampled_mask] == 0).all() and (x[r.sampled_mask] != 0).all()
    free = generate(gpt(), PROMPT_IDS, 4, T, seed=7, eos=END)
    assert torch.equal(free.chosen, free.mask), "without forced tokens all are chosen"
    assert not torch.equal(free.tokens, r.tokens)
    assert [len(ids) for ids in r.completions(END)] == (r.completion_mask.sum(1) - r.ended.long()).tolist()


@pytest.mark.parametrize("more", [
    dict(batch_size=4), dict(top_k=9), dict(temperature=.6),
    dict(decode=lambda *a, **k: decode(*a, **k, drop=False)), dict(decode="decoder")])
def test_every_way_of_decoding_gives_the_same(more):
    policy = gpt()
    plain = rollout_of(policy, **{k: x for k, x in more.items() if k in ("top_k", "temperature")})
    if more.get("decode") == "decoder":
        more = dict(decode=Decoder(policy, graphs=False))
    other = rollout_of(policy, **more)
    for name in ("tokens", "mask", "chosen", "ended"):
        assert torch.equal(getattr(plain, name), getattr(other, name)), name
    assert torch.allclose(plain.logp, other.logp, atol=1e-5)


def test_parts_of_the_prompts_take_their_own_forced_tokens():
    policy = gpt()
    whole = rollout_of(policy)
    last = rollout_of(policy, part=slice(2, 4))
    width = last.mask.shape[1]
    assert torch.equal(last.tokens[:, -width:], whole.tokens[8:, -whole.mask.shape[1]:][:, :width])


@pytest.mark.parametrize("knobs", [{}, dict(temperature=.7)])
def test_the_trainer_agrees_with_the_sampler_on_chosen_tokens(knobs):
    policy = gpt()
    r = rollout_of(policy, **knobs)
    temperature = knobs.get("temperature", 1.0)
    found = completion_logprobs(policy, r, temperature)
    assert (found - r.logp).abs().max() < 1e-5 and (found[~r.sampled_mask] == 0).all()
    for row, chosen, plain in zip(found, r.sampled_mask, plain_logps(policy, r, temperature)):
        here = chosen[:len(plain)]
        assert torch.allclose(row[:len(plain)][here], plain[here], atol=1e-5)
    entropies = completion_entropies(policy, r, temperature)
    assert torch.allclose(entropies, r.entropy, atol=1e-5)


@pytest.mark.parametrize("loss_type", ("dapo", "grpo", "dr_grpo"))
@pytest.mark.parametrize("knobs", [dict(beta=.1), UNIT])
def test_loss_counts_chosen_tokens_only(knobs, loss_type):
    policy, reference = gpt(), moved(gpt())
    cfg = settings(loss_type=loss_type, **knobs)
    batch = batch_of(policy, cfg, reference)
    chosen = batch.rollout.sampled_mask
    assert torch.equal(batch.loss_mask, chosen)
    whole = Step(0, torch.arange(16), 16, int(chosen.sum()))
    out = loss_of(nets_of(policy, cfg), policy, batch, torch.arange(16), whole, cfg)
    total = 0.0
    ref = plain_logps(reference, batch.rollout)
    for i, (A, new) in enumerate(zip(batch.advantages, plain_logps(policy, batch.rollout))):
        tokens = chosen[i].nonzero()[:, 0].tolist()
        divisor = {"dapo": int(chosen.sum()), "grpo": 16 * max(1, len(tokens)),
                   "dr_grpo": 16 * cfg.max_completion_length}[loss_type]
        for t in tokens:
            ratio = (new[t] - new[t].detach()).exp()
            d = (ref[i][t] - new[t]) * (cfg.kl_in == "loss")
            total += (-ratio * A + cfg.beta * (d.exp() - 1 - d) * ratio) / divisor
    assert float(out.loss.detach()) == pytest.approx(float(total.detach()), abs=1e-5)
    assert close(flat_grad(out.loss, policy), flat_grad(total, policy))


@pytest.mark.parametrize("way", ("contracted", "kept"))
@pytest.mark.parametrize("knobs", [dict(tracin="self", beta=.1), dict(tracin="reward", **UNIT)])
def test_influence_of_rows_with_forced_tokens(knobs, way):
    policy = gpt()
    cfg = settings(micro_batch_size=8, **knobs)
    batch = batch_of(policy, cfg, moved(policy))
    g = row_gradients(policy, batch, cfg)
    G = g.sum(0)
    if cfg.tracin == "reward":
        coef = target_coefficients("reward", batch.rewards, batch.advantages)
        G = flat_grad((coef * completion_logprobs(policy, batch.rollout).sum(1)).sum(), policy)
    seen, m = step(policy, batch, cfg, way=way, first=True)
    assert close(batch.influence, g @ G) and m["tracin/invariant_error"] < 1e-5
    assert batch.influence[1] == 0, "a row that is forced from end to end has no influence"
    kept = (batch.influence > 0).float()
    assert close(flat(seen[0], policy), kept @ g + rest_gradient(gpt(), batch, cfg))


def test_metrics_count_chosen_tokens():
    cfg = settings(beta=.1)
    batch = batch_of(gpt(), cfg, moved(gpt()))
    m = batch_metrics(batch, cfg)
    chosen = batch.rollout.sampled_mask
    assert m["num_completion_tokens"] == int(chosen.sum())
    assert m["completions/mean_length"] == pytest.approx(float(chosen.sum(1).float().mean()))
    assert m["entropy"] == pytest.approx(float(batch.rollout.entropy[chosen].mean()))
    less = replace(cfg, kl_in="reward", kl_estimator="k1")
    penalty, per_token = kl_penalty(batch.rollout, batch.ref_logp, less)
    gap = (batch.rollout.logp - batch.ref_logp)[chosen]
    assert per_token == pytest.approx(float(gap.mean()), abs=1e-6)
    assert float(penalty.sum()) == pytest.approx(.1 * float(gap.sum()), abs=1e-5)
