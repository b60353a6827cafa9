"""While an engine's thread works, the garbage collector looks at what is new, and at the rest
afterwards."""

import gc
import time
import weakref

import pytest

from forerun.engine.undisturbed import Undisturbed, undisturbed
from tests.helpers import PROMPTS, fresh


class Cycle:
    def __init__(self):
        self.itself = self


def soon(happens):
    """Does it, within a few seconds?"""
    until = time.monotonic() + 20
    while not happens() and time.monotonic() < until:
        time.sleep(0.005)
    return happens()


@pytest.fixture(autouse=True)
def nobody_works():
    assert soon(lambda: not undisturbed._at_work) and not gc.get_freeze_count()
    yield
    assert soon(lambda: not undisturbed._at_work) and not gc.get_freeze_count()


def working(m, prompt):
    """A request that runs until it is cancelled."""
    jobs = m.submit(prompt, method="ar", max_tokens=120, ignore_eos=True)
    assert soon(lambda: undisturbed._at_work and gc.get_freeze_count())
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
    assert soon(lambda: not gc.get_freeze_count())
    gc.collect()
    assert old() is None


def test_of_several_threads_the_last_one_takes_it_back():
    models = [slow(fresh(lanes=1)) for _ in range(2)]
    first, second = (working(m, prompt) for m, prompt in zip(models, PROMPTS))
    assert soon(lambda: undisturbed._at_work == 2)
    first.cancel()
    assert soon(lambda: undisturbed._at_work == 1) and gc.get_freeze_count()
    second.cancel()
    assert soon(lambda: not gc.get_freeze_count())


def test_a_model_that_is_closed_in_the_middle_takes_it_back():
    m = slow(fresh(lanes=1))
    working(m, PROMPTS[0])
    m.close()
    assert not gc.get_freeze_count() and not undisturbed._at_work


def test_what_others_have_put_aside_stays_there():
    counted = Undisturbed()
    gc.freeze()
    try:
        counted.begin()
        counted.end()
        counted.begin()
        counted.forget()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_a_process_that_is_forked_off_takes_it_back():
    counted = Undisturbed()
    counted.begin()
    assert gc.get_freeze_count()
    counted.forget()
    assert not gc.get_freeze_count() and not counted._at_work
