"""A plan is arithmetic on what was measured, and says what it would foretell."""

import json
from dataclasses import replace

import pytest
import torch

from forerun.errors import BadOption
from forerun.profile.forward import Ceilings
from forerun.profile.shapes import random_model
from forerun.scale.measure import (
    Asked,
    Bench,
    Closed,
    Timed,
    Trial,
    _prompt_row,
    check_of,
    cost_from,
    measure,
)
from forerun.scale.plan import Load, Measured, MethodCost, plan, read_load, request_seconds
from tests.helpers import run

# 1 ms a forward up to 64 rows, then 10 us a row; 1 KB a slot; 1 MB/s makes reading slots count
MACHINE = Measured(
    shape="made up",
    machine="none",
    chain={1: 1e-3, 64: 1e-3, 128: 1.64e-3, 256: 2.92e-3},
    context=0,
    bytes_per_second=1e9,
    bytes_per_slot=1000,
    weight_bytes=10**9,
    memory_bytes=2 * 10**9,
    methods=[
        MethodCost("ar", {1: 1.0}, 1.0, {1: 0.0}, "a text"),
        MethodCost("lookup", {1: 4.0}, 2.0, {1: 1.01e-3, 32: 1.32e-3}, "a text"),
    ],
)


def test_a_step_is_its_rows_its_slots_and_what_is_outside():
    # 8 sequences of 4 rows: 32 rows take 1 ms; 8 x 150 slots of 1 KB at 1 GB/s take 1.2 ms; outside
    # 1 ms + 8 x 10 us. 100 tokens at 2 a forward are 50 steps; prompts: 8 x 100 rows x 20 us.
    load = Load(1.0, prompt=100, tokens=100)
    seconds = request_seconds(MACHINE, MACHINE.method("lookup"), 8, load)
    assert seconds == pytest.approx(50 * (1e-3 + 1.2e-3 + 1.08e-3) + 8 * 100 * 1e-5, rel=1e-9)


