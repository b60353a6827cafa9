"""`forerun trace`: a trace as text, every token coloured by the reason it was committed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.common import print_json, printable
from forerun.cli.flags import Json
from forerun.errors import BadOption

COLOURS = {
    "sampled": "default",  # readable on a light terminal too
    "accepted": "green",
    "bonus": "bold cyan",
    "resampled": "yellow",
    "first": "bright_green",
    "edited": "bold magenta",
    "forced": "blue",
}
OTHER_COLOURS = (
    "bright_blue",
    "bright_red",
    "bright_black",
)  # for the reasons of methods from outside
REJECTED = "red strike"
PICTURE_WIDTH = 110

T = TypeVar("T")

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Commit:
    """A line of a trace: what one forward of one request committed for one reason."""

    forward: int
    reason: str
    texts: list[str]  # of its tokens
    rejected: list[str]
    request: int


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
    html: Annotated[
        str | None, typer.Option(help="Also write it as one HTML file that plays anywhere.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a trace: every token, coloured by the reason it was committed.

    Where there are no colours, the reasons are written out.
    """
    commits = read(file)
    if svg:
        draw(commits, svg)
    if html:
        write_replay(file, html)
    if as_json:
        print_json(summary(commits))
        return
    console = Console()
    for request in by_request(commits):
        show(request, console)


def draw(commits: Sequence[Commit], file: str) -> None:
    """The trace as a picture, which does not depend on the terminal."""
    recorder = Console(
        record=True,
        width=PICTURE_WIDTH,
        file=StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
    )
    for request in by_request(commits):
        show(request, recorder)
    recorder.save_svg(file, title="forerun trace")


def write_replay(file: str, html: str) -> None:
    """The trace as one page that loads nothing."""
    from forerun.page.assets import replay_html

    text = Path(file).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.split("\n") if line.strip()]
    Path(html).write_text(replay_html(lines, f"Forerun: {Path(file).name}"), encoding="utf-8")


def read(file: str) -> list[Commit]:
    path = Path(file)
    if not path.is_file():
        raise BadOption(
            f"trace file {file!r} does not exist; write one with: forerun generate PROMPT --trace "
            f"{file}"
        )
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadOption(f"trace file {file!r} is not UTF-8 text.") from None
    lines = enumerate(content.split("\n"), 1)
    read_lines = [_commit_of(file, number, line) for number, line in lines if line.strip()]
    commits = [commit for commit in read_lines if commit is not None]
    if not commits:
        raise BadOption(f"trace file {file!r} is empty.")
    return commits


def _commit_of(file: str, number: int, line: str) -> Commit | None:
    """The commit of a line; None for a line that says something else."""
    try:
        told = json.loads(line)
        return read_commit(told) if told.get("kind", "commit") == "commit" else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadOption(f"{file}:{number} is not a line of a trace.") from None


def read_commit(line: dict[str, Any]) -> Commit:
    """A commit from a line of a trace; ValueError or TypeError if it is none."""
    tokens = _list_of(int, line["tokens"])
    rejected = _list_of(int, line.get("rejected", []))
    [reason] = _list_of(str, [line["reason"]])
    forward, request = _list_of(int, [line["forward"], line.get("request", 0)])
    return Commit(
        forward,
        printable(reason),
        _texts(tokens, line.get("texts")),
        _texts(rejected, line.get("rejected_texts")),
        request,
    )


def _list_of(kind: type[T], values: Any) -> list[T]:
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise TypeError
    return values


def _texts(tokens: Sequence[int], texts: Any) -> list[str]:
    """What can be shown of some tokens: their texts, or their ids where a trace has no texts."""
    if not texts:
        return [str(token) for token in tokens]
    found = _list_of(str, texts)
    if len(found) != len(tokens):
        raise ValueError
    return [_visible(text) for text in found]


def by_request(commits: Sequence[Commit]) -> list[list[Commit]]:
    found: dict[int, list[Commit]] = {}
    for commit in commits:
        found.setdefault(commit.request, []).append(commit)
    return [found[request] for request in sorted(found)]


def summary(commits: Sequence[Commit]) -> Summary:
    reasons: Counter[str] = Counter()
    for commit in commits:
        reasons[commit.reason] += len(commit.texts)
    last_forwards = [max(commit.forward for commit in request) for request in by_request(commits)]
    rejected = sum(len(commit.rejected) for commit in commits if commit.reason != "edited")
    return {
        # an edit replaces a token
        "tokens": sum(reasons.values()) - reasons["edited"],
        "forwards": sum(last_forwards),
        "reasons": dict(reasons),
        "rejected": rejected,
    }


def show(commits: Sequence[Commit], console: Console) -> None:
    """One line per forward: what it committed, and what it rejected."""
    colours = colours_of(commit.reason for commit in commits)
    line = _line if has_colours(console) else _plain_line
    by_forward: dict[int, list[Commit]] = {}
    for commit in commits:
        by_forward.setdefault(commit.forward, []).append(commit)
    table = Table(box=None, padding=(0, 1), show_header=False)
    for forward, of_forward in sorted(by_forward.items()):
        tokens = sum(len(commit.texts) for commit in of_forward)
        table.add_row(
            Text(str(forward), "bright_black"),
            Text(str(tokens), "bright_black"),
            line(of_forward, colours),
        )
    console.print(table)
    console.print(_legend(summary(commits), colours))


def has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def colours_of(reasons: Iterable[str]) -> dict[str, str]:
    """A colour for every reason, those of methods from outside too."""
    colours = dict(COLOURS)
    for reason in dict.fromkeys(reasons):
        colours.setdefault(reason, OTHER_COLOURS[len(colours) % len(OTHER_COLOURS)])
    return colours


def _line(commits: Sequence[Commit], colours: dict[str, str]) -> Text:
    line = Text(overflow="fold")
    for commit in commits:
        for text in commit.texts:
            line.append(text, colours[commit.reason])
    rejected = [text for commit in commits for text in commit.rejected]
    if rejected:
        line.append("  ")
    for text in rejected:
        line.append(text, REJECTED)
    return line


def _plain_line(commits: Sequence[Commit], _: dict[str, str]) -> Text:
    """For a terminal without colours: accepted[·a·b]  rejected[·c]."""
    parts = [f"{commit.reason}[{''.join(commit.texts)}]" for commit in commits if commit.texts]
    rejected = "".join(text for commit in commits for text in commit.rejected)
    if rejected:
        parts.append(f"rejected[{rejected}]")
    return Text("  ".join(parts), overflow="fold")


def _legend(facts: Summary, colours: dict[str, str]) -> Text:
    legend = Text(f"{facts['tokens']} tokens in {facts['forwards']} forwards   ", "bold")
    for reason, count in facts["reasons"].items():
        legend.append(f"{reason} {count}  ", colours[reason])
    if facts["rejected"]:
        legend.append(f"rejected {facts['rejected']}", REJECTED)
    return legend


def _visible(text: str) -> str:
    """A token's text without characters that would move the cursor or drive the terminal."""
    return printable(text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·"))
