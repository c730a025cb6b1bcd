"""What a run says about itself."""
import math
import time

import torch

from run.device import memory


def std(x):
    """Standard deviation (n - 1) of the values that are not NaN; exactly 0.0 when they are all the same number."""
    x = x[~x.isnan()]
    return float(x.std()) if len(x) > 1 and x.min() < x.max() else 0.0


def zero_spread(groups):
    """groups (B, G) of rewards -> (B,) True where all rewards that are not NaN are the same number."""
    return groups.nan_to_num(math.inf).amin(1) >= groups.nan_to_num(-math.inf).amax(1)


def numbers(dicts):
    """Dicts of scalar tensors, with the same keys -> of Python numbers, waiting for the device once."""
    values = torch.stack([torch.stack(list(d.values())) for d in dicts]).tolist() if dicts else []
    return [dict(zip(dicts[0], row)) for row in values]


def describe_batch(b, s):
    """Metrics of a Batch, named as TRL names them."""
    groups, known = b.rewards.view(-1, s.num_generations), b.rewards[~b.rewards.isnan()]
    known = known if len(known) else torch.full((1,), math.nan)
    lengths, ended = b.rollout.mask.sum(1).float(), b.rollout.ended
    done = lengths[ended] if ended.any() else torch.zeros(1)
    identical = [len(set(b.completions[i:i + s.num_generations])) == 1 for i in range(0, len(lengths), s.num_generations)]
    m = {"reward": float(known.mean()), "reward_std": std(known), "reward_min": float(known.min()),
         "reward_max": float(known.max()), "advantage_max": float(b.advantages.abs().max()),
         "frac_reward_zero_std": float(zero_spread(groups).float().mean()),
         "frac_identical_groups": sum(identical) / len(identical),
         "entropy": float(b.rollout.entropy[b.rollout.mask].mean()), "num_completion_tokens": int(b.mask.sum()),
         "logp_min": float(b.rollout.logp.min()), "completions/clipped_ratio": float((~ended).float().mean())}
    for name, x in zip(s.reward_funcs, b.scores.T):
        m |= {f"rewards/{name}/mean": float(x.nanmean()), f"rewards/{name}/std": std(x)}
    for kind, x in (("", lengths), ("terminated_", done)):
        m |= {f"completions/mean_{kind}length": float(x.mean()), f"completions/min_{kind}length": float(x.min()),
              f"completions/max_{kind}length": float(x.max())}
    return m


def diagnose(m, s):
    """{kind of trouble: one line that says what it is and what to do} for the metrics m of an iteration."""
    out, kl, gap, n = {}, m.get("kl", 0.0), m["sampling/sampling_logp_difference/mean"], m["num_completion_tokens"]
    if math.isnan(m["reward"]):
        out["reward"] = "no reward function scored any completion: all returned None"
    elif m["reward_min"] == m["reward_max"]:
        out["reward"] = (f"all rewards of the batch are {m['reward_min']:.4g}: nothing to learn from; read samples.jsonl, check "
                         "the judge or the reward function")
    elif m["advantage_max"] == 0:
        out["advantage"] = (f"all advantages are zero (rewards {m['reward_min']:.4g} to {m['reward_max']:.4g}, equal within each "
                            "group): raise temperature or num_generations")
    for name in s.reward_funcs:
        if m[f"rewards/{name}/std"] == 0 and len(s.reward_funcs) > 1:
            out[name] = f"reward {name!r} gave every completion the same score: it teaches nothing; check it"
    if n == 0:
        out["tokens"] = ("no completion tokens carry loss, so there was no step: raise max_completion_length or unset "
                         "mask_truncated_completions")
    if m["logp_min"] == 0:
        out["logp"] = ("all log-probs are zero, the policy is certain of every token: raise temperature or beta, or go back to "
                       "an earlier checkpoint")
    if gap > 0.05:  # the mean of the ratio stays near 1 whatever is wrong; its spread does not
        out["ratio"] = (f"ratio off on the first pass: sampler and trainer disagree by {gap:.3f} nats a token; try "
                        "dtype = 'float32'")
    if kl < -1e-3 and n >= 4096:
        out["negative"] = f"KL {kl:.4f} is negative over {n} tokens: the log-probs are not those of the sampling distribution"
    if kl > 5:
        out["kl"] = f"KL {kl:.1f} nats per token is exploding: lower learning_rate or raise beta"
    if m["frac_identical_groups"] > 0:
        out["identical"] = (f"{100 * m['frac_identical_groups']:.0f} % of the groups hold {s.num_generations} identical "
                            "completions: exploration collapsed; raise temperature or beta")
    if m["completions/clipped_ratio"] == 1:
        out["length"] = (f"every completion was cut at {s.max_completion_length} tokens, so length is not learned: raise "
                         "max_completion_length")
    if m["grad_norm"] == 0:
        out["gradient"] = "grad_norm is 0: no gradient in this step; see rewards and advantages above"
    return out


