# %% [markdown]
# # One GRPO step and one influence score
#
# GRPO trains the **policy**, a language model: it samples several completions of a prompt, scores
# them, makes those above their group's average likelier and the others less likely. A prompt with
# one completion is a **rollout**. **Influence** says for each rollout: if we learned from it alone,
# would our target get better or worse?
#
# Every function here is the project's own. `python docs/lesson/lesson.py` takes under a minute and
# draws to `out/lesson`. Or open `lesson.ipynb` in VS Code or Jupyter (`pip install jupyterlab`).
# There write each `--name=value` that **Try** names into `flags`, and restart the kernel after
# editing a file.
#
# It needs the whole project and matplotlib. If you have this file alone, as in Colab: clone the
# project, `pip install -r requirements.txt matplotlib` there, and open it in `docs/lesson`.
#
# ## 1. A small world
# The policy is a GPT of a million weights that has read made-up sentences of eight words
# (`config/lesson.py`). A prompt is the first three, so a completion should be five words and an
# end token. The reward is a rule: the share of the letter e in a completion.

# %%
import os
import sys

sys.path[:0] = [os.path.join(sys.path[0], "../.."), "../.."]     # where the project is
if not any(os.path.exists(os.path.join(path, "grpo.py")) for path in sys.path):
    raise SystemExit("the lesson needs the project around it: clone it, open docs/lesson there")

import matplotlib.pyplot as plt
import torch

import grpo
import tracin
from common.files import ROOT
from common.script import BadInput, exit_codes
from data.prompts import draw_prompts
from explain.words import logprob_changes, pieces_of
from rollout import completion_logprobs
from run.settings import load_settings
from tape import Tape, cosine, inner


def picture(name, xlabel, ylabel):
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    if plt.gca().get_legend_handles_labels()[0]:
        plt.legend(fontsize="small")
    plt.tight_layout()
    os.makedirs("out/lesson", exist_ok=True)
    plt.savefig(f"out/lesson/{name}.png", dpi=100)


flags = sys.argv[1:] if sys.argv[0].endswith("lesson.py") else []
with exit_codes():      # a slip in a flag is one line
    cfg = load_settings([f"{ROOT}/config/lesson.py", *flags])
    if cfg.device != "cpu":
        raise BadInput(f"device = {cfg.device!r}: the pictures need tensors of a CPU: leave it out")
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
prompts = draw_prompts(setup.prompts, 0, cfg.num_prompts, cfg.seed)
G = cfg.num_generations
N = len(prompts) * G

# %% [markdown]
# **Try:** in `reward` at the end of `config/lesson.py` take o for e.
#
# ## 2. Rollout
# The policy writes six completions of each prompt. Each token's log-prob is kept: training will
# ask how much likelier the token has become since. The policy as it was here is the **sampler**.

# %%
rollout, asked, texts = grpo.sample_completions(setup, setup.policy, prompts, cfg, seed=1)
print(repr(prompts[0].text), "->", *map(repr, texts[:G]), sep="\n")
plt.figure(figsize=(7, 3))
logp = rollout.logp.masked_fill(~rollout.completion_mask, float("nan"))        # (N, T)
plt.imshow(logp, aspect="auto", vmin=-8, vmax=0)
plt.colorbar(label="log-prob (0: certain)")
for first in range(G, N, G):
    plt.axhline(first - 0.5, color="red")       # another prompt
picture("2_rollout", "token of the completion", "rollout")

# %% [markdown]
# Red lines part the prompts. Dark tokens were a surprise. White is after the end of a completion:
# a white cell among colours says that this one stopped a word early.
#
# **Try:** `--temperature=0.3`. What happens to the surprises?
#
# ## 3. Score and advantage
# Each completion gets a reward. Its advantage is its distance from the mean of its group, in
# standard deviations of the group: $A_i = (r_i - \mathrm{mean}) / \mathrm{std}$. So the advantages
# of each prompt add up to 0.

