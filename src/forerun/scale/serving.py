"""Our server behind Ray Serve: replicas of one application, with a model each.

Ray Serve listens, hands each request to the replica that has least to do, starts and ends
replicas with the number of requests, and replaces them a few at a time when the same name is
deployed again. A replica that is not well is replaced.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import Any

from forerun.errors import BadOption, ForerunError
from forerun.options import check_positive, check_whole
from forerun.serve.settings import Settings

DEPLOYMENT = "server"


@dataclass(frozen=True)
class Replicas:
    """How many, and when there are more or fewer."""

    least: int = 1
    most: int = 1
    target: float = 8.0  # requests, running or waiting, that each should have
    gpus: float = 0.0
    cpus: float = 1.0

    def __post_init__(self) -> None:
        check_whole("replicas", self.least)
        check_whole("max_replicas", self.most)
        check_positive("target", self.target)
        if self.most < self.least:
            raise BadOption(
                f"max_replicas={self.most} must not be less than replicas={self.least}."
            )

    def options(self, settings: Settings) -> dict[str, Any]:
        """As Ray Serve names it. Requests beyond lanes and queue wait in its own queue."""
        told: dict[str, Any] = {
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "max_ongoing_requests": settings.queue,
            "graceful_shutdown_timeout_s": settings.grace,
            "health_check_period_s": 2,
            "health_check_timeout_s": 30,
        }
        if self.most == self.least:
            return {**told, "num_replicas": self.least}
        scaling = {
            "min_replicas": self.least,
            "max_replicas": self.most,
            "initial_replicas": self.least,
            "target_ongoing_requests": self.target,
        }
        return {**told, "autoscaling_config": scaling}


class Replica:
    """One server: our application, whose models are loaded before it takes requests."""

    async def __init__(self, settings: Settings, generation: str):  # type: ignore[misc]
        from forerun.serve.middleware import log_to_stderr
        from forerun.serve.server import Server

        log_to_stderr()
        self.generation = generation  # another one makes Ray Serve replace its replicas
        self.settings = settings
        self.server = Server.of(settings)
        for id in self.server.models.ids:
            await self.server.models.loaded(id)

    def __serve_build_asgi_app__(self) -> Any:
        from forerun.serve.app import create_app

        return create_app(self.settings, (), self.server)

    async def check_health(self) -> None:
        """Ray Serve replaces a replica for which this fails."""
        failure = self.server.models.failure
        if failure is not None:
            raise RuntimeError(failure)


def deploy(settings: Settings, replicas: Replicas, name: str, host: str, port: int) -> None:
    """Have the cluster that this process has joined serve, and wait until it does. What has this
    name there already is replaced, some replicas at a time."""
    from ray import serve
    from ray.serve.config import HTTPOptions

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # one line is enough, and it is ours
    serve.start(http_options=HTTPOptions(host=host, port=port, location="EveryNode"))
    deployment = serve.deployment(serve.ingress()(Replica))
    made = deployment.options(name=DEPLOYMENT, **replicas.options(settings))
    is_new = name not in serve.status().applications
    try:
        serve.run(made.bind(settings, secrets.token_hex(8)), name=name, route_prefix="/")
    except RuntimeError as error:
        words = reason(serve.status().applications.get(name), str(error))
        if is_new:
            serve.delete(name)
        raise ForerunError(f"{name!r} cannot be served: {words}") from error


def reason(status: Any, otherwise: str) -> str:
    """What went wrong, in a line: the last of a traceback that names an error of ours."""
    words = otherwise
    if status is not None:
        told = [one.message for one in status.deployments.values() if one.message]
        words = "\n".join([status.message or "", *told]) or otherwise
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    ours = [line.partition("forerun.errors.")[2] for line in lines if "forerun.errors." in line]
    return (ours or lines or ["no reason was given."])[-1]


def stop(name: str) -> None:
    """End what is served by this name."""
    from ray import serve

    if name not in serve.status().applications:
        raise BadOption(f"name={name!r}: nothing of this name is served there.")
    serve.delete(name)
