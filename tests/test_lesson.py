"""The lessons run, and the notebooks beside them show what they print, but for rounding: a learning
curve adds it up, so of that only the words are compared. Each printing is held to what the lesson
says of its numbers."""
import contextlib
import io
import json
import os
import re
import runpy

import pytest
import torch

matplotlib = pytest.importorskip("matplotlib")
from common.files import ROOT  # noqa: E402
from worlds import skip_without  # noqa: E402
from tape import cosine, inner  # noqa: E402

LESSONS = ("lesson", "influence")
NUMBER = r"[+-]?\d[\d.]*(?:e[+-]?\d+)?"
LONG = re.compile("beta|answer [367]:.*(letter|flipped|beta)")      # lines on many steps
TEXT = r"""'[^']*'|"[^"]*"|\[[^]]*\]"""       # what a policy writes, and lists


def file_of(name):
    return os.path.join(ROOT, "docs/lesson", name)


def again(name):
    return f"{name}.py has changed: jupytext --to ipynb --set-kernel python3 --execute {name}.py"


def cells_of(name):
    with open(file_of(f"{name}.ipynb"), encoding="utf-8") as f:
        return json.load(f)["cells"]


def shown(text):
    """The lines a lesson prints itself, without those on the machine and on pretraining."""
    return [line for line in text.splitlines() if not re.match("device: |policy", line)]


def numbers_after(words, printed):
    """All numbers in a printed line, from these words on."""
    line = re.search(rf"{re.escape(words)}.*", printed)
    assert line, f"no line says {words!r}"
    return [float(x) for x in re.findall(NUMBER, line[0].removeprefix(words))]


def kept(name):
    """What the notebook shows of what the lesson printed."""
    outputs = [out for cell in cells_of(name) for out in cell.get("outputs", [])]
    texts = ["".join(out["text"]) for out in outputs if out.get("name") == "stdout"]
    return "\n".join(shown("".join(texts)))


@pytest.fixture(scope="module")
def printed_now(tmp_path_factory):
    """What each lesson prints. Both share a folder, and so the policy."""
    for extra in ("explain", "variants"):
        skip_without(extra)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        matplotlib.use("Agg")
        patch.chdir(tmp_path_factory.mktemp("lesson"))
        patch.syspath_prepend(file_of(""))
        for name in LESSONS:
            patch.setattr("sys.argv", [f"{name}.py"])
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                runpy.run_path(file_of(f"{name}.py"))
            matplotlib.pyplot.close("all")
            found[name] = "\n".join(shown(out.getvalue()))
        assert len(os.listdir("out/lesson")) == 16
    return found


@pytest.fixture(params=["now", "in the notebook"])
def printed(request):
    """What each lesson prints now, and what its notebook shows."""
    if request.param == "now":
        return request.getfixturevalue("printed_now")
    return {name: kept(name) for name in LESSONS}


def test_the_numbers_of_a_step_agree(printed):
    text = printed["lesson"]
    assert numbers_after("ratio ", text)[0] == pytest.approx(1, abs=1e-5)
    up, below = numbers_after("likelier although below average:", text)
    assert 0 < up < below
    outside, tokens = numbers_after("outside the clip's range are", text)
    held, _ = numbers_after("the clip holds", text)
    assert 0 < held <= outside < tokens, "held are those that went the right way, and too far"
    free_gain, *_ = numbers_after("without the clip: the largest gain is", text)
    gain, _, largest = numbers_after("with the clip: the largest gain is", text)
    assert gain == 0.2 < free_gain / 2, "the clip bounds what a token gains"
    assert largest > 1.2, "the clip does not bound a ratio"


