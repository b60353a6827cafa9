"""Estimators and routers, with numbers worked out by hand."""

import math

import pytest
import torch

from forerun import registry
from forerun.methods.routers import (
    ESTIMATORS,
    ArmRecord,
    RouterView,
    RoutingOptions,
    draft_block,
    expected_prefix,
    first_run,
    prospect,
)

SURE = [0.97, 0.01, 0.01, 0.01]
TORN = [0.5, 0.5, 0.0, 0.0]
FLAT = [0.25, 0.25, 0.25, 0.25]


def router(**options):
    routing = RoutingOptions(**options)
    return registry.get("routers", routing.router)(routing)


def view(expected=2.0, run=4, blanks=6, confident=1, entropy=0.2, block=8):
    return RouterView(run, block, blanks, expected, confident, entropy)


class Greedy:
    """A sampler that draws the likeliest."""

    def __call__(self, law):
        return law.argmax(-1)

    many = __call__


def estimate(name, laws, strength=None, where=(0, 1, 2)):
    function, default = ESTIMATORS[name]
    own = torch.tensor([laws], dtype=torch.float64)
    return function(
        own, torch.tensor([list(where[: len(laws)])]), default if strength is None else strength
    )[0].tolist()


def test_estimators_say_what_the_paper_says():
    laws = [SURE, TORN, FLAT]
    entropies = [-sum(p * math.log(p) for p in law if p) / math.log(4) for law in laws]
    assert estimate("entropy", laws) == pytest.approx([math.exp(-h) for h in entropies])
    assert estimate("entropy", laws, 2.0) == pytest.approx([math.exp(-2 * h) for h in entropies])
    assert estimate("margin", laws, 0.5) == [1, 0, 0] and estimate("margin", laws, 1e-9) == [
        1,
        0,
        0,
    ]
    assert estimate("confidence", laws, 0.5) == pytest.approx([math.sqrt(max(law)) for law in laws])
    assert estimate("renyi", laws) == pytest.approx([sum(p * p for p in law) for law in laws])
    assert estimate("hard-entropy", laws, 0.3) == [1, 0, 0]
    scattered = estimate("random", [SURE] * 3, where=(10, 11, 12))
    assert all(0 <= x < 1 for x in scattered) and len(set(scattered)) == 3


def test_the_expected_prefix_is_a_sum_of_products():
    assert expected_prefix(torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.0, 1.0]])).tolist() == [
        0.5 + 0.25 + 0.25,
        1.0,
    ]


def test_the_first_run_ends_where_a_token_is_decided_or_the_list_is_padded():
    where = torch.tensor([[3, 4, 6, 7], [5, 6, 7, 8], [2, 3, -1, -1]])
    assert first_run(where).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]


def test_what_a_router_sees_comes_from_the_run_and_the_confident_blanks():
    model_law = torch.tensor([[SURE, TORN, SURE]], dtype=torch.float64)
    where = torch.tensor([[4, 5, 7]])
    seen = prospect("confidence", 1.0, 0.9)(where, model_law, None)
    assert seen.run.item() == 2 and seen.confident.item() == 2
    assert seen.expected.item() == pytest.approx(0.97 + 0.97 * 0.5)
    torn = math.log(2) / math.log(4)
    sure = -sum(p * math.log(p) for p in SURE) / math.log(4)
    assert seen.entropy.item() == pytest.approx((torn + sure) / 2)


def test_a_draft_has_a_token_for_every_blank_and_padding_never_counts():
    model_law = torch.tensor([[SURE, TORN, [0.0] * 4], [SURE, SURE, FLAT]], dtype=torch.float64)
    where = torch.tensor([[4, 5, -1], [8, 9, 10]])
    drafted = draft_block("entropy", None, 0.9)(where, model_law, model_law, Greedy())
    assert drafted.tokens.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert drafted.decided_by_confidence.tolist() == [[True, False, False], [True, True, False]]


def test_the_span_router_counts_blanks():
    assert router(span=4).verify(view(run=4)) and not router(span=5).verify(view(run=4))


def test_the_score_is_what_is_expected_less_what_it_costs():
    assert view(expected=2.5).score(RoutingOptions(cost=1.0)) == 1.5
    assert view(expected=2.5, confident=3).score(RoutingOptions(cost=0.5, score="dynamic")) == 1.0
    assert router(router="score", enough=1.0).verify(view(expected=2.0))
    assert not router(router="score", enough=1.0).verify(view(expected=1.9))


