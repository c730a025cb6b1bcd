"""The policy: load it from a file, a published model or a run, or make it; choose what to train."""
import copy
import os

import torch

from common.errors import BadInput
from common.files import load_file, load_torch, read_json
from common.processes import rank_and_size
from common.seeds import seed_for
from data.tokenizer import load_tokenizer
from data.weights import load_gpt, merged_weights, save_gpt
from fast import to_float
from model import GPTConfig, Policy
from run.checkpoint import newest_checkpoint
from run.settings import PARTS, Settings, read_run

BASE = "base.pt"        # in the folder of a run, see save_base


def plain(policy):
    """Merge a trained policy into a plain Policy, without adapters and critic."""
    model = Policy(policy.config)
    weights = merged_weights(policy)
    weights.setdefault("lm_head.weight", weights["wte.weight"])
    model.load_state_dict(weights)
    return model


def trainable(base, cfg):
    """Copy the base into the policy that is trained, with gradients on."""
    # train adapters beside the frozen weights, or a copy of all weights
    if cfg.lora_rank:
        from extras.lora import add_lora
        shared = {id(p): p for p in base.parameters()}
        policy = copy.deepcopy(base, shared)
        torch.manual_seed(seed_for(cfg.seed, "lora"))
        add_lora(policy, cfg.lora_rank, cfg.lora_alpha)
    else:
        policy = copy.deepcopy(base)
        to_float(policy)            # what is trained is in float32
        policy.requires_grad_(True)

    # a critic's value head, which is always trained
    if cfg.critic:
        from extras.critic import ValueHead
        weight = base.lm_head.weight                                                # (V, C)
        policy.value_head = ValueHead(weight.shape[1]).to(weight)

    policy.recompute = cfg.activation_checkpointing
    return policy.eval()    # without dropout: trainer and sampler must agree about every token


def reference_for(policy, base, cfg):
    """The reference: the base, or a copy of the policy if it will follow that."""
    if cfg.hook("follow"):
        return copy.deepcopy(policy).requires_grad_(False)
    return base


def is_reference(setup):
    """Whether the policy still has the very weights of the reference. Then the KL is 0, and what
    their log-probs differ by is rounding."""
    policy = merged_weights(setup.policy)
    reference = merged_weights(setup.reference)
    return all(torch.equal(policy[name], x) for name, x in reference.items())


# ------------------------------------------------------------------------------------------------
# the name of a policy


def is_run(path):
    """Whether a path is the folder of a run."""
    return os.path.isdir(path) and "settings" in read_json(f"{path}/config.json", missing={})


def is_published(name):
    """Whether a policy is a published model: neither a file, nor a run, nor "train"."""
    return not (name == "train" or name.endswith(".pt") or is_run(name))


def checkpoint_of(name):
    """The run's checkpoint that a policy's name stands for: the newest in a run's folder, or the
    file itself. None if the policy does not come from a run."""
    if is_run(name):
        return newest_checkpoint(name)
    content = load_torch(name, device="meta") if name.endswith(".pt") else None
    return name if isinstance(content, dict) and content.get("kind") == "run" else None


def settings_of(content):
    """The Settings in a checkpoint's content. Missing ones have their defaults; those that this
    version lacks are ignored."""
    return Settings(**{name: x for name, x in content["settings"].items() if name in PARTS})


def origin_of(name):
    """Follow a chain of runs, each begun from an earlier one, back to the first run's policy:
    "train", a .pt file or a published model. That policy has the tokenizer. For example RUN2,
    which began from RUN1: RUN2/base.pt says "gpt2", as RUN1 began from that."""
    if checkpoint := checkpoint_of(name):
        copied = f"{os.path.dirname(checkpoint) or '.'}/{BASE}"     # the earlier run may be gone
        is_here = os.path.exists(copied)
        return origin_of(copied if is_here else settings_of(load_file(checkpoint, "run")).policy)
    return load_torch(name, device="meta").get("origin", name) if name.endswith(".pt") else name


# ------------------------------------------------------------------------------------------------
# load it


def load_run(path):
    """Load the policy of a run's folder or of a .pt file -> (policy, tokenizer). For a published
    model's tokenizer, return the folder or file that has it."""
    checkpoint = checkpoint_of(path)
    if checkpoint is None:
        policy = load_gpt(path)
    else:       # its settings say whether it has adapters
        content = load_file(checkpoint, "run")
        cfg = settings_of(content)
        policy = trainable(Policy(GPTConfig(**content["shape"])), cfg)
        policy.load_state_dict(content["policy"])

    # which tokenizer?
    origin = origin_of(path)
    if origin == "train" or origin.endswith(".pt"):
        return policy, load_tokenizer(policy.config.vocab_size)
    from extras.hub.policy import locate
    return policy, locate(origin)


def save_base(folder, setup, cfg, is_new):
    """Write base.pt, a copy of the policy before training, if the run began from a file or a run:
    either may be trained on, replaced or moved, and this run still needs it as it was."""
    is_named = cfg.policy != "train" and not is_published(cfg.policy)
    path = f"{folder}/{BASE}"
    if is_named and rank_and_size()[0] == 0 and (is_new or not os.path.exists(path)):
        save_gpt(path, setup.base, origin=origin_of(cfg.policy))


def saved_base(cfg):
    """The path of that copy, if out_dir holds a run that began from the policy in the settings;
    else None."""
    path = f"{cfg.out_dir}/{BASE}"
    if not os.path.isfile(path) or read_run(cfg.out_dir)["settings"].get("policy") != cfg.policy:
        return None
    print(f"policy: {path}, {cfg.policy} as it was when this run began")
    return path


def note_ignored(policy, cfg):
    """Texts, and a shape in the settings, are only for "train": say so if they would be ignored. (A
    config file that names a policy may keep the texts that it was made of.)"""
    if "texts" in cfg.functions and cfg.policy == Settings.policy:
        print(f"note: the config file's texts are ignored: policy = {cfg.policy!r}, its default; "
              "'train' learns from them")
    for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
        actual = getattr(policy.config, name)
        wanted = getattr(cfg, name, actual)
        if wanted not in (getattr(Settings, name, actual), actual):
            print(f"note: {name} = {wanted} is ignored: {cfg.policy} has {actual}")


def load_policy(cfg, device="cpu", may_train=True):
    """Load the policy of a file, a run or a published name, or make the policy "train" on a device
    -> (policy, tokenizer). may_train: False for a command that only looks at a run."""
    name = saved_base(cfg) or cfg.policy
    if name == "train":
        from extras.make.policy import made_policy
        name = made_policy(cfg, device, may_train)

    # a run, a file of weights, or a published model: each brings its tokenizer
    if is_published(name):
        from extras.hub.policy import load
        policy, tokenizer = load(name)
    else:
        policy, tokenizer = load_run(name)
        policy = plain(policy) if checkpoint_of(name) else policy
        if isinstance(tokenizer, str):
            from extras.hub.policy import tokenizer_of
            tokenizer = tokenizer_of(tokenizer)

    # arguments for its chat template
    if cfg.chat_template_kwargs:
        if getattr(tokenizer, "chat_template", None) is None:
            raise BadInput(f"chat_template_kwargs: policy = {cfg.policy!r} has no chat template")
        tokenizer.give_template(cfg.chat_template_kwargs)

    note_ignored(policy, cfg)
    return policy, tokenizer
