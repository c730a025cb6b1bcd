"""
Gradients of every row of a batch, exact on the whole model, from one backward pass.

    check_exact(model, loss_of, torch.arange(n))    # once for a model and a loss
    with Tape(model, n) as tape:
        for numbers in torch.arange(n).split(8):
            tape.next_rows(numbers)
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
    t       any gradient of that weight, such as the target's
then, summed over tokens,
    Linear      g_i = b_i^T a_i     so <g_i, t> = b_i . (t a_i), and g_i need not be formed
    Embedding   the same, if a_i are one-hot vectors: b_i is added to the embeddings of these ids
    vectors     (biases, weights of norms) g_i is smaller than b_i, and is formed at once
    the rest    (norms, factors, tables of positions of your model) likewise, by autograd on each
                row alone: the layer is computed again
A matrix that is embedding and head (tied) has g_i = g_embedding + g_head, each against the same t.

Hooks see a and b, so any model works unchanged. A forward hook keeps a layer's input and puts a
hook on its output, which keeps b when the backward gets there. Weights are frozen while their layer
runs, since the tape forms their gradients itself: autograd then skips a third of the work. A weight
that still gets a gradient was used somewhere else, where the tape cannot see it, and is refused.

The file needs only torch, and works on your own models. A gradient is {parameter: tensor}.
"""
import functools
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
# what is stored of a parameter's gradient: outer products, or a gradient for each row


class Record(NamedTuple):
    """The gradient of a matrix from one call of its layer: the sum of outer products b_t a_t^T over
    entries t, which are tokens. An Embedding's matrix has a row for each id, so there an id stands
    for the one-hot b_t, and a_t is the gradient of the output."""
    owners: Tensor  # (m,) the row whose entry it is
    b: Tensor       # (m, out), or ids (m,)
    a: Tensor       # (m, in)
    version: int    # counts changes in place of both


@functools.lru_cache(maxsize=2)
def repeated(owners, times):
    """Cached, so that layers share a tensor, which is then searched once for all of them."""
    return owners.repeat_interleave(times)


