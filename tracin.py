"""
Influence of every row of a batch on a target, exact on the whole model, from one backward.

    I_i = <grad L_i, grad L_target>       (TracIn, Pruthi et al. 2020, at one set of weights)

Positive: a small step on row i lowers the target's loss; as well, a small step on the target lowers row i's.
Every layer that has parameters is linear in them, out = layer(a; theta). With b the gradient of its output, the score of
row i against a target gradient G is <b_i, layer(a_i; G)> summed over layers and tokens, and a weighted gradient
sum_i w_i g_i is the layer's own backward with b_i scaled by w_i. A tape keeps a and b of every layer during one backward;
the rest follows from these two. A tied matrix is used twice, against one total G, which holds the cross terms.
Given memory, the tape forms g_i itself from a and b as they come by, in place of the layer's gradient over all rows: the same
arithmetic when rows are long. Scores and weighted gradients are then a matrix-vector product each.
Only first order in the step is approximate: momentum, the size of the step and what rows do together are not in I_i.
"""
import functools
import os
import runpy

import torch
import torch.nn as nn
from torch.nn import functional as F


class Tape:
    """Records a backward, over one or several micro-batches, of any model made of Linear, Embedding, LayerNorm, RMSNorm.

        with Tape(model) as tape:
            for rows in micro_batches:
                tape.rows(len(rows))
                loss_of_each(rows).sum().backward()
        G = tape.gradient()                  # {parameter: tensor}: what .grad would have held
        influence = tape.dot(G)              # (n,) of each row, in the order of the micro-batches
        update = tape.gradient(influence > 0)

    The rows are the first dimension of what a layer is given; where a layer is given the tokens of all rows in one line
    (M, C), at once or in pieces, rows() is told whose they are. A frozen parameter costs nothing. Inside the block no
    parameter gets a .grad: the layers run on detached weights, so the backward forms activation gradients only, and a .grad
    that appears all the same gives away a parameter that is used outside its layer: ValueError, with its name. So does a
    layer of any other kind.

    memory: bytes of rows' gradients that may be kept, at n times the weights in all. A layer whose rows do not fit, or that
    has fewer than `fewest` tokens a row, keeps a and b. Rows' gradients cost their traffic, 4 bytes x weights, written once and
    read three times; a and b cost two more products of 2 x tokens x weights: on a CPU the two are even near 24 tokens, on a
    GPU near 500. A tape that is used again uses the same memory again: fresh pages cost time.

    reduce(tensors) sums in place over the processes that record a part of the rows each, perhaps none: see place().
    """

    def __init__(self, model, memory=0, fewest=None, reduce=lambda tensors: None):
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        on_gpu = any(p.is_cuda for p in self.names)
        self.layers, self.memory, self.pool, self.fewest = {}, memory, {}, (500 if on_gpu else 24) if fewest is None else fewest
        self.reduce = reduce
        for name, module in model.named_modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                odd = [k for k, _ in module.named_parameters(recurse=False) if k not in ("weight", "bias")]
                odd += [k for k in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, k, None)]
                odd += ["padding_idx"] * (getattr(module, "padding_idx", None) is not None)
                odd += ["normalized_shape"] * (len(getattr(module, "normalized_shape", ())) > 1)
                if type(module) not in (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm) or odd:
                    raise ValueError(f"{name or 'model'}: {type(module).__name__}{odd or ''} has parameters of its own; the tape "
                                     "knows Linear, Embedding, LayerNorm and RMSNorm")
                self.layers[module] = name

    def __enter__(self):
        self.records, self.kept, self.room, self.n, self.whose, self.flat = [], {}, self.memory, 0, None, None
        self.where = None  # see place()
        self.pending, self.seen = 0, False  # calls of rows() since the last backward, and whether there was one since
        for p, name in self.names.items():
            if p.grad is not None:
                raise ValueError(f"{name} has a .grad: zero_grad(set_to_none=True) before recording")
        for module, name in self.layers.items():
            if "forward" in vars(module):
                raise ValueError(f"{name or 'model'}: its forward has been replaced, by another tape perhaps")
        for module in self.layers:
            module.forward, module.note = self.recording(module), functools.partial(self.note, module)
        return self

    def __exit__(self, *error):
        for module in self.layers:
            del module.forward, module.note
        self.pool = {key: self.pool[key] for key in self.kept}
        if sum(g.numel() * g.element_size() for g in self.pool.values()) > self.memory:  # some are of longer batches
            self.pool = {key: buffer for key, buffer in self.pool.items() if len(buffer) == len(self.kept[key])}
        if error[0] is None:
            self.all_read()
        outside = [name for p, name in self.names.items() if p.grad is not None]
        if outside and error[0] is None:
            raise ValueError(f"{outside[0]} is used outside its layer, where the tape cannot see it")

    def all_read(self):
        """ValueError unless every layer that saw tokens in a line saw all of them: else they would go to the wrong rows."""
        for module, count in ({} if self.flat is None else self.read).items():
            if count != len(self.flat):
                raise ValueError(f"{self.layers[module]}: {count} tokens, where rows() was told of {len(self.flat)}")

    def rows(self, n, flat=None):
        """What follows is a forward and backward of n new rows. flat (M,): the row, 0 to n - 1, of each of M tokens in a line."""
        self.all_read()
        device = next(iter(self.names)).device
        self.whose = torch.arange(self.n, self.n + n, device=device)
        self.pending, self.seen = 1 if self.seen else self.pending + 1, False
        self.flat, self.read = None if flat is None else flat.to(device) + self.n, {}
        self.n += n

    def place(self, where, total):
        """The rows recorded here are number where (n,) of `total` rows, and other processes have recorded the rest. From here on
        gradient(s), dot and norms speak of all of them by these numbers; per_row of those recorded here, as they came."""
        self.where, self.total = where, total

    def spread(self, x):
        """x (n,) of the rows recorded here -> (total,) of all, by their numbers."""
        if self.where is None:
            return x
        x = x.new_zeros(self.total).index_copy_(0, self.where, x)
        self.reduce([x])
        return x

    def recording(self, module):
        """The module's forward on detached weights, which notes its input and asks for the gradient of its output."""
        plain, kind = module.forward, type(module)

        def forward(x):
            if not torch.is_grad_enabled():
                return plain(x)
            weight = module.weight.detach()
            bias = None if getattr(module, "bias", None) is None else module.bias.detach()
            if kind is nn.Embedding:
                out, a = F.embedding(x, weight), x
            elif kind is nn.Linear:
                out = F.linear(x, weight, bias)
                a = x.detach().to(out.dtype)
            else:  # a norm: what the weight is multiplied with
                a = (F.layer_norm if kind is nn.LayerNorm else F.rms_norm)(x.detach(), module.normalized_shape, eps=module.eps)
                out = (F.layer_norm(x, module.normalized_shape, weight, bias, module.eps) if kind is nn.LayerNorm
                       else F.rms_norm(x, module.normalized_shape, weight, module.eps))
            whose = self.owner(module, x)
            if not x.requires_grad and kind in (nn.Linear, nn.Embedding):
                a = a.clone()  # the caller may use that memory again
            if not out.requires_grad:  # the first layer: its output is a leaf, whose .grad would add up in the memory of b
                out.requires_grad_().register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
                out = out.clone()

            def hook(b):
                if whose is None:
                    raise ValueError(f"{self.layers[module]}: tokens in a line under a reentrant checkpoint, where the tape "
                                     "cannot tell which rows they are of; set use_reentrant=False")
                self.add(module, whose, a, b.detach(), *micro)

            micro = self.micro(whose, out.shape[:-1].numel())
            out.register_hook(hook)
            return out

        return forward

    def note(self, module, x, b):
        """Record a Linear whose gradient b of the output is known already, in code that goes no way through backward()."""
        whose = self.owner(module, x)
        self.add(module, whose, x.detach().to(b.dtype), b.detach(), *self.micro(whose, len(x)))

    def micro(self, whose, indices):
        """(first row, rows, tokens a row) of this micro-batch. A head in pieces has as many tokens as all of them."""
        n = len(self.whose)
        return self.n - n, n, (indices if whose is self.whose else len(self.flat)) / max(n, 1)

    def add(self, module, whose, a, b, first, n, tokens):
        self.seen = True
        if n and not self.keep(module, whose, a, b, first, n, tokens):
            self.records.append((module, whose, a, b))

    def keep(self, module, whose, a, b, first, n, tokens):
        """Add the gradients of the rows first .. first + n - 1 to self.kept {(parameter, first): (n, *shape)}; False when a and b
        are the better thing to keep."""
        new = {p for p in module.parameters(recurse=False) if p in self.names and (p, first) not in self.kept}
        size = sum(n * p.numel() * p.element_size() for p in new)
        lookup = isinstance(module, nn.Embedding)  # a sparse gradient, unless the matrix is the head's too
        if size > self.room or new and (lookup or isinstance(module, nn.Linear) and tokens < self.fewest):
            return False
        self.room -= size
        for name, p in module.named_parameters(recurse=False):
            if p in self.names:
                if p in new:
                    if len(self.pool.get((p, first), ())) < n:
                        self.pool[p, first] = torch.empty(n, *p.shape, dtype=p.dtype, device=p.device)
                    self.kept[p, first] = self.pool[p, first][:n]
                g = self.kept[p, first]
                if b.dim() == 3 and isinstance(module, nn.Linear) and name == "weight" and b.dtype == g.dtype:
                    g.baddbmm_(b.mT, a, beta=0 if p in new else 1)
                elif b.dim() == 3 and not lookup:  # row i of a and b is row i of g
                    part = b.sum(1) if name == "bias" else b.mT @ a if isinstance(module, nn.Linear) else (b * a).sum(1)
                    g.copy_(part) if p in new else g.add_(part)
                else:
                    add_per_row(g.zero_() if p in new else g, module, name, a, b, whose - first)
        return True

    def owner(self, module, x):
        """(rows,) or (M,): the row that each index of the first dimension of x belongs to."""
        if self.whose is None:
            raise ValueError("tape.rows(n) first: how many rows are in this micro-batch?")
        if self.pending > 1 and torch._C._current_graph_task_id() != -1:
            raise ValueError(f"{self.layers[module]}: computed again under a reentrant checkpoint, after {self.pending} calls of "
                             "rows(): of which rows? Go backward after each forward, or set use_reentrant=False")
        per_token = x.dim() == (1 if type(module) is nn.Embedding else 2)
        if per_token and self.flat is not None and type(module) is not nn.Embedding:  # in one piece or several
            if torch._C._current_graph_task_id() != -1:  # inside a backward: a checkpoint goes through the piece again
                return None
            start = self.read.get(module, 0) % max(1, len(self.flat))
            self.read[module] = start + len(x)
            if self.read[module] > len(self.flat):
                raise ValueError(f"{self.layers[module]}: {self.read[module]} tokens, where rows() was told of {len(self.flat)}")
            return self.flat[start:start + len(x)]
        if len(x) != len(self.whose) or (per_token and type(module) is nn.Embedding):
            raise ValueError(f"{self.layers[module]}: its input {tuple(x.shape)} does not tell which of the {len(self.whose)} "
                             "rows is whose; look positions up per row, and give rows() the owner of flattened tokens")
        return self.whose

    def gradient(self, weights=None):
        """sum_i weights_i g_i as {parameter: tensor}; weights (n,), None: all 1. Rows of weight 0 cost nothing."""
        return self.gradients([weights])[0]

    def gradients(self, weights):
        """The gradients for several weights, in a list."""
        totals = [{p: torch.zeros_like(p) for p in self.names} for _ in weights]
        weights = [weight if weight is None or self.where is None else weight[self.where] for weight in weights]
        chosen, spans = {}, {}  # the same for all layers of a micro-batch, and asking waits for a GPU
        for module, whose, a, b in self.records:
            for k, (weight, total) in enumerate(zip(weights, totals)):
                x, y = a, b
                if weight is not None:
                    w = weight.to(b)[whose]
                    if (k, id(whose)) not in chosen:
                        chosen[k, id(whose)] = weight[whose].nonzero()[:, 0]
                    rows = chosen[k, id(whose)]
                    if len(rows) < len(w):
                        x, y, w = x[rows], y[rows], w[rows]
                    if isinstance(module, nn.Linear) and x.numel() < y.numel() and module.bias is None:  # the smaller factor
                        x = x * w.view(-1, *[1] * (x.dim() - 1))
                    else:
                        y = y * w.view(-1, *[1] * (y.dim() - 1))
                for name, p in module.named_parameters(recurse=False):
                    if p in total:
                        total[p] += parameter_gradient(module, name, x, y).to(p.dtype)
        for (p, first), g in self.kept.items():
            for k, (weight, total) in enumerate(zip(weights, totals)):
                w = g.new_ones(len(g)) if weight is None else weight[first:first + len(g)].to(g)
                if (k, first) not in spans:  # stretches without a row of weight 0: a copy of the rows would cost more
                    on = [False, *(w != 0).tolist(), False]
                    ends = [i for i in range(len(w) + 1) if on[i] != on[i + 1]]
                    spans[k, first] = [slice(i, j) for i, j in zip(ends[::2], ends[1::2])]
                for span in spans[k, first]:
                    total[p].view(-1).addmv_(g[span].flatten(1).T, w[span])
        self.reduce([g for total in totals for g in total.values()])
        return totals

    def dot(self, G):
        """<g_i, G> for every row (n,). G: {parameter: tensor}; the parameters it leaves out are not scored."""
        p = next(iter(self.names))
        scores = torch.zeros(self.n, dtype=torch.float64, device=p.device)
        for module, whose, a, b in self.records:
            for name, p in module.named_parameters(recurse=False):
                if p in G:
                    scores.index_add_(0, whose, layer_dot(module, name, a, b, G[p]).to(scores))
        for (p, first), g in self.kept.items():
            if p in G:
                width = p.numel() if p.is_cuda else 32768  # a CPU adds a product up in one line, which costs float32 its digits
                for part, target in zip(g.flatten(1).split(width, 1), G[p].to(g).flatten().split(width)):
                    scores[first:first + len(g)] += part @ target
        return self.spread(scores.to(torch.promote_types(p.dtype, torch.float32)))

    def norms(self, rows, scale={}, parameters=None, memory=2 ** 26):
        """sum of scale * g_i^2 for some rows (indices, ascending): ||g_i||^2 when nothing is scaled. At most about `memory`
        numbers of per-row gradients exist at a time, of one parameter."""
        rows = torch.as_tensor(rows)
        found = torch.zeros(len(rows), dtype=torch.float64)
        if self.where is not None:
            numbers, self.where = self.where, None
            here = torch.full((self.total,), -1).index_copy_(0, numbers.cpu(), torch.arange(self.n))[rows]
            order = here.argsort()[(here < 0).sum():]  # of those recorded here, as they came
            found[order] = self.norms(here[order], scale, parameters, memory)
            self.where = numbers
            self.reduce([found])
            return found
        local = torch.full((self.n,), -1).index_copy_(0, rows, torch.arange(len(rows)))
        for p in (self.names if parameters is None else parameters) if len(rows) else ():
            uses = [r for r in self.records if any(q is p for q in r[0].parameters(recurse=False))]
            seen = torch.cat([whose for _, whose, _, _ in uses]) if uses else torch.zeros(0)
            kept = [(first, g) for (q, first), g in self.kept.items() if q is p]
            if kept and not uses:
                for j, row in enumerate(rows.tolist()):
                    for g in (g[row - first].flatten() for first, g in kept if first <= row < first + len(g)):
                        found[j] += float(g @ (g * scale[p].flatten() if p in scale else g))
                continue
            once = len({r[0] for r in uses}) == 1 and len(seen.unique()) == len(seen) and not kept
            if once and p not in scale and isinstance(uses[0][0], nn.Linear) and p.dim() == 2 and uses[0][3].dim() == 3:
                for _, whose, a, b in uses:  # <sum_t b_t a_t^T, sum_s b_s a_s^T> = sum_ts (a_t . a_s)(b_t . b_s)
                    row = local.to(whose.device)[whose]
                    here = (row >= 0).nonzero()[:, 0]
                    x, y = a[here], b[here]
                    found[row[here].cpu()] += ((x @ x.mT) * (y @ y.mT)).double().sum((1, 2)).cpu()
                continue
            for chunk in torch.arange(len(rows)).split(max(1, memory // p.numel())):
                g = self.per_row(p, rows[chunk]).flatten(1)
                found[chunk] += (g.square() * scale[p].flatten() if p in scale else g.square()).sum(1).double().cpu()
        return found

    def per_row(self, p, rows):
        """The gradients (len(rows), *p.shape) of one parameter, one for each of these rows (indices, ascending)."""
        total, local = torch.zeros(len(rows), *p.shape, dtype=p.dtype, device=p.device), torch.full((self.n,), -1)
        local[rows] = torch.arange(len(rows))
        for module, whose, a, b in self.records:
            for name in (name for name, q in module.named_parameters(recurse=False) if q is p):
                row = local.to(whose.device)[whose]
                here = (row >= 0).nonzero()[:, 0]
                add_per_row(total, module, name, a[here], b[here], row[here])
        for first, g in ((first, g) for (q, first), g in self.kept.items() if q is p):
            row = local[first:first + len(g)]
            here = (row >= 0).nonzero()[:, 0]
            total[row[here].to(g.device)] += g[here.to(g.device)]
        return total


def add_per_row(total, module, name, a, b, row):
    """total[row_i] += the gradient of one parameter from index i of the first dimension of a layer's a and b."""
    if isinstance(module, nn.Embedding):
        flat = (row.view(-1, *[1] * (a.dim() - 1)) * total.shape[1] + a).flatten()
        total.view(-1, total.shape[2]).index_add_(0, flat, b.flatten(0, -2).to(total.dtype))
    elif isinstance(module, nn.Linear) and name == "weight" and b.dim() == 2:  # tokens in a line
        order, counts = row.argsort(stable=True), torch.bincount(row, minlength=len(total)).tolist()
        a, b = (x[order].to(total.dtype).split(counts) for x in (a, b))
        for g, x, y in zip(total, a, b):
            g.addmm_(y.T, x)
    elif isinstance(module, nn.Linear) and name == "weight":
        total.index_add_(0, row, (b.flatten(1, -2).mT @ a.flatten(1, -2)).to(total.dtype))
    else:
        part = (b if name == "bias" else b * a).to(total.dtype)
        total.index_add_(0, row, part.flatten(1, -2).sum(1) if part.dim() > 2 else part)


def parameter_gradient(module, name, a, b):
    """The gradient of one parameter of a layer: input a (or ids, or the normalised input), gradient b of the output."""
    if isinstance(module, nn.Embedding):
        return torch.zeros_like(module.weight).index_add_(0, a.flatten(), b.flatten(0, -2).to(module.weight.dtype))
    b2 = b.flatten(0, -2)                                                                           # (rows * T, out)
    if name == "bias":
        return b2.sum(0)
    return b2.T @ a.flatten(0, -2) if isinstance(module, nn.Linear) else (b2 * a.flatten(0, -2)).sum(0)


def layer_dot(module, name, a, b, G):
    """<b, layer(a; G)> per index of the first dimension, for one parameter of a layer."""
    if name == "bias":
        out = G.to(b.dtype)
    elif isinstance(module, nn.Embedding):
        out = F.embedding(a, G.to(b.dtype))
    elif isinstance(module, nn.Linear) and len(G) > G.shape[1]:  # the other way round is smaller: the vocabulary head
        out, b = a, b @ G.to(b.dtype)
    else:
        out = F.linear(a, G.to(a.dtype)) if isinstance(module, nn.Linear) else a * G.to(a.dtype)
    return (b * out).flatten(1).sum(1, dtype=torch.promote_types(b.dtype, torch.float32))


# from scores to a selection


def target_coefficients(target, rewards, advantages):
    """rho (n,): the target loss is sum_j rho_j log pi(completion j), a sum over its tokens, of n rollouts.

    reward: -(reward normalised over the batch) / n; advantage: -advantage / n; contrastive: -1 / n for the better half
    by reward, +1 / n for the other.
    """
    n, rewards = len(rewards), rewards.nan_to_num(float(rewards.nanmean()))
    if target == "reward":
        return -(rewards - rewards.mean()) / (rewards.std(correction=int(n > 1)) + 1e-4) / n
    if target == "advantage":
        return -advantages / n
    good = torch.zeros(n, dtype=torch.bool).index_fill_(0, rewards.argsort(descending=True)[:n // 2].cpu(), True)
    return torch.where(good, -1.0, 1.0).to(rewards.device) / n


def choose_targets(rewards, size, how, generator):
    """Indices of `size` rollouts (0: all) of a held-out batch by reward: random, best, worst, or balanced: half and half."""
    n, order = len(rewards), rewards.nan_to_num(-torch.inf).argsort(descending=True)
    size = min(size or n, n)
    if how == "random":
        return torch.randperm(n, generator=generator)[:size]
    if how == "balanced":
        return torch.cat([order[:size - size // 2], order[n - size // 2:]])
    return order[:size] if how == "best" else order[n - size:]


def select(influence, how, fraction=0.5, generator=None):
    """influence (n,) -> (keep (n,) bool, True when the fallback was used).

    positive: above 0; when fewer than one in ten of those that are not 0 are, their better half (the fallback). drop: all
    but the worst `fraction` of the negative ones. top: the best `fraction`. Controls that keep as many as `positive`:
    bottom, random. all.
    """
    n, order = len(influence), influence.argsort(descending=True)
    positive, negative = int((influence > 0).sum()), int((influence < 0).sum())
    fallback = how in ("positive", "bottom", "random") and positive < 0.1 * (positive + negative)
    if fallback and how == "positive":  # rows of influence 0, of groups without spread, stand between the two signs
        order = influence.masked_fill(influence == 0, -torch.inf).argsort(descending=True)
    count = (positive + negative + 1) // 2 if fallback else positive
    kept = {"positive": order[:count], "bottom": order[n - count:], "random": torch.randperm(n, generator=generator)[:count],
            "top": order[:round(fraction * n)], "drop": order[:n - int(fraction * negative)], "all": order}[how]
    return torch.zeros(n, dtype=torch.bool, device=influence.device).index_fill_(0, kept.to(influence.device), True), fallback


def adam_scale(optimizer, gradient):
    """{parameter: 1 / (sqrt(v) + eps)}: the diagonal that AdamW will multiply a step with this gradient with (before any
    clipping). Momentum scales all rows alike and weight decay has no part in a row, so neither matters here."""
    scale = {}
    for group in optimizer.param_groups:
        decay = group["betas"][1]
        for p in group["params"]:
            if p in gradient:
                state = optimizer.state.get(p, {})
                v = decay * state.get("exp_avg_sq", 0) + (1 - decay) * gradient[p].square()
                scale[p] = 1 / ((v / (1 - decay ** (float(state.get("step", 0)) + 1))).sqrt() + group["eps"])
    return scale


def inner(G, H):
    """<G, H> of two gradients over the parameters of the second."""
    return float(torch.stack([G[p].flatten() @ H[p].to(G[p]).flatten() for p in H]).double().sum())


def filter_rows(tape, coefficients, halves, own, units, optimizer, s, seed, everything=None, truth=None):
    """Score the rows of a tape against a target and decide -> (weights (n,), influence (n,), gradient to step with, metrics).

    The gradient of row i is coefficients_i times what the tape recorded. halves: the target's gradient in two parts, of half
    of its rows each, since their cosine tells signal from noise. own_i: the multiple of row i's record that is in the target
    (0: another batch; NaN: not known). units (n,): what the loss is divided by, row by row. everything: the gradient of all
    rows, where the tape has given it already. truth: the same from an ordinary backward, for the invariant.
    """
    target = {p: halves[0][p] + halves[1][p] for p in halves[0]}
    squares, product = [inner(half, half) for half in halves], inner(*halves)
    if everything is None and s.tracin_adam:
        everything = tape.gradient(coefficients)
    scale = adam_scale(optimizer, everything) if s.tracin_adam else {}
    G = {p: g * scale[p] if p in scale else g for p, g in target.items()
         if not s.tracin_layers or any(part in tape.names[p] for part in s.tracin_layers)}
    influence = coefficients * tape.dot(G).to(coefficients)
    total, size = float(influence.double().sum()), float(influence.double().abs().sum())
    generator, n = torch.Generator().manual_seed(seed), len(influence)
    sample = list(range(n)) if s.tracin_leave_one_out else torch.randperm(n, generator=generator)[:4].sort().values.tolist()
    own = (coefficients * own)[sample]  # 0 where the target is another batch
    self_term = own * tape.norms(sample, scale, G).to(influence) if own.any() else own
    share = float(self_term.sum() / influence[sample].abs().sum().clamp(min=1e-30))
    if s.tracin_leave_one_out:
        influence = influence - self_term
    if not influence.isfinite().all():
        raise SystemExit("stopped: an influence is not finite; the weights or the target's rewards are not. The last checkpoint stands")
    keep, fallback = select(influence, s.tracin_select, s.tracin_fraction, generator)
    if everything is None:
        kept, dropped = tape.gradients([coefficients * keep, coefficients * ~keep])
        everything = {p: kept[p] + dropped[p] for p in G}
    elif 2 * int(keep.sum()) <= len(keep):
        kept = tape.gradient(coefficients * keep)
    else:  # the rest is fewer
        kept = {p: everything[p] - g for p, g in tape.gradient(coefficients * ~keep).items()}
    expected = inner(truth or everything, G)
    factor = float(units.sum() / (units * keep).sum().clamp(min=1)) if s.tracin_normalizer == "kept" else 1.0
    metrics = {
        "tracin/positive_ratio": float((influence > 0).float().mean()),
        "tracin/negative_ratio": float((influence < 0).float().mean()),
        "tracin/zero_ratio": float((influence == 0).float().mean()), "tracin/mean_ip": float(influence.mean()),
        "tracin/std_ip": float(influence.std()), "tracin/min_ip": float(influence.min()), "tracin/max_ip": float(influence.max()),
        "tracin/selected_ratio": float(keep.float().mean()), "tracin/fallback": float(fallback), "tracin/self_share": share,
        "tracin/invariant_error": abs(total - expected) / max(size, 1e-30),
        "tracin/target_cosine": product / max((squares[0] * squares[1]) ** 0.5, 1e-30),
        "tracin/target_grad_norm": max(sum(squares) + 2 * product, 0.0) ** 0.5}
    metrics |= {f"tracin/target_grad_norm/{tape.names[p]}": float(target[p].norm()) for p in list(target)[:3]}
    return keep.to(influence) * factor, influence, {p: g.mul_(factor) if factor != 1 else g for p, g in kept.items()}, metrics


if __name__ == "__main__":  # python tracin.py out/toxicity_tracin explains a run
    runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "explain.py"), run_name="__main__")
