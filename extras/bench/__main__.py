"""
Measure what an iteration costs, and whether the fast paths hold on this machine.

    python -m extras.bench config/toxicity.py vs --tracin=self vs --compile=True     # in turns
    python -m extras.bench trl config/toxicity.py      # beside TRL's GRPOTrainer
    python -m extras.bench ladder config/toxicity.py   # the gain of each technique for speed
    python -m extras.bench card                        # every part beside the CPU, in small
    python -m extras.bench fits                        # which models fit on a card, by formula
    python -m extras.bench fits config/toxicity.py     # and a run: the micro_batch_size to set

The first three print a row for each variant, then all of it as a line of JSON, with the shares of
the device's peak speed. Times are medians of --repeat=5 iterations after one to warm up. Variants
take turns. The policy "train" gets random weights. A fast path that gives wrong numbers is turned
off, and a line that begins with `note:` says so.

trl uses the settings' policy, prompts and sizes, with a rule as reward and without a KL.
"""
import copy
import math
import os
import tempfile
from dataclasses import replace

import grpo     # before torch: sets how its threads wait

import torch

from common.cli import own_flags, run_script
from common.device import pick_device
from common.errors import BadInput, optional
from data.weights import save_gpt
from extras.bench.card import print_card
from extras.bench.fits import print_fits, print_fits_of
from extras.bench.ladder import print_ladder
from extras.bench.phases import Timed, Variant, in_turns, peak_memory, print_table, row_of
from run.report import Clock
from run.settings import Settings, load_settings


def read_inputs(cfg):
    """grpo's Inputs, of the very shape in the settings. A policy "train" has random weights."""
    if cfg.policy == "train":
        from extras.make.policy import new_policy
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            save_gpt(f"{folder}/policy.pt", new_policy(cfg))
            return grpo.read_inputs(replace(cfg, policy=f"{folder}/policy.pt"))
    inputs = grpo.read_inputs(cfg)
    for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
        actual = getattr(inputs.base.config, name)
        wanted = getattr(cfg, name, actual)
        # do not measure a different shape than the user thinks
        if wanted not in (getattr(Settings, name, actual), actual):
            raise BadInput(f"{name} = {wanted}: {cfg.policy} has {actual}; add --policy=train for "
                           "random weights of the shape in the settings")
    return inputs


def prepare(cfg):
    """grpo's Setup, as fast as the settings say and this machine allows."""
    return grpo.prepare(cfg, read_inputs(cfg))


def print_beside_first(device, rows):
    """Print rows with their tokens/s beside the first one's."""
    first = rows[0]["tokens_per_s"]
    print_table(device, rows, [
        f"{row['tokens_per_s'] / first:.2f} x the first  {row['computes']}" for row in rows])


def variants_of(argv):
    """The settings and, for each `vs`, the same settings with further flags -> {name: Variant}."""
    groups = [[]]
    for arg in argv:
        if arg == "vs":
            groups.append([])
        else:
            groups[-1].append(arg)
    first, *more = groups
    flags_of = {first[0] if first else "no settings": first}
    flags_of |= {f"vs {' '.join(flags)}": [*first, *flags] for flags in more}
    variants = {}
    for name, flags in flags_of.items():
        cfg = replace(load_settings(flags), eval_judge=None)
        variants[name] = Variant(prepare(cfg), cfg)
    return variants


def compare(argv, repeat):
    variants = variants_of(argv)
    timed = in_turns(variants, repeat)
    device = next(iter(variants.values())).setup.device
    print_beside_first(
        device, [row_of(name, timed[name], variant) for name, variant in variants.items()])


def climb(argv, repeat):
    """Measure each technique, in plain float32 first."""
    # a policy that hardly moves, so that all rows sample the same completions, up to rounding
    cfg = replace(load_settings(argv), eval_judge=None, learning_rate=1e-12)
    print_ladder(prepare(replace(cfg, dtype="float32", compile=False)), cfg, repeat)


def fits(argv):
    if not argv:
        return print_fits()
    cfg = replace(load_settings(argv), judge=None, eval_judge=None)
    inputs = read_inputs(cfg)
    print_fits_of(inputs.base, inputs.prompts, cfg)


# ------------------------------------------------------------------------------------------------
# beside TRL: the same policy, prompts, reward and sizes


def short(prompts, completions, **columns):
    """A reward that costs nothing."""
    return [-float(len(text)) for text in completions]


def timed_trl(trl, setup, cfg, folder, repeat):
    """Run TRL's trainer on the policy in the folder -> [Timed], without the first."""
    import datasets
    import transformers
    rows = cfg.num_prompts * cfg.num_generations
    micro = math.gcd(cfg.micro_batch_size, rows)
    clock = Clock(setup.device, on=False)
    ends = []       # of steps
    tokens = []

    def reward(prompts, completions, completion_ids, **columns):
        tokens.append(sum(map(len, completion_ids)))
        return short(prompts, completions)

    class Times(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(clock.now())

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
    return [Timed({"step": end - start}, count, peak_memory(setup.device))
            for start, end, count in zip(ends, ends[1:], tokens[1:])]


def beside_trl(argv, repeat):
    with optional("trl transformers"):
        import trl
    from extras.hub.export import export
    cfg = load_settings([*argv, "--beta=0"])
    cfg = replace(cfg, functions=cfg.functions | {"short": short}, reward_funcs=("short",),
                  reward_weights=(1.0,), judge=None, eval_judge=None)
    here = Variant(prepare(cfg), cfg)
    setup = here.setup
    with tempfile.TemporaryDirectory() as folder:
        export(copy.deepcopy(setup.base), os.path.join(folder, "policy"), setup.tokenizer)
        theirs = timed_trl(trl, setup, cfg, folder, repeat)
    ours = in_turns({"here": here}, repeat)["here"]
    print_beside_first(setup.device, [
        row_of(f"TRL {trl.__version__}", theirs), row_of("here", ours, here)])


def main(argv):
    own, flags = own_flags(argv, {"repeat": 5})
    commands = {"trl": beside_trl, "ladder": climb}
    if flags[:1] == ["card"]:
        print_card(pick_device("auto"))
    elif flags[:1] == ["fits"]:
        fits(flags[1:])
    elif flags and flags[0] in commands:
        commands[flags[0]](flags[1:], own["repeat"])
    else:
        compare(flags, own["repeat"])


if __name__ == "__main__":
    run_script(main)
