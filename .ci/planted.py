"""
A test of the tests: plants mistakes one at a time in a copy of the project, and says which test
catches each.

    python .ci/planted.py                     # all of them, about 15 minutes
    python .ci/planted.py "KL sign" clip      # those whose name holds one of these texts
    python .ci/planted.py ": gone"            # what the notes ask for: tests/test_notes.py
    python .ci/planted.py "(TRL"              # the rows of docs/trl.md, undone
    python .ci/planted.py --list              # finds the lines of all of them, and runs nothing

A mistake whose line has changed is skipped, by name. Exit code 1: the test that is named beside a
mistake passes with it; with --list, a mistake has no line or no test.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mistake(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    test: str       # that must catch it: "file.py::test"


def of(file, test, *rows):
    """Mistakes (name, old, new) in a file, all caught by one test."""
    return [Mistake(name, file, old, new, test) for name, old, new in rows]


MISTAKES = [
    # test_nano.py
    *of("nano.py", "test_nano.py::test_a_page_gives_the_digits_of_the_program[nano.py-1]",
        ("page: advantage sign", "A = (r - r.nanmean(1, keepdim=True))",
         "A = (r.nanmean(1, keepdim=True) - r)"),
        ("page: KL without its ratio", "kl = ratio * (d.expm1() - d)", "kl = d.expm1() - d"),
        ("page: mask one token off", "    mask = rollout.sampled_mask  ",
         "    mask = rollout.sampled_mask & (torch.arange(rollout.logp.shape[1]) > 0)  ")),
    *of("grpo.py", "test_nano.py::test_a_page_gives_the_digits_of_the_program[nano.py-1]",
        ("program: advantage sign", "advantages = r - r.nanmean(1, keepdim=True)",
         "advantages = r.nanmean(1, keepdim=True) - r"),
        ("program: mask one token off", "    loss_mask = rollout.sampled_mask\n",
         "    loss_mask = rollout.sampled_mask & (torch.arange(rollout.logp.shape[1]) > 0)\n")),
    *of("loss.py", "test_nano.py::test_a_page_gives_the_digits_of_the_program[nano.py-1]",
        ("program: KL without its ratio", "return kl * ratio", "return kl")),
    *of("nano_tracin.py",
        "test_nano.py::test_a_page_gives_the_digits_of_the_program[nano_tracin.py-1]",
        ("page: influence sign", "helps = influence > 0", "helps = influence < 0"),
        ("page: target without a mean", "value = (rewards - known.mean())",
         "value = rewards")),
    # test_algorithm.py
    *of("grpo.py",
        "test_algorithm.py::test_the_advantage_is_the_reward_less_the_mean_of_its_group",
        ("advantage sign", "advantages = r - r.nanmean(1, keepdim=True)",
         "advantages = r.nanmean(1, keepdim=True) - r"),
        ("groups of other prompts", "r = rewards.view(-1, num_generations)  ",
         "r = rewards.view(num_generations, -1).T  "),
        ("no baseline", "advantages = r - r.nanmean(1, keepdim=True)", "advantages = r / 100"),
        ("baseline of the batch", "advantages = r - r.nanmean(1, keepdim=True)",
         "advantages = r - r.nanmean()"),
        ("std with n", "(squares / (n - 1).clamp(min=1)).sqrt()",
         "(squares / n.clamp(min=1)).sqrt()"),
        ("std over the prompts", "nanstd(r if",
         "r.std(0) if scale_rewards != 'batch' else nanstd(r if"),
        ("std of the batch", "nanstd(r if", "nanstd(rewards if")),
    *of("run/sampling.py",
        "test_algorithm.py::test_each_completion_is_compared_with_those_of_its_own_prompt",
        ("scored for another prompt", "for prompt in prompts for _ in range(cfg.num_generations)]",
         "for _ in range(cfg.num_generations) for prompt in prompts]")),
    *of("run/sampling.py",
        "test_algorithm.py::test_each_log_prob_is_of_its_token_given_the_tokens_before_it",
        ("sampling temperature forgotten", "**cfg.sampling)",
         '**cfg.sampling | {"temperature": 1.0})')),
    *of("model.py",
        "test_algorithm.py::test_each_log_prob_is_of_its_token_given_the_tokens_before_it",
        ("padding counts as a position", "(attention_mask.cumsum(1) - 1).clamp(min=0)[:, column]",
         "column.expand(B, T)"),
        ("later tokens are seen", "mask = mask & (key <= query)",
         "mask = mask & (key <= query + 1)")),
    *of("rollout.py",
        "test_algorithm.py::test_each_log_prob_is_of_its_token_given_the_tokens_before_it",
        ("log-probs shifted by one", "input_mask)[:, -T:]  ", "input_mask)[:, -T - 1:-1]  "),
        ("trainer forgets the temperature", "logits = logits / temperature", "pass"),
        ("cache of another row", "        cache.keep(order)",
         "        cache.keep(order.sort().values)")),
    *of("loss.py", "test_algorithm.py::test_divisors_by_hand",
        ("loss sign", "aggregate(-objective * b", "aggregate(objective * b"),
        ("dapo divides by the micro-batch", "num_tokens=step.num_tokens", "num_tokens=mask.sum()"),
        ("dapo divides by rows", "num_tokens=step.num_tokens", "num_tokens=step.num_rows"),
        ("dapo divides by positions", "x.sum() / max(num_tokens, 1)", "x.mean()")),
    *of("tracin.py", "test_hooks.py::test_influence_is_right_for_a_loss_that_weighs_tokens",
        ("a loss of one's own as one log-prob", '"one_slope", False', '"one_slope", True'),
        ("a ratio of one's own as one log-prob", '"divide", "importance")]', '"divide")]')),
    *of("run/meter.py", "test_hooks.py::test_importance_returns_a_logarithm",
        ("a ratio for its logarithm", "check_importance(spread_of", "(spread_of")),
    *of("run/run.py", "test_after.py::test_after_ends_a_run_early",
        ("a run that ends early is not saved", "last = done >= cfg", "last = done == cfg")),
    *of("run/settings.py", "test_hooks.py::test_policy_tokens_pick_the_tokens_with_a_gradient",
        ("a config file's policy_tokens do nothing", '"policy_tokens", "importance"', '"importance"')),
    *of("run/settings.py", "test_hooks.py::test_importance_makes_the_ratio",
        ("a config file's importance does nothing", '"policy_tokens", "importance"',
         '"policy_tokens"')),
    *of("run/metrics.py", "test_hooks.py::test_a_loss_of_ones_own_is_counted_as_it_says",
        ("a loss of one's own is not counted", 'clipped_objective, "clipped", lambda: {})',
         'clipped_objective, "clip", lambda: {})')),
    *of("extras/variants/loss_type/grpo.py", "test_algorithm.py::test_divisors_by_hand",
        ("grpo divides by the width", "(x.sum(1) / row_tokens).sum()",
         "(x.sum(1) / x.shape[1]).sum()")),
    *of("extras/variants/loss_type/dr_grpo.py", "test_algorithm.py::test_divisors_by_hand",
        ("dr_grpo divides by the width", "x.sum() / (num_rows * cfg.max_completion_length)",
         "x.sum() / (num_rows * x.shape[1])")),
    *of("extras/variants/loss_type/bnpo.py",
        "test_step.py::test_passes_mini_batches_and_micro_batches",
        ("bnpo does not say that micro-batches matter", "divide.by_micro_batch = True",
         "divide.by_micro_batch = False")),
    *of("loss.py", "test_algorithm.py::test_the_clip_acts_on_the_right_side",
        ("clip takes the larger", "return torch.min(ratio * A,", "return torch.max(ratio * A,"),
        ("clip without its bounds", "ratio.clamp(low, high) * A)", "ratio * A)"),
        ("ratio upside down", "log_ratio = logp - old_logp", "log_ratio = old_logp - logp")),
    *of("loss.py", "test_algorithm.py::test_the_ratio_compares_with_the_policy_that_sampled",
        ("old log-probs of now (TRL 1)", "log_ratio = logp - old_logp",
         "log_ratio = logp - logp.detach()")),
    *of("grpo.py",
        "test_algorithm.py::test_a_completion_is_its_tokens_up_to_and_with_the_end_token",
        ("loss on padding", "loss_mask = rollout.sampled_mask\n",
         "loss_mask = torch.ones_like(rollout.sampled_mask)\n"),
        ("end token without loss", "loss_mask = rollout.sampled_mask\n",
         "loss_mask = rollout.sampled_mask & rollout.sampled_mask.roll(-1, 1)\n")),
    *of("rollout.py",
        "test_algorithm.py::test_a_completion_is_its_tokens_up_to_and_with_the_end_token",
        ("end token out of the mask", "self.completion_mask[rows, t] = running",
         "self.completion_mask[rows, t] = running & (token != ends[0])")),
    *of("extras/variants/top_entropy_quantile.py",
        "test_algorithm.py::test_the_entropy_quantile_keeps_the_least_certain_tokens",
        ("least entropy kept", "mask & (entropy >= entropies", "mask & (entropy <= entropies")),
    *of("loss.py", "test_algorithm.py::test_the_kl_by_hand",
        ("KL the wrong way", "d=ref_logp - logp", "d=logp - ref_logp"),
        ("KL sign", "return torch.expm1(bounded(d)) - d", "return d - torch.expm1(bounded(d))")),
    *of("loss.py",
        "test_algorithm.py::test_a_large_beta_pulls_the_policy_back_to_the_reference",
        ("KL taken off the loss", "return self.policy + self.rest",
         "return self.policy - self.rest"),
        ("KL left out", "loss.kl = cfg.beta * aggregate(", "loss.kl = 0 * aggregate(")),
    *of("grpo.py",
        "test_algorithm.py::test_a_large_beta_pulls_the_policy_back_to_the_reference",
        ("reference is the policy", "setup.fast(setup.reference), ",
         "setup.fast(setup.policy), ")),
    *of("grpo.py",
        "test_algorithm.py::test_a_completion_that_the_reference_finds_unlikely_is_worth_less",
        ("KL added to the reward", "rewards - cfg.beta * batch.kl.sum",
         "rewards + cfg.beta * batch.kl.sum"),
        ("KL of a row's mean in the reward", "batch.kl.sum(1)", "batch.kl.mean(1)")),
    *of("grpo.py", "test_algorithm.py::test_the_reference_scores_at_the_sampling_temperature",
        ("reference of other rows", "    all_reduce([ref_logp])",
         "    ref_logp = ref_logp.roll(1, 0)"),
        ("reference at temperature 1", "setup.fast(setup.reference), rollout[rows], cfg.temperature)",
         "setup.fast(setup.reference), rollout[rows])")),
    *of("model.py", "test_algorithm.py::test_padding_is_not_read",
        ("padding is seen", "mask = attention_mask[:, None, :]  ",
         "mask = torch.ones_like(attention_mask)[:, None, :]  ")),
    *of("rollout.py", "test_algorithm.py::test_the_ratio_is_1_on_the_first_pass",
        ("trainer forgets truncation",
         "            logits = logits.masked_fill(~allowed, -math.inf)\n        return function",
         "            pass\n        return function")),
    *of("rollout.py", "test_algorithm.py::test_top_p_keeps_the_token_that_crosses_the_line",
        ("top-p off by one token", "probs.cumsum(-1) - probs >= sampling.top_p",
         "probs.cumsum(-1) >= sampling.top_p")),

    # docs/trl.md: a departure is undone
    *of("rollout.py",
        "test_rollout.py::test_what_is_recorded_is_the_distribution_that_was_drawn_from",
        ("log-probs over all tokens (TRL 2)", "        logits = truncate(logits, sampling)\n"
         "        r.allowed[rows, t] = logits > -math.inf\n",
         "        logits = truncate(logits, sampling)\n")),
    *of("extras/variants/top_entropy_quantile.py",
        "test_step.py::test_the_size_of_micro_batches_changes_memory_only",
        ("the quantile of a micro-batch (TRL 3)",
         "return most_entropy(entropy, batch.loss_mask & in_step, cfg)",
         "return sum(most_entropy(entropy, batch.loss_mask & torch.zeros_like(in_step).index_fill("
         "0, piece, True), cfg) for piece in micro_batches(batch.rollout, rows, cfg)).bool()")),
    *of("grpo.py", "test_step.py::test_passes_mini_batches_and_micro_batches",
        ("the tokens of the batch divide (TRL 4)",
         "num_tokens = int(batch.loss_mask[mini].sum())",
         "num_tokens = int(batch.loss_mask.sum())")),
    *of("grpo.py", "test_trl.py::test_equal_rewards_give_advantages_of_exactly_0",
        ("rounding as an advantage (TRL 5)",
         "teaches_nothing = r.isnan() | all_equal(r)[:, None]", "teaches_nothing = r.isnan()")),
    *of("run/metrics.py",
        "test_metrics.py::test_an_update_sums_over_micro_batches_and_means_over_steps",
        ("means of micro-batches (TRL 7)",
         'metrics["kl"] = ((loss.kl_by_token * mask).sum(), mask.sum())',
         'metrics["kl"] = ((loss.kl_by_token * mask).sum() / mask.sum(), 1)')),
    *of("run/metrics.py",
        "test_trl.py::test_groups_are_counted_whatever_the_advantages_are_divided_by",
        ("the batch as one group (TRL 8)",
         "equal = everything.equal_rows(cfg.num_generations)\n",
         'equal = everything.equal_rows(len(everything.rewards) if cfg.scale_rewards == "batch" '
         "else cfg.num_generations)\n")),
    *of("run/optimizer.py", "test_step.py::test_learning_rates",
        ("a first step of rate 0 (TRL 9)", "(it + 1) / cfg.warmup_iters",
         "it / cfg.warmup_iters")),
    *of("grpo.py", "test_trl.py::test_a_rate_is_that_of_its_iteration_whatever_steps_it_takes",
        ("the rate by step (TRL 10)", "        setup.optimizer.step()\n",
         "        setup.optimizer.step()\n"
         "        set_learning_rate(setup.optimizer, i + 1, cfg)\n")),
    *of("grpo.py", "test_trl.py::test_the_reference_follows_by_iterations_and_not_by_steps",
        ("the reference by step (TRL 11)", "done=it + 1,",
         "done=(it + 1) * cfg.num_iterations,")),
    *of("grpo.py", "test_trl.py::test_a_mini_batch_without_loss_is_no_step",
        ("a step without loss (TRL 12)", "if num_tokens > 0 and len(mini) > 0:",
         "if len(mini) > 0:")),
    *of("loss.py", "test_trl.py::test_the_entropy_bonus_is_of_all_tokens_whatever_the_quantile",
        ("the bonus of the quantile (TRL 13)", "entropies.masked_fill(~b.loss_mask, 0)",
         "entropies.masked_fill(~b.policy_mask, 0)")),
    *of("judge/rewards.py",
        "test_loss.py::test_an_abstention_counts_as_the_functions_mean_over_the_group",
        ("None counts as 0 (TRL 14)",
         "filled = groups.where(~groups.isnan(), groups.nanmean(1, keepdim=True))",
         "filled = groups.nan_to_num(0.0)")),
    *of("judge/rewards.py",
        "test_trl.py::test_a_group_with_one_score_counts_as_one_of_equal_rewards",
        ("one score differs (TRL 17)", "return (spread <= 1e-9 * size) | (spread <= rounding)",
         "return ((spread <= 1e-9 * size) | (spread <= rounding)) "
         "& ((~groups.isnan()).sum(1) > 1)")),
    *of("judge/rewards.py", "test_trl.py::test_rewards_are_equal_beside_their_size",
        ("equal up to 1e-8 (TRL 18)", "return (spread <= 1e-9 * size) | (spread <= rounding)",
         "return (spread <= 1e-8) | (spread <= rounding)")),
    *of("run/metrics.py", "test_metrics.py::test_metrics_of_the_loss",
        ("completions without loss in the clip (TRL 19)",
         "mask if loss.ratio.shape == mask.shape else mask.any(1, keepdim=True)",
         "mask if loss.ratio.shape == mask.shape else mask.any(1, keepdim=True) | True")),
    *of("extras/hub/chat.py", "test_chat.py::test_an_answer_that_has_begun_goes_on",
        ("an answer begun anew (TRL 20)", "    if goes_on:\n        text = text_until_mark",
         "    if False:\n        text = text_until_mark")),
    *of("extras/critic/__init__.py",
        "test_critic.py::test_the_loss_is_that_of_the_policy_plus_that_of_the_values",
        ("the values divided by their tokens (TRL's PPO)",
         "cfg.value_coef * aggregate(errors, b.loss_mask, step, cfg)",
         "cfg.value_coef * errors.sum() / b.loss_mask.sum()")),
    *of("extras/critic/__init__.py",
        "test_critic.py::test_rewards_are_centered_and_stand_at_the_last_sampled_token",
        ("no mean is subtracted (TRL's PPO)",
         "rewards = (rewards - rewards.nanmean()).to(values)", "rewards = rewards.to(values)"),
        ("the reward at the first token (TRL's PPO)",
         "(sampled.cumsum(1) == sampled.sum(1, keepdim=True))", "(sampled.cumsum(1) == 1)")),
    *of("rollout.py", "test_critic.py::test_recorded_values_are_those_of_a_forward_pass",
        ("values that nobody recorded (TRL's PPO)",
         "None if r.values is None else model.value_head(h)",
         "None if r.values is None else 0 * model.value_head(h)")),
    *of("extras/critic/__init__.py",
        "test_trl.py::test_the_values_share_the_policys_forward_pass",
        ("a value head of its own (TRL's PPO)", "policy.value_head(states.h)",
         "policy.value_head(states.h.detach())")),
    *of("extras/critic/settings.py", "test_trl.py::test_the_critic_starts_without_a_clip",
        ("a clip of values (TRL's PPO)", "value_clip: Above0 | None = None",
         "value_clip: Above0 | None = 0.2")),

    *of("grpo.py", "test_step.py::test_passes_mini_batches_and_micro_batches",
        ("the first pass's mini-batches again (TRL 21)",
         "manual_seed(seed_for(seed, epoch))\n            rows = rows[torch",
         "manual_seed(seed_for(seed, 0))\n            rows = rows.sort().values[torch")),

    # test_step.py
    *of("grpo.py",
        "test_step.py::test_equal_rewards_teach_nothing_while_the_policy_is_the_reference",
        ("rounding as a KL", "if cfg.kl_in_reward and not is_reference(setup):",
         "if cfg.kl_in_reward:")),
    *of("grpo.py", "test_step.py::test_the_second_step_is_clipped_and_begins_with_no_gradient",
        ("gradients kept after a step", "        setup.optimizer.zero_grad(set_to_none=True)\n",
         "")),
    *of("grpo.py", "test_step.py::test_passes_mini_batches_and_micro_batches",
        ("tokens counted with padding", "num_tokens = int(batch.loss_mask[mini].sum())",
         "num_tokens = batch.loss_mask[mini].numel()"),
        ("the first mini-batch again and again",
         "for mini in rows.split(cfg.mini_batch_size or N):",
         "for mini in rows.split(cfg.mini_batch_size or N)[:1]:")),
    *of("extras/variants/ref_model_sync_steps.py",
        "test_reference.py::test_the_reference_follows_the_policy",
        ("reference follows backwards", "r.lerp_(p, alpha)", "r.lerp_(p, 1 - alpha)"),
        ("a sync that does nothing", "        r.lerp_(p, alpha)", "        r.lerp_(p, 0 * alpha)")),
    *of("extras/variants/top_entropy_quantile.py",
        "test_step.py::test_the_entropy_quantile_is_of_each_step_as_the_policy_is_then",
        ("entropies of the sampler in every step", "    if not fresh or batch.is_replayed:\n", "    if False:\n")),
    *of("grpo.py", "test_step.py::test_truncated_completions_carry_no_loss",
        ("truncated completions learned from", "loss_mask & rollout.ended[:, None]", "loss_mask")),
    *of("loss.py", "test_step.py::test_the_entropy_bonus_is_the_mean_over_tokens_with_loss",
        ("entropy bonus is a fine", "loss.entropy = -cfg", "loss.entropy = cfg")),
    *of("run/optimizer.py", "test_step.py::test_matrices_decay_and_no_bias_or_gain_does",
        ("biases decay (TRL)", '{"params": vectors, "weight_decay": 0.0}',
         '{"params": vectors, "weight_decay": cfg.weight_decay}')),

    # test_loss.py
    *of("judge/rewards.py", "test_loss.py::test_a_function_of_weight_0_changes_nothing",
        ("a watched reward counts",
         "return scores[:, weights != 0].double(), weights[weights != 0]",
         "return scores.double(), weights")),
    *of("judge/rewards.py",
        "test_loss.py::test_sums_that_are_equal_but_for_rounding_teach_nothing",
        ("sums that differ by rounding", "(spread <= 1e-9 * size) | (spread <= rounding)",
         "spread <= 0")),
    *of("loss.py", "test_loss.py::test_the_loss_against_plain_python",
        ("KL corrected by the row's ratio (TRL 15)", "times_ratio, kl=kl, ratio=token_ratio",
         "times_ratio, kl=kl, ratio=ratio")),
    *of("loss.py", "test_loss.py::test_the_kl_is_the_kl_over_all_completions_of_a_table",
        ("KL logged as of the sampler (TRL 6)", "loss.kl_by_token = times_ratio(kl, token_ratio)",
         "loss.kl_by_token = kl")),
    *of("loss.py", "test_loss.py::test_nothing_reads_what_stands_under_the_mask",
        ("mask forgotten in the sum", "x=x * mask,", "x=x * torch.ones_like(mask),")),
    *of("loss.py", "test_loss.py::test_no_log_ratio_overflows",
        ("ratios without a bound (TRL 16)", "token_ratio = bounded(log_ratio).exp()",
         "token_ratio = log_ratio.exp()")),

    # test_metrics.py
    *of("extras/variants/settings.py",
        "test_advantages.py::test_rewards_are_combined_as_the_setting_says",
        ("rewards are always summed first", 'hooks["advantage"] = ', "_ = ")),
    *of("run/meter.py", "test_metrics.py::test_metrics_of_the_loss",
        ("spread of the ratio without its mean", "(squares - total ** 2 / count)", "squares")),
    *of("run/meter.py",
        "test_metrics.py::test_the_spread_of_the_ratio_leaves_out_what_has_no_loss",
        ("least ratio of what is masked", "x.masked_fill(~mask, math.inf).min()",
         "x.min()")),
    *of("run/metrics.py", "test_metrics.py::test_metrics_of_a_target",
        ("the target's loss is not by rollout", ".sum(1)[rows] * len(rows)", ".sum(1)[rows]")),
    *of("run/metrics.py", "test_metrics.py::test_metrics_of_a_batch",
        ("twins of another group", "group = completions[i:i + num_generations]",
         "group = completions"),
        ("means of advantages across groups", "view(-1, cfg.num_generations).mean(1)  ",
         "view(cfg.num_generations, -1).mean(0)  ")),
    *of("run/metrics.py", "test_metrics.py::test_sampled_tokens_without_loss_are_counted[True]",
        ("the entropy of what carries no loss", "    if cfg.mask_truncated_completions:\n",
         "    if False:\n")),
    *of("run/metrics.py", "test_metrics.py::test_the_kls_share_of_the_gradient",
        ("the KL's gradient beside itself", "(loss.policy, policy, True)",
         "(loss.kl, policy, True)")),

    # test_evaluation.py
    *of("run/settings.py",
        "test_evaluation.py::test_rules_of_sampling_are_those_of_training_alone",
        ("a rule of sampling leaks into the evaluation",
         "**Sampling._field_defaults | {\"temperature\": temperature})",
         "top_k=0, top_p=1.0, temperature=temperature)")),

    # test_rollout.py
    *of("rollout.py", "test_rollout.py::test_no_way_of_decoding_changes_a_rollout",
        ("noise of another row", "noise[rows, t], sampling)", "noise[rows.roll(1), t], sampling)")),
    *of("fast.py",
        "test_own_model.py::test_a_step_and_its_influence_are_those_of_each_completion_alone",
        ("no token in a log-prob's gradient", "slopes.scatter_add_(1, targets, grad)", "slopes")),
    *of("rollout.py", "test_rollout.py::test_forced_tokens_stand_where_they_were_put",
        ("an environment's end token ends a row", "|= sampled & (token == end)",
         "|= self.tokens[rows, column] == end")),

    # test_tape.py
    *of("tape.py", "test_tape.py::test_a_tape_is_one_backward_per_row",
        ("tokens of other rows in the product", "total.addmm_(b.T, a)",
         "total.addmm_(b.T, a.roll(1, 0))"),
        ("tokens of other rows in the score", "F.linear(a, target).mul_(b)",
         "F.linear(a, target).mul_(b.roll(1, 0))"),
        ("embeddings forgotten", "x = F.embedding(b, target).mul_(a)", "x = 0 * a"),
        ("tokens that are needed are left out", ".any(1)", ".sum(1).relu()"),
        ("last use of a layer",
         "self.records[p].append(record)",
         "self.records[p][:] = [r for r in self.records[p] if r.b.dim() != record.b.dim() "
         "or r.owners.max() < record.owners.min()] + [record]"),
        ("last micro-batch",
         "self.records[p].append(record)",
         "self.records[p][:] = [r for r in self.records[p] if r.b.dim() != record.b.dim()] "
         "+ [record]"),
        ("last micro-batch of a vector", "if p not in self.by_row:\n", "if True:\n"),
        ("no bias in the score", "scores += (g @", "scores += 0 * (g @"),
        ("b of another row", "layer.kind(self.module, self.inputs, b)",
         "layer.kind(self.module, self.inputs, b.roll(1, 0))"),
        ("any layer: b of another row", "each_alone(self.module, name, self.inputs, b)",
         "each_alone(self.module, name, self.inputs, b.roll(1, 0))"),
        ("any layer: a parameter of two names counts twice", "tie_weights=False", "tie_weights=True"),
        ("any layer: it is compared with what became of it", "out.detach().clone()",
         "out.detach()"),
        ("positions of all rows: of another token", "x = x.repeat(k, 1)",
         "x = x.roll(1, 1).repeat(k, 1)"),
        ("any layer: half of it", "index_add_(0, owners, part)", "index_add_(0, owners, part * 0.5)"),
        ("a not normalised",
         "b * normalise(x.to(wide(b.dtype)), module.normalized_shape, eps=module.eps)",
         "b * x"),
        ("own part not scaled", "g * scale[p] if p in scale else g", "g"),
        ("norms of the first rows alone", "for start in range(0, len(rows), k):",
         "for start in [0]:"),
        ("rows are not weighed", "(a * w).to(a.dtype)", "a"),
        ("an id that pads gets a gradient", "if padding is not None:", "if False:"),
        ("flattened tokens begin anew with every piece", "self.given[module] += len(x)", "pass")),
    *of("tape.py", "test_tape.py::test_the_calls_for_a_row_do_not_grow_with_the_micro_batches",
        ("records of all micro-batches are gone through", "if len(own) > 0:", "if True:")),
    *of("tape.py", "test_tape.py::test_bfloat16_rounds_no_weight_and_halves_the_largest_record",
        ("a head is kept in float32", "*part, None if self.summing else dtype)", "*part, None)"),
        ("a weight is rounded to bfloat16", "(a * w).to(a.dtype)",
         "a * w.to(a.dtype)")),
    *of("tape.py", "test_tape.py::test_what_it_cannot_see_is_named",
        ("a second backward counts twice", "self.inputs = self.out = None", "pass")),
    *of("tape.py", "test_tape.py::test_a_layer_that_does_not_go_by_row_is_named",
        ("a layer that mixes rows", "                if gap > 0.02:", "                if False:")),
    *of("tape.py",
        "test_tape.py::test_a_matrix_that_looks_like_rows_is_named_wherever_it_comes",
        ("any layer: the first call alone is compared", "(self.layer.name, self.shape) not in tape.gaps",
         "not tape.gaps")),
    *of("tape.py", "test_tape.py::test_a_second_forward_needs_rows_of_its_own",
        ("rows() is forgotten", "tape.done = True", "pass")),
    *of("tape.py", "test_tape.py::test_a_tape_that_saw_nothing_does_not_answer_0",
        ("a copy of the model was called", "            self.check_recorded()", "            pass")),
    *of("tape.py", "test_tape.py::test_a_layer_frozen_before_the_block_is_named",
        ("frozen before the block", "        self.check_trained()\n        self.handles",
         "        self.handles")),

    # test_influence.py
    *of("common/hooks.py", "test_influence.py::test_what_weigh_does_to_its_batch_stays_there",
        ("weigh takes columns away from a prompt",
         "[copy.deepcopy(prompt) for prompt in batch.prompts]", "batch.prompts")),
    *of("run/settings.py", "test_influence.py::"
        "test_the_reference_scores_held_out_rollouts_for_who_looks_at_it",
        ("held-out rewards without their KL", "if self.kl_in_loss and not", "if not"),
        ("a function gets no reference of held-out rollouts",
         ' and not may_look:', ":")),
    *of("extras/variants/tracin_target_ema.py",
        "test_influence.py::test_the_target_is_averaged_over_steps",
        ("an average of targets never starts again", "< -0.3:", "< -2:")),
    *of("tracin.py",
        "test_influence.py::test_the_first_step_is_checked_against_ordinary_backwards",
        ("swapped scores pass the check", "weights = torch.linspace(1, 2, len(scores.raw), device",
         "weights = torch.ones(len(scores.raw), device")),
    *of("extras/variants/tracin_val_select.py",
        "test_targets.py::test_which_held_out_rollouts_are_the_target",
        ("balanced is the best", '"balanced": size // 2', '"balanced": 0')),
    *of("tracin.py", "test_influence.py::test_a_target_function_is_given_the_held_out_rollouts",
        ("a function gets all held-out rollouts", "batch.subset(rows) if held_out else batch)",
         "batch)")),
    *of("tracin.py", "test_influence.py::test_influence_and_step_against_one_backward_per_row",
        ("influence of the wrong sign", "self.policy_coef * products)",
         "-self.policy_coef * products)")),
    *of("extras/variants/tracin_leave_one_out.py",
        "test_influence.py::test_leave_one_out_and_self_share",
        ("own part left in", "return raw - own.to(raw)", "return raw")),
    *of("tracin.py", "test_influence.py::test_influence_and_step_against_one_backward_per_row",
        ("rest of the loss dropped", "tape.backward_summed(loss.rest)",
         "tape.backward_summed(0 * loss.rest)")),
    *of("tracin.py", "test_influence.py::test_coefficients_of_targets",
        ("target of bad rewards", "value = (r - r.mean()) / ", "value = (r.mean() - r) / ")),

    *of("run/run.py", "test_inputs.py::"
        "test_an_optimizer_that_no_checkpoint_can_hold_ends_the_run_after_its_first_step",
        ("an optimizer that no checkpoint can hold trains on", "check_state(self.setup.optimizer)",
         "pass")),
    # test_evaluation.py
    *of("run/evaluation.py",
        "test_evaluation.py::test_the_policy_before_training_knows_its_own_log_probs",
        ("a perplexity of what was drawn in bfloat16",
         "return same and setup.dtype == torch.float32", "return same")),
    # test_make.py
    *of("extras/make/judges.py", "test_make.py::test_length_batches_hold_every_row_once",
        ("a judge learns from all batches but the last of a pool",
         "range(0, len(pool), size)]", "range(0, len(pool) - size, size)]")),
    *of("extras/make/policy.py",
        "test_make.py::test_windows_begin_where_a_text_does_or_anywhere",
        ("windows begin with the end of a text", "ends + 1])", "ends])")),
    # test_judge.py
    # test_judge.py
    *of("judge/rewards.py",
        "test_judge.py::test_a_reward_may_reorder_what_it_is_given_and_go_to_another_folder",
        ("a reward leaves for another folder", "    with contextlib.chdir(\".\"):",
         "    with contextlib.nullcontext():")),
    *of("common/files.py",
        "test_runs.py::test_a_damaged_run_is_refused_and_kept[a flipped bit]",
        ("a check sum is not looked at", "is_damaged(place):", "False:")),
    *of("common/signals.py", "test_files.py::test_a_lost_connection_does_not_end_what_prints_to_it",
        ("a lost connection ends a run", "if not os.isatty(fd):", "if False:")),
    *of("run/optimizer.py", "test_hooks.py::test_moments_of_other_weights_are_refused",
        ("moments of other weights", "        if is_torchs:", "        if False:")),
    # test_model.py
    *of("model.py", "test_model.py::test_weights_start_as_in_gpt2",
        ("deep models start as shallow ones", "std=0.02 / math.sqrt(depth)", "std=0.02")),
    # test_hub.py, test_roberta.py
    *of("extras/hub/tokenizer.py",
        "test_hub.py::test_tokens_that_have_a_name_alone_are_numbered_in_order",
        ("hub: named tokens in another order",
         "for token in (*names.values(), *extra_tokens(config))",
         "for token in (*extra_tokens(config), *names.values())")),
    *of("extras/hub/tokenizer.py", "test_hub.py::"
        "test_an_added_word_is_one_token_in_every_text_and_an_id_that_is_taken_is_refused",
        ("hub: an added word is cut in texts", "normalized=not special, special=special)",
         "normalized=not special, special=True)"),
        ("hub: an id that is taken", "        if core.token_to_id(token) != i:",
         "        if False:")),
    *of("extras/hub/files.py",
        "test_hub.py::test_a_tensor_is_read_from_the_shard_that_the_index_names",
        ("hub: an older tensor of another shard",
         "{name: shards[file][name] for name, file in place.items()}",
         "{name: x for held in shards.values() for name, x in held.items()}")),
    *of("extras/hub/roberta.py", "test_roberta.py::test_what_is_no_classifier_is_one_line",
        ("hub: the first of two labels that mean toxic", "if len(fitting) != 1:",
         "if not fitting:")),
    # test_compiled.py
    *of("extras/compiled/__init__.py",
        "test_compiled.py::test_a_backward_that_cannot_be_compiled_ends_no_run",
        ("a backward is compiled when a run gets there",
         "config.force_non_lazy_backward_lowering = True",
         "config.force_non_lazy_backward_lowering = False")),
    # test_account.py
    *of("extras/explain/repeat.py",
        "test_account.py::test_shares_add_up_and_are_those_of_brute_force[plain]",
        ("account: bias correction forgotten", "return 1 - self.b1 ** self.count", "return 1.0")),
    *of("extras/explain/account.py",
        "test_account.py::test_shares_add_up_and_are_those_of_brute_force[plain]",
        ("account: momentum forgotten", "U = k.b1 * U -", "U = 0 * U -"),
        ("account: off by one step", "zip(run.steps, run.states, run.states[1:])",
         "zip(run.steps, run.states[1:], run.states[1:])"),
        ("account: the slope before the step alone", "start.slope / 2 + end.slope / 2",
         "start.slope"),
        ("account: the slope after the step alone", "start.slope / 2 + end.slope / 2",
         "end.slope")),
    *of("extras/explain/account.py",
        "test_account.py::test_the_derivative_is_that_of_training_again[plain]",
        ("account: momentum forgotten in the derivative", "m = k.b1 * m +",
         "m = k.b1 * m.detach() +"),
        ("account: AdamW's v is a constant", "s = (v / k.c2", "s = (v.detach() / k.c2"),
        ("account: no Hessian", "derivative[0] += hessian_times(",
         "hessian_times(")),
    *of("extras/explain/account.py",
        "test_account.py::test_shares_add_up_and_are_those_of_brute_force[clipped]",
        ("account: clip forgotten", "(1 - k.b1) * k.clip * U", "(1 - k.b1) * U")),
    *of("extras/explain/account.py",
        "test_account.py::test_the_derivative_is_that_of_training_again[clipped]",
        ("account: what clips does not depend on the rollout", "if clip < 1:", "if False:")),
    *of("extras/explain/account.py",
        "test_account.py::test_the_derivative_is_that_of_training_again[rates]",
        ("account: weight decay forgotten", "(1 - k.lr * k.decay) * theta", "theta")),
    *of("extras/explain/account.py",
        "test_account.py::test_the_derivative_is_that_of_training_again[kl and entropy]",
        ("account: the Hessian of the policy's loss alone", "gradient(loss.total,",
         "gradient(loss.policy,")),
    *of("extras/explain/account.py",
        "test_account.py::test_the_derivative_is_that_of_training_again[mini-batches and passes]",
        ("account: the Hessian of the last micro-batch", "product += gradient", "product = gradient")),
    *of("extras/explain/account.py",
        "test_account.py::test_shares_add_up_and_are_those_of_brute_force[positive]",
        ("account: row weights forgotten",
         "taped_losses(tape, exact(setup), k.batch, ",
         "taped_losses(tape, exact(setup), replace(k.batch, row_weights=0 * "
         "k.batch.row_weights + 1), ")),
    *of("extras/explain/target.py",
        "test_account.py::test_shares_add_up_and_are_those_of_brute_force[plain]",
        ("held-out reward: baseline forgotten", "(groups - baseline).flatten()", "groups.flatten()"),
        ("held-out reward: a completion is in its own baseline", "- groups) / max(1, count - 1)",
         ") / count")),
    *of("extras/explain/target.py", "test_account.py::test_the_slope_is_that_of_the_expected_reward",
        ("held-out reward: completions of the wrong weights",
         "exact(self.setup), self.setup.policy, self.prompts",
         "exact(self.setup), self.setup.base, self.prompts")),
    *of("extras/explain/target.py",
        "test_account.py::test_thinning_changes_nothing_on_average",
        ("held-out reward: what is drawn does not count for what is not", "signal / likely, 0.0)",
         "signal, 0.0)")),
    *of("extras/explain/target.py",
        "test_account.py::test_the_stated_noise_is_how_much_other_samples_differ",
        ("account: a fold has the slope of all", "(carries & (fold == f)).nonzero()",
         "carries.nonzero()")),
    *of("extras/explain/target.py", "test_bfloat16.py::"
        "test_held_out_completions_are_drawn_by_the_policy_whose_slope_is_taken",
        ("account: the run's bfloat16 draws", "exact(self.setup), self.setup.policy",
         "self.setup, self.setup.policy")),
    *of("extras/explain/account.py", "test_account.py::"
        "test_what_the_rollouts_leave_of_a_gradient_is_the_rest_of_the_loss",
        ("account: the rest of the loss has the rollouts, too", ".cpu() - rollouts", ".cpu()")),
    *of("extras/explain/number.py",
        "test_answers.py::test_groups_of_all_iterations_add_up_with_their_errors",
        ("account: the error of a fold for that of the sum", "* math.sqrt(len(parts))", "* 1.0")),
    *of("extras/explain/number.py",
        "test_answers.py::test_few_folds_have_no_error_that_looks_exact",
        ("account: two folds look exact", "elif len(parts) < LEAST:", "elif False:")),
    *of("extras/explain/groups.py",
        "test_answers.py::test_groups_of_all_iterations_add_up_with_their_errors",
        ("account: groups without what abstained", "where.masked_fill(x.isnan(), len(names))",
         "where.masked_fill(x.isnan(), 0)")),
    *of("extras/explain/groups.py",
        "test_answers.py::test_what_was_dropped_or_turned_is_not_called_pushed",
        ("account: pushed by the advantage alone", "((rows.weight * rows.advantage).sign()",
         "(rows.advantage.sign()"),
        ("account: what influence dropped was pushed", "(rows.weight == 0) & (rows.advantage != 0)",
         "(rows.weight == 0) & (rows.weight != 0)")),
    *of("extras/explain/groups.py",
        "test_answers.py::test_the_spread_of_groups_at_random_is_that_of_dealing_out",
        ("account: groups at random, with putting back", "x[here].var() * k * (n - k) / n",
         "x[here].var() * k")),
    *of("extras/explain/groups.py",
        "test_answers.py::test_a_group_is_named_where_it_is_known_and_ties_are_ties",
        ("account: a tie is named", "return sorted([best, *ties])", "return [best]"),
        ("account: noise is named", "if size.value <= least or not size.is_known:",
         "if size.value <= least:")),

    # test_resample.py
    *of("run/metrics.py", "test_resample.py::test_metrics_and_samples_are_of_all_that_was_sampled",
        ("metrics of what is left", "    everything = batch.everything\n",
         "    everything = batch\n")),
    *of("run/settings.py",
        "test_resample.py::test_a_target_of_held_out_prompts_is_not_resampled",
        ("a resampled target", 'changes = {"zero_std_groups": "keep"}', "changes = {}")),

    # test_judge.py
    *of("judge/rewards.py",
        "test_judge.py::test_what_a_reward_does_to_its_columns_stays_with_its_row",
        ("columns are shared", "[copy.deepcopy(value) for value in x]", "list(x)")),
    *of("judge/scorer.py", "test_judge.py::test_an_insult_behind_a_long_text_is_read",
        ("a judge that reads the beginning alone", "pieces(ids, block_size - 1)]",
         "pieces(ids, block_size - 1)[:1]]"),
        ("a judge that counts the cleanest piece", "float(part.max())", "float(part.min())")),
    *of("judge/rewards.py", "test_judge.py::test_a_column_does_not_hide_what_the_step_knows",
        ("a column before a fact", "offered |= (facts or {}) | {",
         "offered = (facts or {}) | offered | {")),
    *of("run/evaluation.py", "test_evaluation.py::test_the_rewards_of_the_prompts_are_those_of_the_"
        "measures",
        ("rewards of other prompts", "rewards.view(-1, cfg.num_eval_generations, len(weights))",
         "rewards[:-4].view(-1, cfg.num_eval_generations, len(weights))")),
    *of("plot.py", "test_plot.py::test_a_curve_is_in_its_picture",
        ("a curve without its 0", "            ax.update_datalim([(0, 0)], updatex=False)\n",
         "            pass\n")),
    *of("judge/scorer.py", "test_judge.py::test_bfloat16_ties_no_scores",
        ("a judge's last layer in bfloat16", "exact_linear(self.score, x[:, 0])",
         "self.score(x[:, 0])")),
    *of("common/hooks.py", "test_judge.py::test_a_reward_that_returns_something_else_is_named",
        ("a reward that is not finite is taken", " or not x.isfinite().all():", ":"),
        ("a reward for each completion but one", "if x.shape not in shapes or not", "if not")),
    *of("run/settings.py", "test_config.py::test_every_range_is_checked",
        ("a range beside a type is not read", "ranges = [x for x in parts if isinstance(x, Range)]",
         "ranges = []")),
    *of("judge/rewards.py", "test_judge.py::test_scores_are_columns_and_none_is_nan",
        ("a reward that abstains counts as 0", "masked_fill(abstains, math.nan)", "masked_fill(abstains, 0.0)")),

    # test_data.py
    *of("common/files.py",
        "test_data.py::test_a_quote_that_never_closes_swallows_no_rows_but_is_refused_with_its_row",
        ("a quote swallows the rest", "csv.DictReader(lines, strict=True)",
         "csv.DictReader(lines)")),
    *of("data/comments.py", "test_data.py::test_a_name_with_a_dot_is_a_column_or_a_path",
        ("a name with a dot is always a path", "if row.get(name) is not None:",
         'if "." not in name and row.get(name) is not None:')),
    *of("data/prompts.py", "test_data.py::test_each_prompt_once_per_epoch",
        ("each epoch has the same order", 'seed_for(seed, "prompts", epoch)',
         'seed_for(seed, "prompts")')),
    *of("data/comments.py", "test_data.py::test_splits_depend_on_the_text_alone",
        ("a split depends on capitals", "text.casefold().encode()", "text.encode()")),

    # test_notes.py: what a note asks for is gone
    *of("run/metrics.py", "test_notes.py::test_numbers_are_logged_and_explained"
        "[000, which rollouts]",
        ("000, spread of the influences: gone", '        "tracin/std_ip": std(influence),\n', "")),
    *of("run/metrics.py", "test_notes.py::test_numbers_are_logged_and_explained[000, the target]",
        ("000, losses of the target, the least: gone",
         '        "tracin/target_loss_min": by_rollout.min(),\n', "")),
    *of("run/flags.py", "test_notes.py::test_tokens_that_carry_no_loss_and_should_are_noted",
        ("002, tokens without loss: gone", 'if m["tokens_without_loss"] and not', "if False and not")),
    *of("run/report.py", "test_notes.py::test_a_line_shows_what_a_note_asks_for"
        "[002: rewards, their mean and spread]",
        ("002, spread of the rewards in line 3: gone", "±{std(rewards):.4f}", "")),
    *of("run/report.py", "test_notes.py::test_a_line_shows_what_a_note_asks_for"
        "[002: the memory in use]",
        ("002, memory in the lines: gone",
         'mem = "" if used is None else f"mem={used / 2 ** 20:.0f} MB, "', 'mem = ""')),
    *of("run/report.py", "test_notes.py::test_a_line_shows_what_a_note_asks_for"
        "[002: the KL beside it]",
        ("002, the KL in line 4: gone",
         'parts["kl"] = (kl * mask).sum() / mask.sum().clamp(min=1)', "pass")),
    *of("run/report.py", "test_notes.py::test_a_line_shows_what_a_note_asks_for"
        "[002: the loss in all]",
        ("002, the total in line 4: gone",
         ', "total": loss.total}', "}")),
    *of("run/report.py", "test_notes.py::test_the_values_of_a_critic_are_logged",
        ("002, the critic in the line: gone",
         'parts.append(f"critic {m[\'critic_loss\']:.4f}")', "pass")),
    *of("run/flags.py",
        "test_notes.py::test_an_iteration_that_takes_several_times_the_median_is_noted",
        ("002, a slow iteration: gone",
         "    if times > 4:", "    if False:")),
    *of("run/flags.py", "test_notes.py::test_each_warning_fires_in_its_case_alone"
        "[003: the KL is above 5]",
        ("003, a KL that explodes: gone", 'if m["kl"] > 5:', "if False:")),
    *of("run/flags.py", "test_notes.py::test_each_warning_fires_in_its_case_alone"
        "[003: a negative KL]",
        ("003, a negative KL: gone", '        if m["kl"] < -1e-6:', "        if False:")),
    *of("common/guards.py",
        "test_notes.py::test_an_environments_token_under_the_loss_stops_the_run[off]",
        ("004, an environment's token under the loss: gone",
         "(batch.loss_mask & ~batch.rollout.sampled_mask)",
         "(batch.loss_mask & ~batch.loss_mask)")),
    *of("run/flags.py", "test_notes.py::test_each_warning_fires_in_its_case_alone"
        "[000: hardly any influence is positive]",
        ("000, the fallback's warning: gone", 'if m["tracin/fallback"] > 0:', "if False:")),
    *of("tracin.py", "test_notes.py::test_the_fallback_keeps_the_better_half",
        ("000, the fallback: gone", "if num_kept >= 0.1 * num_nonzero:", "if True:")),
    *of("run/log.py", "test_notes.py::test_wandb_gets_the_metrics_until_it_fails",
        ("000, metrics in wandb: gone", '        self.wandb.tell("log", m, step=m["iteration"])\n', "")),
    *of("run/flags.py", "test_notes.py::test_each_warning_fires_in_its_case_alone"
        "[003: zero gradient]",
        ("003, zero gradient: gone", 'if teaches and m["grad_norm"] < least:', "if False:")),
    *of("run/report.py", "test_notes.py::test_the_environments_share_is_shown_and_logged",
        ("004, the environment's share in the line: gone", "    if cfg.answers:\n",
         "    if False:\n")),
    *of("run/report.py", "test_notes.py::test_a_line_shows_what_a_note_asks_for"
        "[002: the time that is left]",
        ("002, time and eta in the line: gone",
         'f"time {seconds:.2f}s", f"eta {left // 60}m{left % 60:02d}s"', "")),
    *of("run/flags.py", "test_notes.py::test_a_flag_says_what_to_do[kl]",
        ("003, a warning's remedy: gone", "is exploding: lower learning_rate or raise beta",
         "is exploding: the policy has moved too far")),
    *of("run/run.py", "test_notes.py::test_the_end_of_a_run_shows_before_and_after",
        ("003, before and after: gone", "        print_table(rows)\n", "        pass\n")),
    *of("extras/environment/__init__.py",
        "test_notes.py::test_a_prompt_and_the_table_name_the_same_tools",
        ("004, names of tools: gone",
         "check_prompts_name(cfg.tools, [prompt.text for prompt in prompts])", "pass")),
    *of("run/flags.py", "test_notes.py::test_each_warning_fires_in_its_case_alone"
        "[004: the critic explains nothing]",
        ("004, values that explain nothing: gone",
         'm["val/var_explained"] < 0 and m["iteration"] > 20', "False")),
    *of("run/precision.py", "test_notes.py::test_compile_is_off_until_it_is_asked_for",
        ("002, the effect of compile: gone", "    if cfg.compile:\n", "    if False:\n")),
    *of("run/log.py",
        "test_notes.py::test_samples_say_their_influence_and_what_became_of_it",
        ("000, influence and weight of a sample: gone",
         '    if cfg.tracin != "off":\n        columns |=', "    if False:\n        columns |=")),
    *of("extras/step/__init__.py", "test_notes.py::test_a_step_is_taken_apart[loss]",
        ("003, the KL's share of loss and gradient: gone",
         'print(f"  the KL has {of_loss:.1%} of the loss;', 'len(f"  the KL has {of_loss:.1%};')),
    *of("config/quick_test.py", "test_notes.py::test_the_quick_test_ends_with_a_verdict",
        ("002, the verdict of the quick test: gone", "expect_rise = 0.3", "expect_rise = 0.0")),
    *of("run/flags.py", "test_notes.py::test_each_warning_fires_in_its_case_alone"
        "[004: ratio off on the first pass]",
        ("004, a ratio that is off: gone", "if difference > 0.05:", "if False:")),
    *of("common/files.py", "test_notes.py::test_a_language_model_is_no_judge",
        ("002, the refusal of a language model as judge: gone", "    if actual != kind:\n",
         "    if False:\n")),
    *of("run/flags.py", "test_notes.py::test_each_warning_fires_in_its_case_alone"
        "[001: own parts]",
        ("001, own parts: gone",
         'if m["tracin/self_share"] > 0.5 and not', "if False and not")),
    *of("run/settings.py", "test_notes.py::test_each_part_of_an_iteration_has_its_line",
        ("002, the numbered lines: gone", "log_micro: Free[bool] = True ", "log_micro: Free[bool] = False ")),

    # test_meanings.py
    *of("run/metrics.py", "test_meanings.py::test_each_number_that_is_logged_has_a_meaning_and_"
        "each_meaning_a_number[0-Metrics]",
        ("a number without a meaning",
         "        forced: share of the completions' tokens that come from an environment\n", ""),
        ("a meaning without a number", '    metrics |= critic_metrics(batch, cfg)\n', "")),
    *of("run/after.py", "test_after.py::test_memory_is_what_a_checkpoint_gives_back",
        ("memory is another one after a stop", "json.loads(json.dumps(setup.memory))",
         "setup.memory")),
    # test_hooks.py
    *of("common/hooks.py", "test_hooks.py::test_an_advantage_that_works_in_place_changes_no_log",
        ("an advantage sorts the run's texts", "completions=list(batch.completions),",
         "completions=batch.completions,"),
        ("an advantage changes the run's scores", "name: x.clone() for", "name: x for"),
        ("an advantage writes into the rollout", ".map(torch.clone)", "")),
    *of("docs/hooks.md", "test_hooks.py::test_best_of_n_imitates_the_best",
        ("page: best of n that nobody scored", "    is_best &= ~rewards.isnan() ", "    ")),
    *of("run/saver.py", "test_hooks.py::test_choose_is_told_a_failed_iteration_once",
        ("a failed iteration's rewards are told twice", "            self.setup.seen = self.seen\n",
         "")),
    # test_after.py
    *of("run/checkpoint.py", "test_after.py::test_a_run_with_after_goes_on_with_the_same_bits",
        ("after: its changes end with the process", "    change_again(cfg, content)\n", ""),
        ("after: its memory ends with the process", 'setup.memory = content["memory"]', "pass"),
        ("after: its replay ends with the process", "replay=replay_state(setup)", "replay=None")),
    *of("run/settings.py", "test_after.py::test_config_json_says_what_was_given",
        ("after: config.json says what it made",
         "self.given.get(name, getattr(self, name))", "getattr(self, name)")),
    *of("run/after.py", "test_after.py::test_a_value_given_to_a_run_that_goes_on_wins",
        ("after: beats what is given now", "if getattr(cfg, name) == before[name]", "if before")),
    *of("run/optimizer.py",
        "test_after.py::test_what_after_sets_is_what_a_resumed_run_is_given[learning_rate]",
        ("after: a rate that does nothing", 'cfg.given.get("learning_rate", cfg.learning_rate)',
         "cfg.learning_rate")),
    *of("run/log.py", "test_after.py::test_what_is_replayed_is_learned_from_and_logged_once",
        ("replay: logged again", "range(int((batch.age == 0).sum()))",
         "range(len(batch.prompts))")),
    *of("loss.py", "test_after.py::test_what_is_replayed_is_learned_from_and_logged_once",
        ("replay: in the reward of the log",
         "return self.subset(self.age == 0) if self.is_replayed else self",
         "return self")),
    *of("run/meter.py", "test_after.py::test_what_is_replayed_is_learned_from_and_logged_once",
        ("replay: beside the sampler", " & (loss.batch.age == 0)[:, None]", "")),
    *of("tracin.py", "test_after.py::test_influence_of_replayed_rollouts_is_that_of_plain_backwards",
        ("replay: its log-prob for its loss", "fresh = fresh and not batch.is_replayed\n",
         "pass\n")),
    *of("extras/variants/top_entropy_quantile.py",
        "test_after.py::test_entropy_of_replayed_rollouts_is_that_of_the_policy_now",
        ("replay: entropies of the policy then", "if not fresh or batch.is_replayed:",
         "if not fresh:")),
    *of("run/after.py", "test_after.py::test_all_processes_go_on_with_what_rank_0_has_made",
        ("after: each process by itself", "all_gather([mine])[0]", "mine")),
    *of("run/evaluation.py",
        "test_after.py::test_a_reward_is_told_how_many_completions_stand_side_by_side",
        ("an evaluation's groups cut across prompts", "reward_facts(rollout, iteration, k)",
         "reward_facts(rollout, iteration, cfg.num_generations)")),
    *of("extras/explain/repeat.py", "test_after.py::test_an_account_refuses_a_loop_that_changes",
        ("an account without after", 'if "after" in cfg.functions:', "if False:")),

    # test_report.py
    *of("run/flags.py", "test_notes.py::test_each_warning_fires_in_its_case_alone",
        ("a gradient near zero is 0", 'm["grad_norm"] < least', 'm["grad_norm"] == 0'),
        ("a prize for the KL is not seen", 'm["kl_loss"] < 0:', 'm["kl_loss"] < -1:'),
        ("log-probs near zero are 0", 'm["logp"] > -1e-3', 'm["logp"] == 0')),
    *of("run/flags.py",
        "test_report.py::test_a_warning_knows_what_is_right[a ratio of 1 in a single step]",
        ("a single step is warned of", 'm["num_steps"] > 1 and distance', "distance")),
    *of("run/flags.py",
        "test_report.py::test_a_warning_knows_what_is_right[one answer, and the reward has risen]",
        ("a risen reward excuses nothing", "() if solved else signs_of_collapse(m, first)",
         "signs_of_collapse(m, first)")),
    *of("run/flags.py", "test_report.py::test_a_collapse_is_told_though_the_reward_has_risen",
        ("a risen reward hides a collapse", "if has_risen(m, first) else []", "if False else []")),
    *of("run/flags.py",
        "test_report.py::test_a_gradient_of_100_times_the_median_is_named_from_the_fifth"
        "_iteration_on",
        ("a gradient that explodes is no news", "if times > 100:", "if times > 1e9:")),
    *of("run/report.py", "test_report.py::test_the_numbered_lines_have_memory_times_scores_and_losses",
        ("held-out rollouts take no time", '        self.end(phase)\n', "")),
    *of("run/flags.py", "test_report.py::test_what_fell_between_two_evaluations",
        ("a fall within the noise", "change < -3 * noise", "change < 0")),
    *of("run/flags.py",
        "test_report.py::test_the_kl_of_an_evaluation_is_held_beside_the_logged_one",
        ("one KL is not held beside the other", "max(0.05, 5 * max(kls))", "5")),
    *of("run/flags.py", "test_notes.py::test_each_warning_fires_in_its_case_alone",
        ("a critic's baseline is the group", 'if cfg.critic or "advantage" in cfg.functions:',
         'if "advantage" in cfg.functions:')),

    *of("common/progress.py", "test_report.py::test_progress_is_a_line_every_ten_seconds",
        ("what was done before counts as fast", "/ (done - self.start)", "/ done")),

    # test_runs.py
    *of("run/run.py", "test_runs.py::test_a_reward_that_fails_once_costs_no_whole_iteration[4-2]",
        ("a failure loses whole iterations", "print(self.saver.keep_last(), flush=True)", "pass")),
    *of("run/saver.py", "test_runs.py::test_a_reward_that_fails_once_costs_no_whole_iteration[4-2]",
        ("generators go on after a failure", "            set_random_state(self.random)\n", "")),
    # test_inputs.py
    *of("run/optimizer.py",
        "test_inputs.py::test_what_an_optimizer_counts_in_its_groups_goes_on[torch.optim.SGD]",
        ("what an optimizer counts begins anew",
         "if not is_torchs:", "if False:")),
    *of("run/log.py",
        "test_inputs.py::test_another_file_of_the_same_name_is_said_and_no_warning_compares"
        "[config]",
        ("a warning compares two different rewards", ' if row["iteration"] > last]', "]")),
    *of("run/policy.py", "test_inputs.py::test_a_run_goes_on_when_the_run_that_it_began_from_moves_"
        "on_and_goes",
        ("a run forgets what it began from", "name = saved_base(cfg) or cfg.policy",
         "name = cfg.policy")),
    *of("run/saver.py", "test_runs.py::test_half_an_iteration_is_not_saved",
        ("half an iteration is saved", "self.has_stepped = True", "self.has_stepped = False")),
    *of("run/folder.py", "test_runs.py::test_a_folder_where_a_run_is_at_work_is_left_alone",
        ("two runs share a folder", 'FileLock(f"{folder}/{LOCK}", timeout=0).acquire()',
         "contextlib.nullcontext()")),
    *of("run/checkpoint.py", "test_runs.py::test_a_run_writes_through_no_link",
        ("a log may be a link", "Path(tmp).write_bytes(f.read(content[name]))",
         "os.truncate(f.name, content[name]), os.link(f.name, tmp)")),
    *of("run/checkpoint.py",
        "test_runs.py::test_the_checkpoint_before_serves_and_half_lines_of_logs_are_cut",
        ("logs are not cut", "f.read(content[name])", "f.read()"),
        ("a reward's generators begin anew", '    set_random_state(content["random"])\n', "")),
    *of("run/checkpoint.py", "test_runs.py::test_a_checkpoint_never_holds_what_is_not_finite",
        ("weights that are not finite are saved", "if not torch.stack(finite).all():",
         "if False:")),
    *of("run/checkpoint.py",
        "test_runs.py::test_a_policy_that_the_run_did_not_begin_from_is_refused",
        ("a run goes on from another policy", 'if content["base_hash"] != hash_of(setup.base):',
         "if False:")),
    *of("run/evaluation.py", "test_runs.py::test_other_runs_start_from_the_folder_of_a_run[plain]",
        ("each evaluation has noise of its own", 'seed_for("evaluation"))',
         'seed_for("evaluation", iteration))')),

    *of("run/checkpoint.py",
        "test_runs.py::test_a_run_keeps_as_many_checkpoints_as_keep_checkpoints_says",
        ("checkpoints are kept by count alone", "max(2, cfg.keep_checkpoints)", "2")),
    *of("run/policy.py",
        "test_runs.py::test_neither_recomputed_blocks_nor_deterministic_algorithms_change_a_run",
        ("blocks are never recomputed", "policy.recompute = cfg.activation_checkpointing",
         "policy.recompute = False")),
    *of("run/run.py", "test_runs.py::test_expect_rise_ends_a_run_with_a_verdict",
        ("no verdict", "if self.cfg.expect_rise:", "if False:")),

    # test_evaluation.py
    *of("run/evaluation.py", "test_evaluation.py::test_a_perplexity_beyond_all_numbers_is_infinite",
        ("perplexity at temperature 1", "completion_logprobs(base, part, cfg.eval_temperature)",
         "completion_logprobs(base, part)")),

    # test_files.py
    *of("extras/make/supervised.py", "test_make.py::test_the_rates_of_a_fit_go_up_stay_and_go_down",
        ("a fit at one rate", "rate * trapezoid(step, steps)", "rate")),
    *of("common/files.py", "test_files.py::test_code_in_a_file_is_not_run",
        ("code in a file is run", "map_location=device, weights_only=True",
         "map_location=device, weights_only=False")),
    *of("extras/make/supervised.py",
        "test_make.py::test_interrupted_fit_goes_on_as_if_it_had_not_been",
        ("a partial file is a step behind", "step=step + 1", "step=step")),
    *of("common/device.py", "test_files.py::test_a_gpu_has_a_number",
        ("a GPU without its number", 'name = f"cuda:{number}"', 'name = "cuda"')),
    *of("common/files.py",
        "test_files.py::test_a_broken_disk_replaces_nothing_and_one_without_fsync_serves",
        ("a file takes its name before it is on the disk", "            flush(tmp)\n",
         "            pass\n"),
        ("a disk without fsync ends a run", "e.errno not in CANNOT_FLUSH", "True")),
    *of("common/files.py", "test_files.py::test_half_a_last_line_of_a_log_is_left_out",
        ("half a last line is read", '*lines, last = f.read().split(b"\\n")',
         'last, lines = b"", f.read().split(b"\\n")'),
        ("a last line without its end is lost", "        lines.append(last)", "        pass")),

    # test_precision.py
    *of("run/policy.py", "test_precision.py::"
        "test_frozen_weights_that_are_bfloat16_numbers_take_half_the_memory",
        ("the policy learns in bfloat16", "        to_float(policy) ", "        pass "),
        ("adapters beside a second copy of the weights", "copy.deepcopy(base, shared)",
         "copy.deepcopy(base)")),
    *of("run/setup.py", "test_precision.py::"
        "test_frozen_weights_that_are_bfloat16_numbers_take_half_the_memory",
        ("frozen weights take twice the memory", "        to_half(base)\n", "        pass\n")),
    *of("fast.py", "test_precision.py::test_half_the_memory_changes_no_bit",
        ("frozen weights are rounded", "type(layer) is nn.Linear and is_half(layer)",
         "type(layer) is nn.Linear")),
    *of("run/evaluation.py", "test_precision.py::test_what_is_called_float32_is_not_tf32",
        ("perplexity in TF32", "@full_precision()\n", "")),

    # test_nanogpt.py
    *of("data/weights.py",
        "test_nanogpt.py::test_nanogpts_checkpoint_is_the_policy_that_nanogpt_computes",
        ("nanoGPT's GELU by tanh", 'shape["exact_gelu"] = True', 'shape["exact_gelu"] = False'),
        ("words before nanoGPT's names", r'r"^(module\.|_orig_mod\.|transformer\.)+"',
         r'r"^transformer\."')),
    *of("data/weights.py", "test_nanogpt.py::test_adapters_are_merged_into_the_weights",
        ("adapters are not merged", "lora.base.weight + update", "lora.base.weight")),

    # test_plot.py
    *of("plot.py", "test_plot.py::test_a_single_value_is_seen",
        ("a single value is not drawn", '"o" if len(x) <= 30 else None', "None")),

    # test_compiled.py
    *of("extras/compiled/__init__.py",
        "test_compiled.py::test_a_compiler_that_fails_is_turned_off_and_the_run_goes_on",
        ("a failing compiler ends the run", "                self.off(e)\n",
         "                raise\n")),

    # test_graph.py
    *of("extras/graph/__init__.py", "test_graph.py::test_a_step_draws_the_same_tokens",
        ("a row gets tokens after its end", "after = is_end.cumsum(1) > is_end",
         "after = is_end & ~is_end"),
        ("padding is seen", "self.seen[:N, :P] = attention_mask.repeat_interleave(n, 0)", "pass"),
        ("the memory does not move with its rows", "x[moved] = x[rows[moved]]", "pass")),
    *of("extras/graph/__init__.py", "test_graph.py::test_few_graphs_are_made_and_used_again",
        ("a graph for every count", " and len(self.graphs) < MOST", ""),
        ("graphs of old addresses", "            self.graphs.clear()\n", "")),
    *of("extras/graph/__init__.py", "test_graph.py::test_a_temperature_of_its_own_is_a_graph_of_its_own",
        ("the temperature of the first call", "key = *size, temperature", "key = *size, 1.0")),
    *of("extras/graph/__init__.py", "test_graph.py::test_a_decoder_in_bfloat16_has_the_weights_of_now",
        ("weights of the first call", "            self.half.refresh()\n", "")),
    *of("extras/graph/__init__.py", "test_graph.py::test_weights_are_cast_once_for_all_tokens",
        ("weights cast for each token", "self.now = self.half.model", "pass")),
    *of("extras/graph/__init__.py", "test_graph.py::test_a_million_draws_are_those_of_the_distribution_function",
        ("the block's start is not taken off", "cdf[:, -1:] - start) / size",
         "cdf[:, -1:]) / size")),
    *of("fast.py", "test_precision.py::test_a_product_of_bfloat16_numbers_does_not_round_its_sums",
        ("a gradient of the wrong sign", "of_h = product(grad, weight)",
         "of_h = product(-grad, weight)")),
    *of("fast.py", "test_precision.py::test_log_probs_that_keep_probabilities_are_those_of_torch",
        ("log-probs from rounded probabilities", "logits.gather(1, targets) - total\n\n    "
         "@staticmethod\n    @once", "probs.gather(1, targets).log()\n\n    @staticmethod\n    @once")),

    *of("run/precision.py", "test_graph.py::test_a_graph_that_does_not_hold_is_turned_off",
        ("a GPU decodes without graphs", '{ROOT}/extras/graph"', '{ROOT}/extras/no"')),

    # test_bench.py
    *of("extras/bench/phases.py",
        "test_bench.py::test_a_share_of_the_peak_is_of_the_card_and_its_dtype",
        ("float32 beside bfloat16's peak", "rate = half if dtype == torch.bfloat16 else full",
         "rate = half")),

    # test_account.py
    *of("extras/explain/repeat.py",
        "test_account.py::test_a_layer_that_is_never_used_changes_nothing",
        ("an unused layer has no account",
         "moved = {1 + counts.get(p, 0) for p in setup.trained if p.grad is not None}",
         "moved = {1 + counts.get(p, 0) for p in setup.trained}")),
    # test_tape.py
    *of("tape.py", "test_tape.py::test_a_layer_that_it_cannot_handle_is_named",
        ("max_norm is taken for a row's own", "getattr(module, \"max_norm\", None) or", "")),

    # test_debug_step.py
    *of("extras/step/influence.py", "test_debug_step.py::"
        "test_influence_is_the_runs_and_its_words_add_up[leave one out]",
        ("words with the own part that was left out",
         'if coef is None or not recording.cfg.hook("without_own_part"):', "if True:")),
    *of("extras/step/influence.py", "test_debug_step.py::"
        "test_influence_is_the_runs_and_its_words_add_up[held out]",
        ("a step's target is averaged twice", "copy.copy(setup.target_average)",
         "setup.target_average")),
    *of("extras/step/__init__.py",
        "test_debug_step.py::test_faults_can_be_seen_in_the_columns",
        ("the reference's column is from before the update",
         "grpo.reference_logprobs(setup, batch.rollout[[row]], cfg)[0]", "batch.ref_logp[row]"),
        ("the trainer's column is the sampler's", "return loss.logp[0].detach(), gradient[0]",
         "return batch.rollout.logp[row], gradient[0]")),
    *of("extras/step/__init__.py",
        "test_debug_step.py::test_rewards_and_divisor_give_the_advantages",
        ("the divisor of a group for that of the batch", '"batch": std(rewards) + 1e-4',
         '"batch": None'),
        ("rewards before the KL is taken off", "rewards = rewards - cfg.beta * batch.kl.sum(1)",
         "rewards = rewards - 0 * batch.kl.sum(1)")),

    # test_critic.py
    *of("grpo.py", "test_critic.py::test_metrics_of_the_critic_are_those_of_plain_python",
        ("the head's gradient after clipping",
         "        meter.add_step(batch, grad_norm)\n        clip_grads_with_norm_(setup.trained, "
         "cfg.max_grad_norm or math.inf, grad_norm)\n",
         "        clip_grads_with_norm_(setup.trained, cfg.max_grad_norm or math.inf, grad_norm)\n"
         "        meter.add_step(batch, grad_norm)\n")),

    # extras/slider, extras/hunt, docs/lesson
    *of("extras/slider/__main__.py", "test_slider.py::"
        "test_influence_is_the_product_of_a_rollouts_gradient_and_the_held_out_rewards",
        ("slider: influence sign", "return -tape.dot(target)", "return tape.dot(target)")),
    *of("extras/slider/__main__.py", "test_slider.py::"
        "test_without_any_left_out_it_is_the_training_and_without_all_nothing_moves",
        ("slider: the wrong ones leave", 'descending=rule == "high influence"',
         'descending=rule == "low influence"'),
        ("slider: nothing leaves", "batch.rewards, it)[:count]] = 0", "batch.rewards, it)[:0]] = 0")),
    *of("extras/hunt/__main__.py", "test_hunt.py::"
        "test_a_run_that_fails_ends_with_its_own_exit_code",
        ("hunt: a failed run ends with 0", "sys.exit(seen.code)", "sys.exit(0)")),
    *of("extras/hunt/__main__.py", "test_hunt.py::"
        "test_the_score_card_counts_what_was_found_without_the_answer",
        ("hunt: a read answer counts as found", 'if "given_up" in row or "minutes" in row:',
         'if "minutes" in row:')),
    *of("docs/lesson/classroom.py", "test_lesson.py::"
        "test_a_written_line_is_told_right_or_which_mistake_it_is",
        ("lesson: any line is right", "<= 0.005 * value.abs().max()", "<= 5 * value.abs().max()"))]


def why_not(mistake):
    """Why this mistake cannot be planted, in words, or ""."""
    path = ROOT / mistake.file
    count = path.read_text(encoding="utf-8").count(mistake.old) if path.exists() else 0
    if count != 1:
        return f"{mistake.old!r} is {count} times in {mistake.file}"
    return "" if path_of(mistake.test) else f"there is no {mistake.test}"


def path_of(test):
    """What pytest is to run: tests/FILE::TEST, or the same of an extra. None: there is none."""
    file, _, name = test.partition("::")
    found = [*ROOT.glob(f"tests/{file}"), *ROOT.glob(f"extras/*/tests/{file}")]
    function = name.partition("[")[0]
    if not found or f"def {function}(" not in found[0].read_text(encoding="utf-8"):
        return None
    return f"{found[0].relative_to(ROOT)}::{name}"


def run_tests(tests, folder):
    """Run tests up to the first failure -> exit code, and its line of pytest's summary."""
    env = dict(os.environ, COLUMNS="400", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    done = subprocess.run([*pytest, *map(path_of, tests)], cwd=folder, env=env,
                          capture_output=True, text=True)
    found = re.search(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)
    return done.returncode, found[1] if found else done.stdout[-300:]


def plant(mistake, folder):
    """Run the test with one mistake in -> (whether it catches it, a line that says so)."""
    path = folder / mistake.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mistake.old, mistake.new), encoding="utf-8")
    code, line = run_tests([mistake.test], folder)
    path.write_text(source, encoding="utf-8")
    if code == 0:
        return False, f"ALIVE   {mistake.name}: {mistake.test} passes"
    if code != 1 or "NameError" in line:        # the mistake is none that could run
        return False, f"ERROR   {mistake.name}: {line}"
    return True, f"caught  {mistake.name}: {line}"


