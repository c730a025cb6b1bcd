"""What both lessons use: the project's place, the world, pictures, and the judge of your lines."""
import difflib
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))       # a notebook begins in its own folder

import torch  # noqa: E402

import grpo  # noqa: E402
from common.cli import exit_codes  # noqa: E402
from common.errors import BadInput, optional  # noqa: E402
from data.prompts import draw_prompts  # noqa: E402
from loss import clipped_objective  # noqa: E402
from run.settings import load_settings  # noqa: E402
from tape import cosine, inner  # noqa: E402

with exit_codes(), optional("matplotlib"):       # without it: one line
    import matplotlib.pyplot as plt


def settings_of(config, flags):
    """The settings of a config file. What is typed behind a script's name comes after its flags."""
    typed = [] if "ipykernel" in sys.modules else sys.argv[1:]
    with exit_codes():      # a slip in a flag is one line
        return load_settings([f"{ROOT}/{config}", *flags, *typed])


def open_world(flags):
    """Settings, models and the four prompts of the lessons' world."""
    cfg = settings_of("config/lesson.py", flags)
    with exit_codes():
        if cfg.device != "cpu":
            raise BadInput(f"device = {cfg.device!r}: the pictures need tensors of a CPU")
        setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
    return cfg, setup, draw_prompts(setup.prompts, 0, cfg.num_prompts, cfg.seed)


def picture(name, xlabel, ylabel):
    """Label the picture, and keep it in out/lesson."""
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    if plt.gca().get_legend_handles_labels()[0]:
        plt.legend(fontsize="small")
    plt.tight_layout()
    os.makedirs("out/lesson", exist_ok=True)
    plt.savefig(f"out/lesson/{name}.png", dpi=100)


# ------------------------------------------------------------------------------------------------
# the page


def loop_of(path):
    """The loop of nano.py or nano_tracin.py, of its comments the blocks' names alone."""
    page = (ROOT / path).read_text(encoding="utf-8")
    loop = re.search("^for it in .*\n(?:(?:    .*)?\n)+", page, re.MULTILINE)[0]
    named = re.sub("^( +# [a-z]+): .*", r"\1", loop, flags=re.MULTILINE).splitlines()
    code = [line for line in named if line and not re.match(" +# .* ", line)]
    return [re.sub(r"(\S) +# .*", r"\1", line) for line in code]


def added_code(old, new):
    """The lines of the loop in the second page that the first page's has not."""
    found = difflib.ndiff(loop_of(old), loop_of(new))
    return [line[2:] for line in found if line.startswith("+ ")]


# ------------------------------------------------------------------------------------------------
# what you write


def judge(yours, right, mistakes):
    """Say whether it is the project's, one of the usual mistakes {sentence: its value}, or what."""
    if yours is ...:
        return print("not written yet: put your line in the place of the dots")
    yours = torch.as_tensor(yours).detach()
    if yours.numel() != right.numel():
        return print(f"the shape is {tuple(yours.shape)}: it should have {right.numel()} numbers")
    for sentence, value in {"right: it is what the project computes": right, **mistakes}.items():
        if (yours.flatten() - value.flatten()).abs().max() <= 0.005 * value.abs().max():
            return print(sentence)
    first = [[round(float(x), 4) for x in some.flatten()[:3]] for some in (yours, right)]
    print(f"not yet, and none of the usual mistakes: yours begins {first[0]}, it should {first[1]}")


def judge_advantages(yours, rewards, G):
    r = rewards.view(-1, G)
    centred = r - r.mean(1, keepdim=True)
    judge(yours, grpo.group_advantages(rewards, G), {
        "mean and standard deviation of all rollouts: an easy prompt now praises all of its "
        "completions": (rewards - rewards.mean()) / rewards.std(),
        "not divided: a group whose rewards hardly differ now hardly counts": centred,
        "n in place of n - 1 under the root (correction=0): all advantages are larger by the same "
        "factor": centred / r.std(1, correction=0, keepdim=True)})


def judge_objective(yours, ratio, A, cfg):
    rho = ratio.clamp(1 - cfg.epsilon, 1 + cfg.epsilon)
    right = torch.cat([clipped_objective(ratio, a, cfg) for a in A], dim=1)
    judge(yours, right, {
        "no min: now a token that went the wrong way is left alone, too": rho * A,
        "max in place of min: now a ratio beyond the clip is worth more than one within it":
            torch.max(ratio * A, rho * A),
        "the product is clipped: only the ratio should be, before it meets the advantage":
            (ratio * A).clamp(1 - cfg.epsilon, 1 + cfg.epsilon)})


def judge_influence(yours, alone, target):
    right = torch.stack([inner(g, target) for g in alone])
    judge(yours, right, {
        "a cosine: the length of a gradient counts, a longer one moves the weights further":
            torch.tensor([cosine(g, target) for g in alone]),
        "the wrong sign: both are gradients of a loss, and if they agree both losses fall": -right,
        "each with itself: how large its gradient is, not whom it helps":
            torch.stack([inner(g, g) for g in alone])})


def judge_shares(yours, tape, size, slope, target):
    right = -size * tape.dot(slope)
    judge(yours, right, {
        "the wrong sign: a step goes down the gradient, so the part of rollout i is minus SIZE "
        "times its gradient": -right,
        "without SIZE: a slope, and not yet how far the step went": -tape.dot(slope),
        "the loss's gradient in place of the sentence's: that is how far the loss moved":
            -size * tape.dot(target)})
