"""
What the tests share: small worlds to train in, random models, made-up comments, and how to read a
refusal. All of it is made within the process and takes milliseconds.

    cfg = settings(beta=0.1)                    # settings of the tests, and those named here
    setup, batch = world(cfg)                   # what grpo.py works with, and a batch it sampled
    gradients, metrics = steps_of(setup, batch, cfg)        # grpo.update

The world of numbers: a random GPT with 12 tokens, two prompts, six completions of at most five
tokens each, so 12 rows. A text is its tokens in words, "3 1 4", and token 0 ends a completion.

The world of words, for what needs text: the tokenizer of the default job cut to 300 tokens, four
English prompts, four completions each. It is worked with in the same way:

    cfg = words(beta=0.1)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    batch = grpo.collect(setup, WORD_PROMPTS, cfg, seed=1)
"""
import contextlib
import copy
import csv
import io
import json
import os
import random
import runpy
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from common.errors import BadInput
from common.files import ROOT, read_rows
from common.kinds import Mark
from data.prompts import Prompt
from data.tokenizer import load_tokenizer
from loss import Batch, Step, grpo_loss, loss_of
from model import GPT, GPTConfig
from rollout import Rollout
from run.check import check
from run.settings import PARTS, Settings, load_settings
from run.setup import Inputs

WORLD_SEED = int(os.environ.get("WORLD_SEED", 0))   # other numbers, the same tests: see conftest.py


def seed_of(n):
    """Seed n of this session's worlds."""
    return 1000 * WORLD_SEED + n


def generator_of(seed):
    return torch.Generator().manual_seed(seed_of(seed))


def skip_without(extra):
    """Skip a test that needs another folder of extras/ than its own, where that was deleted."""
    if not os.path.isdir(f"{ROOT}/extras/{extra}"):
        pytest.skip(f"needs extras/{extra}")


def skip_for(**knobs):
    """Skip a test of settings that are in extras/variants, or have there what they name, where that
    was deleted."""
    own = {name: parts for name, parts in PARTS.items() if Mark("variant") in parts}
    if any(name not in PARTS or value not in own.get(name, [value])
           for name, value in knobs.items()):
        skip_without("variants")


# ------------------------------------------------------------------------------------------------
# random models

SHAPES = {
    "gpt2": {},
    "llama": dict(rope_base=1e4, rms=True, swiglu=True, n_kv_head=2, tied=False, bias=False,
                  rope_scaling=(8.0, 0.5, 2.0, 16)),
    "qwen3": dict(rope_base=1e4, rms=True, swiglu=True, n_kv_head=1, qk_norm=True, head_dim=16),
    "neo": dict(window=4, local_layers=(1,), attn_scale=1.0, qkv_bias=False, exact_gelu=True)}


