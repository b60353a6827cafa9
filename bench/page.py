"""The part of a docs page that a benchmark writes, between two marks."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def write_tables(name: str, tables: str) -> None:
    page = DOCS / name
    before, rest = page.read_text().split("<!-- table -->", 1)
    page.write_text(f"{before}<!-- table -->\n\n{tables}\n\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}")
