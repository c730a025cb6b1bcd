"""
tracin.Tape against a loop of one autograd backward per row: alone, without padding, in float64, and
sharing no code with it.

J (n, P) holds the gradient of every row, one line each, so that what a tape answers is linear
algebra: w @ J and J @ G. A tape works in three ways, by its memory: contracted (inputs and output
gradients of layers), kept (gradients of rows), mixed.
"""
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.func import functional_call, jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tracin
from judge.scorer import Scorer, pad_right
from model import GPT, GPTConfig, add_lora
from sample import token_logprobs
from run.device import autocast


class Tape(tracin.Tape):
    """As the tape of before: rows by number or count, n not known at first."""
    def __init__(self, model, n=0):
        super().__init__(model, n)
        self.model = model
        self.told = n

    def __enter__(self):
        self.__init__(self.model, self.told)
        self.counted = 0
        return super().__enter__()

    def numbered(self, n):
        self.told = n
        return self

    def rows(self, which, owners=None):
        if isinstance(which, int):
            which = torch.arange(self.counted, self.counted + which)
            self.counted += len(which)
            self.n = max(self.n, self.counted)
        super().rows(which, owners)

    def gradient(self, weights=None):
        return super().gradient(torch.ones(self.n) if weights is None else weights)

    def norms(self, rows, scale={}, parameters=None):
        return super().norms(scale, parameters)[torch.as_tensor(rows)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad", "ignore:.torch.jit.script")
V, SHAPE = 19, dict(block_size=16, n_layer=2, n_head=2, n_embd=8)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
WAYS = ("contracted",)
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def doubles_stay(monkeypatch):
    """token_logprobs computes in float32 whatever the model is; here a float64 model keeps what it
    has."""
    to_float = torch.Tensor.float
    monkeypatch.setattr(
        torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))


# ------------------------------------------------------------------------------------------------
# models and the losses of their rows: .micro [(n, owners of flattened tokens, function -> (n,))]
# for the tape, .alone [function -> ()] by hand

def noise(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def perturbed(model, dtype=torch.float64, seed=0):
    """No parameter keeps its initial value; the same weights in every dtype."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(0.3 * noise(*p.shape, seed=100 * seed + i) + (p.dim() == 1))
    return model.to(dtype)


def gpt(dtype=torch.float64, **shape):
    return perturbed(GPT(GPTConfig(V, **SHAPE | shape)), dtype)


def texts(n=8, seed=1):
    """n rows (prompt, completion, coefficient) of ragged lengths, with repeated tokens and
    coefficients of both signs."""
    g = torch.Generator().manual_seed(seed)
    lengths = [[1, 1], *torch.randint(1, 6, (n - 1, 2), generator=g).tolist()]
    ids = [[torch.randint(V, (k,), generator=g).tolist() for k in pair] for pair in lengths]
    return [(p, c, float(a)) for (p, c), a in zip(ids, torch.randn(n, generator=g))]


def text_loss(model, value, rows, left=0, right=0, at_once=2 ** 24, line="rows"):
    """Coefficient times mean log-prob of the completion, a value head beside it. Prompts are padded
    left, completions right.

    The head is given a line of tokens, row after row or time after time ("time"), or (n, T, C) with
    all padding ("").
    """
    P, T = (max(len(row[i]) for row in rows) + more for i, more in ((0, left), (1, right)))
    tokens = torch.tensor([[3] * (P - len(p)) + p + c + [5] * (T - len(c)) for p, c, _ in rows])
    attention_mask = torch.arange(P + T) >= torch.tensor([[P - len(p)] for p, _, _ in rows])
    mask = torch.arange(T) < torch.tensor([[len(c)] for _, c, _ in rows])               # (n, T)
    device = model.wte.weight.device
    tokens, attention_mask, mask = (x.to(device) for x in (tokens, attention_mask, mask))
    targets, (t, i) = tokens[:, P:], mask.T.nonzero().T
    if line == "rows":
        i, t = mask.nonzero().T

    def losses():
        h = model(tokens[:, :-1], attention_mask[:, :-1])[:, -T:]                       # (n, T, C)
        if line:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("model.LOGITS_AT_ONCE", at_once)
                logp = token_logprobs(model.lm_head, h[i, t], targets[i, t], 0.7)
            logp = logp.new_zeros(mask.shape).index_put((i, t), logp)
        else:
            logp = (model.lm_head(h) / 0.7).log_softmax(-1)
            logp = logp.gather(2, targets[:, :, None])[:, :, 0]
        a = logp.new_tensor([row[2] for row in rows])[:, None]
        each = -a * logp
        if value is not None:
            each = each + (value(h)[:, :, 0] - a).square()
        return (mask * each).sum(1) / mask.sum(1)

    return len(rows), i if line else None, losses


def text_alone(model, value, row):
    """The loss of one row by itself: no padding, no mask, no head module."""
    prompt, completion, a = row
    h = model(torch.tensor([prompt + completion])[:, :-1])[0, -len(completion):]        # (T, C)
    logits = h @ model.lm_head.weight.T / 0.7
    logp = torch.stack([x.log_softmax(0)[t] for x, t in zip(logits, completion)])
    return -a * logp.mean() + (0 if value is None else (value(h)[:, 0] - a).square().mean())


def split(rows, sizes):
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [rows[a:b] for a, b in zip([0, *ends], ends)]


def text_case(model, value=None, sizes=(3, 1, 4), rows=texts(), **how):
    return SimpleNamespace(
        model=model if value is None else nn.ModuleList([model, value]),
        micro=[text_loss(model, value, part, **how) for part in split(rows, sizes)],
        alone=[functools.partial(text_alone, model, value, row) for row in rows])


def checkpointed(model, reentrant):
    for block in model.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    return model


def judge_case(dtype):
    model, rows = perturbed(Scorer(GPTConfig(V, **SHAPE, causal=False)), dtype), texts()

    def loss(part):
        coefficients = torch.tensor([a for *_, a in part], dtype=dtype)
        return F.softplus(coefficients * model(*pad_right([p + c for p, c, _ in part])))

    def alone(p, c, a):
        return F.softplus(a * model.score(model.trunk(torch.tensor([p + c]))[0, 0])).sum()

    parts = split(rows, (3, 1, 4))
    return SimpleNamespace(
        model=model, micro=[(len(part), None, functools.partial(loss, part)) for part in parts],
        alone=[functools.partial(alone, *row) for row in rows])


def any_case(model, x, sizes=(3, 1, 4)):
    """Rows x (8, ...) of plain numbers."""
    def losses(part):
        return model(part).flatten(1).sin().sum(1)

    def alone(row):
        return model(row).sin().sum()

    return SimpleNamespace(
        model=model, alone=[functools.partial(alone, row) for row in x.split(1)],
        micro=[(len(part), None, functools.partial(losses, part)) for part in x.split(sizes)])


class Net(nn.Module):
    """One Linear and one LayerNorm are used three times; others have no bias, or a frozen one; one
    is not used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6, bias=False)
        self.again = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)
        self.norm = nn.LayerNorm(6, bias=False)
        self.other = nn.LayerNorm(6, eps=0.2)
        self.idle = nn.Linear(2, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        x = self.other(self.first(x))
        for _ in range(3):
            x = x + self.norm(self.again(x).tanh())
        return self.last(x)


def inplace():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def inplace_later():
    """Autograd gives these outputs as views, in the middle of the network."""
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(inplace=True),
                         nn.Linear(6, 2))


