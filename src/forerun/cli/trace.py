"""`forerun trace`: a trace as text, every token coloured by the reason it was committed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.common import print_json
from forerun.cli.flags import Json
from forerun.errors import BadOption

COLOURS = {
    "sampled": "white",
    "accepted": "green",
    "bonus": "bold cyan",
    "resampled": "yellow",
    "first": "bright_green",
    "edited": "bold magenta",
}
OTHER_COLOURS = ("blue", "bright_red", "bright_black")  # for the reasons of methods from outside
REJECTED = "red strike"
PICTURE_WIDTH = 110

app = typer.Typer(add_completion=False)


class Commit(TypedDict):
    """A line of a trace: what one forward of one request committed for one reason."""

    forward: int
    reason: str
    tokens: list[int]
    texts: NotRequired[list[str]]
    rejected: NotRequired[list[int]]
    rejected_texts: NotRequired[list[str]]
    request: NotRequired[int]


class Summary(TypedDict):
    tokens: int
    forwards: int
    reasons: dict[str, int]
    rejected: int


@app.command()
def trace(
    file: Annotated[
        str, typer.Argument(help="A trace that `forerun generate --trace FILE` wrote.")
    ],
    svg: Annotated[str | None, typer.Option(help="Also draw it into this SVG file.")] = None,
    as_json: Json = False,
) -> None:
    """Show a trace: every token, coloured by the reason it was committed."""
    commits = read(file)
    console = Console(quiet=as_json)
    if svg:
        # a picture does not depend on the terminal's width
        console = Console(record=True, width=PICTURE_WIDTH, quiet=as_json)
    for request in by_request(commits):
        show(request, console)
    if svg:
        console.save_svg(svg, title="forerun trace")
    if as_json:
        print_json(summary(commits))


def read(file: str) -> list[Commit]:
    path = Path(file)
    if not path.is_file():
        raise BadOption(
            f"trace file {file!r} does not exist; write one with: forerun generate PROMPT --trace "
            f"{file}"
        )
    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    commits = [_commit_of(file, number, line) for number, line in lines if line.strip()]
    if not commits:
        raise BadOption(f"trace file {file!r} is empty.")
    return commits


def _commit_of(file: str, number: int, line: str) -> Commit:
    try:
        commit: Commit = json.loads(line)
        int(commit["forward"])
        if not isinstance(commit["tokens"], list) or not isinstance(commit["reason"], str):
            raise TypeError
        return commit
    except (ValueError, KeyError, TypeError):
        raise BadOption(f"{file}:{number} is not a line of a trace.") from None


def by_request(commits: Sequence[Commit]) -> list[list[Commit]]:
    requests = sorted({commit.get("request", 0) for commit in commits})
    return [
        [commit for commit in commits if commit.get("request", 0) == request]
        for request in requests
    ]


def summary(commits: Sequence[Commit]) -> Summary:
    reasons: Counter[str] = Counter()
    for commit in commits:
        reasons[commit["reason"]] += len(commit["tokens"])
    last_forwards = [
        max(commit["forward"] for commit in request) for request in by_request(commits)
    ]
    rejected = sum(
        len(commit.get("rejected", ())) for commit in commits if commit["reason"] != "edited"
    )
    return {
        # an edit replaces a token
        "tokens": sum(reasons.values()) - reasons["edited"],
        "forwards": sum(last_forwards),
        "reasons": dict(reasons),
        "rejected": rejected,
    }


def show(commits: Sequence[Commit], console: Console) -> None:
    """One line per forward: what it committed, and what it rejected."""
    colours = dict(COLOURS)
    for reason in dict.fromkeys(commit["reason"] for commit in commits):
        colours.setdefault(reason, OTHER_COLOURS[len(colours) % len(OTHER_COLOURS)])
    table = Table(box=None, padding=(0, 1), show_header=False)
    for forward in sorted({commit["forward"] for commit in commits}):
        of_forward = [commit for commit in commits if commit["forward"] == forward]
        tokens = sum(len(commit["tokens"]) for commit in of_forward)
        table.add_row(
            Text(str(forward), "bright_black"),
            Text(str(tokens), "bright_black"),
            _line(of_forward, colours),
        )
    console.print(table)
    console.print(_legend(summary(commits), colours))


def _line(commits: Sequence[Commit], colours: dict[str, str]) -> Text:
    line = Text(overflow="fold")
    rejected: list[str] = []
    for commit in commits:
        for text in commit.get("texts") or map(str, commit["tokens"]):
            line.append(_visible(text), colours[commit["reason"]])
        rejected += commit.get("rejected_texts") or map(str, commit.get("rejected", ()))
    if rejected:
        line.append("  ")
    for text in rejected:
        line.append(_visible(text), REJECTED)
    return line


def _legend(facts: Summary, colours: dict[str, str]) -> Text:
    legend = Text(f"{facts['tokens']} tokens in {facts['forwards']} forwards   ", "bold")
    for reason, count in facts["reasons"].items():
        legend.append(f"{reason} {count}  ", colours[reason])
    if facts["rejected"]:
        legend.append(f"rejected {facts['rejected']}", REJECTED)
    return legend


def _visible(text: str) -> str:
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
