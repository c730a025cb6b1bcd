"""
Measure what an iteration costs, and whether the fast paths hold on this machine.

    python -m extras.bench config/toxicity.py          # seconds, tokens/s, memory, a card
    python -m extras.bench config/toxicity.py vs --tracin=self vs --compile=True     # in turns
    python -m extras.bench trl config/toxicity.py      # beside TRL's GRPOTrainer
    python -m extras.bench tape                        # influence beside forward and backward alone
    python -m extras.bench ladder config/toxicity.py   # the gain of each technique for speed
    python -m extras.bench fits                        # which models fit on a card, by formula
    python -m extras.bench fits config/toxicity.py     # and a run: the micro_batch_size to set

For each variant a line of JSON has the tokens/s by phase and the share of the device's peaks. A
single variant ends in a card, a block to paste into a report: every part of the project on small
shapes on this device, with its error, and what fails by name (exit code 1). It takes some minutes;
--card=False leaves it out.

Times are medians of --repeat=5 iterations (least to most) after one to warm up. Variants take
turns, so that other load on the machine hits them all. The policy "train" gets random weights. On a
CPU, memory is the process's peak so far.

A fast path that gives wrong numbers here is turned off, and a line that begins with `note:` says
so. trl uses the settings' policy, prompts and sizes, with a rule as reward and without a KL.
"""
import copy
import json
import math
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import replace
from typing import NamedTuple

import grpo     # before torch: sets how its threads wait

import torch

from common.cli import own_flags, run_script
from common.errors import BadInput, optional
from common.seeds import seed_for
from extras.bench.card import about, print_card, try_parts
from extras.bench.fits import print_fits, print_fits_of
from extras.bench.ladder import print_ladder
from extras.bench.phases import now, print_phases
from extras.bench.shapes import compare_tape
from data.weights import save_gpt
from run.settings import Settings, load_settings

THREADS = torch.get_num_threads()


def read_inputs(cfg):
    """grpo's Inputs; a policy "train" has random weights of the shape in the settings."""
    if cfg.policy != "train":
        return grpo.read_inputs(cfg)
    from extras.make.policy import new_policy
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        save_gpt(f"{folder}/policy.pt", new_policy(cfg))
        return grpo.read_inputs(replace(cfg, policy=f"{folder}/policy.pt"))


def exact_inputs(cfg):
    """read_inputs, of the very shape in the settings."""
    inputs = read_inputs(cfg)
    for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
        actual = getattr(inputs.base.config, name)
        wanted = getattr(cfg, name, actual)
        # do not measure a different shape than the user thinks
        if wanted not in (getattr(Settings, name, actual), actual):
            raise BadInput(f"{name} = {wanted}: {cfg.policy} has {actual}; add --policy=train for "
                           "random weights of the shape in the settings")
    return inputs


def make_nets(cfg):
    """grpo's Setup, as fast as the settings say and this machine allows."""
    return grpo.prepare(cfg, exact_inputs(cfg))


# ------------------------------------------------------------------------------------------------
# iterations


class Round(NamedTuple):
    """An iteration."""
    seconds: float
    tokens: int         # sampled
    peak: float         # GB


def iteration(setup, cfg, it):
    """Iteration `it` of grpo.train -> Round."""
    torch.set_num_threads(cfg.threads or THREADS)   # each variant may have a different number
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.device)
    start = now(setup.device)
    batch = grpo.collect_iteration(setup, it, cfg)
    held_out = grpo.collect_held_out(setup, it, cfg)
    grpo.update(setup, batch, held_out, cfg, seed_for(cfg.seed, "rows", it))
    seconds = now(setup.device) - start
    return Round(seconds, int(batch.rollout.sampled_mask.sum()), peak_memory(setup.device))


