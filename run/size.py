"""What settings take in memory. The least that they can take is refused where it does not fit,
before it is allocated: a wrong refusal is worse than a late "out of memory". The most (run/peak.py)
is only noted, since completions may end early and prompts be short.
"""
from run.device import free_memory
from run.peak import peak_bytes
from run.processes import rank_and_size
from run.script import BadInput

SHAPE = ("vocab_size", "block_size", "n_layer", "n_embd", "lora_rank")
ROWS = ("max_completion_length", "num_generations", "decode_batch_size")
LOWERED = {"rollout": "decode_batch_size", "reference": "micro_batch_size",
           "update": "micro_batch_size", "evaluation": "num_eval_generations"}


def check_size(cfg, base, num_eval_prompts, device, dtype):
    """BadInput with the settings to lower if weights or rollouts of a run cannot fit. base: the
    policy if it is in memory already, else None."""
    weights = weight_bytes(cfg, base, copies=4)         # with the gradient and AdamW's moments
    check_fits(weights, device, named(cfg, *SHAPE))
    kept = weight_bytes(cfg, base, copies=3)            # while there is no gradient
    at_once = cfg.decode_batch_size // cfg.num_generations * cfg.num_generations
    truncates = cfg.top_k or cfg.top_p < 1 or cfg.min_p
    for name in ("num_prompts", "tracin_val_prompts"):
        rows = getattr(cfg, name) * cfg.num_generations
        num_bytes = rollout_bytes(cfg, base, rows, at_once, dtype, truncates)
        check_fits(kept + num_bytes, device, named(cfg, name, *ROWS))
    check_evaluation_size(cfg, base, num_eval_prompts, device, dtype)


def check_evaluation_size(cfg, base, num_eval_prompts, device, dtype):
    """The same for the rollouts of an evaluation of so many prompts."""
    k = cfg.num_eval_generations
    num_bytes = rollout_bytes(cfg, base, num_eval_prompts * k, k, dtype, truncates=False)
    names = ("num_eval_prompts", "num_eval_generations", "max_completion_length")
    check_fits(num_bytes, device, named(cfg, *names))


def check_pretraining_size(cfg, batch_size, device):
    """The same for the pre-training of a policy on batches of so many windows."""
    logits = batch_size * cfg.block_size * cfg.vocab_size
    weights = 4 * 2 * num_weights(cfg)                  # with one moment
    check_fits(weights + 4 * 2 * logits, device, named(cfg, *SHAPE[:4]))


def note_memory(nets, cfg):
    """Says so if the most that the tensors of a run may take is not free."""
    peaks = peak_bytes(nets, cfg)
    phase = max(peaks, key=peaks.get)
    free = free_memory(nets.device)
    if peaks[phase] > free:
        influence = " or tracin_memory" if phase == "update" and cfg.tracin != "off" else ""
        print(f"note: the {phase} needs up to {peaks[phase] / 2 ** 30:,.1f} GB of memory beside "
              f"the weights, and {free / 2 ** 30:,.1f} GB are free on {nets.device}: if the run "
              f"stops out of memory, lower {LOWERED[phase]}{influence}")


def named(cfg, *names):
    return ", ".join(f"{name} = {getattr(cfg, name)}" for name in names)


def check_fits(num_bytes, device, what):
    """BadInput that says what needs so many bytes if they are not free on the device."""
    free = free_memory(device)
    if num_bytes > free:
        raise BadInput(f"{what}: these need at least {num_bytes / 2 ** 30:,.1f} GB of memory, and "
                       f"{free / 2 ** 30:,.1f} GB are free on {device}; lower one of them")


def num_weights(cfg):
    """Of a new policy, without biases and norms."""
    C = cfg.n_embd
    return (cfg.vocab_size + cfg.block_size) * C + 12 * cfg.n_layer * C * C


def weight_bytes(cfg, base, copies):
    """Of `copies` of what is trained, and of the weights below it if they are not there yet."""
    new = 0 if base else num_weights(cfg)
    trained = sum(p.numel() for p in base.parameters()) if base else new
    if cfg.lora_rank:
        trained = 2 * cfg.lora_rank * cfg.n_embd * cfg.n_layer      # of one Linear in each block
    return 4 * (new + copies * trained)


def rollout_bytes(cfg, base, rows, at_once, dtype, truncates):
    """Of so many rows while they are sampled, `at_once` of them (0: all)."""
    T = cfg.max_completion_length
    own = rows // rank_and_size()[1]                # of this process
    fields = (4 * rows + 18 * own) * T              # noise; token, log-prob, entropy and two masks
    allowed = own * T * cfg.vocab_size if truncates else 0
    width = base.h[0].attn.n_kv_head * base.h[0].attn.hs if base else cfg.n_embd
    decoded = min(own, at_once or own)
    cache = 2 * decoded * (1 + T) * cfg.n_layer * width * dtype.itemsize    # keys and values
    return fields + allowed + cache