def copy_project(folder):
    """Copy what git knows or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for path in filter(lambda path: (ROOT / path).is_file(), listed.stdout.splitlines()):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)


def list_all():
    """Say which mistakes have lost their line or their test."""
    lost = [(m.name, why) for m in MISTAKES if (why := why_not(m))]
    for name, why in lost:
        print(f"lost    {name}: {why}")
    print(f"{len(MISTAKES) - len(lost)} of {len(MISTAKES)} mistakes have their line and their test")
    sys.exit(1 if lost else 0)


def main(words):
    if words == ["--list"]:
        list_all()
    chosen = [m for m in MISTAKES if not words or any(word in m.name for word in words)]
    if not chosen:
        sys.exit(f"no mistake has one of {words} in its name")
    skipped = {m.name: why for m in chosen if (why := why_not(m))}
    for name, why in skipped.items():
        print(f"skipped {name}: {why}")
    chosen = [m for m in chosen if m.name not in skipped]
    alive = 0
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        copy_project(folder)
        tests = dict.fromkeys(m.test for m in chosen)
        code, line = run_tests(tests, folder)
        if code:
            sys.exit(f"all tests must pass before a mistake is planted: {line}")
        for mistake in chosen:
            caught, line = plant(mistake, folder)
            print(line, flush=True)
            alive += not caught
    print(f"{len(chosen) - alive} of {len(chosen)} mistakes are caught, {len(skipped)} are skipped")
    sys.exit(1 if alive else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
