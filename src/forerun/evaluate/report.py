"""Summaries for readers: tables in Markdown, a picture of the frontier, and a page with both that
needs nothing but a browser."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from datetime import date

from forerun.evaluate.metrics import Mean
from forerun.evaluate.summary import Summary

COLUMNS = (
    "method",
    "score",
    "beside the first",
    "same answers",
    "tokens/forward",
    "forwards",
    "tokens/s",
    "tokens/verdict",
    "accepted",
    "first token",
)
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf")
WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT = 640, 420, 60, 48, 20
LINE = 15  # between the lines of the legend, which stands above the picture
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child, td:nth-child(3) { text-align: left }
small { color: #666 } svg { max-width: 100%; height: auto }
"""


def shown(value: Mean, percent: bool) -> str:
    """A mean and its error."""
    scale = 100 if percent else 1
    digits = 1 if percent or abs(value.mean) >= 10 else 3
    error = "" if math.isnan(value.error) else f" ± {scale * value.error:.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{error}"


def _number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def cells(summary: Summary) -> list[str]:
    """One method's row."""
    speed = summary.speed
    beside = summary.beside
    first_token = None if speed.first_token is None else 1e3 * speed.first_token
    rate = None if speed.acceptance_rate is None else 100 * speed.acceptance_rate
    return [
        summary.method,
        shown(summary.score, summary.percent),
        beside.sentence if beside else "",
        _number(100 * beside.same, ".0f", " %") if beside else "",
        _number(speed.tokens_per_forward or None),
        _number(speed.forwards or None, ".0f"),
        _number(speed.tokens_per_second, ".0f"),
        _number(speed.acceptance_length),
        _number(rate, ".0f", " %"),
        _number(first_token, ".0f", " ms"),
    ]


def headers(summaries: Sequence[Summary]) -> list[str]:
    metric = summaries[0].metric + (", %" if summaries[0].percent else "")
    return [metric if name == "score" else name for name in COLUMNS]


def title(summaries: Sequence[Summary]) -> str:
    settings = summaries[0].settings
    facts = [f"{settings['task']}", f"{settings['model']}", f"{settings['dtype']}"]
    if settings.get("data"):
        facts[0] += f" ({settings['data']})"
    return ", ".join(facts)


def caption(summaries: Sequence[Summary]) -> str:
    """How the numbers were made."""
    first = summaries[0]
    settings = first.settings
    facts = [f"{first.items} item{'' if first.items == 1 else 's'}"]
    if settings.get("samples", 1) > 1:
        facts.append(f"{settings['samples']} samples each")
    if "temperature" in settings:
        facts.append(f"temperature {settings['temperature']:g}")
        facts.append("chat template" if settings.get("chat") else "plain prompt")
    if "meaning" in settings:
        facts.append(f"log-likelihood: {settings['meaning']}")
    facts.append(f"batch {settings['lanes']}")
    facts.append(str(first.about.get("machine", "")))
    return "; ".join(fact for fact in facts if fact)


def measures(summaries: Sequence[Summary]) -> list[tuple[str, str]]:
    """What else was measured: a line for each method."""
    lines = []
    for one in summaries:
        words = [f"{name} {shown(value, one.percent)}" for name, value in one.measures.items()]
        if words:
            lines.append((one.method, "; ".join(words)))
    return lines


def columns_used(rows: Sequence[Sequence[str]]) -> list[int]:
    return [i for i in range(len(rows[0])) if any(row[i] for row in rows)]


def group_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """Tokens per forward by category, a column for each method."""
    names = list(summaries[0].groups)
    return [
        [name, *(_number(one.groups[name].tokens_per_forward) for one in summaries)]
        for name in names
        if all(name in one.groups for one in summaries)
    ]


def markdown(summaries: Sequence[Summary]) -> str:
    """A table, and under it how it was made."""
    rows = [cells(one) for one in summaries]
    used = columns_used(rows)
    heads = headers(summaries)
    lines = ["| " + " | ".join(heads[i] for i in used) + " |"]
    lines.append("|" + "---|" * len(used))
    for one, row in zip(summaries, rows):
        name = f"`{one.method}`"
        lines.append("| " + " | ".join([name, *(row[i] for i in used[1:])]) + " |")
    text = "\n".join(lines) + "\n"
    groups = group_rows(summaries)
    if groups:
        text += "\n| tokens/forward | " + " | ".join(f"`{one.method}`" for one in summaries)
        text += " |\n|" + "---|" * (len(summaries) + 1) + "\n"
        text += "\n".join("| " + " | ".join(row) + " |" for row in groups) + "\n"
    return f"{text}\n{title(summaries)}; {caption(summaries)}.\n"


# --- the picture --------------------------------------------------------------


