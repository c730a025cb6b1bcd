"""What an iteration costs and where its time goes. Times are medians of --repeat rounds, the first of which does not count.

    python bench.py config/toxicity.py --max_completion_length=64     iterations of a config, phase by phase
    python bench.py tracin                                            what influence costs
    python bench.py trl                                               against TRL's GRPOTrainer, where trl is installed

The first takes every setting of grpo.py and --picture=FILE (stacked bars, where matplotlib is installed). It runs grpo.py's own
functions on random weights of the config's shape, so that it needs no training, or on the files that the config names, and
holds each phase against the least that it must compute or move and what this machine can compute and move, measured beside it.

tracin: one iteration's update, the same rollouts each way, interleaved; ratios to plain GRPO are what counts.
  plain       forward, backward
  kept        forward, backward under a tape, target, scores, checks, the gradient of the selected rows, as grpo.py does them
              for tracin = "self" (targets that are no multiple of the loss cost one more forward and backward)
  contracted  the same with tracin_memory = 0
  two passes  a tape for the scores only, then forward and backward again for the kept rows
  brute       one backward for every row, then forward and backward of half of them; without the inner products
"""
import contextlib
import copy
import ctypes
import gc
import math
import os
import statistics
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn as nn

import grpo
import judge.scorer
from config import Settings, load_settings
from judge.comments import get_splits, load_prompts
from judge.train import SHAPE
from model import (GPT, BadInput, GPTConfig, add_lora, completion_logprobs, derive, generate, memory, pick_device, pick_dtype,
                   run_script)
