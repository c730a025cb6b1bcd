# %% [markdown]
# # Influence by hand
#
# **Influence** says for each rollout: if we learned from it alone, would our target get better or
# worse? An **account** looks back: what did each rollout give of a change that has happened?
#
# Read the first lesson before (`lesson.ipynb`): what a rollout, an advantage and a step are stands
# there. Sections 2 to 8 are about one step, sections 9 to 11 are accounts.
#
# Every function here is the project's own. `python docs/lesson/influence.py` takes under a minute
# and draws to `out/lesson`. Or open `influence.ipynb` in VS Code or Jupyter
# (`pip install jupyterlab`). There write each `--name=value` that **Try** names into `flags`, and
# restart the kernel after editing a file.
#
# It needs the whole project and matplotlib. If you have this file alone, as in Colab: clone the
# project, `pip install -r requirements.txt matplotlib` there, and open it in `docs/lesson`.
#
# ## 1. A batch
# The world is that of the first lesson, and so are the 24 rollouts: six completions of each of four
# prompts. The reward is the share of the letter e.

# %%
import os
import sys

sys.path[:0] = [os.path.join(sys.path[0], "../.."), "../.."]     # where the project is
if not any(os.path.exists(os.path.join(path, "grpo.py")) for path in sys.path):
    raise SystemExit("the lesson needs the project around it: clone it, open docs/lesson there")

from dataclasses import replace

import torch

import grpo
import tracin
from common.files import ROOT
from common.script import BadInput, exit_codes, optional
from data.prompts import draw_prompts
from extras.explain.words import logprob_changes, pieces_of
from loss import loss_of
from rollout import completion_logprobs
from run.settings import load_settings
from tape import Tape, cosine, inner

with exit_codes(), optional("matplotlib"):       # without it: one line
    import matplotlib.pyplot as plt


def picture(name, xlabel, ylabel):
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    if plt.gca().get_legend_handles_labels()[0]:
        plt.legend(fontsize="small")
    plt.tight_layout()
    os.makedirs("out/lesson", exist_ok=True)
    plt.savefig(f"out/lesson/{name}.png", dpi=100)


flags = sys.argv[1:] if sys.argv[0].endswith("influence.py") else []
with exit_codes():      # a slip in a flag is one line
    cfg = load_settings([f"{ROOT}/config/lesson.py", *flags])
    if cfg.device != "cpu":
        raise BadInput(f"device = {cfg.device!r}: the pictures need tensors of a CPU: leave it out")
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))

# %%
prompts = draw_prompts(setup.prompts, 0, cfg.num_prompts, cfg.seed)
batch = grpo.collect(setup, prompts, cfg, seed=2)
step = next(grpo.optimizer_steps(batch, cfg, seed=1))       # all rows of the batch
start = {name: x.clone() for name, x in setup.policy.state_dict().items()}
G = cfg.num_generations
N = len(step.rows)
colors = [f"C{i // G}" for i in range(N)]       # a colour per prompt
for i in range(G):
    print(f"{prompts[0].text!r} -> {batch.completions[i]!r}: reward {batch.rewards[i]:.2f}, "
          f"advantage {batch.advantages[i]:+.2f}")

# %% [markdown]
# **Try:** `--seed=21` takes other prompts.
#
# ## 2. Influence by definition
# The **target** is what we want to get better; here it is the loss of all rollouts (to first order,
# a lower loss is a higher expected reward). $L_i$ is rollout $i$'s term of the batch's loss; the
# terms add up to the target. The influence is an inner product of gradients,
# $I_i = \langle \nabla L_i, \nabla L_\mathrm{target} \rangle$. If both point the same way, a
# plain gradient step on rollout $i$ lowers the target's loss too.
#
# The target contains rollout $i$, so a part of $I_i$ is never negative:
# $\langle \nabla L_i, \nabla L_i \rangle$, what it does for **itself**. The rest is **others**.

# %%
def gradient_of(rows):
    """{parameter: gradient} of the loss of these rows, by a plain backward."""
    return tracin.gradient_of(setup, cfg, batch, step._replace(rows=rows), "policy")


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
picture("i2_influence", "rollout", "influence")