def frontier(panels: Sequence[Sequence[Summary]]) -> str:
    """Quality against speed as SVG: a colour for each panel, its first method drawn hollow."""
    points = [
        (panel, one, _speed_of(one), _score_of(one))
        for panel in range(len(panels))
        for one in panels[panel]
    ]
    points = [point for point in points if point[2]]
    if not points:
        return ""
    top = 14 + LINE * len(panels)
    xs = _Axis([x for _, _, x, _ in points], LEFT, WIDTH - RIGHT)
    ys = _Axis([y for _, _, _, y in points], HEIGHT - BOTTOM, top)
    parts = [*_frame(xs, ys, points[0][1])]
    for panel, one, x, y in points:
        parts.append(_error_bar(panel, xs(x), ys, y, _error_of(one)))
        parts.append(_dot(panel, one, xs(x), ys(y), hollow=one.beside is None))
    for panel, summaries in enumerate(panels):
        colour = COLOURS[panel % len(COLOURS)]
        place = f'x="{LEFT}" y="{LINE * (panel + 1)}"'
        parts.append(f'<text {place} fill="{colour}">{html.escape(title(summaries))}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _speed_of(one: Summary) -> float:
    return one.speed.tokens_per_second or 0.0


def _score_of(one: Summary) -> float:
    return one.score.mean * (100 if one.percent else 1)


def _error_of(one: Summary) -> float:
    error = one.score.error * (100 if one.percent else 1)
    return 0.0 if math.isnan(error) else error


class _Axis:
    """From numbers to places on the picture, with a little room at both ends."""

    def __init__(self, values: Sequence[float], start: float, end: float):
        low, high = min(values), max(values)
        room = (high - low) * 0.12 or max(abs(high) * 0.1, 1.0)
        self.low = max(0.0, low - room) if low >= 0 else low - room
        self.high = high + room
        self.start = start
        self.end = end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        step = 10 ** math.floor(math.log10((self.high - self.low) / 3))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 6)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


def _frame(xs: _Axis, ys: _Axis, one: Summary) -> list[str]:
    parts = []
    for tick in xs.ticks():
        x = xs(tick)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{ys.end}" y2="{ys.start}" stroke="#eee"/>')
        words = f'<text x="{x}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle" fill="#555">'
        parts.append(f"{words}{tick:g}</text>")
    for tick in ys.ticks():
        y = ys(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#eee"/>')
        words = f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end" fill="#555">'
        parts.append(f"{words}{tick:g}</text>")
    metric = html.escape(one.metric + (", %" if one.percent else ""))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">tokens/s</text>')
    half = (ys.start + ys.end) / 2
    turned = f'transform="translate(14 {half}) rotate(-90)" text-anchor="middle"'
    parts.append(f"<text {turned}>{metric}</text>")
    return parts


def _error_bar(panel: int, x: float, ys: _Axis, y: float, error: float) -> str:
    """One standard error up and down, as far as the picture reaches."""
    low, high = ys(max(ys.low, y - error)), ys(min(ys.high, y + error))
    colour = COLOURS[panel % len(COLOURS)]
    line = f'x1="{x}" x2="{x}" y1="{low}" y2="{high}" stroke="{colour}" stroke-opacity="0.4"'
    return f"<line {line}/>"


def _dot(panel: int, one: Summary, x: float, y: float, hollow: bool) -> str:
    colour = COLOURS[panel % len(COLOURS)]
    fill = "white" if hollow else colour
    name = html.escape(one.method)
    side = "end" if x > WIDTH * 0.75 else "start"
    shift = -7 if side == "end" else 7
    return (
        f'<circle cx="{x}" cy="{y}" r="4.5" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
        f'<text x="{x + shift}" y="{y - 6}" text-anchor="{side}" fill="#333">{name}</text>'
    )


# --- the page -----------------------------------------------------------------


def page(panels: Sequence[Sequence[Summary]]) -> str:
    """One HTML file with every table and a frontier for each kind of number."""
    parts = [f"<h1>Quality beside speed</h1><p><small>forerun evaluate, {date.today()}</small></p>"]
    for summaries in panels:
        parts.append(f"<h2>{html.escape(title(summaries))}</h2>")
        parts.append(frontier([summaries]))
        parts.append(_table(summaries))
        groups = group_rows(summaries)
        if groups:
            parts.append(_html_table(["tokens/forward", *(s.method for s in summaries)], groups))
        for method, words in measures(summaries):
            parts.append(f"<p><small><b>{html.escape(method)}</b> {html.escape(words)}</small></p>")
        parts.append(f"<p><small>{html.escape(caption(summaries))}</small></p>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Quality beside speed</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _table(summaries: Sequence[Summary]) -> str:
    rows = [cells(one) for one in summaries]
    used = columns_used(rows)
    heads = headers(summaries)
    return _html_table([heads[i] for i in used], [[row[i] for i in used] for row in rows])


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
