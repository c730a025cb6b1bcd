"""
Gradients of every row of a batch, exact on the whole model, from one backward pass.

Why one backward is enough: the loss is a sum over rows, and rows do not mix in the model. So row
i's part of the gradient of a layer's output is what row i alone would give. For a layer, let
    a_i     be row i's part of its input
    b_i     row i's part of the gradient of its output
    g_i     row i's gradient of its weight
    G       the target's gradient of its weight
then, summed over tokens,
    Linear      g_i = b_i^T a_i     so <g_i, G> = b_i . (G a_i), and g_i need not be formed
    Embedding   g_i adds b_i to the embeddings of ids a_i
    norms       g_i = b_i a_i, channel by channel, with a_i the normalised input
A matrix that is embedding and head (tied) has g_i = g_embedding + g_head, each against the same G.

In the order of the file: the Tape, which keeps a and b; the kinds of layers; gradients and checks.
It needs torch alone and works on models of your own. A gradient is {parameter: tensor}.
"""
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ------------------------------------------------------------------------------------------------
# the tape


class Record(NamedTuple):
    """A layer in the backward of some rows."""
    module: nn.Module
    rows: Tensor        # (k,) the number of the row that each entry of a and b belongs to
    a: Tensor           # (k, ...) input: ids of an Embedding, what a norm's weight multiplies
    b: Tensor           # (k, ...) gradient of the output


