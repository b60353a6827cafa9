"""`forerun serve`: models over HTTP."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.common import need, stderr_console
from forerun.cli.flags import Device, Draft, Dtype, MethodName, Quantize, takes_flags
from forerun.cli.scaled import Gpus, RayAddress
from forerun.errors import BadOption, unknown

if TYPE_CHECKING:
    from forerun.serve.settings import Settings

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
    stream_interval: Annotated[
        float,
        typer.Option(help="Seconds between two pieces of a stream, if they come faster."),
    ] = 0.03
    max_body: Annotated[int, typer.Option(help="Bytes of a request.")] = 4 * 2**20
    traces: Annotated[int, typer.Option(help="Traces that are kept.")] = 256
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts to the log.")
    ] = False
    telemetry: Annotated[
        bool,
        typer.Option("--telemetry", help="OpenTelemetry, as its environment variables say."),
    ] = False
    ray: RayAddress = None
    replicas: Annotated[int, typer.Option(help="With --ray: servers, with a model each.")] = 1
    max_replicas: Annotated[
        int | None, typer.Option(help="With --ray: as many as this while requests queue up.")
    ] = None
    target: Annotated[
        float, typer.Option(help="With --ray: requests that each replica should have.")
    ] = 8.0
    gpus: Gpus = None
    name: Annotated[
        str, typer.Option(help="With --ray: given again, the same name replaces its replicas.")
    ] = "forerun"
    detach: Annotated[
        bool, typer.Option("--detach", help="With --ray: leave it there, and end.")
    ] = False
    stop: Annotated[bool, typer.Option("--stop", help="With --ray: end what has this name.")] = (
        False
    )


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
        stream_interval=flags.stream_interval,
        max_body=flags.max_body,
        traces=flags.traces,
        log_prompts=flags.log_prompts,
        telemetry=flags.telemetry,
    )
    check(flags)
    if flags.ray is not None:
        _serve_on_ray(flags, settings)
        return
    raise typer.Exit(run(settings, flags.host, flags.port, page_routers()))


def _serve_on_ray(flags: ServeFlags, settings: Settings) -> None:
    """Behind Ray Serve, until Ctrl-C."""
    from forerun.scale import serving
    from forerun.scale.cluster import connect, gpus_each

    most = flags.replicas if flags.max_replicas is None else flags.max_replicas
    replicas = serving.Replicas(flags.replicas, most, flags.target, flags.gpus or 0.0)
    connect(str(flags.ray), cpus=most + 1)  # one for Ray Serve itself
    if flags.stop:
        serving.stop(flags.name)
        return
    replicas = replace(replicas, gpus=gpus_each(flags.gpus))
    serving.deploy(settings, replicas, flags.name, flags.host, flags.port)
    stderr_console.print(f"serving on http://{flags.host}:{flags.port}", highlight=False)
    if flags.detach:
        return
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        serving.stop(flags.name)
        raise typer.Exit(130) from None


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
    here = flags.ray is None  # a node of a cluster may have what this machine has not
    for name in (flags.models or []) if here else []:
        check_source(name.partition("=")[2] or name)
    if here and flags.draft is not None and flags.draft not in registry.names("drafters"):
        check_source(flags.draft)
    if flags.chat_template not in (None, "plain") and not os.path.isfile(str(flags.chat_template)):
        raise BadOption(f"chat_template={flags.chat_template!r} is no file.")
