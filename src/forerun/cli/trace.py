"""`forerun trace`: a trace as text, every token coloured by the reason it was committed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.errors import BadOption

COLOURS = {
    "sampled": "white",
    "accepted": "green",
    "bonus": "bold cyan",
    "resampled": "yellow",
    "first": "bright_green",
    "edited": "bold magenta",
}
REJECTED = "red strike"
OTHERS = ("blue", "bright_red", "bright_black")


def read(file: str) -> list[dict[str, Any]]:
    path = Path(file)
    if not path.is_file():
        raise BadOption(f"trace file {file!r} does not exist; write one with: forerun generate PROMPT --trace {file}")
    events = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            if not isinstance(event["tokens"], list) or not isinstance(event["reason"] + str(int(event["forward"])), str):
                raise TypeError
            events.append(event)
        except (ValueError, KeyError, TypeError):
            raise BadOption(f"{file}:{number} is not a line of a trace.") from None
    if not events:
        raise BadOption(f"trace file {file!r} is empty.")
    return events


def run(file: str, svg: str | None, as_json: bool) -> None:
    events = read(file)
    # A picture has a width of its own; a terminal keeps its.
    console = Console(record=True, width=110, quiet=as_json) if svg else Console(quiet=as_json)
    for own in by_request(events):
        show(own, console)
    if svg:
        console.save_svg(svg, title="forerun trace")
    if as_json:
        typer.echo(json.dumps(summary(events)))


def by_request(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    requests = sorted({event.get("request", 0) for event in events})
    return [[event for event in events if event.get("request", 0) == request] for request in requests]


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    reasons: Counter[str] = Counter()
    for event in events:
        reasons[event["reason"]] += len(event["tokens"])
    forwards = sum(max(event["forward"] for event in own) for own in by_request(events))
    rejected = sum(len(event.get("rejected", ())) for event in events if event["reason"] != "edited")
    return {
        "tokens": sum(reasons.values()) - reasons["edited"],  # an edit puts a token in another's place
        "forwards": forwards,
        "reasons": dict(reasons),
        "rejected": rejected,
    }


def show(events: list[dict[str, Any]], console: Console) -> None:
    """One line per forward: what it committed, and what it refused."""
    colours = dict(COLOURS)
    for reason in dict.fromkeys(event["reason"] for event in events):
        colours.setdefault(reason, OTHERS[len(colours) % len(OTHERS)])
    table = Table(box=None, padding=(0, 1), show_header=False)
    for forward in sorted({event["forward"] for event in events}):
        line = Text(overflow="fold")
        own = [event for event in events if event["forward"] == forward]
        for event in own:
            for text in event.get("texts") or [str(token) for token in event["tokens"]]:
                line.append(_visible(text), colours[event["reason"]])
        refused = [text for event in own for text in event.get("rejected_texts") or map(str, event.get("rejected", ()))]
        line.append("  " if refused else "")
        for text in refused:
            line.append(_visible(text), REJECTED)
        table.add_row(Text(str(forward), "bright_black"), Text(str(sum(len(e["tokens"]) for e in own)), "bright_black"), line)
    console.print(table)
    facts = summary(events)
    legend = Text(f"{facts['tokens']} tokens in {facts['forwards']} forwards   ", "bold")
    for reason, count in facts["reasons"].items():
        legend.append(f"{reason} {count}  ", colours[reason])
    legend.append(f"rejected {facts['rejected']}" if facts["rejected"] else "", REJECTED)
    console.print(legend)


def _visible(text: str) -> str:
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
