"""
tape.Tape against one autograd backward per row: alone, without padding, in float64, and sharing no
code with it.

J (n, P) holds the gradient of every row, one line each, so that what a tape answers is linear
algebra: w @ J and J @ G.
"""
import functools
import os
import shutil
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conftest import ROOT
from model import GPT, GPTConfig
from common.device import autocast
from rollout import LogProb, States, of_logits
from tape import Tape, check_exact, inner
from worlds import refusal, seed_of, with_lora

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
V, SHAPE = 19, dict(block_size=16, n_layer=2, n_head=2, n_embd=8)
ALL = torch.ones(8)


@pytest.fixture(autouse=True)
def doubles_stay(monkeypatch):
    """of_logits computes in float32 whatever the model is; a float64 model keeps what it has."""
    to_float = torch.Tensor.float
    monkeypatch.setattr(
        torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))


# A case has a model and the losses of its rows: .micro [(n, flat, function -> (n,))] for the tape,
# .alone [function -> ()] by hand


def noise(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed_of(seed))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def perturbed(model, seed=0):
    """In float64, no parameter with its initial value."""
    model = model.double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(0.3 * noise(*p.shape, seed=100 * seed + i) + (p.dim() == 1))
    return model


def gpt(**shape):
    return perturbed(GPT(GPTConfig(V, **SHAPE | shape)))


def texts(n=8, seed=1):
    """n rows (prompt, completion, coefficient) of ragged lengths, with repeated tokens and
    coefficients of both signs."""
    g = torch.Generator().manual_seed(seed_of(seed))
    lengths = [[1, 1], *torch.randint(1, 6, (n - 1, 2), generator=g).tolist()]
    ids = [[torch.randint(V, (k,), generator=g).tolist() for k in pair] for pair in lengths]
    return [(p, c, float(a)) for (p, c), a in zip(ids, torch.randn(n, generator=g))]


def text_loss(model, value, rows, left=0, right=0, line=True):
    """(n, flat, losses): a coefficient times the mean log-prob of the completion, a value head
    beside it. Prompts are padded left, completions right. The head is given a line of tokens, or
    (n, T, C) with all padding."""
    P = max(len(row[0]) for row in rows) + left
    T = max(len(row[1]) for row in rows) + right
    tokens = torch.tensor([[3] * (P - len(p)) + p + c + [5] * (T - len(c)) for p, c, _ in rows])
    attention_mask = torch.arange(P + T) >= torch.tensor([[P - len(p)] for p, _, _ in rows])
    mask = torch.arange(T) < torch.tensor([[len(c)] for _, c, _ in rows])               # (n, T)
    targets = tokens[:, P:]
    i, t = mask.nonzero().T

    def losses():
        h = model(tokens[:, :-1], attention_mask[:, :-1])[:, -T:]                       # (n, T, C)
        if line:
            states = States(h[i, t], targets[i, t], None, (i, t))
            logp = of_logits(LogProb.apply, model, SimpleNamespace(logp=mask), 0.7, states)
        else:
            logp = (model.lm_head(h) / 0.7).log_softmax(-1)
            logp = logp.gather(2, targets[:, :, None])[:, :, 0]
        a = logp.new_tensor([row[2] for row in rows])[:, None]
        each = -a * logp
        if value is not None:
            each = each + (value(h)[:, :, 0] - a).square()
        return (mask * each).sum(1) / mask.sum(1)

    return len(rows), {model.lm_head: i} if line else {}, losses


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


