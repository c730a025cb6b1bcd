"""What the loop of grpo.py works with, and what can be wrong with it. It is made in grpo.make."""
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

import tracin
from common.device import autocast, check_fits, pick_device, pick_dtype
from data.comments import get_splits
from data.prompts import load_prompts
from judge.rewards import try_rewards
from judge.train import named_judges
from run.policy import load_policy, new_policy


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

    def autocast(self):
        """The context of forward passes: in self.dtype."""
        return autocast(self.device, self.dtype)

    def environment(self, prompts, num_generations, cfg):
        """What answers completions of these prompts (rollout.generate's respond), or None."""
        if not cfg.answers:
            return None
        from extras.environment import answering
        return answering(self.tokenizer, cfg, prompts, num_generations)


def read_inputs(cfg):
    """Loads and checks every input before any training starts."""
    device = pick_device(cfg.device, cfg.threads)
    dtype = pick_dtype(cfg.dtype, device)
    base, tokenizer = load_policy(cfg)
    check_fits(cfg, device)
    judges = named_judges(cfg, device)
    splits = get_splits(cfg)
    prompts, eval_prompts, val_prompts = load_prompts(cfg, tokenizer, splits)
    try_rewards(cfg, prompts + eval_prompts + val_prompts)
    if cfg.answers:
        from extras.environment import try_environment
        try_environment(cfg, prompts + eval_prompts + val_prompts)
    return SimpleNamespace(
        device=device, dtype=dtype, base=base, judges=judges, splits=splits, tokenizer=tokenizer,
        prompts=prompts, eval_prompts=eval_prompts, val_prompts=val_prompts)


def try_functions(cfg, inputs, make, collect, update):
    """Calls the config file's target and weigh, before anything is trained: takes a step on short
    completions of two prompts with made-up rewards, by a policy that may be random. make, collect
    and update are grpo.py's."""
    if cfg.tracin != "target" and cfg.tracin_select != "weigh":
        return
    short = replace(cfg, max_turns=0, mask_truncated_completions=False,
                    max_completion_length=min(4, cfg.max_completion_length))
    setup = make(short, inputs, inputs.base or new_policy(cfg), judges={})

    def made_up(completions):
        return 0.1 * torch.arange(len(completions))

    setup.reward_funcs = dict.fromkeys(cfg.reward_funcs, made_up)
    batch = collect(setup, inputs.prompts[:2], short, seed=0)
    update(setup, batch, None, short, seed=0)
