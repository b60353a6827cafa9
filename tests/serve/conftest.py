"""Servers of tiny models: one behind a socket for all tests of a process, and as many as are wanted
in this process."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "httpx", "openai")
if not all(find_spec(name) for name in NEEDED):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="package")
def live():
    from tests.serve.servers import Live, local_server

    with Live(local_server()) as running:
        yield running
