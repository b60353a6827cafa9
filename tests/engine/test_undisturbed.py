"""While an engine's thread works, the garbage collector looks at what is new, and at the rest
afterwards."""

import gc
import time
import weakref

import pytest

from forerun.engine.undisturbed import PYTHONS_OWN, Undisturbed, undisturbed
from tests.helpers import PROMPTS, fresh


class Cycle:
    def __init__(self):
        self.itself = self


def put_aside():
    """Is more put aside than what Python itself did?"""
    return gc.get_freeze_count() > PYTHONS_OWN


def soon(happens):
    """Does it, within a few seconds?"""
    until = time.monotonic() + 20
    while not happens() and time.monotonic() < until:
        time.sleep(0.005)
    return happens()


@pytest.fixture(autouse=True)
def nobody_works():
    assert soon(lambda: not undisturbed._at_work) and not put_aside()
    yield
    assert soon(lambda: not undisturbed._at_work) and not put_aside()


def working(m, prompt):
    """A request that runs until it is cancelled."""
    jobs = m.submit(prompt, method="ar", max_tokens=120, ignore_eos=True)
    assert soon(lambda: undisturbed._at_work and put_aside())
    return jobs


def slow(m):
    """Its thread takes a step in a few milliseconds."""
    step = m.engine.step
    m.engine.step = lambda: (time.sleep(0.01), step())
    return m


def test_what_exists_is_put_aside_while_somebody_works():
    m = slow(fresh(lanes=1))
    held = Cycle()
    old = weakref.ref(held)
    jobs = working(m, PROMPTS[0])
    assert gc.get_freeze_count() > 10_000
    del held
    new = weakref.ref(Cycle())
    gc.collect()
    assert old() is not None and new() is None
    jobs.cancel()
    assert soon(lambda: not put_aside())
    gc.collect()
    assert old() is None


def test_of_several_threads_the_last_one_takes_it_back():
    models = [slow(fresh(lanes=1)) for _ in range(2)]
    first, second = (working(m, prompt) for m, prompt in zip(models, PROMPTS))
    assert soon(lambda: undisturbed._at_work == 2)
    first.cancel()
    assert soon(lambda: undisturbed._at_work == 1) and put_aside()
    second.cancel()
    assert soon(lambda: not put_aside())


def test_a_model_that_is_closed_in_the_middle_takes_it_back():
    m = slow(fresh(lanes=1))
    working(m, PROMPTS[0])
    m.close()
    assert not put_aside() and not undisturbed._at_work


def test_what_others_have_put_aside_stays_there():
    counted = Undisturbed()
    gc.freeze()
    try:
        counted.begin()
        counted.end()
        counted.begin()
        counted.forget()
        assert put_aside()
    finally:
        gc.unfreeze()


def test_the_few_that_python_has_put_aside_when_it_starts_change_nothing(monkeypatch):
    """375 in Python 3.12, which for a while kept full collections in the midst of steps."""
    counted = Undisturbed()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    counted.begin()
    monkeypatch.undo()
    assert put_aside()
    counted.end()
    assert not put_aside()


def test_a_process_that_is_forked_off_takes_it_back():
    counted = Undisturbed()
    counted.begin()
    assert put_aside()
    counted.forget()
    assert not put_aside() and not counted._at_work
