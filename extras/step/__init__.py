"""
One iteration of a run, taken apart: every phase with its numbers, what it changed, red flags.

    python grpo.py config/toxicity.py --debug_step=True     # the first one
    python grpo.py out/toxicity --debug_step=True           # the one after the run's checkpoint

It shows the phases of an iteration, between two evaluations, and writes nothing to disk.
"""
import itertools
import math
import os

import torch

import grpo
from common.seeds import seed_for
from extras.step.influence import scored_step
from loss import Step, loss_of
from rollout import completion_logprobs
from run.checkpoint import load_checkpoint, newest_checkpoint
from run.evaluation import evaluate
from run.flags import problems, problems_of_evaluation
from run.metrics import batch_metrics, kl_grad_share, std


# ------------------------------------------------------------------------------------------------
# before the step


def print_setup(setup, cfg):
    """Print the models and settings of the step."""
    trained = sum(p.numel() for p in setup.trained)
    everything = sum(p.numel() for p in setup.policy.parameters())
    print(f"  policy: {everything:,} weights, {trained:,} of them trained, {setup.dtype} on "
          f"{setup.device}")
    if not cfg.beta:
        print("  reference: none, since beta = 0")
    elif cfg.hook("follow"):
        print(f"  reference: follows the policy every {cfg.ref_model_sync_steps} iterations")
    else:
        print("  reference: the policy before training, frozen")
    names = ("seed", "num_prompts", "num_generations", "max_completion_length", "temperature",
             "top_k", "top_p", "beta", "max_grad_norm", "num_iterations")
    print("  " + ", ".join(f"{name} {getattr(cfg, name):g}" for name in names)
          + f", learning rate {setup.optimizer.param_groups[0]['lr']:g}")


def measured(setup, cfg, done):
    """The measures of an evaluation after `done` iterations, and the rewards of its prompts."""
    measures, rewards, _ = evaluate(setup, setup.policy, cfg, done)
    return measures | {"prompt_rewards": rewards}


def print_measures(measures, before=None):
    """Print each measure, and its change from before."""
    for name, x in measures.items():
        if name != "prompt_rewards":
            change = f"  {x - before[name]:+.4f}" if before else ""
            print(f"  {name:28} {x:10.4f}{change}")


def trainer_of(row, setup, batch, cfg):
    """A row's log-probs (T,) in the loss, and the loss's gradient (T,) by them."""
    rows = torch.tensor([row], device=setup.device)
    step = Step(0, rows, len(batch.loss_mask), int(batch.loss_mask.sum()))
    loss = loss_of(setup, setup.policy, batch, rows, step, cfg)
    gradient, = torch.autograd.grad(loss.total, loss.logp)
    return loss.logp[0].detach(), gradient[0]


def sum_of(logp, row, batch):
    """Sum of a row's log-probs over the tokens that the policy chose, as text."""
    return f"{float(logp[row][batch.rollout.sampled_mask[row]].sum()):.3f}"


def print_completion(what, row, setup, batch):
    """Print a row's text and numbers."""
    of_reference = ""
    if batch.ref_logp is not None:
        of_reference = f", of the reference {sum_of(batch.ref_logp, row, batch)}"
    print(f"  {what}: row {row}, reward {batch.rewards[row]:.4f}, advantage "
          f"{batch.row_advantages[row]:+.4f}, log-prob {sum_of(batch.rollout.logp, row, batch)}"
          + of_reference)
    print(f"    {batch.prompts[row].text!r} -> {batch.completions[row]!r}")


def print_tokens(row, setup, batch, columns):
    """Print a line for each token of a row: whether it is under the loss, and its number in each
    column, {name: (T,) or None}."""
    columns = {name: x for name, x in columns.items() if x is not None}
    rollout = batch.rollout[row]
    ids = rollout.tokens[-len(rollout.completion_mask):][rollout.completion_mask].tolist()
    print(f"    {'token':20}{'loss':>4}" + "".join(f"{name:>11}" for name in columns))
    for t, token in enumerate(ids):
        numbers = "  environment"
        if rollout.sampled_mask[t]:
            numbers = "".join(f"{x[t]:11.4g}" for x in columns.values())
        loss = "yes" if batch.loss_mask[row, t] else "no"
        print(f"    {setup.tokenizer.decode([token])!r:20}{loss:>4}{numbers}")


