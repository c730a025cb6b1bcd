"""
The numbers of an account: tables, the chart, and rollouts with their words. told.py has the
sentences; page.py writes all of it.

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
from extras.explain.groups import at_random, counts_of, rewards_of, sums_of
from extras.explain.number import percent, total
from extras.explain.page import Chart, Table
from extras.explain.words import changes_along, pieces_of, token_slopes

TOKENS = 12         # in the table: those with the largest shares
SHOWN = 5           # rollouts in a list
PARTS = {"kl": "KL", "entropy": "entropy bonus", "decay": "weight decay",
         "rounding": "bfloat16's rounding"}     # names in words


class Story(NamedTuple):
    """The account of one number."""
    name: str           # "held-out reward", "log p"
    run: Any            # account.Replay
    values: Tensor      # (S + 1, F) along the run
    gains: Tensor       # (S, F) of the steps, by the mean slope on their way
    means: list         # S of (F, W), these slopes
    ends: list          # target.Point.parts at the start and at the end
    shares: Tensor      # (F, I, N)
    rest: dict          # {name: (F, I)}
    effects: Any        # (I, N); None: nothing is predicted
    directions: list    # S of (W,), which the effects are products with
    rollouts: int       # held-out completions at each point; 0: none
    folds_of: str       # "prompts", "completions"; "": exact

    @property
    def change(self):       # (F,)
        return self.values[-1] - self.values[0]

    @property
    def sums(self):         # (S + 1, F): what the steps were to add so far
        return torch.cat([0 * self.gains[:1], self.gains.cumsum(0)])

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
    def digits(self):
        """As many behind the point as the numbers deserve."""
        size = max(self.size, float(self.shares.sum((0, 2)).abs().max()), 1e-12)
        return min(9, max(2, 2 - math.floor(math.log10(size))))


def story_of(run, target, course, account, i):
    """The Story of sentence i, or of the one number."""
    columns = slice(None) if target.rollouts else slice(i, i + 1)
    return Story(
        target.title, run, course.values[:, columns], course.gains[:, columns],
        [x[columns] for x in course.means], [x[columns] for x in course.ends],
        account.shares[columns], {name: x[columns] for name, x in account.rest.items()},
        None if account.effects is None else account.effects[i],
        [x[i] for x in account.directions], target.rollouts, target.folds_of)


# ------------------------------------------------------------------------------------------------
# tables


def by_iteration(story):
    """Table: how the number went, what its steps were to give it, what its rollouts gave."""
    since = story.run.since
    iterations = torch.arange(since, story.run.shape[0])
    done = torch.searchsorted(torch.tensor([k.it for k in story.run.steps]), iterations, right=True)
    points = [0, *done.tolist()]        # steps before and after each iteration
    columns = {
        "its change": story.values[points].diff(dim=0),
        "change by the account": story.sums[points].diff(dim=0),
        **{f"from {'its ' * (name == 'rollouts')}{name}": x[:, since:].T
           for name, x in story.given.items()}}
    first, *values = [f"{x:.{story.digits}f}" for x in story.values[points].sum(1).tolist()]
    numbers = zip(*(map(total, x) for x in columns.values()))
    rows = [[since, first, *[""] * len(columns)],
            *([it + 1, value, *cells] for it, value, cells in zip(
                iterations.tolist(), values, numbers)),
            ["all", values[-1], *(total(x.sum(0)) for x in columns.values())]]
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
        "Each split adds up to all. A group may have more than 100 %, where another is below 0. "
        "The reward is the one of training: a mean and a standard deviation. "
        "Advantage is the reward relative to the rest of the prompt's completions (with a critic: "
        "to what it expected). As many at random: what a group of this size has, and by how much "
        "that varies, if the shares of each iteration are dealt out anew among its rollouts. "
        "A split tells something where its groups differ from that."))


def over_time(rows, split, since, digits):
    """Table: the groups of a split, iteration by iteration."""
    groups = counts_of(split).nonzero()[:, 0].tolist()
    its = range(since, int(rows.iteration.max()) + 1)
    lines = [[it + 1, *map(total, sums_of(rows, split, rows.iteration == it).T[groups])]
             for it in its]
    return Table(f"Shares by {split.what}, iteration by iteration",
                 ["iteration", *(split.names[i] for i in groups)],
                 [*lines, ["all", *map(total, sums_of(rows, split).T[groups])]], digits)


def token_products(run, directions, places=None):
    """For each step, a few rows at a time: (step, rows (n,), slopes (n, T) of the loss by the
    log-probs of their tokens, parts (F, n, T) of <g_i, direction>). directions: S of (F, W).
    places: (iteration, number) of the rollouts; None: all."""
    for k, before, direction in zip(run.steps, run.states, directions):
        rows = [j for j in k.step.rows.tolist() if places is None or (k.it, j) in places]
        if not rows:
            continue
        vector_to_parameters(before[0].to(run.setup.device), run.setup.trained)
        slopes = token_slopes(run.setup, run.cfg, k.batch, k.step)                  # (N, T)
        along = [by_parameter(run.setup, d) for d in direction.to(run.setup.device)]
        for few in torch.tensor(rows, device=slopes.device).split(run.cfg.micro_batch_size):
            changes = changes_along(
                run.setup.policy, along, k.batch.rollout[few], run.cfg.temperature)
            yield k, few, slopes[few], slopes[few] * changes


def token_parts(run, directions, places):
    """{place: parts (T,) of its tokens}, over all steps. directions: S of (W,)."""
    words = dict.fromkeys(places, 0.0)
    for k, rows, _, parts in token_products(run, [d[None] for d in directions], words):
        for j, x in zip(rows.tolist(), parts[0]):
            words[k.it, j] = words[k.it, j] + x
    return words


def by_token(story, directions):
    """Table: shares by the token. directions: S of G_t (F, W)."""
    setup = story.run.setup
    V = setup.policy.config.vocab_size
    shares = torch.zeros(len(story.shares), V, dtype=torch.float64)
    counts = torch.zeros(2, V, dtype=torch.long)    # likelier, less likely
    progress = Progress("tokens", "iteration", story.run.shape[0] - story.run.since)
    for k, rows, slopes, parts in token_products(story.run, directions):
        ids = k.batch.rollout.tokens[rows][:, -slopes.shape[1]:].cpu()              # (n, T)
        shares.index_add_(1, ids.flatten(), parts.flatten(1).double().cpu())
        for count, pushed in zip(counts, (slopes < 0, slopes > 0)):
            count += ids[pushed.cpu()].bincount(minlength=V)
        if progress.is_due():
            progress.show(k.it + 1 - story.run.since)
    whole = story.shares.sum((1, 2))
    rows = [[repr(setup.tokenizer.decode([i])), *counts[:, i].tolist(), total(shares[:, i]),
             percent(shares[:, i], whole)]
            for i in shares.sum(0).abs().argsort(descending=True)[:TOKENS].tolist()]
    header = ["token", "times made likelier", "less likely", "share", "% of the rollouts' sum"]
    num_tokens = int(counts.any(0).sum())
    return Table(f"Shares of the tokens: the {len(rows)} largest of {num_tokens} by size", header,
                 rows, story.digits,
                 "All tokens add up to the rollouts' sum; a token may have more than 100 %.")


def chart_of(story):
    """The Chart of the number along the run."""
    values = story.values.sum(1)
    ends = {k.it + 1: t for t, k in enumerate(story.run.steps, 1)}  # an iteration's last step
    ticks = [(0, story.run.since), *((t, it) for it, t in ends.items())]
    return Chart(story.name, values.tolist(), (values[0] + story.sums.sum(1)).tolist(),
                 ticks[::math.ceil(len(ticks) / 12)])


# ------------------------------------------------------------------------------------------------
# rollouts, with their words


def card(story, place, words):
    """(facts, prompt, Pieces) of a rollout."""
    it, j = place
    batch = story.run.batches[it]
    advantage = float(batch.row_advantages[j])
    facts = (f"share {total(story.shares[:, it, j]).text(story.digits + 1)}, iteration {it + 1}, "
             f"reward {float(batch.rewards[j]):.3f}, advantage {advantage:+.2f} "
             f"{'▲' if advantage > 0 else '▼'}")
    if story.effects is not None and story.name == "log p":
        facts += f", without it {float(story.values[-1].sum() - story.effects[place]):.2f}"
    pieces = pieces_of(batch.rollout[[j]], words, story.run.setup.tokenizer)
    return facts, batch.prompts[j].text, pieces


def cards_of(story, directions):
    """{heading: [(facts, prompt, Pieces)]} of the rollouts at both ends: by what the number would
    be without them, or by their shares. directions: S of (W,), of these."""
    what = "shares" if story.effects is None else "effects"
    x = story.shares.sum(0) if story.effects is None else story.effects             # (I, N)
    order = x.flatten().argsort(descending=True)
    signs = x.flatten()[order]
    ends = {"positive": order[signs > 0][:SHOWN], "negative": order[signs < 0].flip(0)[:SHOWN]}
    places = {f"Largest {sign} {what}": [divmod(i, x.shape[1]) for i in end.tolist()]
              for sign, end in ends.items()}
    words = token_parts(story.run, directions, sum(places.values(), []))
    return {heading: [card(story, place, words[place]) for place in end]
            for heading, end in places.items()}
