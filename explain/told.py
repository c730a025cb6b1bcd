"""
What is told of an account: how a number went along a run, what gave that, how far the sum can be
trusted, which rollouts did most. account.py has the arithmetic, page.py writes the page.

S steps, I iterations of N rollouts, W trained weights end to end, T tokens.
"""
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from common.supervised import Progress
from explain.account import by_parameter
from explain.page import Table, chart, facts_of
from explain.sentences import best_and_worst
from explain.target import noise_of
from explain.words import logprob_changes, pieces_of, token_slopes
from run.run import sample_rows

TOO_FAR = 0.05      # the sum from the true change: said
USELESS = 0.5       # no rollouts are listed
CANCELS = 5         # times of their sum that shares are in size: none of single prompts, tokens
BANDS = 4           # of rewards and lengths
TOKENS = 12         # of those that gave most
PROMPTS = 4         # of those that gave most, and least
BLOCKS = "▁▂▃▄▅▆▇█"


class Story(NamedTuple):
    """The account of one number."""
    name: str           # "held-out reward", "log p"
    taken: list         # account.Taken
    since: int          # the iteration before the first
    values: Tensor      # (S + 1,) along the run
    gains: Tensor       # (S,) of the steps, by the mean slope on their way
    shares: Tensor      # (I, N)
    effects: Any        # (I, N), or None
    rest: dict          # {name: (I,)}
    noise: dict         # standard errors of "change", "sum" and their "difference"; {}: exact
    rollouts: int       # held-out completions at each step; 0: none

    @property
    def change(self):
        return float(self.values[-1] - self.values[0])

    @property
    def together(self):
        return float(self.shares.sum() + sum(x.sum() for x in self.rest.values()))

    @property
    def error(self):
        """How far the sum is from the change, as a part of it."""
        return abs(self.together - self.change) / max(abs(self.change), 1e-30)

    @property
    def cancelling(self):
        """How many times of their sum the shares are in size."""
        return float(self.shares.abs().sum() / self.shares.sum().abs().clamp(min=1e-30))

    @property
    def noise_of_error(self):
        """How far it may be by chance; NaN where that is not known."""
        return self.noise.get("difference", math.nan) / max(abs(self.change), 1e-30)


def story_of(target, course, found, i, taken, since):
    """The Story of column i."""
    noise = {}
    if target.is_sampled:
        change = course.parts[-1, i] - course.parts[0, i]                           # (F,)
        along = course.gains[:, i].sum(0)                                           # (F,)
        noise = dict(change=noise_of(change), sum=noise_of(along),
                     difference=noise_of(along - change))
    rest = {name: x[i] for name, x in found.rest.items()}
    effects = None if found.effects is None else found.effects[i]
    return Story(target.title, taken, since, course.values[:, i], course.gains[:, i].sum(1),
                 found.shares[i], effects, rest, noise, target.rollouts)


# ------------------------------------------------------------------------------------------------
# how it went


def digits_of(story):
    """As many digits behind the point as the numbers deserve."""
    size = max(abs(story.change), float(story.shares.sum(1).abs().max()), 1e-12)
    return min(9, max(2, 2 - math.floor(math.log10(size))))


def plus_minus(story, kind):
    error = story.noise.get(kind, math.nan)
    return f" ± {error:.{digits_of(story)}f}" if error == error else ""


def curve(values):
    height = (values - values.min()) / (values.max() - values.min()).clamp(min=1e-30)
    return "".join(BLOCKS[round(7 * x)] for x in height.tolist())


def course_of(story):
    """The line of the values along the run."""
    n = digits_of(story)
    first, last = float(story.values[0]), float(story.values[-1])
    line = f"{story.name} {first:.{n}f} {curve(story.values)} {last:.{n}f}"
    if story.name == "log p":
        change = abs(story.change)
        word = "likelier" if story.change > 0 else "less likely"
        return f"{line}: training made it {math.exp(min(700, change)):.3g} times {word}"
    return f"{line}: {story.change:+.{n}f}{plus_minus(story, 'change')}"


def by_iteration(story):
    """Table: how the number went, what its steps were to give it, what its rollouts gave."""
    n = digits_of(story)
    ends = {k.it: t for t, k in enumerate(story.taken, 1)}     # steps done after an iteration
    names = [name for name, x in story.rest.items() if x.any()]
    rows = []
    before = 0
    for it in range(story.since, len(story.shares)):
        after = ends.get(it, before)
        rise = story.values[after] - story.values[before]
        gain = story.gains[before:after].sum()
        given = [story.shares[it].sum(), *(story.rest[name][it] for name in names)]
        rows.append([str(it + 1), f"{story.values[after]:.{n}f}",
                     *(f"{float(x):+.{n}f}" for x in (rise, gain, *given))])
        before = after
    header = ["iteration", story.name, "its change", "sum along its steps", "from its rollouts",
              *(f"from {name}" for name in names)]
    return Table("Iteration by iteration", header, rows)