class Tape:
    """Records the backward of some rows, in one or several micro-batches, of any model whose
    parameters are those of layers in KINDS. Rows are numbered 0, 1, .., num_rows - 1.

        check_exact(model, loss_of, torch.arange(n))    # once: for this model and this loss?
        with Tape(model, n) as tape:
            for numbers in torch.arange(n).split(8):
                tape.rows(numbers)
                loss_of(numbers).backward()     # the sum of the rows' losses, not their mean
        G = tape.gradient(torch.ones(n))        # {parameter: tensor}: what .grad would have held
        influence = tape.dot(G)                 # (n,)
        update = tape.gradient(influence > 0)   # the gradient of some rows

    Rows are the first dimension of what a layer is given. Where that is the tokens of all rows
    flattened (M, C), at once or in pieces, rows() is told the owner of each. Records hold every
    layer's input and output. Each process records rows of its own; answers speak of all.
    """

    def __init__(self, model, num_rows, all_reduce=lambda tensors: None):
        self.num_rows = num_rows
        self.all_reduce = all_reduce    # sums tensors in place over processes
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.layers = trained_layers(model)         # {module: name}
        self.device = next(model.parameters()).device
        self.numbers = torch.zeros(0)
        self.owners = None
        self.records = []
        self.summing = False    # in backward_summed
        self.rest = {}          # its gradient
        self.seen = {}          # {layer: flattened tokens that it has been given}

    def rows(self, numbers, owners=None):
        """What follows is a forward and backward of the rows of these numbers. owners (M,): the
        index into numbers of the row that each flattened token belongs to."""
        self.check_owners()
        self.numbers = numbers.to(self.device)
        self.owners = None if owners is None else self.numbers[owners.to(self.device)]
        self.seen = {}

    def keep(self, record):
        if not self.summing:
            self.records.append(record)
            return
        for name, p in self.uses(record):
            add_gradient(self.rest[p], record.module, name, record.a, record.b)

    def gradient(self, weights):
        """sum_i weights_i g_i, of weights (num_rows,)."""
        return self.over_processes(self.own_gradient(weights))

    def own_gradient(self, weights):
        """sum_i weights_i g_i over the rows of this process."""
        weights = weights.to(self.device)
        total = self.zeros()
        chosen = {}     # by tensor of rows, which layers share: nonzero() waits for a GPU
        for record in self.records:
            key = id(record.rows)
            if key not in chosen:       # rows of weight 0 cost nothing, and may hold NaN
                chosen[key] = weights[record.rows].nonzero()[:, 0]
            here = chosen[key]
            b = record.b[here]
            w = weights[record.rows[here]].view(-1, *[1] * (b.dim() - 1))
            b = (b * w).to(b.dtype)
            for name, p in self.uses(record):
                add_gradient(total[p], record.module, name, record.a[here], b)
        return total

    def dot(self, G):
        """<g_i, G> for every row (num_rows,), in float64."""
        scores = torch.zeros(self.num_rows, dtype=torch.float64, device=self.device)
        for record in self.records:
            for name, p in self.uses(record):
                products = layer_dot(record.module, name, record.a, record.b, G[p])
                scores.index_add_(0, record.rows, products.double())
        self.all_reduce([scores])
        return scores

    def squared_norms(self, rows, scale={}):
        """sum of scale * g_i^2 (k,) of some rows, in float64, one row's gradient at a time."""
        found = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        for k, i in enumerate(rows.tolist()):
            g = self.own_gradient(torch.arange(self.num_rows) == i)
            found[k] = inner(g, {p: x * scale.get(p, 1) for p, x in g.items()})
        self.all_reduce([found])
        return found

    def backward_summed(self, loss):
        """Backward of a further loss of these rows: its sum over rows goes to rest_gradient."""
        self.rest = self.rest or self.zeros()
        self.summing = True
        loss.backward()
        self.summing = False

    def rest_gradient(self):
        return self.over_processes(self.rest or self.zeros())

    def zeros(self):
        return {p: torch.zeros_like(p) for p in self.names}

    def over_processes(self, G):
        self.all_reduce(list(G.values()))
        return G

    def uses(self, record):
        """(name in its layer, parameter) of the trained parameters of a record."""
        own = record.module.named_parameters(recurse=False)
        return [(name, p) for name, p in own if p in self.names]

    # Skip to the kinds of layers, if you like. What follows lets weights count as constants, so
    # that the backward is cheaper, and refuses what would give wrong numbers

    def __enter__(self):
        self.handles = []
        for module in self.layers:
            self.handles.append(module.register_forward_pre_hook(self.freeze))
            self.handles.append(module.register_forward_hook(self.after_forward))
        for p, name in self.names.items():      # a .grad is made only of a use outside its layer
            self.handles.append(p.register_hook(functools.partial(
                refuse, name, "used outside its layer, where the tape cannot see it")))
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()
        for p in self.names:
            p.requires_grad_(True)
        if error[0] is None:
            self.check_owners()

    def freeze(self, module, inputs):
        """Before a layer's forward: no .grad is to be made."""
        module.requires_grad_(False)

    def after_forward(self, module, inputs, out):
        """Keeps a, and b when the backward comes to the layer's output."""
        for p in module.parameters(recurse=False):
            p.requires_grad_(p in self.names)
        if not torch.is_grad_enabled():     # no backward will come
            return out
        name = self.layers[module]
        if len(inputs) != 1:
            refuse(name, "called by keyword: call layer(x), or the tape does not see x")
        if torch._C._current_graph_task_id() != -1:
            # within a backward: a checkpoint repeats this forward. Only a reentrant one asks for b
            return hooked(out, functools.partial(
                refuse, name, "computed again in a backward of its own, where its rows are "
                "unknown: set use_reentrant=False"))
        a = kind_of(module).operand(module, *inputs, out)
        rows = self.rows_of(module, *inputs)
        version = a._version        # a may share the memory of the layer's input

        def keep(b):
            if a._version != version:
                refuse(name, "its input was changed in place after it: the tape has lost it")
            self.keep(Record(module, rows, a, b))

        return hooked(out, keep)

    def rows_of(self, module, x):
        """The number of the row that each entry of x's first dimension belongs to (k,)."""
        rows = self.numbers
        is_lookup = isinstance(module, nn.Embedding)
        if self.owners is not None and x.dim() == 2 and not is_lookup:
            start = self.seen.get(module, 0)
            if start == len(self.owners):       # the layer is used again
                start = 0
            self.seen[module] = start + len(x)
            rows = self.owners[start:start + len(x)]
        if len(x) != len(rows) or is_lookup and x.dim() == 1:
            refuse(self.layers[module],
                   f"its input {tuple(x.shape)} does not tell which of {len(self.numbers)} rows is "
                   "whose. Look positions up for each row, wpe(arange(T).expand(B, T)); for "
                   "flattened tokens see Tape.rows")
        return rows

    def check_owners(self):
        for module, count in self.seen.items():
            if count != len(self.owners):
                refuse(self.layers[module],
                       f"{count} tokens, where rows() was told of {len(self.owners)}")


def refuse(name, why, b=None):
    """Ends a forward, or as a hook a backward, that would give wrong numbers."""
    raise ValueError(f"{name}: {why}")


def hooked(out, record):
    """A layer's output, with record(b) to be called by the backward."""
    is_leaf = not out.requires_grad     # nothing before this layer is trained
    if is_leaf:
        out.requires_grad_()            # out is a leaf: autograd keeps b as its .grad and may add
    out.register_hook(lambda b: record(b.clone() if is_leaf else b))     # to it: hence the clone
    # a view of its own: who changes it in place (relu_) leaves the hook at the layer's output
    return torch.ops.aten._unsafe_view(out, out.shape)


# ------------------------------------------------------------------------------------------------
# the kinds of layers. To add one, say what a is, how g is summed, how it is multiplied with G


class Kind(NamedTuple):
    operand: Any    # (module, x, out) -> a, of a layer's input and output
    gradient: Any   # (total, a, b): total += the weight's gradient, summed over rows and tokens
    dot: Any        # (a, b, G) -> (k, ..): what sums up to <g_i, G>
    fits: Any = lambda module: True     # whether these three hold for all of its options


