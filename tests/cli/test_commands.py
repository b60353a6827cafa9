"""The table of commands says what the commands say, and importing it costs nothing."""

import inspect
import json
import os
import subprocess
import sys
from dataclasses import fields
from importlib import import_module

import pytest
from rich.console import Console
from rich.table import Table
from typer.main import get_command
from typer.testing import CliRunner

from forerun.cli import COMMANDS, app, common, main, module_of
from forerun.cli.chat import ChatFlags
from forerun.cli.common import print_table, progress_bar
from forerun.cli.decoding import BatchFlags, split_at_dashes, takes_decode_call
from forerun.cli.generate import GenerateFlags
from forerun.errors import BadOption
from forerun.options import Sampling
from forerun.requests.infill import MEANINGLESS
from tests.helpers import ROOT

HEAVY = ("torch", "transformers", "numpy")

# Runs the command lines of its arguments, each a JSON list, and prints what is imported then.
SCRIPT = """
import json, sys
from typer.testing import CliRunner
from forerun.cli import app
for words in map(json.loads, sys.argv[1:]):
    assert CliRunner().invoke(app, words).exit_code == 0, words
print(json.dumps(sorted(sys.modules)))
"""


def imported_by(*calls: list[str]) -> set[str]:
    words = [sys.executable, "-c", SCRIPT, *map(json.dumps, calls)]
    return set(json.loads(subprocess.run(words, capture_output=True, check=True).stdout))


def command_named(name: str):
    return get_command(import_module(module_of(name)).app)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_first_line_of_the_commands_own_help(name):
    first_paragraph, *_ = command_named(name).help.split("\n\n")
    assert COMMANDS[name] == first_paragraph


def test_the_list_of_commands_imports_none_of_them():
    imported = imported_by(["--help"])
    assert not imported & {module_of(name) for name in COMMANDS}
    assert not imported & set(HEAVY)


def test_the_help_of_a_command_imports_it_alone_and_nothing_heavy():
    imported = imported_by(["tune", "--help"])
    assert imported & {module_of(name) for name in COMMANDS} == {"forerun.cli.tune"}
    assert not imported & set(HEAVY)


def test_the_help_of_no_command_waits_for_torch():
    groups = [["bench", "forward"], ["trajectories", "collect"], ["zoo", "train"]]
    calls = [[*words, "--help"] for words in [*([name] for name in COMMANDS), *groups]]
    assert not imported_by(*calls) & set(HEAVY)


def test_a_command_that_does_not_exist_is_refused_with_the_nearest_one():
    result = CliRunner().invoke(app, ["genrate"])
    assert result.exit_code == 2 and "generate" in result.output


@pytest.mark.parametrize("group", ["bench", "trajectories", "zoo"])
def test_a_group_without_a_command_shows_its_help(group):
    result = CliRunner().invoke(app, [group])
    assert COMMANDS[group] in " ".join(result.output.split())
    assert set(command_named(group).commands) <= set(result.output.split())


@pytest.mark.parametrize(
    "name, kind, without, own",
    [
        ("generate", GenerateFlags, (), ()),
        ("chat", ChatFlags, (), ()),
        ("infill", BatchFlags, (*MEANINGLESS, "grammar_engine"), ("hole",)),
    ],
)
def test_every_sampling_parameter_that_means_something_is_a_flag(name, kind, without, own):
    flags = {parameter.name for parameter in command_named(name).params}
    named = {field.name for each in (kind, Sampling) for field in fields(each)}
    assert flags == (named - {*without}) | {*own}


def test_words_are_sorted_into_texts_flags_sampling_and_options_of_the_method():
    calls = []
    command = takes_decode_call(BatchFlags)(calls.append)
    context = type("Context", (), {"args": ["--k", "8", "--adapt=false"], "meta": {}})
    parameters = inspect.signature(command).parameters.values()
    values = {p.name: p.default for p in parameters if p.default is not p.empty}
    given = {"prompt": ["a", "b"], "top_k": 5, "logit_bias": ["3=-1.5"], "stop": []}
    command(context, **values | given)
    [call] = calls
    assert call.texts == ["a", "b"]
    assert call.method_options == {"k": 8, "adapt": False}
    assert call.sampling["top_k"] == 5 and call.sampling["logit_bias"] == {3: -1.5}
    assert not {"stop", "max_tokens"} & call.sampling.keys()
    assert call.options == {**call.sampling, "k": 8, "adapt": False}


def test_a_tuned_file_gives_method_and_options_and_flags_win(tmp_path):
    file = tmp_path / "tuned.json"
    options = {"draft": "zoo:masked", "k": 4, "steps": 2}
    file.write_text(json.dumps({"method": "specdiff", "options": options}))
    calls = []
    command = takes_decode_call(BatchFlags)(calls.append)
    parameters = inspect.signature(command).parameters.values()
    values = {p.name: p.default for p in parameters if p.default is not p.empty}
    context = type("Context", (), {"args": ["--k", "8"], "meta": {}})
    command(context, **values | {"prompt": ["a"], "tuned": str(file)})
    assert calls[0].flags.method == "specdiff" and calls[0].flags.draft == "zoo:masked"
    assert calls[0].method_options == {"k": 8, "steps": 2}
    command(context, **values | {"prompt": ["a"], "tuned": str(file), "draft": "zoo:block"})
    assert calls[1].flags.draft == "zoo:block"
    with pytest.raises(BadOption, match="is for method='specdiff', not 'ar'"):
        command(context, **values | {"tuned": str(file), "method": "ar"})