class InPlace(nn.Module):
    """Residuals and positions are added in place, and activations are changed there."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(5, 6)
        self.wpe = nn.Embedding(3, 6)
        self.first = nn.Linear(6, 6)
        self.up = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.rms = nn.RMSNorm(6)
        self.down = nn.Linear(6, 2, bias=False)

    def forward(self, x):
        h = self.wte(x)
        h += self.wpe(torch.arange(3).expand(x.shape))
        up = self.up(self.first(h.tanh()).relu_())
        up += h
        up[:, 1:] *= 2
        normed = self.norm(up).sigmoid_()
        return self.down(normed.tanh()).mul_(3) + self.rms(up).sin_().sum(-1, keepdim=True)


def normed():
    return nn.Sequential(
        nn.Linear(5, 4), nn.RMSNorm(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))


LLAMA = dict(rms=True, swiglu=True, rope_base=100.0, n_kv_head=1, n_inner=6, bias=False)
QWEN2 = LLAMA | dict(n_embd=12, n_head=3, qkv_bias=True)
QWEN3 = LLAMA | dict(head_dim=6, qk_norm=True)
NEO = dict(qkv_bias=False, attn_scale=1.0, window=2, local_layers=(1,))
CASES = {
    "gpt": lambda dtype: text_case(gpt(dtype)),
    "logits by row": lambda dtype: text_case(gpt(dtype), line="", left=2, right=1),
    "head by time": lambda dtype: text_case(gpt(dtype), line="time"),
    "head in pieces": lambda dtype: text_case(gpt(dtype), at_once=4 * V),
    "checkpointed blocks": lambda dtype: text_case(checkpointed(gpt(dtype), False)),
    "no bias": lambda dtype: text_case(gpt(dtype, bias=False)),
    "lora": lambda dtype: text_case(perturbed(add_lora(gpt(), 2, 4), dtype, seed=5)),
    "value head": lambda dtype: text_case(
        gpt(dtype), perturbed(nn.Linear(8, 1), dtype, seed=7)),
    "judge": judge_case,
    "net": lambda dtype: any_case(perturbed(Net(), dtype), noise(8, 5, seed=3).to(dtype)),
    "inplace activation": lambda dtype: any_case(
        perturbed(inplace(), dtype), noise(8, 5).to(dtype)),
    "inplace activation after a bias": lambda dtype: any_case(
        perturbed(inplace_later(), dtype), noise(8, 3, 5).to(dtype)),
    "inplace everywhere": lambda dtype: any_case(
        perturbed(InPlace(), dtype), torch.arange(24).view(8, 3) % 5),
    "images": lambda dtype: any_case(perturbed(normed(), dtype), noise(8, 3, 2, 5).to(dtype)),
    "llama": lambda dtype: text_case(gpt(dtype, **LLAMA, tied=False)),
    "llama, logits by row": lambda dtype: text_case(
        gpt(dtype, **LLAMA, tied=False), line="", left=1),
    "qwen2": lambda dtype: text_case(gpt(dtype, **QWEN2), at_once=4 * V),
    "qwen3": lambda dtype: text_case(checkpointed(gpt(dtype, **QWEN3), False)),
    "qwen3, lora": lambda dtype: text_case(
        perturbed(add_lora(gpt(**QWEN3, tied=False), 2, 4), dtype, seed=5)),
    "gpt-neo": lambda dtype: text_case(gpt(dtype, **NEO))}
KINDS = [(name, torch.float64, way) for name in CASES for way in WAYS]
KINDS += [(name, torch.float32, "contracted") for name in (
    "gpt", "head in pieces", "lora", "judge", "net", "qwen3", "gpt-neo")]
every_case = pytest.mark.parametrize(
    "name, dtype, way", KINDS, ids=[f"{c}, {str(d)[6:]}, {way}" for c, d, way in KINDS])


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def flat(G, model):
    return torch.cat([G.get(p, torch.zeros_like(p)).flatten() for p in trained(model)])


def unflat(v, model):
    params = trained(model)
    parts = v.split([p.numel() for p in params])
    return {p: x.view_as(p).to(p.dtype) for p, x in zip(params, parts)}


def plain(case, losses=None):
    """{parameter: .grad} of an ordinary backward, over all micro-batches or over these losses."""
    for loss in losses or [f for *_, f in case.micro]:
        loss().sum().backward()
    G = {p: torch.zeros_like(p) if p.grad is None else p.grad for p in trained(case.model)}
    case.model.zero_grad(set_to_none=True)
    return G


def by_hand(case):
    """J (n, P): one backward per row."""
    return torch.stack([flat(plain(case, [loss]), case.model) for loss in case.alone])


def new_tape(model, way):
    return Tape(model)


def record(case, way="contracted", tape=None):
    with tape or new_tape(case.model, way) as tape:
        for n, owners, losses in case.micro:
            tape.rows(n, owners)
            losses().sum().backward()
    return tape


def lookups(tape):
    return {tape.layers[m] for m, *_ in tape.records if isinstance(m, nn.Embedding)}


def recorded_layers(tape):
    return {tape.layers[module] for module, *_ in tape.records}


@functools.cache
def brute(name):
    return by_hand(CASES[name](torch.float64))


@functools.cache
def recorded(name="gpt", dtype=torch.float64, way="contracted"):
    """(case, tape, J), J from the same weights in float64."""
    case = CASES[name](dtype)
    return case, record(case, way), brute(name)


def error(x, y):
    """Relative, in the largest entry."""
    assert x.shape == y.shape and x.isfinite().all()
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).abs().max() / y.abs().max())


def worst(G, H):
    """The largest relative error of any one parameter; in float32, of the whole, since a small part
    has few digits."""
    assert set(G) == set(H)
    assert all(g.dtype == p.dtype and not g.requires_grad for p, g in G.items())
    x, y = (torch.cat([z[p].flatten() for p in G]).detach().double() for z in (G, H))
    if torch.float32 in {g.dtype for g in G.values()}:
        return error(x, y)
    sizes = torch.tensor([p.numel() for p in G])
    part = torch.arange(len(G)).repeat_interleave(sizes)

    def largest(z):
        return torch.zeros(len(G)).double().scatter_reduce(0, part, z.abs(), "amax")

    size = largest(y)
    # some are 0 but for rounding: queries of a text of one token
    return float((largest(x - y) / size.clamp(min=1e-4 * size.max())).max())


@every_case
def test_gradient(name, dtype, way):
    case, tape, J = recorded(name, dtype, way)
    w, some = noise(8, seed=9), torch.tensor([1, 0, 1, 0, 1, 0, 0, 1])
    asked = [*torch.eye(8), w, w * some, some.bool(), torch.ones(8)]    # first, every row alone
    for weights, G in zip(asked, map(tape.gradient, asked)):
        assert worst(G, unflat(weights.double() @ J, case.model)) < TOLERANCE[dtype]
    assert worst(tape.gradient(), plain(case)) < TOLERANCE[dtype] / 3
    assert worst(tape.gradient(torch.ones(8)), tape.gradient()) < TOLERANCE[dtype] / 10
    nothing = tape.gradient(torch.zeros(8))
    assert set(nothing) == set(trained(case.model)) and not any(g.any() for g in nothing.values())


@every_case
def test_influence(name, dtype, way):
    """On the batch itself, on anything, with Adam's second moment, on half of the parameters."""
    case, tape, J = recorded(name, dtype, way)
    own, other = J.sum(0), noise(J.shape[1], seed=11)
    adam = noise(J.shape[1], seed=12).square() + 0.1
    directions = [unflat(v, case.model) for v in (own, other, own * adam)]
    for which in range(2):
        half = list(directions[1].items())[which::2]
        directions.append(dict(half))
    for G in directions:
        scores, v = tape.dot(G), flat(G, case.model)
        assert error(scores, J @ v.double()) < TOLERANCE[dtype]
        train = flat(tape.gradient(adam[:8]), case.model)
        assert error((adam[:8] * scores).sum(), train @ v) < TOLERANCE[dtype]
    assert torch.equal(tape.dot({}), torch.zeros(8, dtype=torch.float64))


