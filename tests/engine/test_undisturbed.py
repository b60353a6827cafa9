"""While an engine works, the garbage collector looks at what is new, and at the rest afterwards."""

import gc
import weakref

import pytest

from forerun.engine.undisturbed import Undisturbed, undisturbed
from tests.helpers import PROMPTS, fresh, stepped


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen():
    assert not gc.get_freeze_count()
    yield
    assert not gc.get_freeze_count()


def test_what_exists_is_put_aside_while_somebody_works():
    m = stepped(fresh(lanes=2))
    held = Cycle()
    old = weakref.ref(held)
    jobs = m.submit(PROMPTS[:2], max_tokens=6, ignore_eos=True)
    assert gc.get_freeze_count() > 10_000
    del held
    new = weakref.ref(Cycle())
    m.engine.step()
    gc.collect()
    assert old() is not None and new() is None
    m.engine.run()
    assert all(len(result.token_ids) == 6 for result in jobs.results())
    gc.collect()
    assert old() is None


def test_of_several_engines_the_last_one_takes_it_back():
    first, second = (stepped(fresh(lanes=1)) for _ in range(2))
    first.submit(PROMPTS[0], max_tokens=3, ignore_eos=True)
    queued = second.submit(PROMPTS[1], max_tokens=3, ignore_eos=True)
    first.engine.run()
    assert gc.get_freeze_count()
    queued.cancel()
    assert not gc.get_freeze_count()


def test_a_request_that_fails_takes_it_back_too():
    m = stepped(fresh(lanes=1))
    m.submit(PROMPTS[0], max_tokens=3)
    m.engine.fail_all(RuntimeError("broken"))
    assert not gc.get_freeze_count() and not undisturbed._at_work


def test_what_others_have_put_aside_stays_there():
    counted = Undisturbed()
    gc.freeze()
    try:
        counted.begin()
        counted.end()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
