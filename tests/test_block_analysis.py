"""Analyses of block decoding: AR-ness, confidence, estimators, frontier."""

import json

import numpy as np
import pytest
import torch

from forerun.errors import BadOption, NotAble
from forerun.evaluate.blocks import (
    Way,
    draw,
    draw_habits,
    estimator_errors,
    frontier,
    global_ar_ness,
    habits,
    local_ar_ness,
    order_of,
    ways,
)
from forerun.evaluate.metrics import first_line
from tests.conftest import model


def test_ar_ness_of_orders_by_hand():
    assert local_ar_ness([3, 4, 5, 6], 2) == global_ar_ness([3, 4, 5, 6], 1) == 1
    assert local_ar_ness([6, 5, 4, 3], 2) == 0 and global_ar_ness([6, 5, 4, 3], 1) == 0.25
    assert global_ar_ness([6, 5, 4, 3], 4) == 1
    mixed = [3, 5, 6, 4]
    assert local_ar_ness(mixed, 2) == pytest.approx(1 / 3) and local_ar_ness(mixed, 3) == 0
    # 3 is the first blank; of 4, 5, 6 it takes the second, of 4, 6 the second, then the last.
    assert global_ar_ness(mixed, 1) == 0.5 and global_ar_ness(mixed, 2) == 1


def test_left_to_right_methods_have_ar_ness_1_and_confidence_is_that_of_the_moment():
    m = model("block", torch.float64)
    how = dict(max_tokens=14, ignore_eos=True, logprobs=0)
    plain = m.generate([[5, 6, 7], [9]], method="ar", **how)
    found = habits(plain, "ar", 8)
    assert found.local == found.overall == [1.0] * 5
    assert np.nanmin(found.confidence) > 0 and np.nanmax(found.tokens_per_forward) == 1
    static = m.generate([[5, 6, 7]], method="block-stepwise", **how)
    assert order_of(static[0]) != sorted(order_of(static[0]))
    chances = {3 + i: np.exp(entry["logprob"]) for i, entry in enumerate(static[0].logprobs)}
    firsts = {p // 8: p for p in reversed(order_of(static[0]))}  # of every block the first that is decided
    told = habits(static, "static", 8, parts=100)
    assert told.confidence[0] == pytest.approx(np.mean([chances[p] for p in firsts.values()]))
    assert len(told.confidence) == 100 and None not in told.confidence


def test_a_forward_that_only_drafts_counts():
    m = model("block", torch.float64)
    results = m.generate([[5, 6, 7], [9]], method="s2d2", max_tokens=13, ignore_eos=True, logprobs=0)
    told = habits(results, "s2d2", 8, parts=1)
    assert told.tokens_per_forward == [sum(r.stats.tokens for r in results) / sum(r.stats.forwards for r in results)]
    with pytest.raises(BadOption):
        habits(m.generate([[5]], method="block", block=9, max_tokens=3), "block", 8)


def test_edits_do_not_count_as_decisions():
    m = model("block", torch.float64)
    [result] = m.generate([[5, 6, 7]], method="block", edit=0.0, post_edits=1, max_tokens=13, ignore_eos=True, temperature=1.0)
    assert any(event.reason == "edited" for event in result.trace) and sorted(order_of(result)) == list(range(3, 16))


def test_an_estimators_error_is_what_it_expects_less_what_is_accepted():
    m = model("block", torch.float64)
    found = {(row.estimator, row.strength): row for row in estimator_errors(m, [[5, 6, 7], list(range(8))], max_tokens=16)}
    assert len(found) == 22
    certain, never = found["margin", 0.01], found["hard-entropy", 0.01]
    assert certain.bias >= found["margin", 0.2].bias and never.bias <= 0
    assert all(row.absolute >= abs(row.bias) - 1e-9 for row in found.values())
    drafts = [
        e
        for r in m.generate([[5, 6, 7], list(range(8))], method="s2d2", max_tokens=16, ignore_eos=True)
        for e in r.trace
        if e.drafted
    ]
    never_accepts = np.mean([len(e.tokens) for e in drafts])  # an estimator that expects nothing is off by what is accepted
    assert never.bias == pytest.approx(-never_accepts) and never.absolute == pytest.approx(never_accepts)
    with pytest.raises(NotAble, match="no block model"):
        estimator_errors(model("llama"), [[5]])


def test_a_frontier_sets_speed_beside_quality_and_is_drawn(tmp_path):
    m, judge = model("block"), model("llama")
    windows = np.random.default_rng(0).integers(0, 200, (3, 20))
    decode = [Way("ar", "ar", {}), Way("dynamic", "block", {"threshold": 0.0}), Way("s2d2", "s2d2", {"block": 4})]
    judge.tokenizer = m.tokenizer
    points = frontier(m, judge, windows, decode, given=8)
    assert points[0].tokens_per_forward.mean == 1 and points[1].tokens_per_forward.mean > 3
    assert all(np.isfinite(p.nats.mean) and 0 <= p.exact.mean <= 1 for p in points)
    draw({"blocks of 8": points}, str(tmp_path / "f.png"))
    draw_habits([habits(m.generate([[5]], method="block", max_tokens=8, logprobs=0), "block", 8)], str(tmp_path / "h.png"))
    assert (tmp_path / "f.png").stat().st_size > 5000 and (tmp_path / "h.png").stat().st_size > 5000
    json.dumps([p.as_dict() for p in points])
    with pytest.raises(NotAble, match="scores no text"):
        frontier(m, model("masked"), windows, decode, given=8)


@pytest.mark.parametrize("block", [4, 8, 16, 32])
def test_every_way_of_the_frontier_is_one_that_a_model_can_go(block):
    from forerun import registry

    for way in ways(block):
        registry.get("methods", way.method).options(**way.options)


def test_the_first_line_is_the_first_that_says_something():
    assert first_line("(a):\n    return") == "(a):" and first_line("\n\n  x = 1\ny") == "\n\n  x = 1" and first_line("") == ""