@every_case
def test_norms_and_leave_one_out(name, dtype, way):
    case, tape, J = recorded(name, dtype, way)
    adam, part = noise(J.shape[1], seed=12).square() + 0.1, dict.fromkeys(trained(case.model)[:2])
    squares, size = J.square(), sum(p.numel() for p in part)
    assert error(tape.norms(range(8)), squares.sum(1)) < TOLERANCE[dtype]
    scaled = tape.norms([1, 6], unflat(adam, case.model))
    assert error(scaled, (squares[[1, 6]] * adam).sum(1)) < TOLERANCE[dtype]
    few = [0, 2, 3, 7]
    of_part = tape.norms(few, parameters=part)
    assert error(of_part, squares[few, :size].sum(1)) < TOLERANCE[dtype]
    without = torch.stack([J[i] @ (J.sum(0) - J[i]) for i in range(8)])
    others = tape.dot(tape.gradient()) - tape.norms(range(8))
    assert error(others, without) < TOLERANCE[dtype]


@every_way
def test_influence_on_held_out_rows(way):
    case, tape, J = recorded(way=way)
    held_out = text_case(case.model, rows=texts(5, seed=21), sizes=(2, 3))
    scores = tape.dot(record(held_out, way).gradient())
    assert error(scores, J @ by_hand(held_out).sum(0)) < 1e-10


