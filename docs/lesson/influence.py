# %% [markdown]
# # Influence by hand
#
# **Influence** says for each rollout: if we learned from it alone, would our target get better or
# worse? An **account** looks back: how much did each rollout contribute to a change?
#
# Read the first lesson before (`lesson.ipynb`): it says what a rollout, an advantage and a step
# are. Sections 2 to 8 are about one step, sections 9 to 11 are accounts.
#
# Every function here is the project's own. Open `influence.ipynb` in Jupyter
# (`pip install matplotlib jupyterlab`) or VS Code, or run `python docs/lesson/influence.py`. In
# Colab begin with the lines that `lesson.ipynb` has for it.
#
# **Try** is a question: first predict, then change what it names and run all cells. **Write** asks
# for a line of yours in place of the dots. Answers to **Try** are at the end.
#
# ## 1. A batch
# The world and the 24 rollouts are the first lesson's: six completions of each of four prompts. The
# reward is the share of the letter e.

# %%
flags = []      # to try something: ["--seed=21"] takes other prompts

# %%
from dataclasses import replace

import torch
from classroom import added_code, judge_influence, judge_shares, open_world, picture, plt

import grpo
import tracin
from extras.explain.tokens import logprob_changes, pieces_of
from extras.variants.tracin_adam import adam_scale
from loss import loss_of
from rollout import completion_logprobs
from tape import Tape, cosine, inner

cfg, setup, prompts = open_world(flags)
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

# %% [markdown]
# **Write** (medium): the influence of each rollout, N numbers, from the gradients in the list
# `alone` and from `target`. `inner(a, b)` is an inner product, and `torch.stack` makes a tensor of
# a list.

# %%
influence = ...
judge_influence(influence, alone, target)

# %%
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
# So most influences are positive, even where the others disagree. The sign can differ from the
# advantage's. A rollout below average can have positive influence: learning to avoid it
# helps. One above average can have negative influence: what makes it likelier moves the others the
# wrong way.
#
# **Try 1** (medium): take the first prompt's group as target, `gradient_of(step.rows[:G])`. Have
# the rollouts of other prompts any influence on it?
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
    tape.next_rows(torch.arange(N), flat={setup.policy.lm_head: owners})
    loss_of(setup, setup.policy, batch, step.rows, step, cfg).policy.backward()
influence = tape.dot(tape.gradient(torch.ones(N)))                              # (N,)
error = (influence - by_hand).abs().max() / by_hand.abs().max()
print(f"largest difference from section 2: {float(error):.5f} of the largest influence")

# %% [markdown]
# From here on `tape.dot(x)` are the inner products of all rollouts' gradients with any x.
#
# **Try 2** (medium): what is the sum of all influences, in terms of `target`?
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


def falls(size):
    """The fall of the target's loss / size, by a step on each rollout alone, from the start (N,)"""
    found = []
    for gradient in alone:
        move(-size, gradient)
        found.append(fall() / size)
        setup.policy.load_state_dict(start)     # back to where we were
    return torch.tensor(found)


SIZE = 0.002
what_it_did = falls(SIZE)
plt.figure(figsize=(5, 3.5))
plt.scatter(influence, what_it_did, color=colors)
plt.axline((0, 0), slope=1, color="grey", label="promise kept")
picture("i4_promise", "influence: what was promised", "fall of the target's loss / SIZE")

# %% [markdown]
# **Try 3** (easy): `SIZE` 0.1, 0.5 and 2. Influence is a straight line along a curve. How long does
# it hold?
#
# ## 5. What AdamW does to the promise
# A run does not step along the gradient $g$. AdamW keeps for each weight a mean of the gradients so
# far, $m$, and of their squares, $v$. It steps by $-\mathrm{rate} \cdot m / \sqrt{v}$. In its first
# step that is $g / |g|$, a sign: each weight moves by the rate, be its gradient large or small.
# So take AdamW's first step on one rollout alone.

# %%
RATE = 1e-5
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
scale = adam_scale(setup.optimizer, target)          # 1 / sqrt(v), after a step on all
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
# **Try 4** (medium): `RATE` 1e-3, which is the run's. Is AdamW's real step small enough for a
# promise?
#
# ## 6. Which words
# A rollout's influence is a sum over its tokens of two slopes: `asks`, of its loss by the token's
# log-prob (negative: make it likelier), times `push`, of that log-prob along the target's gradient
# (negative: a step down makes it likelier). If the signs agree, both move the token the same way.

# %%
asks_of_all, = torch.autograd.grad(loss.policy, loss.logp)                      # (N, T)


def words_of(i):
    """asks (T,), push (T,) and the words with their influence, of rollout i at the start."""
    row = batch.rollout[[i]]
    push = logprob_changes(setup.policy, target, row, cfg.temperature)[0]
    return asks_of_all[i], push, pieces_of(row, asks_of_all[i] * push, setup.tokenizer)


