"""
Lets a trained policy speak.

    python sample.py out/toxicity --prompt="You are" [--num=5] [--base=True] [--setting=value ...]

Prints `num` completions of the prompt, each with what the judge makes of it. Without a prompt it reads
prompts from the terminal, a line each. --base=True lets the policy from before training speak too.
"""
import sys

import torch

from config import load_settings, parse_flag
from evaluate import open_run
from run.device import autocast
from run.script import BadInput, run_script, seed_for
from sample import generate

USAGE = ('usage: python sample.py RUN [--prompt="You are"] [--num=5] [--base=True] '
         "[--setting=value ...]")
