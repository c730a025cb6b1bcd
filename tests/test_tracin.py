"""tracin.Tape against a loop of one autograd backward per row: alone, without padding, in float64, and sharing no code with it.

J (n, P) holds the gradient of every row, one line each, so that what a tape answers is linear algebra: w @ J and J @ G.
"""
import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.func import functional_call, jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tracin
from judge.scorer import Scorer, pad_right
from model import GPT, GPTConfig, add_lora, autocast, token_logprobs
from tracin import Tape

V = 19
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def doubles_stay(monkeypatch):
    """token_logprobs computes in float32 whatever the model is; here float64 models keep what they have."""
    to_float = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))


# ---------------------------------------------------------------------------------------------------------------
# models, and losses of their rows: in micro-batches for the tape, each alone for the oracle

def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def perturbed(model, dtype, seed=0):
    """No parameter keeps its initial value; the same weights in every dtype."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(p + 0.3 * noise(*p.shape, seed=100 * seed + i))
    return model.to(dtype)


def gpt(dtype=torch.float64, **shape):
    torch.manual_seed(0)
    return perturbed(GPT(GPTConfig(V, **dict(block_size=16, n_layer=2, n_head=2, n_embd=8) | shape)), dtype)


def texts(n=8, seed=1):
    """n rows (prompt, completion, coefficient) of ragged lengths, with repeated tokens and coefficients of both signs."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (n, 2), generator=g).tolist()
    lengths[0] = [1, 1]
    ids = [[torch.randint(V, (k,), generator=g).tolist() for k in pair] for pair in lengths]
    return [(p, c, float(a)) for (p, c), a in zip(ids, torch.randn(n, generator=g))]


def padded(rows, left=0, right=0):
    """tokens (n, P + T) with prompts padded left, completions right, by other tokens; real (n, P + T); mask (n, T)."""
    P, T = (max(len(row[i]) for row in rows) + more for i, more in ((0, left), (1, right)))
    tokens = torch.tensor([[3] * (P - len(p)) + p + c + [5] * (T - len(c)) for p, c, _ in rows])
    real = torch.arange(P + T) >= torch.tensor([P - len(row[0]) for row in rows])[:, None]
    return tokens, real, torch.arange(T) < torch.tensor([len(row[1]) for row in rows])[:, None]


def text_loss(model, rows, left=0, right=0, chunk=2 ** 24, flatten=True, value=None):
    """(n, flat, function that returns (n,)): coefficient times the mean log-prob of the completion, a value head beside it."""
    tokens, real, mask = padded(rows, left, right)
    T, flat = mask.shape[1], mask.nonzero()[:, 0]

    def losses():
        h = model(tokens[:, :-1], real[:, :-1])[:, -T:]                                             # (n, T, C)
        targets = tokens[:, -T:]
        if flatten:
            logp = token_logprobs(model.lm_head, h[mask], targets[mask], 0.7, chunk=chunk)
            logp = logp.new_zeros(mask.shape).masked_scatter(mask, logp)
        else:
            logp = (model.lm_head(h) / 0.7).log_softmax(-1).gather(2, targets[:, :, None])[:, :, 0]
        a = logp.new_tensor([row[2] for row in rows])
        loss = -(a[:, None] * logp * mask).sum(1) / mask.sum(1)
        return loss if value is None else loss + (mask * (value(h)[:, :, 0] - a[:, None]).square()).sum(1) / mask.sum(1)

    return len(rows), flat if flatten else None, losses


def text_alone(model, row, value=None):
    """The loss of one row by itself: no padding, no mask, no head module."""
    prompt, completion, a = row
    h = model(torch.tensor([prompt + completion])[:, :-1])[0, -len(completion):]                    # (T, C)
    logp = torch.stack([x.log_softmax(0)[t] for x, t in zip(h @ model.wte.weight.T / 0.7, completion)])
    return -a * logp.mean() + (0 if value is None else (value(h)[:, 0] - a).square().mean())


def text_case(model, whole=None, sizes=(3, 1, 4), rows=texts(), value=None, **how):
    parts = [text_loss(model, part, value=value, **how) for part in split(rows, sizes)]
    return SimpleNamespace(model=whole or model, micro=parts, alone=[lambda row=row: text_alone(model, row, value) for row in rows])


def split(rows, sizes):
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [rows[a:b] for a, b in zip([0, *ends], ends)]


