"""
Gradients of every row of a batch, exact on the whole model, from one backward pass.

    check_exact(model, loss_of, torch.arange(n))    # once for a model and a loss
    with Tape(model, n) as tape:
        for numbers in torch.arange(n).split(8):
            tape.rows(numbers)
            loss_of(numbers).backward()     # the sum of the rows' losses, not their mean
    target = tape.gradient(is_good)         # {parameter: tensor}: what .grad would have held for
                                            # these rows alone, or for all with any weights (n,)
    influence = tape.dot(target)            # (n,) the product of each row's gradient with it
    update = tape.gradient(influence > 0)   # the gradient of some rows

Why one backward is enough: the loss is a sum over rows, and rows do not mix in the model. So row
i's part of the gradient of a layer's output is what row i alone would give. For a layer, let
    a_i     be row i's part of its input
    b_i     row i's part of the gradient of its output
    g_i     row i's gradient of its weight
    t       another gradient of that weight, the target's
then, summed over tokens,
    Linear      g_i = b_i^T a_i     so <g_i, t> = b_i . (t a_i), and g_i need not be formed
    Embedding   the same, if a_i are one-hot vectors: b_i is added to the embeddings of these ids
    vectors     (biases, weights of norms) g_i is no larger than b_i, and is formed at once
    any other   (norms, factors, tables of positions by others) likewise, by autograd on each row
                alone: the layer is computed again
A matrix that is embedding and head (tied) has g_i = g_embedding + g_head, each against the same t.

Hooks see a and b, so any model works unchanged. A forward hook keeps a layer's input and puts a
hook on its output, which keeps b when the backward gets there. Weights are frozen while their layer
runs, since the tape forms their gradients itself: autograd then skips a third of the work. A weight
that still gets a gradient was used somewhere else, where the tape cannot see it, and is refused.

The file needs only torch, and works on your own models. A gradient is {parameter: tensor}.
"""
import functools
import weakref
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

# ------------------------------------------------------------------------------------------------
# gradients {parameter: tensor}


def add(g, h, factor=1):
    """g + factor * h of two gradients; {} is 0."""
    if not g or not h:
        return g or {p: factor * x for p, x in h.items()}
    return {p: torch.add(x, h[p], alpha=factor) for p, x in g.items()}


def inner(g, h):
    """<g, h>: ()."""
    return torch.stack([g[p].flatten() @ h[p].flatten() for p in h]).double().sum()


def cosine(g, h):
    """(), NaN where one of them is 0."""
    return inner(g, h) / (inner(g, g) * inner(h, h)).sqrt()


# ------------------------------------------------------------------------------------------------
# the kinds of layers


def wide(dtype):
    """The type in which sums of such numbers are taken."""
    return torch.promote_types(dtype, torch.float32)


def formed(g):
    """The pair (b, a) of a Record that holds each row's gradient itself, g (k, numel)."""
    return g, g.new_ones(len(g), 1)


def vector(b):
    """(b, a) of a bias, or of a norm's weight, from its gradient by token (k, .., C)."""
    return formed(b[:, None].flatten(1, -2).sum(1, dtype=wide(b.dtype)))


def linear(module, x, b):
    return b.flatten(0, -2), x.to(b.dtype).flatten(0, -2)   # autocast computes in b's type


def embedding(module, x, b):
    padding = getattr(module, "padding_idx", None)
    if padding is not None:     # the embedding of this id gets no gradient
        b = b.masked_fill((x == padding)[..., None], 0)
    return x.flatten(), b.flatten(0, -2)


def norm(module, x, b):
    normalise = F.rms_norm if isinstance(module, nn.RMSNorm) else F.layer_norm
    return vector(b * normalise(x.to(wide(b.dtype)), module.normalized_shape, eps=module.eps))


def turned(module, x, b):
    return linear(module, x, b)[::-1]


# To add a kind of layer, write a function like these: from the layer's input x and the gradient b
# of its output it returns the pair (b, a) of a Record for the layer's weight
KINDS = {nn.Linear: linear, nn.Embedding: embedding, nn.LayerNorm: norm, nn.RMSNorm: norm,
         "transformers.pytorch_utils.Conv1D": turned}       # a Linear whose matrix is (in, out)
