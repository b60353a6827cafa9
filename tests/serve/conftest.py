"""Servers of tiny models: one behind a socket for all tests of a process, and as many as are wanted
in this process."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from tests.serve.servers import Live, local_server


@pytest.fixture(scope="package")
def live():
    with Live(local_server()) as running:
        yield running