class Net(nn.Module):
    """Rows (B, 5); one Linear and one LayerNorm are used three times; the others have no bias, or a frozen one."""
    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(5, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 1)
        self.norm, self.other = nn.LayerNorm(6, bias=False), nn.LayerNorm(6)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        x = self.other(self.first(x))
        for _ in range(3):
            x = x + self.norm(self.again(x).tanh())
        return self.last(x)[:, 0]


def net_case(dtype):
    torch.manual_seed(0)
    model, x, y = perturbed(Net(), dtype), noise(8, 5, seed=3).to(dtype), noise(8, seed=4).to(dtype)
    rows = split(list(range(8)), (3, 1, 4))
    return SimpleNamespace(model=model, micro=[(len(r), None, lambda r=r: (model(x[r]) - y[r]).square()) for r in rows],
                           alone=[lambda i=i: (model(x[i:i + 1]) - y[i]).square().sum() for i in range(8)])


def judge_case(dtype):
    torch.manual_seed(0)
    model = perturbed(Scorer(GPTConfig(V, block_size=16, n_layer=2, n_head=2, n_embd=8, causal=False)), dtype)
    rows = texts()

    def loss(part):
        idx, real = pad_right([p + c for p, c, _ in part])
        y = torch.tensor([float(a > 0) for *_, a in part], dtype=dtype)
        return F.binary_cross_entropy_with_logits(model(idx, real), y, reduction="none")

    return SimpleNamespace(model=model, micro=[(len(p), None, lambda p=p: loss(p)) for p in split(rows, (3, 1, 4))],
                           alone=[lambda r=r: F.softplus((1 - 2 * (r[2] > 0)) * model.score(model.trunk(
                               torch.tensor([r[0] + r[1]]))[:, 0])).sum() for r in rows])


def value_case(dtype):
    whole = nn.ModuleDict({"policy": gpt(), "value": perturbed(nn.Linear(8, 1), torch.float64, seed=7)}).to(dtype)
    return text_case(whole["policy"], whole, value=whole["value"])


CASES = {
    "gpt": lambda dtype: text_case(gpt(dtype)),
    "gpt, checkpointed head": lambda dtype: text_case(gpt(dtype), chunk=4 * V),
    "gpt, logits by row": lambda dtype: text_case(gpt(dtype), flatten=False, left=2, right=1),
    "gpt, no bias": lambda dtype: text_case(gpt(dtype, bias=False)),
    "lora": lambda dtype: text_case(perturbed(add_lora(gpt(), 2, 4), dtype, seed=5)),
    "judge": judge_case, "mlp": net_case, "value head": value_case}
both = pytest.mark.parametrize("case, dtype", [(c, d) for c in CASES for d in TOLERANCE])


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def by_hand(case):
    """J (n, P): one backward per row."""
    return torch.stack([torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(
        trained(case.model), torch.autograd.grad(loss(), trained(case.model), allow_unused=True))]) for loss in case.alone])


def record(case):
    with Tape(case.model) as tape:
        for n, flat, losses in case.micro:
            tape.rows(n, flat)
            losses().sum().backward()
    return tape


@functools.cache
def recorded(name, dtype):
    """(case, tape, J), J from the same weights in float64."""
    case = CASES[name](dtype)
    return case, record(case), by_hand(CASES[name](torch.float64))


def flat(G, model):
    return torch.cat([G[p].flatten() for p in trained(model)]).double()


def unflat(v, model):
    params = trained(model)
    return {p: x.view_as(p).to(p.dtype) for p, x in zip(params, v.split([p.numel() for p in params]))}


def plain(case):
    """{parameter: .grad} of an ordinary backward over all micro-batches."""
    model = copy.deepcopy(case.model)
    for _, _, losses in case.micro:
        losses().sum().backward()
    G = {p: torch.zeros_like(p) if p.grad is None else p.grad for p in trained(case.model)}
    case.model.zero_grad(set_to_none=True)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), case.model.parameters()))
    return G


def error(x, y):
    """Relative, in the largest entry."""
    assert x.shape == y.shape and x.isfinite().all()
    return float((x.double() - y.double()).abs().max() / y.double().abs().max())


def worst(G, H):
    """The largest relative error of any one parameter."""
    assert set(G) == set(H)
    return max(error(G[p], H[p]) for p in H if H[p].abs().max() > 0)


