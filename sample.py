"""Sampling with a KV cache."""
import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from run.processes import gather, share


@dataclass
class Rollout:
    """N sampled rows: prompt left-padded to width P, then at most T sampled tokens; row i answers prompt i // num_generations."""
    tokens: torch.Tensor          # (N, P + T) ids
    real: torch.Tensor            # (N, P + T) False on the prompt's padding
    mask: torch.Tensor            # (N, T) True on sampled tokens, the end token included; what follows it is False
    logp: torch.Tensor            # (N, T) log-prob of each token under the distribution it was drawn from; 0 where masked
    entropy: torch.Tensor         # (N, T) entropy of that distribution, in nats; 0 where masked
    ended: torch.Tensor           # (N,) True where the end token was drawn
    kept: torch.Tensor = None     # (N, T, V) the tokens that truncated sampling could draw; None when it could draw all

    def __getitem__(self, rows):
        """The same rollout with only these rows (slice or index tensor)."""
        return Rollout(*(None if x is None else x[rows] for x in vars(self).values()))

    def completions(self):
        """Lists of ids, one per row, without the end token."""
        lengths = (self.mask.sum(1) - self.ended.long()).tolist()
        return [ids[:n] for ids, n in zip(self.tokens[:, -self.mask.shape[1]:].tolist(), lengths)]


def pad_left(rows):
    """Lists of ids -> tokens (B, P) and real (B, P), padded on the left to the longest."""
    P = max(map(len, rows))
    return (torch.tensor([[0] * (P - len(r)) + list(r) for r in rows]),
            torch.tensor([[False] * (P - len(r)) + [True] * len(r) for r in rows]))


