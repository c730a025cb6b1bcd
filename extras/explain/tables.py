"""
The numbers of an account as tables, and its rollouts with their words.
"""
from typing import Any, NamedTuple

import torch
from torch.nn.utils import vector_to_parameters

from extras.explain.account import by_parameter
from extras.explain.groups import at_random, counts_of, rewards_of, sums_of
from extras.explain.number import percent, total
from extras.explain.tokens import logprob_changes, pieces_of, token_slopes

SHOWN = 5           # rollouts in a list


class Table(NamedTuple):
    heading: str
    header: list        # texts
    rows: list          # of lists of texts and Numbers; one text alone heads the rows below it
    digits: int         # of its Numbers, behind the point
    note: str = ""


class Card(NamedTuple):
    """A rollout, or a sentence, with its words."""
    facts: str
    prompt: str
    pieces: Any         # tokens.Piece of the completion


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
    return Table("Shares of the rollouts, in groups", header, lines, digits,
                 "A split tells something where a group's share differs from that of as many "
                 "rollouts at random.")


def by_group_over_time(rows, split, digits):
    """Table: the groups of a split, iteration by iteration."""
    groups = counts_of(split).nonzero()[:, 0].tolist()

    def line(name, factors):
        return [name, *map(total, sums_of(rows, split, factors).T[groups])]

    lines = [line(it + 1, (rows.iteration == it).double())
             for it in range(int(rows.iteration.max()) + 1)]
    return Table(f"Shares by {split.what}, iteration by iteration",
                 ["iteration", *(split.names[i] for i in groups)],
                 [*lines, line("all", torch.ones(rows.n))], digits)


def by_iteration(account):
    """Table: how the number went, what its steps were to give it, what its rollouts gave."""
    count = account.run.shape[0]
    ends = [k.it for k in account.run.steps]
    done = torch.searchsorted(torch.tensor(ends), torch.arange(count), right=True)
    points = [0, *done.tolist()]        # steps before and after each iteration
    by_step = torch.cat([0 * account.gains[:1], account.gains.cumsum(0)])       # (S + 1, F)
    columns = {
        "its change": account.values[points].diff(dim=0),
        "change by the account": by_step[points].diff(dim=0),
        **{f"from {'its ' * (name == 'rollouts')}{name}": x.T
           for name, x in account.sources.items()}}                             # (I, F) each
    values = [f"{x:.{account.digits}f}" for x in account.values[points].sum(1).tolist()]
    cells = zip(*(map(total, x) for x in columns.values()))
    rows = [[0, values[0], *[""] * len(columns)],
            *([it, value, *row] for it, (value, row) in enumerate(zip(values[1:], cells), 1)),
            ["all", values[-1], *(total(x.sum(0)) for x in columns.values())]]
    return Table("Iteration by iteration",
                 ["iteration", f"{account.target.title} after it", *columns], rows, account.digits,
                 "Columns add up. Rows do not: a rollout is credited to its own iteration even for "
                 "what it does later, through AdamW's momentum.")


def tables_of(account, rows, splits, by=""):
    """All tables. by: the name of the reader's own groups."""
    own = [by_group_over_time(rows, splits[by], account.digits)] if by else []
    return [by_group(rows, splits, account.digits), *own, by_iteration(account)]


# ------------------------------------------------------------------------------------------------
# rollouts, with their words


def token_parts(run, directions, places):
    """{(iteration, row): parts (T,) of its tokens} of products of gradients with directions, S of
    (W,), over all steps."""
    parts = dict.fromkeys(places, 0.0)
    for k, before, direction in zip(run.steps, run.states, directions):
        rows = [j for j in k.step.rows.tolist() if (k.it, j) in parts]
        if not rows:
            continue
        vector_to_parameters(before[0].to(run.setup.device), run.setup.trained)
        slopes = token_slopes(run.setup, run.cfg, k.batch, k.step)                  # (N, T)
        along = by_parameter(run.setup, direction.to(run.setup.device))
        for few in torch.tensor(rows, device=slopes.device).split(run.cfg.micro_batch_size):
            changes = logprob_changes(
                run.setup.policy, along, k.batch.rollout[few], run.cfg.temperature)
            for j, x in zip(few.tolist(), slopes[few] * changes):
                parts[k.it, j] = parts[k.it, j] + x
    return parts


def card(account, place, parts):
    """The Card of the rollout at (iteration, row)."""
    it, j = place
    batch = account.run.batches[it]
    advantage = float(batch.row_advantages[j])
    facts = (f"share {total(account.shares[:, it, j]).text(account.digits + 1)}, iteration "
             f"{it + 1}, reward {float(batch.rewards[j]):.3f}, advantage {advantage:+.2f} "
             f"{'▲' if advantage > 0 else '▼'}")
    if account.effects is not None and account.target.title == "log p":
        without = float(account.values[-1].sum() - account.effects[place])
        facts += f", without it {without:.2f}"
    pieces = pieces_of(batch.rollout[[j]], parts, account.run.setup.tokenizer)
    return Card(facts, batch.prompts[j].text, pieces)


def cards_of(account):
    """{heading: [Card]} of the rollouts at both ends, by their effects, or else by their shares."""
    what = "shares" if account.effects is None else "effects"
    x = account.shares.sum(0) if account.effects is None else account.effects       # (I, N)
    order = x.flatten().argsort(descending=True)
    signs = x.flatten()[order]
    ends = {"positive": order[signs > 0][:SHOWN], "negative": order[signs < 0].flip(0)[:SHOWN]}
    places = {f"Largest {sign} {what}": [divmod(i, x.shape[1]) for i in end.tolist()]
              for sign, end in ends.items()}
    parts = token_parts(account.run, account.directions, sum(places.values(), []))
    return {heading: [card(account, place, parts[place]) for place in end]
            for heading, end in places.items()}


def sentence_card(account, prompt, row):
    """The Card of the sentence that is explained, a Rollout of one row: how the log-prob of each
    token has changed."""
    start, *_, end = account.points
    pieces = pieces_of(row, (end.parts - start.parts)[0], account.run.setup.tokenizer)
    return Card(total(account.change).text(3), prompt, pieces)