FORMED = 2 ** 27    # numbers that all rows' gradients of one parameter may have: 0.5 GB
LISTS = (nn.ParameterList, nn.ParameterDict)


def kind_of(module, trained):
    """The function in KINDS for a layer, or None: see each_alone. A class of one's own says `kind =
    nn.Linear` if it computes the same as nn.Linear (model.Head)."""
    kind = getattr(module, "kind", type(module))
    several = len(getattr(module, "normalized_shape", [1])) > 1     # dimensions of a norm's weight
    if several or not trained.keys() <= {"weight", "bias"}:
        return None
    return KINDS.get(kind) or KINDS.get(f"{kind.__module__}.{kind.__qualname__}")


def each_alone(module, name, inputs, b):
    """The gradient of one parameter by each row, (k, *p.shape), and the output of each row alone,
    (k, ..), whatever the module computes. inputs: (args, kwargs) of its call; a row gets its own
    entry of each tensor (k, ..), and all of the rest. b (k, ..): the gradient of the output."""
    leaves, form = tree_flatten(inputs)
    by_row = [i for i, x in enumerate(leaves)
              if torch.is_tensor(x) and x.dim() > 0 and len(x) == len(b)]

    def product(p, of_row, b):
        given = list(leaves)
        for i, x in zip(by_row, of_row):
            given[i] = x[None]
        args, kwargs = tree_unflatten(given, form)
        # a parameter of two names gets a gradient by each
        out = torch.func.functional_call(module, {name: p}, args, kwargs, tie_weights=False)[0]
        return (out * b).sum(), out

    p = attrgetter(name)(module).detach()
    alone = torch.func.grad(product, has_aux=True)
    return torch.vmap(alone, in_dims=(None, 0, 0))(p, [leaves[i] for i in by_row], b)


class Layer(NamedTuple):
    name: str
    kind: Any       # one of the functions in KINDS; None: each_alone
    trained: dict   # {its name in the layer: parameter}


def refuse(name, why):
    """End a forward or a backward that would give wrong numbers."""
    raise ValueError(f"{name}: {why}")


def trained_parameters(model):
    return {p: name for name, p in model.named_parameters() if p.requires_grad}


