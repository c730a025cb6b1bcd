"""What an iteration costs and where its time goes. Times are medians of --repeat rounds after one that does not count.

    python bench.py config/toxicity.py --max_completion_length=64     iterations of a config, phase by phase
    python bench.py levers config/toxicity.py                         what each speed setting buys there
    python bench.py tracin                                            what influence costs
    python bench.py trl                                               against TRL's GRPOTrainer, where trl is installed
    python bench.py gpt2                                              GPT-2 124M on a GPU, beside what is aimed at

The first two take every setting of grpo.py, the first --picture=FILE too (stacked bars, where matplotlib is installed). They run
grpo.py's own functions on random weights of the config's shape, so that they need no training, or on the files that the config
names. The first holds each phase against the least that it must compute or move and what this machine can compute and move,
measured beside it. The second turns one setting at a time the other way and tells the phase that it concerns (update: the
policy's forward and backward), in turns with the settings as they are.

tracin: one iteration's update, the same rollouts each way, interleaved; ratios to plain GRPO are what counts.
  plain       forward, backward
  kept        forward, backward under a tape, target, scores, checks, the gradient of the selected rows, as grpo.py does them
              for tracin = "self" (targets that are no multiple of the loss cost one more forward and backward)
  contracted  the same with tracin_memory = 0
  two passes  a tape for the scores only, then forward and backward again for the kept rows
  brute       one backward for every row, then forward and backward of half of them; without the inner products

gpt2: random weights, 16 prompts x 8, 32 + 128 tokens, none ends by itself, and a judge of the same shape that reads them.
Phase by phase without influence and with it, in turns; then the case of `trl` at this shape, whose reward is a cheap rule;
then a summary. Takes the settings too, for less: --num_prompts=1 --n_layer=2 ...
"""
import contextlib
import copy
import ctypes
import gc
import math
import os
import random
import statistics
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn as nn

import grpo
from config import PARTS, Settings, load_settings
from judge import load_judge, reward_functions, scorer
from data.comments import get_splits
from data.prompts import load_prompts
from judge.train import SHAPE
from model import GPT, GPTConfig, add_lora, completion_logprobs
from run.script import BadInput
from run.decoder import Decoder
from sample import Rollout, generate
from run.script import derive, run_script
from run.device import memory, pick_device, pick_dtype
from pretrain import get_tokenizer, load_policy
from data.tokenizer import load_tokenizer
from tracin import Tape, choose_targets, filter_rows, select

# ---------------------------------------------------------------------------------------------------------------
# what influence costs

SHAPES = {  # model, rows = prompts x group, prompt and completion tokens, rows in a micro-batch
    "toxicity, V 1024, 256 rows of 10 + 32": (GPTConfig(1024, 64, 4, 4, 256), 32, 10, 32, 64),
    "6 x 384, V 50257, 16 rows of 32 + 128": (GPTConfig(50257, 160, 6, 6, 384), 2, 32, 128, 8),
}


