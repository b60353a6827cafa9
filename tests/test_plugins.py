"""A package outside the repository brings a method: the one of docs/extending.md, installed with pip and used by name."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from forerun import registry
from forerun.errors import BadOption

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """The documented method as an installed package, in a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    method, entry = BLOCKS[0][1], next(text for kind, text in BLOCKS if kind == "toml")
    (source / "echo.py").write_text(method)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "forerun-echo"\nversion = "0"\n' + entry + '\n[tool.hatch.build.targets.wheel]\ninclude = ["echo.py"]\n'
    )
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(source),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**os.environ, "PYTHONPATH": str(target)}


def run(outside, code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=outside)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_outside_method_runs_by_name_and_equals_its_reference(outside):
    code = """
import forerun, json
m = forerun.load("tiny", max_context=64)
prompts = [[5, 5, 5], [1, 2]]
echo = m.generate(prompts, method="echo", k=3, max_tokens=12)
print(json.dumps([[r.token_ids for r in echo], [r.token_ids for r in m.generate(prompts, max_tokens=12)], echo[0].guarantee]))
"""
    echo, ar, guarantee = json.loads(run(outside, code))
    assert echo == ar and guarantee == "exact"


def test_an_outside_method_is_listed_with_its_options(outside):
    code = "import sys; sys.argv = ['forerun', 'methods', 'echo', '--json']; from forerun.cli import main; main()"
    [row] = json.loads(run(outside, code))
    assert row["options"]["k"]["default"] == 4


def test_the_documented_proof_holds(outside):
    proof = next(text for kind, text in BLOCKS if kind == "python" and "certify_case" in text)
    run(outside, proof)


def test_an_unknown_name_says_what_is_known_including_what_is_installed(outside):
    code = "from forerun import registry\ntry:\n    registry.get('methods', 'ecko')\nexcept ValueError as e: print(e)"
    assert "'echo'" in run(outside, code)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    broken = EntryPoint("lost", "no_such_module:thing", "forerun.routers")
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken] if group == "forerun.routers" else [])
    with pytest.raises(BadOption, match=r"router='lost'.*no_such_module:thing.*No module"):
        registry.get("routers", "lost")
