"""The table of commands says what the commands say, and importing it costs nothing."""

import inspect
import json
import os
import subprocess
import sys
from dataclasses import fields
from importlib import import_module

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from forerun.cli import COMMANDS, app
from forerun.cli.decoding import DecodeFlags, takes_decode_call
from forerun.errors import BadOption
from forerun.options import Sampling
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
    return get_command(import_module(f"forerun.cli.{name}").app)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_first_line_of_the_commands_own_help(name):
    first_paragraph, *_ = command_named(name).help.split("\n\n")
    assert COMMANDS[name] == first_paragraph


def test_the_list_of_commands_imports_none_of_them():
    imported = imported_by(["--help"])
    assert not imported & {f"forerun.cli.{name}" for name in COMMANDS}
    assert not imported & set(HEAVY)


def test_the_help_of_a_command_imports_it_alone_and_nothing_heavy():
    imported = imported_by(["tune", "--help"])
    assert imported & {f"forerun.cli.{name}" for name in COMMANDS} == {"forerun.cli.tune"}
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


@pytest.mark.parametrize("name", ["generate", "infill"])
def test_every_sampling_parameter_is_a_flag(name):
    flags = {parameter.name for parameter in command_named(name).params}
    assert flags == {field.name for kind in (DecodeFlags, Sampling) for field in fields(kind)}


def test_words_are_sorted_into_texts_flags_sampling_and_options_of_the_method():
    calls = []
    command = takes_decode_call(calls.append)
    context = type("Context", (), {"args": ["--k", "8", "--adapt=false"]})
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
    command = takes_decode_call(calls.append)
    parameters = inspect.signature(command).parameters.values()
    values = {p.name: p.default for p in parameters if p.default is not p.empty}
    context = type("Context", (), {"args": ["--k", "8"]})
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
