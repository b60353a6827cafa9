"""`forerun serve`: models over HTTP."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from forerun.cli.common import need
from forerun.cli.flags import Device, Draft, Dtype, MethodName, Quantize, takes_flags
from forerun.errors import BadOption, unknown

app = typer.Typer(add_completion=False)

KEY_VARIABLE = "FORERUN_API_KEY"


@dataclass(frozen=True)
class ServeFlags:
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models to serve: as for generate, or ID=NAME to serve NAME as ID; without any, "
            "the embedded ones."
        ),
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000
    method: MethodName = None
    draft: Draft = None
    device: Device = None
    dtype: Dtype = None
    quantize: Quantize = None
    lanes: Annotated[int | None, typer.Option(help="Sequences of a model decoded at once.")] = None
    max_context: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output together.")
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(help="For models without one: a Jinja file, or 'plain', which adds nothing."),
    ] = None
    memory: Annotated[
        float | None, typer.Option(help="GiB that all loaded models may take; unused ones go.")
    ] = None
    cache: Annotated[
        float | None,
        typer.Option(help="GiB of keys and values of a model, which its lanes share in pages."),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Refuse requests without this key (repeat the flag); also from {KEY_VARIABLE}."
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(help="Origins whose pages may ask (repeat the flag); '*' for all."),
    ] = None
    queue: Annotated[int, typer.Option(help="Requests of a model that may wait.")] = 256
    deadline: Annotated[
        float | None, typer.Option(help="Seconds that a request may take at most.")
    ] = None
    grace: Annotated[
        float, typer.Option(help="Seconds that running requests have left at the end.")
    ] = 30.0
    max_body: Annotated[int, typer.Option(help="Bytes of a request.")] = 4 * 2**20
    traces: Annotated[int, typer.Option(help="Traces that are kept.")] = 256
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts to the log.")
    ] = False
    telemetry: Annotated[
        bool,
        typer.Option("--telemetry", help="OpenTelemetry, as its environment variables say."),
    ] = False


@app.command()
@takes_flags(ServeFlags)
def serve(flags: ServeFlags) -> None:
    """Serve models over HTTP, in OpenAI's interface, and a page at /."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        need(package)
    from forerun.page.routes import page_routers
    from forerun.serve.run import run
    from forerun.serve.settings import Settings

    keys = [*(flags.api_key or []), *filter(None, [os.environ.get(KEY_VARIABLE)])]
    settings = Settings(
        models=flags.models or [],
        method=flags.method,
        draft=flags.draft,
        device=flags.device,
        dtype=flags.dtype,
        quantize=flags.quantize,
        lanes=flags.lanes,
        max_context=flags.max_context,
        chat_template=flags.chat_template,
        memory_gib=flags.memory,
        cache_gib=flags.cache,
        api_keys=keys,
        cors=flags.cors or [],
        queue=flags.queue,
        deadline=flags.deadline,
        grace=flags.grace,
        max_body=flags.max_body,
        traces=flags.traces,
        log_prompts=flags.log_prompts,
        telemetry=flags.telemetry,
    )
    check(flags)
    raise typer.Exit(run(settings, flags.host, flags.port, page_routers()))


def check_source(name: str) -> None:
    """Refuse a model that cannot be there. It is loaded when it is first asked for, which would be
    late to learn of it."""
    from forerun import zoo
    from forerun.checkpoints.resolve import find

    kind, colon, embedded = name.partition(":")
    if kind == "zoo" and colon:
        if embedded not in zoo.shipped():
            raise unknown("model", name, [f"zoo:{each}" for each in zoo.shipped()])
    elif kind != "tiny":
        find(name)


def check(flags: ServeFlags) -> None:
    """Refuse what cannot be served, before anything listens."""
    from forerun import registry

    if flags.method is not None:
        registry.method_named(flags.method)
    for name in flags.models or []:
        check_source(name.partition("=")[2] or name)
    if flags.draft is not None and flags.draft not in registry.names("drafters"):
        check_source(flags.draft)
    if flags.chat_template not in (None, "plain") and not os.path.isfile(str(flags.chat_template)):
        raise BadOption(f"chat_template={flags.chat_template!r} is no file.")
