"""
What is told of an account: numbers in tables first, then sentences about them. account.py has the
arithmetic, groups.py the groups, page.py writes the page.

S steps, I iterations of N rollouts, W trained weights end to end, T tokens. F folds of the held-out
sample add up to the number; of a sentence there is one, and it is exact.
"""
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from common.progress import Progress
from extras.explain.account import by_parameter
from extras.explain.groups import at_random, counts_of, most_of, rewards_of, sums_of
from extras.explain.number import Number, percent, text_of, total
from extras.explain.page import Chart, Table
from extras.explain.words import changes_along, pieces_of, token_slopes
from run.log import sample_rows

TOO_FAR = 0.05      # the sum from the measured change: said
USELESS = 0.5       # no rollouts are listed: the sum is so far off, or its noise is so large
TOKENS = 12         # in the table: those of the largest shares
NAMED = 3           # groups that tie in a sentence
SHOWN = 5           # rollouts in a list
PARTS = {"kl": "KL", "entropy": "entropy bonus", "decay": "weight decay",
         "rounding": "bfloat16's rounding"}     # names in words


class Story(NamedTuple):
    """The account of one number."""
    name: str           # "held-out reward", "log p"
    taken: list         # account.Taken
    since: int          # the iteration before the first
    values: Tensor      # (S + 1, F) along the run
    gains: Tensor       # (S, F) of the steps, by the mean slope on their way
    shares: Tensor      # (F, I, N)
    effects: Any        # (I, N), or None
    rest: dict          # {name: (F, I)}
    ends: list          # target.Point.parts at the start and at the end
    rollouts: int       # held-out completions at each point; 0: none
    folds_of: str       # "prompts", "completions"; "": exact

    @property
    def change(self):       # (F,)
        return self.values[-1] - self.values[0]

    @property
    def given(self):
        """{from what, in words: shares (F, I)}, without what is 0."""
        return {"rollouts": self.shares.sum(2),
                **{PARTS.get(name, name): x for name, x in self.rest.items() if x.any()}}

    @property
    def together(self):     # (F,)
        return sum(x.sum(1) for x in self.given.values())

    @property
    def off(self):
        """How far the sum is from the change."""
        return total(self.together - self.change)

    @property
    def size(self):
        return max(abs(float(self.change.sum())), 1e-30)

    @property
    def error(self):
        """How far the sum is from the change, as a part of it."""
        return abs(self.off.value) / self.size

    @property
    def noise(self):
        """The standard error of the sum, as a part of it."""
        value, error, _ = total(self.together)
        return error / max(abs(value), 1e-30)

    @property
    def is_useful(self):
        return self.error <= USELESS and self.noise <= USELESS

    @property
    def digits(self):
        """As many behind the point as the numbers deserve."""
        size = max(self.size, float(self.shares.sum((0, 2)).abs().max()), 1e-12)
        return min(9, max(2, 2 - math.floor(math.log10(size))))

    def text(self, parts):
        return total(parts).text(self.digits)


# ------------------------------------------------------------------------------------------------
# tables


def by_iteration(story):
    """Table: how the number went, what its steps were to give it, what its rollouts gave."""
    its = torch.tensor([k.it for k in story.taken])
    here = range(story.since, story.shares.shape[1])
    steps = [its == it for it in here]
    done = [int((its < it).sum()) for it in (*here, here.stop)]     # steps before an iteration
    values = story.values[done]                                     # (iterations + 1, F)
    columns = {
        "its change": values.diff(dim=0),
        "change by the account": torch.stack([story.gains[some].sum(0) for some in steps]),
        **{f"from {'its ' * (name == 'rollouts')}{name}": x[:, story.since:].T
           for name, x in story.given.items()}}
    written = [f"{x:.{story.digits}f}" for x in values.sum(1).tolist()]
    rows = [[done, value, *map(total, numbers)]
            for done, value, *numbers in zip(here, written[1:], *columns.values())]
    rows = [[story.since, written[0], *[""] * len(columns)],
            *([it + 1, *cells] for it, *cells in rows),
            ["all", written[-1], *(total(x.sum(0)) for x in columns.values())]]
    return Table("Iteration by iteration",
                 ["iteration", f"{story.name} after it", *columns], rows, story.digits, (
        "Columns add up; rows do not, because a rollout is credited to its own iteration even for "
        "what it does later, through AdamW's momentum. So is the rest of the loss."))


