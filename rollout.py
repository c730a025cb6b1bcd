"""
Rollouts: sampling completions, and the log-probs of what was sampled.

A policy, a torch.nn.Module, must provide:

    policy(ids, attention_mask)   ids (B, T) -> hidden states (B, T, C); each may depend on its own
                                  token and earlier ones. attention_mask (B, T) is False on padding,
                                  which is on the left and must change nothing; None: not padded
    policy.lm_head(h)             hidden states (..., C) -> logits (..., V); an nn.Linear
    policy.block_size             the most tokens of a prompt with its completion

Optional:

    policy.new_cache(S)           an empty cache with room for S tokens of each sequence. Without
                                  it, every new token re-reads the whole prefix
    policy(ids, mask, cache)      reads ids after the tokens in the cache, then adds them to it;
                                  the mask covers both
    cache.repeat(n, S)            a cache with n copies of each sequence side by side
    cache.keep(rows)              keeps only these sequences (n,), in this order
    policy.value_head(h)          a critic's values (...) of hidden states (..., C)

It stays in eval mode, even in training: a Dropout in it does nothing, since trainer and sampler
must agree about every token.

A run makes its policies by the class that model.Policy names: Policy(config), of a model.GPTConfig,
which policy.config returns. Influence needs the large trained matrices in layers that tape.py
knows. Only a model.GPT can be sampled compiled (extras/compiled) or exported (extras/hub).

Shapes: B prompts of width P (left-padded), N = B * num_generations completions of at most T tokens,
V = vocab_size, C channels, n completions that still run, M sampled tokens in all completions. The
policy samples a completion's tokens; an environment may write some of them.
"""
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast import BufferedLogProb, can_buffer, casts_kept, in_pieces, log_prob

# ------------------------------------------------------------------------------------------------
# what comes out


@dataclass
class Rollout:
    """N rows, each a left-padded prompt and at most T tokens of its completion. Row i completes
    prompt i // num_generations."""
    tokens: Tensor              # (N, P + T) ids
    attention_mask: Tensor      # (N, P + T) False on the prompt's padding
    completion_mask: Tensor     # (N, T) True on the completion's tokens, the end token included
    sampled_mask: Tensor        # (N, T) True on tokens that the policy sampled
    logp: Tensor                # (N, T) log-prob of each sampled token; 0 elsewhere
    entropy: Tensor             # (N, T) of the distribution sampled from, in nats; 0 elsewhere
    ended: Tensor               # (N,) False where the completion is truncated at T tokens
    allowed: Tensor = None      # (N, T, V) tokens that truncated sampling could draw; None: all
    values: Tensor = None       # (N, T) a critic's values before each sampled token; 0 elsewhere

    def __getitem__(self, rows):
        """The Rollout of these rows (a slice gives views)."""
        return self.map(lambda x: x[rows])

    def map(self, function):
        """The Rollout of what function makes of each tensor."""
        columns = {name: function(x) for name, x in vars(self).items() if x is not None}
        return Rollout(**columns)

    def resized(self, P, T):
        """The Rollout with P columns for prompts, at least as many as now, and T for completions,
        which are cut or padded on the right."""
        old_T = self.logp.shape[1]
        old_P = self.tokens.shape[1] - old_T

        def resize(x):
            if x.dim() == 1:
                return x
            left = P - old_P if x.shape[1] > old_T else 0
            channels = [0, 0] * (x.dim() - 2)
            return F.pad(x, (*channels, left, T - old_T))

        rollout = self.map(resize)
        rollout.attention_mask[:, P:] = True    # only the prompt's padding is False
        return rollout

    def completions(self, eos):
        """The ids of each completion, without the end tokens (eos: a tuple) that the policy has
        sampled. An environment may have written on after one."""
        T = self.completion_mask.shape[1]
        tokens = self.tokens[:, -T:].masked_fill(~self.completion_mask, -1)
        for end in eos:
            tokens = tokens.masked_fill((tokens == end) & self.sampled_mask, -1)
        return [[i for i in ids if i >= 0] for ids in tokens.tolist()]

    def record(self, rows, t, token, logp, entropy, values, ends):
        """Write token t of these rows with its numbers, (n,) each. Rows that have ended, and tokens
        of an environment, stay as they are."""
        # the policy's token, unless the row has ended or an environment has written one
        column = self.tokens.shape[1] - self.logp.shape[1] + t
        running = ~self.ended[rows]
        sampled = running & self.sampled_mask[rows, t]
        self.tokens[rows, column] = torch.where(sampled, token, self.tokens[rows, column])
        self.completion_mask[rows, t] = running

        # what the trainer will need; 0 where nothing was drawn
        self.logp[rows, t] = logp.masked_fill(~sampled, 0)
        self.entropy[rows, t] = entropy.masked_fill(~sampled, 0)
        if values is not None:
            self.values[rows, t] = values.masked_fill(~sampled, 0)
        for end in ends:
            self.ended[rows] |= sampled & (token == end)


