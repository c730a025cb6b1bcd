"""
An environment that answers: what it says is read and never learned, and what was sampled around it
is what a loop over single rows samples, on every path.
"""
import functools
from dataclasses import replace

import pytest
import torch

from config import load_settings
from data.prompts import Prompt
from environment.episode import answering, openings, try_environment
from evaluate import evaluate, sample_evaluation
from grpo import collect, loss_masks, sample_groups
from sample import completion_logprobs
from run.decoder import Decoder
from run.metrics import batch_metrics
from run.report import print_iteration
from run.script import BadInput
from sample import decode, empty_rollout, generate
from speak import speak
from test_decoder import RecordingDecoder
from test_grpo import END, PROMPTS, TEXTS, TOKENIZER, gpt, gradients, nets_of, settings, train

T = 20
STOPS = tuple("aeinorst ?")
PROMPT_IDS = [prompt.ids for prompt in PROMPTS]


def game(prompts, transcripts):
    """Ends some episodes, says nothing to some, and speaks stop strings itself."""
    last = [sum(map(ord, text)) % 7 for text in transcripts]
    return [None if n == 0 else "" if n == 1 else f" {n}t" for n in last]


def world(function=game, **knobs):
    functions = {"letters": lambda prompts, completions: [text.count("t") for text in completions]}
    knobs = dict(max_turns=3, max_completion_length=T) | knobs
    cfg = settings(functions, **knobs)
    cfg.functions = functions | {"environment": function}
    return replace(cfg, stop_strings=STOPS).check()


def rollout_of(policy, cfg, num_generations=8, respond=True, **more):
    if respond:
        more["respond"] = answering(TOKENIZER, PROMPTS, cfg, num_generations)
    return generate(policy, PROMPT_IDS, num_generations, T, seed=7, eos=END, **more)


def turns_of(rollout):
    """Times that each row was answered (N,)."""
    own = rollout.sampled_mask | ~rollout.completion_mask
    return (own[:, :-1] & ~own[:, 1:]).sum(1)


def row_by_hand(policy, prompt, u, max_turns):
    """(ids, which of them are the policy's, ended) of a completion: a full forward pass a token."""
    ids, own = [], []
    answers, start = 0, 0
    while len(ids) < T:
        h = policy(torch.tensor([prompt.ids + ids]))[0, -1]
        cdf = policy.lm_head(h).float().softmax(0).cumsum(0)
        token = int((cdf <= u[len(ids)] * cdf[-1]).sum())
        ids, own = [*ids, token], [*own, True]
        new, turn = TOKENIZER.decode([token]), TOKENIZER.decode(ids[start:])
        if token != END and not any(stop in new and stop in turn for stop in STOPS):
            continue
        answer, = game([prompt.text], [TOKENIZER.decode([i for i in ids if i != END])])
        nothing = answer is None or token == END and not answer
        if nothing or answer and answers == max_turns:
            return ids, own, True
        forced = TOKENIZER.encode_ordinary(answer)[:T - len(ids)]
        if forced:
            ids, own = ids + forced, own + [False] * len(forced)
            answers, start = answers + 1, len(ids)
    return ids, own, False


