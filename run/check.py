"""Refuse settings that cannot work, in one line: the setting, its value, the fix."""
import math
import os
import typing

from common import variants
from common.errors import BadInput, shown
from common.files import ROOT, read_json
from common.kinds import Range, at_least, kinds_of
from common.variants import variants_of
from loss import by_micro_batch


def at_home(name, path):
    """Replace ~ by the home folder. A shell does so only at the beginning of a word, not in
    --name=~/folder."""
    if not isinstance(path, str) or not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded == path:
        raise BadInput(f"{name} = {shown(path)}: there is no such home folder; for a folder of "
                       f"that name write ./{path}")
    return expanded


def what_it_must_be(name, value, hint, kinds):
    """The condition that a setting's value breaks, by its type and its marks (common/kinds.py), in
    words; "" if the value is good by itself."""
    choices = typing.get_args(hint)
    if "variant" in kinds:
        of_core = typing.get_args(choices[0])
        if value in of_core or value in variants_of(name):
            return ""
        further = "" if variants.HERE else "; more are in extras/variants, which is not here"
        return f"one of {', '.join((*of_core, *variants_of(name)))}{further}"
    if typing.get_origin(hint) is typing.Literal and value not in choices:
        return f"one of {', '.join(choices)}"
    if value == "":
        return "text that is not empty"

    # numbers: also finite, and small enough for torch and JSON
    if type(value) not in (int, float):
        return ""
    if not abs(value) < 2 ** 63:    # or it is NaN
        return "a number below 2 ** 63"
    ranges = [kind for kind in kinds if isinstance(kind, Range)]
    return next((x.words for x in (*ranges, at_least(0)) if not x.holds(value)), "")


def is_run(path):
    """Whether a path is the folder of a run."""
    content = read_json(f"{path}/config.json", missing={}) if os.path.isdir(path) else {}
    return isinstance(content, dict) and "settings" in content


# ------------------------------------------------------------------------------------------------
# settings that need a folder of extras/: the core imports one only when such a setting is on


def is_published(name):
    """Whether a policy or a judge is a published model: neither a file, a run, nor made here."""
    return not (name in (None, "train") or name.endswith(".pt") or is_run(name))


def policy_extras(cfg):
    """Yield (folder of extras/, the setting that needs it) for the parts of a policy."""
    if cfg.lora_rank:
        yield "lora", f"lora_rank = {cfg.lora_rank}"
    if cfg.critic:
        yield "critic", "critic = True"


def needed_extras(cfg):
    """Yield the same for all settings."""
    yield from policy_extras(cfg)
    for setting in ("policy", "judge", "eval_judge"):
        name = getattr(cfg, setting)
        if name == "train":
            yield "make", f"{setting} = 'train'"
        elif is_published(name):
            yield "hub", f"{setting} = {shown(name)}: is no .pt file and"
    if cfg.answers:
        yield "environment", "tools" if cfg.tools else "a function environment"
    if cfg.compile:
        yield "compiled", "compile = True"
    if cfg.debug_step:
        yield "step", "debug_step = True"


def check_extras(needed):
    """Refuse a setting whose folder somebody has deleted. needed: (folder, setting)."""
    for folder, setting in needed:
        if not os.path.isdir(os.path.join(ROOT, "extras", folder)):
            raise BadInput(f"{setting} needs extras/{folder}, which is not here")


# ------------------------------------------------------------------------------------------------
# settings that must fit together


def fill_in_rewards(cfg):
    """Fill in the defaults: the config file's function reward, else the judge, with weight 1."""
    if cfg.reward_funcs is None:
        cfg.reward_funcs = ("reward",) if "reward" in cfg.functions else ("judge",)
    if cfg.reward_weights is None:
        cfg.reward_weights = (1.0,) * len(cfg.reward_funcs)


def wrong_models(cfg):
    """Yield (whether it is wrong, what to say) for each rule, like the functions below."""
    for role in ("judge", "eval_judge"):
        name = getattr(cfg, role)
        yield name and is_run(name), (
            f"{role} = {name!r}: is the folder of a run, which has a policy but not a judge; name "
            "a .pt file of a judge or a published classifier")
    yield cfg.chat_template_kwargs is not None and not is_published(cfg.policy), (
        f"chat_template_kwargs: policy = {cfg.policy!r} has no chat template; name a published "
        "chat model, or leave them out")


