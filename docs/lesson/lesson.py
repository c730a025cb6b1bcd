# %% [markdown]
# # GRPO by hand
#
# GRPO trains the **policy**, a language model: it samples several completions of a prompt, scores
# them, makes those above their group's average likelier and the others less likely. A prompt with
# one completion is a **rollout**.
#
# ![A prompt, its completions, their rewards and advantages, the loss, a step](../algorithm.svg)
#
# You need a little PyTorch: what a tensor, `backward` and an optimizer are. A **log-prob** is the
# logarithm of a probability, so 0 is certain and -8 is a surprise. Shapes stand in brackets behind
# a line: `(N, T)` is a table of N rollouts by T tokens.
#
# Sections 1 to 5 take one step apart. Sections 6 to 8 add what a run needs: several steps on the
# same rollouts, a bound on how far the policy goes, and many iterations. The second lesson,
# `influence.ipynb`, asks which rollouts helped.
#
# Every function here is the project's own. Open `lesson.ipynb` in Jupyter
# (`pip install matplotlib jupyterlab`) or VS Code. Or run `python docs/lesson/lesson.py`, which
# takes under a minute and draws to `out/lesson`. On Windows `python` may be called `py`. In Colab
# run this in a cell of its own first, with the project's address:
#
# ```
# !git clone ADDRESS grpo
# %cd grpo/docs/lesson
# %pip install -q -r ../../requirements.txt matplotlib
# ```
#
# After a restart of its kernel `%cd` again. Neither Windows nor Colab has been tried.
#
# **Try** is a question: first predict, then change what it names, run all cells, and change it
# back. **Write** asks for a line of yours in place of the dots, and the next line says whether it
# is right. Answers to **Try** are at the end. After editing a `.py` file restart the kernel.

# %%
from classroom import judge_advantages, judge_objective, loop_of, open_world, picture, plt

print(*loop_of("nano.py"), sep="\n")

# %% [markdown]
# That is GRPO: the loop of [nano.py](../../nano.py), where each block says why it is there. Read it
# there first, which takes ten minutes. (Do not run it in a class: it prints real comments, and some
# are vile. The sentences here are clean.)
#
# Then we take it apart: rollout in section 2, score and advantage in 3, loss in 4 and 6, step in 5
# and 8, reference in 7.
#
# ## 1. A small world
# The policy is a GPT of 300,000 weights that has read made-up sentences of eight words
# (`config/lesson.py`). It is a file, so everybody sees the same numbers, up to section 8, where
# rounding adds up over many steps. A prompt is the first three words, so a completion should be
# five words and an end token. The reward is a rule: the share of the letter e in a completion.
# `setup` has the models and the optimizer, `cfg` the settings, such as `cfg.num_generations`.

# %%
flags = []      # to try something: ["--temperature=0.3"]

# %%
from dataclasses import replace

import torch

import grpo
from loss import clipped_objective, kl_estimate, loss_of
from rollout import completion_states

cfg, setup, prompts = open_world(flags)
G = cfg.num_generations
N = len(prompts) * G
print("prompts:", [prompt.text for prompt in prompts])

# %% [markdown]
# ## 2. Rollout
# The policy writes six completions of each prompt. Each token's log-prob is kept: training will
# ask how much likelier the token has become since. The policy as it was here is the **sampler**.
# `asked` has the prompt of each completion. `mask` is True on its tokens, the end token included.

# %%
rollout, asked, texts = grpo.sample_completions(setup, setup.policy, prompts, cfg, seed=2)
mask = rollout.sampled_mask                                                     # (N, T)
print(repr(prompts[0].text), "->", *map(repr, texts[:G]), sep="\n")

# %%
plt.figure(figsize=(7, 3))
plt.imshow(rollout.logp.where(mask, torch.nan), aspect="auto", vmin=-8, vmax=0)
plt.colorbar(label="log-prob (0: certain)")
for first in range(G, N, G):
    plt.axhline(first - 0.5, color="red")       # another prompt
picture("2_rollout", "token of the completion", "rollout")

