"""The command reference, docs/commands.md, from the program's own help.

`python tools/commands.py` fails if the page and the program disagree; `--write` writes the page.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

WIDTH = "100"
# Typer and click read these when they are imported: no colour, and the same width on every machine.
os.environ |= {"COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "_TYPER_FORCE_DISABLE_TERMINAL": "1"}

from typer.core import TyperGroup  # noqa: E402
from typer.main import get_command  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from forerun.cli import COMMANDS, app, module_of  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
INTRODUCTION = """# Commands

What `forerun COMMAND --help` prints. `python tools/commands.py --write` writes this page.
"""


def every_command() -> Iterator[list[str]]:
    """The words of every command: none for `forerun` itself, then each command and sub-command."""
    yield []
    for name in COMMANDS:
        yield [name]
        command = get_command(import_module(module_of(name)).app)
        if isinstance(command, TyperGroup):
            for child in command.commands:
                yield [name, child]


def help_of(words: list[str]) -> str:
    result = CliRunner().invoke(app, [*words, "--help"])
    if result.exit_code != 0:
        raise SystemExit(f"forerun {' '.join(words)} --help failed:\n{result.output}")
    lines = [line.rstrip() for line in result.output.splitlines()]
    return "\n".join(lines).strip("\n")


def page() -> str:
    sections = [INTRODUCTION]
    for words in every_command():
        title = " ".join(["forerun", *words])
        sections.append(f"## `{title}`\n\n```text\n{help_of(words)}\n```\n")
    return "\n".join(sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/commands.md is out of date: python tools/commands.py --write")


if __name__ == "__main__":
    main()