def kept(x):
    return x.detach().clone() if x.is_leaf else x.detach()      # a leaf's memory is the user's


def linear_gradient(total, a, b):
    total += b.flatten(0, -2).T @ a.flatten(0, -2)


def linear_dot(a, b, G):
    if len(G) > G.shape[1]:     # the other way round is smaller: the vocabulary head
        return (b @ G) * a
    return b * F.linear(a, G)


def embedding_gradient(total, a, b):
    total.index_add_(0, a.flatten(), b.flatten(0, -2).to(total.dtype))


def norm_kind(normalise):
    def operand(module, x, out):
        return normalise(kept(x), module.normalized_shape, eps=module.eps)

    def gradient(total, a, b):
        total += (b * a).flatten(0, -2).sum(0)

    return Kind(operand, gradient, lambda a, b, G: b * (a * G),
                lambda module: len(module.normalized_shape) == 1)


KINDS = {
    nn.Linear: Kind(        # under autocast it computes in its output's dtype
        lambda module, x, out: kept(x).to(out.dtype), linear_gradient, linear_dot),
    nn.Embedding: Kind(     # without padding_idx, max_norm, ..: repr shows options that are set
        lambda module, x, out: kept(x), embedding_gradient,
        lambda a, b, G: b * F.embedding(a, G), lambda module: "=" not in module.extra_repr()),
    nn.LayerNorm: norm_kind(F.layer_norm),
    nn.RMSNorm: norm_kind(F.rms_norm)}


def kind_of(module):
    """The Kind of a layer, or None. A class of one's own says `kind = nn.Linear` if it computes the
    same as nn.Linear (model.Head)."""
    return KINDS.get(getattr(module, "kind", type(module)))


def add_gradient(total, module, name, a, b):
    """total += the gradient of one parameter of a layer, summed over rows and tokens."""
    if name == "bias":
        total += b.flatten(0, -2).sum(0)
    else:
        kind_of(module).gradient(total, a, b)


def layer_dot(module, name, a, b, G):
    """<g_i, G> (k,) of one parameter of a layer, for each entry of the first dimension."""
    G = G.to(b.dtype)
    products = b * G if name == "bias" else kind_of(module).dot(a, b, G)
    return products.flatten(1).sum(1, dtype=torch.promote_types(b.dtype, torch.float32))


def trained_layers(model):
    """{module: name} of the layers with trained parameters. ValueError for an unknown kind."""
    layers = {}
    for name, module in model.named_modules():
        own = {k for k, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own:
            continue
        kind = kind_of(module)
        fits = kind and kind.fits(module) and own <= {"weight", "bias"}
        if not fits:
            refuse(name or "model",
                   f"the tape does not know the gradient of {module}: use torch's own Linear, "
                   "Embedding, LayerNorm, RMSNorm, freeze it, or add it to tape.KINDS")
        if module._forward_hooks:
            refuse(name or "model", "has a forward hook, which may change its output: remove it")
        layers[module] = name
    return layers


# ------------------------------------------------------------------------------------------------
# gradients {parameter: tensor}, and checks


def add(G, H, factor=1):
    """G + factor * H of two gradients; {} is 0."""
    if not G or not H:
        return G or {p: factor * h for p, h in H.items()}
    return {p: torch.add(g, H[p], alpha=factor) for p, g in G.items()}


def inner(G, H):
    """<G, H>: ()."""
    return torch.stack([G[p].flatten() @ H[p].flatten() for p in H]).double().sum()


def cosine(G, H):
    """NaN where one of them is 0."""
    return float(inner(G, H) / (inner(G, G) * inner(H, H)).sqrt())


def check_exact(model, loss_of, rows, owners=None, tolerance=0.01):
    """Raises ValueError unless, for the three rows of largest gradient, the tape's gradient is the
    one that autograd gives for that row alone, parameter by parameter. loss_of(rows) -> (): the sum
    of their losses."""
    n = len(rows)
    with Tape(model, n) as tape:
        tape.rows(torch.arange(n), owners)
        loss_of(rows).backward()
    norms = tape.squared_norms(torch.arange(n))
    if n < 2 or not norms.max() > 0:
        refuse("check_exact", "give two rows or more, one of them with a gradient")
    for i in norms.topk(min(n, 3)).indices.tolist():
        among = tape.gradient(torch.arange(n) == i)
        alone = torch.autograd.grad(loss_of(rows[i:i + 1]), list(among), materialize_grads=True)
        floor = 1e-3 * norms[i].sqrt() + 1e-30      # what is far below the rest is rounding
        for (p, g), h in zip(among.items(), alone):
            error = float((g - h).norm() / (h.norm() + floor))
            if not error < tolerance:
                refuse(tape.names[p],
                       f"row {i} has another gradient among {n} rows than alone, by {error:.0%}: "
                       "give the sum of the rows' losses, not a mean; rows may not mix")
