"""A policy of one's own: an LSTM language model goes through sampling, GRPO and influence."""
import pytest
import torch
from torch import nn

from rollout import completion_logprobs, generate
from worlds import (
    END, PROMPTS, assert_close, assert_near, gradient, mean_token, plain_logps, same_rollout,
    seed_of, settings, shaken, steps_of, world)


class LSTM(nn.Module):
    """What rollout.py asks of a policy, and no more."""
    block_size = 64

    def __init__(self, V=12, C=16):
        super().__init__()
        self.embedding = nn.Embedding(V, C)
        self.from_token = nn.Linear(C, 4 * C)
        self.from_state = nn.Linear(C, 4 * C, bias=False)
        self.lm_head = nn.Linear(C, V, bias=False)

    def forward(self, ids, attention_mask=None):
        state = torch.zeros(2, len(ids), self.lm_head.in_features)
        return self.read(ids, attention_mask, state)[0]

    def read(self, ids, attention_mask, state):
        """Hidden states (B, T, C) and the state (2, B, C) after ids (B, T)."""
        gates = self.from_token(self.embedding(ids))                                # (B, T, 4 C)
        out = []
        for t in range(ids.shape[1]):
            new = self.step(gates[:, t], *state)
            if attention_mask is not None:      # padding changes nothing
                new = torch.where(attention_mask[:, t, None], new, state)
            state = new
            out.append(state[0])
        return torch.stack(out, 1), state

    def step(self, gates, h, c):
        """Gates from a token (B, 4 C), and the state before it -> the state after it (2, B, C)."""
        i, f, g, o = (gates + self.from_state(h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return torch.stack([o.sigmoid() * c.tanh(), c])


class State:
    """The cache of a recurrent model: its state (2, B, C) after the tokens so far."""

    def __init__(self, x=None):
        self.x = x

    def repeat(self, n, S):
        return State(self.x.repeat_interleave(n, 1))

    def keep(self, rows):
        self.x = self.x[:, rows]


class LSTMWithCache(LSTM):
    def new_cache(self, S):
        return State()

    def forward(self, ids, attention_mask=None, cache=None):
        if cache is None or cache.x is None:
            state = torch.zeros(2, len(ids), self.lm_head.in_features)
        else:
            state = cache.x
        if attention_mask is not None:      # it is that of all tokens so far
            attention_mask = attention_mask[:, -ids.shape[1]:]
        h, state = self.read(ids, attention_mask, state)
        if cache is not None:
            cache.x = state
        return h


def lstm(kind=LSTM):
    torch.manual_seed(seed_of(0))
    return shaken(kind(), 0.5)


def test_sampler_and_trainer_give_the_log_probs_of_each_completion_read_alone():
    """With a cache that is not of keys and values, too; it spares reading the tokens so far."""
    rollouts, tokens_read = [], []
    for kind in (LSTM, LSTMWithCache):
        policy = lstm(kind)
        counts = []
        handle = policy.register_forward_hook(
            lambda module, inputs, h: counts.append(h[..., 0].numel()))
        r = generate(policy, [prompt.ids for prompt in PROMPTS], 6, 8, seed=3, eos=(END,))
        handle.remove()
        rollouts.append(r)
        tokens_read.append(sum(counts))
        assert r.ended.any() and not r.attention_mask.all()
        trainer = completion_logprobs(policy, r)
        for i, expected in enumerate(plain_logps(policy, r)):
            assert_near(r.logp[i, :len(expected)], expected, what="the sampler's log-probs")
            assert_near(trainer[i, :len(expected)], expected, what="the trainer's log-probs")
    same_rollout(*rollouts)
    assert tokens_read[1] < tokens_read[0] / 3, "the tokens so far were read again"


def policy_losses(policy, batch):
    """The policy's loss of each completion, by its log-probs when read alone."""
    num_tokens = int(batch.loss_mask.sum())
    return [-A * logp.sum() / num_tokens
            for A, logp in zip(batch.advantages, plain_logps(policy, batch.rollout))]


@pytest.mark.parametrize("target", ["off", "self", "reward"])
def test_a_step_and_its_influence_are_those_of_each_completion_alone(target):
    cfg = settings(mean_token, tracin=target, micro_batch_size=5)
    setup, batch = world(cfg, policy=lstm())
    losses = policy_losses(setup.policy, batch)
    each = torch.stack([gradient(loss, setup.trained) for loss in losses])
    G = each.sum(0)
    if target == "reward":
        r = batch.rewards
        coef = (r.mean() - r) / (r.std() + 1e-4) / len(r)
        logps = plain_logps(setup.policy, batch.rollout)
        G = gradient(sum(c * logp.sum() for c, logp in zip(coef, logps)), setup.trained)
    expected = each @ G
    (found,), _ = steps_of(setup, batch, cfg, check=True)
    if target != "off":
        assert_close(batch.influence, expected, "influences", 1e-4)
    assert_close(found, batch.row_weights @ each, "the gradient of the step", 1e-4)
