"""Analyses of block decoding: AR-ness, confidence, estimators, frontier."""

import json

import numpy as np
import pytest
import torch

from forerun.errors import BadOption, NotAble
from forerun.evaluate.ar_ness import global_ar_ness, local_ar_ness, order_of, order_report
from forerun.evaluate.estimators import estimator_errors
from forerun.evaluate.frontier import FrontierSetting, HeldOutText, frontier, frontier_settings
from forerun.evaluate.metrics import first_line
from forerun.evaluate.plots import plot_frontier, plot_order
from tests.helpers import model


def test_ar_ness_of_orders_by_hand():
    assert local_ar_ness([3, 4, 5, 6], 1) == global_ar_ness([3, 4, 5, 6], 1) == 1
    assert local_ar_ness([6, 5, 4, 3], 1) == 0 and global_ar_ness([6, 5, 4, 3], 1) == 0.25
    assert global_ar_ness([6, 5, 4, 3], 4) == 1
    mixed = [3, 5, 6, 4]
    assert local_ar_ness(mixed, 1) == pytest.approx(1 / 3) and local_ar_ness(mixed, 2) == 0
    # 3 is the first blank; of 4, 5, 6 it takes the second, of 4, 6 the second, then the last.
    assert global_ar_ness(mixed, 1) == 0.5 and global_ar_ness(mixed, 2) == 1


def test_left_to_right_methods_have_ar_ness_1_and_confidence_is_that_of_the_moment():
    m = model("block", torch.float64)
    options = dict(max_tokens=14, ignore_eos=True, logprobs=0)
    plain = m.generate([[5, 6, 7], [9]], method="ar", **options)
    found = order_report(plain, "ar", 8)
    assert found.local == found.overall == [1.0] * 5
    assert np.nanmin(found.confidence) > 0 and np.nanmax(found.tokens_per_forward) == 1
    static = m.generate([[5, 6, 7]], method="block-stepwise", **options)
    assert order_of(static[0]) != sorted(order_of(static[0]))
    chances = {3 + i: np.exp(entry["logprob"]) for i, entry in enumerate(static[0].logprobs)}
    # of every block the first that is decided
    firsts = {p // 8: p for p in reversed(order_of(static[0]))}
    report = order_report(static, "static", 8, parts=100)
    assert report.confidence[0] == pytest.approx(np.mean([chances[p] for p in firsts.values()]))
    assert len(report.confidence) == 100 and None not in report.confidence


def test_a_forward_that_only_drafts_counts():
    m = model("block", torch.float64)
    results = m.generate(
        [[5, 6, 7], [9]], method="s2d2", max_tokens=13, ignore_eos=True, logprobs=0
    )
    report = order_report(results, "s2d2", 8, parts=1)
    assert report.tokens_per_forward == [
        sum(r.stats.tokens for r in results) / sum(r.stats.forwards for r in results)
    ]
    with pytest.raises(BadOption):
        order_report(m.generate([[5]], method="block", block=321, max_tokens=3), "block", 8)


def test_edits_do_not_count_as_decisions():
    m = model("block", torch.float64)
    [result] = m.generate(
        [[5, 6, 7]],
        method="block",
        edit=0.0,
        post_edits=1,
        max_tokens=13,
        ignore_eos=True,
        temperature=1.0,
    )
    assert any(event.reason == "edited" for event in result.trace) and sorted(
        order_of(result)
    ) == list(range(3, 16))


def test_an_estimators_error_is_what_it_expects_less_what_is_accepted():
    m = model("block", torch.float64)
    found = {
        (row.estimator, row.strength): row
        for row in estimator_errors(m, [[5, 6, 7], list(range(8))], max_tokens=16)
    }
    assert len(found) == 22
    certain = found["margin", 0.01]
    never = found["hard-entropy", 0.01]
    assert certain.bias >= found["margin", 0.2].bias and never.bias <= 0
    assert all(row.absolute >= abs(row.bias) - 1e-9 for row in found.values())
    drafts = [
        e
        for r in m.generate(
            [[5, 6, 7], list(range(8))], method="s2d2", max_tokens=16, ignore_eos=True
        )
        for e in r.trace
        if e.drafted
    ]
    # an estimator that expects nothing is off by what is accepted
    never_accepts = np.mean([len(e.tokens) for e in drafts])
    assert never.bias == pytest.approx(-never_accepts) and never.absolute == pytest.approx(
        never_accepts
    )
    with pytest.raises(NotAble, match="no block model"):
        estimator_errors(model("llama"), [[5]])


def test_a_frontier_sets_speed_beside_quality_and_is_drawn(tmp_path):
    m = model("block")
    judge = model("llama")
    text = HeldOutText(np.random.default_rng(0).integers(0, 200, (3, 20)), given=8)
    settings = [
        FrontierSetting("ar", "ar", {}),
        FrontierSetting("dynamic", "block", {"threshold": 0.0}),
        FrontierSetting("s2d2", "s2d2", {"block": 4}),
    ]
    judge.tokenizer = m.tokenizer
    points = frontier(m, judge, text, settings)
    assert points[0].tokens_per_forward.mean == 1 and points[1].tokens_per_forward.mean > 3
    assert all(np.isfinite(p.nats.mean) and 0 <= p.first_line_right.mean <= 1 for p in points)
    plot_frontier({"blocks of 8": points}, str(tmp_path / "f.png"))
    results = m.generate([[5]], method="block", max_tokens=8, logprobs=0)
    plot_order([order_report(results, "block", 8)], str(tmp_path / "h.png"))
    assert (tmp_path / "f.png").stat().st_size > 5000 and (tmp_path / "h.png").stat().st_size > 5000
    json.dumps([p.as_dict() for p in points])
    with pytest.raises(NotAble, match="scores no text"):
        frontier(m, model("masked"), text, settings)


@pytest.mark.parametrize("block", [4, 8, 16, 32])
def test_every_setting_of_the_frontier_is_one_that_its_method_takes(block):
    from forerun import registry

    for setting in frontier_settings(block):
        registry.method_named(setting.method).options(**setting.options)


def test_the_first_line_is_the_first_that_says_something():
    assert (
        first_line("(a):\n    return") == "(a):"
        and first_line("\n\n  x = 1\ny") == "\n\n  x = 1"
        and first_line("") == ""
    )