def test_hysteresis_stays_as_it_is_between_its_two_thresholds():
    way = router(router="hysteresis", on=1.0, off=-1.0)
    scores = [0.0, 0.9, 1.0, 0.0, -1.0, -1.1, 0.0, 0.9, 1.2]
    assert [way.verify(view(expected=s + 1)) for s in scores] == [
        False,
        False,
        True,
        True,
        True,
        False,
        False,
        False,
        True,
    ]


def test_hysteresis_counts_confident_blanks_unless_told_otherwise():
    """A static score is never below minus its cost, so it could hardly turn off again."""
    assert view(expected=2.0, confident=5).score(RoutingOptions(router="hysteresis")) == -3.0
    assert (
        view(expected=2.0, confident=5).score(RoutingOptions(router="hysteresis", score="static"))
        == 1.0
    )
    assert view(expected=2.0, confident=5).score(RoutingOptions(router="score")) == 1.0


def test_a_router_learns_what_came_of_its_word_before_the_next():
    from types import SimpleNamespace

    from forerun.methods.routers import RouterDriver

    unheard = lambda verify, seen: None
    seq = SimpleNamespace(remaining=20, trace=SimpleNamespace(forwards=1), note_route=unheard)
    watch = RouterDriver(seq, RoutingOptions(router="bandit", bins="1,1,1"), 8)
    told = []
    watch._router.learn = lambda decided, forwards: told.append((decided, forwards))
    watch.verify(view())
    seq.remaining, seq.trace.forwards = 15, 3  # a verdict and the next draft
    watch.verify(view())
    seq.remaining, seq.trace.forwards = 13, 4
    watch.verify(view())
    assert told == [(5, 2), (2, 1)]


def test_the_bandit_tries_both_ways_and_then_prefers_what_pays():
    way = router(router="bandit", explore=0.1, bins="1,1,1")
    said = []
    for _ in range(30):
        verify = way.verify(view())
        said.append(verify)
        way.learn(8 if verify else 1, 2 if verify else 1)  # four tokens per forward against one
    assert said[:2] == [True, False] and all(said[5:])
    situation = way.last[0]
    assert way.records[situation, True] == (said.count(True), 4.0 * said.count(True))


def test_the_bandit_tells_situations_apart():
    way = router(router="bandit", bins="2,2,2")
    places = {
        way._situation(s)
        for s in (
            view(run=1),
            view(run=8),
            view(blanks=1),
            view(entropy=0.9),
            view(entropy=1.0),
        )
    }
    assert len(places) == 4  # the two high entropies are one
    assert way._situation(view(run=8, blanks=0, entropy=1.0)) == (1, 1, 1)


def test_upper_confidence_bounds_are_equation_16():
    way = router(router="bandit", explore=0.5, bins="1,1,1")
    way.records = {((0, 0, 0), True): ArmRecord(4, 6.0), ((0, 0, 0), False): ArmRecord(2, 3.6)}
    way.time = 9
    assert way._bound(((0, 0, 0), True)) == pytest.approx(1.5 + 0.5 * math.sqrt(math.log(9) / 4))
    assert way._bound(((0, 0, 0), False)) == pytest.approx(1.8 + 0.5 * math.sqrt(math.log(9) / 2))
    assert way.verify(view()) is False


def test_a_router_from_outside_is_found_by_its_name(monkeypatch):
    from types import SimpleNamespace

    from tests.helpers import model

    asked = []

    class Never:
        def __init__(self, routing):
            self.routing = routing

        def verify(self, view):
            asked.append(view)
            return False

        def learn(self, decided, forwards):
            assert decided > 0 and forwards == 1

    point = SimpleNamespace(name="never", load=lambda: Never)
    monkeypatch.setattr(
        registry, "_outside", lambda kind: {"never": point} if kind == "routers" else {}
    )
    m = model("block")
    how = dict(max_tokens=12, ignore_eos=True)
    found = m.generate([5, 6], method="s2d2", router="never", **how)
    assert asked and found.token_ids == m.generate([5, 6], method="block", **how).token_ids