def print_scores(batch, cfg):
    """Print mean and std of each reward function, its weight, and how often it abstains."""
    for name, weight, scores in zip(cfg.reward_funcs, cfg.reward_weights, batch.scores.T):
        abstains = float(scores.isnan().float().mean())
        print(f"  {name}: mean {scores.nanmean():.4f}, std {std(scores):.4f}, weight {weight:g}, "
              f"abstains for {abstains:.0%}")


def digits(x):
    return " ".join(f"{value:.4f}" for value in x.tolist())


def print_advantages(batch, cfg):
    """Print the rewards of each group, their divisor, and the advantages."""
    rewards = batch.rewards
    if cfg.kl_in_reward:
        rewards = rewards - cfg.beta * batch.kl.sum(1).cpu()
        print("  beta * KL is taken off these rewards, as in the advantages")
    if advantage := cfg.hook("advantage"):
        print(f"  {advantage.__name__}() gives the advantages; the divisors below are not used")
    G = cfg.num_generations
    for i, (r, A) in enumerate(zip(rewards.view(-1, G), batch.row_advantages.view(-1, G))):
        divisors = {"none": 1.0, "batch": std(rewards) + 1e-4, "group": std(r) + 1e-4}
        divisor = divisors.get(cfg.scale_rewards) or cfg.call("scale_rewards", r=r[None]).item()
        print(f"  group {i}: mean {r.nanmean():.4f}, divisor {divisor:.4f} "
              f"(scale_rewards = {cfg.scale_rewards!r})")
        print(f"    rewards    {digits(r)}\n    advantages {digits(A)}")


def print_values(striking, batch):
    """Print the critic's numbers for some rows, token by token."""
    print("  critic, by token: values recorded while sampling, returns, advantages")
    for what, row in striking.items():
        sampled = batch.rollout.sampled_mask[row]
        print(f"  {what}: row {row}")
        for name, x in (("values", batch.rollout.values), ("returns", batch.returns),
                        ("advantages", batch.advantages)):
            print(f"    {name:10} {digits(x[row][sampled])}")


def print_batch(phase, striking, setup, cfg, batch):
    """Print the phases of the rollout. striking: {why: row}, the rows to show in full."""
    phase(f"rollout: {cfg.num_prompts} prompts x {cfg.num_generations}; the log-probs of the best "
          "and of the worst completion, token by token")
    print("  sampler and trainer have the same weights, so their log-probs agree; gradient: the "
          "loss's by the\n  trainer's log-prob, below 0 where a step makes the token likelier")
    for what, row in striking.items():
        logp, gradient = trainer_of(row, setup, batch, cfg)                         # (T,)
        print_completion(what, row, setup, batch)
        print_tokens(row, setup, batch, {
            "sampler": batch.rollout.logp[row], "trainer": logp,
            "reference": None if batch.ref_logp is None else batch.ref_logp[row],
            "gradient": gradient})
    phase("rewards, by function")
    print_scores(batch, cfg)
    phase("advantages")
    if cfg.critic:
        print_values(striking, batch)
    else:
        print_advantages(batch, cfg)


# ------------------------------------------------------------------------------------------------
# the step


def watcher(setup, norms):
    """A `watch` for a Meter that records the last step in norms: {name: norm after clipping},
    and under "" the norm of all gradients before clipping."""
    def watch(step, grad_norm):
        norms[""] = float(grad_norm)
        for name, p in setup.policy.named_parameters():
            if p.grad is not None:
                norms[name] = float(p.grad.norm())

    return watch


