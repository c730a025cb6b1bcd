"""What cannot work, refused in one line: the setting, its value, the fix."""
import os
import typing

from run.script import BadInput, shown

AT_LEAST = {  # smallest value
    0: ("max_iters", "threads", "seed", "lora_rank", "lora_alpha", "top_k", "min_p",
        "decode_batch_size", "max_turns", "force_rate", "gae_gamma", "gae_lambda", "value_coef",
        "epsilon", "epsilon_high", "beta", "entropy_coef", "ref_model_sync_steps",
        "ref_model_mixup_alpha", "mini_batch_size", "warmup_iters", "adam_beta1", "adam_beta2",
        "weight_decay", "max_grad_norm", "tracin_val_prompts", "tracin_val_size",
        "tracin_target_ema", "tracin_fraction", "tracin_memory", "eval_interval", "expect_rise"),
    1: ("save_interval", "n_layer", "n_head", "n_embd", "pretrain_tokens", "judge_tokens",
        "num_prompts", "num_generations", "max_completion_length", "num_iterations",
        "micro_batch_size", "num_eval_prompts", "num_eval_generations"),
    2: ("block_size",),
    257: ("vocab_size",),       # the bytes and the end token
    1e-6: ("temperature", "sapo_temperature_neg", "sapo_temperature_pos"),
}
ABOVE_0 = ("learning_rate", "top_p", "top_entropy_quantile", "value_clip")
BELOW_1 = ("adam_beta1", "adam_beta2", "tracin_target_ema")     # they must forget
AT_MOST = {
    1: ("top_p", "min_p", "force_rate", "gae_gamma", "gae_lambda", "top_entropy_quantile",
        "ref_model_mixup_alpha", "tracin_fraction"),
    1e9: ("judge_tokens",),     # its batches are drawn ahead
    max(64, os.cpu_count()): ("threads",),
}


def check(cfg):
    """Raises BadInput for the first setting that cannot work. Fills in None and True."""
    for name, hint in typing.get_type_hints(type(cfg)).items():
        value = getattr(cfg, name)
        choices = typing.get_args(hint)
        if typing.get_origin(hint) is typing.Literal and value not in choices:
            raise BadInput(f"{name} = {shown(value)}: must be one of {', '.join(choices)}")
    for name, value in cfg.public().items():
        check_plain(name, value)
    check_ranges(cfg)
    check_rows(cfg)
    check_loss(cfg)
    check_critic(cfg)
    check_influence(cfg)
    check_rewards(cfg)
    check_environment(cfg)


def check_plain(name, value):
    """A number that torch can take, or a text."""
    if type(value) in (int, float) and not abs(value) < 2 ** 63:    # NaN is not
        raise BadInput(f"{name} = {shown(value)}: must be a number below 2 ** 63")
    if value == "":
        raise BadInput(f"{name} = '': must not be empty")


def check_ranges(cfg):
    """Each number by itself."""
    for low, names in AT_LEAST.items():
        for name in names:
            check_that(cfg, name, lambda x: x >= low, f"at least {low}")
    for name in ABOVE_0:
        check_that(cfg, name, lambda x: x > 0, "above 0")
    for name in BELOW_1:
        check_that(cfg, name, lambda x: x < 1, "below 1")
    for high, names in AT_MOST.items():
        for name in names:
            check_that(cfg, name, lambda x: x <= high, f"at most {high}")
    words = cfg.prompt_words
    if len(words) != 2 or any(type(n) is not int for n in words) or not 0 <= words[0] <= words[1]:
        raise BadInput(f"prompt_words = {shown(words)}: must be (fewest, most), whole numbers")


def check_that(cfg, name, holds, wanted):
    value = getattr(cfg, name)
    if value is not None and not holds(value):
        raise BadInput(f"{name} = {shown(value)}: must be {wanted}")


def check_rows(cfg):
    """The sizes of mini-batch, of what is decoded at once, and of the policy's heads."""
    N = cfg.num_prompts * cfg.num_generations
    if N % (cfg.mini_batch_size or N):
        raise BadInput(f"mini_batch_size = {cfg.mini_batch_size}: must divide num_prompts * "
                       f"num_generations = {cfg.num_prompts} * {cfg.num_generations} = {N} rows")
    if 0 < cfg.decode_batch_size < cfg.num_generations:
        raise BadInput(f"decode_batch_size = {cfg.decode_batch_size}: must be at least "
                       f"num_generations = {cfg.num_generations}: groups are decoded whole")
    if cfg.n_embd % cfg.n_head and cfg.policy == "train":  # another policy brings its own
        raise BadInput(f"n_embd = {cfg.n_embd}: must be a multiple of n_head = {cfg.n_head}")


