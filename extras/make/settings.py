"""The settings of what is made here. They join those of run/settings.py while this folder is."""
from dataclasses import dataclass


@dataclass
class MakeSettings:
    # making models (extras/make): policy = "train", judge = "train" and eval_judge = "train" are
    # made at first use, the policy of the config file's `texts` or of the comments
    cache_dir: str = "out/prepared"     # where they are kept, for all runs
    vocab_size: int = 1024              # first tokens of GPT-2's BPE, the end token included
    block_size: int = 64                # positions: the longest prompt and completion together
    n_layer: int = 4                    # blocks
    n_head: int = 4                     # attention heads
    n_embd: int = 256                   # channels
    pretrain_tokens: int = 3_000_000    # some four minutes on two cores
    judge_tokens: int = 2_000_000       # tokens to train each judge on