def report(m, s, batch, left, warned):
    """The line of an iteration and the troubles in it, each kind at most every ten iterations: `warned` remembers when."""
    it, seconds = m["iteration"], m["step_time"]
    print(f"iter {it}: loss {m['loss']:.4f} (main {m['policy_loss']:.4f}, kl {m['loss'] - m['policy_loss']:.4f}), "
          f"reward {m['reward']:.4f}, kl {m.get('kl', 0):.4f}, grad_norm {m['grad_norm']:.3f}, "
          f"{batch.rollout.mask.sum() / seconds:.0f} tok/s, time {1000 * seconds:.2f}ms, "
          f"eta {int(left) // 60}m{int(left) % 60:02d}s", flush=True)
    if abs(m["loss"]) < 5e-5 and m["grad_norm"] > 0 and "zero" not in warned:
        warned["zero"] = it
        print("note: a loss of 0.0000 with a gradient that is not 0 is right: the ratio is 1 and the advantages of a group sum "
              "to 0. Watch reward and grad_norm.")
    for kind, text in (diagnose(m, s) | (diagnose_influence(m, s) if "tracin/selected_ratio" in m else {})).items():
        if it - warned.get(kind, -10) >= 10:
            warned[kind] = it
            print(f"WARNING: {text}")


class Lines:
    """The numbered lines inside an iteration: memory now, time since the line before. Waits for the device only to print."""

    def __init__(self, device, on):
        self.device, self.on = device, on
        self.start = self.last = time.time()

    def __call__(self, micro, text, **values):
        if self.on:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.time()
            begin, spent = f"[Micro {micro}] ", f"time={now - self.last:.3f}s"
            if micro is None:  # the last line: the optimiser's own time and the sum of all
                begin, spent = "", f"step={now - self.last:.3f}s, time={now - self.start:.3f}s total"
            print(f"{begin}{text}: mem={memory(self.device) / 2 ** 20:.0f} MB, {spent}"
                  + "".join(f", {k}={v if isinstance(v, str) else f'{v:.6f}'}" for k, v in values.items()))
            self.last = now


def describe_cost(s, num_weights, fewest=24):
    """One line: what the settings ask of an iteration beside plain GRPO, with so many weights scored in rollouts."""
    rows = s.mini_batch_size or s.num_prompts * s.num_generations
    size = rows * num_weights * 4 / 2 ** 30
    memory = f"; rollouts' gradients are {rows} x {num_weights / 1e6:.1f} M weights = {size:.2f} GB, of which tracin_memory lets "
    memory += "all" if size <= s.tracin_memory else f"{s.tracin_memory:g} GB"
    memory += " be kept" if size <= s.tracin_memory else " be kept, the rest is contracted with the target's"
    memory += f" (layers with fewer than {fewest} tokens a row are contracted all the same)"
    target = f"influence on {s.tracin}, {s.tracin_select} kept: "
    if s.mini_batch_size:
        target = target[:-2] + f", in each of the {s.num_prompts * s.num_generations // rows} steps of the first pass: "
    if s.tracin_val_prompts:
        n = s.tracin_val_prompts * s.num_generations
        target += (f"{n} held-out rollouts are sampled and scored, {min(s.tracin_val_size or n, n)} of them go forward and "
                   "backward for the target; 1 forward and 1 backward of the batch for scores and step")
    elif s.tracin == "self" or not (s.beta and s.kl_in == "loss" or s.top_entropy_quantile < 1 or s.mini_batch_size):
        target += "1 forward and 1 backward serve target, scores and step"
    else:
        target += ("2 forwards and 2 backwards, since the loss of a row is not a multiple of its log-prob; kl_in = 'reward' "
                   "with kl_estimator = 'k1', or beta = 0, and mini_batch_size = 0 need 1")
    return target + memory


def diagnose_influence(m, s):
    """{kind of trouble: one line} for the tracin/ metrics of an iteration."""
    out = {}
    if m["tracin/empty_steps"] > 0:
        out["empty"] = ("influence kept no rollout, so the step was skipped: use tracin_select = 'positive' or a larger "
                        "tracin_fraction")
    if m["tracin/fallback"] > 0:
        out["fallback"] = (f"only {100 * m['tracin/positive_ratio']:.0f} % of the rollouts have positive influence: kept the "
                           "better half instead; is the target too small or of another kind?")
    if m["tracin/target_contrast"] < 0.3:
        out["contrast"] = (f"the target's rewards spread {m['tracin/target_contrast']:.2f} times as wide as those it was chosen "
                           "from (0: all alike): without good and bad it says 'write this', not 'improve'; use "
                           "tracin_val_select = 'random' or 'balanced'")
    if m["tracin/target_cosine"] < 0.1:
        out["noise"] = (f"the target's {m['tracin/target_rows']:.0f} rollouts are too few: the gradients of its two halves have "
                        f"cosine {m['tracin/target_cosine']:.2f}; raise num_prompts, or tracin_val_prompts and tracin_val_size")
    if m["tracin/self_share"] > 0.5 and not s.tracin_leave_one_out:
        out["self"] = (f"{100 * m['tracin/self_share']:.0f} % of the influence is each rollout's own share in the target: set "
                       "tracin_leave_one_out = True")
    if not m["tracin/invariant_error"] <= (1e-3 if s.dtype != "bfloat16" else 5e-2):
        out["invariant"] = (f"influences do not add up to <G_train, G_target> (relative error {m['tracin/invariant_error']:.1e}): "
                            "the scores are wrong, do not trust this run")
    return out
