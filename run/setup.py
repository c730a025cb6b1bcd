"""Inputs, which a run loads, and Setup, which the loop of grpo.py works with."""
from dataclasses import dataclass, field
from typing import Any

import torch

from common.device import autocast, machine, pick_device, pick_dtype
from data.prompts import load_prompts
from fast import to_half
from judge import load_judge, reward_functions
from judge.rewards import check_rewards
from model import GPT
from rollout import generate
from run.optimizer import make_optimizer
from run.policy import load_policy, reference_for, trainable
from run.precision import check_precision


@dataclass
class Inputs:
    """Models and prompts from files, loaded and checked."""
    device: torch.device
    dtype: torch.dtype            # of the forward passes
    base: torch.nn.Module         # the policy before training, frozen
    judges: dict                  # {"judge": ..., "eval_judge": ...}
    tokenizer: Any
    prompts: list                 # of data.prompts.Prompt
    eval_prompts: list
    val_prompts: list             # for the target of influence


@dataclass
class Setup(Inputs):
    """Everything that the loop works with: the inputs, and what prepare makes of them."""
    policy: torch.nn.Module
    reference: torch.nn.Module    # the base, or a copy that follows the policy
    optimizer: torch.optim.Optimizer
    trained: list                 # parameters with gradient
    target_average: Any     # of the target's gradient, over steps; None: none
    reward_funcs: dict = field(default_factory=dict)    # {name: function}, for judge.rewards.score
    generate: Any = generate                # rollout's, or one that decodes faster
    # {index of a prompt: [rewards of a group, ...]}, oldest first; for the config file's choose
    seen: dict = field(default_factory=dict)
    # for the config file's `after`: rollouts to learn from again, and its memory
    replay: Any = None                  # loss.Batch
    memory: dict = field(default_factory=dict)
    # {policy or reference: the same, compiled}, if cfg.compile says so
    compiled: dict = field(default_factory=dict)
    # what had changed when the run was resumed: [[iterations done, name, before, now]]
    changes: list = field(default_factory=list)

    def fast(self, model):
        """The policy, or the reference, as it computes fastest. A tape takes the model itself: it
        records what goes into its modules."""
        return self.compiled.get(model, model)

    def autocast(self):
        """The context of forward passes: in self.dtype."""
        return autocast(self.device, self.dtype)

    def environment(self, prompts, cfg):
        """The function that answers the completions of these prompts (N) while they are sampled
        (rollout.generate's respond), or None."""
        if not cfg.answers:
            return None
        from extras.environment import answering
        return answering(self.tokenizer, cfg, prompts)


def load_judges(cfg, device, may_train=True):
    """Load the judges that the settings name, or make a judge "train" -> {role: judge}."""
    judges = {}
    for role in ("judge", "eval_judge"):
        name = getattr(cfg, role)

        # one judge in both roles is loaded once
        if judges and name == cfg.judge != "train":
            print(f"note: eval_judge is also the judge that gives the reward, {name}: it is not an "
                  "independent check")
            judges[role] = judges["judge"]
            continue
        if name == "train":
            from extras.make.judges import made_judge
            name = made_judge(cfg, role, device, may_train)
        if name:
            judges[role] = load_judge(name, device)
    return judges


def read_inputs(cfg, may_train=True):
    """Load and check every input -> Inputs. may_train: False for a command that only looks at a
    run, and must not train a model first."""
    # where and in what precision it is computed
    device = pick_device(cfg.device, cfg.threads)
    dtype = pick_dtype(cfg.dtype, device)
    print(machine(device, dtype))

    # the policy before training, and prompts in ids of its tokenizer
    base, tokenizer = load_policy(cfg, device, may_train)
    base = base.to(device).eval().requires_grad_(False)
    if dtype == torch.bfloat16 and isinstance(base, GPT):
        to_half(base)
    prompts, eval_prompts, val_prompts = load_prompts(cfg, tokenizer, base.block_size)

    # the judges: one gives the reward. Training never sees the other, so it notices when the policy
    # cheats the first
    judges = load_judges(cfg, device, may_train)

    # do the prompts have the columns that the config file's functions need?
    check_rewards(cfg, prompts + eval_prompts + val_prompts)
    if cfg.answers:
        from extras.environment import check_environment
        check_environment(cfg, prompts + eval_prompts + val_prompts)
    return Inputs(device, dtype, base, judges, tokenizer, prompts, eval_prompts, val_prompts)


def prepare(cfg, inputs):
    """Make everything that the loop works with -> Setup."""
    # the policy: a copy of the base that learns, or the same weights, shared, with adapters that
    # learn
    policy = trainable(inputs.base, cfg)

    # the reference, near which beta * KL keeps the policy; the optimizer; an average of targets
    average = cfg.hook("average")
    setup = Setup(
        **vars(inputs), policy=policy, reference=reference_for(policy, inputs.base, cfg),
        optimizer=make_optimizer(policy, cfg),
        trained=[p for p in policy.parameters() if p.requires_grad],
        target_average=average and average(cfg))

    # the rewards: the judge, functions of the config file, or both
    setup.reward_funcs = reward_functions(cfg, inputs.judges, setup.autocast)

    # bfloat16, a graph on a GPU, compiled code: where they give what plain float32 does
    check_precision(setup, cfg)
    return setup