@every_way
def test_what_is_frozen_costs_nothing(way):
    case, tape, J = recorded("lora", way=way)
    adapters = {name.split(".")[-1] for name in recorded_layers(tape)}
    assert adapters == (set() if way == "kept" else {"A", "B"})
    # 3 micro-batches, 8 adapters of 2 layers
    assert len(tape.records) + len(tape.row_grads) == 3 * 2 * 8 and len(tape.names) == 2 * 8
    case = text_case(gpt())
    # the token embedding, which is the head too, and a bias are left
    frozen = list(case.model.parameters())[1:-1]
    for p in frozen:
        p.requires_grad_(False)
    tape, J = record(case, way), by_hand(case)
    known = [*tape.names, *tape.gradient(), *(p for p, _ in tape.row_grads)]
    assert not any(p is q for p in frozen for q in known)
    layers = dict(contracted={"wte", "lm_head", "ln_f"}, mixed={"wte", "lm_head"}, kept=set())
    assert recorded_layers(tape) == layers[way]
    assert error(tape.dot(tape.gradient()), J @ J.sum(0)) < 1e-10


def test_a_forward_derivative_agrees():
    case = text_case(gpt(), sizes=(8,))
    num_weights = sum(p.numel() for p in trained(case.model))
    G = unflat(noise(num_weights, seed=15), case.model)
    module = nn.ModuleList([case.model])
    module.forward, params = case.micro[0][2], dict(module.named_parameters())
    direction = {k: G[p] for k, p in params.items()}
    with sdpa_kernel(SDPBackend.MATH):
        slope = jvp(lambda x: functional_call(module, x, ()), (params,), (direction,))[1]
    assert error(record(case).dot(G), slope) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_a_finite_difference_agrees(name):
    case, tape, J = recorded(name)
    G, losses = unflat(noise(J.shape[1], seed=16), case.model), []
    with torch.no_grad():
        for step in (1e-5, -2e-5, 1e-5):
            for p in G:
                p += step * G[p]
            losses.append(torch.cat([f() for _, _, f in case.micro]))
    assert error((losses[0] - losses[1]) / 2e-5, tape.dot(G)) < 1e-6


# ------------------------------------------------------------------------------------------------
# what must not matter

@every_way
@pytest.mark.parametrize("how", [
    dict(left=3), dict(right=4), dict(left=1, right=2, line=""), dict(sizes=(8,)),
    dict(sizes=(1, 1, 6)), dict(order=[5, 2, 7, 0, 1, 6, 4, 3])], ids=str)
def test_padding_micro_batches_and_order_change_nothing(how, way):
    case, tape, J = recorded()
    how = dict(how)
    order = how.pop("order", list(range(8)))
    rows = [texts()[i] for i in order]
    other = record(text_case(case.model, rows=rows, **how), way)
    scores = tape.dot(tape.gradient())
    assert error(other.dot(tape.gradient()), scores[order]) < 1e-12
    assert worst(other.gradient(noise(8)[order]), tape.gradient(noise(8))) < 1e-12


def forwards(tape, case):
    """The sum of all losses, from all forwards before any backward."""
    total = 0
    for n, owners, losses in case.micro:
        tape.rows(n, owners)
        total = total + losses().sum()
    return total


@every_way
def test_two_forwards_before_one_backward(way):
    case, tape, J = recorded()
    with new_tape(case.model, way) as other:
        forwards(other, case).backward()
    assert error(other.dot(tape.gradient()), J @ J.sum(0)) < 1e-10


@every_way
def test_two_forwards_of_blocks_that_are_computed_again(way):
    """With other numbers of rows: when a block runs again, rows() has been told of later ones."""
    case, J = text_case(checkpointed(gpt(), False), sizes=(5, 3)), brute("gpt")
    with new_tape(case.model, way) as tape:
        forwards(tape, case).backward()
    assert error(tape.dot(tape.gradient()), J @ J.sum(0)) < 1e-10


def test_a_reentrant_checkpoint_is_refused():
    """Its blocks run in the backward for the first time, perhaps after the next rows()."""
    case = text_case(checkpointed(gpt(), True))
    with pytest.raises(ValueError, match="h.1.mlp.*set use_reentrant=False"):
        record(case)


@every_way
def test_two_backwards_of_one_forward(way):
    """A loss in two parts with a backward each: the second must not change what the first one
    left."""
    case, tape, J = recorded()
    with new_tape(case.model, way) as other:
        for n, owners, losses in case.micro:
            other.rows(n, owners)
            loss = losses().sum()
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
    assert worst(other.gradient(), tape.gradient()) < 1e-10


@every_way
def test_an_input_buffer_that_is_used_again(way):
    case, buffer, x = recorded("net")[0], torch.empty(4, 5).double(), noise(8, 5, seed=3)
    with new_tape(case.model, way) as other:
        for part in x.split(4):
            other.rows(4)
            case.model(buffer.copy_(part)).sin().sum().backward()
    assert worst(other.gradient(), plain(case)) < 1e-12


@pytest.mark.parametrize("way", ["contracted", "kept"])
@pytest.mark.parametrize("how", [
    "as many at a time as rows", "too short", "rows beside a line", "reentrant pieces"])
def test_a_line_of_tokens_goes_to_its_rows(how, way):
    """Exact, or refused by name: never to other rows in silence."""
    model, h = nn.Linear(3, 2).double(), noise(8, 3).requires_grad_()
    owners = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    pieces, call = h.split(4), model
    exact = torch.stack([h[owners == i].sum(0) for i in range(4)])
    if how == "rows beside a line":
        pieces, exact = [h[:4]], h[:4]
    elif how == "reentrant pieces":
        pieces, call = h.split(5), functools.partial(checkpoint, model, use_reentrant=True)
    try:
        with new_tape(model, way) as tape:
            tape.rows(4, owners[:7] if how == "too short" else owners)
            sum(call(x).sum() for x in pieces).backward()
    except ValueError as e:
        assert how != "as many at a time as rows" and "rows" in str(e)
        return
    found = torch.stack([tape.gradient(w)[model.weight][0] for w in torch.eye(4)])
    assert error(found, exact) < 1e-12


