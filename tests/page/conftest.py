"""A server with the embedded models, and a real browser that looks at its page."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "httpx")
if not all(find_spec(name) for name in NEEDED):  # of the extra `serve`, and for its tests
    collect_ignore_glob = ["test_*.py"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass(frozen=True)
class Site:
    """A page that is being served, and the server behind it."""

    address: str
    server: Any

    def engine(self, name):
        return self.server.models.served(name).model.engine

    def settled(self, name, seconds=10):
        """Wait until no lane of a model is taken."""
        engine = self.engine(name)
        deadline = time.monotonic() + seconds
        while engine.busy and time.monotonic() < deadline:
            time.sleep(0.005)
        return len(engine.free_lanes) == engine.lanes


@pytest.fixture(scope="module")
def site():
    import uvicorn

    from forerun.page.routes import page_routers
    from forerun.serve.app import create_app
    from forerun.serve.server import Server
    from forerun.serve.settings import Settings

    settings = Settings(chat_template="plain", lanes=8, grace=1.0)
    server = Server.of(settings)
    config = uvicorn.Config(
        create_app(settings, page_routers(), server), port=0, log_config=None, access_log=False
    )
    process = uvicorn.Server(config)
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    while not process.started:
        time.sleep(0.01)
    [listener] = process.servers[0].sockets
    yield Site(f"http://127.0.0.1:{listener.getsockname()[1]}", server)
    process.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")  # while it is there, an event loop runs in this thread
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Watched:
    """A browser page of which everything that should not happen is noted."""

    def __init__(self, page, address):
        self.page = page
        self.address = address
        self.wrong: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", self._request)
        page.set_default_timeout(60_000)

    def _console(self, message):
        if message.type in ("error", "warning"):
            self.wrong.append(f"console: {message.text}")

    def _dialog(self, dialog):
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request):
        inside = (self.address, "data:", f"blob:{self.address}", "file:", "blob:null")
        if not request.url.startswith(inside):
            self.wrong.append(f"left the origin: {request.url}")

    def open(self, tab="watch"):
        self.page.goto(f"{self.address}/#{tab}")
        self.page.wait_for_selector(f"#panel-{tab} h2")
        return self.page


@pytest.fixture
def watched(browser, site):  # without a browser no server is started
    context = browser.new_context(accept_downloads=True, viewport={"width": 920, "height": 800})
    one = Watched(context.new_page(), site.address)
    yield one
    context.close()
    assert one.wrong == []


@pytest.fixture
def page(watched):
    return watched.page


@pytest.fixture
def picture(request):
    """Saves what a page shows for the documentation, if a folder for it is named."""

    def save(page, name):
        folder = request.config.getoption("--screenshots")
        if folder:
            page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)

    return save
