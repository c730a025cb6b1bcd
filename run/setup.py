"""What a run starts from, and what the loop of grpo.py works with. grpo.prepare makes it."""
from dataclasses import dataclass, field
from typing import Any

import torch

import tracin
from common.device import (
    autocast, check_fits, machine, pick_device, pick_dtype, warn_of_influence)
from data.comments import get_splits
from data.prompts import load_prompts
from judge.rewards import try_rewards
from judge.train import named_judges
from run.policy import load_policy


@dataclass
class Setup:
    """What the loop works with."""
    policy: torch.nn.Module
    base: torch.nn.Module         # the policy before training; for the evaluation's perplexity
    reference: torch.nn.Module    # the base, unless ref_model_sync_steps makes it follow the policy
    judges: dict                  # {"judge": ..., "eval_judge": ...}
    reward_funcs: dict            # {name: function}, called by judge.rewards.score
    optimizer: torch.optim.Optimizer
    trained: list                 # parameters with gradient
    tokenizer: Any
    prompts: list                 # of data.prompts.Prompt
    eval_prompts: list
    val_prompts: list             # for the target of influence
    device: torch.device
    dtype: torch.dtype            # of the forward passes
    generate: Any                 # rollout.generate, or one that decodes faster
    policy_fn: Any                # the policy, compiled if cfg.compile says so (never for a tape)
    reference_fn: Any             # the reference, likewise
    target_average: tracin.Average      # of the target's gradient, over steps
    # {index of a prompt: [rewards of a group, ...]}, oldest first; for the config file's choose
    seen: dict = field(default_factory=dict)

    def autocast(self):
        """The context of forward passes: in self.dtype."""
        return autocast(self.device, self.dtype)

    def environment(self, prompts, cfg):
        """What answers completions, one of each of these prompts (N), while they are sampled
        (rollout.generate's respond), or None."""
        if not cfg.answers:
            return None
        from extras.environment import answering
        return answering(self.tokenizer, cfg, prompts)


@dataclass
class Inputs:
    """What comes from files: loaded and checked, not trained."""
    device: torch.device
    dtype: torch.dtype
    base: torch.nn.Module | None        # None: to be pretrained
    judges: dict                        # those that are not to be trained
    splits: dict                        # {split: [(comment, label)]}
    tokenizer: Any
    prompts: list                       # of data.prompts.Prompt
    eval_prompts: list
    val_prompts: list


def read_inputs(cfg):
    """Loads and checks every input before any training starts -> Inputs."""
    device = pick_device(cfg.device, cfg.threads)
    dtype = pick_dtype(cfg.dtype, device)
    print(machine(cfg.device, device, dtype))
    base, tokenizer = load_policy(cfg)
    check_fits(cfg, device)
    warn_of_influence(cfg, device, dtype)
    judges = named_judges(cfg, device)
    splits = get_splits(cfg)
    prompts, eval_prompts, val_prompts = load_prompts(cfg, tokenizer, splits)
    try_rewards(cfg, prompts + eval_prompts + val_prompts)
    if cfg.answers:
        from extras.environment import try_environment
        try_environment(cfg, prompts + eval_prompts + val_prompts)
    return Inputs(
        device, dtype, base, judges, splits, tokenizer, prompts, eval_prompts, val_prompts)