@pytest.mark.parametrize("way", ["contracted", "kept"])
def test_rows_are_known_on_every_device(way):
    model = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model = model.to("meta")    # stands in for a GPU
    with new_tape(model, way) as tape:
        tape.rows(2)
        model(torch.zeros(2, 4, dtype=torch.long, device="meta")).sum().backward()
    assert tape.dot({p: torch.zeros_like(p) for p in tape.names}).shape == (2,)


def ranks(x):
    return x.argsort().argsort().double()


@pytest.mark.parametrize(
    "way, shape", [*((way, {}) for way in WAYS), ("kept", LLAMA | dict(qk_norm=True))],
    ids=[*WAYS, "kept, qwen3"])
def test_bfloat16_keeps_signs_and_ranks(way, shape):
    model, scores = gpt(torch.float32, n_embd=32, **shape), []
    case = text_case(model, rows=texts(48), sizes=(4, 20, 24))
    held_out = text_case(model, rows=texts(32, seed=31), sizes=(32,))
    for dtype in (torch.float32, torch.bfloat16):
        with autocast("cpu", dtype):
            tape, target = record(case, way), record(held_out, way).gradient()
        scores.append([tape.dot(target), tape.dot(tape.gradient()), tape.norms(range(48))])
    assert way == "kept" or any(b.dtype == torch.bfloat16 for *_, b in tape.records)
    if way != "contracted":
        assert tape.row_grads and all(g.dtype == torch.float32 for g in tape.row_grads.values())
    assert scores[0][2][:8].ne(scores[1][2][:8]).all()
    for exact, rough in zip(*scores):
        assert (exact.sign() == rough.sign()).double().mean() > 0.93
        assert error(rough, exact) < 0.05
        assert torch.corrcoef(torch.stack([ranks(exact), ranks(rough)]))[0, 1] > 0.99


# ------------------------------------------------------------------------------------------------
# rows with numbers, in one process and in several

# {processes: [for each process, the numbers of the rows of its micro-batches]}
PROCESSES = {1: [[[5, 2, 7], [0], [1, 6, 4, 3]]], 2: [[[5, 2], [7]], [[0, 1, 6], [4, 3]]],
             3: [[[5, 2, 7, 0]], [], [[1], [6, 4, 3]]]}


def record_numbered(model, micro_batches, way):
    with new_tape(model, way).numbered(8) as tape:
        for numbers in micro_batches:
            _, owners, losses = text_loss(model, None, [texts()[i] for i in numbers])
            tape.rows(torch.tensor(numbers, device=model.wte.weight.device), owners)
            losses().sum().backward()
    return tape


def over_processes(tapes, question):
    """[question(tape)] of tapes that are each of another process. What they hand to all_reduce is
    noted in a first round, and they are given the sum in a second."""
    given, answers = [], []
    for tape in tapes:
        tape.all_reduce = lambda tensors: given.append([x.clone() for x in tensors])
        question(tape)
    assert len(given) == len(tapes)             # each process takes part, once
    total = [sum(parts) for parts in zip(*given, strict=True)]

    def put(tensors):
        for x, s in zip(tensors, total, strict=True):
            x.copy_(s)

    for tape in tapes:
        tape.all_reduce = put
        answers.append(question(tape))
    return answers


@every_way
@pytest.mark.parametrize("name", ["gpt", "lora"])
@pytest.mark.parametrize("processes", PROCESSES)
def test_rows_by_number_over_all_processes(name, processes, way):
    """Whatever the order, the micro-batches and the process of the rows: as one tape of all."""
    case, one, J = recorded(name, way=way)
    tapes = [record_numbered(case.model, micros, way) for micros in PROCESSES[processes]]
    assert all(tape.n == 8 for tape in tapes)
    w = noise(8, seed=9)
    signs = [w * (w > 0), w * (w < 0)]
    for G in over_processes(tapes, lambda tape: tape.gradient()):
        assert worst(G, one.gradient()) < 1e-12
    for some in over_processes(tapes, lambda tape: tape.gradient(signs[0])):
        assert worst(some, unflat(signs[0] @ J, case.model)) < 1e-10
    G = one.gradient(w)
    for scores in over_processes(tapes, lambda tape: tape.dot(G)):
        assert error(scores, one.dot(G)) < 1e-12 and error(scores, J @ flat(G, case.model)) < 1e-10
    few, adam = [0, 2, 3, 7], unflat(noise(J.shape[1], seed=12).square() + 0.1, case.model)
    for norms in over_processes(tapes, lambda tape: tape.norms(few)):
        assert error(norms, J[few].square().sum(1)) < 1e-10
    for norms in over_processes(tapes, lambda tape: tape.norms(few, adam)):
        assert error(norms, (J[few].square() * flat(adam, case.model)).sum(1)) < 1e-10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", ["gpt", "lora"])
@every_way
def test_cuda_answers_are_those_of_the_cpu(name, way):
    model, J = CASES[name](torch.float64).model.cuda(), brute(name)
    tape = record_numbered(model, PROCESSES[1][0], way)
    w, adam = noise(8, seed=9), noise(J.shape[1], seed=12).square() + 0.1
    G = tape.gradient(w.cuda())
    v = flat(G, model)
    assert error(v.cpu(), w @ J) < 1e-10 and error(tape.dot(G).cpu(), J @ v.cpu()) < 1e-10
    few, scale = [0, 2, 3, 7], unflat(adam.cuda(), model)
    assert error(tape.norms(few).cpu(), J[few].square().sum(1)) < 1e-10
    assert error(tape.norms(few, scale).cpu(), (J[few].square() * adam).sum(1)) < 1e-10


# ------------------------------------------------------------------------------------------------
# nothing else changes

def touched(model):
    return any("forward" in vars(m) or m._forward_hooks or m._backward_hooks
               for m in model.modules())


