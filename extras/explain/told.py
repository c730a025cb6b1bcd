"""
The words of an account: sentences about the numbers of tables.py.
"""
import math

from extras.explain.account import backwards
from extras.explain.groups import counts_of, most_of, rows_of, splits_of, sums_of
from extras.explain.number import Number, percent, total
from extras.explain.page import Told
from extras.explain.tables import (
    by_group, by_iteration, by_token, cards_of, chart_of, over_time)
from extras.explain.words import pieces_of

TOO_FAR = 0.05      # the sum from the measured change: said
USELESS = 0.5       # no rollouts are listed: the sum is so far off, or its noise is so large
NAMED = 3           # groups that tie in a sentence

# ------------------------------------------------------------------------------------------------
# what gave the sum


def with_part(share, whole, digits):
    """A share, with its part of a whole that is known."""
    number = total(share)
    if not number.is_known:
        return f"{number.text(digits)} (may be 0)"
    return ", ".join(filter(None, [number.text(digits), percent(share, whole).text(digits)]))


def say_push(rows, split, digits):
    """The sum, and what either direction has of it."""
    whole = rows.shares.sum(1)
    parts = [f"{name} {with_part(share, whole, digits)}" for name, share in
             zip(split.names, sums_of(rows, split).T) if share.any()]
    return (f"The shares of the rollouts add up to {total(whole).text(digits)}: "
            f"{'; '.join(parts)}.")


def say_split(rows, split, digits, least):
    """Which group pulled the number up most, and which down, where that is known. least: no smaller
    share is named."""
    def named(groups):
        if not groups:
            return "no group is known"
        if len(groups) > NAMED:
            return f"not known, {len(groups)} groups tie"
        if len(groups) > 1:
            return f"{' and '.join(split.names[i] for i in groups)} tie"
        i, = groups
        share = with_part(sums_of(rows, split)[:, i], rows.shares.sum(1), digits)
        return f"{split.names[i]} ({int(counts_of(split)[i])} of {rows.n} rollouts), {share}"

    up, down = map(named, most_of(rows, split, least))
    return f"By {split.what}, up most: {up}; down most: {down}."


def say_answer(rows, splits, by, digits, least):
    """Sentences: what gave the sum. by: the reader's own split, or ""."""
    names = [by] * bool(by) + ["reward and push", "prompt"]
    return [say_push(rows, splits["push"], digits),
            *(say_split(rows, splits[name], digits, least) for name in names)]


def say_tokens(table):
    """The tokens that gave most, where that is known. table: by_token's, or None."""
    most = [f"{name} {part.text(0)}" for name, *_, share, part in (table.rows if table else [])
            if part.value > 0 and share.is_known]
    return f"Tokens, by their part of the rollouts' sum: {', '.join(most[:3])}." if most else ""


# ------------------------------------------------------------------------------------------------
# how it went, and how far the account can be trusted


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
        return f"{line}, {total(story.change).text(n)}"
    # on the held-out prompts themselves, by the same random numbers before and after: without how
    # much prompts differ
    moved = story.ends[1] - story.ends[0]                   # (prompts, completions)
    error = float((moved.var(1) * moved.shape[1]).sum().sqrt())
    line += f", {Number(float(moved.sum()), error).text(n)} on these prompts"
    if story.folds_of == "prompts":
        line += f"; on new ones like them, ± {total(story.change).error:.{n}f}"
    return line


def percent_off(story, digits):
    """What the sum is off by, in percent of the change, which may be next to nothing."""
    return "over 1000 %" if story.error > 10 else f"{100 * story.error:.{digits}f} %"


def say_sum(story):
    """The sum beside what was measured."""
    n = story.digits
    parts = ", ".join(f"{name} {total(x.sum(1)).text(n)}" for name, x in story.given.items())
    nats = " nats" * (story.name == "log p")
    noise = ""
    if story.rollouts:
        noise = f"; ± is one standard error, by folds of the held-out {story.folds_of}"
    off = story.off._replace(value=abs(story.off.value)).text(n)[1:]
    return (f"account: {parts}, together {total(story.together).text(n)}{nats}; measured change "
            f"{total(story.change).text(n)}: off by {off} ({percent_off(story, 1)}{noise})")


def advice(story):
    """What to do where the sum is not the change: what was rounded comes first."""
    rounded = abs(float(story.rest["rounding"].sum())) if "rounding" in story.rest else 0.0
    if rounded > TOO_FAR * story.size:
        return "the run's bfloat16 rounded much of it: a run with --dtype=float32 does not"
    if not story.off.is_known:
        return "that is noise, which more held-out completions make smaller (--held_out=N)"
    return "the steps are too large for a straight line: --parts=4 looks at four parts of each step"


def is_useful(story):
    """Whether single rollouts are worth listing."""
    return story.error <= USELESS and story.noise <= USELESS


def say_far(story):
    """Where the sum is not the change, or cannot be known to be; or ""."""
    if story.error > USELESS:
        return (f"The sum is {percent_off(story, 0)} off the measured change, so no single "
                f"rollouts are listed: {advice(story)}.")
    if story.noise > USELESS:
        return (f"The sum is known to ± {100 * story.noise:.0f} % of itself, so no single "
                "rollouts are listed: take more held-out completions (--held_out=N).")
    if story.error > TOO_FAR and story.off.is_known:
        return f"warning: {advice(story)}"
    return ""


def say_single(story):
    """How far single shares are from adding up, and how much of their order is noise."""
    single = story.shares.sum(0)
    cancelling = float(single.abs().sum() / single.sum().abs().clamp(min=1e-30))
    text = (f"Single shares cancel: their sizes add up to {cancelling:.1f} times their sum. Where "
            "a weight has had small gradients, as in the first steps, AdamW scales opposing "
            "rollouts up. Trust the sums of groups.")
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


# ------------------------------------------------------------------------------------------------
# all of it


def told_of(story, by, labels, sentence, with_tokens, number):
    """What is Told of a number. by, labels: of splits_of. sentence: (prompt, Rollout of one row),
    or None if the number is a reward. number: before the headings of its lists."""
    rows = rows_of(story.run, story.shares)
    splits = splits_of(rows, by, labels)
    told = Told([], chart_of(story), [], [])
    if by:
        told.tables.append(over_time(rows, splits[by], story.run.since, story.digits))
    told.tables.append(by_group(rows, splits, story.digits))
    if sentence:
        text, row = sentence
        change = (story.ends[1] - story.ends[0])[0]         # (T,)
        pieces = pieces_of(row, change, story.run.setup.tokenizer)
        told.cards.append({f"{number}The sentence": [(total(story.change).text(3), text, pieces)]})

    # its tokens, and its rollouts
    tokens = None
    if is_useful(story):
        by_share = [G for *_, G in backwards(story.run, story.means)][::-1]
        if with_tokens:
            tokens = by_token(story, by_share)
            told.tables.append(tokens)
        directions = [G.sum(0) for G in by_share]
        if story.effects is not None:
            directions = story.directions
        cards = cards_of(story, directions)
        told.cards.append({number + heading: listed for heading, listed in cards.items()})
    told.tables.append(by_iteration(story))

    # a group that is smaller than what the sum is off by is not known, whatever its noise
    least = abs(story.off.value) if story.error > TOO_FAR else 0.0
    lines = [say_course(story), *say_answer(rows, splits, by, story.digits, least),
             say_tokens(tokens), say_sum(story), say_far(story),
             say_single(story) if is_useful(story) else "", say_needed(story)]
    told.lines.extend(filter(None, lines))
    return told
