"""Flags of commands that several workers can share, and the workers that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from forerun.cli.common import stderr_console

if TYPE_CHECKING:
    from forerun.scale.work import Answered, Pool

RayAddress = Annotated[
    str | None,
    typer.Option(
        help="Share the work on this Ray cluster: HOST:PORT, 'auto' (this machine's), or 'local'.",
        metavar="ADDRESS",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(help="Processes that share the work; with --ray, actors. Default there: all."),
]
Threads = Annotated[int, typer.Option(help="With --workers or --ray: threads of each worker.")]
Gpus = Annotated[
    float | None, typer.Option(help="With --ray: GPUs of each worker; default 1 where there are.")
]


class Scaled(Protocol):
    """Flags that say who does the work."""

    @property
    def ray(self) -> str | None: ...
    @property
    def workers(self) -> int | None: ...
    @property
    def threads(self) -> int: ...
    @property
    def gpus(self) -> float | None: ...


@dataclass(frozen=True)
class ScaleFlags:
    ray: RayAddress = None
    workers: Workers = None
    threads: Threads = 1
    gpus: Gpus = None


def is_scaled(flags: Scaled) -> bool:
    return flags.ray is not None or flags.workers is not None


def make_pool(flags: Scaled) -> Pool:
    """The workers that flags ask for; a cluster is joined now."""
    from forerun.scale.local import LocalPool

    if flags.ray is None:
        return LocalPool(1 if flags.workers is None else flags.workers, flags.threads)
    from forerun.scale.cluster import RayPool, connect

    spare = 1  # for what Ray Data does besides
    connect(flags.ray, cpus=flags.workers and flags.workers * flags.threads + spare)
    return RayPool.of(flags.workers, flags.threads, flags.gpus)


@contextmanager
def parts_bar(what: str) -> Iterator[Callable[[Answered, int, int], None]]:
    """A line on standard error that counts parts."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}: {task.completed}/{task.total} parts"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr_console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda _, done, total: progress.update(task, completed=done, total=total)