def print_loss(m, cfg):
    """Print the parts of the loss, the KL's share of loss and gradient, and the ratio, which should
    be near 1 on the first pass."""
    kl = m.get("kl_loss", 0.0)
    policy = m["policy_loss"] - kl      # policy_loss is logged with the KL
    rest = m["loss"] - m["policy_loss"]
    print(f"  policy gradient {policy:.6f} + beta * KL {kl:.6f} + entropy and critic {rest:.6f} "
          f"= loss {m['loss']:.6f}")
    print("  means over all steps; at ratio 1 the policy gradient's loss is near 0, and its "
          "gradient is not")
    if cfg.kl_in_loss:
        of_loss = abs(kl) / (abs(policy) + abs(kl) + 1e-8)
        print(f"  the KL has {of_loss:.1%} of the loss; the norm of its gradient is "
              f"{m['kl_grad_share']:.3f} of the policy's (0 where policy and reference are the "
              "same)")
    difference = m["sampling/sampling_logp_difference/max"]
    spread = ", ".join(f"{x} {m.get(f'ratio_{x}', math.nan):.6f}" for x in ("std", "min", "max"))
    print(f"  ratio: mean {m.get('ratio', math.nan):.6f}, {spread} (1: these weights sampled); the "
          f"largest difference of log-probs is {difference:.1e}")


def print_influence(m, setup, batch, scored):
    """Print how many rows help, and the rows that help and harm most, token by token. scored: the
    first step, by scored_step."""
    print(f"  {100 * m['tracin/positive_ratio']:.0f} % of the rows are positive, "
          f"{100 * m['tracin/negative_ratio']:.0f} % negative, {100 * m['tracin/zero_ratio']:.0f} "
          f"% zero; {100 * m['tracin/selected_ratio']:.0f} % are kept")
    print(f"  influence: mean {m['tracin/mean_ip']:.3e}, std {m['tracin/std_ip']:.3e}, min "
          f"{m['tracin/min_ip']:.3e}, max {m['tracin/max_ip']:.3e}")
    print(f"  the target's two halves: cosine {m.get('tracin/target_cosine', math.nan):.2f} (0: "
          f"noise, 1: signal); {scored.self_share:.0%} of all influence is of rows on their own "
          "part of it")
    print("  check: a weighted sum of the scores, and the gradients, agree with plain backwards")
    for what, i in (("helps", scored.helps), ("harms", scored.harms)):
        print_completion(f"{what} most ({batch.influence[i]:+.2e})", i, setup, batch)
        print_tokens(i, setup, batch, {"influence": scored.words[i]})


def print_norms(norms, cfg):
    """Print the norms of the last step, weight by weight."""
    if not norms:
        print("  no step was taken")
        return
    before = norms.pop("")
    most = cfg.max_grad_norm or math.inf
    cut = max(1.0, before / most)
    for name, norm in norms.items():
        print(f"  {name:28} {norm * cut:.3e}  {norm:.3e}")
    print(f"  {'all':28} {before:.3e}  {before / cut:.3e}  (max_grad_norm = "
          f"{cfg.max_grad_norm:g}; of the last step)")


# ------------------------------------------------------------------------------------------------
# after the step


@torch.no_grad()
def print_moved(setup, cfg, batch, old, striking):
    """Print the change of the weights, and of the sampled tokens' log-probs."""
    changed = sum(not torch.equal(p, q) for p, q in zip(setup.trained, old))
    distance = math.hypot(*(float((p - q).norm()) for p, q in zip(setup.trained, old)))
    length = math.hypot(*(float(q.norm()) for q in old))
    print(f"  {changed} of {len(old)} trained tensors changed, by {distance / length:.1e} of their "
          "length")

    rows = torch.arange(len(batch.rewards), device=setup.device).split(cfg.micro_batch_size)
    with setup.autocast():
        logp = torch.cat([completion_logprobs(setup.policy, batch.rollout[i], cfg.temperature)
                          for i in rows])                                           # (N, T)
    mask = batch.loss_mask
    ratio = (logp - batch.rollout.logp)[mask].exp()
    print(f"  ratio of the tokens with loss: mean {ratio.mean():.6f}, std {std(ratio):.6f}, min "
          f"{ratio.min():.6f}, max {ratio.max():.6f}")
    if batch.ref_logp is not None:
        kls = []
        for x in (batch.rollout.logp, logp):
            d = (batch.ref_logp - x)[mask]
            kls.append(float((d.expm1() - d).mean()))
        print(f"  KL to the reference on these tokens (k3): {kls[0]:.6f} -> {kls[1]:.6f}")
        print("  below, the reference is computed again: its log-probs must equal those above")
    for what, row in striking.items():
        print(f"  {what} completion, row {row}, advantage {batch.row_advantages[row]:+.4f}: "
              f"log-prob {sum_of(batch.rollout.logp, row, batch)} -> {sum_of(logp, row, batch)}")
        reference = None
        if cfg.beta:
            reference = grpo.reference_logprobs(setup, batch.rollout[[row]], cfg)[0]    # (T,)
        print_tokens(row, setup, batch, {
            "sampler": batch.rollout.logp[row], "trainer": logp[row], "reference": reference})