def tracin(device, repeat):
    for name, (config, num_prompts, P, T, micro) in SHAPES.items():
        torch.manual_seed(0)
        policy = GPT(config).to(device)
        prompts = torch.randint(config.vocab_size - 1, (num_prompts, P)).tolist()
        N = 8 * num_prompts
        coefficients = torch.randn(N, device=device) / (N * T)

        def rollout():
            return generate(policy, prompts, 8, T, eos=config.vocab_size - 1, seed=0)

        r = rollout()

        def backward(rows, tape=None):
            for part in rows.split(micro):
                if tape:
                    tape.rows(len(part), r.mask[part].nonzero()[:, 0])
                slope = (coefficients[part, None] * r.mask[part])
                (slope * completion_logprobs(policy, r[part], slope_of=lambda logp: slope)).sum().backward()

        everything = torch.arange(N, device=device)

        def one_pass(tape, update=True):
            with tape:
                backward(everything, tape)
            if not update:
                return select(tape.dot(tape.gradient()), "positive")[0].nonzero()[:, 0]
            ones, half = torch.ones(N, device=device), (everything * 2 // N).float()
            halves = tape.gradients([1 - half, half])
            total = {p: g + halves[1][p] for p, g in halves[0].items()}
            for p, g in filter_rows(tape, ones, halves, ones, ones, None, Settings(tracin="self"), 0, total)[2].items():
                p.grad = g

        def brute():
            for i in range(N):
                backward(everything[i:i + 1])
                policy.zero_grad(set_to_none=True)
            backward(everything[:N // 2])

        kept, contracted = Tape(policy, memory=4 * 2 ** 30), Tape(policy)
        ways = {"generate": rollout, "plain": lambda: backward(everything), "kept": lambda: one_pass(kept),
                "contracted": lambda: one_pass(contracted),
                "two passes": lambda: backward(one_pass(kept, update=False)), "brute": brute}
        seconds = {way: [] for way in ways}
        for round in range(repeat + 1):  # the first warms up
            for way, run in ways.items():
                if way == "brute" and round > 1:
                    continue
                began = time.time()
                run()
                wait(device)
                if round:
                    seconds[way].append(time.time() - began)
                policy.zero_grad(set_to_none=True)
        median = {way: statistics.median(x) for way, x in seconds.items()}
        print(f"\n{name}: {sum(p.numel() for p in policy.parameters()) / 1e6:.1f} M weights, {device}, "
              f"{torch.get_num_threads()} threads, medians of {repeat} (brute: 1)")
        print(f"{'':12}{'seconds':>10}{'min':>8}{'max':>8}{'update':>10}{'update + generate':>20}")
        for way, x in seconds.items():
            if way != "generate":
                print(f"{way:12}{median[way]:10.2f}{min(x):8.2f}{max(x):8.2f}{median[way] / median['plain']:9.2f}x"
                      f"{(median[way] + median['generate']) / (median['plain'] + median['generate']):19.2f}x")


# ---------------------------------------------------------------------------------------------------------------
# iterations of a config

PHASES = ("generate", "judge", "reference", "policy forward", "policy backward", "influence", "optimiser", "the rest")
UPDATE = ("policy forward", "policy backward")


def rig(s, policy, tokenizer, prompts, val_prompts=(), judge=lambda: None):
    """The loop of grpo.py under these settings, with a copy of the policy, an optimiser, a recorder and a decoder of its own.
    run(it) is iteration `it`, without its log -> (Batch, held-out Batch of the target or None); held() the bytes that it keeps
    beside weights and optimiser from one iteration to the next. judge() makes a judge."""
    if s.tracin != "off" and s.tracin_val_prompts and not val_prompts:
        raise BadInput(f"tracin_val_prompts = {s.tracin_val_prompts}: no held-out prompts are left; lower num_eval_prompts")
    device, reference = policy.wte.weight.device, policy.requires_grad_(False)
    dtype, policy = pick_dtype(s.dtype, device), copy.deepcopy(policy).requires_grad_(True)
    if s.lora_rank:
        torch.manual_seed(derive(s.seed, "lora"))
        add_lora(policy, s.lora_rank, s.lora_alpha, s.lora_layers)
    policy.recompute, judges = s.activation_checkpointing, {"judge": judge()}
    decoder, (scored, reference) = grpo.make_decoder(policy, s, dtype), grpo.compile_parts(policy, reference, judges, s)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=s.learning_rate, fused=True,
                                  betas=(s.adam_beta1, s.adam_beta2), weight_decay=s.weight_decay)
    reward_funcs = reward_functions(s, judges, device, dtype)
    recorder = Tape(policy, memory=s.tracin_memory * 2 ** 30) if s.tracin != "off" else None

    def collect(prompts, purpose, it):
        return grpo.collect(policy, reference, prompts, reward_funcs, s, tokenizer, derive(s.seed, purpose, it), dtype,
                            decoder=decoder)

    def run(it):
        batch, target, held_out = collect(grpo.pick(prompts, it, s), "rollout", it), None, None
        if recorder and s.tracin_val_prompts:
            target = collect(grpo.pick(val_prompts, it, replace(s, num_prompts=s.tracin_val_prompts)), "target", it)
            held_out = target, choose_targets(target.rewards, s.tracin_val_size, s.tracin_val_select,
                                              torch.Generator().manual_seed(derive(s.seed, "chosen", it))).to(device)
        grpo.update(policy, scored, optimizer, batch, s, derive(s.seed, "rows", it), dtype, lambda *a, **k: None, False, held_out,
                    recorder)
        return batch, target

    def held():
        pool = decoder and decoder.pool  # of the graphs, which the allocator does not count as in use
        return sum((storages([decoder, recorder]) | dict.fromkeys(storages(list(policy.parameters())), 0)).values()) + sum(
            x["total_size"] for x in (torch.cuda.memory_snapshot() if pool else ()) if tuple(x["segment_pool_id"]) == tuple(pool))

    return SimpleNamespace(s=s, device=device, dtype=dtype, policy=policy, optimizer=optimizer, run=run, held=held)


def storages(x):
    """{address: bytes} of the tensors inside x."""
    if isinstance(x, torch.Tensor):
        return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}
    inside = vars(x) if isinstance(x, (Decoder, Rollout, Tape)) else x
    inside = inside.values() if isinstance(inside, dict) else inside if isinstance(inside, (list, tuple)) else ()
    return {address: size for y in inside for address, size in storages(y).items()}


def ready(s, **given):
    """A rig that has run iteration 0, in which everything is compiled, captured and filled for the first time."""
    r = rig(s, **given)
    try:
        r.run(0)
    except torch._dynamo.exc.BackendCompilerFailed as e:
        reason = str(e).strip().splitlines()[0]
        raise BadInput(f"compile = {s.compile}: torch cannot compile on this machine ({reason}); leave it ()") from e
    return r


def in_turns(rigs, repeat):
    """Iterations 1 to `repeat` of each of {way: rig}, in turns, on the same prompts and noise -> {way: [what was measured]}."""
    rounds = {way: [] for way in rigs}
    for it in range(1, repeat + 1):
        for way in random.Random(it).sample(list(rigs), len(rigs)):  # what comes before leaves its traces in caches and memory
            r = rigs[way]
            seconds, judged, watch = dict.fromkeys(PHASES, 0.0), [], stopwatch(r.device, r.held())
            with timed(r.device, seconds, r.optimizer, judged):
                b, target = r.run(it)
            wall, cpu, peak = watch()
            seconds |= {"the rest": wall - sum(seconds.values()), "all": wall}
            P = b.rollout.tokens.shape[1] - b.mask.shape[1]
            rounds[way].append(SimpleNamespace(
                seconds=seconds, cpu=cpu, peak=peak, least=count(r.policy, b, target, r.s, r.dtype, judged),
                shape=(len(b.mask), P, b.mask.shape[1]),
                padding=1 - float((b.rollout.real[:, :P].sum() + b.rollout.mask.sum()) / b.rollout.tokens.numel())))
    return rounds


def median(rounds, *phases):
    """Median over the rounds of the seconds of these phases together."""
    return statistics.median(sum(x.seconds[phase] for phase in phases) for x in rounds)


def material(s):
    """What rigs of these settings, changed in what is for speed only, have in common."""
    torch.manual_seed(s.prepare_seed)
    policy = load_policy(s) or GPT(GPTConfig(s.vocab_size, s.block_size, s.n_layer, s.n_head, s.n_embd))  # a published one brings
    tokenizer, device = get_tokenizer(s), pick_device(s.device)                                      # its shape and tokenizer
    prompts, _, val_prompts = load_prompts(s, tokenizer, get_splits(s))
    return dict(policy=policy.to(device).eval(), tokenizer=tokenizer, prompts=prompts, val_prompts=val_prompts,
                judge=lambda: judge_of(s, device))


def judge_of(s, device, shape=SHAPE):
    """The judge that the settings name, else one of random weights in this shape; None without."""
    if s.judge != "train":
        return s.judge and load_judge(s.judge, device, s.judge_label)
    torch.manual_seed(s.prepare_seed)
    tokenizer, model = load_tokenizer(s.judge_vocab_size), scorer.Scorer(GPTConfig(s.judge_vocab_size, **shape)).to(device)

    def judge(prompts, completions):
        return scorer.log_odds(judge.model, scorer.encode(tokenizer, completions, shape["block_size"]), device)

    judge.model = model.eval().requires_grad_(False)
    return judge


# ---------------------------------------------------------------------------------------------------------------
# phase by phase


def phases(s, repeat, picture=None):
    """Time iterations of the settings and print the table."""
    if picture:
        try:
            from matplotlib.figure import Figure
        except ImportError as e:
            raise BadInput(f"picture = {picture!r}: pip install matplotlib, or leave it out") from e
    r = ready(s, **material(s))
    measured, floors = table(r, in_turns({"": r}, repeat)[""], ceilings(r.device, r.dtype))
    if picture:
        axes = (figure := Figure(figsize=(6, 5), layout="constrained")).subplots()
        bottom = [0.0, 0.0]
        for phase in PHASES:
            heights = [measured[phase], floors[phase]]
            axes.bar(["measured", "floor"], heights, bottom=bottom, label=phase)
            bottom = [x + y for x, y in zip(bottom, heights)]
        axes.set_ylabel("seconds per iteration")
        axes.legend()
        figure.savefig(picture + ".tmp", format=os.path.splitext(picture)[1][1:] or "png")
        os.replace(picture + ".tmp", picture)


def headline(r, rounds, repeat):
    (N, P, T), weights = rounds[-1].shape, sum(p.numel() for p in r.policy.parameters())
    return (f"{N} rows of up to {P} + {T} tokens, {weights / 1e6:.1f} M weights, {r.device}, {r.dtype}, "
            f"{torch.get_num_threads()} threads; medians of {repeat}")


def table(r, rounds, most):
    """Print the rounds of a rig phase by phase, most = ceilings(...) -> seconds and floors {phase: seconds}."""
    (matrix, copies), measured, floors = most, {}, {}
    print(headline(r, rounds, len(rounds)))
    print(f"ceilings, measured now: {matrix / 1e12:.3g} TFLOP/s (a large matrix product), {copies / 1e9:.3g} GB/s (a large copy)")
    print(f"{'':17}{'seconds':>9}{'share':>7}{'tokens/s':>10}{'TFLOP/s':>9}{'GB/s':>8}{'floor, s':>10}{'x floor':>9}")
    for phase in (*PHASES, "all"):
        seconds = median(rounds, phase)
        tokens, flops, moved, floor = (statistics.median(x) for x in zip(*(
            (t, f, m, max(f / matrix, m / copies)) for t, f, m in (x.least.get(phase, (0, 0, 0)) for x in rounds))))
        if phase == "all":
            floor, tokens = sum(floors.values()), statistics.median(x.least["generate"][0] for x in rounds)
        else:
            measured[phase], floors[phase] = seconds, floor
        if seconds > 0 and (floor or phase in ("all", "the rest")):
            print(f"{phase:17}{seconds:9.3f}{100 * seconds / median(rounds, 'all'):6.1f}%"
                  + (f"{tokens / seconds:10.0f}" if tokens else " " * 10)
                  + (f"{flops / seconds / 1e12:9.3g}{moved / seconds / 1e9:8.3g}" if floor and phase != "all" else " " * 17)
                  + (f"{floor:10.3f}{seconds / floor:8.1f}x" if floor else ""))
    cpu = statistics.median(x.cpu for x in rounds)
    print(f"padding: {100 * rounds[-1].padding:.1f} % of rows x width; CPU time {cpu:.3f} s; "
          f"peak memory {max(x.peak for x in rounds) / 2 ** 20:.0f} MB above weights and optimiser")
    return measured, floors


@contextlib.contextmanager
def timed(device, spent, optimizer, judged):
    """Within this block the functions that make up an iteration add their seconds to spent {phase: seconds}; what one of them
    calls counts as its own. The gradients of single rollouts, which a tape forms as they come by, are in the backward.
    judged: gets (weights, tokens) of what the judge reads."""
    inside = []

    def clocked(phase, plain):
        def run(*args, **kwargs):
            if inside:
                return plain(*args, **kwargs)
            inside.append(phase)
            wait(device)
            began = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                wait(device)
                name = "reference" if phase == "policy forward" and not torch.is_grad_enabled() else phase
                spent[name] += time.perf_counter() - began
                inside.pop()
        return run

    def noted(model, rows, *args, plain=scorer.log_odds, **kwargs):
        judged.append((linear_weights(model), sum(map(len, rows))))
        return plain(model, rows, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(scorer, "log_odds", noted))
        for phase, owner, name in (
                ("generate", grpo, "generate"), ("judge", grpo, "score"), ("policy forward", grpo, "completion_logprobs"),
                ("policy backward", torch.Tensor, "backward"), ("policy backward", torch.autograd, "grad"),
                ("influence", grpo, "keep_helpful"), ("optimiser", torch.nn.utils, "clip_grad_norm_"),
                ("optimiser", optimizer, "step")):
            stack.enter_context(mock.patch.object(owner, name, clocked(phase, getattr(owner, name))))
        yield


def linear_weights(model):
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def count(policy, b, target, s, dtype, judged):
    """The least that a phase must do, of real tokens only -> {phase: (tokens, FLOPs, bytes)}.

    A weight costs 2 FLOPs per token forward and 4 backward, a pair of positions 4 per channel and layer (scores and mix; a
    causal row of n has n (n + 1) / 2 pairs), twice that backward. Left out: norms, softmax, attention in the judge, and bytes
    that a large enough cache would keep. target: the held-out Batch, if there is one.
    """
    attn, head = policy.h[0].attn, policy.lm_head.weight.numel()
    trunk, pair = linear_weights(policy) - head, 4 * len(policy.h) * attn.n_head * attn.hs
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    learned = min(1.0, trained / (trunk + head))  # less with LoRA
    key_value = 2 * len(policy.h) * attn.n_kv_head * attn.hs * dtype.itemsize            # bytes of one position

    def pairs(x):
        return float((x * (x + 1) / 2).sum())

    def of_batch(b):
        p = b.rollout.real[:, :-b.mask.shape[1]].sum(1).double()                         # (N,) prompt tokens
        n, once = b.rollout.mask.sum(1).double(), p[::s.num_generations]                 # (N,) completion tokens; (B,)
        new, fed = float(n.sum()), float((p + n - 1).sum())                              # the last token is never read
        forward = 2 * trunk * fed + 2 * head * new + pair * pairs(p + n - 1)
        decoded = pairs(p + n - 1) - pairs(p)
        generate = (2 * trunk * (float(once.sum()) + new - len(n)) + 2 * head * new + pair * (pairs(once) + decoded),
                    (trunk + head) * dtype.itemsize * float(n.max()) + key_value * decoded)  # all weights for every step
        return new, fed, forward, generate, len(n)

    batches = [of_batch(x) for x in (b, target) if x]
    new, fed, forward, _, rows = batches[0]
    epochs, steps = s.num_iterations, max(1, rows // (s.mini_batch_size or rows))
    counts = {
        "generate": (sum(x[0] for x in batches), sum(x[3][0] for x in batches), sum(x[3][1] for x in batches)),
        "judge": (sum(t for _, t in judged), sum(2 * w * t for w, t in judged), sum(4 * w for w, _ in judged)),
        "policy forward": (epochs * fed, epochs * forward, 0),
        "policy backward": (epochs * fed, epochs * (1 + learned) * forward, 0),
        "optimiser": (0, 0, 32 * trained * epochs * steps)}  # weight, gradient and two moments of 4 bytes, read and written
    if s.beta:
        counts["reference"] = sum(x[1] for x in batches), sum(x[2] for x in batches), 0
    if s.tracin != "off":  # a product as large as the weights' gradient, or the rollouts' gradients read once
        serves = target is None and (s.tracin == "self" or grpo.one_backward(s, b))  # the batch's own backward
        again = 0 if serves else (2 + learned) * batches[-1][2]
        scores = 2 * learned * (trunk * fed + head * new), 4 * rows * trained
        counts["influence"] = (fed, again, scores[1]) if 10 * scores[1] < scores[0] else (fed, again + scores[0], 0)
    return counts


def ceilings(device, dtype, seconds=1.0):
    """(FLOP/s of a large matrix product in dtype, bytes/s of a large copy, read and written), medians."""
    n, size = (8192, 2 ** 30) if device.type == "cuda" else (2048, 2 ** 28)
    a, x = torch.randn(n, n, device=device).to(dtype), torch.ones(size // 4, device=device)
    y, found = torch.empty_like(x), []
    for work, amount in ((lambda: a @ a, 2 * n ** 3), (lambda: y.copy_(x), 2 * size)):
        spent = []
        while len(spent) < 4 or sum(spent) < seconds:
            wait(device)
            began = time.perf_counter()
            work()
            wait(device)
            spent.append(time.perf_counter() - began)
        found.append(amount / statistics.median(spent[1:]))
    return found


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------------------------
# what each speed setting buys


def variants(s, device):
    """{what is changed: (the phases that it concerns, Settings)}, one setting turned the other way in each."""
    changes = [(UPDATE, name, not getattr(s, name)) for name in ("fused_head", "sort_by_length", "activation_checkpointing")]
    changes += [(("generate",), name, not getattr(s, name)) for name in ("retire_rows", "cuda_graphs")]
    possible = {"generate": True, "judge": "judge" in s.reward_funcs and s.judge != "profanity-check", "reference": s.beta > 0,
                "update": s.tracin == "off" or s.num_iterations > 1}  # what influence records is never compiled
    changes += [(UPDATE if part == "update" else (part,), "compile", tuple(x for x in PARTS if (x in s.compile) != (x == part)))
                for part in PARTS if possible[part]]
    if s.tracin != "off":
        changes += [((*UPDATE, "influence"), "tracin_memory", 0.0 if s.tracin_memory else Settings.tracin_memory),
                    ((*UPDATE, "influence"), "tracin", "off")]
    return {f"{name} = {value!r}": (phases, replace(s, **{name: value})) for phases, name, value in changes
            if name != "cuda_graphs" or device.type == "cuda"}


def levers(s, repeat):
    """Time the settings as they are and every variant of them, in turns, and print what each makes of its phase."""
    given = material(s)
    as_set = ready(s, **given)
    changed, every = variants(s, as_set.device), in_turns({"": as_set}, 1)[""]
    wide = max(map(len, ("as set", *changed)))
    print(f"{headline(as_set, every, repeat)} (min, max), each in turns with the settings as they are; x: times those")
    print(f"{'':{wide}}  {'phase':18}{'seconds':>9}{'as set':>9}{'x':>7}{'whole iteration':>24}{'x':>7}{'peak MB':>9}")

    def row(way, phases, x, base):
        now, was = median(x, *phases), median(base, *phases)
        print(f"{way:{wide}}  {' + '.join(phases).replace(' + '.join(UPDATE), 'update'):18}{now:9.3f}{was:9.3f}{now / was:7.2f}"
              f"{spread([y.seconds['all'] for y in x], 3):>24}{median(x, 'all') / median(base, 'all'):7.2f}"
              f"{max(y.peak for y in x) / 2 ** 20:9.0f}", flush=True)

    for way, (phases, t) in changed.items():  # two rigs at a time: each may hold gigabytes
        try:
            base, x = in_turns({"as set": as_set, way: ready(t, **given)}, repeat).values()
        except BadInput as e:
            print(f"left out: {e}")
            continue
        every += base
        row(way, phases, x, base)
    row("as set", ("all",), every, every)


# ---------------------------------------------------------------------------------------------------------------
# against TRL

GPT2 = dict(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, judge_vocab_size=50257, num_prompts=16,
            max_completion_length=128, micro_batch_size=64, learning_rate=1e-6, tracin="self")
SMALL = GPT2 | dict(vocab_size=512, block_size=160, n_layer=6, n_head=6, n_embd=384, micro_batch_size=8)
CASES = {  # settings, mean length of a completion before the cut or None: no end
    "ends": (SMALL, 55),
    "fixed": (SMALL, None),
    "vocabulary": (SMALL | dict(vocab_size=50257, num_prompts=4), None),
    "gpt2": (GPT2, None),  # only when it is asked for
}


def random_prompts(s):
    ids = torch.randint(s.vocab_size - 1, (s.num_prompts, 32), generator=torch.Generator().manual_seed(1)).tolist()
    return [(" ".join(f"t{i}" for i in row), row) for row in ids]


def against_trl(s, ends, device, repeat):
    """Whole iterations of GRPO: TRL's, ours, and ours with influence as in s -> {way: (seconds for 1000 tokens, peak bytes)}.

    The same weights, prompts, lengths, reward, loss (dapo), micro-batches, optimiser and number of updates, in turns in one
    process. TRL with its defaults, but all rows in one call of generate, no gradient checkpointing, nothing logged or saved.
    Completions that end by themselves do so at random: the bias of the last LayerNorm gives the end token about the same
    probability everywhere.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import datasets
        import tokenizers
        import transformers
        import trl
    except ImportError as e:
        raise BadInput(f"python bench.py trl needs {e.name}: pip install trl==1.16.0, in an environment of its own") from e
    transformers.logging.set_verbosity_error()

    def rule(prompts, completions, completion_ids=None, **rest):
        if completion_ids is not None:  # TRL tells their lengths here
            seen.append(sum(map(len, completion_ids)))
        return [text.count("1") / max(1, len(text)) for text in completions]

    s = replace(s, judge=None, functions={"rule": rule}, reward_funcs=("rule",), reward_weights=(1.0,), beta=0.0,
                adam_beta1=0.9, adam_beta2=0.999, weight_decay=0.0)
    V, N, dtype, prompts = s.vocab_size, s.num_prompts * s.num_generations, pick_dtype(s.dtype, device), random_prompts(s)
    micro, policy, seen = min(s.micro_batch_size, N), policy_that_ends(s, ends).to(device), []
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(V)}, unk_token="t0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=f"t{V - 1}", pad_token=f"t{V - 1}")
    hf = to_transformers(policy, transformers).to(device)
    x = torch.tensor([ids for _, ids in prompts], device=device)
    with torch.no_grad():
        off = float((hf(x).logits - policy.lm_head(policy(x))).abs().max())
    assert off < 1e-3, f"the two models differ by {off} in a logit"
    words = SimpleNamespace(eot_token=V - 1, decode=lambda ids: " ".join(f"t{i}" for i in ids))
    ours = {way: rig(t, policy, words, prompts)
            for way, t in (("ours", replace(s, tracin="off")), ("ours, influence", s))}
    times = {way: [] for way in ("TRL", *ours)}

    class Turns(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            self.watch = stopwatch(device)

        def on_step_end(self, args, state, control, **kwargs):
            times["TRL"].append((*self.watch(), seen[-1]))
            for way, r in ours.items():
                watch = stopwatch(device, r.held())
                b, _ = r.run(state.global_step)
                times[way].append((*watch(), int(b.mask.sum())))
                del b
            self.watch = stopwatch(device)

    with tempfile.TemporaryDirectory() as folder:
        args = trl.GRPOConfig(
            output_dir=folder, max_steps=repeat + 1, per_device_train_batch_size=micro, gradient_accumulation_steps=N // micro,
            generation_batch_size=N, num_generations=s.num_generations, max_completion_length=s.max_completion_length,
            gradient_checkpointing=False, beta=0.0,
            learning_rate=s.learning_rate, lr_scheduler_type="constant", logging_strategy="no", save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=device.type == "cpu", bf16=dtype == torch.bfloat16)
        trl.GRPOTrainer(hf, rule, args, datasets.Dataset.from_dict({"prompt": [text for text, _ in prompts]}),
                        processing_class=tokenizer, callbacks=[Turns()]).train()
    print(f"\n{s.n_layer} x {s.n_embd}, V {V}, {s.num_prompts} prompts x {s.num_generations}, 32 + "
          f"{'up to ' if ends else ''}{s.max_completion_length} tokens, micro-batches of {micro}; TRL {trl.__version__}, torch "
          f"{torch.__version__}, {device}, {dtype}, {torch.get_num_threads()} threads; medians of {repeat} (min, max)")
    print(f"{'':18}{'s/iteration':>22}{'CPU s':>8}{'tokens':>8}{'s/1000 tokens':>22}{'CPU s':>8}{'TRL / this':>12}{'CPU':>7}"
          f"{'peak MB':>9}")
    each, found = {}, {}
    for way, rows in times.items():
        wall, cpu, peak, tokens = zip(*rows[1:])  # the first warms up
        each[way] = [[1000 * t / n for t, n in zip(x, tokens)] for x in (wall, cpu)]
        ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(each["TRL"], each[way])]
        print(f"{way:18}{spread(wall):>22}{statistics.median(cpu):8.2f}{statistics.median(tokens):8.0f}"
              f"{spread(each[way][0]):>22}{statistics.median(each[way][1]):8.2f}{ratios[0]:11.2f}x{ratios[1]:6.2f}x"
              f"{max(peak) / 2 ** 20:9.0f}")
        found[way] = statistics.median(each[way][0]), max(peak)
    return found


def policy_that_ends(s, mean):
    """A random GPT whose end token, the last one, has probability 1 / mean everywhere (None: none to speak of)."""
    torch.manual_seed(0)
    policy = GPT(GPTConfig(s.vocab_size, s.block_size, s.n_layer, s.n_head, s.n_embd)).eval()
    with torch.no_grad():
        bias = torch.randn(s.n_embd)
        bias *= 20 / bias.norm()
        policy.ln_f.bias.copy_(bias)  # seen by the end token's row, which lies along it; the others hardly notice
        others = policy.lm_head(torch.randn(1000, s.n_embd) + bias)[:, :-1].logsumexp(-1).mean()
        logit = float(others) - math.log(mean - 1) if mean else -30.0
        policy.wte.weight[-1] = logit * bias / 400
    return policy


def to_transformers(policy, transformers):
    """The same weights as a GPT2LMHeadModel."""
    c = policy.config
    hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=c.vocab_size - 1, eos_token_id=c.vocab_size - 1))
    state = {f"transformer.{k}": v.T if v.dim() == 2 and k.startswith("h.") else v for k, v in policy.state_dict().items()}
    hf.load_state_dict({k: v for k, v in state.items() if "lm_head" not in k}, strict=False)
    hf.tie_weights()
    return hf


def stopwatch(device, held=0):
    """Starts now; called, it gives (seconds, CPU seconds of this process, most bytes in use above those at the start). Of the
    bytes in use at the start `held` count all the same."""
    gc.collect()
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # the high-water mark starts again from what is in use now
    rest, wall, cpu = memory(device) - held, time.perf_counter(), time.process_time()

    def read():
        wait(device)
        spent = time.perf_counter() - wall, time.process_time() - cpu
        if device.type == "cuda":
            return *spent, torch.cuda.max_memory_allocated(device) - rest
        with open("/proc/self/status") as f:
            return *spent, next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024 - rest

    return read


def spread(x, digits=2):
    return f"{statistics.median(x):.{digits}f} ({min(x):.{digits}f}, {max(x):.{digits}f})"


# ---------------------------------------------------------------------------------------------------------------
# GPT-2 124M on one GPU


def gpt2(s, repeat):
    """Iterations of random weights with a judge of their shape, plain and with influence in turns; TRL beside them; and what
    came of it beside what is aimed at."""
    device, (N, T) = pick_device(s.device), (s.num_prompts * s.num_generations, s.max_completion_length)
    shape = dict(n_layer=s.n_layer, n_head=s.n_head, n_embd=s.n_embd, block_size=T + 1, causal=False)
    given = dict(policy=policy_that_ends(s, None).to(device), tokenizer=load_tokenizer(s.vocab_size), prompts=random_prompts(s),
                 judge=lambda: judge_of(s, device, shape))
    rigs = {"plain": ready(replace(s, tracin="off"), **given), f"tracin = {s.tracin!r}": ready(s, **given)}
    rounds, most = in_turns(rigs, repeat), ceilings(device, rigs["plain"].dtype)
    for way, r in rigs.items():
        print(f"{way}, micro-batches of {s.micro_batch_size}: ", end="")
        table(r, rounds[way], most)
        print()
    plain, influence = rounds.values()
    update, flops = median(plain, *UPDATE), sum(plain[0].least[phase][1] for phase in UPDATE)
    peak, more = (max(x.peak for x in way) / 2 ** 20 for way in (plain, influence))
    lines = [(f"all of generate / {T} tokens, ms", 1000 * median(plain, "generate") / T, "0.35 (floor 0.17)"),
             ("policy forward + backward, ms", 1000 * update, "38"),
             ("their share of the matrix rate, %", 100 * flops / update / most[0], "48"),
             ("whole iteration with the judge, ms", 1000 * median(plain, "all"), "110 (floor 46)"),
             ("influence / plain, whole iteration", median(influence, "all") / median(plain, "all"), "at most 1.12"),
             ("peak memory, plain, MB", peak, ""), ("peak memory, influence, MB", more, "")]
    del rigs, given, r  # TRL's turn
    try:
        found = against_trl(s, None, device, repeat)
        (theirs, theirs_peak), (ours, ours_peak) = found["TRL"], found["ours"]
        lines += [("TRL / this, whole iteration", theirs / ours, "at least 8"),
                  ("this / TRL, peak memory", ours_peak / theirs_peak, "at most 0.5")]
    except BadInput as e:
        if not isinstance(e.__cause__, ImportError):
            raise
        print(f"against TRL: no row ({e})")
    print(f"\n{'':36}{'here':>12}   aim on an H200, at GPT-2's shape")
    for what, number, aim in lines:
        print(f"{what:36}{number:12.{0 if number > 1000 else 1 if number >= 20 else 2}f}   {aim}".rstrip())


def main(argv):
    own = {"levers": (), "gpt2": (), "tracin": ("device",), "trl": ("device", "case")}
    mode, argv = (argv[0], argv[1:]) if argv and argv[0] in own else ("phases", argv)
    flags = tuple(f"--{name}=" for name in ("repeat", *own.get(mode, ("picture",))))
    mine = dict(arg[2:].split("=", 1) for arg in argv if arg.startswith(flags))
    rest, repeat = [arg for arg in argv if not arg.startswith(flags)], mine.get("repeat", "5")
    if not repeat.isdigit() or int(repeat) < 1:
        raise BadInput(f"repeat = {repeat!r}: must be a whole number from 1")
    if "device" in own.get(mode, ()) and (rest or mine.get("case", "ends") not in CASES):
        raise BadInput(f"usage: python bench.py {mode} [--repeat=5] [--device=auto]"
                       + (f" [--case={'|'.join(CASES)}]" if mode == "trl" else ""))
    repeat, device = int(repeat), mine.get("device", "auto")
    if mode == "tracin":
        tracin(pick_device(device), repeat)
    elif mode == "trl":
        for name in [mine["case"]] if "case" in mine else list(CASES)[:3]:
            against_trl(Settings(**CASES[name][0]), CASES[name][1], pick_device(device), repeat)
    elif mode == "gpt2":
        gpt2(load_settings([f"--{name}={value}" for name, value in GPT2.items()] + rest), repeat)
    elif mode == "levers":
        levers(load_settings(rest), repeat)
    else:
        phases(load_settings(rest), repeat, mine.get("picture"))


if __name__ == "__main__":
    run_script(main)
