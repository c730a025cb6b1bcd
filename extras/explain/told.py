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

from common.progress import Progress
from extras.explain.account import by_parameter
from extras.explain.page import Figure, Table, chart, facts_of
from extras.explain.sentences import best_and_worst
from extras.explain.target import noise_of
from extras.explain.words import logprob_changes, pieces_of, token_slopes
from run.run import sample_rows

TOO_FAR = 0.05      # the sum from the measured change: said
USELESS = 0.5       # no rollouts are listed
CANCELS = 5         # times of their sum that shares are in size: none of single prompts, tokens
BANDS = 4           # of rewards and lengths
TOKENS = 12         # of those that gave most
PROMPTS = 4         # of those that gave most, and least
ONE_BAND = 0.9      # of the rollouts in one band of lengths: these say nothing
PARTS = {"kl": "KL", "entropy": "entropy bonus", "decay": "weight decay"}     # names in words
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
    """The line of the values at both ends of the run."""
    n = digits_of(story)
    first, last = float(story.values[0]), float(story.values[-1])
    line = f"{story.name}: {first:.{n}f} before, {last:.{n}f} after"
    if story.name == "log p":
        change = abs(story.change)
        word = "likelier" if story.change > 0 else "less likely"
        return f"{line}. Training made it {math.exp(min(700, change)):.3g} times {word}"
    return f"{line}, {story.change:+.{n}f}{plus_minus(story, 'change')}"


def rest_of(story):
    """{name in words: shares (I,)} of what is no rollout's, without what is 0."""
    return {PARTS.get(name, name): x for name, x in story.rest.items() if x.any()}


def by_iteration(story):
    """Table: how the number went, what its steps were to give it, what its rollouts gave."""
    n = digits_of(story)
    ends = {k.it: t for t, k in enumerate(story.taken, 1)}     # steps done after an iteration
    rest = rest_of(story)
    rows = [[str(story.since), f"{story.values[0]:.{n}f}", *[""] * (3 + len(rest))]]

    def row(name, value, numbers):
        rows.append([name, f"{value:.{n}f}", *(f"{float(x):+.{n}f}" for x in numbers)])

    before = 0
    for it in range(story.since, len(story.shares)):
        after = ends.get(it, before)
        rise = story.values[after] - story.values[before]
        gain = story.gains[before:after].sum()
        row(str(it + 1), story.values[after],
            [rise, gain, story.shares[it].sum(), *(x[it] for x in rest.values())])
        before = after
    row("all", story.values[-1], [story.change, story.gains.sum(), story.shares.sum(),
                                  *(x.sum() for x in rest.values())])
    header = ["iteration", f"{story.name} after it", "its change", "change by the account",
              "from its rollouts", *(f"from {name}" for name in rest)]
    return Table("Iteration by iteration", header, rows, (
        "Columns add up, rows do not: rollouts and the rest of the loss count in the iteration "
        "that they come from, also for what they do in later steps, by AdamW's momentum."))


def closing(story):
    """The sum beside what was measured."""
    n = digits_of(story)
    given = {"rollouts": story.shares, **rest_of(story)}
    parts = ", ".join(f"{name} {float(x.sum()):+.{n}f}" for name, x in given.items())
    nats = " nats" if story.name == "log p" else ""
    noise = ""
    if story.noise:
        noise = "; ± is one standard error, by folds of the held-out prompts"
    off = abs(story.together - story.change)
    return (f"account: {parts}, together {story.together:+.{n}f}{plus_minus(story, 'sum')}{nats}; "
            f"measured change {story.change:+.{n}f}{plus_minus(story, 'change')}: off by "
            f"{off:.{n}f}{plus_minus(story, 'difference')} ({100 * story.error:.1f} %{noise})")


def warnings(story):
    """Where the sum is not the change, or cannot be known to be."""
    is_noise = story.error < 2 * story.noise_of_error
    if story.error > USELESS:
        reason = "that is noise: more held-out rollouts, --held_out=N" if is_noise else (
            "the steps are too large for a straight line: --parts=4 looks at four parts of each")
        yield (f"The sum is {100 * story.error:.0f} % off the measured change, so no rollouts "
               f"are listed: {reason}.")
    elif story.error > TOO_FAR and not is_noise:
        yield ("warning: the steps are too large for a straight line; --parts=4 looks at four "
               "parts of each step")


