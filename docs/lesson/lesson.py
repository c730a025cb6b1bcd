# %% [markdown]
# # GRPO by hand
#
# GRPO trains the **policy**, a language model: it samples several completions of a prompt, scores
# them, makes those above their group's average likelier and the others less likely. A prompt with
# one completion is a **rollout**.
#
# Sections 1 to 5 take one step apart. Sections 6 to 8 add what a run needs: several steps on the
# same rollouts, a bound on how far the policy goes, and many iterations. The second lesson,
# `influence.ipynb`, asks which rollouts helped.
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
# The policy is a GPT of 300,000 weights that has read made-up sentences of eight words
# (`config/lesson.py`). A prompt is the first three, so a completion should be five words and an end
# token. The reward is a rule: the share of the letter e in a completion.

# %%
import os
import sys

sys.path[:0] = [os.path.join(sys.path[0], "../.."), "../.."]     # where the project is
if not any(os.path.exists(os.path.join(path, "grpo.py")) for path in sys.path):
    raise SystemExit("the lesson needs the project around it: clone it, open docs/lesson there")

from dataclasses import replace

import torch

import grpo
from common.files import ROOT
from common.script import BadInput, exit_codes, optional
from data.prompts import draw_prompts
from loss import clipped_objective, kl_estimate, loss_of
from rollout import completion_states
from run.settings import load_settings

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


flags = sys.argv[1:] if sys.argv[0].endswith("lesson.py") else []
with exit_codes():      # a slip in a flag is one line
    cfg = load_settings([f"{ROOT}/config/lesson.py", *flags])
    if cfg.device != "cpu":
        raise BadInput(f"device = {cfg.device!r}: the pictures need tensors of a CPU: leave it out")
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
prompts = draw_prompts(setup.prompts, 0, cfg.num_prompts, cfg.seed)
G = cfg.num_generations
N = len(prompts) * G
print("prompts:", [prompt.text for prompt in prompts])

# %% [markdown]
# **Try:** in `reward` at the end of `config/lesson.py` take o for e.
#
# ## 2. Rollout
# The policy writes six completions of each prompt. Each token's log-prob is kept: training will
# ask how much likelier the token has become since. The policy as it was here is the **sampler**.

# %%
rollout, asked, texts = grpo.sample_completions(setup, setup.policy, prompts, cfg, seed=2)
print(repr(prompts[0].text), "->", *map(repr, texts[:G]), sep="\n")
plt.figure(figsize=(7, 3))
logp = rollout.logp.masked_fill(~rollout.completion_mask, float("nan"))        # (N, T)
plt.imshow(logp, aspect="auto", vmin=-8, vmax=0)
plt.colorbar(label="log-prob (0: certain)")
for first in range(G, N, G):
    plt.axhline(first - 0.5, color="red")       # another prompt
picture("2_rollout", "token of the completion", "rollout")

# %% [markdown]
# Red lines part the prompts. Dark tokens were a surprise. White is after the end of a completion.
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
# The **ratio** of a token says how much likelier it has become:
# $\rho = p_\mathrm{policy} / p_\mathrm{sampler}$. Its objective, which training makes larger, is
# $\min(\rho A,\ \mathrm{clip}(\rho) A)$, where clip keeps $\rho$ within 1 - epsilon and
# 1 + epsilon. Where the curve is flat, a token has moved far enough and is left alone.

# %%
ratio = torch.linspace(0, 3, 101)[:, None]                                      # (n, 1)
plt.figure(figsize=(5, 3))
for A in (1.0, -1.0):
    objective = clipped_objective(ratio, ratio.log(), torch.full((101,), A), cfg)
    plt.plot(ratio, objective, label=f"advantage {A:+g}")
picture("4_clip", f"ratio = policy / sampler; epsilon = {cfg.epsilon}", "objective")

# %% [markdown]
# **Try:** `--epsilon=0.5`. Where do the curves bend now?
#
# ## 5. The step
# `grpo.collect` does sections 2 and 3 in one call. Then: loss, backward, optimizer step. The loss
# is minus the mean of the objective over all tokens. The policy still is the sampler, so all ratios
# are 1, and the loss is minus the mean of the advantages. In a group they cancel but for
# completions of another length: the loss is near 0. Its gradient is not.

# %%
batch = grpo.collect(setup, prompts, cfg, seed=2)
mask = batch.loss_mask                          # (N, T) tokens of completions, not padding
step = next(grpo.optimizer_steps(batch, cfg, seed=1))       # all rows of the batch
start = {name: x.clone() for name, x in setup.policy.state_dict().items()}
loss = loss_of(setup, setup.policy, batch, step.rows, step, cfg)
loss.total.backward()
setup.optimizer.step()
setup.optimizer.zero_grad()
with torch.no_grad():
    after = loss_of(setup, setup.policy, batch, step.rows, step, cfg)