def closing(story):
    """The sum beside the truth."""
    n = digits_of(story)
    rollouts = float(story.shares.sum())
    nats = " nats" if story.name == "log p" else ""
    part = story.noise_of_error
    noise = f", with a noise of {100 * part:.1f} %" if part == part else ""
    return (f"account: rollouts {rollouts:+.{n}f}, rest {story.together - rollouts:+.{n}f}, "
            f"together {story.together:+.{n}f}{plus_minus(story, 'sum')}{nats}; true change "
            f"{story.change:+.{n}f}{plus_minus(story, 'change')} ({100 * story.error:.1f} % off"
            f"{noise})")


def warnings(story):
    """Where the sum is not the change, or cannot be known to be."""
    is_noise = story.error < 2 * story.noise_of_error
    if story.error > USELESS:
        reason = "that is noise: more held-out rollouts, --held_out=N" if is_noise else (
            "the steps are too large for a straight line: --parts=4 looks at four parts of each")
        yield (f"The sum is {100 * story.error:.0f} % off the true change, so no rollouts are "
               f"listed: {reason}.")
    elif story.error > TOO_FAR and not is_noise:
        yield ("warning: the steps are too large for a straight line; --parts=4 looks at four "
               "parts of each step")
    if TOO_FAR < story.noise_of_error < 1:
        needed = story.rollouts * (story.noise_of_error / TOO_FAR) ** 2
        yield (f"To know the sum and the change to {100 * TOO_FAR:.0f} % takes about "
               f"{float(f'{needed:.1g}'):.0f} held-out completions at each step (--held_out=N), in "
               f"place of {story.rollouts}.")


# ------------------------------------------------------------------------------------------------
# what gave it


def bands(x, name):
    """Names of the bands of values (n,), and the band of each (n,); -1 where it is NaN."""
    known = x[~x.isnan()]
    distinct = known.unique()
    if len(distinct) <= BANDS:
        where = torch.full(x.shape, -1)
        for i, value in enumerate(distinct):
            where[x == value] = i
        return [f"{name} {value:.4g}" for value in distinct.tolist()], where
    low, high = float(known.min()), float(known.max())
    width = (high - low) / BANDS
    where = ((x - low) / width).nan_to_num(-1).floor().clamp(-1, BANDS - 1).long()
    edges = [low + i * width for i in range(BANDS + 1)]
    return [f"{name} {a:.3g} to {b:.3g}" for a, b in zip(edges, edges[1:])], where


class Rows(NamedTuple):
    """All rollouts of an account, flat: n of them."""
    share: Tensor
    reward: Tensor
    advantage: Tensor
    length: Tensor      # tokens that the policy drew
    prompt: list        # texts
    completion: list


def rows_of(story):
    batches = {k.it: k.batch for k in story.taken}
    def flat(of):
        return torch.cat([of(batch).detach().cpu().double() for batch in batches.values()])
    return Rows(
        torch.cat([story.shares[it] for it in batches]),
        flat(lambda batch: batch.rewards), flat(lambda batch: batch.row_advantages),
        flat(lambda batch: batch.rollout.sampled_mask.sum(1)),
        [prompt.text for batch in batches.values() for prompt in batch.prompts],
        [text for batch in batches.values() for text in batch.completions])


def directions_of(advantage):
    """Names and numbers, as of bands."""
    names = ["advantage below 0 (made less likely)", "advantage 0", "advantage above 0 (likelier)"]
    return names, advantage.sign().long() + 1


def gathered(story):
    """Table: shares by what a person can name."""
    rows = rows_of(story)
    n = digits_of(story)
    total = float(rows.share.sum())
    lines = []

    def line(name, pick):
        if pick.any():
            share = float(rows.share[pick].sum())
            part = f"{100 * share / total:.0f} %" if total else ""
            lines.append([name, str(int(pick.sum())), f"{share:+.{n}f}", part])

    for names, where in (bands(rows.reward, "reward"), directions_of(rows.advantage),
                         bands(rows.length, "tokens")):
        for i, name in enumerate(names):
            line(name, where == i)
    prompts = {}
    for i, text in enumerate(rows.prompt):
        prompts.setdefault(text, []).append(i)
    order = sorted(prompts, key=lambda text: -float(rows.share[prompts[text]].sum()))
    shown = order if len(order) <= 2 * PROMPTS else order[:PROMPTS] + order[-PROMPTS:]
    for text in shown if story.cancelling < CANCELS else ():
        pick = torch.zeros(len(rows.share), dtype=torch.bool)
        pick[prompts[text]] = True
        line(f"prompt {text[:40]!r}", pick)
    return Table("Shares of the rollouts, gathered", ["rollouts with", "how many", "share", "part"],
                 lines)


