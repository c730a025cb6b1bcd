"""Where the time of an iteration goes, in tokens/s by phase, and which share of the device's peak
speed that is: one line of JSON. See docs/gpus.md."""
import json
import math
import statistics
import time

import torch
from torch import nn

import grpo
from common.device import read_proc
from common.seeds import seed_for
from run.report import Clock

# {part of a GPU's name: (GB/s of its memory, TFLOP/s of bfloat16 products summed in float32,
# TFLOP/s of float32)}, dense, from the makers' data sheets; the first part that fits counts
PEAKS = {
    "B200": (8000, 2250, 75), "H200": (4800, 989, 67), "H100 PCIe": (2000, 756, 51),
    "H100 NVL": (3900, 835, 60), "H100": (3350, 989, 67), "A100 80GB PCIe": (1935, 312, 19.5),
    "A100-SXM4-80GB": (2039, 312, 19.5), "A100": (1555, 312, 19.5), "L40S": (864, 362, 91.6),
    "L4": (300, 121, 30.3), "RTX 5090": (1792, 209.5, 104.8), "RTX 4090": (1008, 165.2, 82.6),
    "RTX 3090": (936, 71, 35.6), "RTX A6000": (768, 154.8, 38.7), "T4": (320, None, 8.1)}

PHASES = ("sampling", "reward", "reference", "held_out", "loss", "influence", "step")
# phase of a Clock: the same here
NAMES = {"sample": "sampling", "score": "reward", "advantage": "reference", "record": "loss",
         "update": "step"}


class PhaseClock(Clock):
    """A Clock that prints nothing and records the seconds of each phase. It waits for the device
    at the end of a phase."""

    def __init__(self, setup, cfg):
        super().__init__(setup.device, on=False)
        self.influence = cfg.tracin != "off"
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.last = now(setup.device)

    def end(self, phase, rewards=None):
        """Book the time since the last end for this phase."""
        time_now = now(self.device)
        self.seconds[NAMES.get(phase, phase)] += time_now - self.last
        self.last = time_now

    def loss(self, loss):
        self.end("loss")

    def watch(self, step, grad_norm):
        """Before a step: influence has chosen its rows, or the gradient has been clipped."""
        chosen = self.influence and step.epoch == 0
        self.end("influence" if chosen else "step")

    def stepped(self, *hook):
        self.end("step")