# ---------------------------------------------------------------------------------------------------------------
# exact

@both
def test_the_gradient_of_every_row(case, dtype):
    subject, tape, J = recorded(case, dtype)
    assert tape.n == len(J) == 8
    for i in range(len(J)):
        assert worst(tape.gradient(torch.eye(len(J))[i]), unflat(J[i], subject.model)) < TOLERANCE[dtype]


@both
def test_weighted_gradients(case, dtype):
    subject, tape, J = recorded(case, dtype)
    w = noise(8, seed=9)
    some = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1])
    for weights, exact in ((w, w), (-w.abs(), -w.abs()), (w * some, w * some), (some.bool(), some), (some, some)):
        G = tape.gradient(weights)
        assert worst(G, unflat(exact.double() @ J, subject.model)) < TOLERANCE[dtype]
        assert all(g.dtype == p.dtype and not g.requires_grad for p, g in G.items())
    assert all(torch.equal(g, torch.zeros_like(p)) for p, g in tape.gradient(torch.zeros(8)).items())


@both
def test_no_weights_give_what_an_ordinary_backward_gives(case, dtype):
    subject, tape, J = recorded(case, dtype)
    assert worst(tape.gradient(), plain(subject)) < (1e-13 if dtype == torch.float64 else 3e-6)
    assert worst(tape.gradient(torch.ones(8)), tape.gradient()) < (1e-14 if dtype == torch.float64 else 1e-6)


@both
def test_influence(case, dtype):
    subject, tape, J = recorded(case, dtype)
    model, own, other = subject.model, J.sum(0), noise(J.shape[1], seed=11)
    adam = other.square() + 0.1
    for G in (own, other, own * adam):
        scores = tape.dot(unflat(G, model))
        assert scores.dtype == dtype and error(scores, J @ G) < TOLERANCE[dtype]
    for leave in range(2):  # every other parameter, then the rest
        G = {p: g for i, (p, g) in enumerate(unflat(other, model).items()) if i % 2 == leave}
        zero = flat({p: G.get(p, torch.zeros_like(p)) for p in trained(model)}, model)
        assert error(tape.dot(G), J @ zero) < TOLERANCE[dtype]
    assert torch.equal(tape.dot({}), torch.zeros(8, dtype=dtype))


@both
def test_norms_and_leave_one_out(case, dtype):
    subject, tape, J = recorded(case, dtype)
    G = tape.gradient()
    norms = tape.norms(range(8))
    assert error(norms, J.square().sum(1)) < TOLERANCE[dtype]
    assert error(tape.norms([6, 1]), J[[6, 1]].square().sum(1)) < TOLERANCE[dtype]
    part = trained(subject.model)[:2]
    size = sum(p.numel() for p in part)
    assert error(tape.norms(range(8), parameters=part), J[:, :size].square().sum(1)) < TOLERANCE[dtype]
    without = torch.stack([J[i] @ (J.sum(0) - J[i]) for i in range(8)])
    assert error(tape.dot(G) - norms, without) < TOLERANCE[dtype]


@both
def test_scores_add_up(case, dtype):
    subject, tape, J = recorded(case, dtype)
    w = noise(8, seed=12)
    train, target = flat(tape.gradient(w), subject.model), tape.gradient(noise(8, seed=13))
    assert error((w * tape.dot(target)).sum(), train @ flat(target, subject.model)) < TOLERANCE[dtype]
    own = tape.gradient()
    assert error(tape.dot(own).sum(), flat(own, subject.model).square().sum()) < TOLERANCE[dtype]


def test_influence_on_held_out_rows():
    case, tape, J = recorded("gpt", torch.float64)
    held_out = text_case(case.model, rows=texts(5, seed=21), sizes=(2, 3))
    target = record(held_out).gradient()
    assert worst(target, plain(held_out)) < 1e-13
    assert error(tape.dot(target), J @ by_hand(held_out).sum(0)) < 1e-10


