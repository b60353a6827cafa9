"""Methods side by side: the numbers are the requests' own, and what is wrong looks wrong."""

import csv
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import forerun.methods.speculative as speculative_file
from forerun.cli import app
from forerun.engine.host import Work
from forerun.engine.pack import Batch
from forerun.errors import BadOption
from forerun.evaluate.compare import ComparisonSettings, Contestant, compare, contestants_for
from forerun.evaluate.judge import law_p_value
from forerun.evaluate.metrics import parses
from forerun.probability.outcomes import Verdict
from forerun.sequence.rows import Plan, causal_rows
from tests.helpers import PROMPTS, fresh, model

runner = CliRunner()


def test_rows_add_up_what_the_requests_cost():
    m = fresh()
    settings = ComparisonSettings(max_tokens=6, rounds=2)
    rows = compare(contestants_for(m, ["ar", "lookup"]), PROMPTS, settings)
    alone = [m.generate(p, method="lookup", max_tokens=6) for p in PROMPTS]
    assert [r.method for r in rows] == ["ar", "lookup"]
    assert rows[1].forwards == sum(r.stats.forwards for r in alone)
    assert rows[1].tokens == sum(r.stats.tokens for r in alone)
    assert rows[0].speedup == 1.0 and rows[0].least <= rows[0].tokens_per_second <= rows[0].most
    assert rows[1].equals_reference == 1.0 and rows[1].p_value is None


def test_batches_change_nothing_but_the_time():
    m = fresh()
    contestants = contestants_for(m, ["lookup"])
    [alone] = compare(contestants, PROMPTS, ComparisonSettings(max_tokens=6, rounds=1, batch=1))
    [batched] = compare(contestants, PROMPTS, ComparisonSettings(max_tokens=6, rounds=1, batch=5))
    assert (alone.tokens, alone.forwards) == (batched.tokens, batched.forwards)


def test_a_method_that_is_fast_and_wrong_looks_wrong(monkeypatch):
    def wrong(x, p, sample):
        n = (x >= 0).sum(-1)
        return Verdict.of_batch(accepted=n, token=sample(p[torch.arange(len(n)), n]))

    monkeypatch.setattr(speculative_file, "matching", wrong)
    m = fresh()
    settings = ComparisonSettings(max_tokens=20, rounds=1)
    contestants = contestants_for(m, ["ar", "lookup"])
    reference, fast = compare(contestants, PROMPTS, settings, judge=m)
    assert (
        fast.tokens_per_forward > reference.tokens_per_forward
        and fast.equals_reference < 1
        and fast.perplexity > reference.perplexity
    )


def test_above_temperature_zero_the_law_is_tested():
    m = fresh()
    settings = ComparisonSettings(max_tokens=20, rounds=1, temperature=1.0)
    [row] = compare(contestants_for(m, ["lookup"]), PROMPTS, settings)
    assert row.equals_reference is None and row.p_value > 0.01
    cold = m.generate(PROMPTS, max_tokens=60, temperature=0.3, ignore_eos=True)
    assert law_p_value(m, cold, 1.0) < 1e-3


def test_arithmetic_and_traffic_are_counted_from_what_ran():
    m = fresh()
    plain, drafted = compare(
        [
            Contestant(m, "ar"),
            Contestant(m, "speculative", {"draft": model("llama", seed=1), "k": 3}),
        ],
        PROMPTS[:2],
        ComparisonSettings(max_tokens=6, rounds=1),
    )
    parameters = m.backbone.cost
    assert (
        plain.mflops_per_token > 2 * parameters / 1e6
        and plain.mbytes_per_token >= 4 * parameters / 1e6
    )
    assert plain.draft_mflops is None and drafted.draft_mflops > 2 * 2 * parameters / 1e6
    assert drafted.mflops_per_token > plain.mflops_per_token
    work = Work()
    plan = Plan(causal_rows(np.arange(5)), [np.array([4])], 5)
    work.add(Batch([(0, plan, 3)], 10, torch.device("cpu")))
    assert vars(work) == {"rows": 2, "pairs": 10, "slots": 5, "forwards": 1}


def test_methods_that_need_a_draft_take_part_if_there_is_one():
    m = fresh()
    methods = [one.method for one in contestants_for(m)]
    assert methods == ["ar", "auto", "jacobi", "lookahead", "lookup", "multiblock"]
    last = contestants_for(m, None, model("llama", seed=1))[-1]
    assert last.label.startswith("speculative (tiny:llama:1")
    without_draft = Contestant(m, "speculative", {"draft": None})
    with pytest.raises(BadOption, match="draft="):
        compare([without_draft], PROMPTS, ComparisonSettings(rounds=1))