def test_recording_leaves_the_model_as_it_was():
    def train(with_tape):
        model = gpt(torch.float32)
        optimizer = torch.optim.AdamW(trained(model), lr=0.01)
        case = text_case(model, sizes=(5, 3))
        for _ in range(3):
            if with_tape:
                before = [losses().detach() for _, _, losses in case.micro]
                tape = record(case)
                tape.dot(tape.gradient())
                tape.norms([0])
                assert all(p.grad is None and p.requires_grad for p in model.parameters())
                assert not touched(model)
                with Tape(model) as tape:
                    tape.rows(5, case.micro[0][1])
                    assert torch.equal(case.micro[0][2](), before[0])
            sum(losses().sum() for _, _, losses in case.micro).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return model.state_dict().values()

    assert all(torch.equal(x, y) for x, y in zip(train(False), train(True)))


def test_forward_comes_back_after_an_error():
    model = gpt()
    with pytest.raises(ZeroDivisionError):
        with Tape(model):
            model.wte.weight.sum().backward()  # a mistake too, but not the first to be told
            1 / 0
    assert not touched(model)


def test_a_forward_that_is_not_the_layers_own_is_refused():
    """Recording would pass over what someone put there, and take it away at the end; so with two
    tapes at once."""
    model = nn.Sequential(nn.Linear(3, 1))
    mine = model[0].forward = lambda x: F.linear(x, model[0].weight) * 2
    with pytest.raises(ValueError, match="0"):
        with Tape(model):
            pass
    assert model[0].forward is mine


def test_forwards_without_gradient_are_not_recorded():
    case, tape, J = recorded()
    with Tape(case.model) as other:
        with torch.no_grad():
            case.model(torch.zeros(5, 4, dtype=torch.long))  # before rows(), and of another size
        for n, owners, losses in case.micro:
            other.rows(n, owners)
            with torch.no_grad():
                losses()
                case.model(torch.zeros(n + 1, 4, dtype=torch.long))
            losses()  # no backward, no record
            losses().sum().backward()
    assert len(other.records) == len(tape.records)
    assert error(other.dot(tape.gradient()), J @ J.sum(0)) < 1e-10


# ------------------------------------------------------------------------------------------------
# planted bugs, as sum_i I_i = <G_train, G_target> sees them

def gap(tape, case):
    """Relative error of the invariant for the batch itself and for held-out rows, with G_train from
    the tape and without."""
    held_out = record(text_case(case.model, rows=texts(6, 22), sizes=(6,)))  # contracted
    gaps = []
    for train in (tape.gradient(), plain(case)):
        for G in (tape.gradient(), held_out.gradient()):
            product = flat(train, case.model) @ flat(G, case.model)
            gaps.append(error(tape.dot(G).sum(), product))
    return max(gaps)


@pytest.mark.parametrize("bug", [
    "tokens first", "rows first", "tokens first, in the score", "no cross terms",
    "last use of a matrix", "last micro-batch"])
def test_a_planted_bug_breaks_the_invariant(bug, monkeypatch):
    case = text_case(gpt(), sizes=(3, 5), line="")
    tape, model = record(case), case.model
    into, dot = tracin.add_gradient, tracin.layer_dot

    def gradient(module, name, a, b):
        total = torch.zeros_like(getattr(module, name))
        into(total, module, name, a, b)
        return total

    assert gap(tape, case) < 1e-12
    use = {type(m): sum(gradient(m, "weight", a, b) for n, _, a, b in tape.records if n is m)
           for m in (model.wte, model.lm_head)}

    def early(f, dim, module, name, a, b, *G):
        if isinstance(module, nn.Linear):
            a, b = a.sum(dim, keepdim=True), b.sum(dim, keepdim=True)
        return f(module, name, a, b, *G)

    def no_cross_terms(module, name, a, b, G):
        tied = getattr(module, name) is model.wte.weight
        return dot(module, name, a, b, use[type(module)] if tied else G)

    def keep_last(key):
        tape.records = list({key(r): r for r in tape.records}.values())

    if bug in ("tokens first", "rows first"):
        dim = 1 if bug == "tokens first" else 0
        monkeypatch.setattr(tracin, "add_gradient", lambda total, *x: total.add_(early(gradient, dim, *x)))
    elif bug == "tokens first, in the score":
        monkeypatch.setattr(tracin, "layer_dot", functools.partial(early, dot, 1))
    elif bug == "no cross terms":  # each use of the tied matrix against its own part of G
        monkeypatch.setattr(tracin, "layer_dot", no_cross_terms)
    # a tape that lost a record agrees with itself: only a G_train from elsewhere shows it
    elif bug == "last use of a matrix":
        keep_last(lambda r: (r[0].weight, len(r[1])))
    else:
        keep_last(lambda r: r[0])
    assert gap(tape, case) > 0.05


# ------------------------------------------------------------------------------------------------
# what models by others do besides layers

class Hooked(nn.Module):
    """Gradients change on their way: by hooks on outputs, as they are or changed in place, and by
    one on a module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)
        self.last.register_full_backward_pre_hook(lambda module, grads: (0.7 * grads[0],))

    def forward(self, x):
        h = self.first(x)
        h.register_hook(lambda b: 3 * b)
        h = self.norm(h).tanh()
        h = self.middle(h).relu_()
        h.register_hook(lambda b: b.clamp(-0.1, 0.1))
        h = self.last(h)
        h.register_hook(lambda b: b * torch.tensor([1.0, -2.0]).to(b))
        return h


class Saliency(nn.Module):
    """A gradient is asked for in the forward, and is a constant of the loss."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        h = self.first(x).tanh()
        out = self.last(h)
        s, = torch.autograd.grad(out.sin().sum(), h, retain_graph=True)
        torch.autograd.backward(out.sum(), inputs=[h], retain_graph=True)
        return out * s.sum(-1, keepdim=True)