def test_a_frozen_base_costs_nothing():
    case, tape, J = recorded("lora", torch.float64)
    assert {tape.layers[module].split(".")[-1] for module, *_ in tape.records} == {"A", "B"}
    assert len(tape.records) == 3 * 2 * 8 and len(tape.names) == 2 * 8                              # micro-batches, 8 adapters
    assert all(f"{name}.weight" in tape.names.values() for name in tape.layers.values())
    model = gpt()
    for p in list(model.parameters())[1:-2]:
        p.requires_grad_(False)
    case = text_case(model)                                                                         # wte and ln_f are left
    tape, J = record(case), by_hand(case)
    assert {tape.layers[module] for module, *_ in tape.records} == {"wte", "lm_head", "ln_f"}
    assert error(tape.dot(tape.gradient()), J @ J.sum(0)) < 1e-10


# ---------------------------------------------------------------------------------------------------------------
# other ways to the same numbers

class Losses(nn.Module):
    def __init__(self, model, losses):
        super().__init__()
        self.model, self.forward = model, losses


def test_a_forward_derivative_agrees():
    case = text_case(gpt(), sizes=(8,))
    G = unflat(noise(sum(p.numel() for p in trained(case.model)), seed=15), case.model)
    module = Losses(case.model, case.micro[0][2])
    params = dict(module.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):
        losses, slope = jvp(lambda x: functional_call(module, x, ()), (params,), ({k: G[p] for k, p in params.items()},))
    assert error(record(case).dot(G), slope) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_a_finite_difference_agrees(name):
    case, tape, J = recorded(name, torch.float64)
    G = unflat(noise(J.shape[1], seed=16), case.model)
    before, losses = [p.detach().clone() for p in trained(case.model)], []
    with torch.no_grad():
        for step in (1e-5, -1e-5):
            for p, x in zip(trained(case.model), before):
                p.copy_(x + step * G[p])
            losses.append(torch.cat([f() for _, _, f in case.micro]))
        for p, x in zip(trained(case.model), before):
            p.copy_(x)
    assert error((losses[0] - losses[1]) / 2e-5, tape.dot(G)) < 1e-6


# ---------------------------------------------------------------------------------------------------------------
# what must not matter

@pytest.mark.parametrize("how", [dict(left=3), dict(right=4), dict(left=1, right=2, flatten=False), dict(sizes=(8,)),
                                 dict(sizes=(1, 1, 6)), dict(sizes=(5, 3), left=1)], ids=str)
def test_padding_and_micro_batches_change_nothing(how):
    case, tape, J = recorded("gpt", torch.float64)
    other = record(text_case(case.model, **how))
    G = tape.gradient()
    assert error(other.dot(G), tape.dot(G)) < 1e-12
    assert worst(other.gradient(noise(8)), tape.gradient(noise(8))) < 1e-12


def test_the_order_of_rows_changes_nothing():
    case, tape, J = recorded("gpt", torch.float64)
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    other = record(text_case(case.model, rows=[texts()[i] for i in order]))
    G = tape.gradient()
    assert error(other.dot(G), tape.dot(G)[order]) < 1e-12
    assert worst(other.gradient(noise(8)[order]), tape.gradient(noise(8))) < 1e-12


def test_two_forwards_before_one_backward():
    case, tape, J = recorded("gpt", torch.float64)
    losses = []
    with Tape(case.model) as other:
        for n, owners, f in case.micro:
            other.rows(n, owners)
            losses.append(f().sum())
        sum(losses).backward()
    assert error(other.dot(tape.gradient()), J @ J.sum(0)) < 1e-10


def test_two_backwards_of_one_forward():
    """A loss in two parts, each with a backward of its own: the second must not change what the first one left."""
    case, tape, J = recorded("gpt", torch.float64)
    with Tape(case.model) as other:
        for n, owners, f in case.micro:
            other.rows(n, owners)
            losses = f()
            (0.25 * losses).sum().backward(retain_graph=True)
            (0.75 * losses).sum().backward()
    assert worst(other.gradient(), unflat(J.sum(0), case.model)) < 1e-10


def test_an_input_buffer_that_is_used_again():
    torch.manual_seed(0)
    model, x, buffer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), noise(4, 3), torch.empty(2, 3).double()
    with Tape(model) as tape:
        for part in x.split(2):
            buffer.copy_(part)
            tape.rows(2)
            model(buffer).sum().backward()
    model(x).sum().backward()
    assert worst(tape.gradient(), {p: p.grad for p in model.parameters()}) < 1e-12


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant):
    torch.manual_seed(0)
    model, x = perturbed(nn.ModuleList([nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)]), torch.float64), noise(5, 3)

    def losses():
        h = checkpoint(lambda h: model[1](h).tanh(), model[0](x), use_reentrant=reentrant)
        return model[2](h)[:, 0].square()

    case = SimpleNamespace(model=model, micro=[(5, None, losses)])
    assert worst(record(case).gradient(), plain(case)) < 1e-12


