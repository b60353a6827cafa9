"""What the pages show runs: the Python of the README, of the first page and of those on use.
Their commands are understood."""

import re
import shlex
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from typer.main import get_command

from forerun.catalogue import method_row
from forerun.cli import COMMANDS, module_of
from forerun.requests.request import parse_request
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


def papers_list():
    spec = spec_from_file_location("papers_list", ROOT / "bench" / "papers_list.py")
    module = module_from_spec(spec)
    sys.modules["papers_list"] = module
    spec.loader.exec_module(module)
    return module.TABLES


NUMBERS = {
    "ASSD-table": [1, 2, *range(5, 10)],
    "ASSD-figure": range(3, 7),
    "SpecDiff-table": range(1, 7),
    "SpecDiff-figure": range(2, 5),
    "SSD-table": range(1, 4),
    "pcLLM-table": range(1, 7),
    "pcLLM-figure": [4, 6],
    "S2D2-table": range(1, 12),
    "S2D2-figure": [2, 3],
}


def test_every_table_of_the_papers_is_listed_and_has_its_row():
    tables = papers_list()
    page = (ROOT / "docs" / "papers.md").read_text()
    for name in (f"{kind}-{n}" for kind, numbers in NUMBERS.items() for n in numbers):
        assert name in tables and f"| {name} |" in page
    for table in tables.values():
        assert table.runner or table.command, "what cannot run here says how it would"
        assert table.theirs


def test_the_options_of_every_row_of_the_papers_are_understood():
    not_the_methods = {"blank", "length"}
    for table in papers_list().values():
        for row in table.specs:
            options = {k: v for k, v in row.options.items() if k not in not_the_methods}
            parse_request(row.method, options.pop("draft", None), options)