def trained_of(module):
    """{name: parameter} that a module itself trains, also in its lists and dicts, which are never
    called."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for name, child in module.named_children():
        if isinstance(child, LISTS):
            own |= child.named_parameters(name, recurse=False)
    return {name: p for name, p in own.items() if p.requires_grad}


def trained_layers(model, num_rows):
    """{module: Layer} of those with trained parameters. ValueError for what the tape cannot do."""
    layers = {}
    for name, module in model.named_modules():
        trained = trained_of(module)
        if not trained or isinstance(module, LISTS):
            continue
        layer = layers[module] = Layer(name or "model", kind_of(module, trained), trained)
        if getattr(module, "max_norm", None) or getattr(module, "scale_grad_by_freq", False):
            refuse(layer.name, f"{module}: max_norm and scale_grad_by_freq change more than a "
                               "row's own gradient: do without, or freeze the layer")
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks or any(p._backward_hooks for p in trained.values()):
            refuse(layer.name, "has a hook, which may change its output or gradient: remove it")
        size = num_rows * max(p.numel() for p in trained.values())
        if layer.kind is None and size > FORMED:
            refuse(layer.name, f"{module} is not in tape.KINDS, so each row's gradient would be "
                               f"formed, {size:,} numbers in all: freeze it, or add it there")
    return layers


# ------------------------------------------------------------------------------------------------
# records, and what is done with outer products


class Record(NamedTuple):
    """A parameter's gradient from one call of its layer: the sum of outer products b_t a_t^T over
    its entries t, which are tokens. An Embedding's matrix has a row for each id, so there the ids
    take the place of b, and the gradient of the output takes the place of a. Where g_i is formed,
    entries are rows, b_t is g_i in a line, and a_t is 1."""
    rows: Tensor    # (m,) the row of each entry
    b: Tensor       # (m, out), or (m, numel); for an Embedding ids (m,) instead of one-hot vectors
    a: Tensor       # (m, in), or 1 (m, 1)
    version: int    # counts changes in place of both


@functools.lru_cache(maxsize=2)
def repeated(rows, times):
    """Cached, so that layers share a tensor, whose rows are looked up once."""
    return rows.repeat_interleave(times)


def record_of(rows, b, a, dtype=None):
    """The Record of those entries whose gradient is not 0, as an outer product in dtype. The others
    add nothing: padding and, in the last block, most of the prompt. Copy only where some are left
    out. On a GPU all are kept, because counting them would wait for it."""
    of_entries = repeated(rows, len(a) // max(1, len(rows)))
    if a.device.type == "cpu":
        g = b if b.is_floating_point() else a
        here = g.any(1).nonzero()[:, 0]
        if len(here) < len(g):
            of_entries, b, a = (x[here] for x in (of_entries, b, a))

    # under autocast a vocabulary head's b, V numbers a token, is the largest record of all, and was
    # computed in half precision anyway
    if dtype and b.is_floating_point() and a.shape[1] > 1:
        b = b.to(dtype)
        a = a.to(dtype)
    return Record(of_entries, b, a, b._version + a._version)


def entries_by_row(rows, everyone):
    """{tensor: [its entries of row 0, of row 1, ..]} for each tensor (m,) in a list. everyone: all
    rows. A GPU is waited for once, however many there are."""
    if not rows:
        return {}
    # sorted by row, a row's entries are a slice
    ordered = [x.sort(stable=True) for x in rows]
    starts = torch.stack([torch.searchsorted(x.values, everyone) for x in ordered])
    ends = torch.stack([torch.searchsorted(x.values, everyone, right=True) for x in ordered])
    counts = (ends - starts).tolist()
    return {x: order.indices.split(n) for x, order, n in zip(rows, ordered, counts)}


def matrix_of(p, a):
    """p (out, in), or (numel, 1) where a, from a Record of it, says that g_i is formed."""
    return p.view(-1, a.shape[1])


def add_outer(total, b, a):
    """total += the sum of b_t a_t^T."""
    total = matrix_of(total, a)
    if not b.is_floating_point():
        total.index_add_(0, b, a.to(total.dtype))
    elif total.dtype == b.dtype:
        total.addmm_(b.T, a)
    else:
        total += b.T @ a


def products(b, a, target):
    """<b_t a_t^T, target> of each entry (m,). target: of the same parameter."""
    target = matrix_of(target, a)
    if not b.is_floating_point():
        x = F.embedding(b, target).mul_(a)
    elif len(target) > target.shape[1]:       # the other way round is smaller: the vocabulary head
        x = (b @ target).mul_(a)
    else:
        x = F.linear(a, target).mul_(b)
    return x.sum(1, dtype=wide(x.dtype))


# ------------------------------------------------------------------------------------------------
# what the hooks call


def in_backward():
    return torch._C._current_graph_task_id() != -1


def in_transform():
    return torch._C._are_functorch_transforms_active()


def observe_gradient(out, callback):
    """callback(gradient of out) when the backward gets there. Return a view of out: whoever
    changes that in place (relu_) leaves the hook where it is."""
    if out.requires_grad:
        out.register_hook(callback)
    else:       # nothing before it is trained: a leaf, whose gradient autograd keeps and adds to
        out.requires_grad_().register_hook(lambda b: callback(b.clone()))
    # not view_as: autograd forbids changing the view of a leaf in place
    return torch.ops.aten._unsafe_view(out, out.shape)


def tensors_in(inputs):
    return [x for x in tree_flatten(inputs)[0] if torch.is_tensor(x)]


def version_of(inputs):
    """Counts changes in place."""
    return sum(x._version for x in tensors_in(inputs))


class Call:
    """One call of a layer, to be recorded when the backward gets to it."""

    def __init__(self, tape, module, inputs, x, out):
        # weak: whoever keeps a loss keeps its hooks, and with them this, but not all records
        self.tape = weakref.proxy(tape)
        self.module = module
        self.layer = tape.layers[module]
        self.shape = tuple(x.shape)
        self.rows = tape.rows_of(module, x, out)    # (k,) of each entry of x's first dimension
        # a layer of a known kind needs x alone, others all their inputs. None: recorded
        self.inputs = x.detach()
        self.out = None
        if self.layer.kind is None:
            self.inputs = tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, inputs)
            if (self.layer.name, self.shape) not in tape.gaps:
                self.out = out.detach().clone()
        self.version = version_of(self.inputs)
        self.dtype = None       # of records, where a layer (model.Head) leaves autocast's
        if torch.is_autocast_enabled(x.device.type):
            self.dtype = torch.get_autocast_dtype(x.device.type)

    def pair(self, name, b):
        """(b, a) of a Record of one of the layer's parameters. b: the gradient of the output."""
        if self.layer.kind is not None:
            if name == "bias":
                return vector(b)
            return self.layer.kind(self.module, self.inputs, b)

        # each row again, alone. At the first call of a shape, is its output what it was?
        try:
            with torch.autocast(b.device.type, self.dtype, enabled=self.dtype is not None):
                g, again = each_alone(self.module, name, self.inputs, b)
        except (RuntimeError, ValueError) as error:
            refuse(self.layer.name, f"cannot be computed for each row alone: {str(error)[:150]}")
        if self.out is not None:
            gap = (again - self.out).norm() / (self.out.norm() + 1e-30)
            self.tape.gaps[self.layer.name, self.shape] = gap.float()       # see check_alone
        return formed(g.flatten(1))

    def record(self, b):
        """b: the gradient of the layer's output."""
        # is this what the layer was given, and not counted yet? Whose is it?
        tape = self.tape
        if self.inputs is None:
            refuse(self.layer.name, "a second backward of the same forward would count twice: add "
                                    "the losses up, or see backward_summed")
        if version_of(self.inputs) != self.version:
            refuse(self.layer.name, "its input was changed in place before the backward")
        if self.rows is None:
            refuse(self.layer.name, f"its input {self.shape} does not tell which of "
                                    f"{len(tape.numbers)} rows is whose. Look positions up as "
                                    "(1, T), wpe(arange(T)[None]); for flattened tokens see "
                                    "Tape.rows")

        # the weights of this layer, one by one
        for name, p in self.layer.trained.items():
            pair = self.pair(name, b)
            if tape.summing:
                _, b_t, a_t, _ = record_of(self.rows, *pair)
                add_outer(tape.sum[p], b_t, a_t)
            else:
                tape.keep(p, record_of(self.rows, *pair, self.dtype))
        if not tape.summing:
            self.inputs = self.out = None
            tape.done = True


