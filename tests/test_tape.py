"""
tape.Tape against one autograd backward per row: alone, without padding, in float64, and sharing no
code with it.

J (n, P) holds the gradient of every row, one line each, so that what a tape answers is linear
algebra: w @ J and J @ G.
"""
import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from common.device import autocast
from tape import Tape, check_exact, inner
from worlds import (
    assert_close, generator_of, gradient, random_gpt, random_ids, refusal, shaken, with_lora)

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
ALL = torch.ones(8)
PARTS = [torch.tensor(rows) for rows in ([5, 2, 7], [0], [6, 3, 1, 4])]     # micro-batches


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=generator_of(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------------
# cases: a model, the losses of some of its eight rows, the loss of a row alone, what is flattened

TOKENS = random_ids(8, 9, 19)
PRESENT = torch.arange(9) >= torch.tensor([[7], [0], [5], [3], [6], [0], [4], [2]])
WITH_LOSS = torch.arange(9) >= torch.tensor([[8], [2], [7], [7], [6], [5], [8], [4]])


def text_case(model):
    """Texts padded on the left. The head is given the tokens with loss, flattened, in pieces."""
    def losses(rows):
        h = model(TOKENS[rows], PRESENT[rows])
        owner, t = WITH_LOSS[rows].nonzero().T
        logits = torch.cat([model.lm_head(piece) for piece in h[owner, t].split(4)])
        return logits.new_zeros(len(rows)).index_add(0, owner, logits.sin().sum(1))

    def alone(i):
        h = model(TOKENS[i, PRESENT[i]][None])[0, -WITH_LOSS[i].sum():]
        return (h @ model.lm_head.weight.T).sin().sum()

    def flat(rows):
        return {model.lm_head: WITH_LOSS[rows].nonzero()[:, 0]}

    return SimpleNamespace(model=model, losses=losses, alone=alone, flat=flat)


class Odd(nn.Module):
    """What models by others do: an id that pads; layers that are used again, change their outputs
    in place, have no bias or a frozen one or their weight as bias, are not used; residuals and
    positions that are added in place; hooks."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(19, 6, padding_idx=int(TOKENS[0, 0]))
        self.wpe = nn.Embedding(9, 6)
        self.again = nn.Linear(6, 6)
        self.up = nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6, eps=0.2)
        self.norm.bias = self.norm.weight
        self.rms = nn.RMSNorm(6)
        self.down = nn.Linear(6, 2)
        self.idle = nn.Linear(2, 3)
        self.down.bias.requires_grad_(False)

    def forward(self, x):
        h = self.wte(x)
        h += self.wpe(torch.arange(9).expand(x.shape))
        for _ in range(2):
            h = h + self.again(h.tanh()).relu_()
        up = self.up(h)
        up[:, 1:] *= 2
        up.register_hook(lambda b: 3 * b)
        normed = self.norm(up).sigmoid_()
        return self.down(normed.tanh()).mul_(3) + self.rms(up).sin_().sum(-1, keepdim=True)


def odd_case():
    model = shaken(Odd().double())
    return SimpleNamespace(
        model=model, flat=lambda rows: {}, alone=lambda i: model(TOKENS[[i]]).sin().sum(),
        losses=lambda rows: model(TOKENS[rows]).sin().sum((1, 2)))


class OnePlus(nn.Module):
    """A norm with a factor 1 + weight, as Gemma has."""

    def __init__(self, C):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(C))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt() * (1 + self.weight)


class Bent(nn.Module):
    """Not linear in its parameters; given more than one tensor, by keyword."""

    def __init__(self, C):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(C))
        self.mix = nn.Parameter(torch.ones(3, C, C))

    def forward(self, x, *, gate, scale):
        return (x * self.factor).tanh() + scale * gate * (x @ self.mix.square().sum(0))


class Conv1D(nn.Module):
    """That of transformers: a Linear whose matrix is (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


class Factors(nn.Module):
    """A frozen layer whose outputs are scaled by a parameter in a dict, as PEFT's IA3 has them."""

    def __init__(self, C):
        super().__init__()
        self.base = nn.Linear(C, C).requires_grad_(False)
        self.scales = nn.ParameterDict({"default": nn.Parameter(torch.ones(C, 1))})

    def forward(self, x):
        return self.base(x) * self.scales["default"].T


class Magnitude(nn.Module):
    """Scales its neighbour's matrix, whose size it learns by giving it an identity, as PEFT's DoRA
    does: no row is in that."""

    def __init__(self, C):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x, *, layer):
        size = layer(torch.eye(x.shape[-1], dtype=x.dtype)).detach().norm(dim=0)
        return layer(x) * self.weight / size


class Theirs(nn.Module):
    """Layers of kinds that the tape does not know. A table of positions belongs to the model."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(19, 6)
        self.wpe = nn.Embedding(9, 6)
        self.table = nn.Parameter(torch.zeros(1, 9, 6))
        self.norm = OnePlus(6)
        self.head_norm = OnePlus(3)
        self.shared = nn.LayerNorm((9, 6))
        self.shared.bias = self.shared.weight
        self.bent = Bent(6)
        self.c_fc = Conv1D(6, 6)
        self.factors = Factors(6)
        self.layer = nn.Linear(6, 6, bias=False)
        self.magnitude = Magnitude(6)
        self.conv = nn.Conv1d(9, 4, 3)

    def forward(self, x):
        h = self.wte(x) + self.wpe(torch.arange(9)[None]) + self.table
        heads = self.head_norm(h.view(-1, 9, 2, 3))                     # one call for all heads
        h = self.norm(heads.flatten(2)).sin_()
        h = self.shared(self.bent(h, gate=h.sigmoid(), scale=torch.tensor(0.5)))
        h = h + self.factors(self.c_fc(h))
        return self.conv(h + self.magnitude(h, layer=self.layer))


def theirs_case():
    model = shaken(Theirs().double())
    return SimpleNamespace(
        model=model, flat=lambda rows: {}, alone=lambda i: model(TOKENS[[i]]).sin().sum(),
        losses=lambda rows: model(TOKENS[rows]).sin().sum((1, 2)))


def gpt(**shape):
    return random_gpt(19, **dict(block_size=16, n_head=2, n_embd=8) | shape).double()


def checkpointed(model):
    for block in model.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


LLAMA = dict(rms=True, swiglu=True, rope_base=100.0, n_kv_head=1, n_inner=6, bias=False)
QWEN3 = LLAMA | dict(head_dim=6, qk_norm=True)
NEO = dict(qkv_bias=False, attn_scale=1.0, window=2, local_layers=(1,))
CASES = {
    "gpt, tied": lambda: text_case(gpt()),
    "llama": lambda: text_case(gpt(**LLAMA, tied=False)),
    "qwen3, blocks computed again": lambda: text_case(checkpointed(gpt(**QWEN3))),
    "gpt-neo, lora": lambda: text_case(with_lora(gpt(**NEO)).double()),
    "odd": odd_case,
    "layers of other kinds": theirs_case}


def record(case):
    """A tape of the case."""
    with Tape(case.model, 8) as tape:
        for rows in PARTS:
            tape.next_rows(rows, case.flat(rows))
            case.losses(rows).sum().backward()
    return tape


def taped(model, backward, n=8, flat={}):
    """A tape of n rows. backward() calls the model, and .backward() of what it gives."""
    with Tape(model, n) as tape:
        tape.next_rows(torch.arange(n), flat)
        backward()
    return tape


def rows_of(case):
    """J (8, P)."""
    trained = [p for p in case.model.parameters() if p.requires_grad]
    return torch.stack([gradient(case.alone(i), trained) for i in range(8)])


def two_layers():
    return shaken(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double())


def flat(G):
    return torch.cat([g.flatten() for g in G.values()])


agree = functools.partial(assert_close, tolerance=1e-10)


# ------------------------------------------------------------------------------------------------
# what it answers

@pytest.mark.parametrize("name", CASES)
def test_a_tape_is_one_backward_per_row(name, monkeypatch):
    """Whatever the order of the rows, of which each micro-batch has some."""
    case = CASES[name]()
    J = rows_of(case)
    before = {name: x.clone() for name, x in case.model.state_dict().items()}
    was_trained = [p.requires_grad for p in case.model.parameters()]
    tape = record(case)

    for w in (ALL, noise(8), noise(8).relu(), *torch.eye(8)):
        agree(flat(tape.gradient(w)), w.double() @ J, "the weighted gradient of the rows")
    G = {p: noise(*p.shape) for p in tape.names}
    agree(tape.dot(G), J @ flat(G), "influences on a gradient")
    rows = torch.tensor([1, 6, 3])
    agree(tape.squared_norms(rows), J[rows].square().sum(1), "squared norms of rows")
    scale = {p: g.square() for p, g in G.items()}
    scaled = J[rows].square() @ flat(scale)
    agree(tape.squared_norms(rows, scale), scaled, "the same, scaled by weight")
    monkeypatch.setattr(Tape, "AT_ONCE", 100)
    everyone = torch.arange(8)
    agree(tape.squared_norms(everyone), J.square().sum(1), "squared norms, a few rows at a time")

    assert all(p.grad is None for p in case.model.parameters()), "recording leaves nothing behind"
    assert all(torch.equal(x, before[name]) for name, x in case.model.state_dict().items())
    assert [p.requires_grad for p in case.model.parameters()] == was_trained


def test_a_row_of_weight_0_cannot_poison():
    """Its gradient may be infinite or not a number: what is not wanted has no part in the sum."""
    model, x = two_layers(), noise(8, 5)
    x[3, 2] = torch.nan
    w = ALL.index_fill(0, torch.tensor(3), 0)
    tape = taped(model, lambda: model(x).sin().sum().backward())
    assert flat(tape.gradient(w)).isfinite().all()


class Float32Head(nn.Linear):
    """Leaves autocast, as model.Head does on a GPU."""
    kind = nn.Linear

    def forward(self, h):
        with torch.autocast("cpu", enabled=False):
            return super().forward(h.float())


def test_bfloat16_rounds_no_weight_and_halves_the_largest_record():
    model = shaken(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Float32Head(8, 40, bias=False)))
    x = noise(8, 50, 6).float()         # many tokens: rounding of their own averages out

    def backward():
        model(x).log_softmax(-1)[..., 0].sum().backward()

    exact = taped(model, backward)
    with autocast("cpu", torch.bfloat16):
        rough = taped(model, backward)
    record, = rough.records[model[2].weight]
    assert record.b.dtype == record.a.dtype == torch.bfloat16, "the head's record is in float32"
    G = exact.gradient(ALL)
    agree(rough.dot(G), exact.dot(G), "influences in bfloat16", tolerance=0.05)
    whole = rough.gradient(ALL)
    agree(flat(whole), flat(G), "the gradient in bfloat16", tolerance=0.03)
    share = inner(rough.gradient(1.0038 * ALL), whole) / inner(whole, whole)
    # the nearest number of bfloat16 is 1. What is rounded is each product, up or down by 0.0039
    assert float(share) == pytest.approx(1.0038, abs=2.5e-3), "bfloat16 has made 1 of 1.0038"


class Count(TorchDispatchMode):
    """How many operations of torch a block calls: what a GPU takes its time for."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls += 1
        return op(*args, **(kwargs or {}))


def test_the_calls_for_a_row_do_not_grow_with_the_micro_batches():
    """A row is in one of them: nothing is to be called for the others, nor for each vector."""
    model = nn.Sequential(*[nn.LayerNorm(5) for _ in range(20)], nn.Linear(5, 5)).double()
    x = noise(64, 3, 5)

    def calls(size):
        with Tape(model, 64) as tape:
            for rows in torch.arange(64).split(size):
                tape.next_rows(rows)
                model(x[rows]).sin().sum().backward()
        with Count() as count:
            tape.squared_norms(torch.arange(64))
        return count.calls

    few, many = calls(32), calls(4)
    # left: entries_by_row looks each micro-batch through
    assert many < few + 20 * 16, f"{many} calls for 16 micro-batches, {few} for 2"
    assert few < 64 * 10 + 42 * 20, f"{few} calls for 64 rows of a matrix and 41 vectors"


# ------------------------------------------------------------------------------------------------
# what it refuses, by the name of the layer

def hooked():
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, inputs, out: 3 * out)
    return layer


