"""
explain.py: what it prints of tiny runs, whether it would notice wrong influences, what it refuses.
"""
import contextlib
import io
import json
import math
import os
import re
import shutil

import pytest
import torch

import explain
import grpo
import tracin
from config import load_settings, with_speed
from data.tokenizer import load_tokenizer
from model import GPT, GPTConfig
from run import findings
from run.files import load_file, save_file
from run.script import BadInput

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")
CONFIG = """
device = "cpu"
vocab_size, n_layer, n_embd, n_head, block_size, max_completion_length = 300, 1, 32, 2, 32, 8
pretrain_tokens, prompt_words = 40_000, (2, 4)
num_prompts, num_generations, micro_batch_size = 4, 4, 8
judge = eval_judge = None
num_eval_prompts, num_eval_generations, eval_interval, save_interval, max_iters = 2, 2, 0, 4, 7
learning_rate, log_micro, tracin = 3e-3, False, "self"


def reward(prompts, completions):
    return [text.count("e") + 0.1 * len(text) for text in completions]


def target(policy, tokenizer, batch):
    return -policy.ln_f.weight.square().sum() - policy.wpe.weight.square().sum()
"""
SETTINGS = {
    "self": [],
    "one backward": [
        "--tracin=advantage", "--tracin_leave_one_out=True", "--tracin_adam=True", "--top_k=20",
        "--lora_rank=2", "--zero_std_groups=drop", "--num_iterations=2", "--temperature=0.8"],
    "held out": [
        "--tracin=reward", "--tracin_val_prompts=3", "--tracin_val_size=5",
        "--tracin_layers=('h.0', 'wpe')", "--beta=0.1", "--sync_ref_model=True",
        "--ref_model_sync_steps=2", "--loss_type=grpo"],
    "kept": [
        "--tracin=advantage", "--tracin_kl=kept", "--beta=0.1", "--tracin_normalizer=norm"],
    "average": [
        "--tracin=reward", "--tracin_target_ema=0.8", "--critic=True", "--entropy_coef=0.01",
        "--tracin_val_prompts=3"],
    "bnpo": ["--loss_type=bnpo", "--tracin_leave_one_out=True"]}


def printed(*argv):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        explain.main(list(map(str, argv)))
    return out.getvalue()


def refusal(*argv):
    with pytest.raises(BadInput) as caught, contextlib.redirect_stdout(io.StringIO()):
        explain.main(list(map(str, argv)))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def errors(text):
    """{method: the errors in its line of the last table}"""
    found = {}
    for line in text.splitlines():
        if re.match("  (ghost|brute|jvp|finite_difference)", line):
            words = line.split()
            found[words[0].strip(",")] = [float(x) for x in words if "e" in x and x[0].isdigit()]
    return found


def of_target(text):
    """The errors that it names of the target's gradient."""
    return [float(x) for x in re.findall(r"gradient of the target.* error (.*)", text)]


def edit(folder, change, name="samples.jsonl"):
    """change(row) on every row of a log, True drops it."""
    path = os.path.join(folder, name)
    found = [json.loads(line) for line in open(path)]
    with open(path, "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in found if not change(row))


def content(folder):
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}


@pytest.fixture(scope="module")
def run(tmp_path_factory, comments):
    """run(name of SETTINGS): the folder of such a run, made once. Only for reading."""
    there, made = tmp_path_factory.mktemp("explained"), {}
    (there / "config.py").write_text(CONFIG)

    def make(name, *flags):
        if name not in made:
            made[name] = str(there / name)
            with contextlib.redirect_stdout(io.StringIO()):
                grpo.main([str(there / "config.py"), f"--comments={comments}",
                           f"--cache_dir={there}/prepared", f"--out_dir={made[name]}",
                           *SETTINGS.get(name, flags)])
        return made[name]

    return make


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run("self"), tmp_path / "run")


# ------------------------------------------------------------------------------------------------
# what it prints

