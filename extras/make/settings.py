"""Settings for making models. They join run/settings.py as long as this folder exists."""
from dataclasses import dataclass
from typing import Annotated

from common.kinds import Free, Path, Positive, at_least


@dataclass
class MakeSettings:
    # making models (extras/make): a policy, judge or eval_judge "train" is made at first use, the
    # policy from the config file's `texts` or from the comments
    cache_dir: Free[Path] = "out/prepared"      # where they are kept, for all runs
    # first tokens of GPT-2's BPE, the end token included: 256 bytes at least
    vocab_size: Annotated[int, at_least(257)] = 1024
    # positions: the longest prompt and completion together
    block_size: Annotated[int, at_least(2)] = 64
    n_layer: Positive = 4               # blocks
    n_head: Positive = 4                # attention heads
    n_embd: Positive = 256              # channels
    pretrain_tokens: Positive = 3_000_000       # some four minutes on two cores
    judge_tokens: Positive = 2_000_000          # tokens to train each judge on
