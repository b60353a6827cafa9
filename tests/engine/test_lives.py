"""Isolation as a property of every method and family: a request ends as it does alone, whatever
its neighbours do. `make soak` runs the same for an hour."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from forerun import registry
from tests.engine import lives
from tests.engine.lives import PLUGINS, REQUESTS, World, requests_of

NUMBER = st.integers(0, 99)


class Life(RuleBasedStateMachine):
    """A random life of an engine."""

    kind = "llama"

    def __init__(self):
        super().__init__()
        self.world = World(self.kind)

    @rule(index=NUMBER, again=NUMBER)
    def submit_two(self, index, again):
        self.world.submit(index)
        self.world.submit(again)

    @rule(count=st.integers(1, 9))
    def step(self, count):
        self.world.step(count)

    @rule(which=NUMBER)
    def cancel(self, which):
        self.world.cancel(which)

    @rule(which=NUMBER)
    def interrupt(self, which):
        self.world.interrupt(which)

    @rule()
    def fail_a_forward(self):
        self.world.fail_a_forward()

    @rule(index=NUMBER, pieces=st.integers(0, 2))
    def abandon_a_stream(self, index, pieces):
        self.world.abandon_a_stream(index, pieces)

    @rule()
    def poison(self):
        self.world.poison()

    @rule()
    def outgrow(self):
        self.world.outgrow()

    @rule(bad=st.sampled_from(PLUGINS))
    def plug_in(self, bad):
        self.world.plug_in(bad)

    @invariant()
    def every_lane_is_somebodys_or_free(self):
        engine = self.world.engine
        lanes = sorted([*engine.free_lanes, *(one.lane for one in engine.running)])
        assert lanes == list(range(engine.lanes))

    @invariant()
    def every_page_is_counted(self):
        self.world.check_pages()

    def teardown(self):
        self.world.end()


def live(kind: str, examples: int, **changes) -> None:
    """So many random lives of one kind of model."""
    machine = type(f"Life_{kind}", (Life,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **changes,
        ),
    )


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_ends_as_it_does_alone(kind):
    live(kind, examples=5, derandomize=True, phases=[Phase.generate])


def test_every_method_has_a_life():
    lived = {how["method"] for kind in REQUESTS for how in requests_of(kind)}
    assert lived == set(registry.names("methods"))


@pytest.mark.parametrize("kind", ["llama", "masked"])
def test_a_request_that_knew_of_its_neighbours_would_be_found(kind, monkeypatch):
    """The comparison itself can fail: noise that depends on what else was drawn."""
    counter = iter(range(10**9))
    monkeypatch.setattr(
        "forerun.probability.noise.uniform", lambda *_: (next(counter) % 97 + 0.5) / 97
    )
    with pytest.raises(AssertionError, match="alone"):
        live(kind, examples=5, derandomize=True, phases=[Phase.generate])
    lives.TALLY.mismatches.clear()