@pytest.mark.parametrize("of", [(4,), (3, 4)])
def test_layernorm_over_one_and_two_dimensions(of):
    """Exact, or refused by name: never wrong in silence."""
    model, x = perturbed(nn.Sequential(nn.LayerNorm(of)), torch.float64), noise(5, 3, 4)
    case = SimpleNamespace(model=model, micro=[(5, None, lambda: model(x).sin().sum((1, 2)))])
    try:
        tape = record(case)
    except ValueError as e:
        assert len(of) > 1 and "0" in str(e) and "LayerNorm" in str(e)
        return
    assert worst(tape.gradient(), plain(case)) < 1e-12


def test_an_inplace_activation_after_the_first_layer():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)).double(), noise(5, 3)
    case = SimpleNamespace(model=model, micro=[(5, None, lambda: model(x).square().sum(1))])
    assert worst(record(case).gradient(), plain(case)) < 1e-12


def test_rows_are_known_on_every_device():
    model = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 1)).to("meta")          # stands in for a GPU
    with Tape(model) as tape:
        tape.rows(2)
        model(torch.zeros(2, 4, dtype=torch.long, device="meta")).sum().backward()
    assert tape.dot(tape.gradient()).shape == (2,)


def rank(x):
    return x.argsort().argsort().double()


def test_bfloat16_keeps_signs_and_ranks():
    torch.manual_seed(0)
    model = perturbed(GPT(GPTConfig(V, block_size=16, n_layer=2, n_head=2, n_embd=32)), torch.float32)
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        with autocast("cpu", dtype):
            tape = record(text_case(model, rows=texts(48), sizes=(20, 28)))
            target = record(text_case(model, rows=texts(32, seed=31), sizes=(32,))).gradient()
        assert all(g.dtype == torch.float32 for g in target.values())
        scores.append((tape.dot(target), tape.dot(tape.gradient())))
    assert any(b.dtype == torch.bfloat16 for *_, b in tape.records)                                 # it did run in bf16
    for exact, rough in zip(*scores):
        assert (exact.sign() == rough.sign()).double().mean() > 0.93
        assert torch.corrcoef(torch.stack([rank(exact), rank(rough)]))[0, 1] > 0.99
        assert error(rough, exact) < 0.05


# ---------------------------------------------------------------------------------------------------------------
# nothing else changes

def test_recording_leaves_the_model_as_it_was():
    def train(model, with_tape):
        optimizer = torch.optim.AdamW(trained(model), lr=0.01)
        for _ in range(3):
            case = text_case(model, sizes=(5, 3))
            if with_tape:
                losses = [f().detach() for _, _, f in case.micro]
                with Tape(model) as tape:
                    for (n, owners, f), before in zip(case.micro, losses):
                        tape.rows(n, owners)
                        loss = f()
                        assert torch.equal(loss, before)
                        loss.sum().backward()
                assert all(p.grad is None and p.requires_grad for p in model.parameters())
                tape.dot(tape.gradient()), tape.norms([0])
            sum(f().sum() for _, _, f in case.micro).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return model

    a, b = train(gpt(torch.float32), False), train(gpt(torch.float32), True)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    assert not any("forward" in vars(m) for m in b.modules())
    assert not any(m._forward_hooks or m._backward_hooks for m in b.modules())


def test_forward_comes_back_after_an_error():
    model = gpt()
    with pytest.raises(ZeroDivisionError):
        with Tape(model):
            1 / 0
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_layer_whose_forward_is_not_its_own_is_refused():
    """Recording would pass over what someone put there, and take it away at the end; two tapes at once likewise."""
    model = nn.Sequential(nn.Linear(3, 1))
    mine = model[0].forward = lambda x: F.linear(x, model[0].weight, model[0].bias) * 2
    with pytest.raises(ValueError, match="0"):
        with Tape(model):
            pass
    assert model[0].forward is mine


