"""What forwards cost is measured once, kept, checked, and never in the way."""

import json
import os

import pytest

import forerun.engine.costs as costs_file
from forerun.engine.costs import (
    SEVERAL,
    Crowd,
    StepCosts,
    StepWatch,
    cost_file,
    identity,
    interpolated,
    load_curve,
    measure,
    rising,
    rows_bucket,
)
from forerun.engine.rules import Rules
from tests.helpers import fresh, stepped


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def measured(monkeypatch):
    """How often something was measured."""
    times = []
    original = costs_file.measure

    def counted(*arguments):
        times.append(1)
        return original(*arguments)

    monkeypatch.setattr("forerun.engine.host.measure", counted)
    return times


def decode(**options):
    m = stepped(fresh(lanes=2))
    result = m.generate([1, 2, 3], max_tokens=4, **options)
    return m, result


def test_it_is_measured_once_and_kept(measured):
    m, _ = decode()
    decode()
    assert len(measured) == 1 and m.host.costs.known
    assert load_curve(identity(m.backbone)) == m.host.costs.curve


def test_only_methods_that_choose_have_it_measured(measured):
    decode(method="ar")
    assert not measured


@pytest.mark.parametrize(
    "spoil",
    [
        lambda held: "no json",
        lambda held: json.dumps([1, 2]),
        lambda held: json.dumps({**held, "seconds": {"1": -1.0, "8": 2.0}}),
        lambda held: json.dumps({**held, "seconds": {"1": "soon"}}),
        lambda held: json.dumps({**held, "about": {**held["about"], "machine": "another"}}),
        lambda held: json.dumps({**held, "about": {**held["about"], "torch": "1.0"}}),
        lambda held: json.dumps({**held, "about": {**held["about"], "version": "0"}}),
    ],
)
def test_a_broken_or_foreign_file_is_measured_again(measured, spoil):
    m, _ = decode()
    file = cost_file(identity(m.backbone))
    file.write_text(spoil(json.loads(file.read_text())))
    m, _ = decode()
    assert len(measured) == 2 and m.host.costs.known
    assert load_curve(identity(m.backbone)) == m.host.costs.curve


def test_a_folder_that_cannot_be_written_is_no_error(measured, cache, monkeypatch):
    blocked = cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(blocked / "below"))  # not even root can write here
    m, result = decode()
    assert m.host.costs.known and result.error is None and os.listdir(cache) == ["file"]


def test_measuring_leaves_no_trace_in_a_text():
    m, result = decode()
    assert result.token_ids == decode(method="ar")[1].token_ids
    assert result.token_ids == m.generate([1, 2, 3], max_tokens=4).token_ids


def test_what_was_kept_from_a_busy_time_is_measured_again(measured):
    m, _ = decode()
    about = identity(m.backbone)
    costs_file.save_curve(about, dict.fromkeys((1, 8, 128), 60.0))
    again = stepped(fresh(lanes=2))
    again.generate([1, 2, 3], max_tokens=120)
    assert again.host.costs.curve[1] == 60.0 and len(measured) == 1
    for _ in range(3):
        again.generate([3, 2, 1], max_tokens=4)
    assert again.host.costs.curve[1] < 10 and len(measured) == 2
    assert load_curve(about) == again.host.costs.curve