# %%
scores = grpo.all_scores(setup.reward_funcs, asked, texts, cfg)                  # (N, K)
rewards = grpo.total_reward(scores, cfg.reward_weights, G)                      # (N,)
advantages = grpo.group_advantages(rewards, G, cfg.scale_rewards)               # (N,)
print("standard deviations:", [f"{x:.3f}" for x in rewards.view(-1, G).std(1)])
colors = [f"C{i // G}" for i in range(N)]       # a colour per prompt
plt.figure(figsize=(7, 3))
plt.bar(range(N), advantages, color=colors)
plt.xticks(range(0, N, G), [repr(prompt.text) for prompt in prompts], ha="left")
picture("3_advantages", "rollouts of each prompt", "advantage")

# %% [markdown]
# **Try:** `--scale_rewards=none` divides by no standard deviation. Which prompt loses weight?
#
# ## 4. The clip
# The objective of a token is $\min(\rho A,\ \mathrm{clip}(\rho) A)$, where
# $\rho = p_\mathrm{policy} / p_\mathrm{sampler}$ is how much likelier the token has become, and
# clip keeps it within 1 - epsilon and 1 + epsilon. Where the curve is flat, a token has moved far
# enough and is left alone. That matters when a batch serves several steps. Below, all ratios are 1.

# %%
ratio = torch.linspace(0, 3, 101)[:, None]                                      # (n, 1)
plt.figure(figsize=(5, 3))
for A in (1.0, -1.0):
    objective = grpo.clipped_objective(ratio, ratio.log(), torch.full((101,), A), cfg)
    plt.plot(ratio, objective, label=f"advantage {A:+g}")
picture("4_clip", f"ratio = policy / sampler; epsilon = {cfg.epsilon}", "objective")

# %% [markdown]
# **Try:** `--epsilon=0.5`. Which tokens does it still learn from that it left alone before?
#
# ## 5. The step
# `grpo.collect` does sections 2 and 3 in one call. Then: loss, backward, optimizer step. All ratios
# are 1, so the loss is minus the advantages' mean over tokens. In a group they cancel but for
# completions of another length: the loss is near 0. Its gradient is not.

# %%
batch = grpo.collect(setup, prompts, cfg, seed=1)
step = next(grpo.optimizer_steps(batch, cfg, seed=1))
start = {name: x.clone() for name, x in setup.policy.state_dict().items()}
loss = grpo.loss_of(setup, setup.policy, batch, step.rows, step, cfg)
loss.total.backward()
setup.optimizer.step()
setup.optimizer.zero_grad()
with torch.no_grad():
    after = grpo.loss_of(setup, setup.policy, batch, step.rows, step, cfg)
change = (after.logp - batch.rollout.logp).sum(1)                               # (N,)
print(f"ratio {float(loss.ratio.mean()):.6f}, loss {float(loss.total.detach()):+.6f}")
plt.figure(figsize=(5, 3))
plt.scatter(batch.advantages, change, color=colors)
plt.axhline(0, color="grey")
picture("5_step", "advantage", "change of log-prob")
setup.policy.load_state_dict(start)      # back to where we were

# %% [markdown]
# Look for a dot below 0 whose advantage is above 0: it became less likely although it was good.
# Rollouts share words, and a step on one moves the others too.
#
# **Try:** flip the sign of the objective in `grpo.clipped_objective` and run the lesson. Then run
# `python grpo.py config/lesson.py --out_dir=out/flipped` and look at the reward. Flip it back!
#
# ## 6. Influence by definition
# The **target** is what we want to get better; here it is the loss of all rollouts (to first order,
# a lower loss is a higher expected reward). $L_i$ is rollout $i$'s term of the batch's loss;
# the terms add up to the target. The influence is an inner product of gradients,
# $I_i = \langle \nabla L_i, \nabla L_\mathrm{target} \rangle$. If both point the same way, a
# plain gradient step (not Adam's) on rollout $i$ lowers the target's loss too.
#
# The target contains rollout $i$, so a part of $I_i$ is never negative:
# $\langle \nabla L_i, \nabla L_i \rangle$, what it does for **itself**. The rest is **others**.

# %%
def gradient_of(rows):
    """{parameter: gradient} of the loss of these rows, by a plain backward."""
    return tracin.gradient_of(grpo.losses, setup, cfg, batch, step._replace(rows=rows), "policy")