from pretrain import get_tokenizer, load_policy
from tokenizer import load_tokenizer
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
            halves, ones = tape.gradients([(everything * 2 // N == part).float() for part in (0, 1)]), torch.ones(N, device=device)
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
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
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
# iterations of a config, phase by phase

PHASES = ("generate", "judge", "reference", "policy forward", "policy backward", "influence", "optimiser", "the rest")


def phases(s, repeat, picture=None):
    """Run repeat + 1 iterations of the settings and print the table."""
    device = pick_device(s.device)
    dtype, policy = pick_dtype(s.dtype, device), policy_of(s).to(device)  # a published one brings its shape and tokenizer
    policy.recompute, tokenizer = s.activation_checkpointing, get_tokenizer(s)
    if picture:
        try:
            from matplotlib.figure import Figure
        except ImportError as e:
            raise BadInput(f"picture = {picture!r}: pip install matplotlib, or leave it out") from e
    prompts, _, val_prompts = load_prompts(s, tokenizer, get_splits(s))
    if s.tracin != "off" and s.tracin_val_prompts and not val_prompts:
        raise BadInput(f"tracin_val_prompts = {s.tracin_val_prompts}: no held-out prompts are left; lower num_eval_prompts")
    reference = copy.deepcopy(policy).requires_grad_(False)
    if s.lora_rank:
        add_lora(policy, s.lora_rank, s.lora_alpha, s.lora_layers)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=s.learning_rate, betas=(s.adam_beta1, s.adam_beta2), fused=True)
    reward_funcs, recorder = judge.scorer.reward_functions(s, {"judge": judge_of(s, device)}), recorder_of(policy, s)
    scored, rounds = torch.compile(policy, dynamic=True) if s.compile else policy, []
    for it in range(repeat + 1):
        spent, judged = dict.fromkeys(PHASES, 0.0), []
        watch = stopwatch(device)
        with timed(device, spent, optimizer, judged):
            b, target = iteration(policy, scored, reference, optimizer, recorder, grpo.pick(prompts, it, s), reward_funcs, s,
                                  tokenizer, it, dtype, val_prompts)
        wall, cpu, peak = watch()
        spent["the rest"] = wall - sum(spent.values())
        rounds.append((spent | {"all": wall}, cpu, peak, count(policy, b, target, s, dtype, judged)))
    rounds = rounds[1:]
    matrix, copies = ceilings(device, dtype)
    N, width = b.rollout.tokens.shape
    P, T = width - b.mask.shape[1], b.mask.shape[1]
    print(f"{N} rows of up to {P} + {T} tokens, {sum(p.numel() for p in policy.parameters()) / 1e6:.1f} M weights, {device}, "
          f"{dtype}, {torch.get_num_threads()} threads; medians of {repeat}")
    print(f"ceilings, measured now: {matrix / 1e12:.3g} TFLOP/s (a large matrix product), {copies / 1e9:.3g} GB/s (a large copy)")
    print(f"{'':17}{'seconds':>9}{'share':>7}{'tokens/s':>10}{'TFLOP/s':>9}{'GB/s':>8}{'floor, s':>10}{'x floor':>9}")
    measured, floors = {}, {}
    for phase in (*PHASES, "all"):
        seconds = statistics.median(r[0][phase] for r in rounds)
        tokens, flops, moved, floor = (statistics.median(x) for x in zip(*(
            (t, f, m, max(f / matrix, m / copies)) for t, f, m in (r[3].get(phase, (0, 0, 0)) for r in rounds))))
        if phase == "all":
            floor, tokens = sum(floors.values()), statistics.median(r[3]["generate"][0] for r in rounds)
        else:
            measured[phase], floors[phase] = seconds, floor
        if seconds > 0 and (floor or phase in ("all", "the rest")):
            print(f"{phase:17}{seconds:9.3f}{100 * seconds / statistics.median(r[0]['all'] for r in rounds):6.1f}%"
                  + (f"{tokens / seconds:10.0f}" if tokens else " " * 10)
                  + (f"{flops / seconds / 1e12:9.3g}{moved / seconds / 1e9:8.3g}" if floor and phase != "all" else " " * 17)
                  + (f"{floor:10.3f}{seconds / floor:8.1f}x" if floor else ""))
    real = float((b.rollout.real[:, :P].sum() + b.rollout.mask.sum()) / b.rollout.tokens.numel())
    print(f"padding: {100 * (1 - real):.1f} % of rows x width; CPU time {statistics.median(r[1] for r in rounds):.3f} s; "
          f"peak memory {max(r[2] for r in rounds) / 2 ** 20:.0f} MB above weights and optimiser")
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


def policy_of(s):
    """The policy in the file that the settings name, else random weights of their shape."""
    torch.manual_seed(s.prepare_seed)
    if s.policy != "train":
        return load_policy(s).eval()
    return GPT(GPTConfig(s.vocab_size, s.block_size, s.n_layer, s.n_head, s.n_embd)).eval()


def judge_of(s, device):
    """The judge that the settings name, else one of random weights in the shape of those trained here; None without."""
    if s.judge not in (None, "train"):
        return judge.scorer.load_judge(s.judge, device, s.judge_label)
    tokenizer = load_tokenizer(s.judge_vocab_size)
    model = judge.scorer.Scorer(GPTConfig(s.judge_vocab_size, **SHAPE)).to(device).eval()
    return s.judge and (lambda prompts, completions: judge.scorer.log_odds(
        model, judge.scorer.encode(tokenizer, completions, SHAPE["block_size"]), device))


def recorder_of(policy, s):
    return Tape(policy, memory=s.tracin_memory * 2 ** 30) if s.tracin != "off" else None


def iteration(policy, scored, reference, optimizer, recorder, prompts, reward_funcs, s, tokenizer, it, dtype, val_prompts=()):
    """What grpo.py does in iteration `it`, without its log -> Batch, held-out Batch of the target or None."""
    def collect(prompts, purpose):
        return grpo.collect(policy, reference, prompts, reward_funcs, s, tokenizer, derive(s.seed, purpose, it), dtype)

    batch, target, held_out = collect(prompts, "rollout"), None, None
    if recorder and s.tracin_val_prompts:
        target = collect(grpo.pick(val_prompts, it, replace(s, num_prompts=s.tracin_val_prompts)), "target")
        held_out = target, choose_targets(target.rewards, s.tracin_val_size, s.tracin_val_select,
                                          torch.Generator().manual_seed(derive(s.seed, "chosen", it))).to(batch.mask.device)
    grpo.update(policy, scored, optimizer, batch, s, derive(s.seed, "rows", it), dtype, lambda *a, **k: None, False, held_out,
                recorder)
    return batch, target


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

    def noted(model, rows, *args, plain=judge.scorer.log_odds, **kwargs):
        judged.append((linear_weights(model), sum(map(len, rows))))
        return plain(model, rows, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(judge.scorer, "log_odds", noted))
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
# against TRL

CASES = {  # vocabulary, prompts, most new tokens, mean length before the cut or None: no end
    "ends": (512, 16, 128, 55),
    "fixed": (512, 16, 128, None),
    "vocabulary": (50257, 4, 128, None),
}


def against_trl(device, repeat, only):
    """Whole iterations of GRPO without KL: TRL's, ours, and ours with exact influence on the batch's own loss.

    The same weights, prompts, lengths, reward, loss (dapo), optimiser and number of updates, in turns in one process. TRL with
    its defaults (micro-batches of 8, so ours too), but all rows in one call of generate, no gradient checkpointing, nothing
    logged or saved. Completions that end by themselves do so at random: the bias of the last LayerNorm gives the end token
    about the same probability everywhere.
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
    for name, (V, num_prompts, T, ends) in CASES.items():
        if only and only not in name:
            continue
        s = Settings(vocab_size=V, block_size=32 + T, n_layer=6, n_head=6, n_embd=384, num_prompts=num_prompts, num_generations=8,
                     max_completion_length=T, micro_batch_size=8, learning_rate=1e-6, beta=0.0,
                     reward_funcs=("rule",), reward_weights=(1.0,), adam_beta2=0.999, log_micro=False)
        dtype, N = pick_dtype(s.dtype, device), num_prompts * 8
        policy, seen = policy_that_ends(s, ends).to(device), []
        words = {f"t{i}": i for i in range(V)}
        plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
        plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=f"t{V - 1}", pad_token=f"t{V - 1}")
        ids = torch.randint(V - 1, (num_prompts, 32), generator=torch.Generator().manual_seed(1)).tolist()
        prompts = [(" ".join(f"t{i}" for i in row), row) for row in ids]

        def rule(prompts, completions, completion_ids=None, **rest):
            if completion_ids is not None:  # TRL tells their lengths here
                seen.append(sum(map(len, completion_ids)))
            return [text.count("1") / max(1, len(text)) for text in completions]

        hf = to_transformers(policy, transformers).to(device)
        x = torch.tensor(ids, device=device)
        with torch.no_grad():
            off = float((hf(x).logits - policy.lm_head(policy(x))).abs().max())
        assert off < 1e-3, f"the two models differ by {off} in a logit"
        ours = {}
        for way, kind in (("ours", "off"), ("ours, influence", "self")):
            model, t = copy.deepcopy(policy), replace(s, tracin=kind)
            ours[way] = (model, torch.optim.AdamW(model.parameters(), lr=s.learning_rate, betas=(0.9, 0.999), weight_decay=0.0,
                                                  fused=True), recorder_of(model, t), t)
        words = SimpleNamespace(eot_token=V - 1, decode=lambda ids: " ".join(f"t{i}" for i in ids))
        times = {way: [] for way in ("TRL", *ours)}

        class Turns(transformers.TrainerCallback):
            def on_train_begin(self, *args, **kwargs):
                self.watch = stopwatch(device)

            def on_step_end(self, args, state, control, **kwargs):
                times["TRL"].append((*self.watch(), seen[-1]))
                for way, (model, optimizer, recorder, t) in ours.items():
                    watch = stopwatch(device)
                    b, _ = iteration(model, model, None, optimizer, recorder, prompts, {"rule": rule}, t, words,
                                     state.global_step, dtype)
                    times[way].append((*watch(), int(b.mask.sum())))
                    del b
                self.watch = stopwatch(device)

        with tempfile.TemporaryDirectory() as folder:
            args = trl.GRPOConfig(
                output_dir=folder, max_steps=repeat + 1, per_device_train_batch_size=8, gradient_accumulation_steps=N // 8,
                generation_batch_size=N, num_generations=8, max_completion_length=T,
                gradient_checkpointing=False, beta=0.0,
                learning_rate=s.learning_rate, lr_scheduler_type="constant", logging_strategy="no", save_strategy="no",
                report_to=[], disable_tqdm=True, use_cpu=device.type == "cpu", bf16=dtype == torch.bfloat16)
            trl.GRPOTrainer(hf, rule, args, datasets.Dataset.from_dict({"prompt": [text for text, _ in prompts]}),
                            processing_class=tokenizer, callbacks=[Turns()]).train()
        print(f"\n{name}: 6 x 384, V {V}, {num_prompts} prompts x 8, 32 + up to {T} tokens; TRL {trl.__version__}, torch "
              f"{torch.__version__}, {device}, {dtype}, {torch.get_num_threads()} threads; medians of {repeat} (min, max)")
        print(f"{'':18}{'s/iteration':>22}{'CPU s':>8}{'tokens':>8}{'s/1000 tokens':>22}{'CPU s':>8}{'TRL / this':>12}{'CPU':>7}"
              f"{'peak MB':>9}")
        each = {}
        for way, rows in times.items():
            wall, cpu, peak, tokens = zip(*rows[1:])  # the first warms up
            each[way] = [[1000 * t / n for t, n in zip(x, tokens)] for x in (wall, cpu)]
            ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(each["TRL"], each[way])]
            print(f"{way:18}{spread(wall):>22}{statistics.median(cpu):8.2f}{statistics.median(tokens):8.0f}"
                  f"{spread(each[way][0]):>22}{statistics.median(each[way][1]):8.2f}{ratios[0]:11.2f}x{ratios[1]:6.2f}x"
                  f"{max(peak) / 2 ** 20:9.0f}")


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


def stopwatch(device):
    """Starts now; called, it gives (seconds, CPU seconds of this process, most bytes in use above those at the start)."""
    gc.collect()
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # the high-water mark starts again from what is in use now
    rest, wall, cpu = memory(device), time.perf_counter(), time.process_time()

    def read():
        wait(device)
        spent = time.perf_counter() - wall, time.process_time() - cpu
        if device.type == "cuda":
            return *spent, torch.cuda.max_memory_allocated(device) - rest
        with open("/proc/self/status") as f:
            return *spent, next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024 - rest

    return read


def spread(x):
    return f"{statistics.median(x):.2f} ({min(x):.2f}, {max(x):.2f})"


def main(argv):
    mine = dict(arg[2:].split("=", 1) for arg in argv if arg.startswith(("--repeat=", "--picture=", "--case=")))
    repeat, rest = mine.get("repeat", "5"), [arg for arg in argv if not arg.startswith(("--repeat=", "--picture=", "--case="))]
    if not repeat.isdigit() or int(repeat) < 1:
        raise BadInput(f"repeat = {repeat!r}: must be a whole number from 1")
    if rest[:1] in (["tracin"], ["trl"]):
        device = dict(arg[2:].partition("=")[::2] for arg in rest[1:] if arg.startswith("--"))
        if set(device) - {"device"} or len(rest) > 1 + len(device) or mine.get("case", "ends") not in CASES:
            raise BadInput(f"usage: python bench.py {rest[0]} [--repeat=5] [--device=auto]"
                           + (f" [--case={'|'.join(CASES)}]" if rest[0] == "trl" else ""))
        device = pick_device(device.get("device", "auto"))
        tracin(device, int(repeat)) if rest[0] == "tracin" else against_trl(device, int(repeat), mine.get("case"))
    else:
        phases(load_settings(rest), int(repeat), mine.get("picture"))


if __name__ == "__main__":
    run_script(main)