def by_group(rows, splits, digits):
    """Table: shares by what a person can name."""
    whole = rows.shares.sum(1)
    lines = [["all", rows.n, "", "", total(whole), percent(whole, whole), ""]]
    for split in splits.values():
        lines.append([f"by {split.what}"])
        lines += [[name, count, *reward, total(share), percent(share, whole), chance]
                  for name, count, reward, share, chance in zip(
                      split.names, counts_of(split).tolist(), rewards_of(rows, split),
                      sums_of(rows, split).T, at_random(rows, split)) if count]
    header = ["rollouts", "how many", "reward", "its std", "share", "% of the sum",
              "as many at random"]
    return Table("Shares of the rollouts, in groups", header, lines, digits, (
        "Each split adds up to all. A group may have more than 100 %, where others are below 0. "
        "The reward is that of training: a mean and a standard deviation. "
        "Advantage is the reward relative to the prompt's other completions (with a critic: to "
        "what that expected). As many at random: what a group of this size has, and by how much "
        "that varies, where the shares of each iteration are dealt out anew among its rollouts. "
        "A split tells something where groups differ from that."))


def over_time(rows, split, since, digits):
    """Table: the groups of a split, iteration by iteration."""
    some = counts_of(split).nonzero()[:, 0].tolist()
    its = range(since, int(rows.iteration.max()) + 1)
    lines = [[it + 1, *map(total, sums_of(rows, split, rows.iteration == it).T[some])]
             for it in its]
    return Table(f"Shares by {split.what}, iteration by iteration",
                 ["iteration", *(split.names[i] for i in some)],
                 [*lines, ["all", *map(total, sums_of(rows, split).T[some])]], digits)


def token_products(setup, cfg, states, taken, directions, places=None):
    """For each step, and some of its rows: (step, rows (n,), slopes (n, T) of the loss by the
    log-probs of their tokens, parts (F, n, T) of <g_i, direction>). directions: S of (F, W).
    places: (iteration, number) of the rollouts; None: all."""
    for k, before, direction in zip(taken, states, directions):
        here = [j for j in k.step.rows.tolist() if places is None or (k.it, j) in places]
        if not here:
            continue
        vector_to_parameters(before[0].to(setup.device), setup.trained)
        slopes = token_slopes(setup, cfg, k.batch, k.step)                          # (N, T)
        along = [by_parameter(setup, d) for d in direction.to(setup.device)]
        for rows in torch.tensor(here, device=slopes.device).split(cfg.micro_batch_size):
            changes = changes_along(setup.policy, along, k.batch.rollout[rows], cfg.temperature)
            yield k, rows, slopes[rows], slopes[rows] * changes


def token_parts(setup, cfg, states, taken, directions, places):
    """{place: parts (T,) of its tokens}, over all steps. directions: S of (W,)."""
    words = dict.fromkeys(places, 0.0)
    one = [d[None] for d in directions]
    for k, rows, _, parts in token_products(setup, cfg, states, taken, one, words):
        for j, x in zip(rows.tolist(), parts[0]):
            words[k.it, j] = words[k.it, j] + x
    return words


def by_token(story, setup, cfg, states, directions):
    """Table: shares by the token. directions: S of G_t (F, W)."""
    V = setup.policy.config.vocab_size
    shares = torch.zeros(len(story.shares), V, dtype=torch.float64)
    counts = torch.zeros(2, V, dtype=torch.long)    # likelier, less likely
    progress = Progress("tokens", "iteration", story.shares.shape[1] - story.since)
    for k, rows, slopes, parts in token_products(setup, cfg, states, story.taken, directions):
        ids = k.batch.rollout.tokens[rows][:, -slopes.shape[1]:].cpu()              # (n, T)
        shares.index_add_(1, ids.flatten(), parts.flatten(1).double().cpu())
        for count, pushed in zip(counts, (slopes < 0, slopes > 0)):
            count += ids[pushed.cpu()].bincount(minlength=V)
        if progress.is_due():
            progress.show(k.it + 1 - story.since)
    whole = story.shares.sum((1, 2))
    rows = [[repr(setup.tokenizer.decode([i])), *counts[:, i].tolist(), total(shares[:, i]),
             percent(shares[:, i], whole)]
            for i in shares.sum(0).abs().argsort(descending=True)[:TOKENS].tolist()]
    header = ["token", "times made likelier", "less likely", "share", "% of the rollouts' sum"]
    known = int(counts.any(0).sum())
    return Table(f"Shares of the tokens: the {len(rows)} largest of {known} by size", header,
                 rows, story.digits,
                 "All tokens add up to the rollouts' sum; a token may have more than 100 %.")


def chart_of(story):
    """The Chart of the number along the run."""
    values = story.values.sum(1)
    sums = values[0] + torch.cat([torch.zeros(1), story.gains.sum(1).cumsum(0)])
    ticks = {k.it + 1: t for t, k in enumerate(story.taken, 1)}     # an iteration's last step
    ticks = [(t, it) for it, t in ({story.since: 0} | ticks).items()]
    return Chart(story.name, values.tolist(), sums.tolist(), ticks[::math.ceil(len(ticks) / 12)])


