"""bench/real.py: rows of real models, and the page that is made of them."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOLVED = {"prompt": "def add(a, b):\n", "canonical_solution": "    return a + b\n"}


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "HumanEval.jsonl").write_text(f"{json.dumps(SOLVED)}\n" * 2)
    file = tmp_path / "real.json"

    def run(*words):
        given = ["--out", str(file), "--data", str(tmp_path / "data"), *map(str, words)]
        monkeypatch.setattr(sys, "argv", ["real.py", *given])
        monkeypatch.syspath_prepend(ROOT / "bench")  # as for a script that is run there
        runpy.run_path(str(ROOT / "bench" / "real.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


SMALL = ("--count", 1, "--max-tokens", 4, "--max-context", 128, "--categories", "code")


def test_a_method_is_measured_over_baseline_and_original_and_written_down(bench, tmp_path):
    bench("--model", "tiny", "--original", "tiny:llama:1", "--method", "jacobi@block=4", *SMALL)
    bench("--model", "tiny:any-subset", "--method", "assd", "--baseline", "sequential",
          "--known", 0.3, *SMALL)  # fmt: skip
    first, second = json.loads((tmp_path / "real.json").read_text())
    assert [len(first["rows"]["code"]), len(second["rows"]["code"])] == [1, 1]
    for row in first["rows"]["code"] + second["rows"]["code"]:
        assert row["same"] and row["tokens_per_forward"] >= row["baseline_per_forward"] * 0.9
    assert str(tmp_path) not in first["command"]
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- real: bench/real.py writes this part -->\nold\n<!-- end of real -->\nafter\n"
    )
    curve = tmp_path / "curve.csv"
    curve.write_text("step,loss,tokens_per_forward\n0,nan,1.0\n5,2.5,1.25\n")
    bench("--report", page, "--curve", f"a lesson={curve}")
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "over the original's `ar`" in text and "over `sequential`" in text
    assert "| 5 | 2.5 | 1.25 |" in text


def test_several_methods_share_a_model_and_other_tables_stay(bench, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- real: bench/real.py writes this part -->\n\n**old**, batch 1\n\n| 1 |\n\n"
        "**a lesson**: the curve of its training\n\n| 2 |\n<!-- end of real -->\nafter\n"
    )
    curve = tmp_path / "curve.csv"
    curve.write_text("step,loss\n5,2.5\n")
    bench("--model", "tiny", "--method", "jacobi@block=4", "lookup", "--name", "both", *SMALL)
    bench("--report", page, "--keep", "--curve", f"a lesson={curve}")
    text = page.read_text()
    assert text.startswith("before") and text.endswith("<!-- end of real -->\nafter\n")
    assert "**old**, batch 1\n\n| 1 |" in text and "| 2 |" not in text
    assert text.count("**a lesson**") == 1 and "| 5 | 2.5 |" in text
    assert "**both, jacobi@block=4 over ar**" in text and "**both, lookup over ar**" in text