class Odd(nn.Module):
    """What models by others do: layers that are used again, change their outputs in place, have no
    bias or a frozen one, are not used; residuals and positions that are added in place; hooks."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(5, 6)
        self.wpe = nn.Embedding(3, 6)
        self.again = nn.Linear(6, 6)
        self.up = nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6, eps=0.2)
        self.rms = nn.RMSNorm(6)
        self.down = nn.Linear(6, 2)
        self.idle = nn.Linear(2, 3)
        self.down.bias.requires_grad_(False)

    def forward(self, x):
        h = self.wte(x)
        h += self.wpe(torch.arange(3).expand(x.shape))
        for _ in range(2):
            h = h + self.again(h.tanh()).relu_()
        up = self.up(h)
        up[:, 1:] *= 2
        up.register_hook(lambda b: 3 * b)
        normed = self.norm(up).sigmoid_()
        return self.down(normed.tanh()).mul_(3) + self.rms(up).sin_().sum(-1, keepdim=True)


def odd_case():
    model, x = perturbed(Odd()), torch.arange(24).view(8, 3) % 5
    return SimpleNamespace(
        model=model, alone=[lambda row=row: model(row).sin().sum() for row in x.split(1)],
        micro=[(len(part), {}, lambda part=part: model(part).sin().sum((1, 2)))
               for part in x.split((3, 1, 4))])


def checkpointed(model, reentrant=False):
    for block in model.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    return model


LLAMA = dict(rms=True, swiglu=True, rope_base=100.0, n_kv_head=1, n_inner=6, bias=False)
QWEN3 = LLAMA | dict(head_dim=6, qk_norm=True)
NEO = dict(qkv_bias=False, attn_scale=1.0, window=2, local_layers=(1,))
CASES = {
    "gpt, tied": lambda: text_case(gpt()),
    "logits by row": lambda: text_case(gpt(), line=False, left=2, right=1),
    "llama, head in pieces": lambda: text_case(gpt(**LLAMA, tied=False)),
    "qwen3, blocks computed again": lambda: text_case(checkpointed(gpt(**QWEN3))),
    "gpt-neo, lora": lambda: text_case(perturbed(with_lora(gpt(**NEO), 2, 4), seed=5)),
    "value head": lambda: text_case(gpt(), perturbed(nn.Linear(8, 1), seed=7)),
    "odd": odd_case}


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def flat(G, model):
    return torch.cat([G[p].flatten() for p in trained(model)])


def unflat(v, model):
    parameters = trained(model)
    parts = v.split([p.numel() for p in parameters])
    return {p: x.view_as(p) for p, x in zip(parameters, parts)}


def gradient(loss, model):
    """(P,): .grad of an ordinary backward of loss ()."""
    parts = torch.autograd.grad(loss, trained(model), materialize_grads=True)
    return torch.cat([g.flatten() for g in parts])


def rows_of(case):
    """J (8, P), and what the micro-batches give together (P,)."""
    J = torch.stack([gradient(loss(), case.model) for loss in case.alone])
    return J, gradient(sum(losses().sum() for *_, losses in case.micro), case.model)


def taped(model, backward, n=8, flat={}):
    """A tape of n rows. backward() calls the model, and .backward() of what it gives."""
    with Tape(model, n) as tape:
        tape.rows(torch.arange(n), flat)
        backward()
    return tape


def record(case, tape=None, backward=torch.Tensor.backward):
    """A tape of the case. Rows have the numbers 0, 1, .., in the order of the micro-batches."""
    done = 0
    with tape or Tape(case.model, 8) as tape:
        for n, flat, losses in case.micro:
            tape.rows(torch.arange(done, done + n), flat)
            backward(losses().sum())
            done += n
    return tape


def error(x, y):
    """Relative, in the largest entry."""
    assert x.shape == y.shape, f"{tuple(x.shape)} in place of {tuple(y.shape)} numbers"
    assert x.isfinite().all(), "not all numbers of the tape are finite"
    return float((x - y).abs().max() / y.abs().max())


def agree(found, expected, what):
    gap = error(found, expected)
    assert gap < 1e-10, f"{what}: {gap:.1e} off what one backward per row gives"


@pytest.mark.parametrize("name", CASES)
def test_a_tape_is_one_backward_per_row(name, monkeypatch):
    if "pieces" in name:
        monkeypatch.setattr("rollout.LOGITS_AT_ONCE", 4 * V)
        monkeypatch.setattr("rollout.LOGITS_KEPT", 4 * V)
    case = CASES[name]()
    model = case.model
    J, together = rows_of(case)
    assert error(together, J.sum(0)) < 1e-10
    before = {name: x.clone() for name, x in model.state_dict().items()}
    tape = record(case, Tape(model, 8))

    for w in (ALL, noise(8, seed=9), noise(8, seed=9).relu(), *torch.eye(8)):
        agree(flat(tape.gradient(w), model), w.double() @ J, "the weighted gradient of the rows")
    own = tape.gradient(ALL)
    agree(tape.dot(own), J @ J.sum(0), "influences on the batch itself")
    anything = noise(J.shape[1], seed=11)
    agree(tape.dot(unflat(anything, model)), J @ anything, "influences on another gradient")

    rows = torch.tensor([1, 6, 3])
    agree(tape.squared_norms(rows), J[rows].square().sum(1), "squared norms of rows")
    scale = anything.square() + 0.1
    scaled = (J[rows].square() * scale).sum(1)
    agree(tape.squared_norms(rows, unflat(scale, model)), scaled, "the same, scaled by weight")
    others = torch.stack([J[i] @ (J.sum(0) - J[i]) for i in range(8)])
    agree(tape.dot(own) - tape.squared_norms(torch.arange(8)), others, "influence on others")

    assert all(p.grad is None for p in model.parameters()), "recording leaves nothing behind"
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert ("down.bias" in frozen) == (name == "odd") and not frozen & set(tape.names.values())


def test_a_further_loss_of_the_same_forward_is_summed():
    case = CASES["gpt, tied"]()
    expected = rows_of(case)[1]
    tape = Tape(case.model, 8)

    def backward(loss):
        loss.backward(retain_graph=True)
        tape.backward_summed(2 * loss)

    record(case, tape, backward)
    agree(flat(tape.gradient(ALL), case.model), expected, "the gradient")
    agree(flat(tape.summed_gradient(), case.model), 2 * expected, "the rest of the loss")


def two_layers():
    return perturbed(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)))


def test_a_second_backward_of_the_same_forward_is_refused():
    """Every layer between would be counted twice."""
    model = two_layers()
    x = noise(8, 5).requires_grad_()

    def saliency_first():
        loss = model(x).sin().sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()

    assert "2: a second backward of the same forward" in refusal(taped, model, saliency_first)


def test_rows_by_number_over_all_processes():
    """Whatever the order and the process of the rows: as one tape of all."""
    case = CASES["gpt, tied"]()
    J, _ = rows_of(case)
    tapes = []
    for micro_batches in ([[5, 2], [7]], [], [[0, 1, 6], [4, 3]]):
        with Tape(case.model, 8) as tape:
            for numbers in micro_batches:
                _, flat_layers, losses = text_loss(
                    case.model, None, [texts()[i] for i in numbers])
                tape.rows(torch.tensor(numbers), flat_layers)
                losses().sum().backward()
        tapes.append(tape)
    G = unflat(J.sum(0), case.model)
    rows = torch.tensor([0, 7])
    agree(sum(tape.dot(G) for tape in tapes), J @ J.sum(0), "influences")
    agree(sum(tape.squared_norms(rows) for tape in tapes), J[rows].square().sum(1), "squared norms")
    w = noise(8, seed=9)
    agree(sum(flat(tape.gradient(w), case.model) for tape in tapes), w @ J, "the gradient")


def test_a_row_of_weight_0_cannot_poison():
    """Its gradient may be infinite or not a number: what is not wanted has no part in the sum."""
    model, x = two_layers(), noise(8, 5)
    x[3, 2] = torch.nan
    w = ALL.index_fill(0, torch.tensor(3), 0)
    tape = taped(model, lambda: model(x).sin().sum().backward())
    assert all(g.isfinite().all() for g in tape.gradient(w).values())


def test_bfloat16_keeps_signs_and_weights():
    """Under autocast scores keep their order. A row's weight is not rounded to bfloat16."""
    model = gpt(n_embd=32).to(torch.float32)
    case = text_case(model, rows=texts(48), sizes=(20, 24, 4))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        with autocast("cpu", dtype):
            tape = record(case, Tape(model, 48))
        found.append((tape.dot(tape.gradient(torch.ones(48))), tape))
    exact, rough = found[0][0], found[1][0]
    assert any(r.b.dtype == torch.bfloat16 for r in tape.records[case.model.lm_head.weight])
    assert (exact.sign() == rough.sign()).double().mean() > 0.93 and error(rough, exact) < 0.05
    found = []
    for w in torch.eye(48):
        whole, weighed = tape.gradient(w), tape.gradient(0.7 * w)
        found.append(float(inner(weighed, whole) / inner(whole, whole)))
    # bfloat16 would make 0.6992 of it
    assert statistics.mean(found) == pytest.approx(0.7, abs=2e-4)


