"""A package outside the repository brings a method and a whole family: those of docs/extending.md,
installed with pip and used by name."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from forerun import registry
from forerun.errors import BadOption
from tests import helpers
from tests.helpers import ROOT, network

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)


def block(kind, words):
    """The block of the page that has these words in it."""
    return next(text for found, text in BLOCKS if found == kind and words in text)


def install(folder, target, module, code, entry_points):
    """A package of one module."""
    (folder / f"{module}.py").write_text(code)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "forerun-{module}"\nversion = "0"\n{entry_points}\n'
        f'[tool.hatch.build.targets.wheel]\ninclude = ["{module}.py"]\n'
    )
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target, folder]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """The environment of a process in which both documented packages are installed."""
    target = tmp_path_factory.mktemp("site")
    for module in ("echo", "bigram"):
        code = block("python", f'@method("{"echo" if module == "echo" else "ask-everywhere"}"')
        entry_points = block("toml", f'"{module}:')
        install(tmp_path_factory.mktemp(module), target, module, code, entry_points)
    path = os.pathsep.join([str(target), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": path}


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
plain = m.generate(prompts, max_tokens=12)
tokens = [[r.token_ids for r in results] for results in (echo, plain)]
try:
    m.generate([1], method="ask-everywhere")
except forerun.ForerunError as error:
    refusal = str(error)
print(json.dumps([*tokens, echo[0].guarantee, refusal]))
"""
    echo, ar, guarantee, refusal = json.loads(run(outside, code))
    assert echo == ar and guarantee == "exact"
    # A model that lacks an outside family's capability says so in that family's words.
    assert "needs a model that says what follows every token" in refusal


def test_an_outside_method_is_listed_with_its_options(outside):
    code = """
import sys
sys.argv = ["forerun", "methods", "echo", "--json"]
from forerun.cli import main
main()
"""
    [row] = json.loads(run(outside, code))
    assert row["options"]["k"]["default"] == 4


def test_the_documented_proof_holds(outside):
    run(outside, block("python", "certify_case"))


def test_an_outside_family_brings_a_question_of_its_own_and_all_methods_run_on_it(outside):
    run(outside, block("python", "from bigram import"))


def test_an_unknown_name_says_what_is_known_including_what_is_installed(outside):
    code = """
from forerun import registry
try:
    registry.get("methods", "ecko")
except ValueError as error:
    print(error)
"""
    assert "'echo'" in run(outside, code)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    broken = EntryPoint("lost", "no_such_module:thing", "forerun.routers")
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [broken] if group == "forerun.routers" else []
    )
    with pytest.raises(BadOption, match=r"router='lost'.*no_such_module:thing.*No module"):
        registry.get("routers", "lost")


def test_a_package_that_cannot_be_imported_harms_only_those_who_ask_for_it(monkeypatch):
    broken = EntryPoint("lost", "no_such_module:thing", "forerun.families")
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    with pytest.warns(UserWarning, match="family='lost'"):
        assert "lost" not in registry.usable("families")
    with pytest.warns(UserWarning, match="no_such_module"):
        assert registry.family_for(tiny_config()).name == "causal"


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit(3)",
        "raise KeyboardInterrupt",
        "class Odd(BaseException): pass\nraise Odd('odd')",
        "1 / 0",
        "def f(:",
        "thing = 'no method'",
        "from forerun.registry import Method\n"
        "async def run(seq, target: 'NoSuchName', options): pass\n"
        "thing = Method('lost', run, 'exact', 'ar')",
        "from forerun.registry import Method\n"
        "class Options: pass\n"
        "async def run(seq, target, options: Options): pass\n"
        "thing = Method('lost', run, 'exact', 'ar')",
    ],
)
def test_whatever_a_package_raises_is_named_and_harms_nobody_else(body, tmp_path, monkeypatch):
    (tmp_path / "harmful_plugin.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "harmful_plugin", raising=False)
    harmful = EntryPoint("lost", "harmful_plugin:thing", "forerun.methods")
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [harmful] if group == "forerun.methods" else []
    )
    with pytest.warns(UserWarning, match=r"method='lost'.*harmful_plugin:thing"):
        listed = helpers.run("methods")
    assert listed.exit_code == 0 and "speculative" in listed.stdout
    with pytest.raises(BadOption, match="method='lost'"):
        registry.get("methods", "lost")


def test_a_method_whose_drafter_cannot_be_used_is_left_out_of_the_list(monkeypatch):
    async def decode(seq, target, options): ...

    odd = registry.Method("odd", decode, "exact", "ar", drafter="no-such-drafter")
    everything = registry.usable("methods")
    monkeypatch.setattr(registry, "usable", lambda kind: {"odd": odd, **everything})
    named = registry.method_named
    monkeypatch.setattr(
        registry, "method_named", lambda name: odd if name == "odd" else named(name)
    )
    with pytest.warns(UserWarning, match="method='odd' was left out"):
        listed = helpers.run("methods", "--json")
    assert "speculative" in listed.stdout and "odd" not in listed.stdout


def test_a_family_that_cannot_read_a_config_is_left_out(monkeypatch):
    class Broken:
        @staticmethod
        def of(config):
            raise AttributeError("no such field")

    everything = registry.usable("families")
    monkeypatch.setattr(registry, "usable", lambda kind: {"broken": Broken, **everything})
    with pytest.warns(UserWarning, match="family='broken' was left out"):
        assert registry.family_for(tiny_config()).name == "causal"


def tiny_config():
    return network("llama").config


def test_every_method_says_what_it_does_in_words_of_its_own():
    """Some share the speculative loop, and so its docstring."""
    said = [registry.method_named(name).summary for name in registry.names("methods")]
    assert all(said) and len(set(said)) == len(said)