def wrong_rows(cfg):
    words = cfg.prompt_words
    are_counts = len(words) == 2 and all(type(n) is int for n in words)
    yield not are_counts or not 1 <= words[0] <= words[1], (
        f"prompt_words = {words!r}: must be (fewest, most), whole numbers from 1")
    N = cfg.num_prompts * cfg.num_generations
    yield N % (cfg.mini_batch_size or N), (
        f"mini_batch_size = {cfg.mini_batch_size}: must divide num_prompts * num_generations = "
        f"{cfg.num_prompts} * {cfg.num_generations} = {N} rows")
    yield 0 < cfg.decode_batch_size < cfg.num_generations, (
        f"decode_batch_size = {cfg.decode_batch_size}: must be at least num_generations = "
        f"{cfg.num_generations}: groups are decoded whole")


def wrong_advantages(cfg):
    by_function = "advantage" in cfg.functions
    yield by_function and (cfg.critic or cfg.kl_in_reward), (
        "advantage: the config file's function decides alone: set critic = False and kl_in = "
        "'loss'")
    yield not cfg.critic and not by_function and cfg.num_generations == 1, (
        "num_generations = 1: must be at least 2, since the group is the baseline; or set critic "
        "= True")
    yield cfg.critic and cfg.zero_std_groups != "keep", (
        "critic = True: advantages are by token; leave zero_std_groups as it is")


def wrong_influence(cfg):
    for setting, name in (("tracin", "target"), ("tracin_select", "weigh")):
        yield getattr(cfg, setting) == name and name not in cfg.functions, (
            f"{setting} = {name!r}: the config file defines no function {name}")

    yield cfg.tracin != "off" and by_micro_batch(cfg) and cfg.num_iterations > 1, (
        f"loss_type = {cfg.loss_type!r} divides by the tokens of a micro-batch: set num_iterations "
        "= 1 with influence, or take dapo")

    # held-out rollouts
    yield cfg.tracin_val_reward and not cfg.tracin_val_prompts, (
        "tracin_val_reward: set tracin_val_prompts, which is 0")
    yield cfg.tracin != "off" and cfg.tracin_val_prompts * cfg.num_generations == 1, (
        "tracin_val_prompts = 1, with num_generations = 1: must be at least 2; the target of one "
        "reward is 0, as it is its own mean")


def wrong_rewards(cfg):
    yield not cfg.reward_funcs, "reward_funcs = (): must name a function, or 'judge'"
    defined = sorted(cfg.functions) or "none"
    for name in (*cfg.reward_funcs, cfg.tracin_val_reward or cfg.reward_funcs[0]):
        yield name != "judge" and name not in list(cfg.functions), (     # it may be unhashable
            f"reward_funcs, tracin_val_reward: {shown(name)} is neither 'judge' nor a function of "
            f"the config file: {defined}")
        yield name == "judge" and cfg.judge is None, (
            "judge = None leaves no reward: set judge to a file, define a function reward, or name "
            f"yours in reward_funcs; the config file defines {defined}")
    weights = cfg.reward_weights
    yield not all(type(weight) in (int, float) and math.isfinite(weight) for weight in weights), (
        f"reward_weights = {weights}: must be numbers")
    yield len(set(cfg.reward_funcs)) != len(weights), (
        f"reward_weights = {weights}: must be one for each of reward_funcs = {cfg.reward_funcs}, "
        "none of them twice")


RULES = (wrong_models, wrong_rows, wrong_rewards, wrong_advantages, wrong_influence)


def check(cfg):
    """Raise BadInput for the first setting that cannot work. Fill in None, and the home folder for
    a ~ at the beginning of a path. Return cfg."""
    types = typing.get_type_hints(type(cfg))
    hints = typing.get_type_hints(type(cfg), include_extras=True)
    for name, value in cfg.public().items():
        # fill in the home folder
        kinds = kinds_of(hints[name])
        if "path" in kinds:
            value = at_home(name, value)
            setattr(cfg, name, value)

        # each setting by itself
        if wanted := what_it_must_be(name, value, types[name], kinds):
            raise BadInput(f"{name} = {shown(value)}: must be {wanted}")

    # those that must fit together
    fill_in_rewards(cfg)
    of_extras = [extra.rules for extra in type(cfg).__bases__ if hasattr(extra, "rules")]
    for rules in (*RULES, *of_extras):
        for is_wrong, what in rules(cfg):
            if is_wrong:
                raise BadInput(what)

    # and what they need must be here
    check_extras(needed_extras(cfg))
    return cfg