# %% [markdown]
# Red lines part the prompts. Dark tokens were a surprise. White is after the end of a completion.
#
# **Try 1** (medium): `flags = ["--temperature=0.3"]` in section 1. The logits, which a softmax
# turns into probabilities, are divided by the temperature before a token is drawn. Which surprises
# go, and are the six completions of a prompt alike then?
#
# ## 3. Score and advantage
# Each completion gets a reward. Its advantage is its distance from the mean of its group, in
# standard deviations of the group: $A_i = (r_i - \mathrm{mean}) / \mathrm{std}$. So the advantages
# of each prompt add up to 0. (`nano.py` divides by the standard deviation of the whole batch, which
# is a setting here: `--scale_rewards=batch`. The 1e-4 in the divisor, there and here, keeps equal
# rewards from 0 / 0.)

# %%
scores = grpo.all_scores(setup.reward_funcs, asked, texts, cfg)      # (N, K) of K functions: here 1
rewards = grpo.total_reward(scores, cfg.reward_weights, G)                      # (N,)
print("rewards of the first prompt:", [f"{x:.3f}" for x in rewards[:G]])
print("standard deviations:", [f"{x:.3f}" for x in rewards.view(-1, G).std(1)])

# %% [markdown]
# **Write** (medium): the advantages, from `rewards` (N,) and `G`. `rewards.view(-1, G)` has a row
# for each prompt. With `keepdim=True` a mean or a standard deviation of the rows is a column, so
# that it can be subtracted from them.

# %%
advantages = ...
judge_advantages(advantages, rewards, G)

# %%
advantages = grpo.group_advantages(rewards, G, cfg.scale_rewards)               # (N,)
colors = [f"C{i // G}" for i in range(N)]       # a colour per prompt
plt.figure(figsize=(7, 3))
plt.bar(range(N), advantages, color=colors)
plt.xticks(range(0, N, G), [repr(prompt.text) for prompt in prompts], ha="left")
picture("3_advantages", "rollouts of each prompt", "advantage")

# %% [markdown]
# **Try 2** (easy): `--scale_rewards=none` leaves out the division. Which prompt counts less then?
# Look at the standard deviations above.
#
# ## 4. The clip
# The **ratio** of a token says how much likelier it has become:
# $\rho = p_\mathrm{policy} / p_\mathrm{sampler}$. Its objective, which training makes larger, is
# $\min(\rho A,\ \mathrm{clip}(\rho) A)$, where clip keeps $\rho$ within 1 - epsilon and
# 1 + epsilon. Where the curve is flat, a token has moved far enough and is left alone.
#
# **Write** (medium): the objective of each `ratio` (n, 1) for both advantages `A` (2,). Their
# product is a table (n, 2). You need `torch.min`, `clamp` and `cfg.epsilon`.

# %%
ratio = torch.linspace(0, 3, 101)[:, None]                                      # (n, 1)
A = torch.tensor([1.0, -1.0])
objective = ...
judge_objective(objective, ratio, A, cfg)

# %%
plt.figure(figsize=(5, 3))
for a in A:
    curve = clipped_objective(ratio, a, cfg)
    plt.plot(ratio, curve, label=f"advantage {a:+g}")
picture("4_clip", f"ratio = policy / sampler; epsilon = {cfg.epsilon}", "objective")

# %% [markdown]
# ## 5. The step
# `grpo.collect` does sections 2 and 3 in one call. Then: loss, backward, optimizer step. `step`
# says which rows the step is on: all.
#
# `loss_of` gives tables (N, T) of all tokens, `loss.logp` and `loss.ratio`, and numbers:
# `loss.policy` is minus the mean of the objective over all tokens, `loss.kl` the part of section 7
# (0 here), and `loss.total` their sum.
#
# The policy still is the sampler, so all ratios are 1, and the loss is minus the mean of the
# advantages over all tokens. The advantages of a group add up to 0. But one of a long completion
# counts for more tokens, so the loss is not quite 0. Its gradient is far from 0.