# %% [markdown]
# So most influences are positive, even where the others disagree. The sign of an influence is not
# that of the advantage. A rollout below average can have positive influence: learning to avoid it
# helps. One above average can have negative influence: what makes it likelier moves the others the
# wrong way.
#
# **Try:** the first group as target. Which rollouts of other prompts have influence, and why?
# `print([float(inner(gradient, gradient_of(step.rows[:G]))) for gradient in alone])`
#
# ## 3. The same from one backward
# Section 2 took a backward for each rollout. One is enough. A layer's gradient for rollout $i$ is a
# sum over its tokens, $g_i = \sum_t b_t a_t^\top$: the gradient $b$ of the layer's output times its
# input $a$. So with the target's gradient $g$,
# $\langle g_i, g \rangle = \sum_t b_t \cdot (g\, a_t)$. A **tape** keeps $a$ and $b$ of every
# layer during one backward.

# %%
loss = loss_of(setup, setup.policy, batch, step.rows, step, cfg)
loss_before = loss.policy.item()
with Tape(setup.policy, N) as tape:
    owners = batch.rollout.sampled_mask.nonzero()[:, 0]         # whose each token is
    tape.rows(torch.arange(N), flat={setup.policy.lm_head: owners})
    loss_of(setup, setup.policy, batch, step.rows, step, cfg).policy.backward()
influence = tape.dot(tape.gradient(torch.ones(N)))                              # (N,)
error = (influence - by_hand).abs().max() / by_hand.abs().max()
print(f"largest difference from section 2: {float(error):.0e} of the largest influence")

# %% [markdown]
# From here on `tape.dot(x)` are the inner products of all rollouts' gradients with any x.
#
# **Try:** add up all influences, then compute `inner(target, target)`. Why are they equal?
#
# ## 4. What a tiny step really did
# Influence is a promise about a step. We keep it: take a tiny step on one rollout alone, and see
# by how much the target's loss went down.

# %%
def move(size, direction):
    with torch.no_grad():
        for p in setup.trained:
            p += size * direction[p]


def fall():
    """How far the target's loss is below that at the start."""
    with torch.no_grad():
        now = loss_of(setup, setup.policy, batch, step.rows, step, cfg)
    return loss_before - now.policy.item()


SIZE = 0.002
what_it_did = []
for gradient in alone:
    move(-SIZE, gradient)
    what_it_did.append(fall() / SIZE)
    setup.policy.load_state_dict(start)         # back to where we were
plt.figure(figsize=(5, 3.5))
plt.scatter(influence, what_it_did, color=colors)
plt.axline((0, 0), slope=1, color="grey", label="promise kept")
picture("i4_promise", "influence: what was promised", "fall of the target's loss / SIZE")

# %% [markdown]
# **Try:** `SIZE` 0.1, 0.5 and 2. Influence is a straight line along a curve. How long does it hold?
#
# ## 5. What AdamW does to the promise
# A run does not step along the gradient $g$. AdamW keeps for each weight a mean of the gradients so
# far, $m$, and of their squares, $v$. It steps by $-\mathrm{rate} \cdot m / \sqrt{v}$. In its first
# step that is $g / |g|$, a sign: each weight moves by the rate, be its gradient large or small.
# So take AdamW's first step on one rollout alone.

# %%
RATE = 1e-6
for group in setup.optimizer.param_groups:
    group["lr"] = RATE


def adamw_step(gradient):
    """AdamW's first step, from the start -> the fall of the target's loss / RATE"""
    setup.optimizer.state.clear()
    for p in setup.trained:
        p.grad = gradient[p].clone()
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    found = fall() / RATE
    setup.policy.load_state_dict(start)
    return found


by_adamw = torch.tensor([adamw_step(gradient) for gradient in alone])           # (N,)
agree = torch.corrcoef(torch.stack([influence, by_adamw]))[0, 1]
print(f"AdamW on one rollout alone: correlation with influence {agree:.2f}; the target's loss "
      f"rises in {int((by_adamw < 0).sum())} of {N} steps, influence said "
      f"{int((influence < 0).sum())}")

# %% [markdown]
# That is another order, and another unit: a small gradient now moves as much as a large one. Some
# rollouts that promised a fall made the target's loss rise.
#
# But a run never steps on one rollout alone. In its step $v$ is of the
# gradient of all rollouts, and with $v$ as it is the step is again a sum over rollouts:
# $-\mathrm{rate} \cdot g_i / \sqrt{v}$ is rollout $i$'s part. So the promise can be kept, if
# influence knows the factor: $\langle \nabla L_i, \nabla L_\mathrm{target} / \sqrt{v} \rangle$.
# `--tracin_adam=True` measures so, and an account (section 9) does it along a whole run.