def flags_of(m, before, after, batch, cfg):
    """Sentences: the red flags of the iteration and of the evaluations around it."""
    groups = batch.rewards.view(-1, cfg.num_generations)
    flags = [*problems(m, cfg, groups=groups), *problems_of_evaluation(before, after, cfg)]
    return [text for _, text in flags]


# ------------------------------------------------------------------------------------------------
# all phases


def start_of(argv, setup, cfg):
    """The iteration to take apart: 0, or if argv names the folder of a run, the one after its
    checkpoint. Load that checkpoint."""
    folders = [arg for arg in argv if os.path.isdir(arg)]
    if not folders:
        return 0
    return load_checkpoint(newest_checkpoint(folders[0]), setup, cfg)["iteration"]


def debug_step(argv, setup, cfg):
    """Take an iteration apart, phase by phase. argv: as for start_of."""
    it = start_of(argv, setup, cfg)
    grpo.set_learning_rate(setup.optimizer, it, cfg)
    batch = grpo.collect_iteration(setup, it, cfg)
    held_out = grpo.collect_held_out(setup, it, cfg)
    count = itertools.count(1)

    def phase(title):
        print(f"\n--- {next(count)}. {title}")

    phase(f"set-up of iteration {it + 1}")
    print_setup(setup, cfg)
    phase(f"evaluation before: {len(setup.eval_prompts)} prompts x {cfg.num_eval_generations}")
    before = measured(setup, cfg, it)
    print_measures(before)

    # the rollouts, their rewards and advantages
    striking = {"best": int(batch.rewards.nan_to_num(-math.inf).argmax()),
                "worst": int(batch.rewards.nan_to_num(math.inf).argmin())}
    print_batch(phase, striking, setup, cfg, batch)

    # the update, and its effect
    seed = seed_for(cfg.seed, "rows", it)
    old = [p.detach().clone() for p in setup.trained]
    norms = {}
    scored = scored_step(setup, batch, held_out, cfg, seed) if cfg.tracin != "off" else None
    m = kl_grad_share(setup, batch, grpo.optimizer_steps(batch, cfg, seed), cfg) | grpo.update(
        setup, batch, held_out, cfg, seed,
        grpo.Meter(setup, cfg, check=True, watch=watcher(setup, norms)))
    phase("loss")
    print_loss(m, cfg)
    if "tracin/selected_ratio" in m:    # influence has scored a step
        phase(f"influence on {cfg.tracin}: what a small step on a row does for the target")
        print_influence(m, setup, batch, scored)
    phase("gradient norms before and after clipping")
    print_norms(norms, cfg)
    phase("moved: what the update changed")
    print_moved(setup, cfg, batch, old, striking)
    phase("evaluation after: the same prompts and random numbers")
    after = measured(setup, cfg, it + 1)
    print_measures(after, before)

    phase("red flags")
    m |= batch_metrics(batch, cfg) | {"iteration": it + 1}
    for flag in flags_of(m, before, after, batch, cfg) or ["none"]:
        print("  " + flag)
