# %% [markdown]
# # One GRPO step and one influence score
#
# GRPO samples several completions of a prompt, scores them, and makes those that are better than
# their group likelier. **Influence** says for each of them: if we learned from this completion
# alone, would our target get better or worse?
#
# Every function here is the project's own: what you change in `grpo.py` or `tracin.py` changes
# here too. Run it with `python lesson.py` (pictures go to `out/lesson`), or read `lesson.ipynb`,
# which `python -m explain.notebook` makes.
#
# ## 1. A small world
# The policy is a GPT of a million weights that has read made-up sentences of eight words
# (`config/lesson.py`). The reward is a rule: the share of the letter e in a completion.

# %%
import os
import sys

import torch
import matplotlib.pyplot as plt

import grpo
import selection
from config import load_settings
from data.prompts import draw_prompts
from data.tokenizer import texts_of
from explain.words import logprob_changes, pieces_of, row_alone
from tracin import Tape, cosine, inner

flags = sys.argv[1:] if sys.argv[0].endswith("lesson.py") else []
cfg = load_settings(["config/lesson.py", *flags])
nets = grpo.prepare(cfg, grpo.read_inputs(cfg), grpo)
prompts = draw_prompts(nets.prompts, 0, cfg.num_prompts, cfg.seed)
G = cfg.num_generations
N = len(prompts) * G


def picture(name):
    os.makedirs("out/lesson", exist_ok=True)
    plt.tight_layout()
    plt.savefig(f"out/lesson/{name}.png", dpi=100)


# %% [markdown]
# **Try:** another reward in `config/lesson.py`, such as the share of the letter o.
#
# ## 2. Rollout
# The policy writes six completions of each prompt. Each token's log-prob is kept: training will
# ask how much likelier the token has become since.

# %%
rollout = grpo.sample_groups(nets, prompts, cfg, seed=1)
texts = texts_of(nets.tokenizer, rollout)
print(repr(prompts[0].text), "->", *map(repr, texts[:G]), sep="\n")

plt.figure(figsize=(7, 3))
plt.imshow(rollout.logp.masked_fill(~rollout.completion_mask, float("nan")), aspect="auto")
plt.colorbar(label="log-prob (0: certain)")
plt.xlabel("token of the completion")
plt.ylabel("rollout")
picture("2_rollout")

# %% [markdown]
# White is after the end of a completion. Dark tokens were a surprise.
#
# **Try:** `python lesson.py --temperature=0.3`. What happens to the surprises, and what will the
# group then have to compare?
#
# ## 3. Score and advantage
# Each completion gets a reward. Its advantage is its distance from the mean of its group, in
# standard deviations of the group: $A_i = (r_i - \mathrm{mean}) / \mathrm{std}$. So the advantages
# of each prompt (a colour below) add up to 0.

# %%
scores = grpo.score_rows(nets.reward_funcs, prompts, texts, cfg)                # (N, K)
rewards = grpo.total_reward(scores, cfg.reward_weights, G)                      # (N,)
advantages = grpo.group_advantages(rewards, G, cfg.scale_rewards)               # (N,)

colors = [f"C{i // G}" for i in range(N)]       # a colour per prompt
plt.figure(figsize=(7, 3))
plt.bar(range(N), advantages, color=colors)
plt.ylabel("advantage")
picture("3_advantages")

# %% [markdown]
# **Try:** `--scale_rewards=none` divides by no standard deviation. Which prompt loses weight, and
# is that fair?
#
# ## 4. The clip
# The objective of a token is $\min(\rho A,\ \mathrm{clip}(\rho) A)$, where
# $\rho = p_\mathrm{policy} / p_\mathrm{sampler}$ is how much likelier the token has become. Where
# the curve is flat, a token has moved far enough and is left alone.

# %%
ratio = torch.linspace(0.5, 1.5, 101)[:, None]                                  # (n, 1)
plt.figure(figsize=(5, 3))
for A in (1.0, -1.0):
    objective = grpo.clipped_objective(ratio, ratio.log(), torch.full((101,), A), cfg)
    plt.plot(ratio, objective, label=f"advantage {A:+g}")
plt.xlabel("ratio = policy / sampler")
plt.ylabel("objective")
plt.legend()
picture("4_clip")

# %% [markdown]
# **Try:** `--loss_type=sapo`, or `--loss_type=cispo --epsilon_high=5`. Where do they still learn?
#
# ## 5. The step
# `grpo.collect` does cells 2 and 3 in one call. Then: loss, backward, optimizer step. All ratios
# are 1 and the advantages of a group add up to 0, so the loss is near 0. Its gradient is not.

# %%
batch = grpo.collect(nets, prompts, cfg, seed=1)
step = next(grpo.optimizer_steps(batch, cfg, seed=1))
start = {name: x.clone() for name, x in nets.policy.state_dict().items()}
loss = grpo.loss_of(nets, nets.policy, batch, step.rows, step, cfg)
loss.total.backward()
nets.optimizer.step()
nets.optimizer.zero_grad()
with torch.no_grad():
    after = grpo.loss_of(nets, nets.policy, batch, step.rows, step, cfg)
change = (after.logp - batch.rollout.logp).sum(1)                               # (N,)
print(f"ratio {float(loss.ratio.mean()):.6f}, loss {float(loss.total.detach()):+.6f}")