# %%
batch = grpo.collect(setup, prompts, cfg, seed=2)
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
print(f"likelier although below average: {int(((change > 0) & (batch.advantages < 0)).sum())} of "
      f"{int((batch.advantages < 0).sum())} rollouts")

# %%
plt.figure(figsize=(5, 3))
plt.scatter(batch.advantages, change, color=colors)
plt.axhline(0, color="grey")
picture("5_step", "advantage", "change of log-prob")

# %% [markdown]
# The dots above 0 whose advantage is below 0 became likelier although they were below average.
# Rollouts share words, and a step on one moves the others too.
#
# **Try 3** (easy): in `loss.clipped_objective` return minus what it returns. What will the policy
# write after `python grpo.py config/lesson.py --out_dir=out/flipped`? (The run ends in "does not
# work", since the reward was to rise.) Flip it back!
#
# ## 6. A second step on the same rollouts
# ### How far have they moved?
# Sampling is expensive, so a batch may serve several steps. Before the second one the policy is no
# longer the sampler: ratios are not 1 any more. We compute the loss once more, without a step.

# %%
loss = loss_of(setup, setup.policy, batch, step.rows, step, cfg)
ratio = loss.ratio[mask]                                                        # (M,) of all tokens
low, high = cfg.clip_range
print(f"ratios from {ratio.min():.2f} to {ratio.max():.2f}; outside the clip's range are "
      f"{int(((ratio < low) | (ratio > high)).sum())} of {len(ratio)} tokens")

# %% [markdown]
# One step is enough to take many tokens out of the clip's range.
#
# ### What does a token ask for now?
# Its **pull** is minus the derivative of the loss by its log-prob, times the number of tokens that
# the loss is divided by: above 0 it wants to be likelier. `torch.autograd.grad` gives it. For a
# token that the clip holds the pull is exactly 0. To see which these are we compute it twice, with
# the settings `cfg` and with `no_clip`, which are the same but for an epsilon that no ratio
# reaches.

# %%
def pull_of(how):
    """The ratio and the pull (M,) of all M tokens, with the settings `how`."""
    loss = loss_of(setup, setup.policy, batch, step.rows, step, how)
    slope, = torch.autograd.grad(loss.policy, loss.logp)                        # (N, T)
    return loss.ratio[mask], -slope[mask] * step.num_tokens


def pulls():
    """Ratio, pull with the clip, and pull without it (M,), and which tokens the clip holds."""
    (ratio, pull), (_, free) = pull_of(cfg), pull_of(no_clip)
    return ratio, pull, free, (pull == 0) & (free != 0)


no_clip = replace(cfg, epsilon=1e9)
ratio, pull, free, held = pulls()
print(f"the clip holds {int(held.sum())} of {len(ratio)} tokens")

# %%
plt.figure(figsize=(7, 3.5))
plt.axvspan(low, high, color="black", alpha=0.1, label="1 ± epsilon")
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
# ### Five steps
# So the clip does not bound a ratio. It bounds what a token can **gain**: its objective less what
# it was at ratio 1, in units of its advantage's size. Take five steps from the start, with the clip
# and without.

# %%
def restart():
    setup.policy.load_state_dict(start)
    setup.optimizer.state.clear()           # AdamW forgets the gradients that it has seen


def gains_of(how):
    """What each of the M tokens has gained, in units of its advantage's size."""
    loss = loss_of(setup, setup.policy, batch, step.rows, step, how)
    now, before = (clipped_objective(ratio, batch.advantages[:, None], how)[mask]
                   for ratio in (loss.ratio, torch.ones_like(loss.ratio)))
    return (now - before)[before != 0] / before[before != 0].abs()


def take_steps(count, how):
    """Steps on the batch, from the start -> the largest gain (count + 1,) before each and after."""
    restart()
    gains = [gains_of(how).max()]
    for group in setup.optimizer.param_groups:
        group["lr"] = how.learning_rate
    for _ in range(count):
        loss_of(setup, setup.policy, batch, step.rows, step, how).total.backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        gains.append(gains_of(how).max())
    return torch.stack(gains)