def empty_rollout(prompt, attention_mask, num_generations, T, eos):
    """A Rollout of prompts (B, P) that decode fills in, padded with eos."""
    prompt = prompt.repeat_interleave(num_generations, 0)                           # (N, P)
    attention_mask = attention_mask.repeat_interleave(num_generations, 0)           # (N, P)
    logp = torch.zeros(len(prompt), T, device=prompt.device)                        # (N, T)
    return Rollout(
        tokens=F.pad(prompt, (0, T), value=eos),
        attention_mask=F.pad(attention_mask, (0, T), value=True),
        completion_mask=torch.zeros_like(logp, dtype=torch.bool),
        sampled_mask=torch.ones_like(logp, dtype=torch.bool),   # False: reserved by an environment
        logp=logp,
        entropy=torch.zeros_like(logp),
        ended=torch.zeros_like(logp[:, 0], dtype=torch.bool))


def concatenate(rollouts):
    """The Rollout of all rows of some rollouts, as wide as the longest prompt and completion."""
    # all equally wide, then one under the other
    P = max(r.tokens.shape[1] - r.logp.shape[1] for r in rollouts)
    T = max(int(r.completion_mask.any(0).sum()) for r in rollouts)
    rollouts = [r.resized(P, T) for r in rollouts]
    columns = {}
    for name, x in vars(rollouts[0]).items():
        if x is not None:
            columns[name] = torch.cat([getattr(r, name) for r in rollouts])
    return Rollout(**columns)


# ------------------------------------------------------------------------------------------------
# from logits to a token


class Sampling(NamedTuple):
    """How tokens are sampled. Each field but eos is a setting of the same name. Those below
    temperature are rules of truncate; by default they keep all tokens."""
    eos: tuple              # tokens that end a completion; the first one pads what follows it
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self):
        """Whether a rule of truncate is on. The trainer then needs the mask of allowed tokens."""
        return self != Sampling(self.eos, self.temperature)


def truncate(logits, sampling):
    """Set logits (N, V) to -inf where a rule of Sampling forbids the token: top-k, then top-p, then
    min-p. At least one token stays allowed."""
    # at least as likely as the k-th
    if sampling.top_k:
        weakest = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -math.inf)

    # the fewest that add up to top_p: a token stays if the ones before it add up to less
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        drop = probs.cumsum(-1) - probs >= sampling.top_p
        logits = logits.masked_fill(drop.scatter(1, order, drop), -math.inf)

    # at least min_p times as likely as the likeliest
    if sampling.min_p > 0:
        likeliest = logits.amax(-1, keepdim=True)
        least = likeliest + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits


def draw(weights, u):
    """Draw a token per row by inverting the CDF: weights (N, V), in proportion to the
    probabilities, u (N,) uniform in [0, 1) -> ids (N,). A token of weight 0 is never drawn."""
    cdf = weights.cumsum(-1)
    where = u * cdf[:, -1]
    token = torch.searchsorted(cdf, where[:, None], right=True)
    token = token.clamp(max=weights.shape[1] - 1)                                   # (N, 1)
    # if rounding lands on a token of weight 0, fall back to the likeliest one
    possible = weights.gather(1, token) > 0
    if weights.device.type == "cpu" and possible.all():
        return token[:, 0]      # argmax is slow on a CPU; on a GPU this check would synchronise
    return torch.where(possible, token, weights.argmax(-1, keepdim=True))[:, 0]