def test_the_estimates_of_the_kl_agree_with_the_sum_over_the_vocabulary(printed):
    text = printed["lesson"]
    exact = numbers_after("exact KL ", text)[0]
    of_one = {}
    for name in ("k1", "k2", "k3"):
        mean, std, negative, near = numbers_after(f"{name}: mean over all draws", text)
        assert (mean == exact) == (name != "k2"), "k1 and k3 have the KL as their mean"
        assert (negative > 10) == (name == "k1"), "k3 is never negative, k1 often"
        assert near < 30 if name == "k1" else near > 80, "k3 is mostly near the KL, k1 seldom"
        of_one[name] = std
    assert of_one["k3"] > of_one["k1"] > 2 * exact, "rare draws of k3 are far off"


def test_the_reward_rises_and_beta_keeps_the_kl_small(printed):
    curves = [numbers_after(f"beta {beta}: reward", printed["lesson"]) for beta in ("0.0", "0.1")]
    for start, end, *_ in curves:
        assert end > start + 0.03
    assert curves[1][-1] < 0.7 * curves[0][-1]


def test_the_first_lessons_answers_are_what_it_prints(printed):
    def answer(words):
        return numbers_after(f"answer {words}", printed["lesson"])

    rare, _, different, count = answer("1: temperature 0.3:")
    assert answer("1: temperature 1.0:")[0] > rare == 0 and different > count / 2
    assert answer("2:")[-1] < answer("2:")[-2], "it counts less, undivided"
    start, end = answer("3: flipped: the share of e goes from")
    assert end < start / 2
    assert answer("4: learning rate 5e-05: the clip holds")[0] == 0
    assert answer("4: learning rate 0.001: the clip holds")[0] > 0
    near, far = answer("5: after 1 steps"), answer("5: after 3 steps")
    assert near[0] < far[0] and near[4] < far[4] / 2, "k2 is off by less where both are near"
    assert near[2] == near[6] == far[2] == far[6] == 0, "k1 and k3 are exact"
    start, end, *_ = numbers_after("beta 0.0: reward", printed["lesson"])
    held_start, held_end, *_ = answer("6: beta 1.0: reward")
    assert held_end - held_start < (end - start) / 2
    start, end, *_ = answer("7: letter o: reward")
    assert end > 2 * start


def test_influence_is_what_a_step_does(printed):
    text = printed["influence"]
    assert numbers_after("largest difference from section 2:", text)[0] < 1e-5
    words, _, influence = numbers_after("the tokens add up to", text)
    assert words == pytest.approx(influence, rel=1e-3)
    step, promised, gave = numbers_after("AdamW's step on all: the target's loss falls by", text)
    assert step == pytest.approx(promised, rel=0.03)
    assert gave == pytest.approx(promised, rel=0.15)
    assert numbers_after("AdamW on one rollout alone: correlation with influence", text)[0] < 0.9
    assert numbers_after("the cosine of the target's two halves is", text)[0] < 1


def test_shares_add_up_to_the_change_and_derivatives_predict_it(printed):
    text = printed["influence"]
    change, left_end = numbers_after("the log-prob changed by", text)
    shares, = numbers_after("with the mean of both slopes they add up to", text)
    assert abs(shares - change) < 0.2 * abs(left_end - change) + 0.001
    tenth, whole = numbers_after("the derivatives are off by", text)
    assert tenth < whole < 20
    assert 2 * tenth < numbers_after("without H they are off by", text)[0]
    rise = numbers_after("R rose from", text)[2]
    shares, _, left_end = numbers_after("the shares add up to", text.partition("R rose")[2])
    assert abs(shares - rise) < 0.2 * rise
    assert abs(shares - rise) < abs(left_end - rise) + 0.05 * rise


