"""
Rollouts: sampling completions with a KV cache, and the log-probs of what was sampled. The model is
a model.GPT, and nothing of the project is imported.

Shapes: B prompts of width P (left-padded), N = B * num_generations rows, T tokens of a completion,
V = vocab_size, C channels, n rows that still run, M sampled tokens of all rows.
"""
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# ------------------------------------------------------------------------------------------------
# what comes out


@dataclass
class Rollout:
    """N rows, each a left-padded prompt and at most T tokens of its completion. Row i answers
    prompt i // num_generations."""
    tokens: torch.Tensor           # (N, P + T) ids
    attention_mask: torch.Tensor   # (N, P + T) False on the prompt's padding
    completion_mask: torch.Tensor  # (N, T) True on the completion's tokens, the end token included
    sampled_mask: torch.Tensor     # (N, T) True on those that the policy drew: not on forced ones
    logp: torch.Tensor             # (N, T) log-prob of each token as it was drawn; 0 if not sampled
    entropy: torch.Tensor          # (N, T) of the distribution drawn from, in nats; 0 likewise
    ended: torch.Tensor            # (N,) True where an end token or an environment ended the row
    allowed: torch.Tensor = None   # (N, T, V) tokens that truncated sampling could draw; None: all
    values: torch.Tensor = None    # (N, T) expected before each token, with a critic; 0 likewise

    def __getitem__(self, rows):
        """The same rollout with only these rows (a slice gives views)."""
        return self.map(lambda x: x[rows])

    def map(self, function):
        """The rollout with function applied to each of its tensors."""
        columns = {name: function(x) for name, x in vars(self).items() if x is not None}
        return Rollout(**columns)

    def completions(self, eos):
        """Lists of ids, one per row, without the end tokens (eos: one or several) that the policy
        drew. An environment's answer may follow an end token."""
        T = self.completion_mask.shape[1]
        tokens = self.tokens[:, -T:].masked_fill(~self.completion_mask, -1)
        for end in Sampling(eos).ends:
            tokens = tokens.masked_fill((tokens == end) & self.sampled_mask, -1)
        return [[i for i in ids if i >= 0] for ids in tokens.tolist()]


def empty_rollout(prompt, attention_mask, num_generations, T, eos):
    """Rows to fill for prompts (B, P)."""
    N = len(prompt) * num_generations
    device = prompt.device
    prompt = prompt.repeat_interleave(num_generations, 0)                           # (N, P)
    attention_mask = attention_mask.repeat_interleave(num_generations, 0)           # (N, P)
    return Rollout(
        tokens=F.pad(prompt, (0, T), value=eos),
        attention_mask=F.pad(attention_mask, (0, T), value=True),
        completion_mask=torch.zeros(N, T, dtype=torch.bool, device=device),
        sampled_mask=torch.ones(N, T, dtype=torch.bool, device=device),
        logp=torch.zeros(N, T, device=device),
        entropy=torch.zeros(N, T, device=device),
        ended=torch.zeros(N, dtype=torch.bool, device=device))


def concatenate(rollouts, eos):
    """Rollouts of parts of the same prompts -> one rollout of all their rows."""
    T = max(r.logp.shape[1] for r in rollouts)
    fill = {"tokens": eos, "attention_mask": True, "allowed": True}     # others: 0 or False

    def widen(name, x, more):
        if x.dim() == 1:
            return x
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, more), value=fill.get(name, 0))

    columns = {}
    for name, x in vars(rollouts[0]).items():
        if x is not None:
            parts = [widen(name, getattr(r, name), T - r.logp.shape[1]) for r in rollouts]
            columns[name] = torch.cat(parts)
    return Rollout(**columns)


# ------------------------------------------------------------------------------------------------
# from logits to a token


class Sampling(NamedTuple):
    """How tokens are drawn. Truncation goes top-k, top-p, min-p; the defaults keep all tokens."""
    eos: int | tuple        # what ends a completion; the first of several fills what follows it
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def ends(self):
        return self.eos if isinstance(self.eos, tuple) else (self.eos,)


def truncate(logits, top_k=0, top_p=1.0, min_p=0.0):
    """logits (N, V) -> the same with -inf where a token is forbidden. At least one token stays."""
    if top_k:
        weakest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -math.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        drop = probs.cumsum(-1) - probs >= top_p    # the more likely tokens have that much already
        logits = logits.masked_fill(drop.scatter(1, order, drop), -math.inf)
    if min_p > 0:
        likeliest = logits.amax(-1, keepdim=True)
        logits = logits.masked_fill(logits < likeliest + math.log(min_p), -math.inf)
    return logits