def peak_memory(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 30
    unit = 2 ** 30 if sys.platform == "darwin" else 2 ** 20     # bytes there, else kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def in_turns(variants, repeat):
    """Measure {name: (setup, cfg)} in turns -> {name: [Round]}, without the first round of each."""
    rounds = {name: [] for name in variants}
    for it in range(repeat + 1):
        for name, (setup, cfg) in variants.items():
            rounds[name].append(iteration(setup, cfg, it))
    return {name: measured[1:] for name, measured in rounds.items()}


def print_rounds(rounds):
    """Print two lines for each variant. Speeds are compared with the first by tokens/s."""
    rates = {name: statistics.median(r.tokens / r.seconds for r in measured)
             for name, measured in rounds.items()}
    first = next(iter(rates.values()))
    for name, measured in rounds.items():
        seconds = [r.seconds for r in measured]
        print(f"{name}\n  {statistics.median(seconds):.3f} s an iteration ({min(seconds):.3f} to "
              f"{max(seconds):.3f}), {rates[name]:.0f} tokens/s, {rates[name] / first:.2f} x the "
              f"first, {measured[-1].peak:.2f} GB")


def variants_of(argv):
    """The settings and, for each `vs`, the same settings with further flags -> {flags as typed:
    (setup, cfg)}."""
    groups = [[]]
    for arg in argv:
        if arg == "vs":
            groups.append([])
        else:
            groups[-1].append(arg)
    first, *more = groups
    if more and not all(groups):
        raise BadInput("vs: must be between settings and what differs")
    flags_of = {" ".join(first) or "no settings": first}
    flags_of |= {f"vs {' '.join(flags)}": [*first, *flags] for flags in more}
    variants = {}
    for name, flags in flags_of.items():
        cfg = replace(load_settings(flags), eval_judge=None)
        setup = make_nets(cfg)
        runs_in = str(setup.dtype)      # after fast paths were turned off, if any
        if setup.compiled:
            runs_in += ", compiled"
        variants[f"{name} ({runs_in})"] = (setup, cfg)
    return variants


def compare(argv, repeat, card=True):
    variants = variants_of(argv)
    device = next(iter(variants.values()))[0].device
    print(*about(device), sep="\n")
    print_rounds(in_turns(variants, repeat))
    lines = []
    for setup, cfg in variants.values():
        torch.set_num_threads(cfg.threads or THREADS)
        its = range(repeat + 1, 2 * repeat + 2)
        lines.append(json.dumps(print_phases(setup, cfg, its)))
    if card and len(variants) == 1:
        print_card(device, try_parts(device), lines)


# ------------------------------------------------------------------------------------------------
# beside TRL: the same policy, prompts, reward and sizes


def short(prompts, completions, **columns):
    """A reward that costs nothing."""
    return [-float(len(text)) for text in completions]


def beside_trl(argv, repeat):
    with optional("trl transformers"):
        import trl
    from extras.hub.export import export
    cfg = load_settings([*argv, "--beta=0"])
    cfg = replace(cfg, functions=cfg.functions | {"short": short}, reward_funcs=("short",),
                  reward_weights=(1.0,), judge=None, eval_judge=None)
    setup = make_nets(cfg)
    with tempfile.TemporaryDirectory() as folder:
        export(copy.deepcopy(setup.base), os.path.join(folder, "policy"), setup.tokenizer)
        theirs = rounds_of_trl(trl, setup, cfg, folder, repeat)
    ours = in_turns({"here": (setup, cfg)}, repeat)
    print_rounds({f"TRL {trl.__version__}": theirs} | ours)


def rounds_of_trl(trl, setup, cfg, folder, repeat):
    """Run TRL's trainer on the policy in the folder -> [Round], without the first."""
    import datasets
    import transformers
    rows = cfg.num_prompts * cfg.num_generations
    micro = math.gcd(cfg.micro_batch_size, rows)
    ends = []       # of steps
    tokens = []

    def reward(prompts, completions, completion_ids, **columns):
        tokens.append(sum(map(len, completion_ids)))
        return short(prompts, completions)

    class Times(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(now(setup.device))

    args = trl.GRPOConfig(
        output_dir=folder, max_steps=repeat + 1, per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro, generation_batch_size=rows,
        num_generations=cfg.num_generations, max_completion_length=cfg.max_completion_length,
        temperature=cfg.temperature, gradient_checkpointing=False, beta=0.0,
        learning_rate=cfg.learning_rate, adam_beta2=cfg.adam_beta2,
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=setup.device.type == "cpu", bf16=setup.dtype == torch.bfloat16)
    prompts = datasets.Dataset.from_dict({"prompt": [prompt.text for prompt in setup.prompts]})
    policy = os.path.join(folder, "policy")
    trl.GRPOTrainer(policy, reward, args, prompts, callbacks=[Times()]).train()
    return [Round(end - start, count, peak_memory(setup.device))
            for start, end, count in zip(ends, ends[1:], tokens[1:])]


def climb(argv, repeat):
    """Measure each technique, in plain float32 first."""
    # a policy that hardly moves, so that all rows sample the same completions, up to rounding
    cfg = replace(load_settings(argv), eval_judge=None, learning_rate=1e-12)
    setup = make_nets(replace(cfg, dtype="float32", compile=False))
    torch.set_num_threads(cfg.threads or THREADS)
    print_ladder(setup, cfg, repeat)


def main(argv):
    own, flags = own_flags(argv, {"repeat": 5, "card": True})
    repeat = own["repeat"]
    if flags[:1] == ["trl"]:
        beside_trl(flags[1:], repeat)
    elif flags[:1] == ["ladder"]:
        climb(flags[1:], repeat)
    elif flags == ["fits"]:
        print_fits()
    elif flags[:1] == ["fits"]:
        cfg = replace(load_settings(flags[1:]), judge=None, eval_judge=None)
        inputs = exact_inputs(cfg)
        print_fits_of(inputs.base, inputs.prompts, cfg)
    elif flags == ["tape"]:
        compare_tape(repeat)
    else:
        compare(flags, repeat, own["card"])


if __name__ == "__main__":
    run_script(main)
