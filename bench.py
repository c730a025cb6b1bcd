"""
Measures what an iteration costs and where its time goes.

    python bench.py config/toxicity.py --max_completion_length=64     an iteration, phase by phase
    python bench.py levers config/toxicity.py     what each setting for speed buys there
    python bench.py tracin                        what influence costs
    python bench.py trl                           against TRL's GRPOTrainer, where trl is installed
    python bench.py gpt2                          GPT-2 124M on a GPU, beside what it aims at
    python bench.py check config/toxicity.py      does each fast path hold on this machine?

Times are medians of --repeat rounds (5). A round before them warms up and does not count. The bench
calls grpo.py's own functions. A policy or judge that the settings would train has random weights of
its shape here, so nothing has to be trained first.

CONFIG takes every setting of grpo.py (`python grpo.py --help` lists them), and --picture=FILE draws
stacked bars (needs matplotlib). The table holds each phase against its floor: the least that it
must compute and move, at the rates of this machine, which are measured beside it. `policy backward`
includes the loss and its metrics, `optimiser` includes the clipping of the gradient.

levers turns one setting the other way at a time and times the phase that it concerns, alternating
with the settings as they are. `update` is the policy's forward and backward.

tracin times the update of one iteration on the same rollouts in several ways, which alternate. The
ratios to plain GRPO are what counts. --device=NAME picks the device.
  plain       forward, backward
  kept        forward, recorded backward, target, scores, checks, the gradient of the selected rows,
              as grpo.py does them for tracin = "self" and no KL
  contracted  the same with tracin_memory = 0
  KL          as kept, for tracin = "reward" and a KL in the loss: one more backward, over the same
              forward
  KL, kept    the same with tracin_kl = "kept": two forwards and backwards
  two passes  a recorded backward for the scores only, then forward and backward of the kept rows
  brute       one backward for each row, then forward and backward of half of them, without the
              inner products

trl runs whole iterations of three cases. --case=ends|fixed|vocabulary|gpt2 picks one, --device=NAME
the device.

gpt2 has random weights, 16 prompts x 8, 32 + 128 tokens of which none ends by itself, and a judge
of the policy's shape. It prints an iteration phase by phase, without and with influence in
alternation, then the case gpt2 of trl, whose reward is a cheap rule, then a summary. Settings make
it smaller: --num_prompts=1 --n_layer=2 ...

check tries what a run tries before it begins (run/prove.py), also what the settings leave out: each
fast path beside its plain version on a few rows. The table has their difference, the bound for it,
and the time in units of the plain version's (of influence: of a backward for each row). It takes
minutes where parts can be compiled. Exit code 1 if a path does not hold.
"""
import copy
import ctypes
import functools
import gc
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn as nn

from config import Settings, load_settings
PARTS = ()
from data.prompts import draw_prompts
import grpo
from grpo import (Batch, collect, gradient_of, loss_of, micro_batches, optimizer_steps,
                  sample_groups, update)
from run.build import Nets, build, read_inputs
from selection import collect_target
from data.prompts import Prompt
from data.tokenizer import load_tokenizer
from judge import load_judge, scorer
from judge.train import SHAPE as JUDGE_SHAPE
from model import GPTConfig
from pretrain import new_policy
from run.decoder import Buffers, Decoder
from run.device import free_memory, memory, pick_device, pick_dtype
from run.processes import all_reduce
from run.prove import PATHS, few_rows, prove, tried
from run.report import quiet
from run.script import BadInput, run_script, seed_for
from sample import Rollout
import selection
from selection import select
from tracin import Influence, Tape

# ------------------------------------------------------------------------------------------------
# what is measured: iterations of grpo.py, on Nets of the bench's own


def inputs_of(cfg):
    """grpo.read_inputs, with a policy of random weights where the settings would train one."""
    cfg.eval_judge = None       # nothing is evaluated here
    given = read_inputs(cfg)
    torch.manual_seed(0)
    given.base = (given.base or new_policy(cfg)).to(given.device)
    return given


def inputs_from(cfg, device, base, tokenizer, prompts):
    """The same for a policy and prompts that are made here. The held-out prompts are these too."""
    return SimpleNamespace(
        device=device, dtype=pick_dtype(cfg.dtype, device), base=base.to(device),
        tokenizer=tokenizer, prompts=prompts, eval_prompts=[], val_prompts=prompts)


def random_prompts(cfg, length=32):
    generator = torch.Generator().manual_seed(1)
    shape = (cfg.num_prompts, length)
    rows = torch.randint(cfg.vocab_size - 1, shape, generator=generator).tolist()
    return [Prompt(words(ids), ids, {"text": words(ids)}) for ids in rows]


def words(ids):
    """The text of made-up tokens."""
    return " ".join(f"t{i}" for i in ids)


def word_tokenizer(vocab_size):
    """Turns ids into such text. The last one is the end token."""
    return SimpleNamespace(eot_token=vocab_size - 1, decode=words)


def own_nets(cfg, given, judge_shape=JUDGE_SHAPE):
    """grpo.Nets that share nothing with other Nets but the frozen base weights."""
    nets = plain_nets(cfg, given, judge_shape)
    prove(nets, cfg)
    return nets


def plain_nets(cfg, given, judge_shape=JUDGE_SHAPE):
    """The same before their fast paths are tried."""
    judges = {}
    if "judge" in cfg.reward_funcs:
        judges["judge"] = judge_of(cfg, given.device, judge_shape)
    base = copy.deepcopy(given.base, {id(p): p for p in given.base.parameters()})
    return build(cfg, given, base, judges, grpo)