# ------------------------------------------------------------------------------------------------
# rollouts, with their words


def card(story, setup, cfg, place, words, last):
    """(facts, prompt, Pieces) of a rollout. last: what else is to be said of it."""
    it, j = place
    batch = next(k.batch for k in reversed(story.taken) if k.it == it)
    row = sample_rows(it, batch, cfg)[j]
    share = total(story.shares[:, it, j]).text(story.digits + 1)
    facts = (f"share {share}, iteration {it + 1}, reward {row['reward']:.3f}, advantage "
             f"{row['advantage']:+.2f} {'▲' if row['advantage'] > 0 else '▼'}{last}")
    return facts, row["prompt"], pieces_of(batch.rollout[[j]], words, setup.tokenizer)


def cards_of(story, setup, cfg, states, directions, by_effect):
    """{heading: [(facts, prompt, Pieces)]} of the rollouts at both ends: by what the number would
    be without them, or by their shares. directions: S of (W,), of these."""
    x = story.effects if by_effect else story.shares.sum(0)                         # (I, N)
    order = x.flatten().argsort(descending=True)
    signs = x.flatten()[order]
    ends = {"positive": order[signs > 0][:SHOWN], "negative": order[signs < 0].flip(0)[:SHOWN]}
    places = {f"Largest {way} {'effects' if by_effect else 'shares'}":
              [divmod(i, x.shape[1]) for i in some.tolist()] for way, some in ends.items()}
    words = token_parts(setup, cfg, states, story.taken, directions, sum(places.values(), []))
    end = float(story.values[-1].sum())

    def last(place):
        if by_effect and story.name == "log p":
            return f", without it {end - float(story.effects[place]):.2f}"
        return ""

    return {heading: [card(story, setup, cfg, place, words[place], last(place)) for place in some]
            for heading, some in places.items()}


# ------------------------------------------------------------------------------------------------
# sentences: what gave the sum


def said(share, whole, digits):
    """A share, with its part of the whole where that is known."""
    number = total(share)
    if not number.is_known:
        return f"{number.text(digits)} (not known from 0)"
    part = text_of(percent(share, whole), digits)
    return number.text(digits) + f", {part}" * bool(part)


def say_push(rows, split, digits):
    """The sum, and what either direction has of it."""
    whole = rows.shares.sum(1)
    parts = [f"{name} {said(share, whole, digits)}" for name, share in
             zip(split.names, sums_of(rows, split).T) if share.any()]
    return (f"The shares of the rollouts add up to {total(whole).text(digits)}: "
            f"{'; '.join(parts)}.")


def say_split(rows, split, digits, least):
    """Which group is known to have most of the sum, and which to have pulled the other way. least:
    no smaller share is named."""
    def named(groups, way):
        if not groups:
            return f"no group is known to have pulled {way}"
        if len(groups) > NAMED:
            return f"which pulled most {way} is not known ({len(groups)} groups tie)"
        if len(groups) > 1:
            return f"{' and '.join(split.names[i] for i in groups)} tie {way}"
        i, = groups
        share = said(sums_of(rows, split)[:, i], rows.shares.sum(1), digits)
        return (f"most {way} pulled {split.names[i]} ({int(counts_of(split)[i])} of {rows.n} "
                f"rollouts), {share}")

    ends = zip(most_of(rows, split, least), ("up", "down"))
    return f"By {split.what}: {'; '.join(named(*end) for end in ends)}."


def say_answer(rows, splits, by, digits, least):
    """Sentences: what gave the sum. by: the reader's own split, or ""."""
    asked = [by] if by else []
    return [say_push(rows, splits["push"], digits),
            *(say_split(rows, splits[what], digits, least)
              for what in (*asked, "reward and push", "prompt"))]


def say_tokens(table):
    """The tokens that are known to have given most. table: by_token's, or None."""
    most = [f"{name} {part.text(0)}" for name, *_, share, part in (table.rows if table else [])
            if part and part.value > 0 and share.is_known]
    return f"Tokens, by their part of the rollouts' sum: {', '.join(most[:3])}." if most else ""


# ------------------------------------------------------------------------------------------------
# sentences: how it went, and how far the account can be trusted


def say_course(story):
    """The line of the values at both ends of the run."""
    n = story.digits
    first, last = story.values[[0, -1]].sum(1).tolist()
    line = f"{story.name}: {first:.{n}f} before, {last:.{n}f} after"
    change = last - first
    if story.name == "log p":
        word = "likelier" if change > 0 else "less likely"
        return f"{line}. Training made it {math.exp(min(700, abs(change))):.3g} times {word}"
    if not story.rollouts:
        return f"{line}, {story.text(story.change)}"
    # on the held-out prompts themselves, by the same random numbers before and after: without how
    # much prompts differ
    moved = story.ends[1] - story.ends[0]                   # (prompts, completions)
    error = float((moved.var(1) * moved.shape[1]).sum().sqrt())
    line += f", {Number(float(moved.sum()), error).text(n)} on these prompts"
    if story.folds_of == "prompts":
        line += f"; on others like them, ± {total(story.change).error:.{n}f}"
    return line


