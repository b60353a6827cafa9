"""The drafts of a batch are planned together: as well as trying all plans would, and at once."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from forerun.engine.company import (
    DEPTHS,
    IDLE,
    LOOKING,
    PATIENT,
    RARELY,
    SELDOM,
    Company,
    Wish,
    as_table,
    best_together,
    gains_by_depth,
)
from forerun.engine.costs import FEW, StepCosts, StepWatch
from forerun.engine.pace import MORE, Pace

CURVES = {
    "flat": {1: 5.0, 8: 5.0, 32: 9.0},
    "every row costs": {1: 1.0, 2: 1.43, 4: 2.3, 8: 4.3, 16: 8.5, 32: 17.0},
    "a staircase": {1: 2.0, 4: 2.0, 5: 3.0, 8: 3.0, 9: 4.0, 12: 4.0, 13: 5.0, 64: 17.0},
}


def costs_of(curve, each=0.0):
    costs = StepCosts()
    costs.corrects = False
    costs.curve = curve
    costs.each = each
    return costs


def rate(costs, lengths, gains_BK, depth_seconds):
    tokens = sum(1 + gains[:k].sum() for gains, k in zip(gains_BK, lengths))
    drafting = sum(k > 0 for k in lengths)
    rows = len(lengths) + sum(lengths)
    if not drafting:
        return tokens / costs.plain(rows)
    seconds = costs.judged_steps(rows)[rows] + costs.each * drafting
    return tokens / (seconds + depth_seconds)


@pytest.mark.parametrize("curve", CURVES.values(), ids=list(CURVES))
@pytest.mark.parametrize("each", [0.0, 0.3])
def test_no_plan_is_much_better_than_the_one_that_is_found(curve, each):
    chance = np.random.default_rng(3)
    costs = costs_of(curve, each)
    for _ in range(12):
        odds = chance.uniform(0.1, 0.97, 3)
        gains_BK = as_table([list(p ** np.arange(1, 5)) for p in odds])
        plan = best_together(gains_by_depth(gains_BK, np.zeros((3, FEW)), 0.0), costs, 0, 0.0)
        found = rate(costs, plan.lengths_B.tolist(), gains_BK, 0.0)
        best = max(rate(costs, ks, gains_BK, 0.0) for ks in product(range(5), repeat=3))
        assert found >= 0.98 * best


def test_a_draft_model_works_for_all_at_once():
    """Alone it never pays, since its forwards hold up everybody; together it does."""
    costs = costs_of({1: 5.0, 64: 5.0})
    likely = [0.8**k for k in range(1, 9)]
    for count, pays in [(1, False), (8, True)]:
        drafted_BK = as_table([likely] * count + [[]] * (8 - count))
        gains = gains_by_depth(np.zeros((8, FEW)), drafted_BK, 0.0)
        plan = best_together(gains, costs, 0, 2.0)
        assert (plan.depth > 0) == pays and plan.depth in DEPTHS
        assert plan.lengths_B.max() <= plan.depth


def test_a_full_batch_drafts_what_is_likeliest_and_no_more():
    costs = costs_of({1: 5.0, 16: 5.0, 32: 20.0, 64: 50.0})
    sure, unsure = [0.9**k for k in range(1, 9)], [0.3**k for k in range(1, 9)]
    gains_BK = as_table([sure, unsure] * 4)
    plan = best_together(gains_by_depth(gains_BK, np.zeros((8, FEW)), 0.0), costs, 0, 0.0)
    assert plan.lengths_B.sum() + 8 == 16
    assert plan.lengths_B[0::2].min() >= 2 and plan.lengths_B[1::2].max() == 0


def test_prompts_that_are_read_leave_less_room_for_drafts():
    costs = costs_of({1: 5.0, 64: 5.0, 128: 125.0})
    gains = gains_by_depth(as_table([[0.9, 0.8, 0.7, 0.6]] * 8), np.zeros((8, FEW)), 0.0)
    free = best_together(gains, costs, 0, 0.0)
    for _ in range(2):  # once might be all
        costs.observe_prompts(48)
    beside = best_together(gains, costs, 0, 0.0)
    assert free.lengths_B.sum() == 32 and 0 < beside.lengths_B.sum() <= 8
    for _ in range(2):
        costs.observe_prompts(0)
    assert best_together(gains, costs, 0, 0.0).lengths_B.sum() == 32


def test_what_one_draft_costs_the_host_does_not_say_that_thirty_cost_nothing():
    """What a step costs once hides what each draft costs, as long as there is one."""
    costs = StepCosts()
    costs.curve = {1: 5e-3, 64: 5e-3}
    for _ in range(20):
        costs.observe(1, 0, 0, 5e-3)
        costs.observe(4, 1, 0, 5.1e-3)
    assert costs.each > 4e-5
    for _ in range(8):
        costs.observe(32, 16, 0, 5.1e-3 + 16 * 2e-4)
    assert costs.each == pytest.approx(2e-4, rel=0.3)


class Told:
    """A pace that remembers what it was told."""

    def stepped(self, seconds, writing, reading):
        self.seconds = seconds


def test_what_drafts_take_is_not_taken_for_the_price_of_reading():
    now = [0.0]
    watch = StepWatch(lambda: now[0])
    costs = StepCosts()
    costs.curve = {1: 1.0, 8: 1.0}
    for _ in range(4):
        costs.observe(5, 1, 2, 2.0 + costs.plain(1) * 0.02)
    told = Told()
    for _ in range(2):
        for _ in range(2):
            watch.forward(costs, [1], [1], drafting=True)
        watch.forward(costs, [3, 40], [3, 1], drafting=False)
        watch.rows(told, 43, 40)
        watch.drawing()
        now[0] += 3.0
        watch.arrived()
    assert told.seconds == pytest.approx(2.0, abs=0.1)


def test_a_draft_model_reads_as_much_as_fits_beside_a_step():
    costs = StepCosts()
    costs.curve = {rows: 0.01 * rows for rows in (1, 2, 128)}
    rows = Pace(costs).budget(0, beside=1.0)
    assert costs.forward(rows) <= MORE < costs.forward(2 * rows)


class Somebody:
    wish = Wish()
    seq = SimpleNamespace(known=0)
    stretch_end = 0


def test_where_nobody_drafts_all_look_as_seldom_as_looking_is_dear():
    company = Company()
    members = [Somebody() for _ in range(10)]
    for one in members:
        company.join(one)

    def steps(count, look, drafts=False):
        looked = 0
        for _ in range(count):
            for one in members:
                company.begins_step(one)
                if not company.is_idle or company.is_time_to_look:
                    company.looked(look, step_seconds=1.0)
                    looked += 1
                if drafts:
                    company.drafts()
        return looked / (count * len(members))

    assert company.is_idle and steps(SELDOM, look=1e-5) == 1 / SELDOM
    assert company.patience == 1
    steps(1, look=0.01, drafts=True)
    assert steps(IDLE, look=0.01) == 1.0  # a tenth of every step, while it may still pay
    steps(50, look=0.01)
    assert company.is_idle
    often = steps(200, look=0.01)  # 10 look for 0.01 s each: every tenth step is 1 %
    assert 0.08 <= often <= 0.13 and 10 * 0.01 * often <= 1.3 * LOOKING
    steps(100, look=1e-5)
    assert 1 / steps(200, look=1e-5) == pytest.approx(SELDOM, rel=0.1)
    assert company.patience == 1
    company.until_next_choice(members[0], 16)  # where texts go on for a while between two choices
    steps(100, look=1e-5)
    assert company.patience == PATIENT  # times as many tokens from step to step: as seldom as ever
    assert 1 / steps(200, look=1e-5) == pytest.approx(SELDOM / PATIENT, rel=0.1)
    steps(100, look=10.0)
    assert 1 / steps(640, look=10.0) == pytest.approx(RARELY, rel=0.2)
    steps(1, look=0.01, drafts=True)
    assert not company.is_idle and company.patience == 1


class Written:
    """A text that has come so far, and chooses."""

    def __init__(self, known):
        self.seq = SimpleNamespace(known=known)
        self.wish = Wish()
        self.stretch_end = 0


def test_where_tokens_come_one_by_one_all_choose_in_the_same_steps():
    """Whoever came first, and whoever came in between; in a step texts grow one after the other."""
    company = Company()
    members = []
    chose = {}

    for step in range(60):
        if step == 20:
            company.leave(members.pop(0))
        for one in members:
            one.seq.known += 1
            if one.seq.known >= one.stretch_end:
                company.until_next_choice(one, 16)
                chose.setdefault(step, []).append(one)
        if step in (0, 3, 7, 40):
            members.append(Written(100 * step))
            company.join(members[-1])
            company.until_next_choice(members[-1], 16)
    assert list(chose) == [16, 32, 48]
    assert [len(some) for some in chose.values()] == [3, 2, 3]


def test_while_somebody_drafts_all_choose_in_every_step():
    company = Company()
    text = Written(10)
    company.join(text)
    company.drafts()
    assert company.until_next_choice(text, 16) == 1


def test_those_who_come_begin_no_step():
    """Many may come at once: looks are counted by steps, and a step is one choice of each."""
    company = Company()
    members = [Somebody() for _ in range(10)]
    for one in members:
        company.join(one)
        assert company.begins_step(one) and company.step == 0
    assert [company.begins_step(one) for one in members] == [True, *[False] * 9]
    assert company.step == 1