best = int(influence.argmax())
asks, push, pieces = words_of(best)
print(f"the tokens add up to {sum(piece.influence for piece in pieces):.5f}, the influence of "
      f"rollout {best} is {float(influence[best]):.5f}")
print(f"asks {asks[0]:+.3f} of each, push", [f"{x:+.3f}" for x in push[push != 0]])
plt.figure(figsize=(8, 3))
plt.bar(range(len(pieces)), [piece.influence for piece in pieces], color=colors[best])
plt.xticks(range(len(pieces)), [piece.text or "(end)" for piece in pieces], rotation=45)
picture("i6_words", f"tokens after {prompts[best // G].text!r}", "influence")

# %% [markdown]
# **Try 5** (easy): `influence.argmin()` for `influence.argmax()`. Which of its words does the harm?
#
# ## 7. A held-out target
# In section 2 most of the influence was each rollout's on itself. That says how large its gradient
# is, not whom it helps. So take another target: the loss of rollouts of other prompts, which the
# batch has not. No rollout is a part of it, so nothing of the influence is its own.

# %%
def influence_elsewhere(num_generations, seed):
    """The influence (N,) on rollouts of four held-out prompts."""
    many = replace(cfg, num_generations=num_generations)
    held_out = grpo.collect(setup, setup.eval_prompts[:4], many, seed)
    all_of_it = next(grpo.optimizer_steps(held_out, many, seed=1))
    return tape.dot(tracin.gradient_of(setup, many, held_out, all_of_it, "policy"))


on_held_out = influence_elsewhere(num_generations=24, seed=3)


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
# **Try 6** (medium): `num_generations=6`, as in the batch, and then `seed=4`. How firm is the
# order?
#
# ## 8. Learn from the helpful
# `grpo.py --tracin=self` drops the rollouts of negative influence in every step. Is that a good
# idea? If the gradients of the target's two halves, the first prompts and the last, have a cosine
# near 1, the target is signal. Near 0 it is mostly noise, and so is the choice.