def hooked_bias():
    layer = nn.Linear(3, 3)
    layer.bias.register_hook(lambda g: 3 * g)
    return layer


@pytest.mark.parametrize("make", [
    hooked_bias,
    lambda: type("Sub", (nn.Linear,), {})(2 ** 14, 2 ** 13),
    lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), lambda: nn.Embedding(4, 3, max_norm=1.0),
    hooked])
def test_a_layer_that_it_cannot_handle_is_named(make):
    model = nn.ModuleDict({"inner": nn.Sequential(make(), nn.Linear(3, 3))})
    assert "inner.0" in refusal(Tape, model, 2)
    assert Tape(model.requires_grad_(False), 2).names == {}     # frozen, it may be anything


def two_backwards(model, x):
    """Every layer between would be counted twice."""
    loss = model(x).sin().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def other_weights(model):
    return {name: p.detach() + 1 for name, p in model.named_parameters()}


# what is done: what the line names, and how it is done
NOT_SEEN = {
    "a weight is used outside its layer": (
        "2.weight", lambda model, x: (model(x) @ model[2].weight).sum().backward()),
    "a second backward": ("2: ", two_backwards),
    "a call with other weights": (
        "torch.func", lambda model, x: torch.func.functional_call(model, other_weights(model), x)),
    "a vmap": ("torch.func", lambda model, x: torch.vmap(model)(x)),
    "layers that run in the backward for the first time": (
        "use_reentrant",
        lambda model, x: checkpoint(model, x, use_reentrant=True).sum().backward()),
    "a weight is unfrozen": ("2.bias", lambda model, x: model[2].bias.requires_grad_(True))}


