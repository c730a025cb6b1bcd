"""
A page on the influences of a run: one HTML file that needs no network and runs no script.

Every text in it may have been written by a policy: visible() is the only way into the page.
"""
import html
import math
import random

WIDTH, HEIGHT = 360, 220        # of a chart
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 34
# Okabe and Ito (2008): colour-blind readers can tell these apart
BLUE, RED, GREY = "#0072B2", "#D55E00", "#999999"
SIGNS = {"\n": "⏎", "\t": "⇥"}
MOST_DOTS = 3000

CURVES = (  # title, from which log, {metric: what it is called, if there may be two}
    ("Reward of the rollouts", "metrics", {"reward": ""}),
    ("KL to the reference, nats per token", "metrics", {"kl": ""}),
    ("Share of the rollouts", "metrics", {
        "tracin/positive_ratio": "above 0", "tracin/selected_ratio": "kept"}),
    ("Cosine of the target's halves: 0 is noise", "metrics", {
        "tracin/target_cosine": ""}),
    ("Toxicity, evaluated", "eval", {
        "judge/toxicity": "judge", "eval_judge/toxicity": "eval judge"}))
METRICS = [metric for _, log, names in CURVES if log == "metrics" for metric in names]
MEASURES = [metric for _, log, names in CURVES if log == "eval" for metric in names]

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: #fff; color: #222;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
h3 { font-size: 1rem; margin: .5rem 0; } p, ul { max-width: 48rem; } li { margin: .3rem 0; }
.side { display: grid; gap: 1rem; --w: 20rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--w)), 1fr)); }
.side:not(.pair) { align-items: end; } .pair { --w: 26rem; }
article { border: 1px solid #ddd; border-radius: 6px; padding: .6rem .8rem; margin-bottom: .8rem; }
dl { display: flex; flex-wrap: wrap; gap: 0 1.2rem; margin: 0 0 .4rem; font-size: .85rem; }
dl div { white-space: nowrap; } dt, dd { display: inline; margin: 0; } dt { color: #666; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; line-height: 1.9; }
.prompt, .given { color: #777; } .given { text-decoration: underline dotted; }
b { font-weight: normal; padding: .15em 0; border-radius: 3px; box-shadow: inset 0 0 0 1px #fff; }
i { font-style: normal; color: #888; font-size: .85em; } b i { color: #444; }
figure { margin: 0; max-width: 27rem; } figcaption { font-size: .9rem; }
svg { width: 100%; height: auto; }
path { fill: none; } text { fill: #555; font-size: 11px; }
.key { white-space: nowrap; }
.key::before { content: "●"; color: var(--c); margin: 0 .25em 0 .8em; }
.blue { color: #0072B2; } .red { color: #D55E00; }
.tint { display: inline-block; width: 7rem; height: .8em; border-radius: 3px;
  background: linear-gradient(90deg, #D55E00b3, #fff, #0072B2b3); }
.note { color: #555; }
"""


def visible(text):
    """Any text as HTML: nothing in it is markup, and what is not printed is seen."""
    return "".join(html.escape(c) if c == " " or c.isprintable() else
                   f"<i>{SIGNS.get(c) or repr(c)[1:-1]}</i>" for c in text)


def page(title, about, sentences, words, rows, metrics, evaluations):
    """The page, as text. words: of words_section. rows: of samples.jsonl, each with z, its
    influence in standard deviations. metrics, evaluations: rows of the other two logs."""
    logs = {"metrics": metrics, "eval": evaluations}
    curves = [curve(name, logs[log], names) for name, log, names in CURVES]
    listed = "".join(f"<li>{visible(text)}</li>" for text in sentences)
    parts = [
        f"<h1>{visible(title)}</h1><p>{visible(about)}</p><ul>{listed}</ul>",
        f"<h2>Which words</h2>{words}",
        "<h2>Over time</h2>" + side(filter(None, curves)),
        "<h2>Influence and reward</h2>" + side(filter(None, [
            scatter("reward", rows), scatter("advantage", rows)]))]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join([
        '<!DOCTYPE html>', '<html lang="en">', '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{visible(title)}</title>", f"<style>{STYLE}</style>", *parts, "</html>", ""])


def side(figures):
    return f'<div class="side">{"".join(figures)}</div>'


# ------------------------------------------------------------------------------------------------
# which words


LEGEND = (
    "<p>Each token is tinted by its own influence; those of a rollout add up to its. "
    '<span class="blue">Blue</span>: learning from this token helps the target; '
    '<span class="red">red</span>: it harms the target. A rollout of positive advantage pushes '
    "its tokens up (▲), one of negative advantage down (▼); blue is where the target pushes the "
    "same way.</p>")


def words_section(about, cards, unit):
    """HTML of helpful and harmful rollouts. cards: {heading: [(row of samples.jsonl, its
    influence, its run.words.Pieces)]}. unit: what influences are counted in."""
    lists = "".join(list_of_cards(heading, some, unit) for heading, some in cards.items())
    return f'<p class="note">{visible(about)}</p>{LEGEND}<div class="side pair">{lists}</div>'


def list_of_cards(heading, cards, unit):
    """HTML of one list. Tints are relative to its own strongest tokens: the harmful may be weak."""
    found = sorted(abs(piece.influence) for _, _, pieces in cards for piece in pieces)
    if not found:
        return f"<section><h3>{heading}</h3><p>none</p></section>"
    full = found[int(0.98 * len(found))]
    articles = "".join(card(*one, full) for one in cards)
    return (f'<section><h3>{heading}</h3><p class="note">{-full:.2g} <span class="tint"></span> '
            f"{full:+.2g} {unit}</p>{articles}</section>")


def card(row, influence, pieces, full):
    """HTML of a rollout. full: the influence of a token that has the full tint."""
    facts = {"influence": f"{influence:+.2f}"}
    forms = {"reward": ".3f", "advantage": "+.2f"}
    facts |= {name: f"{row[name]:{form}}" for name, form in forms.items() if name in row}
    if row.get("advantage"):
        facts["advantage"] += " ▲" if row["advantage"] > 0 else " ▼"
    if "weight" in row:
        facts["weight"] = f"{row['weight']:.3g}" if row["weight"] else "0, dropped"
    listed = "".join(f"<div><dt>{k}</dt> <dd>{x}</dd></div>" for k, x in facts.items())
    prompt = f'<span class="prompt">{visible(row["prompt"])}</span>'
    tokens = "".join(token(piece, full) for piece in pieces)
    return f'<article><dl>{listed}</dl><p class="text">{prompt}{tokens}</p></article>'


def token(piece, full):
    """HTML of a run.words.Piece."""
    shown = visible(piece.text) or "<i>end</i>"
    if not piece.text.strip(" "):
        shown = f"<i>{'␣' * len(piece.text) or 'end'}</i>"
    if not piece.chosen:
        return f'<span class="given" title="not drawn by the policy">{shown}</span>'
    color = "0,114,178" if piece.influence > 0 else "213,94,0"
    share = min(1.0, abs(piece.influence) / full) if full else 0.0
    about = f"{piece.influence:+.2g}; the target pushes it {'down' if piece.change > 0 else 'up'}"
    tint = f"background:rgba({color},{0.7 * share:.2f})"
    return f'<b style="{tint}" title="{about}">{shown}</b>'


# ------------------------------------------------------------------------------------------------
# charts


def curve(title, rows, names):
    """HTML of lines over iterations, {metric: its name}; "" without a value."""
    looks = ((BLUE, 3), (RED, 1.4))     # both are seen where they are equal
    series = []
    for (metric, name), (color, width) in zip(names.items(), looks):
        points = [(row["iteration"], row[metric]) for row in rows if metric in row]
        if points:
            line = "M" + "L".join("{} {}" for _ in points)
            series.append((name, color, points, line, width))
    return chart(title, "iteration", series)


def scatter(name, rows):
    """HTML of influence against a number of the rows; "" where no row has it."""
    rows = [row for row in rows if name in row]
    title = f"Influence, in standard deviations, against {name}"
    if len(rows) > MOST_DOTS:
        title += f": {MOST_DOTS:,} of {len(rows):,} rollouts"
        chosen = sorted(random.Random(0).sample(range(len(rows)), MOST_DOTS))
        rows = [rows[i] for i in chosen]
    series = []
    for label, color, kept in (("dropped", GREY, False), ("kept", BLUE, True)):
        points = [(row[name], row["z"]) for row in rows if (row["weight"] != 0) == kept]
        if points:
            series.append((label, color, points, "M{} {}h0" * len(points), 3.5))
    return chart(title, name, series)


def chart(title, x_name, series):
    """HTML of a chart; "" of no series. series: (name or "", color, points, path with a {} for each
    coordinate, width of its stroke)."""
    if not series:
        return ""
    everything = [point for _, _, points, _, _ in series for point in points]
    (x_low, x_high), (y_low, y_high) = (span(values) for values in zip(*everything))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def across(x):
        return round(LEFT + (x - x_low) / (x_high - x_low) * (right - LEFT), 1)

    def down(y):
        return round(bottom - (y - y_low) / (y_high - y_low) * (bottom - TOP), 1)

    marks = []
    for y in ticks(y_low, y_high):
        color = "#999" if y == 0 else "#e5e5e5"
        marks.append(f'<path d="M{LEFT} {down(y)}H{right}" stroke="{color}"/>'
                     f'<text x="{LEFT - 6}" y="{down(y) + 4}" text-anchor="end">{y:g}</text>')
    marks += [f'<text x="{across(x)}" y="{bottom + 15}" text-anchor="middle">{x:g}</text>'
              for x in ticks(x_low, x_high)]
    marks.append(f'<text x="{right}" y="{HEIGHT - 1}" text-anchor="end">{x_name}</text>')
    for _, color, points, path, width in series:
        places = [place for x, y in points for place in (across(x), down(y))]
        marks.append(f'<path d="{path.format(*places)}" stroke="{color}" stroke-width="{width}" '
                     'stroke-linecap="round" stroke-linejoin="round" stroke-opacity=".75"/>')
    keys = "".join(f'<span class="key" style="--c:{color}">{name}</span>'
                   for name, color, *_ in series if name)
    return (f'<figure><figcaption>{title}{keys}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'role="img" aria-label="{title}">{"".join(marks)}</svg></figure>')


def span(values):
    """The lowest and the highest value, and some room."""
    low, high = min(values), max(values)
    room = 0.04 * (high - low) or 0.5 * abs(high) or 0.5
    return low - room, high + room


def ticks(low, high):
    """Three to eight round numbers from low to high."""
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next((factor for factor in (5, 2) if (high - low) / (factor * step) >= 3), 1)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]