def judge_of(cfg, device, shape):
    """The judge that the settings name; for "train" one of this shape with random weights."""
    if cfg.judge != "train":
        return load_judge(cfg.judge, device)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(8192)
    model = scorer.Scorer(GPTConfig(8192, **shape)).to(device)

    def judge(prompts, completions):
        rows = scorer.encode(tokenizer, completions, shape["block_size"])
        return scorer.log_odds(judge.model, rows, device)

    judge.model = model.eval().requires_grad_(False)
    return judge


def iteration(nets, cfg, it, log=quiet):
    """Iteration `it` of grpo.train -> its Batch and the held-out Batch of the target, or None."""
    prompts = draw_prompts(nets.prompts, it, cfg.num_prompts, cfg.seed)
    batch = collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", it), log)
    target = collect_target(nets, it, cfg, collect)
    update(nets, batch, target, cfg, seed_for(cfg.seed, "rows", it), log)
    return batch, target[0] if target else None


# ------------------------------------------------------------------------------------------------
# clocks

PHASES = ("generate", "judge", "reference", "policy forward", "policy backward", "influence",
          "optimiser", "the rest")
UPDATE = ("policy forward", "policy backward")


class Clock:
    """Times the phases of iterations. It wraps the functions that `nets` holds, and it is the log
    of grpo.collect and grpo.update, which tell it where a backward ends.

    Each boundary waits for the device and gives the seconds since the boundary before to one phase,
    so every second counts once. What a phase calls is part of that phase.
    """

    def __init__(self, nets):
        self.device = nets.device
        self.inside = False     # a phase, whose end is the next boundary
        generate = self.timed("generate", nets.generate.func)
        nets.generate = functools.partial(generate, **nets.generate.keywords)
        nets.reward_funcs = {name: self.timed("judge", f) for name, f in nets.reward_funcs.items()}
        nets.logprobs = self.timed_logprobs(nets.logprobs)
        if nets.influence:
            nets.influence.keep_helpful = self.timed("influence", nets.influence.keep_helpful)
        nets.optimizer.register_step_post_hook(lambda *args: self.lap("optimiser"))
        judge = nets.judges.get("judge")
        if isinstance(getattr(judge, "model", None), nn.Module):
            judge.model = self.noted(judge.model)
        self.begin()

    def begin(self):
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.judged = []        # (weights, attention mask) of each forward of the judge
        self.last = self.now()

    def now(self):
        wait(self.device)
        return time.perf_counter()

    def lap(self, phase):
        """The time since the last boundary belongs to this phase."""
        if self.inside:
            return
        now = self.now()
        self.seconds[phase] += now - self.last
        self.last = now

    def timed(self, phase, function):
        """The function as a phase of its own."""
        def run(*args, **kwargs):
            if self.inside:
                return function(*args, **kwargs)
            self.lap("the rest")
            self.inside = True
            result = function(*args, **kwargs)
            self.inside = False
            self.lap(phase)
            return result

        return run

    def timed_logprobs(self, logprobs):
        """With gradients it is the policy's forward, without them the reference's."""
        reference = self.timed("reference", logprobs)
        forward = self.timed("policy forward", logprobs)

        def run(*args):
            return forward(*args) if torch.is_grad_enabled() else reference(*args)

        return run

    def noted(self, model):
        """The judge's model. What it reads is noted."""
        weights = linear_weights(model)

        def run(idx, attention_mask):
            self.judged.append((weights, attention_mask))
            return model(idx, attention_mask)

        return run

    # the log of an iteration

    def generated(self, num_rows):
        pass

    def scored(self, rewards):
        pass

    def loss(self, metrics):
        self.lap("policy backward")


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stopwatch(device, held=0):
    """Starts now. Called, it gives seconds, CPU seconds of this process, and the most bytes in use
    above those in use at the start. `held` of the bytes at the start count as well."""
    gc.collect()
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")        # the high-water mark starts again from what is in use now
    rest = memory(device) - held
    wall = time.perf_counter()
    cpu = time.process_time()

    def read():
        wait(device)
        return time.perf_counter() - wall, time.process_time() - cpu, most_memory(device) - rest

    return read