def draw(probs, u):
    """One token per row by inverting the CDF: probs (N, V), which need not sum to 1, u (N,) uniform
    in [0, 1) -> ids (N,). A token of probability 0 is never drawn."""
    cdf = probs.cumsum(-1)
    where = u * cdf[:, -1]
    token = torch.searchsorted(cdf, where[:, None], right=True)
    token = token.clamp(max=probs.shape[1] - 1)                                     # (N, 1)
    possible = probs.gather(1, token) > 0      # rounding in the sum can give a sliver to a zero
    on_cpu = probs.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and possible.all():
        return token[:, 0]                     # the argmax below is slow on a CPU and rarely needed
    return torch.where(possible, token, probs.argmax(-1, keepdim=True))[:, 0]


def sample_token(model, h, r, rows, t, column, noise, sampling):
    """Draw token t of some rows (n,) of a rollout r from their hidden states h (n, C), in place.
    Where r.sampled_mask is False, the token that stands in r.tokens is kept. column: where token t
    stands there. t and column may be tensors (1,). noise (N, T)."""
    logits = model.lm_head(h).float() / sampling.temperature                        # (n, V)
    if r.allowed is not None:
        logits = truncate(logits, sampling.top_k, sampling.top_p, sampling.min_p)
        r.allowed[rows, t] = logits > -math.inf
    logits -= logits.amax(-1, keepdim=True)
    weights = logits.exp()          # the probabilities times `total`: one pass over V less
    total = weights.sum(-1)                                                         # (n,)
    token = draw(weights, noise[rows, t])                                           # (n,)
    log_total = total.log()
    logp = logits.gather(1, token[:, None])[:, 0] - log_total
    entropy = log_total - logits.mul_(weights).nansum(-1) / total       # 0 * -inf counts as 0
    forced = ~r.sampled_mask[rows, t]
    token = torch.where(forced, r.tokens[rows, column], token)
    over = r.ended[rows]
    unsampled = over | forced
    r.completion_mask[rows, t] = ~over
    r.logp[rows, t] = logp.masked_fill(unsampled, 0)
    r.entropy[rows, t] = entropy.masked_fill(unsampled, 0)
    if r.values is not None:
        r.values[rows, t] = model.value_head(h).masked_fill(unsampled, 0)
    r.tokens[rows, column] = token.masked_fill(over, sampling.ends[0])
    for end in sampling.ends:
        over = over | (token == end) & ~forced
    r.ended[rows] = over


# ------------------------------------------------------------------------------------------------
# decoding

CHECK_EVERY = {"cpu": 1, "cuda": 16}  # steps between looks at which rows ended: a GPU is waited for