change = (after.logp - batch.rollout.logp).sum(1)                               # (N,)
print(f"ratio {float(loss.ratio.mean()):.6f}, loss {float(loss.total.detach()):+.6f}")
plt.figure(figsize=(5, 3))
plt.scatter(batch.advantages, change, color=colors)
plt.axhline(0, color="grey")
picture("5_step", "advantage", "change of log-prob")

# %% [markdown]
# Look for a dot above 0 whose advantage is below 0: it became likelier although it was below
# average. Rollouts share words, and a step on one moves the others too.
#
# **Try:** flip the sign of the objective in `loss.clipped_objective` and run the lesson. Then run
# `python grpo.py config/lesson.py --out_dir=out/flipped` and look at the reward. Flip it back!
#
# ## 6. A second step on the same rollouts
# Sampling is expensive, so a batch may serve several steps. Before the second one the policy is no
# longer the sampler: ratios are not 1 any more. What does each token ask of the policy now? Its
# **pull** is minus the derivative of the loss by its log-prob. Above 0 it wants to be likelier. For
# a token that the clip holds the pull is exactly 0.

# %%
def pull_of(how):
    """The ratio and the pull (M,) of all M tokens, with the settings `how`."""
    loss = loss_of(setup, setup.policy, batch, step.rows, step, how)
    slope, = torch.autograd.grad(loss.policy, loss.logp)                        # (N, T)
    return loss.ratio[mask], -slope[mask] * step.num_tokens


no_clip = replace(cfg, epsilon=1e9)
ratio, pull = pull_of(cfg)
_, free = pull_of(no_clip)
held = (pull == 0) & (free != 0)
print(f"ratios from {ratio.min():.2f} to {ratio.max():.2f}; the clip holds {int(held.sum())} "
      f"of {len(ratio)} tokens")
plt.figure(figsize=(7, 3.5))
plt.scatter(ratio, free, facecolors="none", edgecolors="grey", label="without the clip")
plt.scatter(ratio[~held], pull[~held], s=12, label="with the clip")
plt.scatter(ratio[held], pull[held], s=12, color="red", label="held: pull 0")
plt.xscale("log")
picture("6_pull", "ratio (1: as likely as when it was sampled)", "pull")

# %% [markdown]
# Each dot is a token. Without the clip its pull is the ratio times the advantage. So a good token
# that has become likelier pulls all the harder. The clip stops that. It does not hold a token that
# went the wrong way: good, but less likely than before.
#
# Now take five steps from the start, with the clip and without.

# %%
def restart():
    setup.policy.load_state_dict(start)
    setup.optimizer.state.clear()           # AdamW forgets the gradients that it has seen


def take_steps(count, how):
    """Steps on the batch, from the start -> the ratios (count + 1, M) before each and at the end"""
    restart()
    ratios = []
    for _ in range(count):
        loss = loss_of(setup, setup.policy, batch, step.rows, step, how)
        ratios.append(loss.ratio[mask])
        loss.total.backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    return torch.stack([*ratios, pull_of(how)[0]])


plt.figure(figsize=(7, 3.5))
for name, how in ("without the clip", no_clip), ("with the clip", cfg):
    ratios = take_steps(5, how)
    plt.fill_between(range(6), ratios.amin(1), ratios.amax(1), alpha=0.4, label=name)
    print(f"{name}: ratios from {ratios[-1].min():.2f} to {ratios[-1].max():.2f}")
plt.axhspan(1 - cfg.epsilon, 1 + cfg.epsilon, color="black", alpha=0.3, label="1 ± epsilon")
plt.yscale("log")
picture("6_passes", "steps on the same rollouts", "from the least ratio to the largest")

# %% [markdown]
# The clip is no wall. A held token still moves, since it shares weights with others, and AdamW goes
# on for a while where earlier gradients pointed.
#
# **Try:** `--learning_rate=5e-5`. How many tokens does the clip hold after one step, and where do
# the ratios end?
#
# ## 7. How far from the reference?
# The reward counts one letter. Nothing says that sentences stay sentences. So GRPO can hold the
# policy near the **reference**, the policy before training. At a place in a text their distance is
# the KL divergence, a sum over all tokens $v$ that could come next:
#
# $$\mathrm{KL} = \sum_v \pi(v) \log \frac{\pi(v)}{\pi_\mathrm{ref}(v)}$$
#
# It is 0 where both expect the same, and never negative. The sum needs the whole distribution, but
# a rollout keeps only the log-prob of the token that was drawn. So the KL is estimated from that
# one token, by $d = \log \pi_\mathrm{ref} - \log \pi$:
#
# $$k_1 = -d, \qquad k_2 = d^2 / 2, \qquad k_3 = e^d - d - 1$$
#
# The mean of k1 over many draws is the KL. That of k3 is too, since $e^d$ has the mean 1. And k3 is
# never negative, since $e^d \geq 1 + d$. Here the vocabulary is small, so we can compare them with
# the sum. The policy has taken three steps, and writes 50 new completions of each prompt.