def percent_off(story, digits):
    """What the sum is off by, in percent of the change, which may be next to nothing."""
    return "over 1000 %" if story.error > 10 else f"{100 * story.error:.{digits}f} %"


def say_sum(story):
    """The sum beside what was measured."""
    parts = ", ".join(f"{name} {story.text(x.sum(1))}" for name, x in story.given.items())
    nats = " nats" * (story.name == "log p")
    noise = ""
    if story.rollouts:
        noise = f"; ± is one standard error, by folds of the held-out {story.folds_of}"
    off = story.off._replace(value=abs(story.off.value)).text(story.digits)[1:]
    return (f"account: {parts}, together {story.text(story.together)}{nats}; measured change "
            f"{story.text(story.change)}: off by {off} ({percent_off(story, 1)}{noise})")


def advice(story):
    """What to do where the sum is not the change: what was rounded comes first."""
    rounded = abs(float(story.rest["rounding"].sum())) if "rounding" in story.rest else 0.0
    if rounded > TOO_FAR * story.size:
        return "the run's bfloat16 rounded much of it: a run with --dtype=float32 does not"
    if not story.off.is_known:
        return "that is noise, which more held-out completions make smaller (--held_out=N)"
    return "the steps are too large for a straight line: --parts=4 looks at four parts of each step"


def say_far(story):
    """Where the sum is not the change, or cannot be known to be."""
    if story.error > USELESS:
        yield (f"The sum is {percent_off(story, 0)} off the measured change, so no single rollouts "
               f"are listed: {advice(story)}.")
    elif story.noise > USELESS:
        yield (f"The sum is known to ± {100 * story.noise:.0f} % of itself, so no single "
               "rollouts are listed: take more held-out completions (--held_out=N).")
    elif story.error > TOO_FAR and story.off.is_known:
        yield f"warning: {advice(story)}"


def say_single(story):
    """How far single shares are from adding up, and how much of their order is noise."""
    single = story.shares.sum(0)
    cancelling = float(single.abs().sum() / single.sum().abs().clamp(min=1e-30))
    text = (f"Single shares are {cancelling:.1f} times their sum in size: where a weight has "
            "had small gradients, as in the first steps, AdamW's small second moment scales "
            "opposing rollouts up. Sums of groups are known better.")
    if len(story.shares) == 1:
        return text
    noise = float((story.shares.var(0) * len(story.shares)).mean() / single.var())
    return (f"{text} Of the variance of single shares, and so of the order of the lists, "
            f"{100 * min(1.0, noise):.0f} % is noise of the held-out completions.")


def say_needed(story):
    """How many held-out completions would do; "" where there are enough."""
    noise = story.off.error / story.size
    if not TOO_FAR < noise < 1:
        return ""
    count = story.rollouts * (noise / TOO_FAR) ** 2
    return (f"To know the sum and the change to {100 * TOO_FAR:.0f} % would take about "
            f"{float(f'{count:.1g}'):.0f} held-out completions at each point (--held_out=N), not "
            f"{story.rollouts}.")


def say_smooth(smooth, bound):
    """Are there predictions? smooth: account.smoothness; NaN: there are none."""
    if smooth != smooth:
        return ("No leave-one-out predictions: for a reward they cannot be validated, and without "
                "the Hessian too many are wrong (docs/account.md). Lists are ordered by share.")
    scale = f"{smooth:.2f}; 1: smooth, 0: chance"
    if smooth < bound:
        return (f"The run is rough ({scale}; predictions need {bound:.2f}): no leave-one-out "
                "predictions. Lists are ordered by share.")
    return (f"The run is smooth ({scale}; predictions need {bound:.2f}): small changes of its "
            "rollouts change it nearly as predicted. Lists are ordered by predicted effect.")


def lines_of(story, rows, splits, by, tokens):
    """All sentences about one number. tokens: by_token's Table, or None."""
    # a group that is smaller than what the sum is off by is not known, whatever its noise
    least = abs(story.off.value) if story.error > TOO_FAR else 0.0
    single = say_single(story) if story.is_useful else ""
    lines = [say_course(story), *say_answer(rows, splits, by, story.digits, least),
             say_tokens(tokens), say_sum(story), *say_far(story), single, say_needed(story)]
    return [text for text in lines if text]
