"""
Is this still GRPO? A planted batch goes through the functions of grpo.py before a run begins, and
what comes out must be what plain arithmetic says. Takes a few hundredths of a second.

It asks what holds for every GRPO: signs, groups, masks, and that padding and micro-batches change
nothing. With a critic there are no groups: it asks for the signs of advantages and of the critic's
loss instead. Only the divisors are those of the loss types known here. Whoever changes the method
on purpose changes the check of that part too; its sentence names it.

N = 8 rows: 4 completions of each of 2 prompts, T tokens at most. A completion repeats one token,
its row's number plus one.
"""
import dataclasses
import statistics
from types import SimpleNamespace

import torch

from run.script import BadInput
from sample import Rollout

PROMPTS = [SimpleNamespace(text="first", ids=[1], row={}),
           SimpleNamespace(text="second", ids=[2], row={})]
G = 4
REWARDS = [1.0, 3.0, 2.0, 7.0, 170.0, 110.0, 150.0, 130.0]  # apart between prompts, and wider
LENGTHS = [2, 4, 3, 2, 4, 2, 3, 4]                          # the end token included
END = 0
NATS = 0.5


def check_method(nets, cfg, method):
    """Ends the run with one sentence where the functions of grpo.py do not do GRPO.

    method: the module grpo.py. nets and cfg are the run's. Their sampling, rewards and networks give way to the planted ones;
    the loss stays.
    """
    small = dataclasses.replace(
        cfg, num_prompts=len(PROMPTS), num_generations=G, mini_batch_size=0, decode_batch_size=0,
        micro_batch_size=len(REWARDS), zero_std_groups="keep", tracin="off", beta=0.0,
        entropy_coef=0.0, reward_funcs=("planted",), reward_weights=(1.0,), force_rate=0.0,
        bootstrap_truncated_completions=False)      # all that is planted ended
    if cfg.critic:
        check_advantages_of_tokens(method, nets, small)
    else:
        check_advantages(method, nets, small)
    check_policy_loss(method, nets, small)
    check_padding(method, nets, small)
    check_micro_batches(method, nets, small)
    if cfg.beta:
        check_kl(method, nets, dataclasses.replace(
            small, beta=cfg.beta, value_coef=0.0, whiten_advantages=False))


def stop(check, sentence):
    raise SystemExit(f"stopped before training: {sentence}. If you changed this on purpose, change "
                     f"{check.__name__} in run/selfcheck.py too")


# ------------------------------------------------------------------------------------------------
# what is asked


def check_advantages(method, nets, cfg):
    """The group is the baseline, and the better completion gets the larger advantage."""
    here = check_advantages
    plain = planted_batch(method, nets, dataclasses.replace(cfg, scale_rewards="none"))
    groups = plain.advantages.double().view(-1, G).tolist()
    if not all(abs(sum(group)) <= 1e-3 for group in groups):       # NaN is not
        stop(here, "advantages: those of a prompt's completions do not add up to 0, so rows of "
                   "different prompts are in one group, or the baseline is not the group's mean")
    for advantages, rewards in zip(groups, grouped(REWARDS)):
        if order(advantages) == order(rewards)[::-1]:
            stop(here, "advantages: the better completion of a group got the smaller advantage")
        if order(advantages) != order(rewards):
            stop(here, "advantages: they are in another order than the rewards of their group")
    scaled = planted_batch(method, nets, cfg).advantages.double()
    for advantages, rewards in zip(scaled.view(-1, G).tolist(), grouped(REWARDS)):
        if order(advantages) != order(rewards) or not abs(sum(advantages)) <= 1e-3:
            stop(here, "advantages: completions of one prompt are divided by different numbers: "
                       "is the standard deviation taken along the wrong dimension?")
    spreads = [statistics.stdev(group) for group in scaled.view(-1, G).tolist()]
    if cfg.scale_rewards == "group" and not all(0.5 < s < 2 for s in spreads):
        stop(here, f"advantages: with scale_rewards = 'group' they spread by {spreads[0]:.3g} and "
                   f"{spreads[1]:.3g} in two groups, not by 1: they are divided by something else "
                   "than the standard deviation of their own group")


def check_advantages_of_tokens(method, nets, cfg):
    """The better completion gets the larger advantage at its end, and values move to returns."""
    here = check_advantages_of_tokens
    batch = planted_batch(method, nets, cfg)
    last = torch.tensor(LENGTHS) - 1
    at_end = batch.advantages.cpu()[torch.arange(len(last)), last]                  # (N,)
    if order(at_end.tolist()) != order(REWARDS):
        stop(here, "advantages: those of last tokens are in another order than the rewards")
    step = next(iter(method.optimizer_steps(batch, cfg, 0)))
    values = batch.rollout.values.clone().requires_grad_()
    with torch.enable_grad():
        planted = planted_nets(nets, REWARDS, logp=planted_logp(0).to(nets.device), values=values)
        out = method.loss_of(planted, planted.policy, batch, step.rows, step, cfg)
        gradient, = torch.autograd.grad(out.total, values)
    tokens = tokens_of(batch)
    gap = (values.detach() - batch.returns).cpu()
    if gradient.cpu()[~tokens].any():
        stop(here, "mask: the critic's loss has a gradient at positions that carry no loss")
    if cfg.value_coef and not (gradient.cpu() * gap > 0)[tokens].all():
        stop(here, "critic: a step does not move values towards their returns")


