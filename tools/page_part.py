"""A part of a page that a tool writes, between two marks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(page: Path, part: str, tool: str, table: Callable[[], str]) -> None:
    """The command line of such a tool: write the part; with --check, fail if it is stale."""
    parser = argparse.ArgumentParser(description=f"Write the table of {part} in {page.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is stale")
    arguments = parser.parse_args()
    start = f"<!-- {part}: {tool} writes this part -->"
    end = f"<!-- end of {part} -->"
    text = page.read_text()
    before, rest = text.split(start)
    after = rest.split(end)[1]
    wanted = f"{before}{start}\n\n{table()}\n\n{end}{after}"
    if not arguments.check:
        page.write_text(wanted)
    elif text != wanted:
        sys.exit(f"{page.name}: the table of {part} is stale. Run: python {tool}")