def needed(story):
    """How many held-out completions would do; "" where there are enough."""
    if TOO_FAR < story.noise_of_error < 1:
        count = story.rollouts * (story.noise_of_error / TOO_FAR) ** 2
        return (f"To know the sum and the change to {100 * TOO_FAR:.0f} % takes about "
                f"{float(f'{count:.1g}'):.0f} held-out completions at each step (--held_out=N), in "
                f"place of {story.rollouts}.")
    return ""


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


def length_bands(length):
    """As bands, of whole tokens."""
    low, high = int(length.min()), int(length.max())
    width = math.ceil((high - low + 1) / BANDS)
    names = []
    for first in range(low, high + 1, width):
        last = min(high, first + width - 1)
        names.append(f"{first} to {last} tokens" if last > first else f"{first} tokens")
    return names, (length.long() - low) // width


class Rows(NamedTuple):
    """All rollouts of an account, flat: n of them."""
    iteration: Tensor   # from 0
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
        torch.tensor([it for it in batches for _ in story.shares[it]]),
        torch.cat([story.shares[it] for it in batches]),
        flat(lambda batch: batch.rewards), flat(lambda batch: batch.row_advantages),
        flat(lambda batch: batch.rollout.sampled_mask.sum(1)),
        [prompt.text for batch in batches.values() for prompt in batch.prompts],
        [text for batch in batches.values() for text in batch.completions])


def splits_of(story, rows):
    """{by what: {name: rollouts (n,) of True and False}}. Each but that by prompts has all
    rollouts."""
    bands_of_reward, band = bands(rows.reward, "reward")
    bands_of_reward.append("no reward (abstained)")         # band -1
    by_reward = {name: band == i for i, name in enumerate(bands_of_reward[:-1])}
    by_reward[bands_of_reward[-1]] = band == -1
    by_sign = {"made less likely (advantage below 0)": rows.advantage < 0,
               "advantage 0 (not pushed)": rows.advantage == 0,
               "made likelier (advantage above 0)": rows.advantage > 0}
    both = {f"{name}, {sign}": pick & way
            for name, pick in by_reward.items() for sign, way in by_sign.items()}
    names, band = length_bands(rows.length)
    by_length = {name: band == i for i, name in enumerate(names)}
    splits = {"advantage": by_sign, "reward": by_reward, "reward and advantage": both}
    if max(int(pick.sum()) for pick in by_length.values()) < ONE_BAND * len(rows.share):
        splits["length"] = by_length

    prompts = {}
    for i, text in enumerate(rows.prompt):
        prompts.setdefault(text, []).append(i)
    order = sorted(prompts, key=lambda text: -float(rows.share[prompts[text]].sum()))
    shown = order if len(order) <= 2 * PROMPTS else order[:PROMPTS] + order[-PROMPTS:]
    by_prompt = {}
    for text in shown if story.cancelling < CANCELS else ():
        pick = torch.zeros(len(rows.share), dtype=torch.bool)
        pick[prompts[text]] = True
        by_prompt[repr(text[:40])] = pick | by_prompt.get(repr(text[:40]), False)
    some = f" ({PROMPTS} highest, {PROMPTS} lowest of {len(order)})" * (len(shown) < len(order))
    splits[f"prompt{some}"] = by_prompt
    return splits


def percent(part, whole):
    return f"{round(100 * float(part) / float(whole))} %" if whole else ""