def shaken(model, size=0.2, seed=5):
    """The model with noise on every weight, so that none has its first value."""
    generator = generator_of(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn(p.shape, generator=generator)
    return model


def random_gpt(vocab_size=50, seed=0, **shape):
    """A GPT whose next token is neither certain nor uniform. shape: fields of GPTConfig."""
    torch.manual_seed(seed_of(seed))
    shape = dict(block_size=24, n_layer=2, n_head=4, n_embd=32) | shape
    return shaken(GPT(GPTConfig(vocab_size, **shape)), seed=seed)


def with_lora(model, rank=3, alpha=6.0, seed=5):
    """A copy with adapters that do something."""
    skip_without("lora")
    from extras.lora import add_lora
    adapted = add_lora(copy.deepcopy(model), rank, alpha)
    torch.manual_seed(seed_of(seed))
    for name, p in adapted.named_parameters():
        if name.endswith("B.weight"):
            nn.init.normal_(p, std=0.2)
    return adapted


def random_ids(B, T, vocab_size=50, seed=1):
    return torch.randint(vocab_size, (B, T), generator=generator_of(seed))


# ------------------------------------------------------------------------------------------------
# the world of numbers

END = 0
PROMPTS = [Prompt("2 3", [2, 3], {}), Prompt("5 1 4 1", [5, 1, 4, 1], {})]  # the first is padded
TOKENIZER = SimpleNamespace(
    eot_token=END, n_vocab=12, decode=lambda ids: " ".join(map(str, ids)),
    encode_ordinary=lambda text: [int(word) for word in text.split()])


def number_gpt():
    return random_gpt(12, block_size=16, n_head=2, n_embd=16)


def mean_token(prompts, completions):
    """A reward that differs between completions, and by hundreds between prompts."""
    rows = [[int(word) for word in text.split()] for text in completions]
    return [100.0 * len(prompt) + sum(row) / (len(row) + 1) for prompt, row in zip(prompts, rows)]


def letters(prompts, completions):
    """A reward that looks random and is not."""
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def settings(functions=letters, weights=None, **knobs):
    """Settings for either world. functions: a reward, or {name: reward} with their weights."""
    if callable(functions):
        functions = {"reward": functions}
    if knobs.get("lora_rank"):
        skip_without("lora")
    knobs = dict(num_prompts=2, num_generations=6, max_completion_length=5,
                 max_grad_norm=0) | knobs
    skip_for(**knobs)
    cfg = load_settings([f"--{name}={value}" for name, value in knobs.items()])
    return check(replace(cfg, judge=None, eval_judge=None, functions=functions,
                         reward_funcs=tuple(functions), reward_weights=weights))


def inputs_of(base, prompts=PROMPTS, tokenizer=TOKENIZER):
    """What read_inputs would return: this policy before training, no judges."""
    return Inputs(torch.device("cpu"), torch.float32, base, judges={},
                  tokenizer=tokenizer, prompts=prompts, eval_prompts=prompts,
                  val_prompts=prompts)


def setup_of(cfg, policy=None, prompts=PROMPTS, tokenizer=TOKENIZER, reference=None, lr=0.01):
    """Setup as grpo.py works with, around this very policy. The optimizer is SGD, so that a step
    goes straight down the gradient."""
    policy = policy or number_gpt()
    setup = grpo.prepare(cfg, inputs_of(copy.deepcopy(reference or policy), prompts, tokenizer))
    if not cfg.lora_rank and not cfg.critic:
        setup.policy = policy.requires_grad_(True)
        setup.trained = list(policy.parameters())
    setup.optimizer = torch.optim.SGD(setup.trained, lr=lr)
    return setup


def world(cfg, seed=1, **more):
    """Setup, and a Batch that its policy has sampled. more: arguments of setup_of."""
    setup = setup_of(cfg, **more)
    return setup, grpo.collect(setup, setup.prompts, cfg, seed)


# ------------------------------------------------------------------------------------------------
# the world of words

WORDS = load_tokenizer(300)
WORD_PROMPTS = [Prompt(text, WORDS.encode_ordinary(text), {"text": text})
                for text in ("I am", "you are so", "what", "the end of it")]


def words(functions=letters, weights=None, **knobs):
    """Settings of the world of words: 4 prompts, 16 rows."""
    knobs = dict(num_prompts=4, num_generations=4, max_completion_length=8) | knobs
    return settings(functions, weights, **knobs)


def word_gpt(seed=0, end=4.0):
    """The larger `end`, the likelier the end token."""
    torch.manual_seed(seed_of(seed))
    model = GPT(GPTConfig(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=32))
    with torch.no_grad():
        model.wte.weight *= 7
        towards = model.wte.weight[WORDS.eot_token]
        model.ln_f.bias += end * towards / towards.norm()
    return model


# ------------------------------------------------------------------------------------------------
# a rollout

def forcing(forced):
    """A `respond` of rollout.generate that puts ids forced (N, T) behind the first token of each
    row at once; -1 where the policy draws."""
    def respond(first, r, rows, t, column):
        if t == 0:
            later = forced[first:first + len(rows), 1:]
            places = torch.arange(later.shape[1])
            r.sampled_mask[rows[:, None], 1 + places] = later < 0
            r.tokens[rows[:, None], column + 1 + places] = later.clamp(min=0)
            r.ended[rows] &= (later < 0).all(1)

    return respond


def settled(draw, tokens):
    """rollout.draw, but where rounding decides between two tokens, since a row's number u is within
    1e-5 of their border, the one of them that was drawn first, in tokens {u: token}."""
    def settled_draw(probs, u):
        drawn = draw(probs, u)
        below = draw(probs, (u - 1e-5).clamp(min=0))
        above = draw(probs, (u + 1e-5).clamp(max=1 - 1e-7))
        for i in (below != above).nonzero()[:, 0].tolist():
            first = tokens.setdefault(str(float(u[i])), int(drawn[i]))
            if int(below[i]) <= first <= int(above[i]) and probs[i, first] > 0:
                drawn[i] = first
        return drawn

    return settled_draw


def plain_logps(policy, rollout, temperature=1.0):
    """Log-probs of each completion's tokens, one row at a time, without padding, mask or cache:
    [(tokens of the row,)]."""
    T = rollout.completion_mask.shape[1]
    rows = []
    for i, ids in enumerate(rollout.tokens):
        prompt = ids[:-T][rollout.attention_mask[i, :-T]]
        completion = ids[-T:][rollout.completion_mask[i]]
        h = policy(torch.cat([prompt, completion])[None, :-1])[0, len(prompt) - 1:]
        logp = (policy.lm_head(h) / temperature).log_softmax(-1)
        rows.append(logp.gather(1, completion[:, None])[:, 0])
    return rows


def same_rollout(found, expected):
    """All but rounding. `allowed` says nothing about what follows the end."""
    for name, x in vars(expected).items():
        y = getattr(found, name)
        if name == "allowed" and x is not None:
            x, y = x[expected.completion_mask], y[expected.completion_mask]
        if x is None or not x.is_floating_point():
            assert x is y or torch.equal(x, y), f"rollouts differ in {name}"
        else:
            assert_near(y, x, what=f"{name} of two rollouts")


# ------------------------------------------------------------------------------------------------
# loss and step

def whole_step(batch):
    """The step that learns from all rows at once."""
    N = len(batch.loss_mask)
    return Step(0, torch.arange(N), N, int(batch.loss_mask.sum()))


def forward(setup, batch, cfg, rows=slice(None)):
    """loss.loss_of some rows of a batch that is one step."""
    step = whole_step(batch)
    return loss_of(setup, setup.policy, batch, step.rows[rows], step, cfg)


def loss_of_rows(logp, old_logp, advantages, mask, ref_logp=None, policy_mask=None, num_rows=None,
                 num_tokens=None, **knobs):
    """loss.grpo_loss of rows that are a whole step, unless num_rows and num_tokens say otherwise.
    knobs: settings of the loss."""
    skip_for(**knobs)
    step = SimpleNamespace(num_rows=num_rows or len(logp), num_tokens=num_tokens or int(mask.sum()))
    rollout = Rollout(mask, mask, mask, mask, old_logp, old_logp, mask.any(1))
    batch = Batch(
        rollout, advantages=advantages, loss_mask=mask, ref_logp=ref_logp,
        policy_mask=mask if policy_mask is None else policy_mask, row_weights=torch.ones(len(mask)))
    return grpo_loss(logp, batch, step, Settings(**knobs))


def gradient(loss, parameters):
    """Of a scalar: (weights,)."""
    parts = torch.autograd.grad(loss, list(parameters), materialize_grads=True)
    return torch.cat([g.flatten() for g in parts])


def steps_of(setup, batch, cfg, target=None, check=False, seed=3):
    """grpo.update -> the gradient (weights,) of each of its steps, and its metrics."""
    seen = []

    def watch(step, grad_norm):
        seen.append(torch.cat([p.grad.flatten() for p in setup.trained]))

    meter = grpo.Meter(setup, cfg, check=check, watch=watch)
    return seen, grpo.update(setup, batch, target, cfg, seed, meter)


# ------------------------------------------------------------------------------------------------
# comments and files

SENTENCE = [group.split() for group in (
    "a the my your", "green small quiet warm old", "garden river cat kettle window",
    "likes sees finds paints hears", "the this our", "bright round soft",
    "train song book lamp cake")]


def write_comments(path, count):
    """A CSV of `count` comments of seven harmless words. In every third, labelled 1, two of them
    are the made-up bad word "grumble"."""
    rng = random.Random(seed_of(0))
    with open(path, "w", newline="") as f:
        rows = csv.writer(f)
        rows.writerow(["text", "is_offensive"])
        for i in range(count):
            toxic = int(i % 3 == 0)
            sentence = [rng.choice(group) for group in SENTENCE]
            for place in rng.sample(range(1, len(sentence)), 2 * toxic):
                sentence[place] = "grumble"
            rows.writerow([" ".join(sentence), toxic])
    return str(path)


def write_rows(path, rows):
    """Make a .jsonl file."""
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


def flip_a_bit(path):
    """Of the largest tensor in a .pt file. Between tensors lies padding, which nobody reads."""
    with zipfile.ZipFile(path) as file:
        largest = max(map(file.read, file.namelist()), key=len)
    with open(path, "r+b") as file:
        content = bytearray(file.read())
        content[content.index(largest) + len(largest) // 2] ^= 1
        file.seek(0)
        file.write(content)


def untimed_metrics(folder):
    """Rows of a run's metrics.jsonl, without the times and without what is measured where an
    evaluation follows, which is also the last iteration."""
    return [row | {"step_time": 0, "kl_grad_share": None}
            for row in read_rows(f"{folder}/metrics.jsonl")]


# ------------------------------------------------------------------------------------------------
# what is found

def assert_near(found, expected, atol=1e-5, what="this"):
    """Equal but for rounding."""
    torch.testing.assert_close(
        found, expected, rtol=0, atol=atol, msg=lambda text: f"{what} is off: {text}")


def assert_close(found, expected, what, tolerance=1e-5):
    """Equal but for a share of the largest number."""
    assert found.shape == expected.shape and found.isfinite().all(), f"{what}: not the same numbers"
    gap = float((found - expected).abs().max() / expected.abs().max())
    assert gap <= tolerance, f"{what}: {gap:.1e} off what is expected"


def refusal(function, *args, error=(SystemExit, ValueError), **kwargs):
    """The one line with which a function refuses."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    text = str(caught.value)
    assert text and "\n" not in text.strip(), f"more than one line: {text}"
    assert len(text) <= 500, f"a line of {len(text)} characters: {text}"
    return text


def assert_refused(names, function, *args, **kwargs):
    """Bad input ends a command with exit code 2 and one line that names the thing: a setting, a
    file, a function or a value, or each of several. What else the line says is free."""
    text = refusal(function, *args, error=BadInput, **kwargs)       # exit code 2
    for name in [names] if isinstance(names, str) else names:
        assert name in text, f"the line does not name {name}: {text}"


def printed(function, *args, **kwargs):
    """What a call prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*args, **kwargs)
    return out.getvalue()


def command(name, *argv):
    """What `python NAME ARGUMENTS` prints, of a script of the project, without a process of its
    own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [name, *argv])
        return printed(runpy.run_path, f"{ROOT}/{name}", run_name="__main__")


class CastsOfMatrices(TorchDispatchMode):
    """Counts the casts to bfloat16 of matrices (rows, 32) or (32, columns), the weights' shapes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_cast = function.overloadpacket is torch.ops.aten._to_copy
        if is_cast and kwargs.get("dtype") == torch.bfloat16 and args[0].dim() == 2:
            self.count += 32 in args[0].shape and len(args[0]) > 12     # else hidden states
        return function(*args, **(kwargs or {}))