def test_a_slow_model_is_measured_at_two_sizes_only(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(costs_file.time, "perf_counter", lambda: now[0])

    def slow(rows):
        now[0] += 2.0 + 0.1 * rows

    assert list(measure(slow, 128, "cpu")) == [1, 8]


def test_a_disturbed_size_does_not_make_larger_ones_look_dear():
    assert rising({1: 16.0, 2: 1.1, 4: 1.5, 8: 1.4}) == {1: 1.1, 2: 1.1, 4: 1.4, 8: 1.4}


def test_short_forwards_are_repeated_until_a_neighbour_has_had_its_slice(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("forerun.engine.costs.time.perf_counter", lambda: now[0])

    def disturbed_at_first(rows):
        now[0] += 0.016 if now[0] < 0.045 else 0.001 * rows

    assert measure(disturbed_at_first, 8, "cpu") == pytest.approx(
        {1: 0.001, 2: 0.002, 4: 0.004, 8: 0.008}
    )


def test_a_curve_is_straight_between_what_was_measured():
    curve = {1: 1.0, 4: 4.0, 8: 5.0}
    assert [interpolated(curve, rows) for rows in (1, 2, 4, 6, 8, 12)] == [1, 2, 4, 4.5, 5, 6]
    assert [rows_bucket(rows) for rows in (1, 8, 9, 10, 17, 33)] == [1, 8, 10, 10, 20, 40]


def test_steps_correct_what_was_measured():
    """A neighbour makes everything twice as slow; then drafted rows turn out to cost still more."""
    costs = StepCosts()
    costs.curve = {1: 1.0, 8: 2.0}
    for _ in range(8):
        costs.observe(1, 0, 0, 2.0)
    assert costs.plain(1) == pytest.approx(2.0)
    assert costs.steps_with(0, 0, 7)[7] == pytest.approx(
        2 * 2.0 * costs_file.JUDGED_SHARE, abs=1e-3
    )
    for _ in range(8):
        costs.observe(8, 1, 0, 9.0)
    assert costs.steps_with(0, 0, 7)[7] == pytest.approx(9.0)
    for _ in range(costs_file.STALE):  # what was seen long ago counts no more
        costs.observe(1, 0, 0, 1.0)
    assert costs.steps_with(0, 0, 7)[7] == pytest.approx(2.0 * costs_file.JUDGED_SHARE, abs=1e-3)


def test_what_the_host_does_for_each_draft_is_told_apart_from_rows():
    """Ten sequences that draft cost ten times the host's work of one, in as many rows."""
    costs = StepCosts()
    costs.curve = {1: 5.0, 128: 5.0}
    for _ in range(16):
        costs.observe(8, 0, 0, 5.0)
        costs.observe(16, 8, 0, 5.0 * costs_file.JUDGED_SHARE + 8 * 0.25)
    alone = costs.steps_with(7, 0, 4)
    beside = costs.steps_with(14, 7, 4)
    assert alone[0] == pytest.approx(5.0) and costs.plain(8) == pytest.approx(5.0)
    assert alone[4] - alone[0] < 1.0 and beside[0] == pytest.approx(5.1 + 7 * 0.25, abs=0.1)
    assert beside[1] - beside[0] == pytest.approx(0.25, abs=0.05)


def test_on_a_gpu_whoever_drafts_costs_those_beside_it_something():
    """Nothing is begun ahead for them, and they are asked one by one."""
    costs = StepCosts("cuda")
    costs.curve = {1: 1e-3, 64: 1e-3}
    taken = {}
    for sequences in (1, 8):
        costs.meet(Crowd(sequences, sequences))
        taken[sequences] = costs.steps_with(sequences - 1, 0, 4)[4]
    assert taken[8] > taken[1] + 5e-4
    costs.meet(Crowd(8, 8))
    for _ in range(20):  # as they were seen on one
        costs.observe(12, 1, 0, 5e-3)
    assert costs.steps_with(7, 0, 4)[4] == pytest.approx(5e-3, rel=0.1)
    assert 3e-3 < costs.steps_with(10, 1, 4)[4] < 7e-3, "of other sizes, too"


def test_steps_with_a_draft_model_show_what_drafting_costs():
    costs = StepCosts()
    costs.curve = {1: 1.0, 8: 1.0}
    assert costs.draft_forward() is None
    for _ in range(8):
        costs.observe(5, 1, 0, 1.0)
        costs.observe(5, 1, 4, 3.0)
    assert costs.draft_forward() == pytest.approx(0.5, abs=0.01)


def test_an_engine_observes_its_own_steps():
    m, _ = decode()
    before = m.host.costs.seen
    m.generate([1, 2, 3], max_tokens=120)
    assert m.host.costs.seen - before >= 3  # launches
    assert m.host.costs.crowd.sequences == 1
    assert 0 < m.host.costs.plain(1) < 10


def test_where_steps_are_short_choices_are_few():
    costs = StepCosts("cuda")
    assert costs.between_choices == 1  # as long as nothing is known
    costs.curve = {1: 5e-4, 8: 5e-4}
    assert costs.begins_ahead and costs.between_choices == SEVERAL
    costs.curve = {1: 4e-3, 8: 4e-3}  # long ones hide them
    assert costs.between_choices == 1
    costs.at_once = 8
    assert costs.between_choices == 8
    costs = StepCosts("cpu")
    costs.curve = {1: 5e-4, 8: 5e-4}
    assert costs.between_choices == 1


@pytest.mark.parametrize("at_once,seen", [(1, 1), (16, 0)])
def test_plain_steps_tell_nothing_where_text_is_written_at_once(at_once, seen):
    clock = iter(range(10))
    watch = StepWatch(lambda: float(next(clock)))
    costs = StepCosts()
    costs.curve = {1: 1.0, 8: 1.0}
    costs.at_once = at_once
    for _ in range(3):  # the first only sets the clock, and of the last a draft may follow
        watch.forward(costs, [1], [1], False)
        watch.drawing()
        watch.arrived()
    assert costs.seen == seen
    watch.forward(costs, [3], [3], False)  # drafts are always counted
    watch.drawing()
    watch.arrived()
    assert costs.seen == seen + 1


def test_what_is_done_for_the_first_time_says_nothing_of_later_steps():
    """A capture takes seconds. Were it taken for the price of rows, chunks of prompts would shrink
    to nothing."""
    clock = iter(range(10))
    watch = StepWatch(lambda: float(next(clock)))
    costs = StepCosts()
    costs.curve = {1: 1.0, 8: 1.0}
    told = []

    class Paced:
        def stepped(self, seconds, writing, reading):
            told.append(reading)

    pace = Paced()
    for reading in (1, 2, 3):  # the first only sets the clock
        watch.forward(costs, [3], [3], False)
        watch.rows(pace, 3 + reading, reading)
        if reading == 2:
            watch.unusual()
        watch.drawing()
        watch.arrived()
    assert told == [3] and costs.seen == 1


def test_rules_say_whether_they_are_warm():
    m = stepped(fresh(lanes=1))
    rules = m.engine.rules = Rules(graphs=True)
    firsts = []
    m.engine.watch.unusual = lambda: firsts.append(len(rules.programs))
    for prompt in ([1, 2, 3], [3, 2, 1]):
        m.generate(prompt, method="ar", max_tokens=6, logprobs=1)
    assert firsts == [0, 1], "once by its plain code, once to be captured"


def watched(device_type):
    """Costs, and what lets steps of eight sequences take so many milliseconds."""
    clock = [0.0]
    watch = StepWatch(lambda: clock[0])
    costs = StepCosts(device_type)
    costs.curve = {1: 1e-3, 64: 1e-3}

    def step(milliseconds, drafted=0):
        rows = [1] * 7 + [1 + drafted]
        watch.forward(costs, rows, rows, False)
        watch.drawing()
        clock[0] += 1e-3 * milliseconds
        watch.arrived()

    for _ in range(20):
        step(1)
    return costs, step


def test_what_drafts_cost_the_steps_around_them_counts_as_theirs():
    """Nothing was begun behind the plain step before a draft, nor for the one after it."""
    costs, step = watched("cuda")
    before = costs.steps_with(7, 0, 4)[4]
    for taken, drafted in [(2, 0), (before * 1e3, 4), (2.5, 0), (1, 0), (1, 0), (1, 0)]:
        step(taken, drafted)
    costs._forget_predictions()
    assert costs.around_drafts == pytest.approx(2.5e-3 / 2, rel=0.01), "of one, half is believed"
    assert costs.steps_with(7, 0, 4)[4] == pytest.approx(before + 2.5e-3 / 2, rel=0.05)
    assert costs.plain(8) == pytest.approx(1e-3)  # the slow ones were a draft's
    costs.meet(Crowd(1, 1))
    assert costs.around_drafts == 0.0, "alone it was not seen"


def test_drafts_in_a_row_share_what_is_lost_around_them():
    costs, step = watched("cuda")
    step(2)
    for _ in range(5):
        step(2, drafted=4)
    for taken in (2.5, 1, 1, 1):
        step(taken)
    costs._forget_predictions()
    assert costs.around_drafts == pytest.approx(0.5e-3 / 2, rel=0.01)


def test_steady_drafts_do_not_become_what_plain_steps_usually_take():
    costs, step = watched("cuda")
    for _ in range(60):
        step(2, drafted=4)
        for taken in (2.5, 1, 2):  # behind a draft, and before the next
            step(taken)
    costs._forget_predictions()
    assert costs.plain(8) == pytest.approx(1e-3) and costs.around_drafts > 1.5e-3


def test_what_is_lost_around_drafts_is_not_taken_from_a_draft_models_time():
    costs, _ = watched("cuda")
    costs.observe_around(3e-3)
    costs.observe_around(3e-3)
    usual = costs._predict(12, 1)
    for _ in range(8):
        costs.observe(12, 1, 3, usual + 3 * 4e-4)
    assert costs.draft_forward() == pytest.approx(4e-4, rel=0.1)


def test_one_hiccup_is_worth_a_few_steps():
    costs, _ = watched("cpu")
    costs.at_once = 16
    assert costs.beyond_usual(8, 16, 1.0) <= 4e-3


def test_what_is_lost_goes_by_how_many_there_are():
    costs, _ = watched("cpu")
    costs.observe_around(2e-3)
    costs._forget_predictions()
    assert costs.around_drafts == pytest.approx(1e-3)
    costs.meet(Crowd(1, 1))
    assert costs.around_drafts == 0.0 and costs.steps_with(0, 0, 4)[4] < 1.5e-3


def test_what_was_lost_around_drafts_is_forgotten_after_a_while():
    costs, step = watched("cuda")
    for taken, drafted in [(3, 0), (2, 4), *[(1, 0)] * 4]:
        step(taken, drafted)
    costs._forget_predictions()
    assert costs.around_drafts > 0
    for _ in range(costs_file.STALE + 8):
        step(1)
    assert costs.around_drafts == 0.0


@pytest.mark.parametrize("reading", [0, 24])
def test_steps_of_many_sizes_are_those_of_each(reading):
    """What a batch plans with is found for hundreds of sizes at once."""
    costs = StepCosts("cuda")
    costs.curve = {1: 8e-4, 8: 9e-4, 32: 1e-3, 128: 2e-3}
    costs.meet(Crowd(8, 8))
    for step in range(40):
        costs.observe(8, 0, 0, 1.1e-3)
        costs.observe((9, 40, 41)[step % 3], 1 + step % 2, 0, 2e-3 + 1e-5 * step)
    costs.observe_around(3e-4)
    costs.observe_prompts(reading)
    costs.observe_prompts(reading)
    many = costs.judged_steps(300)
    one = [costs._beside_prompts(max(1, n), 1) - costs.each_more for n in range(301)]
    assert many == pytest.approx(one, rel=1e-12) and len(many) == 301
