"""`forerun show`: the page, in a browser."""

from __future__ import annotations

import socket
import threading
import time
import webbrowser
from typing import Annotated
from urllib.error import URLError
from urllib.request import urlopen

import typer

from forerun.cli.common import need

HOST = "127.0.0.1"
USUAL_PORT = 8000
LONGEST_START = 60  # seconds
LOOK_EVERY = 0.2

app = typer.Typer(add_completion=False)


@app.command()
def show(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Models to show, as for serve; without any, the embedded ones."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help=f"Port to listen on; default: {USUAL_PORT}, or a free one.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in the browser.")
    ] = True,
) -> None:
    """Open a page that shows decoding as it happens.

    It is served on this machine only, until Ctrl-C.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        need(package)
    from forerun.page.routes import page_routers
    from forerun.serve.run import run
    from forerun.serve.settings import Settings

    chosen = port if port is not None else free_port()
    address = f"http://{HOST}:{chosen}/"
    typer.echo(address)
    if browser:
        threading.Thread(target=open_when_ready, args=(address,), daemon=True).start()
    # With the plain template one can chat with every model, though the embedded ones never saw one.
    settings = Settings(models=models or [], chat_template="plain", grace=1.0)
    raise typer.Exit(run(settings, HOST, chosen, page_routers()))


def free_port() -> int:
    """The usual port, or any if that is taken."""
    for port in (USUAL_PORT, 0):
        with socket.socket() as listener:
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
            return int(listener.getsockname()[1])
    raise OSError("no port is free")


def open_when_ready(address: str) -> None:
    """Open a page once it answers."""
    deadline = time.monotonic() + LONGEST_START
    while time.monotonic() < deadline:
        try:
            with urlopen(f"{address}ready", timeout=1):
                webbrowser.open(address)
                return
        except (URLError, OSError):
            time.sleep(LOOK_EVERY)