def test_it_changes_nothing_and_prints_all_sections(run, rows):
    before = content(run("self"))
    text = printed(run("self"))
    assert before == content(run("self"))
    assert "112 rollouts of 7 iterations" in text and text.count("\n\n") == 5
    head = text.split("\n1. Rollouts")[0]
    assert [line[:2] for line in head.splitlines()[3:] if line[:2] != "  "] == ["- "] * 4
    assert " ".join(head.split()).count("standard deviations") == 1
    assert "nan" not in text and "Yes: brute agrees with both" in text
    assert all(re.search(f"^{i}. ", text, re.M) for i in range(1, 5))
    assert text.count("most helpful") == 2
    for name in ("reward", "advantage", r"\|advantage\|", "tokens"):
        line, = re.findall(f"^  {name} .*", text.split("\n2. ")[1], re.M)
        assert 1 <= line.count(" %") <= 5 and " - " not in line
    assert len(re.findall(r"^ +\d+ to \d+ ", text, re.M)) == 7
    metrics = rows(os.path.join(run("self"), "metrics.jsonl"))[-1]
    last = re.findall(r"^ +7 to 7 .*", text, re.M)[0].split()
    names = ("positive_ratio", "selected_ratio", "self_share", "target_cosine")
    expected = [f"{metrics['tracin/' + k]:.2f}" for k in names]
    assert last[3:] == [*expected, f"{metrics['tracin/invariant_error']:.0e}"]


def test_lists_are_sorted_in_the_units_of_their_iteration(run, rows):
    text = printed(run("self"), "--show=3", "--method=ghost")
    helpful, harmful = text.split("most harmful")[:2]
    harmful = harmful.split("  and of late")[0].split("\n2.")[0]
    scores = [[float(x) for x in re.findall(r"^ +([+-]\d+\.\d\d)  iteration", part, re.M)]
              for part in (helpful, harmful)]
    assert [len(x) for x in scores] == [3, 3]
    assert scores[0] == sorted(scores[0], reverse=True) and scores[1] == sorted(scores[1])
    assert scores[0][-1] > 0 > scores[1][-1]
    samples = rows(os.path.join(run("self"), "samples.jsonl"))
    z = []
    for it in range(1, 8):
        x = torch.tensor([r["influence"] for r in samples if r["iteration"] == it]).double()
        z += (x / x.square().mean().sub(x.mean() ** 2).sqrt()).tolist()
    best, worst = sorted(z)[:-4:-1], sorted(z)[:3]
    assert scores == [[round(x, 2) for x in best], [round(x, 2) for x in worst]]
    first = samples[max(range(len(z)), key=z.__getitem__)]
    line = re.findall(r".*  iteration .*", helpful)[0]
    assert repr(first["completion"]) in line
    assert f"iteration {first['iteration']}," in line and f"reward {first['reward']:.3f}" in line


def test_correlations_and_fifths():
    x = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 9, math.nan])
    cubes = x[:9] ** 3
    words = findings.relation(x, torch.cat([cubes, x[:1]]), torch.tensor([1.0, 0] * 5)).split()
    assert words[:4] == ["+1.00", "+4.50", "50", "%"]
    binary = findings.relation(torch.tensor([0.0, 1] * 5), torch.arange(10.0), torch.ones(10))
    assert binary.split()[1:] == ["+4.00", "100", "%", "+5.00", "100", "%"]
    assert binary.index("+4.00") == 27 and binary.index("+5.00") == 27 + 2 * 14     # 2nd and 4th
    unknown = torch.full((4,), math.nan)
    columns = dict(reward=torch.ones(4), tokens=torch.arange(4.0), advantage=unknown)
    table = findings.relations(torch.arange(4.0), torch.ones(4), columns)
    assert [table[i].split(maxsplit=1)[1] for i in (1, 3)] == 2 * [
        "the same in all rollouts of an iteration"]
    assert table[2].split()[:2] == ["tokens", "+1.00"]


def test_history_leaves_out_what_is_not_known():
    rows = [{"iteration": i, "tracin/target_cosine": 0.5, "tracin/invariant_error": 1e-7}
            for i in (1, 2)]
    del rows[0]["tracin/target_cosine"]
    lines = findings.history(rows)
    assert lines[0].split() == ["iterations", "target_cosine", "invariant_error"]
    assert lines[1].split()[3:] == ["1e-07"] and lines[2].split()[3:] == ["0.50", "1e-07"]
    assert "self_share is not known" in lines[3]


