"""
Draw GRPO: one iteration on one group of completions, with the numbers that a run really had.

    python -m docs.drawing              # writes docs/algorithm.svg
    python -m docs.drawing --seed=2     # any setting of the default job

It is the first iteration of `python grpo.py config/toxicity.py --dtype=float32 --threads=1`. Of its
32 prompts it shows one whose completions can be read by anybody.
"""
import textwrap
from html import escape
from typing import NamedTuple

import torch
from torch import Tensor

import grpo
from common.cli import run_script
from common.files import ROOT, replacing
from common.seeds import seed_for
from rollout import completion_logprobs
from run.settings import load_settings

SETTINGS = [f"{ROOT}/config/toxicity.py", "--dtype=float32", "--threads=1"]
GROUP = 12      # the prompt that is drawn: the 13th of the iteration
WIDTH = 640     # units; a phone shows them in some 350 pixels, and letters of 18 are 10 pixels high
ROW = 52        # height of a completion, which has two lines
INK, GREY, UP, DOWN, PAPER = "#1b1f24", "#59636e", "#0a6b5e", "#b3400c", "#ffffff"


class Drawn(NamedTuple):
    """A prompt, its G completions with their numbers (G,), and the numbers of the whole step."""
    prompt: str
    completions: list
    rewards: Tensor
    advantages: Tensor
    likelier: Tensor        # p(completion) after the step / p(completion) before it
    spread: float           # standard deviation of the batch's rewards, which divides here
    metrics: dict
    cfg: object


def first_iteration(setup, cfg):
    """Train for one iteration -> Drawn."""
    # what grpo.train does, without a folder
    batch = grpo.collect_iteration(setup, 0, cfg)
    grpo.set_learning_rate(setup.optimizer, 0, cfg)
    metrics = grpo.update(setup, batch, None, cfg, seed_for(cfg.seed, "rows", 0))

    # how much likelier is each completion of the group now?
    G = cfg.num_generations
    rows = torch.arange(G) + GROUP % cfg.num_prompts * G                            # (G,)
    rollout = batch.rollout[rows]
    with torch.no_grad():
        change = completion_logprobs(setup.policy, rollout, cfg.temperature) - rollout.logp
    likelier = (change * rollout.sampled_mask).sum(1).exp()                         # (G,)

    spread = batch.rewards[~batch.rewards.isnan()].std().item()
    return Drawn(batch.prompts[rows[0]].text, [batch.completions[i] for i in rows],
                 batch.rewards[rows], batch.advantages[rows], likelier, spread, metrics, cfg)


def signed(x):
    return f"{x:+.2f}".replace("-", "−")


def two_lines(completion):
    """A completion as its column can hold it. One that goes on with the prompt's last word begins
    with dots."""
    shown = "".join(c if c.isprintable() else " " for c in completion)
    words = " ".join(shown.split())
    begins = "" if completion[:1].isspace() or not words else "…"
    return textwrap.wrap(begins + (words or "(nothing)"), 36, max_lines=2, placeholder=" …")


def text(x, y, words, size=18, color=INK, anchor="start", weight="normal"):
    return (f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(words, quote=False)}</text>')


def numbered(x, y, number, words=""):
    """A step of the algorithm: its number in a disc, and its name beside it."""
    disc = [f'<circle cx="{x + 13}" cy="{y - 6}" r="13" fill="{INK}"/>',
            text(x + 13, y, str(number), 17, PAPER, "middle", "bold")]
    return disc + ([text(x + 33, y, words, weight="bold")] if words else [])


def heading(x, number, words=""):
    """The number of a step above a column, and what the column holds."""
    disc = numbered(x - 13, 98, number)
    return disc + ([text(x, 122, words, 17, anchor="middle", weight="bold")] if words else [])


def line(y):
    return f'<path d="M24 {y}H616" stroke="{GREY}"/>'


def arrow(x, y, right, down):
    """From (x, y), along one of the axes."""
    return (f'<path d="M{x} {y}l{right} {down}" stroke="{GREY}" stroke-width="2" '
            'marker-end="url(#tip)"/>')