@every_way
@pytest.mark.parametrize("model", [Hooked, Saliency])
def test_gradients_that_are_changed_or_asked_for_on_the_way(model, way):
    case = any_case(perturbed(model()), noise(8, 3, 5))
    tape, J = record(case, way), by_hand(case)
    assert worst(tape.gradient(), plain(case)) < 1e-10
    assert error(tape.dot(tape.gradient()), J @ J.sum(0)) < 1e-10
    assert error(tape.norms(range(8)), J.square().sum(1)) < 1e-10


@every_way
def test_what_is_trained_is_looked_up_when_a_recording_begins(way):
    case = CASES["net"](torch.float64)
    case.model.again.requires_grad_(False)
    tape = new_tape(case.model, way)
    case.model.requires_grad_(True)
    case.model.other.requires_grad_(False)
    record(case, tape=tape)
    assert worst(tape.gradient(), plain(case)) < 1e-10
    J = by_hand(case)
    assert error(tape.dot(tape.gradient()), J @ J.sum(0)) < 1e-10


def test_a_leaf_buffer_that_is_used_again():
    """An input with a gradient of its own, as a soft prompt has: its memory is the caller's."""
    model, x = perturbed(inplace_later()), noise(8, 3, 5)
    buffer = torch.empty(4, 3, 5).double().requires_grad_()
    with Tape(model) as tape:
        for part in x.split(4):
            buffer.data.copy_(part)
            tape.rows(4)
            model(buffer).sin().sum().backward()
    assert worst(tape.gradient(), plain(any_case(model, x))) < 1e-12


def net_and_rows():
    return perturbed(inplace_later()), noise(4, 3, 5)


def backward_of(model, x, call=None, **how):
    with Tape(model) as tape:
        tape.rows(len(x))
        out = (call or model)(x)
        out.sin().sum().backward(**how)


def test_an_input_that_changes_before_the_backward_is_refused():
    """As autograd refuses it: the weight's gradient would be of other numbers."""
    model = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 6)]).double()

    def call(x):
        h = model[0](x)
        out = model[1](h)
        h.mul_(2)
        return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_of(model, noise(4, 3, 5), call)
    assert not touched(model)


def test_other_weights_in_a_call_are_refused():
    model, x = net_and_rows()
    others = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="0: its weight is another tensor.*functional_call"):
        backward_of(model, x, lambda x: functional_call(model, others, x))
    same = dict(model.named_parameters())
    backward_of(model, x, lambda x: functional_call(model, same, x))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(register):
    model, x = net_and_rows()
    handle = getattr(model[2].bias, register)(lambda g: None)
    with pytest.raises(ValueError, match="2.bias has a hook"):
        backward_of(model, x)
    handle.remove()
    backward_of(model, x)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_are_refused():
    model, x = net_and_rows()
    with pytest.raises(ValueError, match="create_graph=True"):
        backward_of(model, x, create_graph=True)

    def penalised(x):
        x.requires_grad_()
        out = model(x)
        slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().sum()

    with pytest.raises(ValueError, match="create_graph=True"):
        backward_of(model, x, penalised)


def test_what_is_frozen_while_recording_is_refused():
    model, x = net_and_rows()

    def call(x):
        model[4].requires_grad_(False)
        return model(x)

    with pytest.raises(ValueError, match="4.weight: its requires_grad was changed"):
        backward_of(model, x, call)


def test_a_model_without_a_trained_parameter_is_refused():
    model, x = net_and_rows()
    with pytest.raises(ValueError, match="no parameter of the model is trained"):
        backward_of(model.requires_grad_(False), x)


# ------------------------------------------------------------------------------------------------
# is it exact for this model and this loss?

def losses_of(model, how):
    return {
        "sum": lambda x: model(x).sin().sum(),
        "mean over rows": lambda x: model(x).sin().sum((1, 2)).mean(),
        "mean over tokens": lambda x: model(x).sin().mean(),
        "sum over columns": lambda x: model(x.mT.contiguous().mT).sin().sum(),
        "rows mix": lambda x: (model(x) - model(x).mean(0)).sin().sum(),
        "dropout": lambda x: F.dropout(model(x), 0.5).sin().sum()}[how]


@pytest.mark.parametrize("how, words", [
    ("sum", None), ("sum over columns", None),
    ("mean over rows", r"0.25 times the gradient.* mean over rows"),
    ("mean over tokens", "0.25 times the gradient.* mean over rows"),
    ("rows mix", "do rows mix"), ("dropout", "dropout")])
def test_check_exact_tells_a_sum_over_rows(how, words):
    torch.manual_seed(0)
    model, x = net_and_rows()
    loss_of = losses_of(model, how)
    if words is None:
        tracin.check_exact(model, loss_of, x)
    else:
        with pytest.raises(ValueError, match=words):
            tracin.check_exact(model, loss_of, x)
    assert not touched(model) and all(p.grad is None for p in model.parameters())


def test_check_exact_needs_two_rows():
    model, x = net_and_rows()
    with pytest.raises(ValueError, match="1 rows.* two or more"):
        tracin.check_exact(model, losses_of(model, "mean over rows"), x[:1])


def test_check_exact_of_flattened_tokens():
    """Rows in a list, of unlike lengths; the first has no token with loss."""
    model = gpt()
    rows = texts(3)
    rows[0] = (*rows[0][:2], 0.0)

    def loss_of(part, scale=1):
        return scale * text_loss(model, None, part)[2]().sum()

    owners = text_loss(model, None, rows)[1]
    tracin.check_exact(model, loss_of, rows, owners)
    with pytest.raises(ValueError, match="0.333 times the gradient"):
        tracin.check_exact(model, lambda part: loss_of(part, 1 / len(part)), rows, owners)


# ------------------------------------------------------------------------------------------------
# the memory for gradients of rows

def sized(tape):
    return sum(g.numel() * g.element_size() for g in tape.row_grads.values())


