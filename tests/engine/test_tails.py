"""Rows and tiles of texts with tails, made for a whole batch at once, are what each plan says."""

import numpy as np
import pytest
import torch

from forerun.engine import pack
from forerun.engine.pack import Batch, Runs, make_tiles
from forerun.sequence.rows import HI, HORIZON, PlainText, Plan, TailedText

SLOTS = 300


def some_plan(numbers: np.random.Generator) -> Plan:
    text = numbers.integers(0, 9, numbers.integers(1, 60)).astype(np.int32)
    if numbers.random() < 0.2:
        return PlainText.of(text, int(numbers.integers(0, len(text))))
    chain = numbers.integers(0, 9, numbers.integers(0, 20)).tolist()
    tails = [
        (int(numbers.integers(0, len(chain) + 1)), numbers.integers(0, 9, count).tolist())
        for count in numbers.integers(0, 20, numbers.integers(1, 6))
    ]
    return TailedText.of(text, chain, tails)


def plainly(plan: Plan) -> Plan:
    """The same without a shortcut."""
    return Plan(plan.rows, plan.reads, plan.stored, causal=plan.causal)


def batches(count: int = 200):
    """Of plans as they are, and of the same without shortcuts."""
    numbers = np.random.default_rng(0)
    for _ in range(count):
        plans = [some_plan(numbers) for _ in range(numbers.integers(1, 5))]
        if all(isinstance(plan, PlainText) for plan in plans):
            continue
        starts = [int(numbers.integers(0, plan.first_read + 1)) for plan in plans]
        work = list(zip(range(len(plans)), plans, starts))
        plain = [(lane, plainly(plan), start) for lane, plan, start in work]
        yield Batch(work, SLOTS, torch.device("cpu")), Batch(plain, SLOTS, torch.device("cpu"))


def check_batches() -> None:
    for quick, plain in batches():
        assert quick.runs is not None and plain.runs is None
        for name in ("rows_5T", "reads", "slots", "lanes", "places"):
            assert np.array_equal(getattr(quick, name), getattr(plain, name)), name
        assert quick.is_plain_text == plain.is_plain_text
        for heads, programs in ((4, 16), (16, 1), (28, 200)):
            one, other = (make_tiles(batch, heads, 4, programs) for batch in (quick, plain))
            assert np.array_equal(one.bounds_6N, other.bounds_6N)
            assert np.array_equal(one.spans_3T, other.spans_3T)
            assert (one.height, one.splits) == (other.height, other.splits)


def test_a_batch_of_tails_is_laid_out_as_its_rows_say():
    check_batches()


def test_a_plan_of_tails_says_how_long_it_is_and_what_is_read():
    numbers = np.random.default_rng(1)
    for _ in range(100):
        plan = some_plan(numbers)
        plain = plainly(plan)
        assert (plan.length, plan.first_read) == (plain.length, plain.first_read)
        assert plan.read_count == plain.read_count
        assert np.array_equal(plan.tokens, plain.tokens)
        assert plan.is_plain_text == plain.is_plain_text
        between = int(numbers.integers(0, plan.length))
        assert np.array_equal(plan.rows_between(between, plan.length), plan.rows[:, between:])


@pytest.mark.parametrize("row", [HORIZON, HI])
def test_a_tail_that_sees_one_slot_more_is_caught(monkeypatch, row):
    right = Runs.rows

    def wrong(self, tokens_T, places_T):
        rows_5T = right(self, tokens_T, places_T)
        rows_5T[row, -1] += 1
        return rows_5T

    monkeypatch.setattr(Runs, "rows", wrong)
    with pytest.raises(AssertionError):
        check_batches()


def test_tails_that_share_a_tile_are_caught(monkeypatch):
    def wrong(self, lanes, low, high):
        bounds, height = right(self, lanes, low, high)
        return bounds[:, :-1], height

    right = Runs.bounds
    monkeypatch.setattr(pack.Runs, "bounds", wrong)
    with pytest.raises(AssertionError):
        check_batches()
