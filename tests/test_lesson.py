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

matplotlib = pytest.importorskip("matplotlib")
from common.files import ROOT  # noqa: E402

LESSONS = ("lesson", "influence")
NUMBER = r"[+-]?\d[\d.]*(?:e[+-]?\d+)?"
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
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        matplotlib.use("Agg")
        patch.chdir(tmp_path_factory.mktemp("lesson"))
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
    held, tokens = numbers_after("the clip holds", text)
    assert 0 < held < tokens
    least, largest = numbers_after("without the clip: ratios from", text)
    clipped_least, clipped_largest = numbers_after("with the clip: ratios from", text)
    assert clipped_largest > 1.2, "the clip is no wall: ratios pass 1 + epsilon"
    # largest / least, without a division by a printed 0.00
    assert largest * clipped_least > 2 * clipped_largest * least, "without a clip ratios run away"


def test_the_estimates_of_the_kl_agree_with_the_sum_over_the_vocabulary(printed):
    text = printed["lesson"]
    exact = numbers_after("exact KL ", text)[0]
    before, after = numbers_after("exact KL before a step on the KL alone", text)
    assert before == exact and after < 0.8 * before, "beta does not pull back"
    for name in ("k1", "k3"):
        mean, noise, _, negative = numbers_after(f"{name}: mean", text)
        assert abs(mean - exact) < 4 * noise
        assert (negative > 10) == (name == "k1"), "k3 is never negative, k1 often"


def test_the_reward_rises_and_beta_keeps_the_kl_small(printed):
    curves = [numbers_after(f"beta {beta}: reward", printed["lesson"]) for beta in ("0.0", "0.1")]
    for start, end, *_ in curves:
        assert end > start + 0.03
    assert curves[1][-1] < 0.7 * curves[0][-1]


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
    shares, left_end = numbers_after("the shares add up to", text.partition("R rose")[2])
    assert abs(shares - rise) < 0.2 * rise
    assert abs(shares - rise) < abs(left_end - rise) + 0.05 * rise


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
    assert len(pictures) == 8, again(name)


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
    """Up to the learning curve. Of a count one may be at its border."""
    was, now = (text.partition("before training:")[0].splitlines()
                for text in (kept(name), printed_now[name]))
    for old, new in zip(was, now):
        there, here = (re.findall(NUMBER, re.sub(TEXT, "", line)) for line in (old, new))
        for x, y in zip(there, here):
            near = 0.005 if "." in x or "e" in x else 1
            assert float(y) == pytest.approx(float(x), rel=0.05, abs=near), again(name)


@pytest.mark.parametrize("flag", ["--beta=x", "--nope=1", "--device=nowhere", "beta", "--beta"])
@pytest.mark.parametrize("name", LESSONS)
def test_a_slip_in_a_flag_is_one_line(name, flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)     # it runs from any folder
    monkeypatch.setattr("sys.argv", [f"{name}.py", flag])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(file_of(f"{name}.py"))
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