plt.figure(figsize=(5, 3))
plt.scatter(batch.advantages, change, color=colors)
plt.xlabel("advantage")
plt.ylabel("change of log-prob")
picture("5_step")
nets.policy.load_state_dict(start)      # back to where we were

# %% [markdown]
# Most completions of positive advantage became likelier. Not all: they share words, and a step on
# one moves the others too.
#
# **Try:** flip the sign of the objective in `grpo.clipped_objective` and run this cell again. Then
# run `python grpo.py config/lesson.py` and look at the reward. Flip it back!
#
# ## 6. Influence by definition
# The **target** is what we want to get better; here it is the loss of all 24 rollouts. The
# influence of rollout $i$ is the inner product of two gradients, that of its own loss and that of
# the target: $I_i = \langle \nabla L_i, \nabla L_\mathrm{target} \rangle$. If both point the same
# way, a step on rollout $i$ lowers the target's loss too. It takes a backward for each rollout.

# %%
def gradient_of(rows):
    """{parameter: gradient} of the loss of these rows, by a plain backward."""
    return selection.gradient_of(grpo, nets, cfg, batch, rows, step, "policy")


target = gradient_of(step.rows)
by_hand = torch.stack([inner(gradient_of(row[None]), target) for row in step.rows])     # (N,)
print("influence of the first group:", [f"{x:+.4f}" for x in by_hand[:G]])

# %% [markdown]
# **Try:** take the first group alone as target, `gradient_of(step.rows[:G])`. Do rollouts of other
# prompts still have influence, and why?
#
# ## 7. The same from one backward
# A tape keeps each layer's input and the gradient of its output. Together they give the gradient
# of each rollout, so that one backward gives all 24 influences.

# %%
with Tape(nets.policy, N) as tape:
    tape.rows(torch.arange(N), owners=batch.rollout.sampled_mask.nonzero()[:, 0])
    grpo.loss_of(nets, nets.policy, batch, step.rows, step, cfg).policy.backward()
influence = tape.dot(tape.gradient(torch.ones(N)))                              # (N,)
error = (influence - by_hand).abs().max() / by_hand.abs().max()
print(f"largest difference from cell 6: {float(error):.0e} of the largest influence")

# %% [markdown]
# **Try:** add up all influences, then compute `inner(target, target)`. Why are they equal?
#
# ## 8. What a tiny step really did
# Influence is a promise about a step. We keep it: take a tiny step on one rollout alone, and see
# by how much the target's loss went down.

# %%
SIZE = 0.002
what_it_did = []
for row in step.rows:
    gradient = gradient_of(row[None])
    with torch.no_grad():
        for p in nets.trained:
            p -= SIZE * gradient[p]
        after = grpo.loss_of(nets, nets.policy, batch, step.rows, step, cfg)
    what_it_did.append(float(loss.policy.detach() - after.policy) / SIZE)
    nets.policy.load_state_dict(start)

plt.figure(figsize=(5, 3.5))
plt.scatter(influence, what_it_did, color=colors)
plt.axline((0, 0), slope=1)
plt.xlabel("influence: what was promised")
plt.ylabel("what the step did")
picture("8_promise")

# %% [markdown]
# **Try:** `SIZE = 0.1`. Influence is a straight line along a curved loss: how long does it hold?
#
# ## 9. Which words
# A rollout's influence is a sum over its tokens: how much its loss asks for the token, times how
# much a step on the target changes the token's log-prob.

# %%
best = int(influence.argmax())
loss = grpo.loss_of(nets, nets.policy, batch, step.rows, step, cfg)
asks = torch.autograd.grad(loss.policy, loss.logp)[0][best]                     # (T,)
row = row_alone(batch.rollout, best, cfg.temperature)
names = {p: name for name, p in nets.policy.named_parameters()}
direction = {names[p]: g for p, g in target.items()}
push = logprob_changes(nets.policy, direction, row)                             # (T,)
pieces = pieces_of(row, asks[:len(push)] * push, nets.tokenizer, (nets.tokenizer.eot_token,))
print(f"the tokens add up to {sum(piece.influence for piece in pieces):.5f}, the influence of "
      f"rollout {best} is {float(influence[best]):.5f}")

plt.figure(figsize=(8, 3))
plt.bar(range(len(pieces)), [piece.influence for piece in pieces], color=colors[best])
plt.xticks(range(len(pieces)), [piece.text or "(end)" for piece in pieces], rotation=45)
plt.title(f"influence of the words after {prompts[best // G].text!r}")
picture("9_words")

# %% [markdown]
# **Try:** `influence.argmin()`. Which of its tokens did the harm?
#
# ## 10. Learn from the helpful
# `grpo.py --tracin=self` drops the rollouts of negative influence in every step. Is that a good
# idea? Look at the gradients of the target's two halves. If their cosine is near 1, the target is
# signal. Near 0 it is noise, and so is the choice.

# %%
keep, _ = selection.select(influence, "positive")
half = (torch.arange(N) < N // 2).float()
halves = tape.gradient(half), tape.gradient(1 - half)
print(f"{int(keep.sum())} of {N} rollouts are kept")
print(f"the cosine of the target's two halves is {cosine(*halves):.2f}")

# %% [markdown]
# **Try:** `--num_prompts=16`. Then `python grpo.py config/lesson.py --tracin=self`, and ask
# `python tracin.py out/lesson_run` what it learned from.