def test_the_cheapest_method_comes_first_and_replicas_follow_the_load():
    load = Load(100.0, prompt=10, tokens=100, busy=0.5, price=2.0)
    rows = plan(MACHINE, load, tokens_per_forward={"lookup": 1.0})
    assert [row.method for row in rows] == ["ar", "lookup"], "rows cost, and find nothing"
    for row in rows:
        assert row.gpu_hours == pytest.approx(1e6 / (row.tokens_per_second * 0.5) / 3600)
        assert row.gpus == -(-100.0 * 100 // (row.tokens_per_second * 0.5))
        assert row.cost == pytest.approx(2 * row.gpu_hours)
    break_even = next(row for row in rows if row.method == "lookup").break_even
    assert break_even > 1
    better = plan(MACHINE, load, tokens_per_forward={"lookup": 4 * break_even})
    assert better[0].method == "lookup"
    # a reader who wants more tokens a second gets a smaller batch
    assert rows[0].in_flight == 32, "no further than was measured"
    assert plan(MACHINE, replace(load, in_flight=64), "ar")[0].in_flight == 64
    alone = plan(MACHINE, Load(1.0, 10, 100, slowest=700), "ar")[0]
    assert alone.in_flight < rows[0].in_flight and alone.reader >= 700


def test_words_that_mean_no_load_are_refused(tmp_path):
    assert read_load("200/s") == 200 and read_load("120/min") == 2 and read_load("3") == 3
    for words in ("many", "-1/s", "0/s", "5/week", "inf/s"):
        with pytest.raises(BadOption, match="must be a number of requests"):
            read_load(words)
    with pytest.raises(BadOption, match="does not fit beside"):
        plan(MACHINE, Load(1.0, prompt=10**6, tokens=10**6))
    with pytest.raises(BadOption, match="'lookahead' is unknown"):
        plan(MACHINE, Load(1.0), "lookahead")
    (tmp_path / "x.json").write_text("{}")
    for words, said in (
        (["--measured", tmp_path / "x.json"], "no file that"),
        (["--model", "gpt-5"], "was not measured"),
        (["--tokens-per-forward", "lookup"], "METHOD=NUMBER"),
    ):
        assert said in str(run("plan", *words).exception)


def test_a_captured_forward_takes_what_the_next_larger_capture_takes():
    captures = replace(MACHINE, captured=(1, 64, 128, 256))
    assert MACHINE.forward(70, 0) == pytest.approx(1.06e-3)
    assert captures.forward(70, 0) == captures.forward(128, 0) == MACHINE.forward(128, 0)
    assert captures.forward(500, 0) == MACHINE.forward(500, 0) == pytest.approx(5.36e-3)


def test_what_is_outside_a_forward_need_not_grow_on_a_line():
    """As measured on an H200: lookup's host takes 0.5, 1.6 and 3.8 ms with 1, 8 and 32."""
    host = {1: 0.5e-3, 8: 1.6e-3, 32: 3.8e-3}
    asked = Asked(10, 40)

    def closed(in_flight, outside, asked):
        step = MACHINE.forward(in_flight, in_flight * (asked.prompt + asked.tokens / 2)) + outside
        prompts = in_flight * asked.prompt * MACHINE.per_row
        return Closed("lookup", in_flight, asked, asked.tokens / 2 * step + prompts, 1.0, 2.0)

    runs = [closed(in_flight, outside, asked) for in_flight, outside in host.items()]
    cost = cost_from(MACHINE, runs, "a text")
    assert cost.outside == pytest.approx(host) and set(cost.rows.values()) == {1.0}
    whole = replace(MACHINE, methods=[cost])
    other = closed(20, 2.7e-3, Asked(30, 100))
    assert check_of(whole, other).error == pytest.approx(0, abs=1e-9)
    assert cost.outside_at(56) == pytest.approx(6e-3), "beyond: as from 8 to 32"


def test_longer_prompts_show_what_their_rows_cost_in_company():
    """Alone a prompt is one large forward; beside others it is read in chunks."""
    prices = {1: 2e-5, 8: 6e-5}

    def closed(in_flight, asked):
        slots = in_flight * (asked.prompt + asked.tokens / 2)
        decoding = asked.tokens * (MACHINE.forward(in_flight, slots) + 3e-4)
        prompts = in_flight * asked.prompt * prices[in_flight]
        return Closed("ar", in_flight, asked, decoding + prompts, 1.0, 1.0)

    short = [closed(n, Asked(10, 40)) for n in prices]
    found = {
        n: _prompt_row(MACHINE, one, closed(n, Asked(90, 40))) for n, one in zip(prices, short)
    }
    assert found == pytest.approx(prices)
    priced = replace(MACHINE, prompt_row=found)
    assert priced.prompt_row_at(4.5) == pytest.approx(4e-5)
    assert cost_from(priced, short, "").outside == pytest.approx({1: 3e-4, 8: 3e-4})
    assert Measured(**priced.as_dict()).prompt_row == found
    assert MACHINE.prompt_row_at(3) == MACHINE.per_row, "files that know no such price"


def test_a_run_in_which_something_is_captured_is_not_taken(monkeypatch):
    """On a GPU a size that is met for the first time is captured, in a second or two."""
    seconds = iter([9.0, 4.0, 2.02, 2.0, 7.0])
    monkeypatch.setattr(Bench, "_run", lambda *_: Timed(next(seconds), 3.0, 1.5))
    monkeypatch.setattr(Bench, "prompts", lambda *_: [])
    found = Bench(None).closed_loop("lookup", {}, 4, Asked(8, 8), waves=2)
    assert found.seconds == pytest.approx(1.005) and next(seconds) == 7.0
    assert (found.rows, found.tokens_per_forward) == (3.0, 1.5)
    assert found.per_second == pytest.approx(4 / 1.005)


def test_prompts_of_a_text_are_pieces_of_it():
    bench = Bench(None, range(100), "a text")
    prompts = bench.prompts(5, 10)
    assert prompts[0] == list(range(10)) and prompts[-1] == list(range(90, 100))
    assert len({tuple(prompt) for prompt in prompts}) == 5


def test_a_shape_is_measured_and_foretold(tmp_path, monkeypatch):
    """How well it foretells is measured on a quiet machine: docs/scale.md."""
    monkeypatch.setattr("forerun.scale.measure.MOST_RUNS", 2)
    monkeypatch.setattr("forerun.profile.forward.ceilings", lambda _: Ceilings(1e10, 1e11))
    model = random_model("zoo", torch.device("cpu"), torch.float32, 4, 800)
    trial = Trial((1, 4), (2,), Asked(8, 8), Asked(40, 8), Asked(12, 8), 1, rows=(1, 4, 16))
    measured, checks = measure(Bench(model), "zoo", {"ar": {}, "lookup": {}}, trial)
    assert [(check.method, check.in_flight) for check in checks] == [("ar", 2), ("lookup", 2)]
    ar = measured.method("ar")
    assert set(ar.rows.values()) == {1.0} and ar.tokens_per_forward == pytest.approx(1.0)
    assert all(check.measured > 0 for check in checks)
    file = tmp_path / "zoo.json"
    file.write_text(json.dumps({**measured.as_dict(), "checks": []}))
    assert Measured.read(file).chain == measured.chain
    done = run("plan", "--measured", file, "--load", "5/s", "--price", "2", "--json")
    assert {row["method"] for row in json.loads(done.stdout)} == {"ar", "lookup"}
    assert "replicas of zoo by" in run("plan", "--measured", file, "--load", "5/s").stdout