def most_memory(device):
    """The most bytes in use since the last stopwatch started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/status") as f:
        line = next(line for line in f if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def held(nets):
    """Bytes that decoder and influence keep from one iteration to the next."""
    decoder = nets.generate.keywords["decode"]
    weights = storages(list(nets.policy.parameters()))
    found = storages([decoder, nets.influence])
    total = sum(size for address, size in found.items() if address not in weights)
    pool = getattr(decoder, "pool", None)
    if pool:        # of CUDA graphs, which the allocator does not count as in use
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == tuple(pool):
                total += segment["total_size"]
    return total


def storages(x):
    """{address: bytes} of the tensors inside x."""
    if isinstance(x, torch.Tensor):
        storage = x.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if isinstance(x, (Batch, Buffers, Decoder, Influence, Rollout, Tape)):
        x = vars(x)
    if isinstance(x, dict):
        x = list(x.values())
    found = {}
    if isinstance(x, (list, tuple)):
        for y in x:
            found |= storages(y)
    return found


# ------------------------------------------------------------------------------------------------
# rounds


class Job(NamedTuple):
    cfg: Settings
    nets: Nets
    clock: Clock


def ready(cfg, given, judge_shape=JUDGE_SHAPE):
    """A Job that has run iteration 0, in which everything is compiled, captured and filled."""
    gc.collect()    # Nets refer to themselves in a circle, and those before may hold gigabytes
    nets = own_nets(cfg, given, judge_shape)
    job = Job(cfg, nets, Clock(nets))
    iteration(nets, cfg, 0, job.clock)
    return job


def in_turns(jobs, repeat):
    """Iterations 1 to `repeat` of each of {name: Job}, alternating, on the same prompts and noise.

    Returns {name: [what was measured]}.
    """
    rounds = {name: [] for name in jobs}
    for it in range(1, repeat + 1):
        # what runs before leaves its traces in caches and memory, so the order is drawn
        for name in random.Random(it).sample(list(jobs), len(jobs)):
            rounds[name].append(measure(jobs[name], it))
    return rounds


def measure(job, it):
    cfg, nets, clock = job
    watch = stopwatch(nets.device, held(nets))
    clock.begin()
    batch, target = iteration(nets, cfg, it, clock)
    clock.lap("the rest")
    _, cpu, peak = watch()
    rollout = batch.rollout
    N, T = batch.loss_mask.shape
    P = rollout.tokens.shape[1] - T
    used = int(rollout.attention_mask[:, :P].sum() + rollout.completion_mask.sum())
    return SimpleNamespace(
        seconds=clock.seconds | {"all": sum(clock.seconds.values())}, cpu=cpu, peak=peak,
        least=count(nets, cfg, batch, target, clock.judged), shape=(N, P, T),
        padding=1 - used / rollout.tokens.numel())


def median(rounds, *phases):
    """Median over the rounds of the seconds of these phases together."""
    return statistics.median(sum(x.seconds[phase] for phase in phases) for x in rounds)


def spread(x, digits=2):
    return f"{statistics.median(x):.{digits}f} ({min(x):.{digits}f}, {max(x):.{digits}f})"


# ------------------------------------------------------------------------------------------------
# phase by phase


def phases(cfg, repeat, picture=None):
    """Times iterations of the settings and prints the table."""
    if picture:
        import_figure(picture)      # an error comes before the work
    job = ready(cfg, inputs_of(cfg))
    rounds = in_turns({"": job}, repeat)[""]
    measured, floors = table(job, rounds, ceilings(job.nets.device, job.nets.dtype))
    if picture:
        draw_bars(measured, floors, picture)


def headline(nets, rounds, repeat):
    N, P, T = rounds[-1].shape
    num_weights = sum(p.numel() for p in nets.policy.parameters())
    return (f"{N} rows of up to {P} + {T} tokens, {num_weights / 1e6:.1f} M weights, "
            f"{nets.device}, {nets.dtype}, {torch.get_num_threads()} threads; medians of {repeat}")


def table(job, rounds, rates):
    """Prints the rounds of a job phase by phase -> seconds and floors, {phase: seconds} each.

    rates: from ceilings().
    """
    matrix, copies = rates
    print(headline(job.nets, rounds, len(rounds)))
    print(f"ceilings, measured now: {matrix / 1e12:.3g} TFLOP/s (a large matrix product), "
          f"{copies / 1e9:.3g} GB/s (a large copy)")
    print(f"{'':17}{'seconds':>9}{'share':>7}{'tokens/s':>10}{'TFLOP/s':>9}{'GB/s':>8}"
          f"{'floor, s':>10}{'x floor':>9}")
    whole = median(rounds, "all")
    measured, floors = {}, {}
    for phase in PHASES:
        least = [x.least.get(phase, (0, 0, 0)) for x in rounds]
        tokens, flops, moved = (statistics.median(x) for x in zip(*least))
        floors[phase] = statistics.median(max(f / matrix, m / copies) for _, f, m in least)
        measured[phase] = median(rounds, phase)
        if measured[phase] > 0:
            print_row(phase, measured[phase], whole, tokens, flops, moved, floors[phase])
    sampled = statistics.median(x.least["generate"][0] for x in rounds)
    print_row("all", whole, whole, sampled, 0, 0, sum(floors.values()))
    cpu = statistics.median(x.cpu for x in rounds)
    peak = max(x.peak for x in rounds)
    print(f"padding: {100 * rounds[-1].padding:.1f} % of rows x width; CPU time {cpu:.3f} s; "
          f"peak memory {peak / 2 ** 20:.0f} MB above weights and optimiser")
    return measured, floors


def print_row(name, seconds, whole, tokens, flops, moved, floor):
    """A row of the table; a cell is empty where its number is 0."""
    row = f"{name:17}{seconds:9.3f}{100 * seconds / whole:6.1f}%"
    row += f"{tokens / seconds:10.0f}" if tokens else " " * 10
    if flops or moved:
        row += f"{flops / seconds / 1e12:9.3g}{moved / seconds / 1e9:8.3g}"
    else:
        row += " " * 17
    if floor:
        row += f"{floor:10.3f}{seconds / floor:8.1f}x"
    print(row)


def import_figure(picture):
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise BadInput(f"picture = {picture!r}: pip install matplotlib, or leave it out") from e
    return Figure


def draw_bars(measured, floors, path):
    """Stacked bars of the phases."""
    figure = import_figure(path)(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    bottom = [0.0, 0.0]
    for phase in PHASES:
        heights = [measured[phase], floors[phase]]
        axes.bar(["measured", "floor"], heights, bottom=bottom, label=phase)
        bottom = [x + y for x, y in zip(bottom, heights)]
    axes.set_ylabel("seconds per iteration")
    axes.legend()
    figure.savefig(path + ".tmp", format=os.path.splitext(path)[1][1:] or "png")
    os.replace(path + ".tmp", path)


# ------------------------------------------------------------------------------------------------
# the least that a phase must do


def count(nets, cfg, batch, target, judged):
    """The least that each phase must do for the tokens that are not padding.

    Returns {phase: (tokens, FLOPs, bytes)}. target: the held-out Batch, or None. judged: a Clock's.
    A weight costs 2 FLOPs per token forward and 4 backward. A pair of positions costs 4 per channel
    and layer (scores and mix), twice that backward; a causal row of n tokens has n (n + 1) / 2
    pairs. Left out: norms, softmax, attention in the judge, and bytes that a large enough cache
    would keep.
    """
    works = [work_of(nets, b, cfg.num_generations) for b in (batch, target) if b]
    own = works[0]
    head, trunk = head_and_trunk(nets.policy)
    trained = sum(p.numel() for p in nets.trained)
    learned = min(1.0, trained / (trunk + head))        # less with LoRA
    epochs = cfg.num_iterations
    steps = epochs * max(1, own.rows // (cfg.mini_batch_size or own.rows))
    judged = [(weights, int(mask.sum())) for weights, mask in judged]
    counts = {
        "generate": (sum(w.new for w in works), sum(w.decode for w in works),
                     sum(w.decode_bytes for w in works)),
        "judge": (sum(n for _, n in judged), sum(2 * w * n for w, n in judged),
                  sum(4 * w for w, _ in judged)),
        "policy forward": (epochs * own.read, epochs * own.forward, 0),
        "policy backward": (epochs * own.read, epochs * (1 + learned) * own.forward, 0),
        # weight, gradient and two moments of 4 bytes, read and written
        "optimiser": (0, 0, 32 * trained * steps)}
    if cfg.beta:
        counts["reference"] = sum(w.read for w in works), sum(w.forward for w in works), 0
    if cfg.tracin != "off":
        on_own_batch = target is None and (cfg.tracin == "self" or serves_both(cfg, batch))
        again = 0 if on_own_batch else (2 + learned) * works[-1].forward    # the target's own pass
        # a product as large as the weights' gradient, or the rows' gradients read once
        flops = 2 * learned * (trunk * own.read + head * own.new)
        moved = 4 * own.rows * trained
        if 10 * moved < flops:
            counts["influence"] = own.read, again, moved
        else:
            counts["influence"] = own.read, again + flops, 0
    return counts


def work_of(nets, batch, num_generations):
    """The forward pass and the decoding of a batch: tokens, FLOPs and bytes."""
    attn = nets.policy.h[0].attn
    head, trunk = head_and_trunk(nets.policy)
    n_layer = len(nets.policy.h)
    pair = 4 * n_layer * attn.n_head * attn.hs
    key_value = 2 * n_layer * attn.n_kv_head * attn.hs * nets.dtype.itemsize    # bytes per token

    T = batch.loss_mask.shape[1]
    prompt = batch.rollout.attention_mask[:, :-T].sum(1).double()               # (N,) tokens
    completion = batch.rollout.completion_mask.sum(1).double()                             # (N,)
    row = prompt + completion - 1                       # (N,) the last token is never read
    once = prompt[::num_generations]                    # (B,) a group's prompt is computed once
    N = len(row)
    new = float(completion.sum())
    read = float(row.sum())
    decoded = causal_pairs(row) - causal_pairs(prompt)
    pairs = causal_pairs(once) + decoded
    prompts_and_steps = float(once.sum()) + new - N
    weights = (trunk + head) * nets.dtype.itemsize      # read at every step
    return SimpleNamespace(
        rows=N, new=new, read=read,
        forward=2 * trunk * read + 2 * head * new + pair * causal_pairs(row),
        decode=2 * trunk * prompts_and_steps + 2 * head * new + pair * pairs,
        decode_bytes=weights * float(completion.max()) + key_value * decoded)


def causal_pairs(n):
    """Pairs of positions in rows of n (N,) tokens."""
    return float((n * (n + 1) / 2).sum())


def head_and_trunk(policy):
    """Numbers of weights that a token is multiplied with: in the vocabulary head, and before it."""
    head = policy.lm_head.weight.numel()
    return head, linear_weights(policy) - head


def linear_weights(model):
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def ceilings(device, dtype, seconds=1.0):
    """Medians of FLOP/s of a large matrix product in dtype, and of bytes/s, read and written, of a
    large copy."""
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 2048
    size = 2 ** 30 if on_gpu else 2 ** 28
    a = torch.randn(n, n, device=device).to(dtype)
    x = torch.ones(size // 4, device=device)
    y = torch.empty_like(x)
    product = seconds_of(lambda: a @ a, device, seconds)
    copying = seconds_of(lambda: y.copy_(x), device, seconds)
    return 2 * n ** 3 / product, 2 * size / copying


def seconds_of(work, device, seconds):
    """Median time of work(), which runs for so long, at least three times after one to warm up."""
    spent = []
    while len(spent) < 4 or sum(spent) < seconds:
        spent.append(time_of(work, device))
    return statistics.median(spent[1:])


def time_of(work, device):
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


# ------------------------------------------------------------------------------------------------
# what each setting for speed buys


def variants(cfg, device):
    """{what is changed: (phases that it concerns, Settings)}, with one setting turned the other way
    in each."""
    on_gpu = device.type == "cuda"
    concerned = {"graphs": ("generate",), "head": UPDATE, "retire": ("generate",), "sort": UPDATE}
    in_bfloat16 = pick_dtype(cfg.dtype, device) == torch.bfloat16
    concerned["attention"] = ("generate", *UPDATE) if in_bfloat16 else ("generate",)
    elsewhere = "attention" if on_gpu else "graphs"     # does nothing on this device
    found = {}
    for word in Settings.speed:
        if word != elsewhere:
            change = "without" if word in cfg.speed else "with"
            turned = replace(cfg, speed=toggled(cfg.speed, word, Settings.speed))
            found[f"speed {change} {word!r}"] = concerned[word], turned

    changes = [("activation_checkpointing", not cfg.activation_checkpointing, UPDATE)]
    possible = {
        "generate": True,
        "judge": "judge" in cfg.reward_funcs and cfg.judge != "profanity-check",
        "reference": cfg.beta > 0,
        "update": cfg.tracin == "off" or cfg.num_iterations > 1}    # no recorded pass is compiled
    for part in PARTS:
        if possible[part]:
            concerns = UPDATE if part == "update" else (part,)
            changes.append(("compile", toggled(cfg.compile, part, PARTS), concerns))
    if cfg.tracin != "off":
        other_memory = 0.0 if cfg.tracin_memory else Settings.tracin_memory
        changes.append(("tracin_memory", other_memory, (*UPDATE, "influence")))
        changes.append(("tracin", "off", (*UPDATE, "influence")))
    for name, value, concerns in changes:
        found[f"{name} = {value!r}"] = concerns, replace(cfg, **{name: value})
    return found


def toggled(words, word, order):
    """The tuple of words with this one added, or without it."""
    return tuple(w for w in order if (w in words) != (w == word))


def levers(cfg, repeat):
    """Times every variant of the settings, each alternating with the settings as they are."""
    cfg.strict = True           # what does not hold here is left out, not timed
    given = inputs_of(cfg)
    as_set = ready(cfg, given)
    changed = variants(cfg, given.device)
    every = in_turns({"": as_set}, 1)[""]       # rounds of the settings as they are
    width = max(map(len, changed))
    print(f"{headline(as_set.nets, every, repeat)} (min, max), each alternating with the settings "
          "as they are; x: times those")
    print(f"{'':{width}}  {'phase':18}{'seconds':>9}{'as set':>9}{'x':>7}{'whole iteration':>24}"
          f"{'x':>7}{'peak MB':>9}")
    for label, (concerned, turned) in changed.items():  # two at a time: each may hold gigabytes
        try:
            jobs = {"as set": as_set, "turned": ready(turned, given)}
        except BadInput as e:
            print(f"left out: {e}")
            continue
        rounds = in_turns(jobs, repeat)
        every += rounds["as set"]
        print_lever(f"{label:{width}}", concerned, rounds["turned"], rounds["as set"])
        del jobs
    print_lever(f"{'as set':{width}}", ("all",), every, every)


def print_lever(label, concerned, rounds, base):
    now = median(rounds, *concerned)
    was = median(base, *concerned)
    whole = [x.seconds["all"] for x in rounds]
    peak = max(x.peak for x in rounds) / 2 ** 20
    phase = " + ".join(concerned).replace(" + ".join(UPDATE), "update")
    print(f"{label}  {phase:18}{now:9.3f}{was:9.3f}{now / was:7.2f}{spread(whole, 3):>24}"
          f"{median(rounds, 'all') / median(base, 'all'):7.2f}{peak:9.0f}", flush=True)


# ------------------------------------------------------------------------------------------------
# what influence costs

SHAPES = {  # settings, tokens of a prompt
    "toxicity, V 1024, 256 rows of 10 + 32": (
        dict(vocab_size=1024, block_size=64, n_layer=4, n_head=4, n_embd=256, num_prompts=32,
             max_completion_length=32, micro_batch_size=64), 10),
    "6 x 384, V 50257, 16 rows of 32 + 128": (
        dict(vocab_size=50257, block_size=160, n_layer=6, n_head=6, n_embd=384, num_prompts=2,
             max_completion_length=128, micro_batch_size=8), 32),
}


def influence_costs(device, repeat):
    for name, (shape, length) in SHAPES.items():
        cfg = Settings(
            **shape, dtype="float32", tracin="self", tracin_memory=4.0, reward_funcs=("random",),
            reward_weights=(1.0,), functions={"random": random_reward})
        torch.manual_seed(0)
        given = inputs_from(cfg, device, new_policy(cfg), word_tokenizer(cfg.vocab_size),
                            random_prompts(cfg, length))
        nets = own_nets(cfg, given)
        seconds = time_ways(ways_to_update(nets, cfg), nets, repeat)
        num_weights = sum(p.numel() for p in nets.trained)
        print(f"\n{name}: {num_weights / 1e6:.1f} M weights, {device}, "
              f"{torch.get_num_threads()} threads, medians of {repeat} (brute: 1)")
        print_ways(seconds)


def random_reward(prompts, completions):
    return torch.randn(len(completions)).tolist()


def ways_to_update(nets, cfg):
    """{way: function that leaves an update's gradient in .grad}; "generate" samples instead."""
    with_kl = replace(cfg, tracin="reward", beta=0.1)
    batch = collect(nets, nets.prompts, with_kl, seed=0)
    step, = optimizer_steps(batch, cfg, seed=0)

    def influence_of(cfg):
        return Influence(nets, cfg, loss_of, gradient_of, selection, all_reduce)

    contracting = influence_of(replace(cfg, tracin_memory=0.0))
    beside_kl = influence_of(with_kl)
    of_whole_losses = influence_of(replace(with_kl, tracin_kl="kept"))

    def backward(rows):
        for positions in micro_batches(batch.lengths[rows], cfg):
            loss_of(nets, nets.policy_fn, batch, rows[positions], step, cfg).total.backward()

    def record(influence):
        with influence.record(batch, step, on_policy=True):
            for positions in micro_batches(batch.lengths[step.rows], cfg):
                influence.forward_backward(positions)

    def one_pass(influence):
        record(influence)
        influence.keep_helpful(None, seed=0, check=False)

    def two_passes():
        record(nets.influence)
        tape = nets.influence.tape
        keep, _ = select(tape.dot(tape.gradient()), "positive")
        backward(step.rows[keep])

    def brute():
        for row in step.rows.split(1):
            backward(row)
            nets.policy.zero_grad(set_to_none=True)
        backward(step.rows[:len(step.rows) // 2])

    return {
        "generate": lambda: sample_groups(nets, nets.prompts, cfg, seed=0),
        "plain": lambda: backward(step.rows),
        "kept": lambda: one_pass(nets.influence),
        "contracted": lambda: one_pass(contracting),
        "KL": lambda: one_pass(beside_kl),
        "KL, kept": lambda: one_pass(of_whole_losses),
        "two passes": two_passes,
        "brute": brute}


def time_ways(ways, nets, repeat):
    """Runs the ways in alternation -> {way: [seconds]}. The first round warms up."""
    seconds = {way: [] for way in ways}
    for number in range(repeat + 1):
        for way, run in ways.items():
            if way == "brute" and number > 1:
                continue
            spent = time_of(run, nets.device)
            if number > 0:
                seconds[way].append(spent)
            nets.policy.zero_grad(set_to_none=True)
    return seconds


def print_ways(seconds):
    medians = {way: statistics.median(x) for way, x in seconds.items()}
    generate = medians["generate"]
    plain = medians["plain"]
    print(f"{'':12}{'seconds':>10}{'min':>8}{'max':>8}{'update':>10}{'update + generate':>20}")
    for way, x in seconds.items():
        if way != "generate":
            whole = (medians[way] + generate) / (plain + generate)
            print(f"{way:12}{medians[way]:10.2f}{min(x):8.2f}{max(x):8.2f}"
                  f"{medians[way] / plain:9.2f}x{whole:19.2f}x")


# ------------------------------------------------------------------------------------------------
# against TRL

GPT2 = dict(
    vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768,
    num_prompts=16, max_completion_length=128, micro_batch_size=64, learning_rate=1e-6,
    tracin="self")
SMALL = GPT2 | dict(
    vocab_size=512, block_size=160, n_layer=6, n_head=6, n_embd=384, micro_batch_size=8)
CASES = {  # settings, mean length of a completion before the cut or None: no end
    "ends": (SMALL, 55),
    "fixed": (SMALL, None),
    "vocabulary": (SMALL | dict(vocab_size=50257, num_prompts=4), None),
    "gpt2": (GPT2, None),   # only when it is asked for
}


def against_trl(cfg, ends, device, repeat):
    """Times whole iterations of GRPO: TRL's, ours, and ours with influence as in cfg.

    Returns {way: (seconds for 1000 tokens, peak bytes)}. Weights, prompts, lengths, reward, loss
    (dapo), micro-batches, optimizer and number of updates are the same. The three alternate in one
    process. TRL has its defaults, but all rows in one call of generate, no gradient checkpointing,
    nothing logged or saved. ends: see policy_that_ends.
    """
    lib = import_trl()
    lengths = []    # sampled tokens of each of TRL's iterations

    def rule(prompts, completions, completion_ids=None, **rest):
        if completion_ids is not None:  # TRL tells their lengths here
            lengths.append(sum(map(len, completion_ids)))
        return [text.count("1") / max(1, len(text)) for text in completions]

    cfg = replace(
        cfg, functions={"rule": rule}, reward_funcs=("rule",), reward_weights=(1.0,), beta=0.0,
        adam_beta1=0.9, adam_beta2=0.999, weight_decay=0.0)
    plain = replace(cfg, tracin="off")
    given = inputs_from(cfg, device, policy_that_ends(cfg, ends), word_tokenizer(cfg.vocab_size),
                        random_prompts(cfg))
    theirs = to_transformers(given.base, lib.transformers).to(device)
    check_logits(given.base, theirs, given.prompts)
    ours = {"ours": (own_nets(plain, given), plain), "ours, influence": (own_nets(cfg, given), cfg)}

    times = {way: [] for way in ("TRL", *ours)}     # (seconds, CPU seconds, peak bytes, tokens)
    turns = turns_of(lib.transformers, ours, device, lengths, times)
    run_trainer(lib, theirs, rule, given, cfg, repeat, turns)
    upto = "up to " if ends else ""
    print(f"\n{cfg.n_layer} x {cfg.n_embd}, V {cfg.vocab_size}, {cfg.num_prompts} prompts x "
          f"{cfg.num_generations}, 32 + {upto}{cfg.max_completion_length} tokens, micro-batches of "
          f"{micro_batch_of(cfg)}; TRL {lib.trl.__version__}, torch {torch.__version__}, {device}, "
          f"{given.dtype}, {torch.get_num_threads()} threads; medians of {repeat} (min, max)")
    return print_race(times)


def import_trl():
    """The packages that TRL's side needs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import datasets
        import tokenizers
        import transformers
        import trl
    except ImportError as e:
        raise BadInput(f"python bench.py trl needs {e.name}: pip install trl==1.16.0, in an "
                       "environment of its own") from e
    transformers.logging.set_verbosity_error()
    return SimpleNamespace(
        datasets=datasets, tokenizers=tokenizers, transformers=transformers, trl=trl)


def check_logits(policy, theirs, prompts):
    x = torch.tensor([prompt.ids for prompt in prompts], device=policy.wte.weight.device)
    with torch.no_grad():
        error = float((theirs(x).logits - policy.lm_head(policy(x))).abs().max())
    assert error < 1e-3, f"the two models differ by {error} in a logit"


def turns_of(transformers, ours, device, lengths, times):
    """A callback that runs an iteration of each of ours after each of TRL's and fills `times`."""
    class Turns(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            self.watch = stopwatch(device)

        def on_step_end(self, args, state, control, **kwargs):
            times["TRL"].append((*self.watch(), lengths[-1]))
            for way, (nets, cfg) in ours.items():
                times[way].append(time_iteration(nets, cfg, state.global_step))
            self.watch = stopwatch(device)

    return Turns()


def time_iteration(nets, cfg, it):
    watch = stopwatch(nets.device, held(nets))
    batch, _ = iteration(nets, cfg, it)
    return *watch(), int(batch.loss_mask.sum())


def micro_batch_of(cfg):
    rows = cfg.num_prompts * cfg.num_generations
    return math.gcd(min(cfg.micro_batch_size, rows), rows)  # TRL has no smaller last one


def run_trainer(lib, policy, rule, given, cfg, repeat, turns):
    """TRL's own loop. A first iteration warms up."""
    rows = cfg.num_prompts * cfg.num_generations
    micro = micro_batch_of(cfg)
    texts = lib.datasets.Dataset.from_dict({"prompt": [prompt.text for prompt in given.prompts]})
    with tempfile.TemporaryDirectory() as folder:
        args = lib.trl.GRPOConfig(
            output_dir=folder, max_steps=repeat + 1, per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro, generation_batch_size=rows,
            num_generations=cfg.num_generations, max_completion_length=cfg.max_completion_length,
            gradient_checkpointing=False, beta=0.0, learning_rate=cfg.learning_rate,
            lr_scheduler_type="constant", logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=given.device.type == "cpu",
            bf16=given.dtype == torch.bfloat16)
        trainer = lib.trl.GRPOTrainer(
            policy, rule, args, texts, processing_class=to_tokenizer(cfg.vocab_size, lib),
            callbacks=[turns])
        trainer.train()


def print_race(times):
    """Prints {way: [(seconds, CPU seconds, peak bytes, tokens)]}, the first of which warmed up."""
    print(f"{'':18}{'s/iteration':>22}{'CPU s':>8}{'tokens':>8}{'s/1000 tokens':>22}{'CPU s':>8}"
          f"{'TRL / this':>12}{'CPU':>7}{'peak MB':>9}")
    found = {}
    for way, rows in times.items():
        wall, cpu, peak, tokens = zip(*rows[1:])
        wall_each = [1000 * t / n for t, n in zip(wall, tokens)]
        cpu_each = [1000 * t / n for t, n in zip(cpu, tokens)]
        medians = statistics.median(wall_each), statistics.median(cpu_each)
        if way == "TRL":
            theirs = medians
        print(f"{way:18}{spread(wall):>22}{statistics.median(cpu):8.2f}"
              f"{statistics.median(tokens):8.0f}{spread(wall_each):>22}{medians[1]:8.2f}"
              f"{theirs[0] / medians[0]:11.2f}x{theirs[1] / medians[1]:6.2f}x"
              f"{max(peak) / 2 ** 20:9.0f}")
        found[way] = medians[0], max(peak)
    return found


def policy_that_ends(cfg, mean):
    """A random GPT whose end token, the last one, has probability 1 / mean everywhere (None: none
    to speak of), so that completions end by themselves at random.

    The bias of the last LayerNorm does it.
    """
    torch.manual_seed(0)
    policy = new_policy(cfg).eval()
    with torch.no_grad():
        bias = torch.randn(cfg.n_embd)
        bias *= 20 / bias.norm()
        # the end token's row lies along the bias and sees it; the others hardly notice
        policy.ln_f.bias.copy_(bias)
        states = torch.randn(1000, cfg.n_embd) + bias
        others = policy.lm_head(states)[:, :-1].logsumexp(-1).mean()
        logit = float(others) - math.log(mean - 1) if mean else -30.0
        policy.wte.weight[-1] = logit * bias / 400
    return policy


def to_transformers(policy, transformers):
    """The same weights as a GPT2LMHeadModel."""
    c = policy.config
    end = c.vocab_size - 1
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer,
        n_head=c.n_head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=end,
        eos_token_id=end))
    state = {}
    for name, x in policy.state_dict().items():
        if name == "lm_head.weight":    # tied
            continue
        is_linear = x.dim() == 2 and name.startswith("h.")
        state[f"transformer.{name}"] = x.T if is_linear else x
    theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()
    return theirs


def to_tokenizer(vocab_size, lib):
    """word_tokenizer as transformers has it."""
    vocabulary = {words([i]): i for i in range(vocab_size)}
    plain = lib.tokenizers.Tokenizer(
        lib.tokenizers.models.WordLevel(vocabulary, unk_token=words([0])))
    plain.pre_tokenizer = lib.tokenizers.pre_tokenizers.WhitespaceSplit()
    end = words([vocab_size - 1])
    return lib.transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=end, pad_token=end)


# ------------------------------------------------------------------------------------------------
# GPT-2 124M on one GPU


def gpt2(cfg, repeat):
    """Times iterations of random weights with a judge of their shape, plain and with influence,
    then TRL, and prints a summary beside what is aimed at."""
    device = pick_device(cfg.device, cfg.allow_tf32, cfg.deterministic)
    T = cfg.max_completion_length
    if 32 + T > cfg.block_size:
        raise BadInput(f"max_completion_length = {T}: prompts have 32 tokens here, and block_size "
                       f"is {cfg.block_size}")
    judge_shape = dict(n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd, block_size=T + 1,
                       causal=False)
    given = inputs_from(cfg, device, policy_that_ends(cfg, None), load_tokenizer(cfg.vocab_size),
                        random_prompts(cfg))
    jobs = {
        "plain": ready(replace(cfg, tracin="off"), given, judge_shape),
        f"tracin = {cfg.tracin!r}": ready(cfg, given, judge_shape)}
    rounds = in_turns(jobs, repeat)
    rates = ceilings(device, given.dtype)
    for way, job in jobs.items():
        print(f"{way}, micro-batches of {cfg.micro_batch_size}: ", end="")
        table(job, rounds[way], rates)
        print()
    lines = summary(*rounds.values(), T, rates)

    del jobs, job, given    # TRL's turn
    gc.collect()
    try:
        lines += summary_of_race(against_trl(cfg, None, device, repeat))
    except BadInput as e:
        if not isinstance(e.__cause__, ImportError):
            raise
        print(f"against TRL: no row ({e})")
    print(f"\n{'':36}{'here':>12}   aim on an H200, at GPT-2's shape")
    for what, number, aim in lines:
        digits = 2
        if number >= 20:
            digits = 1
        if number > 1000:
            digits = 0
        print(f"{what:36}{number:12.{digits}f}   {aim}".rstrip())


def summary(plain, influence, T, rates):
    """Lines (what, number, aim) of the rounds without and with influence."""
    matrix, _ = rates
    update_seconds = median(plain, *UPDATE)
    flops = sum(plain[0].least[phase][1] for phase in UPDATE)
    whole = median(plain, "all")
    peaks = [max(x.peak for x in rounds) / 2 ** 20 for rounds in (plain, influence)]
    return [
        (f"all of generate / {T} tokens, ms", 1000 * median(plain, "generate") / T,
         "0.35 (floor 0.17)"),
        ("policy forward + backward, ms", 1000 * update_seconds, "38"),
        ("their share of the matrix rate, %", 100 * flops / update_seconds / matrix, "48"),
        ("whole iteration with the judge, ms", 1000 * whole, "110 (floor 46)"),
        ("influence / plain, whole iteration", median(influence, "all") / whole, "at most 1.12"),
        ("peak memory, plain, MB", peaks[0], ""),
        ("peak memory, influence, MB", peaks[1], "")]


def summary_of_race(found):
    """The same of what against_trl returns."""
    theirs, their_peak = found["TRL"]
    ours, our_peak = found["ours"]
    return [
        ("TRL / this, whole iteration", theirs / ours, "at least 8"),
        ("this / TRL, peak memory", our_peak / their_peak, "at most 0.5")]


# ------------------------------------------------------------------------------------------------
# what holds here


def check_paths(cfg, repeat):
    """Prints a line for each fast path. SystemExit if one does not hold on this machine."""
    given = inputs_of(cfg)
    nets = plain_nets(cfg, given)
    print(*describe_machine(given.device), sep="\n")
    print(f"forward passes: {nets.dtype} on {given.device}\n")
    few = few_rows(nets, cfg, 4, cfg.num_generations, cfg.max_completion_length)
    if few is None:
        raise SystemExit("a plain log-prob is not finite: the policy's weights are not, or "
                         "temperature is too low")
    with_all = replace(cfg, beta=cfg.beta or 1.0, num_iterations=2)     # so that no part is missing
    print(f"{'':22}{'difference':>11}{'bound':>9}{'x plain':>8}   verdict")
    off = []
    for path_of in PATHS:
        path = path_of(nets, with_all, few)
        if path.missing:
            print(f"{path.name:50}   not here: {path.missing}")
            continue
        difference, bound, trouble = tried(path, given.device)
        numbers = path.name
        if math.isfinite(difference):
            numbers = f"{path.name:22}{difference:11.1e}{bound:9.0e}"
        if trouble:
            off.append(path.name)
            print(f"{numbers:50}   off: {trouble}")
        else:
            seconds = [statistics.median(time_of(work, given.device) for _ in range(repeat))
                       for work in (path.fast, path.plain)]
            print(f"{numbers}{seconds[0] / seconds[1]:8.2f}   ok", flush=True)
        if path.asked:      # as in a run, where later paths build on it
            path.leave() if trouble else path.use()
    if off:
        raise SystemExit(f"these do not hold here, and a run goes without them: {', '.join(off)}")


def describe_machine(device):
    """Lines for whoever is sent the table."""
    lines = [f"torch {torch.__version__}, CUDA runtime {torch.version.cuda}, Python "
             f"{platform.python_version()}, {platform.platform()}",
             f"CPU: {torch.get_num_threads()} threads, "
             f"{free_memory(torch.device('cpu')) / 2 ** 30:.1f} GB of memory free"]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        lines.append(f"{known(torch.cuda.get_device_name)}, capability "
                     f"{known(torch.cuda.get_device_capability)}, {free / 2 ** 30:.1f} of "
                     f"{total / 2 ** 30:.1f} GB free, driver {known(driver)}")
    return lines


def driver():
    """The driver's version by nvidia-smi, else the CUDA that it is made for."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()[0]
    return f"for CUDA {torch._C._cuda_getDriverVersion()}"


def known(question):
    """The answer, or "unknown"."""
    try:
        return question()
    except Exception:   # a torch or a driver that does not tell
        return "unknown"


# ------------------------------------------------------------------------------------------------
# the command

OPTIONS = {"levers": (), "gpt2": (), "check": (), "tracin": ("device",), "trl": ("device", "case")}


def main(argv):
    mode = "phases"
    if argv and argv[0] in OPTIONS:
        mode, *argv = argv
    own, rest = split_flags(argv, ("repeat", *OPTIONS.get(mode, ("picture",))))
    repeat = own.get("repeat", "5")
    if not repeat.isdigit() or int(repeat) < 1:
        raise BadInput(f"repeat = {repeat!r}: must be a whole number from 1")
    repeat = int(repeat)
    if mode == "gpt2":
        gpt2(load_settings([f"--{name}={value}" for name, value in GPT2.items()] + rest), repeat)
    elif mode == "levers":
        levers(load_settings(rest), repeat)
    elif mode == "check":
        check_paths(load_settings(rest), repeat)
    elif mode == "phases":
        phases(load_settings(rest), repeat, own.get("picture"))
    else:
        without_config(mode, own, rest, repeat)


def without_config(mode, own, rest, repeat):
    """tracin and trl, which take no settings."""
    if rest or own.get("case", "ends") not in CASES:
        cases = f" [--case={'|'.join(CASES)}]" if mode == "trl" else ""
        raise BadInput(f"usage: python bench.py {mode} [--repeat=5] [--device=auto]{cases}")
    device = pick_device(own.get("device", "auto"))
    if mode == "tracin":
        influence_costs(device, repeat)
        return
    for name in [own["case"]] if "case" in own else ("ends", "fixed", "vocabulary"):
        settings, ends = CASES[name]
        against_trl(Settings(**settings), ends, device, repeat)


def split_flags(argv, names):
    """argv -> {name: text} of the flags with these names, and all other arguments."""
    own, rest = {}, []
    for arg in argv:
        name, equals, value = arg.partition("=")
        if equals and name in [f"--{n}" for n in names]:
            own[name[2:]] = value
        else:
            rest.append(arg)
    return own, rest


if __name__ == "__main__":
    run_script(main, usage=lambda with_settings: __doc__)