def sample_token(model, h, r, rows, t, u, sampling):
    """Draw token t of rows (n,) from the hidden states h (n, C) before it, by random numbers u
    (n,), and write it into r with its log-prob and entropy."""
    # how likely is each token to come next? -inf where truncation rules it out
    logits = model.lm_head(h).float() / sampling.temperature                        # (n, V)
    if r.allowed is not None:
        logits = truncate(logits, sampling)
        r.allowed[rows, t] = logits > -math.inf

    # draw one, by hand, since softmax and log_softmax would each read and write all V again
    logits = logits - logits.amax(-1, keepdim=True)
    weights = logits.exp()
    total = weights.sum(-1)                         # weights / total are the probabilities
    token = draw(weights, u)                                                        # (n,)

    # the trainer asks later how much likelier it has become, so keep its log-prob
    log_total = total.log()
    logp = logits.gather(1, token[:, None])[:, 0] - log_total
    entropy = log_total - (logits * weights).nansum(-1) / total     # 0 * -inf counts as 0
    values = None if r.values is None else model.value_head(h)
    r.record(rows, t, token, logp, entropy, values, sampling.eos)


# ------------------------------------------------------------------------------------------------
# decoding

CHECK_EVERY = {"cpu": 1, "cuda": 16}    # tokens; a check for finished rows synchronises the GPU


def read_prompts(model, prompt, attention_mask, num_generations, S):
    """Read prompts (B, P) once for all of their completions -> the hidden states (N, C) before the
    first tokens, and a cache (or None) with room for S tokens."""
    if hasattr(model, "new_cache"):
        cache = model.new_cache(prompt.shape[1])
        h = model(prompt, attention_mask, cache)
        cache = cache.repeat(num_generations, S)
    else:
        cache = None
        h = model(prompt, attention_mask)
    return h[:, -1].repeat_interleave(num_generations, 0), cache


def drop_finished(rows, cache, ended):
    """Drop rows (n,) that have ended, from the cache too -> the rows that still run."""
    running = (~ended[rows]).tolist()       # waits for a GPU; what follows does not
    n = sum(running)
    if n == len(rows):
        return rows
    # fill freed places from the end, so that few rows move
    late = (i for i in range(n, len(rows)) if running[i])
    order = [i if running[i] else next(late) for i in range(n)]
    order = torch.tensor(order, dtype=torch.long, device=rows.device)
    if cache is not None:
        cache.keep(order)
    return rows[order]


