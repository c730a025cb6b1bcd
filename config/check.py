"""What cannot work, refused in one line: the setting, its value, the fix."""
import math

from run.script import BadInput, shown

INF = float("inf")
LARGEST = 1e38  # what float32 holds, with room for 1 + epsilon_high
LONGEST = 240  # bytes of a file's name; file systems allow 255, and numbers and endings are added
CHOICES = {
    "dtype": ("auto", "fast", "float32", "bfloat16"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"),
    "importance_sampling_level": ("token", "sequence"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_in": ("loss", "reward"),
    "zero_std_groups": ("keep", "drop"),
    "judge_score": ("probability", "logprob", "logit"),
    "lr_decay": ("constant", "linear", "cosine"),
    "tracin": ("off", "self", "reward", "advantage", "contrastive", "target"),
    "tracin_val_select": ("random", "best", "worst", "balanced"),
    "tracin_select": ("positive", "drop", "top", "bottom", "random", "top_advantage", "pods", "all",
                      "weigh"),
    "tracin_normalizer": ("all", "kept", "norm"),
}
AT_LEAST = {  # smallest value
    0: ("max_iters", "top_k", "decode_batch_size",
        "epsilon", "epsilon_high", "beta", "entropy_coef", "mini_batch_size", "warmup_iters",
        "max_grad_norm", "eval_interval", "lora_rank", "lora_alpha", "pretrain_tokens", "ref_model_sync_steps",
        "expect_rise", "weight_decay", "tracin_val_prompts", "tracin_val_size",
        "tracin_memory", "max_turns", "value_coef"),
    1: ("save_interval", "num_prompts", "max_completion_length", "num_iterations",
        "micro_batch_size", "num_eval_prompts", "num_eval_generations",
        "vocab_size", "n_layer", "n_head", "n_embd", "num_generations"),
    2: ("block_size",),
    1e-6: ("temperature", "sapo_temperature_neg", "sapo_temperature_pos"),
}
BETWEEN = {
    (0, 1): ("top_p", "min_p", "top_entropy_quantile",
             "ref_model_mixup_alpha", "adam_beta1", "adam_beta2", "tracin_fraction", "force_rate",
             "gae_gamma", "gae_lambda", "tracin_target_ema"),
    (0, 2 ** 62): ("seed",),
    (0, 1024): ("threads",),
    (0, 10 ** 9): ("judge_tokens",),    # batches are drawn ahead
}
BELOW_1 = ("adam_beta1", "adam_beta2", "tracin_target_ema")
ABOVE_0 = ("learning_rate", "top_p", "top_entropy_quantile")


def check(cfg):
    """Raises BadInput for the first setting that cannot work. Fills in None and True."""
    for name, value in cfg.public().items():
        for part in value if type(value) is tuple else (value,):
            check_plain(name, part)
    check_values(cfg)
    check_rows(cfg)
    check_parts(cfg)
    check_loss(cfg)
    check_critic(cfg)
    check_influence(cfg)
    check_rewards(cfg)
    check_environment(cfg)


def check_plain(name, value):
    """A number that torch can take, or text that a file can hold."""
    if type(value) is float and not abs(value) <= LARGEST:
        raise BadInput(f"{name} = {value}: must be a finite number, at most {LARGEST:g} in size")
    if type(value) is int and not -2 ** 63 < value < 2 ** 63:
        raise BadInput(f"{name} = {shown(value)}: must be below 2 ** 63")
    if type(value) is not str:
        return
    if not value:
        raise BadInput(f"{name} = '': must not be empty")
    if "\0" in value:
        raise BadInput(f"{name} = {shown(value)}: must hold no NUL")
    try:
        size = max(len(part.encode()) for part in value.split("/"))
    except UnicodeEncodeError:
        raise BadInput(f"{name} = {shown(value)}: must be UTF-8") from None
    if size > LONGEST:
        raise BadInput(f"{name} = {shown(value)}: {size} bytes are too many for a name, at most "
                       f"{LONGEST}")


def check_values(cfg):
    """Each setting by itself."""
    for name, choices in CHOICES.items():
        if getattr(cfg, name) not in choices:
            raise BadInput(f"{name} = {getattr(cfg, name)!r}: must be one of {', '.join(choices)}")
    for low, names in AT_LEAST.items():
        for name in names:
            value = getattr(cfg, name)
            if value is not None and not value >= low:
                raise BadInput(f"{name} = {value}: must be at least {low}")
    for (low, high), names in BETWEEN.items():
        for name in names:
            if not low <= getattr(cfg, name) <= high:
                raise BadInput(f"{name} = {getattr(cfg, name)}: must be from {low} to {high}")
    for name in BELOW_1:
        if not getattr(cfg, name) < 1:
            raise BadInput(f"{name} = {getattr(cfg, name)}: must be below 1")
    for name in ABOVE_0:
        if not getattr(cfg, name) > 0:
            raise BadInput(f"{name} = {getattr(cfg, name)}: must be above 0")
    if cfg.device.startswith("meta"):
        raise BadInput(f"device = {cfg.device!r}: holds no numbers; try device = 'auto'")
    words = cfg.prompt_words
    if len(words) != 2 or any(type(n) is not int for n in words) or not 0 <= words[0] <= words[1]:
        raise BadInput(f"prompt_words = {words}: must be (fewest, most), whole numbers")


def check_rows(cfg):
    """The sizes of batch and mini-batch, and of what is decoded at once."""
    N = cfg.num_prompts * cfg.num_generations
    mini = cfg.mini_batch_size or N
    if N % mini:
        raise BadInput(
            f"num_prompts * num_generations = {cfg.num_prompts} * {cfg.num_generations} = {N} "
            f"rows, mini_batch_size = {mini}: must divide them")
    if 0 < cfg.decode_batch_size < cfg.num_generations:
        raise BadInput(
            f"decode_batch_size = {cfg.decode_batch_size}: must be at least num_generations = "
            f"{cfg.num_generations}, since a prompt is computed once for its group")


def check_parts(cfg):
    """The policy's heads."""
    if cfg.n_embd % cfg.n_head and cfg.policy == "train":  # a published model may differ
        raise BadInput(f"n_embd = {cfg.n_embd} is not a multiple of n_head = {cfg.n_head}")


def check_loss(cfg):
    name = "epsilon" if cfg.epsilon_high is None else "epsilon_high"
    ceiling = 1 + getattr(cfg, name)
    if cfg.delta is not None and not cfg.delta > ceiling:
        raise BadInput(f"delta = {cfg.delta}: must be above 1 + {name} = {ceiling}, or the clip "
                       "never acts")
    if cfg.loss_type == "cispo" and (cfg.epsilon_high or 0) < 1:
        raise BadInput(
            f"loss_type = 'cispo' with epsilon_high = {cfg.epsilon_high}: there it is the ceiling "
            "of the ratio itself; 5.0 is usual")
    if cfg.use_bias_correction_kl and (cfg.kl_in == "reward" or cfg.kl_estimator == "k2"):
        raise BadInput(
            f"use_bias_correction_kl = True with kl_in = {cfg.kl_in!r}, kl_estimator = "
            f"{cfg.kl_estimator!r}: it is for k1 or k3 in the loss")
    if cfg.multi_objective_aggregation == "normalize_then_sum" and cfg.kl_in == "reward":
        raise BadInput(
            "multi_objective_aggregation = 'normalize_then_sum' with kl_in = 'reward': the KL is "
            "no reward of its own; set kl_in = 'loss'")
    if cfg.multi_objective_aggregation == "normalize_then_sum" and cfg.zero_std_groups == "drop":
        raise BadInput(
            "zero_std_groups = 'drop' with multi_objective_aggregation = 'normalize_then_sum': "
            "rewards of equal sums can differ; set zero_std_groups = 'keep'")
    if cfg.ref_model_sync_steps and cfg.beta == 0:
        raise BadInput(f"ref_model_sync_steps = {cfg.ref_model_sync_steps} with beta = 0: there is "
                       "no reference to sync; set beta above 0")


def check_critic(cfg):
    if cfg.value_clip is not None and not cfg.value_clip > 0:
        raise BadInput(f"value_clip = {cfg.value_clip}: must be above 0, or None for no clip")
    if not cfg.critic and cfg.num_generations == 1:
        raise BadInput("num_generations = 1: must be at least 2, since the group is the baseline; "
                       "or set critic = True")
    if not cfg.critic:
        return
    only = dict(importance_sampling_level="token", zero_std_groups="keep",
                multi_objective_aggregation="sum_then_normalize")
    why = dict(importance_sampling_level="advantages are by token, and so is the ratio",
               zero_std_groups="a group of equal rewards teaches too",
               multi_objective_aggregation="no reward is normalised by its group")
    for name, value in only.items():
        if getattr(cfg, name) != value:
            raise BadInput(f"{name} = {getattr(cfg, name)!r} with critic = True: {why[name]}; set "
                           f"{name} = {value!r}")


def check_influence(cfg):
    for setting, name in (("tracin", "target"), ("tracin_select", "weigh")):
        if getattr(cfg, setting) == name and name not in cfg.functions:
            raise BadInput(f"{setting} = {name!r}: the config file defines no function {name}")
    if cfg.tracin == "target" and (cfg.tracin_val_prompts or cfg.tracin_leave_one_out):
        raise BadInput("tracin = 'target': what a rollout has to do with the number is the "
                       "function's own affair; unset tracin_val_prompts and tracin_leave_one_out")
    if cfg.tracin != "off" and cfg.loss_type == "bnpo" and cfg.num_iterations > 1:
        raise BadInput(
            "loss_type = 'bnpo' with influence and num_iterations > 1: it divides by the rows at "
            "hand, and later passes leave some out; take dapo, or num_iterations = 1")
    own_batch = cfg.tracin not in ("off", "self") and not cfg.tracin_val_prompts
    if cfg.tracin_leave_one_out and own_batch and not cfg.multiple_of_logp:
        raise BadInput(
            "tracin_leave_one_out = True: a rollout's own part is not known when what is scored is "
            "not a multiple of its log-prob; set mini_batch_size = 0, "
            "top_entropy_quantile = 1, critic = False; or tracin = 'self'")
    if cfg.tracin_leave_one_out and cfg.tracin_val_prompts:
        raise BadInput("tracin_leave_one_out = True with tracin_val_prompts: a held-out target "
                       "holds no rollout's own part")
    chooses = cfg.tracin_val_size or cfg.tracin_val_select != "random"
    if chooses and not cfg.tracin_val_prompts:
        raise BadInput(
            f"tracin_val_size = {cfg.tracin_val_size}, tracin_val_select = "
            f"{cfg.tracin_val_select!r}: they choose from the rollouts of tracin_val_prompts, "
            "which is 0")
    if not cfg.tracin_val_prompts and cfg.tracin_val_reward:
        raise BadInput(f"tracin_val_reward = {cfg.tracin_val_reward!r}: it is about the rollouts of "
                       "tracin_val_prompts, which is 0")
    if cfg.tracin_val_size == 1:
        raise BadInput("tracin_val_size = 1: two halves of the target are compared; at least 2, "
                       "or 0 for all")


def check_rewards(cfg):
    if cfg.reward_funcs is None:
        cfg.reward_funcs = ("reward",) if "reward" in cfg.functions else ("judge",)
    for name in cfg.reward_funcs:
        if name != "judge" and name not in list(cfg.functions):     # a list: name may be anything
            raise BadInput(
                f"reward_funcs names {name!r}: neither 'judge' nor a function of the config file; "
                f"it defines {sorted(cfg.functions) or 'none'}")
    if "judge" in cfg.reward_funcs and cfg.judge is None:
        raise BadInput("reward_funcs names 'judge' but judge = None: set judge = 'train' or a "
                       "file, or define a reward")
    name = cfg.tracin_val_reward
    if name is not None and name not in ("judge", *cfg.functions):
        raise BadInput(f"tracin_val_reward = {name!r}: neither 'judge' nor a function of the "
                       "config file")
    if name == "judge" and cfg.judge is None:
        raise BadInput("tracin_val_reward = 'judge' but judge = None: set judge = 'train' or a "
                       "file")
    if len(set(cfg.reward_funcs)) < len(cfg.reward_funcs):
        raise BadInput(f"reward_funcs = {cfg.reward_funcs}: names one twice; raise its weight")
    if cfg.reward_weights is None:
        cfg.reward_weights = (1.0,) * len(cfg.reward_funcs)
    if not all(type(w) in (int, float) and math.isfinite(w) for w in cfg.reward_weights):
        raise BadInput(f"reward_weights = {cfg.reward_weights}: must be finite numbers")
    if len(cfg.reward_weights) != len(cfg.reward_funcs) or not cfg.reward_funcs:
        raise BadInput(
            f"reward_weights = {cfg.reward_weights}: {len(cfg.reward_weights)} weights for "
            f"{len(cfg.reward_funcs)} reward_funcs {cfg.reward_funcs}")


def check_environment(cfg):
    if not all(type(text) is str for text in cfg.stop_strings):
        raise BadInput(f"stop_strings = {cfg.stop_strings}: must be text")
    if cfg.stop_strings and "environment" not in cfg.functions:
        raise BadInput(f"stop_strings = {cfg.stop_strings}: the config file defines no function "
                       "environment that would be called there")
    if cfg.force_rate and cfg.force_text is None:
        raise BadInput(f"force_rate = {cfg.force_rate}: set force_text, the text to begin with")
