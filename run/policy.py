"""The policy: from a file, a published model, a run, or new; and what of it is trained."""
import copy
import os

import torch

from common.files import undamaged
from common.script import BadInput, seed_for
from data.tokenizer import load_tokenizer
from data.weights import load_gpt, merged_weights, rebuilt
from model import GPTConfig, Policy
from run.check import check_extras, is_run, policy_extras
from run.checkpoint import newest_checkpoint, read_checkpoint
from run.settings import HINTS, Settings, assign

# the settings that give a new policy its shape: the first fields of GPTConfig, in their order
SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")


def plain(policy):
    """A policy without adapters and critic: what a run trained, merged into one Policy."""
    model = Policy(policy.config)
    weights = merged_weights(policy)
    weights.setdefault("lm_head.weight", weights["wte.weight"])
    model.load_state_dict(weights)
    return model


def load_policy(cfg):
    """Load the policy of a file, a run or a published name -> (policy, tokenizer); the policy is
    None for "train"."""
    if cfg.policy == "train":
        return None, load_tokenizer(cfg.vocab_size)

    # a run, a file of weights, or a published model: each brings its tokenizer
    if is_run(cfg.policy):
        policy, tokenizer = load_run(cfg.policy)
        policy = plain(policy)
        if isinstance(tokenizer, str):
            from extras.hub.policy import tokenizer_of
            tokenizer = tokenizer_of(tokenizer)
    elif cfg.policy.endswith(".pt"):
        policy = load_gpt(cfg.policy)
        tokenizer = load_tokenizer(policy.config.vocab_size)
    else:
        from extras.hub.policy import load
        policy, tokenizer = load(cfg.policy)

    # what its chat template asks for
    if cfg.chat_template_kwargs:
        if getattr(tokenizer, "chat_template", None) is None:
            raise BadInput(f"chat_template_kwargs: policy = {cfg.policy!r} has no chat template")
        tokenizer.give_template(cfg.chat_template_kwargs)

    # its shape overrides the settings, and a note names each that differs
    for name in SHAPE:
        wanted = getattr(cfg, name)
        found = getattr(policy.config, name)
        if wanted not in (getattr(Settings, name), found):
            print(f"note: {name} = {wanted} is ignored: {cfg.policy} has {found}")
        setattr(cfg, name, found)
    return policy, tokenizer


def new_policy(cfg):
    """Make a policy of the shape in the settings, with random weights."""
    return Policy(GPTConfig(*(getattr(cfg, name) for name in SHAPE)))


def trainable(base, cfg):
    """Copy the base into the policy that is trained, with gradients on."""
    # adapters, beside frozen weights that it shares with the base; or a copy of all weights
    if cfg.lora_rank:
        from extras.lora import add_lora
        shared = {id(p): p for p in base.parameters()}
        policy = copy.deepcopy(base, shared)
        torch.manual_seed(seed_for(cfg.seed, "lora"))
        add_lora(policy, cfg.lora_rank, cfg.lora_alpha)
    else:
        policy = copy.deepcopy(base).requires_grad_(True)

    # a critic's value head, which is always trained
    if cfg.critic:
        from extras.critic import ValueHead
        weight = base.lm_head.weight                                                # (V, C)
        policy.value_head = ValueHead(weight.shape[1]).to(weight)

    policy.recompute = cfg.activation_checkpointing
    return policy


def reference_for(policy, base, cfg):
    """The reference: the base, or a copy of the policy where a sync will make it follow."""
    if cfg.ref_model_sync_steps:
        return copy.deepcopy(policy).requires_grad_(False)
    return base


def settings_of(path, content=None):
    """The Settings of the run that wrote a checkpoint. content: what it holds, if it is read."""
    content = content or read_checkpoint(path)

    # as far as this version has them; what is new has its default
    cfg = Settings()
    with undamaged(path):
        for name, value in content["settings"].items():
            if name in HINTS:
                assign(cfg, name, value, path)
        check_extras(policy_extras(cfg))
    return cfg


def load_run(path):
    """Load the policy of a run's folder or of a .pt file -> (policy, tokenizer). In place of the
    tokenizer of a published model comes the folder or file that has it."""
    # a .pt file is whole
    if not os.path.isdir(path):
        policy = load_gpt(path)
        return policy, load_tokenizer(policy.config.vocab_size)

    # a run's policy may have adapters, as its settings say
    path = newest_checkpoint(path)
    content = read_checkpoint(path)
    cfg = settings_of(path, content)
    with undamaged(path):
        policy = rebuilt(path, content["shape"], content["policy"],
                         lambda config: trainable(Policy(config), cfg))
    return policy, tokenizer_of_settings(cfg)


def tokenizer_of_settings(cfg):
    """The tokenizer of a run with these settings; of a published model the folder or file that has
    it."""
    if cfg.policy == "train" or cfg.policy.endswith(".pt"):
        return load_tokenizer(cfg.vocab_size)
    if is_run(cfg.policy):
        return tokenizer_of_settings(settings_of(newest_checkpoint(cfg.policy)))
    from extras.hub.policy import locate
    return locate(cfg.policy)