def now(device):
    """Seconds, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed_iteration(setup, cfg, it):
    """Iteration `it` of grpo.train -> ({phase: seconds}, its Rollout)."""
    clock = PhaseClock(setup, cfg)
    hook = setup.optimizer.register_step_post_hook(clock.stepped)
    batch = grpo.collect_iteration(setup, it, cfg, clock)
    held_out = grpo.collect_held_out(setup, it, cfg)
    clock.end("held_out")
    seed = seed_for(cfg.seed, "rows", it)
    grpo.update(setup, batch, held_out, cfg, seed, clock, watch=clock.watch)
    hook.remove()
    return clock.seconds, batch.rollout


# ------------------------------------------------------------------------------------------------
# which share of the device's peak is that?


def work_of(setup, cfg, rollout):
    """Count the operations and reads that an iteration needs, whatever the code does -> {phase:
    (operations, bytes)}, None where they are not counted."""
    policy = setup.policy
    linear = sum(layer.weight.numel() for layer in policy.modules()
                 if isinstance(layer, nn.Linear) and layer is not policy.lm_head)
    head = policy.lm_head.weight.numel()
    size = 2 if setup.dtype == torch.bfloat16 else 4
    c = policy.config
    head_dim = c.head_dim or c.n_embd // c.n_head

    # tokens of each row: read before the first sample, and sampled
    T = rollout.sampled_mask.shape[1]
    read = rollout.attention_mask[:, :-T].sum(1).double()                           # (N,)
    sampled = rollout.completion_mask.sum(1).double()                               # (N,)
    num_sampled = float(sampled.sum())
    num_tokens = float((read + sampled - 1).sum())      # nothing follows the last one
    keys = float((sampled * read + sampled * (sampled - 1) / 2).sum())      # read while sampling
    pairs = float((read + sampled - 1).square().sum() / 2)                  # of a query and a key

    # sampling reads all weights for each token of the batch, and the keys and values before it
    at_once = cfg.decode_batch_size or len(read)
    steps = T * math.ceil(len(read) / at_once)
    kept = 2 * c.n_layer * (c.n_kv_head or c.n_head) * head_dim * size      # bytes of a token
    attention = 4 * c.n_layer * c.n_head * head_dim                         # operations of a pair
    forward = 2 * linear * num_tokens + 2 * head * num_sampled + attention * pairs
    trained = sum(p.numel() for p in setup.trained)
    return {
        "sampling": (2 * (linear + head) * num_sampled + attention * keys,
                     steps * (linear + head) * size + keys * kept),
        "reference": (forward if cfg.beta else None, None),
        "loss": (3 * forward * cfg.num_iterations, None),
        "step": (None, 28 * trained)}       # AdamW reads four numbers and writes three


def device_name(device):
    """The GPU's name, or the CPU's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in read_proc("cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "CPU"


def peaks_of(name, dtype):
    """A device's peaks by its data sheet -> (bytes/s, operations/s), None if unknown."""
    for part, (bandwidth, half, full) in PEAKS.items():
        if part in name:
            rate = half if dtype == torch.bfloat16 else full
            return 1e9 * bandwidth, 1e12 * rate if rate else None
    return None, None


def share(amount, seconds, peak):
    """amount / seconds as a share of the peak; None if one of them is unknown."""
    if amount is None or peak is None or seconds == 0:
        return None
    return float(f"{amount / seconds / peak:.3g}")


def report(setup, cfg, its):
    """Measure iterations `its` phase by phase, without the first -> the content of the line.

    tokens_per_s: sampled tokens of an iteration by the seconds of the phase. bandwidth, matrix:
    shares of the peaks. The log-probs of the policy that sampled cost nothing: the sampler has
    them.
    """
    measured = [timed_iteration(setup, cfg, it) for it in its][1:]
    name = device_name(setup.device)
    bytes_per_s, operations_per_s = peaks_of(name, setup.dtype)
    phases = {"old_logp": None}
    for phase in PHASES:
        seconds = statistics.median(seconds[phase] for seconds, _ in measured)
        rates = []
        shares = []
        for times, rollout in measured:
            spent = times[phase]
            operations, read = work_of(setup, cfg, rollout).get(phase, (None, None))
            if spent:
                rates.append(int(rollout.sampled_mask.sum()) / spent)
            shares.append((share(read, spent, bytes_per_s),
                           share(operations, spent, operations_per_s)))
        bandwidth, matrix = shares[len(shares) // 2]
        is_on = dict(reference=cfg.beta, influence=cfg.tracin != "off",
                     held_out=cfg.tracin != "off" and cfg.tracin_val_prompts).get(phase, True)
        phases[phase] = dict(
            seconds=float(f"{seconds:.4g}"), tokens_per_s=round(statistics.median(rates)),
            bandwidth=bandwidth, matrix=matrix) if is_on and rates else None
    c = setup.policy.config
    total = statistics.median(sum(seconds.values()) for seconds, _ in measured)
    tokens = statistics.median(int(rollout.sampled_mask.sum()) for _, rollout in measured)
    return dict(
        device=name, torch=torch.__version__, dtype=str(setup.dtype).removeprefix("torch."),
        compile=bool(setup.compiled), tracin=cfg.tracin,
        policy=dict(n_layer=c.n_layer, n_embd=c.n_embd, vocab_size=c.vocab_size),
        rows=cfg.num_prompts * cfg.num_generations, tokens=tokens,
        seconds=float(f"{total:.4g}"), tokens_per_s=round(tokens / total),
        peak_bandwidth=bytes_per_s, peak_matrix=operations_per_s, phases=phases)


def print_phases(setup, cfg, its):
    """Print the line, and a note if the device's peaks are unknown."""
    line = report(setup, cfg, its)
    if line["peak_bandwidth"] is None:
        print(f"note: {line['device']!r} is not in the table of peaks (extras/bench/phases.py): "
              "no shares of them")
    print(json.dumps(line), flush=True)
    return line