@pytest.mark.parametrize("what", NOT_SEEN)
def test_what_it_cannot_see_is_named(what):
    name, act = NOT_SEEN[what]
    model, x = two_layers(), noise(8, 5).requires_grad_()
    model[2].bias.requires_grad_(what != "a weight is unfrozen")
    assert name in refusal(taped, model, lambda: act(model, x))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


class Centred(OnePlus):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Noisy(OnePlus):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


class Pair(OnePlus):
    def forward(self, x):
        return super().forward(x), x


class NumberOf(OnePlus):
    def forward(self, x):
        return super().forward(x) * x.detach().sum().item()


@pytest.mark.parametrize("layer, why", [
    (Centred(5), "mixes"), (nn.BatchNorm1d(5), "alone"), (Noisy(5), "random"), (Pair(5), "return"),
    (NumberOf(5), "alone")])
def test_a_layer_that_does_not_go_by_row_is_named(layer, why):
    """Or one whose rows autograd cannot be asked about. What changes its output in place (ReLU)
    hides nothing."""
    model = nn.Sequential(nn.Linear(5, 5), layer.double(), nn.ReLU(inplace=True)).double()
    message = refusal(taped, model, lambda: model(noise(8, 5)).sin().sum().backward())
    assert message.startswith("1: ") and why in message


