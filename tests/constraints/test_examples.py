"""The grammar of the example lets through what parses, and nothing else."""

import importlib.util

import pytest

from forerun.constraints.engines import compiled
from forerun.options import Sampling
from tests.helpers import ROOT, model

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/python_grammar.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def grammar(example):
    spec = Sampling(grammar=example.python_grammar()).constraint
    return compiled(spec, model().vocabulary)


def accepts(grammar, text):
    language = grammar.language()
    state = language.start()
    for token in model().tokenizer(text, add_special_tokens=False).input_ids:
        state = language.advance(state, token)
        if state is None:
            return False
    return language.accepts(state)


GOOD = [
    "    return a\n",
    "    for x in range(3):\n        total += x ** 2\n    return total\n",
    "    if not a and b.c[1] != -3:\n        return None\n    else:\n        f(a, b=1)\n",
    "    with open(path) as f:\n        lines = [x.strip() for x in f if x]\n    return lines\n",
    "    iffy = {'a': 1.5} if orange else [is_a, None]\n",
]
BAD = [
    "    return a",  # the line does not end
    "return a\n",
    "    f() = 1\n",
    "    return if\n",
    "    None = 1\n",
    "    for x in y:\n    pass\n",
    "    f(a=1, b)\n",
    "    a == not b\n",
    "    1.real()\n",
]


@pytest.mark.parametrize("text", GOOD)
def test_python_is_in_the_grammar(example, grammar, text):
    assert example.parses(f"def f():\n{text}") and accepts(grammar, text)


@pytest.mark.parametrize("text", BAD)
def test_what_is_not_python_is_not_in_the_grammar(grammar, text):
    assert not accepts(grammar, text)


def test_a_model_of_bytes_writes_code_that_parses(example):
    results = model().generate(
        [[5], [6], [7]],
        grammar=example.python_grammar(depth=2, lines=2),
        temperature=1.0,
        max_tokens=150,
    )
    ended = [result for result in results if result.finish_reason in ("stop", "length")]
    assert all(example.parses(f"def f():\n{result.text}") for result in ended)