plt.figure(figsize=(7, 3.5))
for name, how in ("without the clip", no_clip), ("with the clip", cfg):
    gains = take_steps(5, how)
    ratio, _ = pull_of(how)
    plt.plot(range(6), gains, "o-", label=name)
    print(f"{name}: the largest gain is {gains[-1]:.1f}, ratios are from {ratio.min():.2f} to "
          f"{ratio.max():.1f}")
plt.axhline(cfg.epsilon, color="black", linestyle=":", label="epsilon")
plt.yscale("symlog", linthresh=0.5)
plt.ylim(bottom=0)
picture("6_gain", "steps on the same rollouts", "largest gain of a token")

# %% [markdown]
# With the clip no token gains more than epsilon. Its ratio may go on: a held token shares weights
# with others, and AdamW goes on for a while where earlier gradients pointed.
#
# **Try 4** (medium): `--learning_rate=5e-5`, a twentieth. How many tokens does the clip hold after
# one step, and how far are ratios from 1?
#
# ## 7. How far from the reference?
# The reward counts one letter. Nothing says that sentences stay sentences. So GRPO can hold the
# policy near the **reference**, the policy before training. At a place in a text their distance is
# the KL divergence, a sum over all tokens $v$ that could come next (in nats, the unit of a natural
# logarithm):
#
# $$\mathrm{KL} = \sum_v \pi(v) \log \frac{\pi(v)}{\pi_\mathrm{ref}(v)}$$
#
# It is 0 where both expect the same, and never negative. The sum needs the whole distribution, but
# a rollout keeps only the log-prob of the token that was drawn. So the KL is estimated from that
# one token, by $d = \log \pi_\mathrm{ref} - \log \pi$:
#
# $$k_1 = -d, \qquad k_2 = d^2 / 2, \qquad k_3 = e^d - d - 1$$
#
# The mean of k1 over all draws is the KL. That of k3 is too, since $e^d$ has the mean 1. And k3 is
# never negative, since $e^d \geq 1 + d$. Here the vocabulary is small, so nothing has to be drawn:
# the mean over all draws is a sum over the tokens, each times its probability, like the KL itself.
# The policy has taken three steps, and writes 50 new completions of each prompt.

# %%
take_steps(3, cfg)
many = replace(cfg, num_generations=50)
fresh = grpo.sample_completions(setup, setup.policy, prompts, many, seed=3).rollout
drawn = fresh.sampled_mask                                                      # (N, T)


@torch.no_grad()
def both():
    """Log-probs (M, V) of policy and reference of all that could stand at each of M places."""
    logits = [policy.lm_head(completion_states(policy, fresh).h) / cfg.temperature
              for policy in (setup.policy, setup.reference)]
    return [x.log_softmax(-1) for x in logits]


def over_draws():
    """The exact KL, and of each estimate over all draws: the mean, the standard deviation of one
    draw, how often it is negative, and how often it is off by less than the KL."""
    p, q = both()

    def mean(x):
        return float((p.exp() * x).sum(1).mean())

    exact, found = mean(p - q), {}
    for name in ("k1", "k2", "k3"):
        k = kl_estimate(p, q, replace(cfg, kl_estimator=name))                  # (M, V)
        std = (mean(k ** 2) - mean(k) ** 2) ** 0.5
        found[name] = mean(k), std, mean(k < 0), mean((k - exact).abs() < exact)
    return exact, found


exact, found = over_draws()
print(f"exact KL {exact:.3f} nats per token, {int(drawn.sum())} places")
for name, (mean, std, negative, near) in found.items():
    print(f"{name}: mean over all draws {mean:.3f}; standard deviation of one draw {std:.1f}; "
          f"negative {negative:.0%}; off by less than the KL {near:.0%}")