def losses_of(model, how):
    return {
        "sum": lambda x: model(x).sin().sum(),
        "mean over rows": lambda x: model(x).sin().sum((1, 2)).mean(),
        "rows mix": lambda x: (model(x) - model(x).mean(0)).sin().sum(),
        "dropout": lambda x: F.dropout(model(x), 0.5).sin().sum(),
        "another weight": lambda x: (x @ model[0].weight.T).sum() + model(x).sin().sum()}[how]


def test_the_example_in_the_readme_needs_nothing_but_tape(tmp_path):
    """tape.py alone beside it, as one who copies it out has it."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        example = f.read().split("```python\n")[1].split("```")[0]
    (tmp_path / "example.py").write_text(example)
    shutil.copy(os.path.join(ROOT, "tape.py"), tmp_path)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_hook_of_the_user_is_refused():
    """It would change the output, or the gradient, after the tape has seen it."""
    model = nn.Sequential(nn.Linear(5, 6))
    handle = model[0].register_forward_hook(lambda module, inputs, out: 3 * out)
    with pytest.raises(ValueError, match="0: has a hook"):
        Tape(model, 2)
    handle.remove()
    model[0].bias.register_hook(lambda grad: 3 * grad)
    with pytest.raises(ValueError, match="0: has a hook"):
        Tape(model, 2)


def test_a_bias_that_is_also_the_weight():
    model, x = perturbed(nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))), noise(8, 3, 5)
    model[1].bias = model[1].weight
    tape = taped(model, lambda: model(x).sin().sum().backward())
    agree(flat(tape.gradient(ALL), model), gradient(model(x).sin().sum(), model), "gradient")


def test_a_model_may_be_given_flattened_tokens_throughout():
    """Two rows of three tokens and one, in one call and in pieces."""
    model, x = two_layers(), noise(4, 5)
    owners = torch.tensor([1, 0, 1, 1])
    J = torch.stack([gradient(model(x[owners == i]).sin().sum(), model) for i in range(2)])

    def in_pieces():
        sum(model(piece).sin().sum() for piece in x.split(size)).backward()

    for size in (4, 3, 2, 1):
        tape = taped(model, in_pieces, 2, {model: owners})
        agree(tape.dot(unflat(J.sum(0), model)), J @ J.sum(0), f"influences, {size} at once")


@pytest.mark.parametrize("when", ("before the block", "in the block"))
@pytest.mark.parametrize("what", ("layer", "bias"))
def test_what_is_unfrozen_after_the_tape_was_made_is_refused(when, what):
    """Its gradient would be missing without a word."""
    model = two_layers()
    model[2].bias.requires_grad_(False)
    if what == "layer":
        model[2].requires_grad_(False)
    tape = Tape(model, 8)
    if when == "before the block":
        model.requires_grad_(True)
    with pytest.raises(ValueError, match="2.*: frozen or unfrozen after its Tape was made"):
        with tape:
            tape.rows(torch.arange(8))
            model.requires_grad_(True)
            model(noise(8, 5)).sum().backward()


def test_what_is_changed_in_place_after_the_backward_changes_nothing():
    """A layer's input may be a buffer of the user's; a hook may reuse the gradient's memory."""
    model = two_layers()
    gradients = []
    with Tape(model, 8) as tape:
        tape.rows(torch.arange(8))
        h = model[1](model[0](noise(8, 5)))
        out = model[2](h)
        out.register_hook(gradients.append)
        out.sin().sum().backward()
    G = tape.gradient(ALL)
    before = tape.dot(G)
    h.detach().zero_()
    gradients[0].zero_()
    assert torch.equal(tape.dot(G), before)
    assert torch.equal(flat(tape.gradient(ALL), model), flat(G, model))