def test_the_command_reference_is_what_the_program_prints():
    words = [sys.executable, str(ROOT / "tools" / "commands.py")]
    # a coloured or narrow terminal makes no difference
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "60", "TERMINAL_WIDTH": "60"}
    checked = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), ["zoo", "train"]])
def test_h_is_help_everywhere(words):
    short, long = (CliRunner().invoke(app, [*words, flag]) for flag in ("-h", "--help"))
    assert short.exit_code == 0 and short.output == long.output and "Usage" in short.output


def test_the_version_is_told():
    from forerun import __version__

    assert CliRunner().invoke(app, ["--version"]).output == f"forerun {__version__}\n"


def test_a_shell_completes_commands_their_flags_and_methods():
    def completed(line: str) -> str:
        environment = {
            "_FORERUN_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
        return CliRunner().invoke(app, [], env=environment, prog_name="forerun").output

    assert "generate" in completed("forerun gen")
    assert "--max-tokens" in completed("forerun generate --max-t")
    assert "speculative" in completed("forerun generate --method spec")


class TestWordsThatBeginWithADash:
    OPTIONS = {
        name: type("Option", (), {"is_flag": is_flag})
        for name, is_flag in {"--json": True, "-q": True, "-m": False, "--stop": False}.items()
    }

    def split(self, *words):
        return split_at_dashes(words, self.OPTIONS, "generate")

    def test_what_stands_behind_two_dashes_is_taken_as_it_is(self):
        assert self.split("a", "-m", "tiny", "--", "-5", "--json") == (
            ["a", "-m", "tiny"],
            ["-5", "--json"],
        )

    def test_values_of_flags_may_begin_with_a_dash(self):
        for words in (
            ["--stop", "--", "a"],
            ["--stop", "-x", "a"],
            ["--k", "-1"],
            ["-q", "--k=-1", "--adapt", "--json", "-"],
        ):
            assert self.split(*words) == (words, [])

    @pytest.mark.parametrize("words", [["-5"], ["--json", "-5"], ["-q", "-x y"], ["-mtiny"]])
    def test_any_other_is_refused_with_a_way_out(self, words):
        with pytest.raises(BadOption, match="behind --"):
            self.split(*words)


def widths_of(text: str) -> set[int]:
    return {len(line.rstrip()) for line in text.splitlines()}


@pytest.mark.parametrize("command, column", [("methods", "method"), ("models", "model")])
def test_a_list_fits_into_80_columns_and_cuts_no_name(command, column):
    rows = json.loads(CliRunner().invoke(app, [command, "--json"]).output)
    shown = CliRunner().invoke(app, [command], env={"COLUMNS": "80"}).output
    assert "…" not in shown and max(widths_of(shown)) <= 80
    words = set(shown.split())
    assert all(word in words for row in rows for word in row[column].split())


def test_a_table_that_does_not_fit_is_wider_than_the_terminal_and_cuts_nothing(capsys):
    table = Table("name-of-a-column-that-is-long", "another-name-that-is-long", "words", box=None)
    table.add_row("x" * 30, "y" * 30, "a few words that may be broken anywhere")
    print_table(table, Console(width=66))
    shown = capsys.readouterr().out
    assert {"x" * 30, "y" * 30, "another-name-that-is-long", "anywhere"} <= set(shown.split())


@pytest.mark.parametrize("package, extra", [("scipy", "evaluate"), ("matplotlib", "train")])
def test_a_package_that_is_missing_is_told_with_its_extra(package, extra, monkeypatch):
    monkeypatch.setattr("forerun.cli.common.find_spec", lambda name: None)
    words = {
        "scipy": ["evaluate", "scattered"],
        "matplotlib": ["tune", "jacobi", "--plot", "x.png"],
    }
    said = CliRunner().invoke(app, words[package]).exception
    assert f"{package}: pip install 'forerun[{extra}]'" in str(said)


def test_a_package_that_an_import_misses_is_told_too(monkeypatch, capsys):
    def imports_yaml(**_):
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr("forerun.cli.app", imports_yaml)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "pip install 'forerun[train]'" in capsys.readouterr().err


def test_a_wheel_is_built_without_triton():
    import tomllib

    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert [word.split(">")[0] for word in build["requires"]] == ["hatchling"]


@pytest.mark.parametrize("quiet,expected", [(False, "taking turns 3 of 9\n"), (True, "")])
def test_what_takes_long_says_so_where_no_bar_can_be_drawn(quiet, expected, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(common, "stderr_console", Console(stderr=True, quiet=quiet))
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    with progress_bar("taking turns") as progress:
        for done, now[0] in enumerate((1, 5, 11, 12, 20), 1):
            progress(done, 9)
    assert capsys.readouterr().err == expected