# %%
setup.optimizer.state.clear()
scale = tracin.adam_scale(setup.optimizer, target)          # 1 / sqrt(v), after a step on all
influence_adam = tape.dot({p: g * scale[p] for p, g in target.items()})         # (N,)
its_part = []
for gradient in alone:
    move(-RATE, {p: g * scale[p] for p, g in gradient.items()})
    its_part.append(fall() / RATE)
    setup.policy.load_state_dict(start)
print(f"AdamW's step on all: the target's loss falls by {adamw_step(target):.1f} x RATE; all "
      f"parts together promised {influence_adam.sum():.1f} and gave {sum(its_part):.1f}")
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
left.scatter(influence, by_adamw, color=colors)
left.set(xlabel="influence", ylabel="fall / RATE, AdamW on it alone")
right.scatter(influence_adam, its_part, color=colors)
right.axline((0, 0), slope=1, color="grey", label="promise kept")
picture("i5_adamw", "influence with 1 / sqrt(v)", "fall / RATE, its part of AdamW's step")

# %% [markdown]
# **Try:** `RATE` 1e-3, which is the run's. How straight is AdamW's real step?
#
# ## 6. Which words
# A rollout's influence is a sum over its tokens of two slopes: `asks`, of its loss by the token's
# log-prob (negative: make it likelier), times `push`, of that log-prob along the target's gradient
# (negative: a step down makes it likelier). If the signs agree, both move the token the same way.

# %%
best = int(influence.argmax())
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
picture("i6_words", f"tokens after {prompts[best // G].text!r}", "influence")

# %% [markdown]
# **Try:** `influence.argmin()`. Which of its tokens did the harm?
#
# ## 7. A held-out target
# In section 2 most of the influence was each rollout's on itself. That says how large its gradient
# is, not whom it helps. So take another target: the loss of rollouts of other prompts, which the
# batch has not. No rollout is a part of it, so nothing of the influence is its own.

# %%
many = replace(cfg, num_generations=24)
held_out = grpo.collect(setup, setup.eval_prompts[:4], many, seed=3)
all_of_it = next(grpo.optimizer_steps(held_out, many, seed=1))
elsewhere = tracin.gradient_of(setup, many, held_out, all_of_it, "policy")
on_held_out = tape.dot(elsewhere)                                               # (N,)


def agreement(x, y):
    """The rank correlation: 1 if both order the rollouts alike, 0 by chance."""
    ranks = torch.stack([z.argsort().argsort().float() for z in (x, y)])
    return float(torch.corrcoef(ranks)[0, 1])


print("best on the batch   ", influence.argsort(descending=True)[:6].tolist())
print("best on the held-out", on_held_out.argsort(descending=True)[:6].tolist())
print(f"agreement of the held-out order with the batch's {agreement(on_held_out, influence):.2f}, "
      f"with what is itself {agreement(on_held_out, itself):.2f}, "
      f"with the others {agreement(on_held_out, others):.2f}")
print(f"negative: {int((on_held_out < 0).sum())} of {N} on the held-out")
plt.figure(figsize=(7, 3))
plt.bar(range(N), on_held_out, color=colors)
picture("i7_held_out", "rollout", "influence on held-out")

# %% [markdown]
# A rollout that is in both lists teaches something that other prompts need too. One that is only
# in the first is mostly good for itself. In a run `--tracin_val_prompts=4` takes such a target.
#
# **Try:** `num_generations=6`, as in the batch, and other seeds than 3. How firm is the order?
#
# ## 8. Learn from the helpful
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
# **Try:** `tracin.select(on_held_out, "positive")`. How many are kept now, and how far does the
# step turn? Then `python grpo.py config/lesson.py`, and again with
# `--tracin=self --out_dir=out/by_self`. Compare the rewards.
#
# ## 9. Where did it learn that?
# Now we look back. A step has changed how likely a sentence is. Which rollouts did that?
#
# Say it in words first. The step moved the weights by a sum over rollouts, so each rollout gave a
# part of the movement. How far did a part carry the sentence's log-prob $f$? As far as the
# slope $\nabla f$ says, times the part. That is the rollout's **share**,
# $-\mathrm{SIZE} \langle \nabla L_i, \nabla f \rangle$. It is an influence with a sentence as
# target. All shares should add up to the change of $f$. The sentence is the first completion.