def bar(x, y, length):
    """A bar from x to the right or, below 0, to the left."""
    color = UP if length >= 0 else DOWN
    return (f'<rect x="{min(x, x + length):.1f}" y="{y}" width="{abs(length):.1f}" height="7" '
            f'fill="{color}"/>')


def table(drawn, y):
    """The group, a completion a row -> lines of the drawing."""
    found = []
    tallest = drawn.advantages.abs().max().clamp(min=1e-9)
    widest = drawn.likelier.log().abs().max().clamp(min=1e-9)
    for i, completion in enumerate(drawn.completions):
        top = y + ROW * i
        A, change = drawn.advantages[i].item(), drawn.likelier[i].item()
        for j, line in enumerate(two_lines(completion)):
            found.append(text(24, top + 22 * j, line, 17))
        reward = drawn.rewards[i].item()
        found += [text(412, top, f"{reward:.3f}" if reward == reward else "none", anchor="end"),
                  text(510, top, signed(A), anchor="end", color=UP if A >= 0 else DOWN),
                  bar(480, top + 10, 40 * A / tallest.item()),
                  text(604, top, f"× {change:.2f}", anchor="end",
                       color=UP if change >= 1 else DOWN),
                  bar(575, top + 10, 40 * drawn.likelier[i].log().item() / widest.item())]
    return found


def drawing(drawn):
    """The whole drawing as SVG, on a ground of its own: it looks the same in dark mode."""
    cfg = drawn.cfg
    G = len(drawn.completions)
    mean = drawn.rewards.nanmean().item()
    loss = f"{drawn.metrics['loss']:.4f}".replace("-", "−")
    y = 166 + ROW * G       # below the table

    parts = [
        *numbered(24, 42, 1, f"A prompt: “{drawn.prompt}”"), arrow(37, 52, 0, 26),
        *numbered(24, 98, 2, f"{G} completions"), text(57, 122, "written by the policy", 17, GREY),
        arrow(232, 92, 134, 0), *heading(388, 3, "reward"), arrow(404, 92, 54, 0),
        *heading(480, 5, "advantage"), arrow(495, 92, 12, 0), *heading(528, 6),
        arrow(543, 92, 12, 0), *heading(576, 7, "likelier"),
        line(134), *table(drawn, 162), line(y - 26),
        *numbered(24, y, 4, "Mean of the group"),
        text(412, y, f"{mean:.3f}", anchor="end", weight="bold"),
        f'<path d="M422 {y - 6}H480" stroke="{GREY}" stroke-width="2"/>', arrow(480, y - 5, 0, -19)]
    explained = [
        (3, "Reward: how sure a judge is that it is not toxic."),
        (5, f"Advantage: (reward − mean) / {drawn.spread:.3f}."),
        ("", "That is the spread of the rewards of all prompts."),
        (6, f"Loss: −(ratio × advantage) + {cfg.beta:g} × KL,"),
        ("", f"mean over the tokens of {cfg.num_prompts} such groups: {loss}."),
        ("", "Ratio: how much likelier a token is now than when"),
        ("", "it was sampled. It is 1 here, and the KL is still 0."),
        (7, "Step: AdamW changes the weights. The last column"),
        ("", "says by what factor each completion became likelier.")]
    y += 44
    for number, words in explained:
        y += 14 if number else 0
        parts += numbered(24, y, number) if number else []
        parts.append(text(57, y, words))
        y += 25
    parts += [text(57, y + 14, f"Then the same with {cfg.num_prompts} new prompts, "
                               f"{cfg.max_iters} times in all.", color=GREY)]
    height = y + 40
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">',
        f"<title>GRPO: one iteration on one group of {G} completions</title>",
        '<marker id="tip" viewBox="-8 -5 9 10" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M-7 -5L0 0L-7 5" fill="none" stroke="{GREY}" stroke-width="2"/></marker>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>', *parts, "</svg>\n"])


def main(argv):
    path = f"{ROOT}/docs/algorithm.svg"
    cfg = load_settings([*SETTINGS, *argv])
    drawn = first_iteration(grpo.prepare(cfg, grpo.read_inputs(cfg)), cfg)
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(drawing(drawn))
    print(path)


if __name__ == "__main__":
    run_script(main)