# (seed of the rows, sizes of the micro-batches): fewer rows and more, and the first again
REUSE = [(1, (3, 1, 4)), (2, (3, 1, 4)), (3, (2, 2)), (4, (5, 3)), (5, (1,)), (6, (3, 1, 4)),
         (1, (3, 1, 4))]


@pytest.mark.parametrize("way, bad", [
    ("contracted", 0), ("contracted", 1), ("contracted", 5), ("kept", 0), ("kept", 1),
    ("mixed", 3), ("mixed", 5)])
def test_a_row_of_weight_0_cannot_poison(way, bad):
    """Its gradient may be infinite or not a number: what is not wanted has no part in the sum."""
    case, x = recorded("net")[0], noise(8, 5, seed=3)
    x[bad, 2] = torch.nan
    tape = record(any_case(case.model, x), way)
    w = torch.ones(8).index_fill(0, torch.tensor(bad), 0)
    assert worst(tape.gradient(w), unflat(w.double() @ brute("net"), case.model)) < 1e-10
    assert tape.dot(tape.gradient(w)).isfinite().tolist() == w.bool().tolist()


# ------------------------------------------------------------------------------------------------
# errors that name the thing

def shared_bias():
    norm = nn.LayerNorm(3)
    norm.bias = norm.weight
    return norm


UNKNOWN = [
    ("Conv1d", lambda: nn.Conv1d(3, 3, 1)),
    ("ParameterList", lambda: nn.ParameterList([torch.ones(1)])),
    ("Sub", lambda: type("Sub", (nn.Linear,), {})(3, 3)),
    ("GroupNorm", lambda: nn.GroupNorm(1, 3)),
    ("Bilinear", lambda: nn.Bilinear(3, 3, 3)),
    ("RMSNorm", lambda: nn.RMSNorm((2, 3))),
    ("Sub", lambda: type("Sub", (nn.RMSNorm,), {})(3)),
    ("MultiheadAttention", lambda: nn.MultiheadAttention(4, 2)),
    ("", lambda: nn.utils.spectral_norm(nn.Linear(3, 3))),
    ("LayerNorm", lambda: nn.LayerNorm((2, 3))),
    ("complex weight", lambda: nn.Linear(3, 3, dtype=torch.complex64)),
    ("one tensor as weight and bias", shared_bias),
    ("padding_idx", lambda: nn.Embedding(4, 3, padding_idx=2)),
    ("padding_idx", lambda: nn.Embedding(4, 3, padding_idx=0)),
    ("max_norm", lambda: nn.Embedding(4, 3, max_norm=1.0)),
    ("sparse", lambda: nn.Embedding(4, 3, sparse=True)),
    ("scale_grad_by_freq", lambda: nn.Embedding(4, 3, scale_grad_by_freq=True))]


@pytest.mark.parametrize("words, make", UNKNOWN)
def test_a_layer_that_is_not_known_is_named(words, make):
    model = nn.ModuleDict({"inner": nn.Sequential(make(), nn.Linear(3, 3))})
    with pytest.raises(ValueError, match=f"inner.0.*{words}"):
        Tape(model)
    with pytest.raises(ValueError, match=f"^model.*{words}"):
        Tape(make())
    assert Tape(model.requires_grad_(False)).names == {}        # frozen, it may be anything


def test_a_parameter_used_outside_its_layer_is_named():
    model = gpt()
    with pytest.raises(ValueError, match="wte.weight is used outside its layer"):
        with Tape(model) as tape:
            tape.rows(2)
            h = model(torch.ones(2, 3, dtype=torch.long))
            F.linear(h, model.wte.weight).sum().backward()
    assert not touched(model)


def test_a_gradient_that_is_there_already_is_named():
    model = gpt()
    model.h[1].ln_2.bias.grad = torch.zeros(8).double()
    with pytest.raises(ValueError, match="h.1.ln_2.bias has a .grad"):
        with Tape(model):
            pass
    assert not touched(model)


@pytest.mark.parametrize("B, T, owners", [
    (2, 5, None), (4, 4, None), (2, 5, [0, 0, 0, 1, 1]), (2, 5, [0, 0, 0, 1, 1, 1])],
    ids=["plain", "as many as rows", "as many as flattened tokens",
         "fewer than flattened tokens"])
def test_positions_shared_between_rows_are_refused(B, T, owners):
    model = nn.ModuleDict({"wte": nn.Embedding(V, 4), "wpe": nn.Embedding(8, 4)})
    with pytest.raises(ValueError, match="wpe"):
        with Tape(model) as tape:
            tape.rows(B, None if owners is None else torch.tensor(owners))
            x = model["wte"](torch.ones(B, T, dtype=torch.long)) + model["wpe"](torch.arange(T))
            x.sin().sum().backward()


def test_rows_has_to_be_called():
    model = gpt()
    with pytest.raises(ValueError, match=r"rows\(n\) first"):
        with Tape(model):
            model(torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize("n, owners, layer", [
    (3, None, "wte"), (1, None, "wte"), (2, None, "lm_head"), (2, [0, 0, 1], "lm_head"),
    (2, [0, 0, 0, 1, 1], "lm_head")])
def test_rows_that_do_not_fit_are_refused(n, owners, layer):
    """Two rows of two tokens; their hidden states reach the head as a line of four."""
    model = gpt()
    with pytest.raises(ValueError, match=f"{layer}.*rows"):
        with Tape(model) as tape:
            tape.rows(n, None if owners is None else torch.tensor(owners))
            h = model(torch.ones(2, 2, dtype=torch.long))
            model.lm_head(h.flatten(0, 1)).sum().backward()


class LargestProduct(TorchDispatchMode):
    """Notes the elements of the largest matrix in a product with a vector."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket.__name__ in ("mv", "addmv", "addmv_"):
            self.elements = max(self.elements, *(x.numel() for x in args[:-1] if x.dim() == 2))
        return op(*args, **kwargs or {})