# ------------------------------------------------------------------------------------------------
# the tape


AT_ONCE = 2 ** 22   # numbers in the gradients of single rows that are formed before they are used
MIXED = 0.02        # relative difference of outputs that bfloat16 does not explain


class Tape:
    """The backward of some rows, recorded in one or several micro-batches, of any model whose large
    matrices are in layers of KINDS. Rows are numbered 0, 1, .., num_rows - 1.

    Rows are the first dimension of a layer's input; for other layers see `flat` of rows().
    Positions may be looked up once for all, as (1, T): the lookup then returns them for each row.
    Each forward has one backward, and rows() is called before the next forward. The tape forms the
    gradients, so that .grad is None after the block: set p.grad before optimizer.step(). Records
    hold every layer's input and its output's gradient.
    Each process records rows of its own; results cover all processes. all_reduce(tensors) sums
    tensors in place over processes.

    The tape refuses by name what it sees and cannot handle. Only check_exact notices dropout, a
    loss or a model that mixes rows outside its layers, or sorts them and puts them back, hooks on
    all modules of torch, inputs with time first (T, B, C), and relative positions looked up as
    (T, T) where T is the number of rows.
    """

    def __init__(self, model, num_rows, all_reduce=lambda tensors: None):
        self.model = model
        self.num_rows = num_rows
        self.all_reduce = all_reduce
        self.names = trained_parameters(model)
        self.layers = trained_layers(model, num_rows)   # {module: Layer}
        self.device = next(model.parameters()).device
        self.everyone = torch.arange(num_rows, device=self.device)      # rows of a vector's record

        # whose the next forward and backward are: see rows()
        self.numbers = self.everyone[:0]
        self.flat = {}          # {module: numbers (M,) of its tokens' rows}
        self.given = {}         # {module in flat: tokens that it has been given}
        self.done = False       # their backward has begun

        # what they leave
        self.records = {p: [] for p in self.names}      # {parameter: [Record, ..]}
        self.formed = {}        # {parameter: Record of all rows}, of gradients that are formed
        self.summing = False    # in backward_summed
        self.sum = {}           # its gradient

    # before a forward: whose rows are they?

    def check_flat(self):
        for module, count in self.given.items():
            num_owners = len(self.flat[module])
            if count % max(1, num_owners):
                refuse(self.layers[module].name, f"{count} tokens, where rows() has {num_owners}")

    def rows(self, numbers, flat={}):
        """The next forward and backward are of the rows of these numbers (n,).

        flat: {module: owners (M,)} of modules whose input is the tokens of all rows flattened
        (M, ..), at once or in pieces. owners: the index into numbers of each token's row.
        """
        self.check_flat()
        self.numbers = numbers.to(self.device)
        self.flat = {}
        for module, owners in flat.items():
            self.flat |= dict.fromkeys(module.modules(), self.numbers[owners.to(self.device)])
        self.given = dict.fromkeys(self.flat, 0)
        self.done = False

    def rows_of(self, module, x, out):
        """The row of each entry of x's first dimension, and out's: (k,). None: they do not tell."""
        # rows are the first dimension, but where they are flattened
        rows = self.numbers
        if module in self.flat:
            owners = self.flat[module]
            start = self.given[module] % max(1, len(owners))    # 0 where the layer is used again
            rows = owners[start:start + len(x)]
            self.given[module] += len(x)

        # positions of all rows may have been looked up once, as (T,): then T is no number of rows
        is_lookup = isinstance(module, nn.Embedding)
        fits = len(x) == len(out) == len(rows)
        return rows if fits and (x.dim() > 1 or not is_lookup or module in self.flat) else None

    # while a `with` block runs: the hooks

    def check_trained(self):
        for p, name in trained_parameters(self.model).items() ^ self.names.items():
            refuse(name, "frozen or unfrozen after its Tape was made: make a new one")

    def check_recorded(self):
        if len(self.numbers) and not any(self.all_records(p) for p in self.names):
            refuse("Tape", "no backward of its model was seen: was a copy of the model called?")

    def check_alone(self):
        if self.gaps:
            gaps = torch.stack([*self.gaps.values()]).tolist()      # waits for a GPU, once
            for (name, _), gap in zip(self.gaps, gaps):
                if gap > MIXED:
                    refuse(name, f"rows give another output alone, {gap:.0%} apart: it mixes rows "
                                 "or is random. Freeze it, or model.eval()")

    def __enter__(self):
        self.check_trained()
        self.handles = []
        self.gaps = {}      # {(layer's name, shape): relative difference of rows alone}
        for module in self.layers:
            self.handles.append(module.register_forward_pre_hook(self.before_forward))
            self.handles.append(
                module.register_forward_hook(self.after_forward, with_kwargs=True))
        for p, name in self.names.items():      # called where a .grad is to be made
            self.handles.append(p.register_hook(lambda grad, name=name: refuse(
                name, "used outside its layer, or in a compiled model, where the tape cannot see "
                "it")))
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()
        for p in self.names:    # a checkpoint may have ended a layer's forward early
            p.requires_grad_(True)
        if error[0] is None:
            self.check_flat()
            self.check_trained()
            self.check_recorded()
            self.check_alone()

    def before_forward(self, module, inputs):
        """Freeze the weights, so that no .grad is made."""
        if in_backward() and in_transform():    # each_alone
            return
        layer = self.layers[module]
        replaced = any(attrgetter(name)(module) is not p for name, p in layer.trained.items())
        if replaced or in_transform():
            refuse(layer.name, "runs in torch.func (functional_call, vmap, ..) or with other "
                               "weights than its own: call the model itself")
        for p in layer.trained.values():
            p.requires_grad_(False)

    def after_forward(self, module, args, kwargs, out):
        """Keep the input, and have b kept when the backward gets there."""
        if in_backward() and in_transform():    # each_alone
            return out
        layer = self.layers[module]
        for p in layer.trained.values():
            p.requires_grad_(True)
        if not torch.is_grad_enabled():     # no backward will come
            return out
        tensors = tensors_in((args, kwargs))
        if not torch.is_tensor(out) or not tensors or layer.kind and len(tensors) > 1:
            refuse(layer.name, "does not take a tensor, or does not return one")
        if in_backward():
            # a checkpoint repeats this forward. Only a reentrant one asks for b
            return observe_gradient(out, lambda b: refuse(
                layer.name, "computed again in a backward of its own, where its rows are unknown: "
                "set use_reentrant=False"))
        if self.done:
            refuse(layer.name, "a forward after a backward of these rows: call rows() before it")

        # positions (1, T) of all rows: as if each had looked them up
        x = tensors[0]
        k = len(self.numbers)
        is_lookup = isinstance(module, nn.Embedding) and module not in self.flat
        if is_lookup and k > 1 and x.shape[:-1] == (1,):
            x = x.repeat(k, 1)
            out = out.repeat(k, 1, 1)
        return observe_gradient(out, Call(self, module, (args, kwargs), x, out).record)

    def keep(self, p, record):
        """Add a Record of a parameter."""
        is_formed = record.b.is_floating_point() and record.b.shape[1] == p.numel()
        if not is_formed:
            self.records[p].append(record)
            return
        # most parameters are vectors, so each has one record of all rows, to which this one is
        # added: later queries then take one call per vector, not one per micro-batch
        if p not in self.formed:
            g = record.b.new_zeros(self.num_rows, p.numel())
            self.formed[p] = Record(self.everyone, *formed(g), version=0)
        whole = self.formed[p]
        whole.b.index_add_(0, record.rows, record.b * record.a)
        self.formed[p] = whole._replace(version=whole.b._version)

    def all_records(self, p):
        return [*self.records[p], *([self.formed[p]] if p in self.formed else [])]

    # a further loss, of which the sum over rows is enough

    def zeros(self):
        return {p: torch.zeros_like(p) for p in self.names}

    def backward_summed(self, loss):
        """Backward of a further loss of these rows, of which only the sum over rows is kept. Call
        it before the backward that is recorded."""
        self.sum = self.sum or self.zeros()
        self.summing = True
        loss.backward(retain_graph=True)
        self.summing = False

    def summed_gradient(self):
        """The gradient of what went through backward_summed. Call it once: it sums over
        processes."""
        gradient = self.sum or self.zeros()
        self.all_reduce([*gradient.values()])
        return gradient

    # after it: what was recorded

    def read(self, p):
        """(rows, b, a) of each record of a parameter."""
        for rows, b, a, version in self.all_records(p):
            if b._version + a._version != version:
                refuse(self.names[p], "its layer's input, or the gradient of its output, was "
                                      "changed in place after the backward: give the layer a copy")
            yield rows, b, a

    def record_rows(self):
        """The tensors that say whose the records' entries are. Layers share them."""
        return list(dict.fromkeys(
            record.rows for p in self.names for record in self.all_records(p)))

    def gradient(self, weights):
        """sum_i weights_i g_i, for weights (num_rows,). Rows of weight 0 cost nothing, and may hold
        NaN."""
        weights = weights.to(self.device)
        gradient = self.zeros()
        # the entries whose row has a weight, and these weights
        of_entries = {rows: weights[rows, None] for rows in self.record_rows()}     # (m, 1)
        chosen = {rows: w.nonzero()[:, 0] for rows, w in of_entries.items()}
        for p, total in gradient.items():
            for rows, b, a in self.read(p):
                here = chosen[rows]
                w = of_entries[rows]
                if 0 < len(here) < len(rows):
                    b, a, w = b[here], a[here], w[here]
                if len(here):
                    add_outer(total, b, (a * w).to(a.dtype))    # a weight is not rounded to it
        self.all_reduce([*gradient.values()])
        return gradient

    def dot(self, target):
        """<g_i, target> for every row (num_rows,), in float64. target: any gradient."""
        scores = torch.zeros(self.num_rows, dtype=torch.float64, device=self.device)
        for p in self.names:
            for rows, b, a in self.read(p):
                scores.index_add_(0, rows, products(b, a, target[p].to(a.dtype)).double())
        self.all_reduce([scores])
        return scores

    def by_row(self, p, rows, numbers, entries):
        """One parameter's part of g_i for some rows (k,), whose numbers are also given as a list:
        (k, *p.shape). entries: from entries_by_row."""
        if p in self.formed:
            g = self.formed[p].b[rows].view(-1, *p.shape)
        else:
            g = torch.zeros(len(rows), *p.shape, dtype=p.dtype, device=p.device)
        # and outer products, of each row's own tokens
        records = self.records[p]
        for total, number in zip(g, numbers if records else []):
            for of_record, b, a, _ in records:
                here = entries[of_record][number]
                if len(here) > 0:       # a row is in one micro-batch, so most records lack it
                    add_outer(total, b[here], a[here])
        return g

    def squared_norms(self, rows, scale={}):
        """sum of scale * g_i^2 (k,) of some rows, in float64."""
        rows = rows.to(self.device)
        numbers = rows.tolist()
        entries = entries_by_row(self.record_rows(), self.everyone)
        norms = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        for p in self.names:
            if not self.all_records(p):     # p was not used
                continue
            # several rows in a call: on a GPU a call costs more than what it does to a small matrix
            k = max(1, AT_ONCE // p.numel())
            for start in range(0, len(rows), k):
                some = slice(start, start + k)
                g = self.by_row(p, rows[some], numbers[some], entries)
                scaled = g * scale[p] if p in scale else g
                norms[some] += (g * scaled).flatten(1).sum(1)
        self.all_reduce([norms])
        return norms


# ------------------------------------------------------------------------------------------------
# a check


def check_exact(model, loss_of, rows, flat={}, tolerance=0.01):
    """Raise ValueError unless, for the three rows of largest gradient, the tape's gradient is the
    one that autograd gives for that row alone, parameter by parameter. loss_of(rows) -> (): the sum
    of their losses. flat: see Tape.rows."""
    # all rows together, on a tape
    n = len(rows)
    with Tape(model, n) as tape:
        tape.rows(torch.arange(n), flat)
        loss_of(rows).backward()
    norms = tape.squared_norms(torch.arange(n))
    for i in (~norms.isfinite()).nonzero()[:, 0].tolist():
        refuse("check_exact", f"row {i} has a gradient that is not finite")
    if n < 2 or not norms.max() > 0:
        refuse("check_exact", "give two rows or more, one of them with a gradient")

    # each of the largest beside a backward of its own
    for i in norms.topk(min(n, 3)).indices.tolist():
        among = tape.gradient(torch.arange(n) == i)
        alone = torch.autograd.grad(loss_of(rows[i:i + 1]), list(among), materialize_grads=True)
        floor = 1e-3 * norms[i].sqrt() + 1e-30      # what is far below the rest is rounding
        for (p, g), h in zip(among.items(), alone):
            error = float((g - h).norm() / (h.norm() + floor))
            if not error < tolerance:
                refuse(tape.names[p],
                       f"row {i}'s gradient among {n} rows differs from its gradient alone by "
                       f"{error:.0%}: give the sum of the rows' losses, not a mean; rows must not "
                       "mix, and nothing may be random (Dropout: model.eval())")
