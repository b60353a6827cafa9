"""Higher priority goes first, and who would be late is told at once."""

import time

import pytest

from forerun.engine.costs import FixedCosts
from forerun.errors import BadOption, TooLate
from tests.helpers import fresh, stepped


def slow(seconds, lanes=1):
    """A model whose steps are said to take so long."""
    m = stepped(fresh(lanes=lanes))
    m.host.costs = FixedCosts({1: seconds, 2: seconds})
    return m


def test_higher_priority_goes_first_and_equals_in_order():
    m = slow(0.001)
    order = []
    jobs = [
        m.submit([index], max_tokens=2, priority=priority)
        for index, priority in enumerate([0, 0, 5, 5, -1])
    ]
    for index, each in enumerate(jobs):
        each.when_over(lambda index=index: order.append(index))
    for each in jobs:
        each.wait()
    assert order == [2, 3, 0, 1, 4]


def test_of_equals_whoever_is_due_sooner_goes_first():
    m = slow(0.001)
    order = []
    jobs = [m.submit([i], max_tokens=2, deadline=d) for i, d in enumerate([None, 500, 100])]
    for index, each in enumerate(jobs):
        each.when_over(lambda index=index: order.append(index))
    for each in jobs:
        each.wait()
    assert order == [2, 1, 0]


def test_a_deadline_that_cannot_be_met_is_refused_in_one_line():
    m = slow(0.5)
    began = time.perf_counter()
    with pytest.raises(TooLate) as refusal:
        m.generate([1], max_tokens=100, ignore_eos=True, deadline=20)
    assert time.perf_counter() - began < 5
    words = str(refusal.value)
    assert "\n" not in words and words.startswith("deadline=20:") and "about 50 seconds" in words


def test_a_part_of_the_text_may_do():
    m = slow(0.5)
    result = m.generate([1], max_tokens=8, ignore_eos=True, deadline=2, allow_partial=True)
    assert result.error is None
    with pytest.raises(TooLate):
        m.generate([1], max_tokens=8, ignore_eos=True, deadline=0.2, allow_partial=True)


def test_who_is_late_keeps_what_there_is(monkeypatch):
    m = slow(1e-6)
    jobs = m.submit([1], max_tokens=100, ignore_eos=True, deadline=60)
    for _ in range(9):
        m.engine.step()
    ticket = jobs.jobs[0].ticket
    ticket.submitted -= 100
    jobs.wait()
    [result] = jobs.results()
    assert result.finish_reason == "deadline" and 0 < len(result.token_ids) < 100
    assert not m.engine.busy and m.engine.free_lanes == [0]


def test_who_waits_too_long_is_refused_before_a_lane_is_free():
    m = slow(1e-6)
    m.engine.foresight._seconds.extend([30.0] * 8)
    running = m.submit([1], max_tokens=50)
    m.engine.step()
    waiting = m.submit([2], max_tokens=2, deadline=10)
    m.engine.step()
    assert not running.finished and waiting.finished
    with pytest.raises(TooLate, match="waiting for a lane"):
        waiting.outcome()


@pytest.mark.parametrize("wrong", [{"deadline": 0}, {"deadline": "soon"}, {"priority": 1.5}])
def test_nonsense_is_refused(wrong):
    name = next(iter(wrong))
    with pytest.raises(BadOption, match=name):
        slow(0.1).generate([1], max_tokens=2, **wrong)
