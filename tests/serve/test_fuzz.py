"""A part of the requests that nobody would send; `python -m tests.serve.fuzz` sends many more."""

import time

import pytest

from tests.serve import fuzz as fuzz_file
from tests.serve.fuzz import Stuck, fuzz
from tests.serve.servers import in_process, load, local_server


def test_nothing_that_is_sent_makes_the_server_fail():
    found = fuzz(200, seed=1)
    assert not found.failures
    assert found.statuses[200] > 20 and found.statuses[400] > 20


def test_a_server_that_does_not_answer_is_found_and_described(monkeypatch):
    def hanging(source, **settings):
        m = load(source, **settings)
        m.backbone.forward = lambda batch, slots: time.sleep(2)
        return m

    server = local_server(hanging)
    monkeypatch.setattr(fuzz_file, "in_process", lambda **_: in_process(server))
    with pytest.raises(Stuck) as caught:
        fuzz(200, seed=1, patience=0.5)
    told = str(caught.value)
    assert "the event loop turns" in told and "lanes free" in told and "in step" in told
