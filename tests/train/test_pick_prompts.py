"""tools/pick_prompts.py: prompts from a corpus of Python, away from benchmarks."""

import json
import lzma
import runpy
import sys

from tests.helpers import ROOT

FILE = '''"""A module."""
\x0c
def add_all(numbers, start):
    """Return the sum of all numbers in the list, beginning with start."""
    for number in numbers:
        start += number
    return start


def _hidden(numbers):
    """Return nothing that anybody outside of this file should see or use."""
    found = numbers
    return found


def solve(puzzle):
    """Find the one way through the maze that is shorter than all of the others."""
    way = puzzle
    return way
'''


def test_functions_are_asked_for_but_nothing_that_is_avoided(tmp_path, monkeypatch, capsys):
    corpus = tmp_path / "code.jsonl.xz"
    with lzma.open(corpus, "wt") as lines:
        lines.write(json.dumps({"text": FILE}) + "\n" + json.dumps({"text": "def broken(:"}) + "\n")
    questions = tmp_path / "train.jsonl"
    asked = [
        "How many apples are left if I eat two of five?",
        "The same eight words in a row as there.",
    ]
    questions.write_text("".join(json.dumps({"question": text}) + "\n" for text in asked))
    avoided = tmp_path / "avoid.jsonl"
    turns = ["Find the one way through the maze that is longest.", asked[1]]
    avoided.write_text(json.dumps({"turns": turns, "entry_point": "nobody"}) + "\n")

    def picked(*more):
        out = tmp_path / "prompts.jsonl"
        given = ["--corpus", corpus, "--questions", questions, "--out", out, "--ways", 9, *more]
        monkeypatch.setattr(sys, "argv", ["pick_prompts.py", *map(str, given)])
        runpy.run_path(str(ROOT / "tools" / "pick_prompts.py"), run_name="__main__")
        assert "prompts" in capsys.readouterr().out
        return out.read_text()

    everything = picked()
    assert (
        "add_all" in everything and "through the maze" in everything and "_hidden" not in everything
    )
    kept = picked("--avoid", avoided)
    assert "add_all" in kept and "through the maze" not in kept and "eight words" not in kept
    prompts = [json.loads(line) for line in kept.splitlines()]
    heads = [one["text"] for one in prompts if "text" in one]
    assert heads == [
        'def add_all(numbers, start):\n    """Return the sum of all numbers in the list, beginning '
        'with start."""\n'
    ]