@pytest.mark.parametrize(
    "code, fine",
    [
        ("def f():\n    return 1\n", True),
        ("def f():\n    return 1\n\ndef g(", True),
        ("def f():\n    return 1\nfor x in\n    (((\n", True),
        ("def f(:\n    return 1\nx = 1\ny = 2\nz = 3\nw = 4\n", False),
        ("x = 1", True),
    ],
)
def test_code_parses_up_to_an_unfinished_end(code, fine):
    assert parses(code) is fine


def test_the_command_prints_a_table_json_csv_and_a_page(tmp_path):
    words = [
        "compare",
        "--max-tokens",
        "8",
        "--rounds",
        "1",
        "--csv",
        str(tmp_path / "c.csv"),
        "--html",
        str(tmp_path / "c.html"),
    ]
    report = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    names = ["ar", "auto", "jacobi", "lookahead", "lookup", "multiblock"]
    names += ["speculative (zoo:drafter)", "specdiff (auto)"]
    assert [row["method"] for row in report["rows"]] == names
    assert all(row["equals_reference"] == 1 for row in report["rows"]) and report["machine"]
    with open(tmp_path / "c.csv") as file:
        assert len(list(csv.DictReader(file))) == len(names)
    page = (tmp_path / "c.html").read_text()
    assert (
        page.startswith("<!doctype html>")
        and "speculative (zoo:drafter)" in page
        and "http" not in page
    )
    shown = runner.invoke(
        app,
        ["compare", "--max-tokens", "4", "--rounds", "1", "--methods", "ar,lookup"],
        env={"COLUMNS": "160"},
    )
    assert shown.exit_code == 0 and "lookup" in shown.stdout


def test_comparing_nothing_is_refused():
    assert isinstance(runner.invoke(app, ["compare", "--rounds", "0"]).exception, BadOption)
    assert isinstance(runner.invoke(app, ["compare", "--methods", "nope"]).exception, BadOption)


def test_where_the_truth_is_known_completions_and_models_are_set_beside_it():
    m = fresh()
    truths = [m.generate(p, max_tokens=6, ignore_eos=True).token_ids for p in PROMPTS[:3]]
    truths[2] = [t ^ 1 for t in truths[2]]
    settings = ComparisonSettings(max_tokens=6, rounds=1)
    contestants = contestants_for(m, ["ar", "lookup"])
    plain, drafted = compare(contestants, PROMPTS[:3], settings, truths=truths)
    assert plain.first_line_right == drafted.first_line_right
    assert 0 < plain.first_line_right < 1 and plain.loss == drafted.loss > 0
    masked = Contestant(model("masked"), "stepwise")
    [row] = compare([masked], PROMPTS[:3], settings, truths=truths)
    assert row.first_line_right is not None
    assert row.loss is None  # a masked model scores no chains
    [row] = compare(contestants_for(m, ["ar"]), PROMPTS[:2], settings)
    assert row.first_line_right is None


def test_of_several_models_each_runs_what_it_can():
    from forerun.cli.compare import contestants_of
    from forerun.errors import NotAble

    loaded = {"a": fresh(), "b": model("block"), "c": model("masked")}
    found = contestants_of(loaded, ["ar", "s2d2-exact", "ssd"], None)
    assert [(e.model.family.name, e.method) for e in found] == [
        ("causal", "ar"),
        ("block", "ar"),
        ("block", "s2d2-exact"),
        ("masked", "ssd"),
    ]
    with pytest.raises(NotAble, match="'assd'"):
        contestants_of(loaded, ["assd"], None)


def test_a_drafter_that_is_shipped_for_a_model_takes_part(monkeypatch):
    from forerun.checkpoints import drafters
    from forerun.cli.compare import contestants_of

    monkeypatch.setattr(drafters, "belongs", lambda folder, backbone: True)
    loaded = {"a": fresh(), "b": model("block")}
    found = contestants_of(loaded, None, None)
    assert [one.model for one in found if one.label == "specdiff (auto)"] == [loaded["a"]]
    found = contestants_of({"a": fresh()}, ["ar", "specdiff"], None)
    assert [one.label for one in found] == ["ar", "specdiff (auto)"]
    found = contestants_of({"a": fresh()}, ["specdiff"], "other")
    assert [one.label for one in found] == ["specdiff (other)"]


def test_held_out_text_is_prompts_with_known_ends(tmp_path):
    for i in range(400):
        (tmp_path / f"f{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 6)
    own = [
        "compare",
        "--methods",
        "ar,lookup",
        "--data",
        str(tmp_path),
        "--count",
        "2",
        "--given",
        "12",
        "--max-tokens",
        "8",
        "--rounds",
        "1",
    ]
    report = json.loads(runner.invoke(app, [*own, "--json"]).stdout)
    assert report["prompts"] == 2 and all(
        row["first_line_right"] is not None and row["loss"] > 0 for row in report["rows"]
    )
    both = runner.invoke(app, [*own, "--prompts", "p.txt"])
    assert both.exit_code != 0 and isinstance(both.exception, BadOption)