# %%
logp = fresh.logp[drawn]                                                        # (M,)
ref_logp = grpo.reference_logprobs(setup, fresh, cfg).detach()[drawn]           # (M,)
d = torch.linspace(-1.5, 1.5, 101)
plt.figure(figsize=(7, 3.5))
for name, color in ("k1", "C0"), ("k2", "C1"), ("k3", "C2"):
    of_name = replace(cfg, kl_estimator=name)
    plt.plot(d, kl_estimate(-d, torch.zeros(101), of_name), color=color, label=name)
    found = kl_estimate(logp, ref_logp, of_name)
    plt.scatter(ref_logp - logp, found, s=8, alpha=0.3, color=color)
plt.xlim(-1.5, 1.5)
plt.ylim(-1.5, 2)
picture("7_kl", "d = log-prob by the reference less log-prob by the policy", "estimate of the KL")

# %% [markdown]
# Each dot is a token that was drawn. Over all draws the means of k1 and k3 are the KL, to the last
# digit. k2's mean is not; it comes near if both policies are close. A draw of k3 is
# nearly always off by less than the KL, a draw of k1 seldom. All the same the standard deviation
# of k3 is the larger one: where the reference finds a token many times as likely as the policy
# does, $e^d$ is huge. The policy seldom draws such a token, but then the estimate is far off.
#
# GRPO adds beta times k3 to the loss of each token. Section 8 shows what that does.
#
# **Try 5** (hard): `take_steps(1, cfg)` in place of `take_steps(3, cfg)`, so that both policies are
# closer. Is k2 off by a larger or by a smaller share of the KL then, and why?
#
# ## 8. A learning curve
# An iteration samples new rollouts and takes a step on them. That is all there is in `grpo.train`,
# but for the bookkeeping of a run. We run it twice, without KL and with beta 0.1, each time from
# the start.

# %%
ITERATIONS = 20


def learn(how):
    """Iterations from the start -> mean reward and KL per token before each (ITERATIONS, 2), and
    three completions at the end"""
    restart()
    curve = []
    for it in range(ITERATIONS):
        batch = grpo.collect_iteration(setup, it, how)
        ref_logp = grpo.reference_logprobs(setup, batch.rollout, how).detach()
        kl = kl_estimate(batch.rollout.logp, ref_logp, how)[batch.rollout.sampled_mask].mean()
        curve.append([batch.rewards.mean(), kl])
        grpo.update(setup, batch, None, how, seed=it)
    written = grpo.sample_completions(setup, setup.policy, prompts, cfg, seed=2).texts
    return torch.tensor(curve), written[:3]


def ends_of(curve):
    return (f"reward {curve[:3, 0].mean():.3f} to {curve[-3:, 0].mean():.3f} (means of three "
            f"iterations), KL {curve[-3:, 1].mean():.3f}")


# %%
print("before training:", *map(repr, texts[:3]), sep="\n")
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for beta in (0.0, 0.1):
    curve, written = learn(replace(cfg, beta=beta))
    left.plot(curve[:, 0], label=f"beta {beta}")
    right.plot(curve[:, 1], label=f"beta {beta}")
    print(f"beta {beta}: {ends_of(curve)}", *map(repr, written), sep="\n")
left.set(xlabel="iteration", ylabel="reward")
picture("8_curve", "iteration", "KL, nats per token")

# %% [markdown]
# Without the KL the reward is higher, and what it rewards is not language. This is **reward
# hacking**: a rule of letters is easily served without sentences. The KL holds the policy near what
# it had read, and costs some reward.
#
# **Try 6** (easy): in the cell above (0.0, 1.0) for (0.0, 0.1). What does a large beta leave of the
# rise?
#
# **Try 7** (easy): in `reward` at the end of `config/lesson.py` take o for e. Which words will the
# policy write?
#
# What is left is bookkeeping: `python grpo.py config/lesson.py` trains this world in earnest. Which
# of the rollouts made it better? `influence.ipynb` goes on here, and `diff nano.py nano_tracin.py`
# shows what it adds to the loop.
#
# ## Answers
# The numbers are from the run that made this page: they change with `flags`.
#
# **1.** Divided by 0.3, the differences of the logits are three times as large, so what was
# unlikely is not drawn any more: words that break the sentence's pattern. But the words that fit a
# place were about equally likely, and still are. So no surprise is left, and completions stay
# different.

