"""`forerun show`: which port it takes, and when the browser opens."""

import http.server
import socket
import threading

import pytest

pytest.importorskip("fastapi", reason="the page needs forerun[serve]")

from forerun.cli import show
from tests.helpers import run


@pytest.fixture
def started(monkeypatch):
    """What would have been served and opened."""
    calls = []
    monkeypatch.setattr("forerun.serve.run.run", lambda *given: calls.append(given) or 0)
    monkeypatch.setattr(show, "open_when_ready", calls.append)
    return calls


def test_it_serves_the_page_on_this_machine_only(started):
    said = run("show", "zoo:ar", "--port", "8765", "--no-browser")
    assert said.exit_code == 0 and said.stdout == "http://127.0.0.1:8765/\n"
    [(settings, host, port, routers)] = started
    assert (settings.models, host, port) == (["zoo:ar"], "127.0.0.1", 8765)
    assert settings.chat_template == "plain"
    paths = {route.path for router in routers for route in router.routes}
    assert {"/", "/page/run", "/page/about"} <= paths


def test_it_opens_the_browser_unless_told_not_to(started):
    run("show", "--port", "8765")
    assert "http://127.0.0.1:8765/" in started


def test_a_port_that_is_taken_is_left_alone(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(show, "USUAL_PORT", taken.getsockname()[1])
        assert show.free_port() not in (0, taken.getsockname()[1])


def test_the_browser_opens_once_the_server_answers(monkeypatch):
    opened = []
    monkeypatch.setattr(show.webbrowser, "open", opened.append)

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        show.open_when_ready(address)
        server.shutdown()
    assert opened == [address]
    monkeypatch.setattr(show, "LONGEST_START", 0.3)
    show.open_when_ready(address)  # nobody answers any more: it gives up
    assert opened == [address]
