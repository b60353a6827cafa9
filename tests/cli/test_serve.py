"""`forerun serve` refuses what cannot be served, before anything listens."""

import socket

import pytest

pytest.importorskip("fastapi", reason="the server needs forerun[serve]")

from forerun.errors import BadOption, ForerunError
from forerun.serve.run import listening
from tests.helpers import run


@pytest.fixture
def started(monkeypatch):
    """What would have been served."""
    calls = []
    monkeypatch.setattr("forerun.serve.run.run", lambda *given: calls.append(given) or 0)
    return calls


@pytest.mark.parametrize(
    "words, said",
    [
        (["zoo:nothing"], "'zoo:nothing'"),
        (["code=/no/such/folder"], "'/no/such/folder'"),
        (["zoo:ar", "--draft", "zoo:drafer"], "zoo:drafter"),
        (["zoo:ar", "--method", "lookop"], "lookup"),
        (["zoo:ar", "--chat-template", "/no/such/file"], "is no file"),
        (["zoo:ar", "--queue", "0"], "queue"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(words, said, started):
    error = run("serve", *words).exception
    assert isinstance(error, ForerunError) and said in str(error)
    assert not started


def test_models_drafts_and_files_that_are_there_are_served(started):
    words = ["me=zoo:ar", "tiny", "--draft", "lookup", "--chat-template", "plain", "--port", "0"]
    assert run("serve", *words).exit_code == 0
    [(settings, host, port, _)] = started
    assert settings.models == ["me=zoo:ar", "tiny"] and (host, port) == ("127.0.0.1", 0)


def test_a_port_that_is_taken_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(BadOption, match=f"port={taken}.*--port"):
            listening("127.0.0.1", taken)
    with pytest.raises(BadOption, match="port=70000"):
        listening("127.0.0.1", 70000)
    with listening("127.0.0.1", 0) as free:
        assert free.getsockname()[1]