def test_the_second_lessons_answers_are_what_it_prints(printed):
    def answer(words):
        return numbers_after(f"answer {words}", printed["influence"])

    own, others, *_ = answer("1: influence on the first group: its own rollouts")
    assert own > others > 0
    total, square = (numbers_after(words, printed["influence"])[0]
                     for words in ("sum of all influences", "inner(target, target)"))
    assert total == pytest.approx(square, rel=1e-3)
    off = [answer(f"3: SIZE {size}: the falls are off by")[0] for size in ("0.1", "0.5", "2")]
    assert off == sorted(off) and off[-1] > 2 * off[0]
    kept = [answer(f"4: RATE {rate}: AdamW's step gives")[0] for rate in ("1e-05", "0.001")]
    assert kept[0] == pytest.approx(100, abs=3) and kept[1] < 80
    few, many = (answer(f"6: num_generations {n}: agreement of two seeds is")[0] for n in (6, 24))
    assert few < many
    (kept, _, cosine_all), (kept_out, _, turned) = map(answer, ("7: target batch:",
                                                               "7: target held-out:"))
    assert kept_out < kept and turned < cosine_all
    before = [(abs(left - change), abs(mean - change)) for change, left, mean in (
        answer(f"8: SIZE {size}: the change is") for size in ("0.05", "0.3", "1"))]
    assert all(mean < left for left, mean in before) and before == sorted(before)
    tenth, whole = answer("9: SIZE 0.2: the derivatives are off by")
    assert tenth < whole / 2
    here = [numbers_after("the derivatives are off by", printed["influence"])]
    assert here[0][0] < tenth and here[0][1] < whole, "a longer step is off by more"
    assert answer("10: SIZE = 0.5: the shares add up to")[0] < 60


def solution(name, **given):
    """The line that docs/lesson/README.md has for this name, computed."""
    with open(file_of("README.md"), encoding="utf-8") as f:
        code = re.search("```python\n(.*?)```", f.read(), re.DOTALL)[1]
    line = re.search(rf"^{name} = .*\n(?: .*\n)*", code, re.MULTILINE)[0]
    exec(line, given)
    return given[name]


def test_a_written_line_is_told_right_or_which_mistake_it_is(monkeypatch, capsys):
    monkeypatch.syspath_prepend(file_of(""))
    import classroom

    def told(judge, yours, *given):
        judge(yours, *given)
        return capsys.readouterr().out

    torch.manual_seed(1)
    rewards = torch.rand(24, dtype=torch.float64)
    r = rewards.view(-1, 6)
    centred = r - r.mean(1, keepdim=True)
    judge, given = classroom.judge_advantages, (rewards, 6)
    assert "right" in told(judge, solution("advantages", rewards=rewards, G=6), *given)
    for words, yours in {"all rollouts": (rewards - rewards.mean()) / rewards.std(),
                         "not divided": centred, "none of the usual": centred * 3,
                         "n - 1": centred / r.std(1, keepdim=True, correction=0),
                         "not written": ..., "shape": r.mean(1)}.items():
        assert words in told(judge, yours, *given), f"{words} is not what it says"

    cfg = classroom.load_settings([f"{ROOT}/config/lesson.py"])
    ratio, A = torch.linspace(0, 3, 101)[:, None], torch.tensor([1.0, -1.0])
    rho = ratio.clamp(0.8, 1.2)
    judge, given = classroom.judge_objective, (ratio, A, cfg)
    yours = solution("objective", torch=torch, ratio=ratio, A=A, cfg=cfg)
    assert "right" in told(judge, yours, *given)
    for words, yours in {"no min": rho * A, "max": torch.max(ratio * A, rho * A),
                         "product": (ratio * A).clamp(0.8, 1.2)}.items():
        assert words in told(judge, yours, *given)

    class FakeTape:
        def dot(self, x):
            return torch.stack([inner(g, x) for g in gradients])

    gradients = [{0: x} for x in torch.randn(4, 5)]
    target, slope = ({0: x} for x in torch.randn(2, 5))
    right, dots = FakeTape().dot(target), FakeTape().dot(slope)
    judge, given = classroom.judge_influence, (gradients, target)
    yours = solution("influence", torch=torch, inner=inner, target=target, alone=gradients)
    assert "right" in told(judge, yours, *given)
    for words, yours in {"a cosine": [cosine(g, target) for g in gradients], "wrong sign": -right,
                         "itself": [inner(g, g) for g in gradients]}.items():
        assert words in told(judge, torch.tensor([*map(float, yours)]), *given)
    judge, given = classroom.judge_shares, (FakeTape(), 0.05, slope, target)
    yours = solution("shares", SIZE=0.05, tape=FakeTape(), slope_before=slope)
    assert "right" in told(judge, yours, *given)
    for words, yours in {"wrong sign": 0.05 * dots, "without SIZE": -dots,
                         "loss's gradient": -0.05 * right}.items():
        assert words in told(judge, yours, *given)