def test_forwards_without_gradient_are_not_recorded():
    case, tape, J = recorded("gpt", torch.float64)
    with Tape(case.model) as other:
        with torch.no_grad():
            case.model(torch.zeros(5, 4, dtype=torch.long))                                         # before rows(), of other size
        for n, owners, f in case.micro:
            other.rows(n, owners)
            with torch.no_grad():
                f(), case.model(torch.zeros(n + 1, 4, dtype=torch.long))
            f()                                                                                     # no backward, no record
            f().sum().backward()
    assert len(other.records) == len(tape.records)
    assert error(other.dot(tape.gradient()), J @ J.sum(0)) < 1e-10


# ---------------------------------------------------------------------------------------------------------------
# planted bugs: sum_i I_i = <G_train, G_target> must see them

TARGET = 22  # the seed of the held-out rows


def broken_sum(tape, case):
    """Relative error of the invariant, the worse of the batch's own target and a held-out one."""
    own = plain(case)
    targets = [tape.gradient(), record(text_case(case.model, rows=texts(6, TARGET), sizes=(6,))).gradient()]
    exact = [sum(float((own[p] * G[p]).sum()) for p in own) for G in targets]
    return max(abs(float(tape.dot(G).sum()) - x) / abs(x) for G, x in zip(targets, exact))


def summed(dims):
    """An (a, b) -> (a, b) that takes the sum over tokens or rows before the outer product."""
    return lambda a, b: (a.sum(dims, keepdim=True), b.sum(dims, keepdim=True)) if b.dim() == 3 and a.is_floating_point() else (a, b)


@pytest.mark.parametrize("what", ["parameter_gradient", "layer_dot"])
@pytest.mark.parametrize("dims", [1, 0], ids=["tokens", "batch"])
def test_sums_before_the_outer_product_are_seen(monkeypatch, what, dims):
    case = text_case(gpt(), sizes=(8,), flatten=False)
    tape = record(case)
    assert broken_sum(tape, case) < 1e-12
    exact, early = getattr(tracin, what), summed(dims)
    rows = 1 if what == "parameter_gradient" or dims else 8

    def planted(module, name, a, b, *G):
        if isinstance(module, nn.Linear):
            a, b = early(a, b)
        found = exact(module, name, a, b, *G)
        return found if what == "parameter_gradient" or len(found) == 8 else found.expand(rows) / rows

    monkeypatch.setattr(tracin, what, planted)
    assert broken_sum(tape, case) > 0.05


def test_dropped_cross_terms_of_the_tied_matrix_are_seen(monkeypatch):
    case = text_case(gpt(), sizes=(8,))
    tape = record(case)
    exact, wte = tracin.layer_dot, case.model.wte.weight
    parts = {type(module): tracin.parameter_gradient(module, "weight", a, b) for module, _, a, b in tape.records
             if module.weight is wte}
    assert set(parts) == {nn.Embedding, nn.Linear} and broken_sum(tape, case) < 1e-12
    monkeypatch.setattr(tracin, "layer_dot", lambda module, name, a, b, G: exact(
        module, name, a, b, parts[type(module)] if getattr(module, name) is wte else G))
    assert broken_sum(tape, case) > 0.05


@pytest.mark.parametrize("key", [lambda record: id(record[0].weight), lambda record: tuple(record[1].tolist())],
                         ids=["tied matrix", "micro-batch"])
def test_a_record_that_overwrites_another_is_seen(key):
    """Only with G_train from elsewhere: a tape that lost a record agrees with itself."""
    case = text_case(gpt(), sizes=(3, 5))
    tape = record(case)
    assert broken_sum(tape, case) < 1e-12
    tape.records = list({key(r): r for r in tape.records}.values())
    assert broken_sum(tape, case) > 0.05


def test_a_layer_used_twice_that_keeps_its_last_use_is_seen():
    case, tape, J = recorded("mlp", torch.float64)
    own = plain(case)
    found = record(case)
    found.records = list({(r[0], int(r[1][0])): r for r in found.records}.values())
    assert len(found.records) < len(tape.records)
    exact = sum(float(g.square().sum()) for g in own.values())
    assert abs(float(tape.dot(own).sum()) / exact - 1) < 1e-12 < 0.05 < abs(float(found.dot(own).sum()) / exact - 1)


# ---------------------------------------------------------------------------------------------------------------
# errors that name the thing