def check_loss(cfg):
    ceiling = 1 + (cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high)
    if cfg.delta is not None and not cfg.delta > ceiling:
        raise BadInput(f"delta = {cfg.delta}: must be above the upper clip, {ceiling}, or that "
                       "never acts")
    if cfg.loss_type == "cispo" and (cfg.epsilon_high or 0) < 1:
        raise BadInput(f"epsilon_high = {cfg.epsilon_high} with loss_type = 'cispo': it is the "
                       "ceiling of the ratio itself; 5.0 is usual")
    if cfg.use_bias_correction_kl and (cfg.kl_in == "reward" or cfg.kl_estimator == "k2"):
        raise BadInput("use_bias_correction_kl = True: is for kl_in = 'loss' with k1 or k3")
    by_reward = cfg.multi_objective_aggregation == "normalize_then_sum"
    if by_reward and (cfg.kl_in == "reward" or cfg.zero_std_groups == "drop"):
        raise BadInput("multi_objective_aggregation = 'normalize_then_sum': there is no sum to take "
                       "the KL off, nor to compare; set kl_in = 'loss', zero_std_groups = 'keep'")
    if cfg.ref_model_sync_steps and cfg.beta == 0:
        raise BadInput(f"ref_model_sync_steps = {cfg.ref_model_sync_steps} with beta = 0: there is "
                       "no reference to sync; set beta above 0")


def check_critic(cfg):
    if not cfg.critic and cfg.num_generations == 1:
        raise BadInput("num_generations = 1: must be at least 2, since the group is the baseline; "
                       "or set critic = True")
    by_group = (cfg.importance_sampling_level == "sequence" or cfg.zero_std_groups == "drop"
                or cfg.multi_objective_aggregation == "normalize_then_sum")
    if cfg.critic and by_group:
        raise BadInput("critic = True: advantages are by token, not by group; leave "
                       "importance_sampling_level, zero_std_groups and multi_objective_aggregation "
                       "as they are")


def check_influence(cfg):
    for setting, name in (("tracin", "target"), ("tracin_select", "weigh")):
        if getattr(cfg, setting) == name and name not in cfg.functions:
            raise BadInput(f"{setting} = {name!r}: the config file defines no function {name}")
    if cfg.tracin == "target" and (cfg.tracin_val_prompts or cfg.tracin_leave_one_out):
        raise BadInput("tracin = 'target': what a rollout has to do with the number is the "
                       "function's own affair; unset tracin_val_prompts and tracin_leave_one_out")
    if cfg.tracin != "off" and cfg.loss_type == "bnpo" and cfg.num_iterations > 1:
        raise BadInput("loss_type = 'bnpo' with influence and num_iterations > 1: later passes "
                       "leave rows out of what it divides by; take dapo, or num_iterations = 1")
    knows_part = cfg.tracin in ("off", "self") or cfg.multiple_of_logp
    if cfg.tracin_leave_one_out and (cfg.tracin_val_prompts or not knows_part):
        raise BadInput("tracin_leave_one_out = True: a rollout's own part is known only with "
                       "tracin_val_prompts = 0 and with tracin = 'self', or mini_batch_size = 0, "
                       "top_entropy_quantile = 1 and critic = False")
    if not cfg.tracin_val_prompts and (cfg.tracin_val_size or cfg.tracin_val_reward
                                       or cfg.tracin_val_select != "random"):
        raise BadInput("tracin_val_size, tracin_val_select and tracin_val_reward are about the "
                       "rollouts of tracin_val_prompts, which is 0")
    if cfg.tracin_val_size == 1:
        raise BadInput("tracin_val_size = 1: two halves of the target are compared; at least 2, "
                       "or 0 for all")


def check_rewards(cfg):
    if cfg.reward_funcs is None:
        cfg.reward_funcs = ("reward",) if "reward" in cfg.functions else ("judge",)
    if not cfg.reward_funcs:
        raise BadInput("reward_funcs = (): must name a function, or 'judge'")
    for name in (*cfg.reward_funcs, cfg.tracin_val_reward or cfg.reward_funcs[0]):
        if name != "judge" and name not in list(cfg.functions):     # a list: it may be anything
            raise BadInput(f"reward_funcs, tracin_val_reward: {shown(name)} is neither 'judge' nor "
                           f"a function of the config file: {sorted(cfg.functions) or 'none'}")
        if name == "judge" and cfg.judge is None:
            raise BadInput("reward_funcs = 'judge' with judge = None: set judge = 'train' or a "
                           "file, or define a reward")
    if cfg.reward_weights is None:
        cfg.reward_weights = (1.0,) * len(cfg.reward_funcs)
    for weight in cfg.reward_weights:
        if type(weight) not in (int, float):
            raise BadInput(f"reward_weights = {shown(cfg.reward_weights)}: must be numbers")
        check_plain("reward_weights", weight)
    if len(set(cfg.reward_funcs)) != len(cfg.reward_weights):
        raise BadInput(f"reward_weights = {cfg.reward_weights}: must be one for each of "
                       f"reward_funcs = {cfg.reward_funcs}, none of them twice")


def check_environment(cfg):
    if not all(type(text) is str and text for text in cfg.stop_strings):
        raise BadInput(f"stop_strings = {shown(cfg.stop_strings)}: must be text")
    if cfg.stop_strings and "environment" not in cfg.functions:
        raise BadInput(f"stop_strings = {cfg.stop_strings}: the config file defines no function "
                       "environment that would be called there")
    if bool(cfg.force_rate) != (cfg.force_text is not None):
        raise BadInput(f"force_rate = {cfg.force_rate}, force_text = {shown(cfg.force_text)}: one "
                       "does nothing without the other; set both")