def decode(model, prompt, attention_mask, r, noise, sampling, respond=None):
    """Fill in r, the empty rollout of prompts (B, P).

    attention_mask (B, P): False on the prompts' padding. None: the prompts are not padded.
    respond(r, rows, t, column): called when token t of rows (n,) stands in r.tokens[:, column]. An
    environment may write its tokens after it, and end rows.
    """
    B, P = prompt.shape
    N, T = r.logp.shape
    check_every = CHECK_EVERY.get(prompt.device.type, 16)
    h, cache = read_prompts(model, prompt, attention_mask, N // B, P + T)           # (N, C)
    rows = torch.arange(N, device=prompt.device)    # of r, in the order of the cache
    for t in range(T):
        # draw a token in each row. An environment may answer it
        sample_token(model, h, r, rows, t, noise[rows, t], sampling)
        if respond:
            respond(r, rows, t, P + t)
        if t == T - 1:
            break

        # drop finished rows, so that a token costs only what still runs
        if (t + 1) % check_every == 0:
            rows = drop_finished(rows, cache, r.ended)
            if len(rows) == 0:
                break

        # read the new token; without a cache, all tokens again
        ids = r.tokens[rows, :P + t + 1]                                            # (n, P + t + 1)
        mask = None if attention_mask is None else r.attention_mask[rows, :P + t + 1]
        h = model(ids, mask) if cache is None else model(ids[:, -1:], mask, cache)
        h = h[:, -1]                                                                # (n, C)


# ------------------------------------------------------------------------------------------------
# generate


def pad_left(sequences, device="cpu"):
    """Pad lists of ids on the left -> tokens (B, P) and attention_mask (B, P)."""
    P = max(map(len, sequences))
    padded = [[-1] * (P - len(ids)) + list(ids) for ids in sequences]
    padded = torch.tensor(padded).to(device)
    return padded.clamp(min=0), padded >= 0


def check_prompts(prompts, most):
    """Raise ValueError for a prompt that is empty or leaves no room for its completion."""
    for number, ids in enumerate(prompts, 1):
        if not 1 <= len(ids) <= most:
            raise ValueError(f"prompt {number} has {len(ids)} tokens: must be 1 to {most} "
                             "(block_size less max_completion_length)")


@torch.no_grad()
def generate(model, prompts, num_generations, max_new_tokens, *, seed, batch_size=0, part=None,
             respond=None, decode=decode, **sampling):
    """Sample num_generations completions of every prompt (lists of ids of any lengths) -> Rollout.

    The noise is one uniform number per row and token, drawn first, from `seed`, on the CPU: the
    same on every device. batch_size, the number of completions sampled at once (0: all), changes
    only memory.
    part: a slice of the prompts to complete. Concatenating all parts gives what one call for all
    prompts returns.
    respond(first, r, rows, t, column): as for decode; row 0 of r is row `first` of all. The policy
    reads the tokens that it writes; they have no log-prob and never end a completion.
    decode: decode, or a faster function that does the same (extras/graph).
    sampling: the fields of Sampling.
    """
    sampling = Sampling(**sampling)
    check_prompts(prompts, model.block_size - max_new_tokens)
    G = num_generations
    weight = model.lm_head.weight                                                   # (V, C)

    # draw the noise and pad for all prompts, so that a part gets the same numbers as the whole
    first, end, _ = (part or slice(None)).indices(len(prompts))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(len(prompts) * G, max_new_tokens, generator=generator)
    noise = noise[first * G:end * G].to(weight.device)                              # (N, T)
    prompt, attention_mask = pad_left(prompts, weight.device)
    prompt = prompt[first:end]                                                      # (B, P)
    attention_mask = attention_mask[first:end]

    # an empty rollout, to be filled in token by token
    r = empty_rollout(prompt, attention_mask, G, max_new_tokens, sampling.eos[0])
    if sampling.truncates:
        r.allowed = torch.ones(*r.logp.shape, len(weight), dtype=bool, device=weight.device)
    if getattr(model, "value_head", None) is not None:
        r.values = torch.zeros_like(r.logp)

    # as many prompts at once as memory allows, each with all of its completions
    at_once = max(1, batch_size // G) if batch_size else len(prompts)
    for b in range(0, len(prompt), at_once):
        piece = slice(b, b + at_once)
        rows = slice(b * G, (b + at_once) * G)      # views of r, filled in place
        shortest = min(len(ids) for ids in prompts[first:end][piece])
        mask = attention_mask[piece] if shortest < prompt.shape[1] else None
        answer = functools.partial(respond, (first + b) * G) if respond else None
        with casts_kept(model):
            decode(model, prompt[piece], mask, r[rows], noise[rows], sampling, answer)

    # an environment may have written tokens after the end
    r.sampled_mask &= r.completion_mask
    r.tokens[:, prompt.shape[1]:].masked_fill_(~r.completion_mask, sampling.eos[0])
    return r if part else concatenate([r])      # cut to the longest completion


# ------------------------------------------------------------------------------------------------
# log-probs of a rollout

class States(NamedTuple):
    """What predicts the M sampled tokens of a rollout."""
    h: Tensor           # (M, C) the hidden state before each token
    targets: Tensor     # (M,) the tokens
    allowed: Tensor     # (M, V) tokens that truncated sampling could draw, or None
    where: tuple        # two index tensors (M,): the places in (N, T)


def places_of(mask, M):
    """mask.nonzero(as_tuple=True) of a mask (n, T) with M places that are True. Since M is known,
    it does not wait for a GPU."""
    flat = mask.flatten().byte().argsort(descending=True, stable=True)[:M]
    return flat // mask.shape[1], flat % mask.shape[1]


def completion_states(model, rollout):
    """Run a model over a rollout -> States. A prompt's last token predicts the first sampled one.
    Skip columns that are padding in all rows, or that follow all sampled tokens."""
    attention_mask = rollout.attention_mask
    sampled = rollout.sampled_mask
    P = attention_mask.shape[1] - sampled.shape[1]

    # from the first column with a token to the last one with a sampled token, where their count
    # stops growing. All numbers in one transfer, since each waits for the GPU
    first, last, shortest, M = torch.stack([
        attention_mask.any(0).long().argmax(), sampled.any(0).cumsum(0).argmax(),
        attention_mask.sum(1).min(), sampled.sum()]).tolist()
    T = last + 1

    # the hidden state of a token predicts the next one, so the last token is not read
    tokens = rollout.tokens[:, first:P + T]
    padded = shortest < attention_mask.shape[1] - first
    input_mask = attention_mask[:, first:P + T - 1] if padded else None
    h = model(tokens[:, :-1].contiguous(), input_mask)[:, -T:]                      # (N, T, C)

    # only states before sampled tokens: the vocabulary head is expensive
    where = places_of(sampled, M)
    allowed = None if rollout.allowed is None else rollout.allowed[where]
    return States(h[where], tokens[:, -T:][where], allowed, where)


def at_sampled_tokens(function, model, rollout, temperature, states):
    """function(logits (m, V), targets (m, 1)) -> (m, 1), applied to the M sampled tokens of a
    rollout -> (N, T), 0 elsewhere.

    The logits describe the distribution that was sampled from: divided by the temperature and, with
    truncated sampling, -inf for tokens that were not allowed.
    """
    def piece(h, targets, allowed):
        logits = model.lm_head(h).float()                                           # (m, V)
        if temperature != 1:
            logits = logits / temperature
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -math.inf)
        return function(logits, targets[:, None])

    # in pieces that fit into memory, then back to the tokens' places
    h, targets, allowed, where = states or completion_states(model, rollout)
    values = in_pieces(piece, len(model.lm_head.weight), h, targets, allowed)[:, 0]     # (M,)
    return values.new_zeros(rollout.logp.shape).index_put(where, values)


def completion_logprobs(model, rollout, temperature=1.0, states=None):
    """The log-probs (N, T) of a rollout's sampled tokens, in float32; 0 elsewhere. states:
    from completion_states, if the caller has them already."""
    # logits.log_softmax(-1).gather(1, targets) in less memory and time is fast.log_prob
    states = states or completion_states(model, rollout)
    h, targets, allowed, where = states
    if not can_buffer(model, h):
        return at_sampled_tokens(log_prob, model, rollout, temperature, states)

    # on a CPU, for very many logits: the same in one buffer
    weight = model.lm_head.weight
    logp = BufferedLogProb.apply(h, weight, targets, allowed, temperature)     # (M,)
    return logp.new_zeros(rollout.logp.shape).index_put(where, logp)


def completion_entropies(model, rollout, temperature=1.0, states=None):
    """The entropies (N, T), in nats and with gradient, of the distributions from which a rollout's
    tokens were sampled; 0 elsewhere. states: as in completion_logprobs."""
    def entropies(logits, targets):
        logp = logits.log_softmax(-1)
        finite = logp.masked_fill(logp == -math.inf, 0)
        return -(logp.exp() * finite).sum(-1, keepdim=True)     # 0 * -inf counts as 0

    return at_sampled_tokens(entropies, model, rollout, temperature, states)