# %%
take_steps(3, cfg)
many = replace(cfg, num_generations=50)
fresh = grpo.sample_completions(setup, setup.policy, prompts, many, seed=3).rollout
drawn = fresh.sampled_mask                                                      # (N, T)


@torch.no_grad()
def exact_kl():
    """The KL (M,) at each of the M tokens that were drawn: the sum over all V."""
    logits = [policy.lm_head(completion_states(policy, fresh).h) / cfg.temperature
              for policy in (setup.policy, setup.reference)]
    p, q = (x.log_softmax(-1) for x in logits)                                  # (M, V)
    return (p.exp() * (p - q)).sum(1)


exact = exact_kl()
print(f"exact KL {exact.mean():.4f} nats per token, {len(exact)} tokens")

# %%
logp = fresh.logp[drawn]                                                        # (M,)
ref_logp = grpo.reference_logprobs(setup, fresh, cfg).detach()[drawn]           # (M,)
d = torch.linspace(-3, 3, 101)
plt.figure(figsize=(7, 3.5))
for name, color in ("k1", "C0"), ("k2", "C1"), ("k3", "C2"):
    k = kl_estimate(logp, ref_logp, name)
    noise = (k - exact).std() / len(k) ** 0.5
    print(f"{name}: mean {k.mean():.4f} ± {noise:.4f}, of single tokens the standard deviation is "
          f"{k.std():.3f}; negative {(k < 0).float().mean():.0%}")
    plt.plot(d, kl_estimate(-d, torch.zeros(101), name), color=color, label=name)
    plt.scatter(ref_logp - logp, k, s=8, alpha=0.3, color=color)
plt.xlim(-1.5, 1.5)
plt.ylim(-1.5, 2)
picture("7_kl", "d = log-prob by the reference less log-prob by the policy", "estimate of the KL")

# %% [markdown]
# Each dot is a token. Single estimates are far off, and only their mean is worth something. k1 is
# right on average but has both signs. k2 is not the KL on average; it comes near if both policies
# are close.
#
# GRPO adds beta times k3 to the loss of each token. What does that do? Take a step on this part of
# the loss alone.

# %%
how = replace(many, beta=1.0)
batch_kl = grpo.collect(setup, prompts, how, seed=3)
whole = next(grpo.optimizer_steps(batch_kl, how, seed=1))
loss = loss_of(setup, setup.policy, batch_kl, whole.rows, whole, how)
before = exact_kl().mean()
setup.optimizer.state.clear()
loss.kl.backward()
setup.optimizer.step()
setup.optimizer.zero_grad()
print(f"exact KL before a step on the KL alone {before:.4f}, after it {exact_kl().mean():.4f}")

# %% [markdown]
# **Try:** `take_steps(5, no_clip)` in place of `take_steps(3, cfg)`. Which estimate is off most?
#
# ## 8. A learning curve
# An iteration samples new rollouts and takes a step on them. That is all there is in `grpo.train`,
# but for the bookkeeping of a run. We run it twice, without KL and with beta 0.1, each time from
# the start.

# %%
ITERATIONS = 20


def learn(how):
    """Iterations from the start -> mean reward and KL per token before each step (ITERATIONS, 2)"""
    restart()
    curve = []
    for it in range(ITERATIONS):
        batch = grpo.collect_iteration(setup, it, how)
        ref_logp = grpo.reference_logprobs(setup, batch.rollout, how).detach()
        kl = kl_estimate(batch.rollout.logp, ref_logp, "k3")[batch.loss_mask].mean()
        curve.append([batch.rewards.mean(), kl])
        grpo.update(setup, batch, None, how, seed=it)
    return torch.tensor(curve)


# %%
print("before training:", *map(repr, texts[:3]), sep="\n")
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for beta in (0.0, 0.1):
    curve = learn(replace(cfg, beta=beta))
    left.plot(curve[:, 0], label=f"beta {beta}")
    right.plot(curve[:, 1], label=f"beta {beta}")
    print(f"beta {beta}: reward {curve[:3, 0].mean():.3f} to {curve[-3:, 0].mean():.3f} "
          f"(means of three iterations), KL {curve[-3:, 1].mean():.3f}")
    written = grpo.sample_completions(setup, setup.policy, prompts, cfg, seed=2).texts
    print(*map(repr, written[:3]), sep="\n")
left.set(xlabel="iteration", ylabel="reward")
picture("8_curve", "iteration", "KL, nats per token")

# %% [markdown]
# Without the KL the reward is higher, and what it rewards is no language any more. This is **reward
# hacking**: a rule of letters is easily served without sentences. The KL holds the policy near what
# it had read, and costs some reward.
#
# **Try:** in the last cell (0.0, 1.0) for (0.0, 0.1). What does a large beta leave of the reward?
#
# What is left is bookkeeping: `python grpo.py config/lesson.py` trains this world in earnest, and
# `grpo.py` is written to be read from its first line to its last. Which of the rollouts made it
# better? `influence.ipynb` goes on here.