@torch.no_grad()
def test_a_loop_over_single_rows_samples_the_same():
    policy, cfg = gpt(), world()
    r = rollout_of(policy, cfg)
    noise = torch.rand(32, T, generator=torch.Generator().manual_seed(7))
    texts = []
    for i, u in enumerate(noise):
        n = int(r.completion_mask[i].sum())
        found = r.tokens[i, -r.completion_mask.shape[1]:][:n].tolist(), r.sampled_mask[i, :n].tolist(), r.ended[i]
        assert found == row_by_hand(policy, PROMPTS[i // 8], u, cfg.max_turns), i
        texts.append(TOKENIZER.decode([token for token in found[0] if token != END]))
    assert [TOKENIZER.decode(ids) for ids in r.completions(END)] == texts, "an end token is no text"
    assert {0, 1, 2, 3} == set(turns_of(r).tolist()), "not a test of several turns"
    is_end = (r.tokens[:, -r.completion_mask.shape[1]:] == END) & r.completion_mask
    assert (is_end[:, :-1] & r.completion_mask[:, 1:]).any(), "no row went on after its end token"
    assert 3 < r.ended.sum() < 29


PATHS = [
    dict(batch_size=8), dict(decode=functools.partial(decode, drop=False)),
    dict(decode=lambda policy: Decoder(policy, graphs=False)),
    dict(decode=lambda policy: RecordingDecoder(policy, bucket=8))]


@pytest.mark.parametrize("truncation", [{}, dict(top_k=40)])
@pytest.mark.parametrize("path", PATHS)
@torch.no_grad()
def test_every_way_of_decoding_gives_the_same(path, truncation, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)   # no step may wait
    policy, cfg = gpt(), world()
    plain = rollout_of(policy, cfg, **truncation)
    if "decode" in path and not isinstance(path["decode"], functools.partial):
        path = dict(decode=path["decode"](policy))
    other = rollout_of(policy, cfg, **path, **truncation)
    for name in ("tokens", "mask", "chosen", "ended"):
        assert torch.equal(getattr(plain, name), getattr(other, name)), name
    found = completion_logprobs(policy, other)
    assert (found - other.logp).abs().max() < 1e-5, "the trainer disagrees with the sampler"
    assert turns_of(other).max() == 3


def test_parts_of_the_prompts_hear_their_own_answers():
    policy, cfg = gpt(), world(lambda prompts, texts: [f" {prompt}" for prompt in prompts])
    whole = rollout_of(policy, cfg)
    last = rollout_of(policy, cfg, part=slice(2, 4), batch_size=8)
    width = last.mask.shape[1]
    assert torch.equal(last.tokens[:, -width:], whole.tokens[16:, -whole.mask.shape[1]:][:, :width])
    assert TEXTS[3] in TOKENIZER.decode(last.completions(END)[-1])


@pytest.mark.parametrize("knobs", [dict(beta=.1), dict(speed=("attention", "retire"))])
def test_a_step_learns_from_what_the_policy_chose_alone(knobs):
    policy, cfg = gpt(), world(**knobs)
    batch = collect(nets_of(policy, cfg), PROMPTS, cfg, 7)
    chosen = batch.rollout.sampled_mask
    assert torch.equal(batch.loss_mask, chosen) and turns_of(batch.rollout).max() == 3
    steps, m = gradients(policy, batch, cfg, first=True)
    assert m["sampling/sampling_logp_difference/max"] < 1e-5 and abs(m["ratio"] - 1) < 1e-5
    batch.rollout.logp[~chosen] = 7.0
    if batch.ref_logp is not None:
        batch.ref_logp[~chosen] = -7.0
    other, _ = gradients(policy, batch, cfg, first=True)
    assert torch.equal(steps[0], other[0]), "a gradient depends on log-probs of forced tokens"


def test_metrics_count_what_the_policy_chose():
    cfg = world()
    nets = nets_of(gpt(), cfg)
    batch = collect(nets, PROMPTS, cfg, 7)
    rollout = batch.rollout
    m = batch_metrics(batch, cfg)
    lengths = rollout.sampled_mask.sum(1).double()
    assert m["forced"] == pytest.approx(1 - float(rollout.sampled_mask.sum() / rollout.completion_mask.sum()))
    assert .1 < m["forced"] < .9
    assert m["completions/mean_length"] == pytest.approx(float(lengths.mean()))
    assert m["completions/clipped_ratio"] == float((~rollout.ended).double().mean())


@pytest.mark.parametrize("max_turns", (1, 2))
def test_max_turns(max_turns):
    cfg = world(lambda prompts, texts: [" so?"] * len(texts), max_turns=max_turns)
    r = rollout_of(gpt(), cfg)
    answered = turns_of(r)
    assert answered.max() == max_turns
    assert (answered[r.ended] == max_turns).all(), "only an answer too many ends an episode here"
    assert r.ended.any()


def test_without_an_environment_nothing_changes():
    free = rollout_of(gpt(), world(), respond=False)
    off = rollout_of(gpt(), world(max_turns=0))
    quiet = world(lambda prompts, texts: [None] * len(texts))
    silent = rollout_of(gpt(), replace(quiet, stop_strings=()))
    for name, x in vars(free).items():
        if x is not None:
            assert torch.equal(x, getattr(off, name)), name
            assert torch.equal(x, getattr(silent, name)), f"{name}: an end that is agreed to"


def planted(texts, cfg, room=8, forced=(), over=()):
    """Rows whose last token is the last of these texts (or ids), just drawn -> the rollout. forced:
    rows whose tokens but the last were forced. over: rows that ended before it."""
    ids = [TOKENIZER.encode_ordinary(text) if isinstance(text, str) else text for text in texts]
    t = len(ids[0]) - 1
    assert all(len(row) == t + 1 for row in ids)
    prompt = torch.tensor([[1]] * len(ids))
    r = empty_rollout(prompt, prompt > 0, 1, t + 1 + room, END)
    r.tokens[:, 1:t + 2] = torch.tensor(ids)
    r.completion_mask[:, :t + 1] = True
    r.ended |= torch.tensor([row[-1] == END for row in ids])
    for i in forced:
        r.sampled_mask[i, :t] = False
    for i in over:
        r.completion_mask[i, t:] = False
        r.ended[i] = True
    rows = torch.arange(len(ids))
    answering(TOKENIZER, PROMPTS, cfg, 1)(0, r, rows, t, t + 1)
    return r


def test_a_stop_string_counts_once_and_where_it_is_complete():
    heard = []

    def listen(prompts, transcripts):
        heard.extend(transcripts)
        return [""] * len(transcripts)

    cfg = replace(world(listen), stop_strings=("</a>", "é"))
    planted(["x</a>", "x</b>", "</a>y", "</a>>"], cfg)
    assert heard == ["x</a>"], "the last of these completed it one token before"
    planted(["ab é", "ab è"], cfg)
    assert heard[1:] == ["ab é"], "a stop string of two bytes"
    planted(["y</a>"] * 4, cfg, forced=(1,), over=(2,))
    assert heard[2:] == ["y</a>"] * 2, "of a turn's own words, and while the row runs"


def test_answers_are_cut_and_ends_are_undone():
    cfg = world(lambda prompts, texts: ["1234567890" if "e" in text else None for text in texts])
    rows = [[*TOKENIZER.encode_ordinary("e"), END], TOKENIZER.encode_ordinary("xe")[:2],
            TOKENIZER.encode_ordinary("xt")[:2]]
    r = planted(rows, cfg, room=4)
    assert r.ended.tolist() == [False, False, True]
    assert r.sampled_mask.tolist() == [[True, True, *[False] * 4]] * 2 + [[True] * 6]
    assert TOKENIZER.decode(r.tokens[0, 3:].tolist()) == "1234"
    r = planted(rows, cfg, room=0)
    assert r.ended.tolist() == [False, False, True], "an answer without room counts as cut, too"
    assert r.completions(END)[2] == rows[2], "a stop string that ends a row is a part of its text"


def fails(prompts, transcripts):
    raise KeyError(transcripts[0])


@pytest.mark.parametrize("function, message", [
    (fails, r"environment raised KeyError: .*, for the prompt"),
    (lambda p, texts: "yes", "returned 'yes': must be a list with a text, or None, for each"),
    (lambda p, texts: texts[1:], "environment returned 18 answers for 19 transcripts"),
    (lambda p, texts: [3] * len(texts), "returned 3 for the transcript .*: must be a text, or"),
    (lambda p, texts: ["\ud800"] * len(texts), "must be a text"),
    (lambda p, texts, answer: texts, "environment asks for the column 'answer'; the prompt 'last'"),
    (lambda: [], r"environment takes \(\): must take"),
])
def test_what_an_environment_does_wrong_is_one_line(function, message):
    cfg = world(function)
    known = [Prompt(text, ids, row | {"answer": 1}) for text, ids, row in PROMPTS]
    with pytest.raises(BadInput, match=message) as error:
        try_environment(cfg, [*known * 2, Prompt("last", [1], {"text": "last"})], TOKENIZER)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("knobs, message", [
    (dict(force_rate=.5), "set force_text"), (dict(force_rate=2.0), "force_rate = 2.0"),
    (dict(max_turns=-1), "max_turns = -1"), (dict(stop_strings=(3,)), "must be text"),
    (dict(stop_strings=("",)), "must not be empty"),
    (dict(functions={}), "stop_strings = .*: the config file defines no function environment"),
    (dict(force_rate=.5, force_text="12345678901234567890"), "its 20 tokens leave no room")])
def test_settings_that_cannot_work(knobs, message):
    cfg = world()
    cfg.functions |= knobs.pop("functions", cfg.functions)
    if message.startswith("stop_strings"):
        del cfg.functions["environment"]
    with pytest.raises(BadInput, match=message):
        try_environment(replace(cfg, **knobs).check(), PROMPTS, TOKENIZER)


def test_an_environment_is_given_columns():
    prompts = [Prompt(text, ids, {"text": text, "sum": i}) for i, (text, ids, _) in
               enumerate(PROMPTS)]
    seen = []

    def tell(prompts, transcripts, sum, rows):
        seen.extend(zip(prompts, sum, rows))
        return [None] * len(prompts)

    cfg = world(tell)
    try_environment(cfg, prompts, TOKENIZER)
    seen.clear()
    cfg = replace(cfg, num_generations=2)
    sample_groups(nets_of(gpt(), cfg), prompts, cfg, 3)
    assert {text for text, _, _ in seen} == set(TEXTS)
    assert all(row == {"text": text, "sum": n} and TEXTS[n] == text for text, n, row in seen)


def test_whatever_samples_hears_the_environment(capsys):
    policy, cfg = gpt(), world(lambda prompts, texts: [" 77"] * len(texts), num_eval_generations=3)
    nets = nets_of(policy, cfg)
    rollout = sample_evaluation(nets, policy, cfg)
    answered = rollout.completion_mask & ~rollout.sampled_mask
    assert answered.any() and rollout.completion_mask.shape == (12, T)
    lengths = rollout.sampled_mask.sum(1).double()
    assert evaluate(nets, policy, cfg)[0]["mean_length"] == pytest.approx(float(lengths.mean()))
    spoken = speak(nets, policy, cfg, "you are", 3)
    assert any(" 77" in text for text, _ in spoken)
    cfg.functions["environment"] = lambda prompts, texts, answer: [" 77"] * len(texts)
    spoken = speak(nets, policy, cfg, "you are", 3)
    assert not any(" 77" in text for text, _ in spoken)
    assert "note: without the environment: environment asks for the column 'answer'" in (
        capsys.readouterr().out)


def test_an_opening_is_forced_on_its_share_of_the_rows():
    cfg = world(force_rate=.25, force_text="calc(", num_generations=400)
    ids = TOKENIZER.encode_ordinary("calc(")
    forced = openings(TOKENIZER, cfg, 4, seed=3)
    opened = forced[:, 0] >= 0
    assert abs(float(opened.double().mean()) - .25) < .04
    assert (forced[opened, :len(ids)] == torch.tensor(ids)).all()
    assert (forced[~opened] == -1).all() and (forced[:, len(ids):] == -1).all()
    assert torch.equal(forced[:800], openings(TOKENIZER, cfg, 2, seed=3)), "rows draw in order"
    assert not torch.equal(forced, openings(TOKENIZER, cfg, 4, seed=4))
    assert openings(TOKENIZER, world(force_text="calc("), 4, seed=3) is None


def test_openings_are_for_training_and_carry_no_loss(capsys):
    cfg = world(lambda prompts, texts: [None] * len(texts), force_rate=.5, force_text="calc(",
                num_eval_generations=8)
    policy = gpt()
    nets = nets_of(policy, cfg)
    batch = collect(nets, PROMPTS, cfg, 7)
    opened = ~batch.rollout.sampled_mask[:, 0]
    assert 2 < opened.sum() < 14
    assert [text.startswith("calc(") for text in batch.completions] == opened.tolist()
    assert sample_evaluation(nets, policy, cfg).chosen[:, 0].all()

    m = train(policy, batch, cfg, first=True) | batch_metrics(batch, cfg)
    assert m["sampling/sampling_logp_difference/max"] < 1e-5
    for line in (cfg, world(), replace(cfg, force_rate=0.0, functions={})):
        print_iteration(m | dict(iteration=1, step_time=1.0), line, 5, 1.0)
    *with_share, without = capsys.readouterr().out.splitlines()
    share = f"{100 * m['forced']:.1f} % forced"
    assert all(share in line for line in with_share) and "forced" not in without

    batch.loss_mask = loss_masks(batch.rollout, cfg)[0] | batch.rollout.completion_mask
    with pytest.raises(SystemExit, match="the policy did not choose carry loss"):
        train(policy, batch, cfg)


CONFIG = """
stop_strings = ("e", "a")
force_rate = 0.5
force_text = " the"

def environment(prompts, transcripts):
    return [" cat" if "cat" not in text else None for text in transcripts]

def reward(prompts, completions):
    return [len(text) % 5 for text in completions]
"""


def test_a_run_with_an_environment(grpo, rows, tmp_path):
    config = tmp_path / "config.py"
    config.write_text(CONFIG)
    out = grpo(tmp_path / "run", config, "--tracin=advantage", "--tracin_val_prompts=2",
               "--beta=0.1")
    lines = [line for line in out.splitlines() if line.startswith("iter ")]
    assert len(lines) == 3 and all(" % forced, " in line for line in lines)
    assert any(" cat" in row["completion"] for row in rows(tmp_path / "run" / "samples.jsonl"))
    assert all(row["forced"] > 0 for row in rows(tmp_path / "run" / "metrics.jsonl"))

    path = tmp_path / "run" / "config.json"
    assert load_settings([str(path)]).answers
    path.write_text(path.read_text().replace('"signature": "', '"signature": "0'))
    with pytest.raises(BadInput, match="'environment' is Python of somebody else's run"):
        load_settings([str(path), "--reward_funcs=judge"])
