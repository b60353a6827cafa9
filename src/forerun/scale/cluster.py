"""Workers on a Ray cluster: Ray Data hands the parts to actors, and does again what a lost one had.

Ray is imported inside functions only: everything else works without it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forerun import __version__, errors
from forerun.errors import BadOption, ForerunError
from forerun.options import check_whole
from forerun.scale.work import Answered, Part, Worker, WorkerPlan, WorkersLost

LOCAL = "local"  # instead of an address: a cluster of this machine, for as long as the command runs
AUTO = "auto"  # the cluster that this machine belongs to
ANSWERS_WITHIN = 5.0  # seconds
MOST_RESTARTS = 4  # of a worker, and of a part
DEFAULT_PORT = 6379


def connect(address: str, *, cpus: int | None = None) -> None:
    """Join a cluster, or say in a line why not. `cpus` is what a local one may use."""
    try:
        import ray
    except ModuleNotFoundError:
        raise BadOption("--ray needs Ray: pip install 'forerun[ray]'.") from None
    if ray.is_initialized():
        return
    # a worker is no child of this command, so what it prints is not for this terminal
    quiet: dict[str, Any] = dict(log_to_driver=False, logging_level="ERROR")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if address == LOCAL:
        ray.init(num_cpus=cpus, include_dashboard=False, **quiet)
        return
    _check_answers(address)
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise BadOption(
            f"--ray {address}: the cluster cannot be joined: {first} (where it asks for a token, "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN)"
        ) from error
    check_nodes()


def _check_answers(address: str) -> None:
    """Ray itself would try for a minute."""
    if address == AUTO:
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        raise BadOption(
            f"--ray {address!r} must be HOST:PORT, ray://HOST:PORT, '{AUTO}' (the cluster of this "
            f"machine) or '{LOCAL}' (one that is started here)."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise BadOption(f"--ray {address}: nothing answers there ({error}).") from None


def check_nodes() -> None:
    """Refuse a cluster on which a node has no Forerun, or another one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def version_there() -> str | None:  # travels as it stands: the other side may have no Forerun
        try:
            import forerun

            return str(forerun.__version__)
        except ImportError:
            return None

    probe = ray.remote(num_cpus=0, max_retries=0)(version_there)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = [
        probe.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    ]
    for node, version in zip(nodes, ray.get(found), strict=True):
        if version != __version__:
            there = "no forerun" if version is None else f"forerun {version}"
            raise BadOption(
                f"--ray: node {node['NodeManagerAddress']} has {there}, and here is {__version__}: "
                f"install forerun[ray]=={__version__} on every node."
            )


def gpus_each(asked: float | None) -> float:
    """GPUs of a worker: as asked, else one where the cluster has any."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0) > 0) if asked is None else asked


@dataclass(frozen=True)
class RayPool:
    """Actors on the cluster that this process has joined, with a model each."""

    workers: int
    threads: int = 1  # of each
    gpus: float = 0.0  # of each; a fraction shares one

    def __post_init__(self) -> None:
        check_whole("workers", self.workers)
        check_whole("threads", self.threads)

    @classmethod
    def of(cls, workers: int | None, threads: int, gpus: float | None) -> RayPool:
        """As many workers as the cluster has GPUs, or else cores, unless told otherwise."""
        import ray

        has = ray.cluster_resources()
        each = gpus_each(gpus)
        kind, need = ("GPU", each) if each else ("CPU", float(threads))
        fit = int(has.get(kind, 0) / need)
        if fit < (workers or 1):
            raise BadOption(
                f"workers={workers or 1} with {need:g} {kind} each do not fit the cluster, which "
                f"has {has.get(kind, 0):g}: use fewer, or --gpus."
            )
        return cls(workers or fit, threads, each)

    def run(self, plan: WorkerPlan, parts: Iterable[Part]) -> Iterator[Answered]:
        import ray

        rows = [{"name": part.name, "value": json.dumps(part.value)} for part in parts]
        if not rows:
            return
        settings = ray.data.DataContext.get_current()
        settings.enable_progress_bars = False
        settings.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what matters is raised
        parts_there = ray.data.from_items(rows, override_num_blocks=len(rows))
        with warnings.catch_warnings():
            # `ray_remote_args_fn` goes away in 2.64 (see pyproject): until then nothing else limits
            # how often an actor is made anew
            warnings.simplefilter("ignore", DeprecationWarning)
            answers = parts_there.map_batches(
                RayWorker,
                fn_constructor_args=(plan, self.threads),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=min(self.workers, len(rows))),
                num_cpus=self.threads,
                num_gpus=self.gpus or None,
                ray_remote_args_fn=_limited,
            )
        try:
            for row in answers.iter_rows():
                yield _answered(row)
        except ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[0]
            raise WorkersLost(
                f"a worker was lost {MOST_RESTARTS} times with the same part, for want of memory "
                f"perhaps: {first}"
            ) from error


def _limited() -> dict[str, int]:
    """By default Ray Data would restart for ever a worker that memory has no room for."""
    return {"max_restarts": MOST_RESTARTS, "max_task_retries": MOST_RESTARTS}


class RayWorker:
    """An actor of Ray Data. Its model is loaded with the first part, so that an error of ours comes
    back as a line."""

    def __init__(self, plan: WorkerPlan, threads: int):
        import torch

        torch.set_num_threads(threads)
        self.plan = plan
        self.worker: Worker | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        [name] = batch["name"]
        [value] = batch["value"]
        told: dict[str, Any] = {}
        try:
            if self.worker is None:
                self.worker = self.plan.make()
            told["answer"] = self.worker(json.loads(value))
        except ForerunError as error:
            told["error"] = [type(error).__name__, str(error)]
        return {"name": [name], "told": [json.dumps(told)], "pid": [os.getpid()]}


def _answered(row: Mapping[str, Any]) -> Answered:
    told = json.loads(row["told"])
    if "error" in told:
        kind, words = told["error"]
        raise getattr(errors, kind, ForerunError)(words)
    return Answered(row["name"], told["answer"], int(row["pid"]))