class Mixer(OnePlus):
    """Weighs tokens by a matrix (T, T), which is nobody's."""

    def forward(self, x, matrix):
        return super().forward(matrix @ x)


def test_a_matrix_that_looks_like_rows_is_named_wherever_it_comes():
    """Five rows of five tokens, after three: a row would be given its own line of the matrix."""
    model, x = Mixer(4).double(), noise(8, 5, 4)
    matrix = noise(5, 5, seed=1)

    def record(*parts):
        with Tape(model, 8) as tape:
            for rows in parts:
                tape.next_rows(rows)
                model(x[rows], matrix).sin().sum().backward()
        return tape

    rows = torch.arange(8)
    expected = [gradient(model(x[i:i + 1], matrix).sin().sum(), [model.weight]) for i in rows]
    found = record(*rows.split(4)).squared_norms(rows)
    agree(found, torch.stack(expected).square().sum(1), "squared norms")
    assert "alone" in refusal(record, rows[:3], rows[3:])


def test_a_second_forward_needs_rows_of_its_own():
    """Else rows of the second micro-batch would count for those of the first."""
    model, x = two_layers(), noise(8, 5)

    def backward():
        model(x).sum().backward()

    assert "next_rows()" in refusal(taped, model, lambda: [backward(), backward()])


def test_a_tape_that_saw_nothing_does_not_answer_0():
    model, x = two_layers(), noise(8, 5)
    twin = copy.deepcopy(model)
    assert "copy" in refusal(taped, model, lambda: twin(x).sum().backward())


