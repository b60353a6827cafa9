"""How many tokens are drafted where nobody says: as many as pay, which changes no text."""

import numpy as np
import pytest

from forerun.backbones.table import TableBackbone
from forerun.certify.enumeration import table_model
from forerun.drafters.adaptive import PayingLength, guess_length
from forerun.engine.costs import FixedCosts, StepCosts
from forerun.families.masked import Masked
from forerun.methods.jacobi import JacobiOptions
from forerun.methods.predicted import PredictedOptions
from forerun.methods.speculative import LookupOptions, SpeculativeOptions
from forerun.options import Sampling
from forerun.probability.logits import TokenHistory
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.trace import Event

FLAT = {1: 1.0, 64: 1.0}
STEEP = {1: 1.0, 64: 64.0}
SHORT = [(4, 0)] * 8  # drafted, accepted
WHOLE = [(4, 4)] * 8


class Handle:
    def __init__(self, costs):
        self.costs = costs


def canvas(verdicts=(), temperature=0.0):
    sampling = Sampling(temperature=temperature)
    history = TokenHistory(sampling, np.zeros(0, np.int64), 8, frozenset())
    seq = Canvas([1, *[BLANK] * 40], history=history)
    seq.trace.events = [
        Event(1, "accepted", [], [1] * accepted, [1] * drafted, [1] * (drafted - accepted))
        for drafted, accepted in verdicts
    ]
    return seq


def length(options, curve, verdicts=(), temperature=0.0, **how):
    return PayingLength(canvas(verdicts, temperature), Handle(FixedCosts(curve)), options, **how)()


def test_a_length_that_is_given_stays():
    for curve in (FLAT, STEEP):
        assert length(SpeculativeOptions(k=7), curve) == 7
        assert guess_length(canvas(), Handle(FixedCosts(curve)), JacobiOptions(block=9)) == 9


def test_where_rows_are_free_drafts_are_long_and_where_they_cost_they_are_short():
    assert length(SpeculativeOptions(), FLAT) == 16
    assert length(PredictedOptions(), FLAT) == 32
    assert length(SpeculativeOptions(), STEEP) == 1
    assert guess_length(canvas(), Handle(FixedCosts(FLAT)), JacobiOptions()) == 16
    assert guess_length(canvas(), Handle(FixedCosts(STEEP)), JacobiOptions()) == 2


def test_a_drafter_that_drafts_few_tokens_is_asked_for_no_more():
    options = SpeculativeOptions()
    assert length(options, FLAT, most=7) == 7
    assert length(options, STEEP, most=7) == 1
    assert length(options, FLAT, most=20) == length(options, FLAT) == 16


def test_a_length_stays_while_the_engine_drafts_on_by_itself():
    """In a launch of so many rounds; but not for ever, and where there are none, as before."""
    costs = FixedCosts({1: 1e-3, 64: 1e-3})
    for launch, stays in ((0.0, 7), (10.5e-3, 10), (1.0, 31)):
        costs.launch = launch
        paying = PayingLength(canvas(), Handle(costs), SpeculativeOptions())
        paying()
        assert paying.stays == stays


def test_drafts_grow_while_they_are_accepted_and_shrink_while_they_are_not():
    curve = {1: 1.0, 64: 8.0}
    options = SpeculativeOptions()
    assert length(options, curve, WHOLE) > length(options, curve) > length(options, curve, SHORT)


def test_what_a_draft_model_takes_makes_drafts_shorter():
    options = SpeculativeOptions()
    slow = length(options, FLAT, draft_seconds=lambda k: 0.5 * k)
    fast = length(options, FLAT, draft_seconds=lambda k: 0.05 * k)
    assert slow < fast < length(options, FLAT)


def test_rows_of_others_leave_room_for_fewer():
    costs = StepCosts()
    costs.curve = {1: 1.0, 16: 1.0, 128: 8.0}
    alone = PayingLength(canvas(), Handle(costs), SpeculativeOptions())()
    costs.crowd.rows = costs.crowd.sequences = 16
    assert PayingLength(canvas(), Handle(costs), SpeculativeOptions())() < alone


def test_guesses_are_fewer_where_many_texts_guess():
    costs = StepCosts()
    costs.curve = {1: 1.0, 16: 1.0, 128: 8.0}
    alone = guess_length(canvas(), Handle(costs), JacobiOptions())
    costs.crowd.rows = costs.crowd.sequences = 16
    assert guess_length(canvas(), Handle(costs), JacobiOptions()) < alone


def test_above_temperature_0_only_drafts_that_are_certain_follow_costs():
    assert length(SpeculativeOptions(), STEEP, temperature=1.0) == SpeculativeOptions.usual
    assert length(LookupOptions(), STEEP, temperature=1.0) == 2


def test_where_nothing_is_known_of_costs_drafts_have_the_usual_length():
    assert PayingLength(canvas(), Handle(StepCosts()), SpeculativeOptions())() == 5


@pytest.mark.parametrize("method", ["speculative", "lookup", "jacobi", "specdiff"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_rows_cost_changes_no_text(method, temperature):
    def text(costs):
        target = TableBackbone(5, seed=1, sharpness=3.0, step_costs=costs)
        draft = TableBackbone(5, seed=2, like=target, blend=0.8, cost=0.1)
        more = {}
        if method in ("speculative", "specdiff"):
            more["draft"] = table_model(draft, family=Masked(4) if method == "specdiff" else None)
        return (
            table_model(target)
            .generate(
                [1, 2, 3, 1, 2],
                max_tokens=24,
                method=method,
                temperature=temperature,
                seed=3,
                **more,
            )
            .token_ids
        )

    assert text(FLAT) == text(STEEP)