def gathered(story):
    """Table: shares by what a person can name; beside them without the iterations where shares
    cancel."""
    rows = rows_of(story)
    n = digits_of(story)
    left = cancels(story.shares)                                                    # (I,)
    kinds = [torch.ones(len(rows.share), dtype=torch.bool)]
    header = ["rollouts", "how many", "share", "% of the sum"]
    if left.any():
        kinds.append(~left[rows.iteration])
        header += [f"share, {iterations_named(left)} left out", "% of that sum"]

    def line(name, pick):
        cells = [name, str(int(pick.sum()))]
        for kept in kinds:
            share = float(rows.share[pick & kept].sum())
            cells += [f"{share:+.{n}f}", percent(share, float(rows.share[kept].sum()))]
        return cells

    lines = [line("all", kinds[0])]
    for what, split in splits_of(story, rows).items():
        some = [line(name, pick) for name, pick in split.items() if pick.any()]
        lines += [[f"by {what}"], *some] if some else []
    note = ("Each split adds up to all. A group may have more than 100 %, where others are below "
            "0. Advantage is the reward relative to the prompt's other completions (with a critic: "
            "to what that expected).")
    if story.cancelling >= CANCELS:
        note += (f" There is no split by prompt, since single shares are more than {CANCELS} times "
                 "their sum in size.")
    return Table("Shares of the rollouts, in groups", header, lines, note)


def cancels(shares):
    """Of which iterations (I,) the shares (I, N) cancel; of none, where they do in each."""
    sizes = shares.abs().sum(1)
    found = sizes > CANCELS * shares.sum(1).abs()
    return found & ((sizes > 0) & ~found).any()


def readable(shares):
    """shares (I, N), 0 in the iterations where they cancel; all, where they do in each."""
    return shares.masked_fill(cancels(shares)[:, None], 0)


def iterations_named(which):
    """Those of which (I,) is True, in words."""
    names = [str(it + 1) for it in which.nonzero().flatten().tolist()]
    return f"iteration{'s' * (len(names) > 1)} {', '.join(names)}"


def taught(story, by_effect):
    """Sentences: what either direction has of the sum; the cell of reward and direction that has
    most, and a rollout of it, by its effect or by its share. Without the iterations where shares
    cancel."""
    rows = rows_of(story)
    left = cancels(story.shares)                                                    # (I,)
    kept = ~left[rows.iteration]
    total = float(rows.share[kept].sum())
    if not total:
        return []
    n = digits_of(story)
    splits = splits_of(story, rows)

    def has(pick):
        share = float(rows.share[pick & kept].sum())
        return f"{share:+.{n}f}, {percent(share, total)}"

    signs = [f"{name} {has(pick)}" for name, pick in splits["advantage"].items()
             if (pick & kept & (rows.advantage != 0)).any()]
    without = f" ({iterations_named(left)} left out, whose shares cancel)" if left.any() else ""
    first = f"The shares of the rollouts add up to {total:+.{n}f}{without}: {'; '.join(signs)}."

    towards = rows.share * math.copysign(1, total)
    cells = splits["reward and advantage"]
    name = max(cells, key=lambda name: float(towards[cells[name] & kept].sum()))
    pick = cells[name] & kept
    did = story.effects if by_effect else story.shares
    iterations = dict.fromkeys(k.it for k in story.taken)
    did = torch.cat([did[it] for it in iterations]) * math.copysign(1, total)
    most = int(did.masked_fill(~pick, -math.inf).argmax())
    second = (f"The largest group by reward and advantage: {name}, {int(pick.sum())} of "
              f"{int(kept.sum())} rollouts, {has(pick)}; for example iteration "
              f"{int(rows.iteration[most]) + 1}, {rows.prompt[most][:60]!r} -> "
              f"{rows.completion[most][:80]!r}.")
    return [first, second]


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
              percent(float(shares[token]), total)]
             for token in shares.abs().argsort(descending=True)[:TOKENS].tolist()]
    header = ["token", "times made likelier", "less likely", "share", "% of the rollouts' sum"]
    known = int((counts.sum(0) > 0).sum())
    return Table(f"Shares of the tokens: the {len(lines)} largest of {known} by size", header,
                 lines, "All tokens add up to the rollouts' sum; a token may have more than 100 %.")


def places_of(x, names, note=""):
    """{heading: places} of the largest and the smallest of x (I, N)."""
    headings = (f"Largest positive {names}{note}", f"Largest negative {names}{note}")
    return {heading: [divmod(i, x.shape[1]) for i in some]
            for heading, some in zip(headings, best_and_worst(x.flatten()).values())}