def truncate(logits, top_k=0, top_p=1.0, min_p=0.0):
    """logits (N, V) -> the same with -inf where top-k, then top-p, then min-p forbid the token. At least one stays."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:], -math.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        drop = probs.cumsum(-1) - probs >= top_p          # the more likely tokens have that much already
        logits = logits.masked_fill(drop.scatter(1, order, drop), -math.inf)
    if min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -math.inf)
    return logits


def draw(probs, u):
    """One token per row by inverting the CDF: probs (N, V), u (N,) uniform in [0, 1) -> (N,). Never one of probability 0."""
    cdf = probs.cumsum(-1)
    token = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).clamp(max=probs.shape[1] - 1)
    possible = probs.gather(1, token) > 0  # rounding in the sum can give a sliver to a token that has none
    if probs.device.type == "cpu" and not torch.compiler.is_compiling() and bool(possible.all()):  # the argmax is slow there
        return token[:, 0]
    return torch.where(possible, token, probs.argmax(-1, keepdim=True))[:, 0]


@torch.no_grad()
def generate(model, prompts, num_generations, max_new_tokens, *, eos, seed, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
             batch_size=0, retire=True, decoder=None):
    """Sample num_generations completions of every prompt (lists of ids, any lengths) -> Rollout.

    A prompt is computed once and its keys and values are copied to its group. The noise is drawn ahead from `seed`, one
    number per row and step, on the CPU, so that it is the same on every device and for every batch_size (rows decoded at
    once; 0: all), which changes memory only. Several processes sample their share of the prompts each and get all rows.
    retire: rows that have ended stop costing. decoder: a Decoder of this model, which changes speed only.
    Raises ValueError for an empty or over-long prompt and for temperature <= 0.
    """
    device, G, limit = model.wte.weight.device, num_generations, model.config.block_size
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: must be above 0, since a group needs samples that differ")
    for i, ids in enumerate(prompts):
        if not 1 <= len(ids) <= limit - max_new_tokens:
            raise ValueError(f"prompt {i + 1} has {len(ids)} tokens: must be 1 to {limit - max_new_tokens} "
                           f"(block_size {limit} less max_completion_length {max_new_tokens})")
    prompt, real = (x.to(device) for x in pad_left(prompts))                                        # (B, P)
    (B, P), N = prompt.shape, len(prompts) * G
    noise = torch.rand(N, max_new_tokens, generator=torch.Generator().manual_seed(seed)).to(device)
    truncated = top_k or top_p < 1 or min_p > 0
    r = Rollout(tokens=torch.cat([prompt.repeat_interleave(G, 0), torch.full((N, max_new_tokens), eos, device=device)], 1),
                real=F.pad(real.repeat_interleave(G, 0), (0, max_new_tokens), value=True),
                mask=torch.zeros(N, max_new_tokens, dtype=torch.bool, device=device),
                logp=torch.zeros(N, max_new_tokens, device=device), entropy=torch.zeros(N, max_new_tokens, device=device),
                ended=torch.zeros(N, dtype=torch.bool, device=device),
                kept=None if not truncated else torch.ones(N, max_new_tokens, model.config.vocab_size, dtype=torch.bool,
                                                           device=device))
    step = max(1, batch_size // G) if batch_size else B
    mine = share(B)
    if decoder:
        decoder.refresh()
    for b in range(mine.start, mine.stop, step):
        end = min(b + step, mine.stop)
        rows = slice(b * G, end * G)
        decode(model, prompt[b:end], real[b:end], r[rows], noise[rows], eos, temperature, (top_k, top_p, min_p), retire, decoder)
    r = Rollout(*(None if x is None else gather(x[share(N, G)]) for x in vars(r).values()))
    T = int(r.mask.any(0).sum())
    return Rollout(r.tokens[:, :P + T], r.real[:, :P + T], r.mask[:, :T], r.logp[:, :T], r.entropy[:, :T], r.ended,
                   r.kept[:, :T] if truncated else None)


LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens: asking which rows have ended waits for the device


def decode(model, prompt, real, r, noise, eos, temperature, limits, retire=True, decoder=None):
    """Fill the rows r (views of a Rollout) with completions of prompt (B, P), left-padded where real (B, P) is False.

    A row that has ended gives its place in the cache to a later one that still runs, so that a step costs what runs.
    """
    (B, P), (N, T) = prompt.shape, r.mask.shape
    padded = not bool(real.all())
    model = decoder.model if decoder else model
    prefix = model.new_cache(B, P)
    h = model(prompt, real if padded else None, prefix)[:, -1].repeat_interleave(N // B, 0)         # (N, C)
    rows = torch.arange(N, device=h.device)  # of r, in the order of the cache; n of them are left
    sample(model.lm_head, h, r, rows, 0, P, noise, eos, temperature, limits)
    if decoder:
        return decoder(r, prefix.repeat_interleave(N // B, 2), noise, eos, temperature, limits, retire)
    cache = model.new_cache(N, P + T)
    cache[:, :, :, :, :P] = prefix.repeat_interleave(N // B, 2)
    for t in range(1, T):
        if retire and t % LOOK_EVERY.get(h.device.type, 16) == 0:
            runs = ~r.ended[rows]
            n = int(runs.sum())
            if n == 0:
                break
            free, late = (~runs[:n]).nonzero()[:, 0], n + runs[n:].nonzero()[:, 0]
            for i, j in zip(free.tolist(), late.tolist()):
                cache[:, :, i] = cache[:, :, j]
            rows[free] = rows[late]
            rows, cache = rows[:n], cache[:, :, :n]
        at = P + t
        h = model(r.tokens[rows, at - 1:at], r.real[rows, :at] if padded else None, cache, at - 1)[:, 0]
        sample(model.lm_head, h, r, rows, t, at, noise, eos, temperature, limits)


def sample(lm_head, h, r, rows, t, at, noise, eos, temperature, limits):
    """From hidden states h (n, C) draw token t of these rows (n,) of r, column `at` of its tokens. t, at: numbers or (1,)."""
    logits = lm_head(h).float() / temperature                                                       # (n, V)
    if r.kept is not None:
        logits = truncate(logits, *limits)
        r.kept[rows, t] = logits > -math.inf
    logits = logits - logits.amax(-1, keepdim=True)
    weights = logits.exp()                                   # the distribution times `total`: one pass over V less
    total = weights.sum(-1)                                                                         # (n,)
    token = draw(weights, noise[rows, t])                                                           # (n,)
    over = r.ended[rows]
    r.mask[rows, t] = ~over
    r.logp[rows, t] = (logits.gather(1, token[:, None])[:, 0] - total.log()).masked_fill(over, 0)
    r.entropy[rows, t] = (total.log() - (weights * logits).nansum(-1) / total).masked_fill(over, 0)  # 0 * -inf counts 0
    r.tokens[rows, at] = token.masked_fill(over, eos)
    r.ended[rows] = over | (token == eos)
