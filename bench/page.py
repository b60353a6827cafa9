"""The part of a docs page that a benchmark writes, between two marks."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
START = "<!-- table -->"
END = "<!-- end -->"


def write_tables(name: str, tables: str) -> None:
    """Replace the tables of docs/NAME."""
    write_part(DOCS / name, tables, START, END)


def write_part(page: Path, part: str, start: str, end: str) -> None:
    """Replace what stands between two marks of a page."""
    before, rest = page.read_text().split(start, 1)
    after = rest.split(end, 1)[1]
    page.write_text(f"{before}{start}\n\n{part}\n\n{end}{after}")