def test_torch_func_is_refused_in_words():
    model, x = two_layers(), noise(8, 5)
    others = {name: p.detach() + 1 for name, p in model.named_parameters()}
    calls = (lambda: torch.func.functional_call(model, others, x), lambda: torch.vmap(model)(x))
    for call in calls:
        assert refusal(taped, model, call).startswith("0: runs in torch.func")
        assert all(p.requires_grad for p in model.parameters())


def test_a_model_that_was_compiled_before_is_refused_in_words():
    """It runs as it was traced, without the tape's hooks."""
    model, x = two_layers(), noise(8, 5)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    said = refusal(taped, model, lambda: compiled(x).sum().backward())
    assert "used outside its layer, or in a compiled model" in said


@pytest.mark.parametrize("how", ("sum", "mean over rows", "rows mix", "dropout", "another weight"))
def test_check_exact_tells_a_sum_over_rows(how):
    torch.manual_seed(seed_of(0))
    model, x = two_layers(), noise(4, 3, 5)
    if how == "sum":
        check_exact(model, losses_of(model, how), x)
        said = refusal(check_exact, model, losses_of(model, how), x[:1])
        assert "two rows or more" in said
        return
    said = refusal(check_exact, model, losses_of(model, how), x)
    assert "outside its layer" in said if how == "another weight" else "not a mean" in said