def record_of(owners, b, a, dtype):
    """The Record of those entries whose gradient is not 0, in dtype. The rest adds nothing: padding
    and, in the last block, most of the prompt."""
    owners = repeated(owners, len(a) // max(1, len(owners)))
    if a.device.type == "cpu":      # a GPU would have to be waited for
        g = b if b.is_floating_point() else a
        some = g.any(1).nonzero()[:, 0]
        if len(some) < len(g):
            owners, b, a = owners[some], b[some], a[some]

    # under autocast a vocabulary head's b, V numbers a token, is the largest record of all, and was
    # computed in half precision anyway
    if dtype and b.is_floating_point():
        b = b.to(dtype)
        a = a.to(dtype)
    return Record(owners, b, a, b._version + a._version)


def add_outer(total, b, a):
    """total += the sum of b_t a_t^T."""
    if not b.is_floating_point():
        total.index_add_(0, b, a.to(total.dtype))
    elif total.dtype == b.dtype:
        total.addmm_(b.T, a)
    else:
        total += b.T @ a


def wide(dtype):
    """The type in which sums of such numbers are taken."""
    return torch.promote_types(dtype, torch.float32)


def products(b, a, target):
    """<b_t a_t^T, target> of each entry (m,). target: of the same parameter."""
    if not b.is_floating_point():
        x = F.embedding(b, target).mul_(a)
    elif len(target) > target.shape[1]:       # the smaller product: for the vocabulary head
        x = (b @ target).mul_(a)
    else:
        x = F.linear(a, target).mul_(b)
    return x.sum(1, dtype=wide(x.dtype))


def entries_by_row(all_owners, everyone):
    """{owners: [the entries of row 0, of row 1, ..]} for each tensor owners (m,) in a list.
    everyone: all rows. A GPU is waited for once, however many there are."""
    if not all_owners:
        return {}
    # sorted by row, a row's entries are a slice
    ordered = [owners.sort(stable=True) for owners in all_owners]
    starts = torch.stack([torch.searchsorted(x.values, everyone) for x in ordered])
    ends = torch.stack([torch.searchsorted(x.values, everyone, right=True) for x in ordered])
    counts = (ends - starts).tolist()
    return {owners: x.indices.split(n) for owners, x, n in zip(all_owners, ordered, counts)}


# ------------------------------------------------------------------------------------------------
# the kinds of layers. From the layer's input x and the gradient b of its output, each returns its
# weight's part: the pair (b, a) of a Record, or the gradient for each row (k, numel)


def linear(module, x, b):
    return b.flatten(0, -2), x.to(b.dtype).flatten(0, -2)   # autocast computes in b's type


def transposed(module, x, b):
    """A Linear whose matrix is (in, out)."""
    return linear(module, x, b)[::-1]


def embedding(module, x, b):
    padding = getattr(module, "padding_idx", None)
    if padding is not None:     # PyTorch does not train the embedding of this id
        b = b.masked_fill((x == padding)[..., None], 0)
    return x.flatten(), b.flatten(0, -2)    # ids stand for b


def over_tokens(b):
    """(k, C) from numbers by token (k, .., C)."""
    return b[:, None].flatten(1, -2).sum(1, dtype=wide(b.dtype))


def norm(module, x, b):
    normalise = F.rms_norm if isinstance(module, nn.RMSNorm) else F.layer_norm
    return over_tokens(b * normalise(x.to(wide(b.dtype)), module.normalized_shape, eps=module.eps))


# to add a kind of layer, write a function like these
KINDS = {nn.Linear: linear, nn.Embedding: embedding, nn.LayerNorm: norm, nn.RMSNorm: norm,
         "transformers.pytorch_utils.Conv1D": transposed}


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


# ------------------------------------------------------------------------------------------------
# the layers of a model


def refuse(name, why):
    """End a forward or a backward that would give wrong numbers."""
    raise ValueError(f"{name}: {why}")


class Layer(NamedTuple):
    name: str
    kind: Any       # one of the functions in KINDS; None: each_alone
    trained: dict   # {its name in the layer: parameter}


LISTS = (nn.ParameterList, nn.ParameterDict)    # modules that are never called


def trained_of(module):
    """{name: parameter} that a module itself trains, also in its lists and dicts."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for name, child in module.named_children():
        if isinstance(child, LISTS):
            own |= child.named_parameters(name, recurse=False)
    return {name: p for name, p in own.items() if p.requires_grad}


LARGEST = 2 ** 27   # numbers in the gradients of all rows of one parameter, by each_alone: 0.5 GB


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
        if layer.kind is None and size > LARGEST:
            refuse(layer.name, f"{module} is not in tape.KINDS, so each row's gradient would be "
                               f"formed, {size:,} numbers in all: freeze it, or add it there")
    return layers


def trained_parameters(model):
    return {p: name for name, p in model.named_parameters() if p.requires_grad}


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
        self.tape = tape
        self.module = module
        self.layer = tape.layers[module]
        self.shape = tuple(x.shape)
        self.owners = tape.owners_of(module, x, out)    # (k,) of each entry of x's first dimension
        # a layer in KINDS needs x alone, any other all its inputs. None: recorded
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

    def part_of(self, name, b):
        """What the call leaves of one of the layer's parameters: see KINDS. b: the gradient of the
        output."""
        if self.layer.kind is not None:
            if name == "bias":
                return over_tokens(b)
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
        return g.flatten(1)

    def record(self, b):
        """b: the gradient of the layer's output."""
        # is this what the layer was given, and not counted yet? Whose is it?
        tape = self.tape
        if self.inputs is None:
            refuse(self.layer.name, "a second backward of the same forward would count twice: add "
                                    "the losses up, or see backward_summed")
        if version_of(self.inputs) != self.version:
            refuse(self.layer.name, "its input was changed in place before the backward")
        if self.owners is None:
            refuse(self.layer.name, f"its input {self.shape} does not tell which of "
                                    f"{len(tape.numbers)} rows is whose. Look positions up as "
                                    "(1, T), wpe(arange(T)[None]); for flattened tokens see "
                                    "Tape.next_rows")

        # the parameters of this layer, one by one
        for name, p in self.layer.trained.items():
            tape.keep(p, self.owners, self.part_of(name, b), self.dtype)
        if not tape.summing:
            self.inputs = self.out = None
            tape.done = True


# ------------------------------------------------------------------------------------------------
# the tape


class Tape:
    """The backward of some rows, recorded in one or several micro-batches, of any model whose large
    matrices are in layers of KINDS. Rows are numbered 0, 1, .., num_rows - 1.

    What a model must do: rows are the first dimension of a layer's input; for flattened ones see
    `flat` of next_rows(). Positions may be looked up once for all, as (1, T).

    How it is used: call next_rows() before each forward, and one backward after it. Set p.grad
    before optimizer.step(): the tape forms the gradients, so .grad is None after the block. It
    holds every layer's input and its output's gradient.

    With several processes each records rows of its own, and results cover all of them.
    all_reduce(tensors) sums tensors in place over processes.

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

        # whose the next forward and backward are: see next_rows()
        self.numbers = torch.arange(0, device=self.device)
        self.flat = {}          # {module: numbers (M,) of its tokens' rows}
        self.given = {}         # {module in flat: tokens that it has been given}
        self.done = False       # their backward has begun

        # what they leave
        self.records = {p: [] for p in self.names}      # {parameter: [Record, ..]}
        self.by_row = {}        # {parameter: (num_rows, numel) the rest of each row's gradient}
        self.summing = False    # in backward_summed
        self.sum = {}           # its gradient

    # before a forward: whose rows are they?

    def check_flat(self):
        for module, count in self.given.items():
            num_owners = len(self.flat[module])
            if count % max(1, num_owners):
                refuse(self.layers[module].name,
                       f"{count} tokens, where next_rows() has {num_owners}")

    def next_rows(self, numbers, flat=None):
        """The next forward and backward are of the rows of these numbers (n,).

        flat: {module: owners (M,)} of modules whose input is the tokens of all rows flattened
        (M, ..), at once or in pieces. owners: the index into numbers of each token's row.
        """
        self.check_flat()
        self.numbers = numbers.to(self.device)
        self.flat = {}
        for module, owners in (flat or {}).items():
            self.flat |= dict.fromkeys(module.modules(), self.numbers[owners.to(self.device)])
        self.given = dict.fromkeys(self.flat, 0)
        self.done = False

    def is_lookup(self, module):
        return isinstance(module, nn.Embedding) and module not in self.flat

    def owners_of(self, module, x, out):
        """The row of each entry of x's first dimension, and out's: (k,). None: they do not tell."""
        # rows are the first dimension, but where they are flattened
        owners = self.numbers
        if module in self.flat:
            owners = self.flat[module]
            start = self.given[module] % max(1, len(owners))    # 0 where the layer is used again
            owners = owners[start:start + len(x)]
            self.given[module] += len(x)

        # positions of all rows may have been looked up once, as (T,): T does not count rows
        fits = len(x) == len(out) == len(owners)
        return owners if fits and (x.dim() > 1 or not self.is_lookup(module)) else None

    # while a `with` block runs: the hooks

    def check_trained(self):
        for p, name in trained_parameters(self.model).items() ^ self.names.items():
            refuse(name, "frozen or unfrozen after its Tape was made: make a new one")

    def check_recorded(self):
        if len(self.numbers) and not self.by_row and not any(self.records.values()):
            refuse("Tape", "no backward of its model was seen: was a copy of the model called?")

    def check_alone(self):
        if self.gaps:
            gaps = torch.stack([*self.gaps.values()]).tolist()      # waits for a GPU, once
            for (name, _), gap in zip(self.gaps, gaps):
                if gap > 0.02:      # bfloat16 does not explain it
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
        if not torch.is_tensor(out) or not tensors:
            refuse(layer.name, "does not take a tensor, or does not return one")
        if layer.kind is not None and len(tensors) > 1:
            refuse(layer.name, "takes two tensors, and its kind knows one: set its kind to None")
        if in_backward():
            # a checkpoint repeats this forward. Only a reentrant one asks for b
            return observe_gradient(out, lambda b: refuse(
                layer.name, "computed again in a backward of its own, where its rows are unknown: "
                "set use_reentrant=False"))
        if self.done:
            refuse(layer.name,
                   "a forward after a backward of these rows: call next_rows() before it")

        # positions (1, T) of all rows: as if each had looked them up
        x = tensors[0]
        k = len(self.numbers)
        if self.is_lookup(module) and k > 1 and x.shape[:-1] == (1,):
            x = x.repeat(k, 1)
            out = out.repeat(k, 1, 1)
        return observe_gradient(out, Call(self, module, (args, kwargs), x, out).record)

    def keep(self, p, owners, part, dtype):
        """Keep what a call leaves of a parameter: the pair (b, a) of a Record, to be kept in dtype;
        or the gradient by row (k, numel), whose row is in owners (k,)."""
        if isinstance(part, tuple):
            record = record_of(owners, *part, None if self.summing else dtype)
            if self.summing:
                add_outer(self.sum[p], record.b, record.a)
            else:
                self.records[p].append(record)
        elif self.summing:
            add_outer(self.sum[p].view(-1, 1), part, torch.ones_like(part[:, :1]))
        else:
            # most parameters are vectors: one tensor for each of them, to which every call is
            # added, so that queries need one operation, not one per micro-batch
            if p not in self.by_row:
                self.by_row[p] = part.new_zeros(self.num_rows, p.numel())
            self.by_row[p].index_add_(0, owners, part)

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
        """Sum over processes what went through backward_summed -> its gradient. Call it once."""
        gradient = self.sum or self.zeros()
        self.all_reduce([*gradient.values()])
        return gradient

    # after it: what was recorded

    def read(self, p):
        """(owners, b, a) of each Record of a parameter."""
        for owners, b, a, version in self.records[p]:
            if b._version + a._version != version:
                refuse(self.names[p], "its layer's input, or the gradient of its output, was "
                                      "changed in place after the backward: give the layer a copy")
            yield owners, b, a

    def all_owners(self):
        """The tensors that say whose the records' entries are. Layers share them."""
        return list(dict.fromkeys(
            record.owners for records in self.records.values() for record in records))

    def gradient(self, weights):
        """sum_i weights_i g_i, for weights (num_rows,). Rows of weight 0 cost nothing, and may hold
        NaN."""
        # the rows and entries that have a weight
        weights = weights.to(self.device)
        rows = weights.nonzero()[:, 0]
        of_entries = {owners: weights[owners, None] for owners in self.all_owners()}    # (m, 1)
        chosen = {owners: w.nonzero()[:, 0] for owners, w in of_entries.items()}
        gradient = self.zeros()
        for p, total in gradient.items():
            for owners, b, a in self.read(p):
                some = chosen[owners]
                w = of_entries[owners]
                if 0 < len(some) < len(owners):
                    b, a, w = b[some], a[some], w[some]
                if len(some):
                    add_outer(total, b, (a * w).to(a.dtype))    # a weight is not rounded to it
            if p in self.by_row:
                g = self.by_row[p][rows]
                add_outer(total.view(-1, 1), g, weights[rows, None].to(g.dtype))
        self.all_reduce([*gradient.values()])
        return gradient

    def dot(self, target):
        """<g_i, target> for every row (num_rows,), in float64. target: any gradient."""
        scores = torch.zeros(self.num_rows, dtype=torch.float64, device=self.device)
        for p in self.names:
            for owners, b, a in self.read(p):
                scores.index_add_(0, owners, products(b, a, target[p].to(a.dtype)).double())
            if p in self.by_row:
                g = self.by_row[p]
                scores += (g @ target[p].to(g.dtype).view(-1, 1))[:, 0]
        self.all_reduce([scores])
        return scores

    def gradients_of_rows(self, p, rows, numbers, entries):
        """One parameter's part of g_i for some rows (k,), whose numbers are also given as a list:
        (k, *p.shape). entries: from entries_by_row."""
        if p in self.by_row:
            g = self.by_row[p][rows].view(-1, *p.shape)
        else:
            g = torch.zeros(len(rows), *p.shape, dtype=p.dtype, device=p.device)
        # and outer products, of each row's own tokens
        records = self.records[p]
        for total, number in zip(g, numbers if records else []):
            for owners, b, a, _ in records:
                own = entries[owners][number]
                if len(own) > 0:        # a row is in one micro-batch, so most records lack it
                    add_outer(total, b[own], a[own])
        return g

    AT_ONCE = 2 ** 22   # numbers of g_i that squared_norms forms at once

    def squared_norms(self, rows, scale=None):
        """sum of scale * g_i^2 (k,) of some rows, in float64."""
        rows = rows.to(self.device)
        numbers = rows.tolist()
        scale = scale or {}
        everyone = torch.arange(self.num_rows, device=self.device)
        entries = entries_by_row(self.all_owners(), everyone)
        norms = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        for p in self.names:
            if not self.records[p] and p not in self.by_row:    # p was not used
                continue
            # several rows in a call: on a GPU a call costs more than what it does to a small matrix
            k = max(1, self.AT_ONCE // p.numel())
            for start in range(0, len(rows), k):
                piece = slice(start, start + k)
                g = self.gradients_of_rows(p, rows[piece], numbers[piece], entries)
                scaled = g * scale[p] if p in scale else g
                norms[piece] += (g * scaled).flatten(1).sum(1)
        self.all_reduce([norms])
        return norms


# ------------------------------------------------------------------------------------------------
# a check


def check_exact(model, loss_of, rows, flat=None, tolerance=0.01):
    """Raise ValueError unless, for the three rows of largest gradient, the tape's gradient is the
    one that autograd gives for that row alone, parameter by parameter. loss_of(rows) -> (): the sum
    of their losses. flat: see Tape.next_rows."""
    # all rows together, on a tape
    n = len(rows)
    with Tape(model, n) as tape:
        tape.next_rows(torch.arange(n), flat)
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