def test_a_layer_frozen_before_the_block_is_named():
    model = two_layers()
    tape = Tape(model, 8)
    model[2].bias.requires_grad_(False)
    assert "2.bias" in refusal(tape.__enter__)


def test_a_model_that_was_compiled_before_is_refused():
    """It runs as it was traced, without the tape's hooks."""
    model, x = two_layers(), noise(8, 5)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    assert "compiled" in refusal(taped, model, lambda: compiled(x).sum().backward())


@pytest.mark.parametrize("which", (0, 1))
def test_what_is_changed_in_place_after_the_backward_is_named(which):
    """A layer's input may be a buffer of the user's; a hook may reuse the gradient's memory."""
    model, x = two_layers(), noise(8, 5)
    seen = [x]

    def backward():
        out = model(x)
        out.register_hook(seen.append)
        out.sin().sum().backward()

    tape = taped(model, backward)
    G = tape.gradient(ALL)
    seen[which].zero_()
    for use, what in ((tape.gradient, ALL), (tape.dot, G)):
        assert f"{2 * which}.weight" in refusal(use, what)


@pytest.mark.parametrize("n, owners", [(2, []), (2, [0, 0, 1])])
def test_rows_that_do_not_fit_are_refused(n, owners):
    """Two rows of two tokens, which reach the head as a line of four."""
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "head": nn.Linear(4, 3)})
    flat = {model["head"]: torch.tensor(owners)} if owners else {}

    def in_a_line():
        model["head"](model["wte"](torch.ones(2, 2).long()).flatten(0, 1)).sum().backward()

    assert refusal(taped, model, in_a_line, n, flat).startswith("head: ")
    # nanoGPT's wpe(arange(T)), as many positions as rows: once for all of them
    once = refusal(taped, model["wte"], lambda: model["wte"](torch.arange(4)).sum().backward(), 4)
    assert "(1, T)" in once


def test_check_exact_tells_a_sum_over_rows():
    model, x = two_layers(), noise(4, 5)
    check_exact(model, lambda x: model(x).sin().sum(), x)
    for loss in (lambda x: model(x).sin().mean(), lambda x: model(x).sum(0).sin().sum(),
                 lambda x: torch.dropout(model(x), 0.5, True).sum()):
        assert "row" in refusal(check_exact, model, loss, x)
    for loss, some in ((lambda x: model(x).sum(), x[:1]), (lambda x: 0 * model(x).sum(), x)):
        assert "two rows" in refusal(check_exact, model, loss, some)
    x[2] = torch.nan
    assert "row 2" in refusal(check_exact, model, lambda x: model(x).sum(), x)


def test_check_exact_of_tokens_in_a_line():
    """Rows in a list, of unlike lengths; the first has no token."""
    model, rows = two_layers(), [noise(n, 5) for n in (0, 3, 2)]
    flat = {model: torch.tensor([1, 1, 1, 2, 2])}
    check_exact(model, lambda some: model(torch.cat(some)).sin().sum(), rows, flat)
    refusal(check_exact, model, lambda some: model(torch.cat(some)).mean(), rows, flat)