# %%
SIZE = 0.05


def log_prob():
    return completion_logprobs(setup.policy, batch.rollout[[0]], cfg.temperature).sum()


def slope():
    """{parameter: d log_prob / d parameter}"""
    return dict(zip(setup.trained, torch.autograd.grad(log_prob(), setup.trained)))


before = log_prob().item()
slope_before = slope()
move(-SIZE, target)             # a plain step on all rollouts
after = log_prob().item()
shares = -SIZE * tape.dot(slope_before)                                         # (N,)
print(f"the log-prob changed by {after - before:+.4f}, the shares add up to {shares.sum():+.4f}")

# %% [markdown]
# Not quite. The slope before the step is right at its start alone: on the way it becomes another.
# The mean of the slopes before and after is nearly that of the whole way.

# %%
slope_after = slope()
mean = {p: (slope_before[p] + slope_after[p]) / 2 for p in setup.trained}
shares = -SIZE * tape.dot(mean)                                                 # (N,)
print(f"with the mean of both slopes they add up to {shares.sum():+.4f}")
plt.figure(figsize=(7, 3))
plt.bar(range(N), shares, color=colors)
picture("i9_shares", f"rollout; the sentence is number 0, advantage {batch.advantages[0]:+.2f}",
        "share of the change of log-prob")

# %% [markdown]
# **Try:** `SIZE` 0.3, then 1. With which of the two slopes does the sum come out longer?
#
# ## 10. What if it had been left out?
# A share says what a rollout did. Another question: what would be, had it not been there? For one
# plain step that is the same. For two it is not: without rollout $i$ the second step begins
# elsewhere, and all gradients there are others.
#
# So train again, once for each rollout: two steps from the start, in which this one has a weight of
# 0 and the others of 1. And again with a weight of 0.9, which is a smaller change. We leave out the
# clip: where the objective bends there is no derivative, and below we need one.

# %%
smooth = replace(cfg, epsilon=1e9)      # no clip


def weighed_gradient(weights):
    """{parameter: gradient} of the batch's loss with weights (N,) on the rollouts."""
    weighed = replace(batch, row_weights=weights)
    return tracin.gradient_of(setup, smooth, weighed, step, "policy")


def train(weights):
    """Two steps from the start -> where each began, and the log-prob at the end."""
    setup.policy.load_state_dict(start)
    began = []
    for _ in range(2):
        began.append({name: x.clone() for name, x in setup.policy.state_dict().items()})
        move(-SIZE, weighed_gradient(weights))
    return began, log_prob().item()


# %%
without, a_tenth_less = torch.zeros(2, N)
began, f = train(torch.ones(N))
for i in range(N):
    this = torch.eye(N)[i]
    without[i] = f - train(1 - this)[1]
    a_tenth_less[i] = (f - train(1 - 0.1 * this)[1]) / 0.1
print(f"without rollout 0 the log-prob would be {f - without[0]:.4f} in place of {f:.4f}")

# %% [markdown]
# Can we have that without training N times? Walk backwards. `back` is how far the end moves if the
# weights move: at the end, the slope of $f$. Rollout $i$ moved the weights in the last step by
# $-\mathrm{SIZE}\, \nabla L_i$, so its effect there is the product of this with `back`.
#
# Now one step earlier. If the weights before a step move by $\delta$, those after it move by
# $\delta$, and the gradient of the step changes too, by $H \delta$. So they move by
# $\delta - \mathrm{SIZE}\, H \delta$, and `back` becomes `back` less SIZE $H$ `back`. $H$ is the
# Hessian, but we never form it: $H$ `back` is how the gradient differs a little way along `back`.

# %%
NEAR = 0.002
train(torch.ones(N))
end = back = slope()
effects, without_h = torch.zeros(2, N)
for weights in reversed(began):
    setup.policy.load_state_dict(weights)
    alone = [weighed_gradient(one) for one in torch.eye(N)]
    effects -= SIZE * torch.stack([inner(gradient, back) for gradient in alone])
    without_h -= SIZE * torch.stack([inner(gradient, end) for gradient in alone])
    here = weighed_gradient(torch.ones(N))
    move(NEAR, back)
    there = weighed_gradient(torch.ones(N))
    back = {p: g - SIZE * (there[p] - here[p]) / NEAR for p, g in back.items()}