def test_check_exact_of_tokens_in_a_line():
    """Rows in a list, of unlike lengths; the first has no token with loss."""
    model, rows = gpt(), texts(3)
    rows[0] = (*rows[0][:2], 0.0)
    flat_layers = text_loss(model, None, rows)[1]
    check_exact(model, lambda part: text_loss(model, None, part)[2]().sum(), rows, flat_layers)
    mean = refusal(check_exact, model, lambda part: text_loss(model, None, part)[2]().mean(), rows,
                   flat_layers)
    assert "another gradient among 3 rows than alone" in mean


def test_check_exact_names_a_row_that_is_not_finite():
    model, x = perturbed(nn.Sequential(nn.Linear(5, 2))), noise(4, 3, 5)
    x[2, 1, 0] = torch.nan
    said = refusal(check_exact, model, losses_of(model, "sum"), x)
    assert "row 2 has a gradient that is not finite" in said


class Recurrent(nn.Module):
    """A language model whose cell is given (B, C), step by step."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, 6)
        self.cell = nn.Linear(6 + 6, 6)
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, V)

    def forward(self, tokens):
        x = self.wte(tokens)                                                        # (B, T, 6)
        h = torch.zeros_like(x[:, 0])                                               # (B, 6)
        states = []
        for t in range(x.shape[1]):
            h = self.norm(self.cell(torch.cat([x[:, t], h], 1))).tanh()
            states.append(h)
        return torch.stack(states, 1)


def recurrent_loss(model, tokens, lengths):
    """(B,): the head is given the tokens of all rows flattened, in two pieces."""
    mask = torch.arange(tokens.shape[1] - 1) < torch.tensor(lengths)[:, None]
    row, t = mask.nonzero().T
    h = model(tokens[:, :-1])[row, t]                                               # (M, 6)
    pieces = [model.lm_head(piece) for piece in h.split(max(1, len(h) // 2))]
    logp = torch.cat(pieces).log_softmax(-1).gather(1, tokens[row, t + 1, None])[:, 0]
    return logp.new_zeros(len(tokens)).index_add(0, row, logp.square())


@pytest.mark.parametrize("lengths", ([3, 0, 1, 0], [4, 0, 0, 0], [1, 1, 1, 1], [4, 1, 2, 1],
                                     [2, 5, 5, 4], [1, 2, 3, 5]))
def test_the_input_of_a_cell_is_not_taken_for_flattened_tokens(lengths):
    """(B, C), where M, or a piece of M tokens, is B or a multiple of it."""
    model = perturbed(Recurrent())
    tokens = torch.arange(4 * 6).view(4, 6) % V
    owners = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    tape = taped(model, lambda: recurrent_loss(model, tokens, lengths).sum().backward(), 4,
                 {model.lm_head: owners})
    J = torch.stack([gradient(recurrent_loss(model, tokens[[i]], lengths[i:i + 1]).sum(), model)
                     for i in range(4)])
    agree(tape.dot(unflat(J.sum(0), model)), J @ J.sum(0), "influences")
    w = noise(4, seed=3)
    agree(flat(tape.gradient(w), model), w @ J, "the weighted gradient")


UNKNOWN = {
    "Conv1d.*use torch's own Linear, Embedding, LayerNorm, RMSNorm": lambda: nn.Conv1d(3, 3, 1),
    "Sub": lambda: type("Sub", (nn.Linear,), {})(3, 3),
    "Linear": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "LayerNorm": lambda: nn.LayerNorm((2, 3)),
    "padding_idx": lambda: nn.Embedding(4, 3, padding_idx=0),
    "max_norm": lambda: nn.Embedding(4, 3, max_norm=1.0)}


@pytest.mark.parametrize("words", UNKNOWN)
def test_a_layer_that_is_not_known_is_named(words):
    make = UNKNOWN[words]
    model = nn.ModuleDict({"inner": nn.Sequential(make(), nn.Linear(3, 3))})
    with pytest.raises(ValueError, match=f"(?s)inner.0.*{words}"):
        Tape(model, 2)
    assert Tape(model.requires_grad_(False), 2).names == {}     # frozen, it may be anything


def test_what_the_tape_cannot_see_is_named():
    ids = torch.ones(2, 3, dtype=torch.long)

    def outside(model):
        F.linear(model(ids), model.wte.weight).sum().backward()

    def in_place(model):
        h = model(ids).tanh()
        y = model.lm_head(h)
        h.mul_(2)
        y.sum().backward()

    def by_keyword(model):
        model.ln_f(input=model.wte.weight[None])

    said = {by_keyword: "ln_f: called by keyword",
            outside: "wte.weight: used outside its layer",
            in_place: "lm_head: its input was changed in place before the backward"}
    for mistake, words in said.items():
        model = gpt()
        assert words in refusal(taped, model, lambda: mistake(model), 2)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert all(p.requires_grad for p in model.parameters())


def test_rows_that_do_not_fit_are_refused():
    """Two rows of two tokens; their hidden states reach the head as a line of four. nanoGPT's
    wpe(arange(T)): the words say what to write instead."""
    model = gpt()

    def in_a_line():
        h = model(torch.ones(2, 2, dtype=torch.long))
        model.lm_head(h.flatten(0, 1)).sum().backward()

    for n, owners, layer in ((0, [], "wte"), (3, [], "wte"), (1, [], "wte"), (2, [], "lm_head"),
                             (2, [0, 0, 1], "lm_head"), (2, [0, 0, 0, 1, 1], "lm_head")):
        flat_layers = {model.lm_head: torch.tensor(owners)} if owners else {}
        said = refusal(taped, model, in_a_line, n, flat_layers)
        assert said.startswith(f"{layer}: ") and "rows" in said
    shared = nn.ModuleDict({"wpe": nn.Embedding(8, 4)})
    for B, T in ((2, 5), (4, 4)):
        said = refusal(taped, shared, lambda: shared["wpe"](torch.arange(T)).sum().backward(), B)
        assert "wpe(arange(T).expand(B, T))" in said


def test_a_reentrant_checkpoint_is_refused():
    """Its blocks run in the backward for the first time, perhaps after the next rows()."""
    case = text_case(checkpointed(gpt(), True))
    said = refusal(record, case, Tape(case.model, 8))
    assert "set use_reentrant=False" in said
