"""What the pages show runs: the Python of the README, of the first page and of those on use.
Their commands are understood."""

import re
import shlex
from importlib import import_module

import pytest
from typer.main import get_command

from forerun.catalogue import method_row
from forerun.cli import COMMANDS, module_of
from tests.helpers import ROOT

PAGES = ["README.md", "docs/start.md", "docs/serving.md", "docs/structured.md"]
NEEDS_MORE = ("smollm", "tensor_parallel")  # weights or processes that are not here


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    names = {}
    for block in blocks:
        if not any(word in block for word in NEEDS_MORE):
            exec(compile(block, page, "exec"), names)


def commands_of_the_pages():
    """(page, words) of every `forerun` command that stands on a line of its own."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for line in re.findall(r"^forerun .*", page.read_text(), re.M):
            # $'...' is a quotation of the shell's, which shlex reads as '...'
            words = shlex.split(line.replace("$'", "'"), comments=True)
            for command in " ".join(map(shlex.quote, words)).split(" '&&' "):
                yield page.name, command


@pytest.mark.parametrize("page, command", [*commands_of_the_pages()])
def test_a_command_of_a_page_is_understood(page, command):
    _, name, *words = shlex.split(command)
    if name not in COMMANDS:
        assert [name] == ["--help"]
        return
    found = get_command(import_module(module_of(name)).app)
    if hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    context = found.make_context(name, words)
    unread = [*(context.params.get("prompt") or []), *context.args]
    flags = [word.partition("=")[0] for word in unread if word.startswith("--")]
    if flags and name != "lm-eval":  # whose flags are another program's
        known = method_row(context.params["method"]).options
        assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= known.keys()


def test_no_page_links_to_a_page_that_only_the_site_has():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target
    ]
    missing = [(page.name, target) for page, target in links if not (page.parent / target).exists()]
    assert links and not missing