target = gradient_of(step.rows)
alone = [gradient_of(row[None]) for row in step.rows]           # a backward for each rollout
by_hand = torch.stack([inner(gradient, target) for gradient in alone])          # (N,)
itself = torch.stack([inner(gradient, gradient) for gradient in alone])         # (N,)
others = by_hand - itself
print(f"itself is {float(itself.sum() / by_hand.sum()):.0%} of all influence. "
      f"Negative are {int((by_hand < 0).sum())}, without itself {int((others < 0).sum())}")
plt.figure(figsize=(7, 3))
plt.bar(range(N), itself, color="lightgrey", label="itself")
plt.bar(range(N), others, bottom=itself, width=0.4, color=colors, label="others")
plt.scatter(range(N), by_hand, color="black", s=12, zorder=3, label="sum: influence")
picture("6_influence", "rollout", "influence")

# %% [markdown]
# So most influences are positive, even where the others disagree. The sign of an influence is not
# that of the advantage. A rollout below average can have positive influence: learning to avoid it
# helps. One above average can have negative influence: what makes it likelier moves the others the
# wrong way.
#
# **Try:** the first group as target. Which rollouts of other prompts have influence, and why?
# `print([float(inner(gradient, gradient_of(step.rows[:G]))) for gradient in alone])`
#
# ## 7. The same from one backward
# A layer's gradient for rollout $i$ is a sum over its tokens, $g_i = \sum_t b_t a_t^\top$: the
# gradient of the layer's output times its input. So with the target's gradient $g$,
# $\langle g_i, g \rangle = \sum_t b_t \cdot (g\, a_t)$. A **tape** keeps $a$ and $b$ of every
# layer during one backward.

# %%
with Tape(setup.policy, N) as tape:
    owners = batch.rollout.sampled_mask.nonzero()[:, 0]         # whose each token is
    tape.rows(torch.arange(N), flat={setup.policy.lm_head: owners})
    grpo.loss_of(setup, setup.policy, batch, step.rows, step, cfg).policy.backward()
influence = tape.dot(tape.gradient(torch.ones(N)))                              # (N,)
error = (influence - by_hand).abs().max() / by_hand.abs().max()
print(f"largest difference from section 6: {float(error):.0e} of the largest influence")

# %% [markdown]
# **Try:** add up all influences, then compute `inner(target, target)`. Why are they equal?
#
# ## 8. What a tiny step really did
# Influence is a promise about a step. We keep it: take a tiny step on one rollout alone, and see
# by how much the target's loss went down.

# %%
def move(size, direction):
    with torch.no_grad():
        for p in setup.trained:
            p += size * direction[p]


SIZE = 0.002
what_it_did = []
for gradient in alone:
    move(-SIZE, gradient)
    with torch.no_grad():
        after = grpo.loss_of(setup, setup.policy, batch, step.rows, step, cfg)
    what_it_did.append(float(loss.policy.detach() - after.policy) / SIZE)
    setup.policy.load_state_dict(start)
plt.figure(figsize=(5, 3.5))
plt.scatter(influence, what_it_did, color=colors)
plt.axline((0, 0), slope=1, color="grey", label="promise kept")
picture("8_promise", "influence: what was promised", "fall of the target's loss / SIZE")

# %% [markdown]
# **Try:** `SIZE` 0.1, 0.5 and 2. Influence is a straight line along a curve. How long does it hold?
#
# ## 9. Which words
# A rollout's influence is a sum over its tokens of two slopes: `asks`, of its loss by the token's
# log-prob (negative: make it likelier), times `push`, of that log-prob along the target's gradient
# (negative: a step down makes it likelier). If the signs agree, both move the token the same way.

# %%
best = int(influence.argmax())
loss = grpo.loss_of(setup, setup.policy, batch, step.rows, step, cfg)
asks = torch.autograd.grad(loss.policy, loss.logp)[0][best]                     # (T,)
row = batch.rollout[[best]]
push = logprob_changes(setup.policy, target, row, cfg.temperature)[0]            # (T,)
pieces = pieces_of(row, asks * push, setup.tokenizer)
print(f"the tokens add up to {sum(piece.influence for piece in pieces):.5f}, the influence of "
      f"rollout {best} is {float(influence[best]):.5f}")
print(f"asks {asks[0]:+.3f} of each, push", [f"{x:+.3f}" for x in push[push != 0]])
plt.figure(figsize=(8, 3))
plt.bar(range(len(pieces)), [piece.influence for piece in pieces], color=colors[best])
plt.xticks(range(len(pieces)), [piece.text or "(end)" for piece in pieces], rotation=45)
picture("9_words", f"tokens after {prompts[best // G].text!r}", "influence")