# %%
def surprises(temperature):
    """Of completions at a temperature: tokens, surprises (below -4) among them, and texts."""
    how = replace(cfg, temperature=temperature)
    found = grpo.sample_completions(setup, setup.policy, prompts, how, seed=2)
    logp = found.rollout.logp[found.rollout.sampled_mask]
    return len(logp), int((logp < -4).sum()), {(i // G, text) for i, text in enumerate(found.texts)}


restart()
for temperature in (1.0, 0.3):
    tokens, rare, different = surprises(temperature)
    print(f"answer 1: temperature {temperature}: {rare} surprises in {tokens} tokens, "
          f"{len(different)} of {N} completions differ")

# %% [markdown]
# **2.** The prompt whose rewards are closest together. Divided by their own standard deviation, all
# groups count about alike. Without that, a group counts by how far apart its rewards are.

# %%
spread = rewards.view(-1, G).std(1)                                             # (B,)
least = int(spread.argmin())
sizes = [grpo.group_advantages(rewards, G, scale).abs().view(-1, G).sum(1)
         for scale in ("group", "none")]
divided, plain = (float(size[least] / size.sum()) for size in sizes)
print(f"answer 2: {prompts[least].text!r}, of standard deviation {spread[least]:.3f}, has "
      f"{divided:.1%} of all advantage, undivided {plain:.1%}")

# %% [markdown]
# **3.** What has few letters e: words without one, or on some machines an end token at once. What
# is better than the rest of its group becomes less likely. (The other sign of the reward does the
# same, so no file is edited here.)

# %%
curve, written = learn(replace(cfg, reward_weights=[-1.0]))
print(f"answer 3: flipped: the share of e goes from {-curve[:3, 0].mean():.3f} to "
      f"{-curve[-3:, 0].mean():.3f}", *map(repr, written), sep="\n")

# %% [markdown]
# **4.** None. AdamW's first step moves each weight by the learning rate, so a twentieth of it moves
# the log-probs about a twentieth as far, and no ratio leaves the clip's range.

# %%
for rate in (cfg.learning_rate, cfg.learning_rate / 20):
    take_steps(1, replace(cfg, learning_rate=rate))
    ratio, _, _, held = pulls()
    print(f"answer 4: learning rate {rate:g}: the clip holds {int(held.sum())} of {len(ratio)} "
          f"tokens, ratios from {ratio.min():.2f} to {ratio.max():.2f}")

# %% [markdown]
# **5.** By less. As series in $d$, k3 is $d^2/2 + d^3/6 + \dots$, and k2 is its first term. The
# closer the policies, the smaller $d$, and the more of k3 is its first term. After three steps many
# $d$ are too large for that: the further terms count as much.

# %%
for count in (1, 3):
    take_steps(count, cfg)
    exact, found = over_draws()
    off = ", ".join(f"{name} by {abs(mean / exact - 1):.0%}" for name, (mean, *_) in found.items())
    print(f"answer 5: after {count} steps the exact KL is {exact:.4f}, and off are {off}")

# %% [markdown]
# **6.** Less than half of the rise. beta is a price for each nat of distance. At this one only the
# cheapest letters e are worth it, and the sentences mostly stay sentences.

# %%
curve, written = learn(replace(cfg, beta=1.0))
print(f"answer 6: beta 1.0: {ends_of(curve)}", *map(repr, written), sep="\n")

# %% [markdown]
# **7.** Words with the letter o, whatever they mean. The rule knows nothing of sentences, so the
# policy repeats the words that pay most. A word without an o may still be drawn: thousands of words
# are next to impossible each, but not all together.

# %%
setup.reward_funcs = {"reward": lambda prompts, completions, **more: [
    text.count("o") / max(1, len(text)) for text in completions]}
curve, written = learn(cfg)
print(f"answer 7: letter o: {ends_of(curve)}", *map(repr, written), sep="\n")