def readable(shares):
    """shares (I, N), 0 in the iterations where they cancel; all, where they do in each."""
    cancels = shares.abs().sum(1) > CANCELS * shares.sum(1).abs()                   # (I,)
    return shares if cancels.all() else shares.masked_fill(cancels[:, None], 0)


def taught(story, by_effect):
    """Sentences: the rewards and directions that gave most, and a rollout of these that did most,
    by its effect or by its share."""
    rows = rows_of(story)
    total = float(rows.share.sum())
    names, band = bands(rows.reward, "reward")
    ways, way = directions_of(rows.advantage)
    cells = {(name, how): pick for i, name in enumerate(names) for j, how in enumerate(ways)
             if (pick := (band == i) & (way == j)).any()}
    if not cells or not total:
        return ""
    towards = rows.share * math.copysign(1, total)
    (name, how), pick = max(cells.items(), key=lambda cell: float(towards[cell[1]].sum()))
    share = float(rows.share[pick].sum())
    did = story.effects if by_effect else readable(story.shares)
    iterations = dict.fromkeys(k.it for k in story.taken)
    did = torch.cat([did[it] for it in iterations]) * math.copysign(1, total)
    first = int(did.masked_fill(~pick, -math.inf).argmax())
    return (f"What taught it most: the {int(pick.sum())} of {len(rows.share)} rollouts with {name} "
            f"and {how}. They gave {share:+.{digits_of(story)}f}, {100 * share / total:.0f} % of "
            f"what all rollouts gave; for example {rows.prompt[first][:60]!r} -> "
            f"{rows.completion[first][:80]!r}.")


# ------------------------------------------------------------------------------------------------
# which rollouts


def token_products(setup, cfg, states, taken, directions, places=None):
    """For each step, and some of its rows: (step, rows (n,), slopes (n, T) of the loss by the
    log-probs of their tokens, parts (n, T) of <g_i, direction>). directions: S of (W,). places:
    (iteration, number) of the rollouts that are asked for; None: all."""
    for k, before, direction in zip(taken, states, directions):
        here = [j for j in k.step.rows.tolist() if places is None or (k.it, j) in places]
        if not here:
            continue
        vector_to_parameters(before[0].to(setup.device), setup.trained)
        slopes = token_slopes(setup, cfg, k.batch, k.step)                          # (N, T)
        direction = by_parameter(setup, direction.to(setup.device))
        for rows in torch.tensor(here, device=slopes.device).split(cfg.micro_batch_size):
            changes = logprob_changes(
                setup.policy, direction, k.batch.rollout[rows], cfg.temperature)
            yield k, rows, slopes[rows], slopes[rows] * changes


def token_parts(setup, cfg, states, taken, directions, places):
    """{place: parts (T,) of its tokens}, over all steps."""
    found = dict.fromkeys(places, 0.0)
    for k, rows, _, parts in token_products(setup, cfg, states, taken, directions, set(places)):
        for j, words in zip(rows.tolist(), parts):
            found[k.it, j] = found[k.it, j] + words
    return found


def by_token(story, setup, cfg, states, directions):
    """Table: shares by the token. directions: S of G_t (W,)."""
    V = setup.policy.config.vocab_size
    shares = torch.zeros(V, dtype=torch.float64)
    counts = torch.zeros(2, V, dtype=torch.long)    # less likely, likelier
    progress = Progress("tokens", "iteration", len(story.shares) - story.since)
    for k, rows, slopes, parts in token_products(setup, cfg, states, story.taken, directions):
        ids = k.batch.rollout.tokens[rows][:, -slopes.shape[1]:].cpu()              # (n, T)
        shares.index_add_(0, ids.flatten(), parts.flatten().double().cpu())
        for way, pushed in enumerate((slopes > 0, slopes < 0)):
            counts[way] += ids[pushed.cpu()].bincount(minlength=V)
        if progress.is_due():
            progress.show(k.it + 1 - story.since)
    n = digits_of(story)
    total = float(story.shares.sum())
    lines = [[repr(setup.tokenizer.decode([token])), str(int(counts[1, token])),
              str(int(counts[0, token])), f"{shares[token]:+.{n}f}",
              f"{100 * float(shares[token]) / total:.0f} %"]
             for token in shares.abs().argsort(descending=True)[:TOKENS].tolist()]
    header = ["token", "times made likelier", "less likely", "share", "part"]
    return Table("Shares of the tokens", header, lines)