def check_policy_loss(method, nets, cfg):
    """Masks, the direction of a step, and the divisors."""
    here = check_policy_loss
    batch = planted_batch(method, nets, cfg)
    tokens = tokens_of(batch)
    mask = batch.mask.cpu()
    if (mask & ~tokens).any():
        stop(here, "mask: positions after the end of a completion carry loss")
    if (tokens & ~mask).any():
        stop(here, "mask: not all tokens of a completion, the end token included, carry loss")
    step, _, gradient = loss_and_gradient(method, nets, batch, cfg)
    if gradient[~tokens].any():
        stop(here, "mask: the loss has a gradient at positions that carry no loss")
    if not gradient[tokens].all():
        stop(here, "mask: the loss has no gradient at some tokens that carry loss")
    advantages = batch.advantages.double().cpu().view(len(gradient), -1).expand_as(gradient)
    slope = -(gradient / advantages)[tokens]
    if (slope < 0).all():
        stop(here, "loss: a step makes completions with a positive advantage less likely: the sign "
                   "of the loss, of the advantage or of the ratio's logarithm is wrong")
    if (slope < 0).any():
        stop(here, "loss: a step moves some tokens against the sign of their advantage")
    expected = divisors(cfg, tokens)
    if expected is None:    # a loss type of the user's own
        return
    found = 1 / slope
    expected = expected[tokens]
    worst = int((found / expected - 1).abs().argmax())
    if not abs(found[worst] / expected[worst] - 1) <= 1e-3:
        stop(here, f"divisor: with loss_type = {cfg.loss_type!r} a token's advantage is divided by "
                   f"{found[worst]:.4g} and not by {expected[worst]:.4g}")


def check_padding(method, nets, cfg):
    """More padding changes no loss. Of three rows, since the advantages of all add up to 0."""
    losses = []
    for padding in (0, 3):
        batch = planted_batch(method, nets, cfg, padding)
        _, loss, _ = loss_and_gradient(method, nets, batch, cfg, torch.arange(3))
        losses.append(loss)
    narrow, wide = losses
    if not abs(wide - narrow) <= 1e-4 * (1 + abs(narrow)):
        stop(check_padding, "mask: padding changes the loss: some sum or mean is over positions "
                            "that hold no token")


def check_micro_batches(method, nets, cfg):
    """The losses of micro-batches add up to that of the step."""
    if cfg.loss_type == "bnpo":     # the one that depends on them
        return
    batch = planted_batch(method, nets, cfg)
    step, whole, _ = loss_and_gradient(method, nets, batch, cfg)
    parts = [loss_and_gradient(method, nets, batch, cfg, rows)[1] for rows in step.rows.split(3)]
    if not abs(sum(parts) - whole) <= 1e-4 * (1 + abs(whole)):
        stop(check_micro_batches, f"divisor: the losses of micro-batches add up to {sum(parts):.4g}"
                                  f", that of the step is {whole:.4g}: divide by what `step` counts"
                                  ", not by what the micro-batch holds")


def check_kl(method, nets, cfg):
    """With equal rewards, a step pulls the policy towards the reference."""
    wrong = ("KL: a step moves the policy away from the reference: the sign of the KL is wrong, or "
             "policy and reference are exchanged")
    batch = planted_batch(method, nets, cfg, rewards=[0.0] * len(REWARDS), values=0.0)
    tokens = tokens_of(batch)
    above = above_reference().expand_as(tokens) & tokens
    _, _, gradient = loss_and_gradient(method, nets, batch, cfg)
    if gradient[~tokens].any():
        stop(check_kl, "mask: the KL has a gradient at positions that carry no loss")
    if not gradient[above].any():
        stop(check_kl, f"KL: beta = {cfg.beta:g}, yet the KL changes no step")
    if gradient[above].sum() < 0:
        stop(check_kl, wrong)


# ------------------------------------------------------------------------------------------------
# the planted batch


def planted_batch(method, nets, cfg, padding=0, rewards=REWARDS, values=1.0):
    """collect() with planted completions, rewards, reference and values -> Batch. values: a factor
    on those of planted_values."""
    values = values * planted_values(padding).to(nets.device)
    planted = planted_nets(nets, rewards, padding, values=values)
    return method.collect(planted, PROMPTS, cfg, seed=0)


