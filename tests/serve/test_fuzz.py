"""A part of the requests that nobody would send; `python -m tests.serve.fuzz` sends many more."""

from tests.serve.fuzz import fuzz


def test_nothing_that_is_sent_makes_the_server_fail():
    statuses, failures = fuzz(200, seed=1)
    assert not failures
    assert statuses[200] > 20 and statuses[400] > 20