def card(story, setup, cfg, place, words, last):
    """(facts, prompt, Pieces) of a rollout. last: what else is to be said of it."""
    it, j = place
    batch = next(k.batch for k in reversed(story.taken) if k.it == it)
    row = sample_rows(it, batch, cfg)[j]
    facts = facts_of(row, f"share {story.shares[it, j]:+.{digits_of(story) + 1}f}", last)
    return facts, row["prompt"], pieces_of(batch.rollout[[j]], words, setup.tokenizer)


def cards_of(story, setup, cfg, states, directions, by_effect):
    """{heading: [(facts, prompt, Pieces)]} of the rollouts at both ends: by what the number would
    be without them, or by their shares. directions: S of (W,), of these."""
    left = cancels(story.shares)
    if by_effect:
        places = places_of(story.effects, "effects")
    else:
        note = f" ({iterations_named(left)} left out)" if left.any() else ""
        places = places_of(readable(story.shares), "shares", note)
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


ABOUT = ("A rollout's share is bookkeeping along the run as it happened. Shares add up to the "
         "change; single ones may be large and cancel. A share does not say what the number would "
         "be without the rollout.")
TINT = "part of the share"


def say_smooth(smooth, bound):
    """How far single rollouts can be trusted. smooth: account.smoothness; NaN: nothing is
    predicted."""
    if smooth != smooth:
        return ("What the number would be without a rollout is not predicted: for a reward no "
                "check could tell where such a prediction is right, and without the Hessian too "
                "many are wrong (docs/account.md). The lists are by share, and single shares "
                "cancel: trust the sums.")
    scale = f"{smooth:.2f}; 1: smooth, 0: chance"
    if smooth < bound:
        return (f"The run is rough ({scale}; predictions need {bound:.2f}): what the number would "
                "be without a rollout cannot be predicted. The lists are by share, and single "
                "shares cancel: trust the sums.")
    return (f"The run is smooth ({scale}; predictions need {bound:.2f}): small changes of its "
            "rollouts change it nearly as predicted. The lists are in the order of the predicted "
            "effects.")


def say_tokens(tokens):
    """The tokens that gave most. tokens: by_token's Table, or None."""
    rows = tokens.rows if tokens else []
    most = [f"{name} {part}" for name, *_, part in rows if not part.startswith("-")][:3]
    return f"Tokens, by their part of the rollouts' sum: {', '.join(most)}." if most else ""


def say_cancelling(story):
    """Why single shares are not to be read, where they are not."""
    if story.cancelling < 2:
        return ""
    sizes = story.shares.abs().sum(1)                                               # (I,)
    it = int(sizes.argmax())
    text = (f"Single shares cancel: added without their signs they are {story.cancelling:.1f} "
            f"times their sum, {percent(sizes[it], sizes.sum())} of that in iteration {it + 1}. "
            "Where a weight has had tiny gradients, as in the first steps, the optimizer scales "
            "them up, so opposing rollouts get huge shares that cancel.")
    if story.cancelling < CANCELS:
        return text
    return f"{text} Above {CANCELS} times this page has no tables by prompt or token."


def lines_of(story, tokens, by_effect):
    """Sentences. tokens: by_token's Table, or None. by_effect: the order of rollouts."""
    found = [course_of(story)]
    if story.error <= USELESS:
        found += [*taught(story, by_effect), say_tokens(tokens)]
    found += [closing(story), *warnings(story)]
    if story.error <= USELESS:
        found.append(say_cancelling(story))
    return [text for text in [*found, needed(story)] if text]


def figure_of(story):
    """The Figure of the number along the run."""
    sums = story.values[0] + torch.cat([torch.zeros(1), story.gains.cumsum(0)])
    ends = {k.it: t for t, k in enumerate(story.taken, 1)}
    ticks = [(0, story.since), *((t, it + 1) for it, t in ends.items())]
    few = ticks[::math.ceil(len(ticks) / 12)]
    n = digits_of(story)
    first, last = float(story.values[0]), float(story.values[-1])
    line = f"{story.name} {first:.{n}f} {curve(story.values)} {last:.{n}f}"
    return Figure(chart(story.values.tolist(), sums.tolist(), story.name, few), line)