# %% [markdown]
# **Try:** `influence.argmin()`. Which of its tokens did the harm?
#
# ## 10. Learn from the helpful
# `grpo.py --tracin=self` drops the rollouts of negative influence in every step. Is that a good
# idea? If the gradients of the target's two halves, the first prompts and the last, have a cosine
# near 1, the target is signal. Near 0 it is mostly noise, and so is the choice.

# %%
keep, _ = tracin.select(influence, "positive")
half = (torch.arange(N) < N // 2).float()
first, last, kept, whole = map(tape.gradient, (half, 1 - half, keep, torch.ones(N)))
print(f"the cosine of the target's two halves is {cosine(first, last):.2f}")
print(f"{int(keep.sum())} of {N} rollouts kept: cosine with all {cosine(kept, whole):.2f}")

# %% [markdown]
# Expect no gain here: most of the influence is itself, and dropping so few hardly changes the step.
#
# **Try:** `python grpo.py config/lesson.py`, and again with `--tracin=self --out_dir=out/by_self`.
# Compare the rewards. Are the last completions still sentences? A rule of letters is easily served
# without (reward hacking). `python tracin.py out/by_self` says what it learned from.
#
# ## 11. Where did it learn that?
# Looking back is an **account**. A plain step moves the weights by a sum over rollouts, so it moves
# the log-prob $f$ of any sentence by a sum of **shares**, `-SIZE`
# $\langle \nabla L_i, \nabla f \rangle$. With the mean of $\nabla f$ before and after, the sum is
# nearly exact. Here are two steps on our batch. The sentence is the first completion.

# %%
SIZE = 0.01


def log_prob():
    return completion_logprobs(setup.policy, rollout[[0]], cfg.temperature).sum()


def slope():
    return dict(zip(setup.trained, torch.autograd.grad(log_prob(), setup.trained)))


before = log_prob().item()
shares = torch.zeros(N)
steps = []
for _ in range(2):
    alone = [gradient_of(row[None]) for row in step.rows]
    whole = gradient_of(step.rows)
    first = slope()
    move(-SIZE, whole)
    mean = {p: (g + first[p]) / 2 for p, g in slope().items()}
    shares -= SIZE * torch.stack([inner(gradient, mean) for gradient in alone])
    steps.append((alone, whole))
after = log_prob().item()
print(f"the shares add up to {shares.sum():+.5f}, the log-prob changed by {after - before:+.5f}")

# %% [markdown]
# **Try:** `SIZE` 0.1, then 1. Why does the sum no longer come out?
#
# ## 12. What if it had not?
# Without rollout $i$ the second step would have begun elsewhere. The derivative of the last $f$ by
# the rollout's weight knows that. `back` is the derivative by the weights, taken back through a
# step: less `SIZE` $H$ times itself, where $H$, the Hessian of the loss, is what a small move does
# to the gradient. Then we leave out each rollout, train again and look.

# %%
NEAR = 0.05
effects = torch.zeros(N)
back = slope()
for alone, whole in reversed(steps):
    effects -= SIZE * torch.stack([inner(gradient, back) for gradient in alone])
    move(SIZE, whole)                               # to the weights before the step
    here = gradient_of(step.rows)
    move(NEAR, back)
    there = gradient_of(step.rows)
    move(-NEAR, back)
    back = {p: g - SIZE * (there[p] - here[p]) / NEAR for p, g in back.items()}

truth = torch.zeros(N)
for i in range(N):
    setup.policy.load_state_dict(start)
    for _ in range(2):
        move(-SIZE, gradient_of(step.rows[step.rows != i]))
    truth[i] = after - log_prob().item()
print(f"the derivatives are off by {(effects - truth).norm() / truth.norm():.1%}")
plt.figure(figsize=(5, 3.5))
plt.scatter(effects, truth, color=colors)
plt.axline((0, 0), slope=1, color="grey", label="prediction kept")
picture("12_left_out", "derivative", "log-prob with it less without it")

# %% [markdown]
# `python tracin.py out/lesson_run --account=True` does both for a whole run, through AdamW, where
# shares predict badly: docs/account.md says why.