# %%
keep, _ = tracin.positive(influence)
half = (torch.arange(N) < N // 2).float()
first, last, kept, whole = map(tape.gradient, (half, 1 - half, keep, torch.ones(N)))
print(f"the cosine of the target's two halves is {cosine(first, last):.2f}")
print(f"{int(keep.sum())} of {N} rollouts kept: cosine with all {cosine(kept, whole):.2f}")

# %% [markdown]
# Expect no gain here: most of the influence is itself, and dropping so few hardly changes the step.
#
# **Try 7** (easy): `tracin.positive(on_held_out)`. How many are kept now, and how far
# does the step turn?
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

# %% [markdown]
# **Write** (hard): the shares, N numbers, from `SIZE`, `tape` and `slope_before`.

# %%
shares = ...
judge_shares(shares, tape, SIZE, slope_before, target)

# %%
shares = -SIZE * tape.dot(slope_before)                                         # (N,)
print(f"the log-prob changed by {after - before:+.4f}, the shares add up to {shares.sum():+.4f}")

# %% [markdown]
# Not quite. The slope before the step is right at its start alone: on the way it becomes another.
# The mean of the slopes before and after is nearly the slope of the whole way.

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
# **Try 8** (medium): `SIZE` 0.3, then 1. How far are both sums from the change?
#
# ## 10. What if it had been left out?
# A share says what a rollout did. Another question: what would be, had it not been there? For one
# plain step that is the same. For two it is not: without rollout $i$ the second step begins
# elsewhere, where all gradients differ.
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


def train(weights, size):
    """Two steps from the start -> where each began, and the log-prob at the end."""
    setup.policy.load_state_dict(start)
    began = []
    for _ in range(2):
        began.append({name: x.clone() for name, x in setup.policy.state_dict().items()})
        move(-size, weighed_gradient(weights))
    return began, log_prob().item()


def less_of_each(part, size):
    """The log-prob less what it is with `part` of a rollout left out, / part, for each (N,)"""
    _, f = train(torch.ones(N), size)
    return torch.tensor([(f - train(1 - part * this, size)[1]) / part for this in torch.eye(N)])


# %%
_, f = train(torch.ones(N), SIZE)
without = less_of_each(1.0, SIZE)                                               # (N,)
a_tenth_less = less_of_each(0.1, SIZE)                                          # (N,)
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


def derivatives(size):
    """Of the log-prob by each rollout's weight: with H, and without it (N,) each."""
    began, _ = train(torch.ones(N), size)
    end = back = slope()
    effects, without_h = torch.zeros(2, N)
    for weights in reversed(began):
        setup.policy.load_state_dict(weights)
        apart = [weighed_gradient(one) for one in torch.eye(N)]
        effects -= size * torch.stack([inner(gradient, back) for gradient in apart])
        without_h -= size * torch.stack([inner(gradient, end) for gradient in apart])
        here = weighed_gradient(torch.ones(N))
        move(NEAR, back)
        there = weighed_gradient(torch.ones(N))
        back = {p: g - size * (there[p] - here[p]) / NEAR for p, g in back.items()}
    return effects, without_h


effects, without_h = derivatives(SIZE)
for name, found in ("the derivatives", effects), ("without H they", without_h):
    off = [(found - x).norm() / x.norm() for x in (a_tenth_less, without)]
    print(f"{name} are off by {off[0]:.1%} for a tenth of a rollout, by {off[1]:.1%} for all of it")
plt.figure(figsize=(5, 3.5))
plt.scatter(effects, without, color=colors)
plt.axline((0, 0), slope=1, color="grey", label="prediction kept")
picture("i10_left_out", "derivative", "log-prob with it less without it")

# %% [markdown]
# **Try 9** (medium): `SIZE = 0.2` in section 9. A derivative is a straight line, too. For which
# change does it hold longer?
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
# Two plain steps on our batch, again without the clip. At each of the three weights, 250
# completions of each of two other prompts, always with the same random numbers.

# %%
def look(count, with_baseline):
    """The mean reward and its slope at the weights as they are, from 2 * count completions."""
    many = replace(cfg, num_generations=count)
    rollout, asked, texts = grpo.sample_completions(
        setup, setup.policy, setup.eval_prompts[:2], many, seed=4)
    scores = grpo.all_scores(setup.reward_funcs, asked, texts, many)
    r = grpo.total_reward(scores, cfg.reward_weights, count).view(2, count)
    b = (r.sum(1, keepdim=True) - r) / (count - 1) * with_baseline
    logp = completion_logprobs(setup.policy, rollout, cfg.temperature).sum(1)
    mean = ((r - b).flatten() * logp).mean()
    return r.mean().item(), dict(zip(setup.trained, torch.autograd.grad(mean, setup.trained)))


def account(size, count, with_baseline=True):
    """R before and after two steps, and each rollout's share of its rise: with the mean of the
    slopes before and after each step, and with the slope before it (N,)"""
    setup.policy.load_state_dict(start)
    shares, left_end = torch.zeros(2, N)
    R_start, slope = look(count, with_baseline)
    for _ in range(2):
        apart = [weighed_gradient(one) for one in torch.eye(N)]
        move(-size, weighed_gradient(torch.ones(N)))
        R_end, next_slope = look(count, with_baseline)
        mean = {p: (slope[p] + next_slope[p]) / 2 for p in setup.trained}
        shares -= size * torch.stack([inner(gradient, mean) for gradient in apart])
        left_end -= size * torch.stack([inner(gradient, slope) for gradient in apart])
        slope = next_slope
    return R_start, R_end, shares, left_end


# %%
SIZE = 0.1
COUNT = 250
R_start, R_end, shares, left_end = account(SIZE, COUNT)
print(f"R rose from {R_start:.4f} to {R_end:.4f}: {R_end - R_start:+.4f}")
print(f"the shares add up to {shares.sum():+.4f} ({float(shares.sum() / (R_end - R_start)):.0%}), "
      f"with the slope before each step alone to {left_end.sum():+.4f}")
order = batch.rewards.argsort()
plt.figure(figsize=(7, 3))
plt.bar(range(N), shares[order], color=[colors[i] for i in order])
plt.xticks(range(N), [f"{r:.2f}" for r in batch.rewards[order]], rotation=90, fontsize="small")
picture("i11_account", "reward of the rollout", "share of the rise of R")

# %% [markdown]
# The sum comes near the true rise. The lowest and the highest rewards gave most of it: to make a
# bad completion less likely helps as well, and from an average one there is little to learn.
#
# **Try 10** (hard): forget the baseline: `b = 0`. Then `COUNT = 20`. Then `SIZE = 0.5`. Which of
# the three keeps the shares from adding up, even if we could take as many completions as we like?
# (`R` and its slope are estimates from 500 completions.)
#
# After `python grpo.py config/lesson.py`, `python tracin.py out/lesson_run` makes such an account
# of the whole run: through AdamW, where a rollout counts in all later steps by momentum too.
# docs/account.md says how, and how far it can be trusted.

# %%
print(*added_code("nano.py", "nano_tracin.py"), sep="\n")

# %% [markdown]
# These lines are all that the first lesson's loop lacks to learn from helpful rollouts only:
# `diff nano.py nano_tracin.py`. Section 3 has the tape, section 8 the choice.
#
# ## Answers
# The numbers are from the run that made this page: they change with `flags`.
#
# **1.** They have. Prompts share the policy's weights, and here even words, so what one group
# learns moves the others.

# %%
setup.policy.load_state_dict(start)
on_first = tape.dot(gradient_of(step.rows[:G]))                                 # (N,)
print(f"answer 1: influence on the first group: its own rollouts {on_first[:G].sum():+.3f}, all "
      f"others {on_first[G:].sum():+.3f}, the largest of these "
      f"{on_first[G:].max():+.3f} and {on_first[G:].min():+.3f}")

# %% [markdown]
# **2.** The square of its length, `inner(target, target)`. The rollouts' gradients add up to that
# of the target, so their inner products with it do, too.

# %%
print(f"answer 2: sum of all influences {influence.sum():.5f}, inner(target, target) "
      f"{float(inner(target, target)):.5f}")

# %% [markdown]
# **3.** As long as the gradient stays nearly the same. The error grows with `SIZE`.

# %%
for size in (0.1, 0.5, 2.0):
    off = (falls(size) - influence).norm() / influence.norm()
    print(f"answer 3: SIZE {size:g}: the falls are off by {off:.0%}")

# %% [markdown]
# **4.** No. At a hundredth of the run's rate the promise is kept, and at the run's own it is far
# off: each weight moves by as much as the rate, and they are 300,000.

# %%
promised = float(influence_adam.sum())
for RATE in (1e-5, 1e-4, 1e-3):
    for group in setup.optimizer.param_groups:
        group["lr"] = RATE
    print(f"answer 4: RATE {RATE:g}: AdamW's step gives {adamw_step(target) / promised:.0%} of "
          "what was promised")

# %% [markdown]
# **5.** The word with the lowest bar. Where `asks` and `push` have different signs, the rollout and
# the target want different things of that word.

# %%
worst = int(influence.argmin())
_, _, pieces = words_of(worst)
harm = min(pieces, key=lambda piece: piece.influence)
print(f"answer 5: rollout {worst}, {batch.completions[worst]!r}, has influence "
      f"{influence[worst]:+.4f}; the most harm is by {harm.text or '(end)'!r}, "
      f"{harm.influence:+.4f}")

# %% [markdown]
# **6.** Less firm. With six completions of a prompt two seeds agree less than with 24: a target of
# few rollouts is mostly their noise.

# %%
for count in (6, 24):
    orders = [influence_elsewhere(count, seed) for seed in (3, 4, 5, 6)]
    found = [agreement(x, y) for i, x in enumerate(orders) for y in orders[:i]]
    print(f"answer 6: num_generations {count}: agreement of two seeds is {sum(found) / 6:.1f} on "
          "average")

# %% [markdown]
# **7.** Fewer, since nothing of this influence is a rollout's own. So the step turns further away
# from the step of all rollouts.

# %%
for name, found in ("batch", influence), ("held-out", on_held_out):
    keep, _ = tracin.positive(found)
    print(f"answer 7: target {name}: {int(keep.sum())} of {N} kept, cosine with all "
          f"{cosine(tape.gradient(keep), whole):.2f}")

# %% [markdown]
# **8.** Both grow worse with the step. The mean of two slopes is exact for a curve of second order,
# so it stays nearer.

# %%
for size in (0.05, 0.3, 1.0):
    setup.policy.load_state_dict(start)
    before, slope_before = log_prob().item(), slope()
    move(-size, target)
    change, slope_after = log_prob().item() - before, slope()
    first, last = (float(-size * tape.dot(x).sum()) for x in (slope_before, slope_after))
    print(f"answer 8: SIZE {size:g}: the change is {change:+.3f}, the slope before says "
          f"{first:+.3f}, the mean of both {(first + last) / 2:+.3f}")

# %% [markdown]
# **9.** For a tenth of a rollout. A derivative is about a small change, and a whole rollout is a
# large one.

# %%
effects, _ = derivatives(0.2)
off = [(effects - x).norm() / x.norm() for x in (less_of_each(0.1, 0.2), less_of_each(1.0, 0.2))]
print(f"answer 9: SIZE 0.2: the derivatives are off by {off[0]:.1%} for a tenth of a rollout, by "
      f"{off[1]:.1%} for all of it")

# %% [markdown]
# **10.** `SIZE = 0.5`. Without a baseline, or with few completions, the slope is noisier, and more
# completions mend that. A step that is too long for a straight line stays so.

# %%
for name, arguments in {"b = 0": (SIZE, COUNT, False), "COUNT = 20": (SIZE, 20),
                        "SIZE = 0.5": (0.5, COUNT)}.items():
    R_start, R_end, shares, _ = account(*arguments)
    share = float(shares.sum() / (R_end - R_start))
    print(f"answer 10: {name}: the shares add up to {share:.0%} of the rise")