def planted_nets(nets, rewards, padding=0, logp=None, values=None):
    """The run's nets, but sampling, tokenizer, rewards, log-probs and values (N, T) are planted."""
    device = nets.device
    old_logp = planted_logp(padding).to(device)
    values = planted_values(padding).to(device) if values is None else values

    def policy(tokens, attention_mask):
        return values[tokens[:, 0], :tokens.shape[1], None]     # hidden states: one, the value

    policy.value_head = lambda h: h[:, 0]

    def generate(model, prompts, *more, part=slice(None), **sampling):
        first, end, _ = part.indices(len(PROMPTS))
        rollout = planted_rollout(padding)
        rollout.values = (values * rollout.mask.to(device)).detach()
        return rollout.map(lambda x: x[first * G:end * G].to(device))

    def logprobs(model, rollout, *more):
        rows = rollout.tokens[:, 0]
        if model == "reference":
            return old_logp[rows] - NATS * above_reference().to(device)[rows]
        return logp[rows]

    def reward(prompts, completions):
        numbers = [int(text) for text in completions]
        if any(PROMPTS[i // G].text != text for i, text in zip(numbers, prompts)):
            raise BadInput("rewards: a completion is scored as an answer to another prompt; if you "
                           "changed this on purpose, change planted_nets in run/selfcheck.py too")
        return [rewards[i] for i in numbers]

    tokenizer = SimpleNamespace(eot_token=END, decode=lambda ids: str(ids[0] - 1))
    return dataclasses.replace(
        nets, generate=generate, logprobs=logprobs, reward_funcs={"planted": reward},
        tokenizer=tokenizer, policy=policy, policy_fn=policy, reference_fn="reference")


def planted_rollout(padding):
    """Rows of LENGTHS on the CPU. Its column of prompts holds the row's number."""
    N = len(LENGTHS)
    T = max(LENGTHS) + padding
    number = torch.arange(N)[:, None]
    length = torch.tensor(LENGTHS)[:, None]
    position = torch.arange(T)
    sampled = torch.where(position < length - 1, number + 1, END)                   # (N, T)
    mask = position < length
    return Rollout(
        tokens=torch.cat([number, sampled], 1), mask=mask, chosen=mask,
        logp=planted_logp(padding) * mask, entropy=torch.ones(N, T),
        attention_mask=torch.ones(N, 1 + T, dtype=torch.bool),
        ended=torch.ones(N, dtype=torch.bool))


def planted_logp(padding):
    """Log-probs (N, T), other ones in the padding than a mask would leave there."""
    row = torch.arange(len(LENGTHS))[:, None]
    position = torch.arange(max(LENGTHS) + padding)
    return -1 - row / 10 - position / 100


def planted_values(padding):
    """Values (N, T), closer together than rewards, and apart by no power of a discount."""
    return 0.1 * torch.sin(planted_logp(padding) * 50) - 0.2


def above_reference():
    """(N, 1) True for every other row: there the policy is NATS above the reference, elsewhere it
    is at it."""
    return (torch.arange(len(LENGTHS)) % 2 == 0)[:, None]


def loss_and_gradient(method, nets, batch, cfg, rows=None):
    """(Step, loss, its gradient (N, T) by the policy's log-probs) of some rows of the step; None:
    all. The policy is the one that sampled."""
    step = next(iter(method.optimizer_steps(batch, cfg, 0)))
    padding = batch.mask.shape[1] - max(LENGTHS)
    logp = planted_logp(padding).to(nets.device).requires_grad_()
    planted = planted_nets(nets, REWARDS, padding, logp)
    rows = step.rows if rows is None else rows.to(nets.device)
    with torch.enable_grad():
        out = method.loss_of(planted, planted.policy, batch, rows, step, cfg)
        gradient, = torch.autograd.grad(out.total, logp)
    return step, float(out.total.detach()), gradient.double().cpu()


def tokens_of(batch):
    """(N, T) True on the planted tokens."""
    return torch.arange(batch.mask.shape[1]) < torch.tensor(LENGTHS)[:, None]


def divisors(cfg, tokens):
    """What a token's advantage is divided by (N, T); None for an unknown loss_type."""
    N = len(LENGTHS)
    num_tokens = sum(LENGTHS)
    by_row = {"grpo": [n * N for n in LENGTHS], "sapo": [n * N for n in LENGTHS],
              "dr_grpo": [N * cfg.max_completion_length] * N,
              "bnpo": [num_tokens] * N, "dapo": [num_tokens] * N, "cispo": [num_tokens] * N}
    if cfg.loss_type not in by_row:
        return None
    return torch.tensor(by_row[cfg.loss_type], dtype=torch.float64)[:, None].expand_as(tokens)


def grouped(values):
    return [values[i:i + G] for i in range(0, len(values), G)]


def order(values):
    """Positions from the smallest to the largest value."""
    return sorted(range(len(values)), key=lambda i: values[i])