def test_the_lessons_begin_with_the_page_and_end_at_what_influence_adds(printed):
    with open(os.path.join(ROOT, "nano_tracin.py"), encoding="utf-8") as f:
        page = {re.sub(" +# .*", "", line.rstrip("\n")) for line in f}
    begun = printed["lesson"].splitlines()
    assert begun[0] == "for it in range(max_iters):" and "optimizer.step()" in "".join(begun[:40])
    added = [line for line in printed["influence"].splitlines() if line in page]
    assert any("influence = " in line for line in added)
    assert "    helps = influence > 0" in added and not any("clip_grad" in line for line in added)


@pytest.mark.parametrize("name", LESSONS)
def test_the_notebook_is_the_lesson(name):
    cells = cells_of(name)
    in_notebook = [line for cell in cells for line in "".join(cell["source"]).splitlines() if line]
    with open(file_of(f"{name}.py"), encoding="utf-8") as f:
        lines = [line.rstrip("\n") for line in f if not line.startswith("# %%")]
    in_lesson = [re.sub("^# ?", "", line) for line in lines if line.strip("#\n")]
    assert in_notebook == in_lesson, again(name)
    assert os.path.getsize(file_of(f"{name}.ipynb")) < 2 ** 20


@pytest.mark.parametrize("name", LESSONS)
def test_the_notebook_was_run_from_its_first_cell_to_its_last(name):
    code = [cell for cell in cells_of(name) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)], again(name)
    outputs = [out for cell in code for out in cell["outputs"]]
    for out in outputs:
        assert out["output_type"] != "error" and out.get("name") != "stderr", again(name)
    pictures = [out for out in outputs if "image/png" in out.get("data", {})]
    assert len(pictures) == {"lesson": 8, "influence": 8}[name], again(name)


def words_of(line):
    """A printed line without what a policy writes, without lists and numbers."""
    return re.sub(NUMBER, "#", re.sub(TEXT, "", line))


@pytest.mark.parametrize("name", LESSONS)
def test_the_notebook_says_what_the_lesson_prints(name, printed_now):
    was = kept(name).splitlines()
    now = printed_now[name].splitlines()
    assert list(map(words_of, was)) == list(map(words_of, now)), again(name)
    for x, y in zip(was, now):      # prompts are drawn, not written by a policy
        assert x == y or not x.startswith("prompts: "), again(name)


@pytest.mark.parametrize("name", LESSONS)
def test_every_machine_prints_the_notebooks_numbers(name, printed_now):
    """Of a count one may be at its border. Where many steps add up rounding the words must do."""
    was, now = ([line for line in text.splitlines() if not LONG.match(line)]
                for text in (kept(name), printed_now[name]))
    for old, new in zip(was, now):
        there, here = (re.findall(NUMBER, re.sub(TEXT, "", line)) for line in (old, new))
        for x, y in zip(there, here):
            near = 0.005 if "." in x or "e" in x else 1
            assert float(y) == pytest.approx(float(x), rel=0.05, abs=near), again(name)


@pytest.mark.parametrize("name, flag", list(zip(LESSONS, ("--beta=x", "--nope=1"))))
def test_a_slip_in_a_flag_is_one_line(name, flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)     # it runs from any folder
    monkeypatch.syspath_prepend(file_of(""))
    monkeypatch.setattr("sys.argv", [f"{name}.py", flag])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(file_of(f"{name}.py"))
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
