"""Settings that must fit together: each rule says what is wrong, and the fix, in one line."""
from common.errors import BadInput, shown
from loss import by_micro_batch


def fill_in_rewards(cfg):
    """Fill in the defaults: the config file's function reward, else the judge, with weight 1."""
    if cfg.reward_funcs is None:
        cfg.reward_funcs = ("reward",) if "reward" in cfg.functions else ("judge",)
    if cfg.reward_weights is None:
        cfg.reward_weights = (1.0,) * len(cfg.reward_funcs)


def rules_of_rewards(cfg):
    """Yield (whether it is wrong, what to say) for each rule, like the functions below."""
    yield not cfg.reward_funcs, "reward_funcs = (): must name a function, or 'judge'"
    defined = sorted(cfg.functions) or "none"
    for name in (*cfg.reward_funcs, cfg.tracin_val_reward or cfg.reward_funcs[0]):
        yield name != "judge" and name not in cfg.functions, (
            f"reward_funcs, tracin_val_reward: {shown(name)} is neither 'judge' nor a function of "
            f"the config file: {defined}")
        yield name == "judge" and cfg.judge is None, (
            "judge = None leaves no reward: set judge to a file, define a function reward, or name "
            f"yours in reward_funcs; the config file defines {defined}")
    yield len(set(cfg.reward_funcs)) != len(cfg.reward_weights), (
        f"reward_weights = {cfg.reward_weights}: must be one for each of reward_funcs = "
        f"{cfg.reward_funcs}")


def rules_of_rows(cfg):
    N = cfg.num_prompts * cfg.num_generations
    yield N % (cfg.mini_batch_size or N), (
        f"mini_batch_size = {cfg.mini_batch_size}: must divide num_prompts * num_generations = "
        f"{cfg.num_prompts} * {cfg.num_generations} = {N} rows")


def rules_of_advantages(cfg):
    by_function = "advantage" in cfg.functions
    yield by_function and (cfg.critic or cfg.kl_in_reward), (
        "advantage: the config file's function decides alone: set critic = False and kl_in = "
        "'loss'")
    yield not cfg.critic and not by_function and cfg.num_generations == 1, (
        "num_generations = 1: must be at least 2, since the group is the baseline; or set critic "
        "= True")
    yield cfg.critic and cfg.zero_std_groups != "keep", (
        "critic = True: advantages are by token; leave zero_std_groups as it is")


def rules_of_hooks(cfg):
    for name in sorted(cfg.hooks_of_extras().keys() & cfg.functions.keys()):
        is_hook = cfg.hook(name) is cfg.functions[name]     # not a reward that is called alike
        yield is_hook, (
            f"{name}: the config file has this function, and a setting puts another in its place "
            "(such as loss_type, delta or critic): keep one")


def rules_of_influence(cfg):
    for setting, name in (("tracin", "target"), ("tracin_select", "weigh")):
        yield getattr(cfg, setting) == name and name not in cfg.functions, (
            f"{setting} = {name!r}: the config file defines no function {name}")
    yield cfg.tracin != "off" and by_micro_batch(cfg) and cfg.num_iterations > 1, (
        f"loss_type = {cfg.loss_type!r} divides by the tokens of a micro-batch: set num_iterations "
        "= 1 with influence, or take dapo")

    # held-out rollouts
    yield cfg.tracin_val_reward and not cfg.tracin_val_prompts, (
        "tracin_val_reward: set tracin_val_prompts, which is 0")


RULES = (rules_of_rewards, rules_of_rows, rules_of_advantages, rules_of_hooks, rules_of_influence)


def check(cfg):
    """Raise BadInput for the first rule that settings break; fill in the rewards. Return cfg."""
    fill_in_rewards(cfg)
    of_extras = [extra.rules for extra in type(cfg).__bases__ if hasattr(extra, "rules")]
    for rules in (*RULES, *of_extras):
        for is_wrong, what in rules(cfg):
            if is_wrong:
                raise BadInput(what)
    return cfg