def prefill(model, prompt, attention_mask, r, noise, sampling, respond=None):
    """Compute prompts (B, P) once and draw the first token of each row -> keys and values of the
    prompts (n_layer, 2, B, nkv, P, hs)."""
    B, P = prompt.shape
    N = len(r.completion_mask)
    cache = model.new_cache(B, P)
    h = model(prompt, attention_mask, cache)[:, -1]                                 # (B, C)
    h = h.repeat_interleave(N // B, 0)                                              # (N, C)
    rows = torch.arange(N, device=h.device)
    sample_token(model, h, r, rows, 0, P, noise, sampling)
    if respond:
        respond(r, rows, 0, P)
    return cache


def decode(model, prompt, attention_mask, r, noise, sampling, respond=None):
    """Fill the rows r, views of a rollout, with completions of prompts (B, P). Rows that have ended
    leave the batch, so that a step costs only what still runs.

    attention_mask (B, P): False on the prompts' padding, or None where no prompt is padded.
    respond(r, rows, t, column) is called when token t of rows (n,) is drawn: an environment may
    write forced tokens behind it and say which rows have ended.
    """
    B, P = prompt.shape
    N, T = r.completion_mask.shape
    prefix = prefill(model, prompt, attention_mask, r, noise, sampling, respond)
    cache = model.new_cache(N, P + T)
    cache[:, :, :, :, :P] = prefix.repeat_interleave(N // B, 2)
    rows = torch.arange(N, device=prompt.device)    # of r, in the order of the cache
    for t in range(1, T):
        if t % CHECK_EVERY.get(prompt.device.type, 16) == 0:
            rows, cache = drop_finished(rows, cache, r.ended)
            if len(rows) == 0:
                break
        end = P + t
        mask = None if attention_mask is None else r.attention_mask[rows, :end]
        h = model(r.tokens[rows, end - 1:end], mask, cache, end - 1)[:, 0]          # (n, C)
        sample_token(model, h, r, rows, t, end, noise, sampling)
        if respond:
            respond(r, rows, t, end)


def drop_finished(rows, cache, ended):
    """rows (n,) and their cache without those that ended. A row that ended gives its place to a
    later one that still runs."""
    running = ~ended[rows]
    n = int(running.sum())
    if n in (0, len(rows)):
        return rows[:n], cache[:, :, :n]
    free = (~running[:n]).nonzero()[:, 0]
    movers = n + running[n:].nonzero()[:, 0]
    for i, j in zip(free.tolist(), movers.tolist()):
        cache[:, :, i] = cache[:, :, j]
    rows[free] = rows[movers]
    return rows[:n], cache[:, :, :n]


# ------------------------------------------------------------------------------------------------
# generate


@torch.no_grad()
def generate(model, prompts, num_generations, max_new_tokens, *, seed, batch_size=0,
             part=slice(None), respond=None, decode=decode, **sampling):
    """Sample num_generations completions of every prompt (lists of ids of any lengths) -> Rollout.

    A prompt is computed once, and its keys and values are copied to its group. The noise is drawn
    ahead from `seed`, a number per row and step, on the CPU. It is the same on every device and for
    every batch_size (rows decoded at once; 0: all), which changes memory only.
    part: complete only these of the prompts. The parts together are what one call for all gives.
    respond(first, r, rows, t, column): as for decode, where row 0 of r is row `first` of all. What
    it writes is read like any other token, carries no log-prob and ends no completion.
    decode: another function with its result. sampling: eos and the other fields of Sampling.
    """
    sampling = Sampling(**sampling)
    check_prompts(prompts, model.config.block_size - max_new_tokens)
    G = num_generations
    device = model.wte.weight.device
    first, end, _ = part.indices(len(prompts))
    rows = slice(first * G, end * G)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(len(prompts) * G, max_new_tokens, generator=generator)
    noise = noise[rows].to(device)                                                  # (N, T)
    prompt, attention_mask = pad_left(prompts, device)
    prompt = prompt[first:end]                                                      # (B, P)
    attention_mask = attention_mask[first:end]

    r = empty_rollout(prompt, attention_mask, G, max_new_tokens, sampling.ends[0])
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        r.allowed = torch.ones(*r.logp.shape, model.config.vocab_size, dtype=bool, device=device)
    if model.value_head is not None:
        r.values = torch.zeros_like(r.logp)

    at_once = max(1, batch_size // G) if batch_size else len(prompts)
    for b in range(0, len(prompt), at_once):
        some = slice(b, b + at_once)
        rows = slice(b * G, (b + at_once) * G)      # views of r, filled in place
        shortest = min(map(len, prompts[first:end][some]))
        mask = attention_mask[some] if shortest < prompt.shape[1] else None
        answer = functools.partial(respond, (first + b) * G) if respond else None
        decode(model, prompt[some], mask, r[rows], noise[rows], sampling, answer)
    r.sampled_mask &= r.completion_mask             # nothing is sampled after the end
    r.tokens[:, prompt.shape[1]:].masked_fill_(~r.completion_mask, sampling.ends[0])
    unused = int((~r.completion_mask.any(0)).sum())     # columns at the end
    return r.map(lambda x: x if x.dim() == 1 else x[:, :x.shape[1] - unused])


def pad_left(rows, device="cpu"):
    """Lists of ids -> tokens (B, P) and attention_mask (B, P), padded on the left."""
    P = max(map(len, rows))
    padded = [[-1] * (P - len(ids)) + list(ids) for ids in rows]
    padded = torch.tensor(padded).to(device)
    return padded.clamp(min=0), padded >= 0


def check_prompts(prompts, most):
    """ValueError for a prompt that is empty or leaves no room for its completion."""
    for number, ids in enumerate(prompts, 1):
        if not 1 <= len(ids) <= most:
            raise ValueError(f"prompt {number} has {len(ids)} tokens: must be 1 to {most} "
                             "(block_size less max_completion_length)")


# ------------------------------------------------------------------------------------------------
# log-probs of a rollout

LOGITS_KEPT = 2 ** 27       # for the backward at most: 0.5 GB, for entropies three times that
LOGITS_AT_ONCE = 2 ** 23    # formed at a time on a CPU, where new memory is slow


def completion_logprobs(model, rollout, temperature=1.0, states=None):
    """Log-probs (N, T), in float32, of a rollout's sampled tokens under `model`; elsewhere 0.
    states: of completion_states, if something else is made of them too."""
    h, targets, allowed, where = states or completion_states(model, rollout)
    logp = of_logits(LogProb.apply, model.lm_head, h, targets, temperature, allowed)    # (M,)
    return torch.zeros(rollout.completion_mask.shape, device=h.device).index_put(where, logp)


def completion_states(model, rollout):
    """What predicts the sampled tokens of a rollout.

    Returns hidden states (M, C), the token ids (M,), the tokens that sampling allowed (M, V) or
    None, and where they belong in (N, T): a pair of index tensors (M,). Position t predicts token
    t + 1: the prompt's last position scores the first sampled token.
    """
    attention_mask = rollout.attention_mask
    sampled = rollout.sampled_mask
    P = attention_mask.shape[1] - sampled.shape[1]
    # columns that are padding in all of these rows are left out. Three numbers are fetched at once,
    # since a GPU is waited for
    first = attention_mask.any(0).long().argmax()
    T = sampled.any(0).cumsum(0).argmax() + 1
    shortest = attention_mask.sum(1).min()
    first, T, shortest = torch.stack([first, T, shortest]).tolist()
    tokens = rollout.tokens[:, first:P + T]
    padded = shortest < attention_mask.shape[1] - first
    input_mask = attention_mask[:, first:P + T - 1] if padded else None
    h = model(tokens[:, :-1].contiguous(), input_mask)[:, -T:]                      # (N, T, C)
    where = sampled.nonzero(as_tuple=True)
    allowed = None if rollout.allowed is None else rollout.allowed[where]
    return h[where], tokens[:, -T:][where], allowed, where


class LogProb(torch.autograd.Function):
    """Log-probs (m, 1) of ids targets (m, 1) from logits (m, V). The logits' gradient is formed in
    one tensor: torch would make five, and new memory is slow."""

    @staticmethod
    def forward(ctx, logits, targets):
        total = logits.logsumexp(-1, keepdim=True)                                  # (m, 1)
        ctx.save_for_backward(logits, targets, total)
        return logits.gather(1, targets) - total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        logits, targets, total = ctx.saved_tensors
        found = (logits - total).exp_().mul_(-grad)                                 # (m, V)
        return found.scatter_add_(1, targets, grad), None   # grad * (one-hot - probability)


def completion_entropies(model, rollout, temperature=1.0, states=None):
    """Entropies (N, T), in nats, of the distributions that a rollout's sampled tokens are drawn
    from, with gradient; elsewhere 0. states: as in completion_logprobs."""
    def entropies(logits, targets):
        logp = logits.log_softmax(-1)
        finite = logp.masked_fill(logp == -math.inf, 0)
        return -(logp.exp() * finite).sum(-1, keepdim=True)     # the sum takes 0 * -inf for 0

    h, targets, allowed, where = states or completion_states(model, rollout)
    x = of_logits(entropies, model.lm_head, h, targets, temperature, allowed)       # (M,)
    return torch.zeros(rollout.completion_mask.shape, device=h.device).index_put(where, x)


def of_logits(function, lm_head, h, targets, temperature, allowed):
    """Applies function(logits (m, V), targets (m, 1)) -> (m, 1) to all M rows of h (M, C) and
    targets (M,) -> (M,).

    The logits are of the distribution that the tokens were drawn from: at the sampling temperature,
    and after truncated sampling over the tokens that were allowed (M, V). They are formed in parts.
    Where all together are more than LOGITS_KEPT, the backward forms each part again.
    """
    def piece(h, targets, allowed):
        logits = lm_head(h).float()                                                 # (m, V)
        if temperature != 1:
            logits = logits / temperature
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -math.inf)
        return function(logits, targets[:, None])

    V = len(lm_head.weight)
    formed = piece
    if len(h) * V > LOGITS_KEPT:
        formed = functools.partial(checkpoint, piece, use_reentrant=False)
    m = max(1, (LOGITS_KEPT if h.is_cuda else LOGITS_AT_ONCE) // V)
    parts = []
    for i in range(0, max(1, len(h)), m):
        some = [None if x is None else x[i:i + m] for x in (h, targets, allowed)]
        parts.append(formed(*some))
    return torch.cat(parts)[:, 0]