# ------------------------------------------------------------------------------------------------
# its sentences, where the right one is known

def drawn(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_shares_of_a_few_and_of_the_dropped():
    z = torch.full((200,), 0.5).double()
    z[100:] = -0.1
    z[3], z[150] = 30.0, -10.0      # 40 of 99.4
    held = findings.say_shares(z, z > -0.2)
    assert held.startswith("A few rollouts decide: the 2 of most influence, for or against (1 %), "
                           "hold 40 % of it; the 1 dropped (0 %) held 10 %")
    assert "changed little" not in held
    z[150] = -0.1
    held = findings.say_shares(z, z > 0)
    assert "the 100 dropped (50 %) held 11 %" in held
    z[100:] = -0.01
    assert "held 1 %, so leaving them out changed little." in findings.say_shares(z, z > 0)
    even = findings.say_shares(torch.ones(200), torch.ones(200) > 0)
    assert even.startswith("Many rollouts count: the 2 ") and even.endswith("hold 1 % of it.")


@pytest.mark.parametrize("cosines, words", [
    ([0.02, -0.03, 0.01, 0.04], "mostly noise .* cosine of 0.01 on average \\("),
    ([0.3] * 5, "part signal, part noise: .* 0.30 on average \\("),
    ([0.8] * 3, "mostly signal"),
    ([0.1, 0.5, 0.9], "0.50 on average, from 0.10 early to 0.90 late"), ([], "^$")])
def test_whether_the_target_is_noise(cosines, words):
    assert re.search(words, findings.say_target(cosines))


@pytest.mark.parametrize("plant, words", [
    (lambda reward, advantage: reward.exp(), "says hardly more than reward: .*1.00 with reward"),
    (lambda reward, advantage: -reward, "says hardly more than reward: .*-1.00 with reward"),
    (lambda reward, advantage: advantage + drawn(300, 5), "goes partly with advantage"),
    (lambda reward, advantage: advantage.abs(), r"says hardly more than \|advantage\|"),
    (lambda reward, advantage: drawn(300, 6), "says something else than reward and advantage")])
def test_whether_influence_says_more_than_reward(plant, words):
    reward, advantage = drawn(300, 1), drawn(300, 2)
    z = plant(reward, advantage)
    reward = torch.cat([reward, torch.tensor([math.nan])])
    advantage, z = (torch.cat([x, torch.zeros(1)]) for x in (advantage, z))
    columns = {"reward": reward, "advantage": advantage, "|advantage|": advantage.abs(),
               "tokens": z}     # of which it does not speak
    found = findings.say_likeness(z, columns)
    assert re.search(words, found) and "nan" not in found and "tokens" not in found
    equal = dict.fromkeys(columns, torch.ones(301))
    assert findings.say_likeness(z, equal) == ""


def test_what_was_different_about_the_helpful():
    """Within an iteration: what rises over a run, influence and reward alike, is no difference."""
    its = torch.arange(20).repeat_interleave(20)
    z = torch.where(torch.arange(400) % 20 < its, 1.0, -1.0).double()
    columns = {"reward": its + 0.1 * drawn(400, 1), "tokens": 20 - 3 * z + drawn(400, 2),
               "advantage": 0.4 * z + 0.2 * drawn(400, 3), "|advantage|": torch.ones(400).double()}
    columns = {name: findings.less_mean(its, x) for name, x in columns.items()}
    found = findings.say_difference(z, columns)
    words = r"helpful had fewer tokens \(by \d.*\), higher advantage \(by 0.\d+\)\.$"
    assert re.search(words, found)
    del columns["tokens"], columns["advantage"]
    assert "helpful were like the harmful" in findings.say_difference(z, columns)
    assert findings.say_difference(z.abs(), columns) == ""


def test_less_mean_keeps_what_is_equal_equal():
    its = torch.tensor([1, 1, 1, 2, 2, 2, 2])
    x = torch.tensor([0.1, 0.1, 0.1, 1.0, 2.0, 6.0, math.nan]).double()
    assert findings.less_mean(its, x)[:6].tolist() == [0, 0, 0, -2, -1, 3]


# ------------------------------------------------------------------------------------------------
# is the arithmetic right?

@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("method", ["brute", "jvp", "finite_difference"])
def test_every_method_agrees_with_the_tape_and_the_record(run, name, method):
    text = printed(run(name), f"--method={method}", "--rows=5")
    found = errors(text)
    assert "iteration 5 again, from ckpt_prev.pt: 16 of 16" in text and found["ghost"] == [0.0]
    assert max(found[method]) < 2e-5 and len(found[method]) == 2
    assert len(of_target(text)) == (name in ("self", "one backward", "kept"))
    assert all(x < 2e-5 for x in of_target(text))


def test_the_part_that_is_scored_is_that_of_the_run(run):
    assert "No: brute contradicts samples.jsonl" in printed(run("kept"), "--tracin_kl=all")
    # runs from before this setting weighed whole losses; without influence it says nothing
    assert with_speed({"tracin": "self"})["tracin_kl"] == "kept"
    assert with_speed({"tracin": "self", "tracin_kl": "all"})["tracin_kl"] == "all"
    assert "tracin_kl" not in with_speed({"tracin": "off"})


def test_a_wrong_record_is_seen(copied):
    edit(copied, lambda row: row.update(influence=-row["influence"]))
    text = printed(copied)
    found = errors(text)
    assert "No: brute contradicts samples.jsonl" in text
    assert found["ghost"][0] > 1 and found["brute"][0] < 1e-5 and found["brute"][1] > 1


@pytest.mark.parametrize("memory", [0, 4])
def test_a_wrong_tape_is_seen(run, memory, monkeypatch):
    """Contracted or kept, a tape is right; a bug in its way is seen in the scores, one in what is
    kept in the target too."""
    text = printed(run("self"), f"--tracin_memory={memory}")    # the run's was 4
    assert max(errors(text)["brute"]) < 1e-5 and errors(text)["ghost"][0] < 1e-5
    assert len(of_target(text)) == 1 and of_target(text)[0] < 1e-5
    keep, plain = tracin.Tape.store, tracin.layer_dot
    if memory:  # each layer's gradients are of the row before
        monkeypatch.setattr(
            tracin.Tape, "store", lambda tape, module, micro, part, a, b, tokens_per_row: keep(
                tape, module, micro, part, a, b.roll(1, 0), tokens_per_row))
    else:
        monkeypatch.setattr(tracin, "layer_dot", lambda module, name, *rest: plain(
            module, name, *rest) * (name != "bias"))
    if memory:
        assert "note: influence, kept off: differs" in printed(run("self"), "--tracin_memory=4")
    else:
        with pytest.raises(SystemExit, match="influence does not agree with plain gradients"):
            printed(run("self"), "--tracin_memory=0")
    monkeypatch.setattr(grpo, "prove", lambda nets, cfg: None)   # a bug that it does not see
    text = printed(run("self"), f"--tracin_memory={memory}")
    assert errors(text)["brute"][0] > 1e-3 and "No: brute contradicts the tape" in text
    assert len(of_target(text)) == 1 and (of_target(text)[0] > 1e-3) == bool(memory)


def test_other_samples_are_told(copied):
    def change(row):
        if row["iteration"] == 5:
            row["completion"] += "x"

    edit(copied, change)
    text = printed(copied, "--method=ghost")
    assert "0 of 16 completions are those recorded; another device" in text


@pytest.mark.parametrize("names, iteration", [
    (["ckpt_prev.pt"], None), (["ckpt.pt", "ckpt_prev.pt"], None), ([], 4)])
def test_checkpoints_that_fit_and_do_not(copied, names, iteration):
    for name in names:
        os.remove(os.path.join(copied, name))
    if iteration:  # killed after its checkpoint, before the next
        last = os.path.join(copied, "ckpt.pt")
        os.rename(os.path.join(copied, "ckpt_prev.pt"), last)
    text = printed(copied, "--method=ghost")
    expected = "iteration 5 again, from ckpt.pt" if iteration else "no checkpoint has the rollouts"
    assert expected in text


# ------------------------------------------------------------------------------------------------
# which words

def replayed(folder, *flags):
    """(explain.Again, Settings) of a run."""
    cfg = load_settings([os.path.join(folder, "config.json"), *flags])
    numbers = ("iteration", "reward", "advantage", "influence", "weight")
    rows = explain.read_log(folder, "samples.jsonl", numbers)
    again, about = explain.take_again(folder, cfg, rows)
    assert again is not None, about
    return again, cfg


@pytest.mark.parametrize("name", [*SETTINGS, "--tracin=target", "--tracin=contrastive"])
def test_the_words_of_a_rollout_add_up_to_its_influence(run, name):
    again, cfg = replayed(run(name, name))
    scores = again.scored.scores.double()
    words = explain.words_of(again, cfg, range(len(scores)))
    unit = float(scores.std(correction=0))
    found = torch.tensor([sum(piece.influence for piece in words[j]) for j in words])
    assert found.sub(scores / unit).abs().max() < 1e-5 * float(scores.abs().max() / unit)
    for j, i in enumerate(again.step.rows.tolist()):
        assert "".join(piece.text for piece in words[j]) == again.batch.completions[i]


def test_a_score_of_more_than_words_is_said_to_be(run):
    """With an entropy bonus in it, which is no function of the chosen tokens' log-probs."""
    folder = run("entropy", "--entropy_coef=0.1", "--tracin_kl=kept")
    assert "entropy_coef = 0.1: the tokens have" in printed(folder, "--token=e")
    assert "the tokens have" not in printed(run("self"), "--token=e")
    assert "the KL pushes too" in printed(run("kept"), "--token=e")
    assert "each token has its own advantage" in printed(run("average"), "--token=e")


def test_where_a_word_was_pushed(run, rows):
    folder = run("self")
    samples = [r for r in rows(os.path.join(folder, "samples.jsonl")) if r["iteration"] == 5]
    text = printed(folder, "--token=e")
    count = sum(row["completion"].count("e") for row in samples)
    table = [line.split(maxsplit=3) for line in text.splitlines() if " -> " in line]
    up = sum(words[2] == "up" for words in table)
    assert 0 < len(table) <= count
    assert f"'e' in {len(table)} places" in text
    assert f"pushes it up in {up}, down in {len(table) - up}." in text
    influence = [float(words[0]) for words in table]
    assert influence == sorted(influence, reverse=True)
    total = float(re.search("influence is (.*?) standard", text)[1])
    assert sum(influence) == pytest.approx(total, abs=1e-4 * len(table))
    for (x, advantage, way, place), x_number in zip(table, influence):
        # pushed the same way by both, or not
        same = (float(advantage) > 0) == (way == "up")
        assert abs(x_number) < 2e-4 or (x_number > 0) == same
        assert "«e»" in place
    assert "occurs in none of the 16 completions" in printed(folder, "--token=zebra crossing")
    assert "usage" in refusal(folder, "--token=") and "usage" in refusal(folder, "--token")


# ------------------------------------------------------------------------------------------------
# a page

def test_a_page_of_a_run(copied):
    before = content(copied)
    text = printed(copied, "--html", "--show=3", "--method=ghost")
    path = os.path.join(copied, "influence.html")
    assert text.splitlines()[-1] == f"{path}: open it in a browser"
    html = open(path, encoding="utf-8").read()
    os.remove(path)
    assert content(copied) == before
    assert 3 < html.count("<article>") <= 6 and "iteration 5 again" in html
    for sentence in re.findall(r"^- ((?:.*\n)(?:  .*\n)*)", text, re.M)[:4]:
        assert " ".join(sentence.split()) in html.replace("&#x27;", "'")
    for title in ("Reward of the rollouts", "Share of the rollouts", "Cosine of the target",
                  "Influence, in standard deviations, against reward"):
        assert f'aria-label="{title}' in html


def test_a_page_without_a_checkpoint_says_so(copied):
    os.remove(os.path.join(copied, "ckpt_prev.pt"))
    os.remove(os.path.join(copied, "eval.jsonl"))
    printed(copied, "--html")
    html = open(os.path.join(copied, "influence.html"), encoding="utf-8").read()
    assert "<p>no checkpoint has the rollouts of its next iteration" in html
    assert "<article>" not in html and html.count("<svg") == 5
    assert "no checkpoint has" in printed(copied, "--token=e")


def test_a_page_tells_of_other_completions_what_is_known(copied):
    edit(copied, lambda row: row["iteration"] == 5 and row.update(completion="other") or False)
    printed(copied, "--html", "--method=ghost")
    html = open(os.path.join(copied, "influence.html"), encoding="utf-8").read()
    cards = html.split("<article>")[1:]
    assert "0 of 16 completions are those recorded; another device" in html
    assert len(cards) > 3 and all("advantage" not in card.split("</dl>")[0] for card in cards)


# ------------------------------------------------------------------------------------------------
# who made the model say this?

@pytest.mark.parametrize("name", ["self", "one backward", "off"])
def test_classic_names_the_rollout_that_is_the_completion(run, rows, name):
    folder = run(name, "--tracin=off")
    near = [r for r in rows(os.path.join(folder, "samples.jsonl")) if r["iteration"] in (5, 7)]
    taught = [r for r in near if r.get("weight", 1) > 0 and r["completion"].strip()]
    best = max(taught, key=lambda r: r["advantage"])
    prompt, completion = best["prompt"], best["completion"]
    text = printed(folder, f"--prompt={prompt}", f"--completion={completion}", "--show=4")
    assert f"of {len(near)} rollouts" in text
    speak_for, against = text.split("most against")
    assert f"{prompt!r} -> {completion!r}" in speak_for     # among the first four of 32
    assert all(x.startswith("-") for x in re.findall(r"^ +(\S+)  iteration", against, re.M))


def test_a_column_called_messages_is_not_the_prompt(run, rows):
    folder = run("self")
    samples = rows(os.path.join(folder, "samples.jsonl"))[::6]
    cfg = load_settings([os.path.join(folder, "config.json")])
    _, expected = explain.classic(folder, cfg, samples, "the old", " cat likes")
    answered = [{"role": "user", "content": "the old"}, {"role": "assistant", "content": "no"}]
    samples = [r | {"row": {cfg.text_field: r["prompt"], "messages": answered}} for r in samples]
    _, scores = explain.classic(folder, cfg, samples, "the old", " cat likes")
    assert torch.equal(scores, expected)
    cfg.prompts, cfg.prompt_field = "asked.jsonl", "messages"
    assert explain.asked_of(samples[0], cfg) == answered


def test_classic_is_the_sum_over_checkpoints(run, rows):
    """Against the change of the log-prob by a tiny step on one row's loss, at each checkpoint."""
    folder = run("self")
    samples = rows(os.path.join(folder, "samples.jsonl"))
    cfg = load_settings([os.path.join(folder, "config.json")])
    found, scores = explain.classic(folder, cfg, samples, "the old", " cat likes")
    encode, total = load_tokenizer(300).encode_ordinary, 0.0
    i = max(range(len(found)), key=lambda i: abs(scores[i]))
    r = found[i]

    def mean_logp(policy, prompt, ids):
        h = policy(torch.tensor([encode(prompt) + ids])[:, :-1])[0, -len(ids):]
        logits = h @ policy.wte.weight.T
        return torch.stack([x.log_softmax(0)[t] for x, t in zip(logits, ids)]).mean()

    def asked(policy):
        return float(mean_logp(policy, "the old", encode(" cat likes")).detach())

    ids = (encode(r["completion"]) + [299])[:8]
    for name in ("ckpt_prev.pt", "ckpt.pt"):
        policy = GPT(GPTConfig(300, 32, 1, 2, 32))
        policy.load_state_dict(load_file(os.path.join(folder, name), "run")["policy"])
        policy.double()
        before = asked(policy)
        (-r["weight"] * r["advantage"] * mean_logp(policy, r["prompt"], ids)).backward()
        with torch.no_grad():
            for p in policy.parameters():
                p -= 1e-6 * p.grad
        total += 3e-3 * (asked(policy) - before) / 1e-6
    assert total == pytest.approx(float(scores[i]), rel=1e-3)
    assert all(score == 0 for r, score in zip(found, scores) if r["weight"] == 0)


# ------------------------------------------------------------------------------------------------
# what it refuses

def test_refusals(run, copied, tmp_path):
    folder = run("self")
    for argv in ([], ["--rows=3"], [folder, "--method=magic"], [folder, "--rows=0"],
                 [folder, "--show"]):
        assert "usage" in refusal(*argv)
    assert "one at a time" in refusal(folder, "--html", "--token=e")
    assert "one at a time" in refusal(folder, "--prompt=the", "--token=e")
    assert "config.json: cannot be read" in refusal(tmp_path / "none")
    assert "did you mean 'tracin_adam'" in refusal(folder, "--tracin_adm=True")
    assert "config/toxicity_tracin.py" in refusal(run("off", "--tracin=off"))
    assert "10 are needed" in refusal(run("off"), "--tracin=self")
    assert "0 tokens" in refusal(folder, "--prompt=the")
    too_long = "--completion=" + "long " * 40
    assert "block_size" in refusal(folder, "--prompt=the", too_long)
    edit(copied, lambda row: row["iteration"] > 1 or row.update(influence=None) or False)
    assert "0 rollouts with an influence" in refusal(copied)
    edit(copied, lambda row: True)
    assert "0 rollouts with an influence" in refusal(copied)
    assert "0 rollouts by" in refusal(copied, "--prompt=a", "--completion=b")
    os.remove(os.path.join(copied, "samples.jsonl"))
    assert "samples.jsonl: cannot be read" in refusal(copied)


@pytest.mark.parametrize("name, bad", [
    ("samples.jsonl", dict(influence="1")), ("samples.jsonl", dict(reward=[0.5])),
    ("samples.jsonl", dict(advantage=math.nan)), ("samples.jsonl", dict(weight=10 ** 400)),
    ("samples.jsonl", dict(weight=True)), ("samples.jsonl", dict(iteration=None)),
    ("samples.jsonl", dict(iteration=1.5)), ("samples.jsonl", dict(prompt=None)),
    ("samples.jsonl", dict(completion="\ud800")), ("samples.jsonl", dict(completion=7)),
    ("metrics.jsonl", {"iteration": "1"}), ("metrics.jsonl", {"tracin/target_cosine": "0.5"}),
    ("metrics.jsonl", {"tracin/invariant_error": {}})])
def test_rows_that_no_run_writes_are_named(copied, name, bad):
    edit(copied, lambda row: row["iteration"] == 2 and row.update(bad), name)
    row = 17 if name == "samples.jsonl" else 2
    said = f"has {next(iter(bad))} = .*which no run writes|holds half a character"
    assert re.search(f"{name}: row {row} ({said})", refusal(copied))


def test_fields_that_are_not_there_cost_no_more_than_themselves(copied):
    def change(row):
        for field in ("reward", "advantage") if row["iteration"] > 1 else ():
            del row[field]

    edit(copied, change)
    text = printed(copied, "--method=ghost")
    assert "nan" not in text and "rank correlation" in text
    assert "Which of 32 rollouts" in printed(copied, "--prompt=a", "--completion=b")

    def clear(row):
        for field in [k for k in row if k.startswith("tracin/")]:
            del row[field]

    edit(copied, clear, "metrics.jsonl")
    text = printed(copied, "--method=ghost")
    assert "The target is" not in text and "metrics.jsonl says nothing of influence" in text


def test_another_starting_policy_is_refused(copied):
    path = os.path.join(copied, "ckpt_prev.pt")
    checkpoint = load_file(path, "run")
    save_file(path, **checkpoint | {"base_hash": "0"})
    assert "another policy" in refusal(copied)
    open(path, "wb").write(b"cut")
    assert "not a readable checkpoint" in refusal(copied)


@pytest.mark.parametrize("name", ["tracin.py", "explain.py"])
def test_as_a_command(run, script, name):
    done = script(name, run("self"), "--rows=2")
    assert done.returncode == 0 and "brute, float64" in done.stdout and not done.stderr
    done = script(name, "nowhere")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: nowhere/config.json")