class MyLinear(nn.Linear):
    pass


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.temperature = nn.Linear(3, 2), nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("make, words", [
    (lambda: nn.Conv1d(3, 3, 1), "inner.0.*Conv1d"), (Bare, "inner.0.*Bare"), (lambda: MyLinear(3, 3), "inner.0.*MyLinear"),
    (lambda: nn.RMSNorm(3), "inner.0.*RMSNorm"), (lambda: nn.MultiheadAttention(4, 2), "inner.0.*MultiheadAttention"),
    (lambda: nn.Embedding(4, 3, padding_idx=2), "inner.0.*padding_idx"), (lambda: nn.Embedding(4, 3, padding_idx=0), "inner.0.*padding_idx"),
    (lambda: nn.Embedding(4, 3, max_norm=1.0), "inner.0.*max_norm"), (lambda: nn.Embedding(4, 3, sparse=True), "inner.0.*sparse"),
    (lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), "inner.0.*scale_grad_by_freq"),
    (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), "inner.0"),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "inner.0")])
def test_layers_that_are_not_known_are_named(make, words):
    model = nn.ModuleDict({"inner": nn.Sequential(make(), nn.Linear(3, 3))})
    with pytest.raises(ValueError, match=words):
        Tape(model)
    assert Tape(model.requires_grad_(False)).names == {}                                            # frozen it may be anything


def test_a_model_that_is_itself_not_known():
    with pytest.raises(ValueError, match="model.*Conv1d"):
        Tape(nn.Conv1d(3, 3, 1))


def test_a_parameter_used_outside_its_layer_is_named():
    model = gpt()
    with pytest.raises(ValueError, match="wte.weight is used outside its layer"):
        with Tape(model) as tape:
            tape.rows(2)
            F.linear(model(torch.ones(2, 3, dtype=torch.long)), model.wte.weight).sum().backward()
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_gradient_that_is_there_already_is_named():
    model = gpt()
    model.h[1].ln_2.bias.grad = torch.zeros(8)
    with pytest.raises(ValueError, match="h.1.ln_2.bias has a .grad"):
        with Tape(model):
            pass
    assert not any("forward" in vars(m) for m in model.modules())


class Shared(nn.Module):
    """Positions looked up once for all rows."""
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.head = nn.Embedding(V, 4), nn.Embedding(8, 4), nn.Linear(4, 1)

    def forward(self, idx):
        return self.head((self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))).sin())


@pytest.mark.parametrize("B, T, owners", [(2, 5, None), (4, 4, None), (2, 5, [0, 0, 0, 1, 1])],
                         ids=["plain", "as many positions as rows", "as many positions as flat tokens"])
def test_positions_shared_between_rows_are_refused(B, T, owners):
    model = Shared()
    with pytest.raises(ValueError, match="wpe"):
        with Tape(model) as tape:
            tape.rows(B, None if owners is None else torch.tensor(owners))
            model(torch.ones(B, T, dtype=torch.long)).sum().backward()


def test_rows_has_to_be_called():
    model = gpt()
    with pytest.raises(ValueError, match=r"rows\(n\) first"):
        with Tape(model):
            model(torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize("n, owners, layer", [(3, None, "wte"), (1, None, "wte"), (2, None, "lm_head"), (2, [0, 0, 1], "lm_head"),
                                              (2, [0, 0, 0, 1, 1], "lm_head")])
def test_rows_that_do_not_fit_are_refused(n, owners, layer):
    """Two rows of two tokens, whose hidden states reach the head as a line of four."""
    model = gpt()
    with pytest.raises(ValueError, match=f"{layer}.*rows"):
        with Tape(model) as tape:
            tape.rows(n, None if owners is None else torch.tensor(owners))
            model.lm_head(model(torch.ones(2, 2, dtype=torch.long)).flatten(0, 1)).sum().backward()


@pytest.mark.parametrize("piece", [3, 4, 5])
def test_a_line_of_tokens_in_pieces(piece):
    """Each token goes to its row, or the tape refuses; 4 tokens at a time are as many as there are rows."""
    torch.manual_seed(0)
    model, h = nn.Linear(3, 2).double(), noise(12, 3)
    owners = torch.arange(12) // 3
    with Tape(model) as tape:
        tape.rows(4, owners)
        torch.cat([model(x) for x in h.split(piece)]).sin().sum().backward()
    for i in range(4):
        model.zero_grad()
        model(h[owners == i]).sin().sum().backward()
        assert worst(tape.gradient(torch.eye(4)[i]), {p: p.grad for p in model.parameters()}) < 1e-12