def places_of(x):
    """{heading: places} of the largest and the smallest of x (I, N)."""
    return {heading: [divmod(i, x.shape[1]) for i in some]
            for heading, some in best_and_worst(x.flatten()).items()}


def card(story, setup, cfg, place, words, last):
    """(facts, prompt, Pieces) of a rollout. last: what else is to be said of it."""
    it, j = place
    batch = next(k.batch for k in reversed(story.taken) if k.it == it)
    row = sample_rows(it, batch, cfg)[j]
    facts = facts_of(row, f"share {story.shares[it, j]:+.{digits_of(story) + 1}f}", last)
    return facts, row["prompt"], pieces_of(batch.rollout[[j]], words, setup.tokenizer)


def cards_of(story, setup, cfg, states, directions, by_effect):
    """{heading: [(facts, prompt, Pieces)]} of the rollouts that helped and hurt most: by what the
    number would be without them, or by their shares. directions: S of (W,), of these."""
    places = places_of(story.effects if by_effect else readable(story.shares))
    words = token_parts(setup, cfg, states, story.taken, directions, sum(places.values(), []))
    end = float(story.values[-1])

    def last(it, j):
        if by_effect and story.name == "log p":
            return f"without it {end - float(story.effects[it, j]):.2f}"
        return ""

    return {heading: [card(story, setup, cfg, place, words[place], last(*place)) for place in some]
            for heading, some in places.items()}


# ------------------------------------------------------------------------------------------------
# all of it


ABOUT = ("Which of the rollouts that it was trained on made this number rise or fall? A rollout's "
         "share is what it gave of the change. Shares add up; single ones may be large and cancel.")
TINT = "part"


def say_smooth(smooth, bound):
    """How far single rollouts can be trusted. smooth: account.smoothness; NaN: nothing is
    predicted."""
    if smooth != smooth:
        return ("What it would be without a rollout is not predicted here (docs/account.md says "
                "why). The lists are by share, and single shares cancel: trust the sums.")
    if smooth < bound:
        return (f"The run is rough ({smooth:.2f}; 1: smooth, 0: chance): what it would be without "
                "a rollout cannot be predicted. The lists are by share, and single shares cancel: "
                "trust the sums.")
    return (f"The run is smooth ({smooth:.2f}; 1: smooth, 0: chance): small changes of its "
            "rollouts change it nearly as predicted, and the lists are in the order of the "
            "prediction.")


def say_tokens(tokens):
    """The tokens that gave most. tokens: by_token's Table, or None."""
    rows = tokens.rows if tokens else []
    most = [f"{name} {part}" for name, *_, part in rows if not part.startswith("-")][:3]
    return f"Tokens, by the part that each gave: {', '.join(most)}." if most else ""


def say_cancelling(story):
    """Why single shares are not to be read, where they are not."""
    if story.cancelling < 2:
        return ""
    sizes = story.shares.abs().sum(1)                                               # (I,)
    it = int(sizes.argmax())
    text = (f"Single shares cancel: in size they are {story.cancelling:.1f} times their sum, "
            f"{100 * float(sizes[it] / sizes.sum()):.0f} % of that in iteration {it + 1}. AdamW "
            "divides the step of each weight by the root of its v; where that is small, rollouts "
            "that pull in opposite directions have large shares and move nothing together.")
    if story.cancelling < CANCELS:
        return text
    return (f"{text} So there are none of single prompts and tokens here, and lists by share leave "
            "such iterations out.")


def lines_of(story, tokens, by_effect):
    """Sentences. tokens: by_token's Table, or None. by_effect: the order of rollouts."""
    found = [course_of(story)]
    if story.error <= USELESS:
        found += [taught(story, by_effect), say_tokens(tokens)]
    found += [closing(story), *warnings(story)]
    if story.error <= USELESS:
        found.append(say_cancelling(story))
    return [text for text in found if text]


def figure_of(story):
    sums = story.values[0] + torch.cat([torch.zeros(1), story.gains.cumsum(0)])
    return chart(story.values.tolist(), sums.tolist(), story.name)