for name, found in ("the derivatives", effects), ("without H they", without_h):
    off = [(found - x).norm() / x.norm() for x in (a_tenth_less, without)]
    print(f"{name} are off by {off[0]:.1%} for a tenth of a rollout, by {off[1]:.1%} for all of it")
plt.figure(figsize=(5, 3.5))
plt.scatter(effects, without, color=colors)
plt.axline((0, 0), slope=1, color="grey", label="prediction kept")
picture("i10_left_out", "derivative", "log-prob with it less without it")

# %% [markdown]
# **Try:** `SIZE = 0.2` in section 9. A derivative is a straight line, too. For which change does it
# hold longer?
#
# ## 11. The account of a reward
# A sentence was an example. What we want to know of a run is why its reward rose on prompts that it
# was not trained on. The expected reward $R$ is a function of the weights, so all of section 9
# holds, if we have its slope. But $R$ is a mean over what the policy writes, and what it writes
# changes with the weights. The slope of such a mean is
#
# $$\nabla R = \mathrm{mean}\big((r - b)\, \nabla \log p\big)$$
#
# over fresh completions, with $r$ the reward, $\log p$ the log-prob of the whole completion, and
# $b$ the mean reward of the prompt's other completions. It says what GRPO does: make likelier what
# is better than the others. $b$ changes nothing on average and takes away most of the noise.
#
# Two plain steps on our batch, again without the clip. At each of the three weights, 500
# completions of two other prompts, always with the same random numbers.

# %%
SIZE = 0.1
COUNT = 500
fresh = replace(cfg, num_generations=COUNT)


def look():
    """The mean reward and its slope at the weights as they are."""
    rollout, asked, texts = grpo.sample_completions(
        setup, setup.policy, setup.eval_prompts[:2], fresh, seed=4)
    scores = grpo.all_scores(setup.reward_funcs, asked, texts, fresh)
    r = grpo.total_reward(scores, cfg.reward_weights, COUNT).view(2, COUNT)
    b = (r.sum(1, keepdim=True) - r) / (COUNT - 1)
    logp = completion_logprobs(setup.policy, rollout, cfg.temperature).sum(1)
    mean = ((r - b).flatten() * logp).mean()
    return r.mean().item(), dict(zip(setup.trained, torch.autograd.grad(mean, setup.trained)))


# %%
setup.policy.load_state_dict(start)
shares, left_end = torch.zeros(2, N)
R_start, slope = look()
for _ in range(2):
    alone = [weighed_gradient(one) for one in torch.eye(N)]
    move(-SIZE, weighed_gradient(torch.ones(N)))
    R_end, next_slope = look()
    mean = {p: (slope[p] + next_slope[p]) / 2 for p in setup.trained}
    shares -= SIZE * torch.stack([inner(gradient, mean) for gradient in alone])
    left_end -= SIZE * torch.stack([inner(gradient, slope) for gradient in alone])
    slope = next_slope
print(f"R rose from {R_start:.4f} to {R_end:.4f}: {R_end - R_start:+.4f}")
print(f"the shares add up to {shares.sum():+.4f}, with the slope before each step alone to "
      f"{left_end.sum():+.4f}")
order = batch.rewards.argsort()
plt.figure(figsize=(7, 3))
plt.bar(range(N), shares[order], color=[colors[i] for i in order])
plt.xticks(range(N), [f"{r:.2f}" for r in batch.rewards[order]], rotation=90, fontsize="small")
picture("i11_account", "reward of the rollout", "share of the rise of R")

# %% [markdown]
# The sum comes near the true rise. The lowest and the highest rewards gave most of it: to make a
# bad completion less likely helps as well, and from an average one there is little to learn.
#
# **Try:** forget the baseline: `b = 0`. Then `COUNT = 20`. Then `SIZE = 1`. Which of the three
# hurts the sum most, and which only makes it noisy? (`R` and its slope are estimates from
# 1000 completions, so even a perfect sum may be a tenth off.)
#
# After `python grpo.py config/lesson.py`, `python tracin.py out/lesson_run` makes such an account
# of the whole run: through AdamW, where a rollout counts in all later steps by momentum too.
# docs/account.md says how, and how far it can be trusted.
