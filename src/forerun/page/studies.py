"""What takes long, run from the page: comparing methods and certifying them, with progress, until
whoever asked goes away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from forerun.api import Model
from forerun.errors import ForerunError
from forerun.page.models import Models
from forerun.requests.traces import Line

JUDGE = "zoo:ar"

Tell = Callable[[Line], None]  # raises `Gone` once nobody listens


class Gone(Exception):
    """Nobody waits for the answer any more."""


class CompareRequest(BaseModel):
    """Methods side by side on one or more models."""

    model_config = ConfigDict(extra="forbid")

    models: list[str] = Field(min_length=1, max_length=6)
    methods: list[str] | None = Field(None, max_length=30)  # all that the models can run
    draft: str | None = None
    prompts: list[str] | None = Field(None, min_length=1, max_length=64)
    max_tokens: int = Field(32, ge=1, le=1024)
    temperature: float = 0.0
    rounds: int = Field(1, ge=1, le=10)
    seed: int = 0


class CertifyRequest(BaseModel):
    """A method: on a model by a test, without one by enumeration."""

    model_config = ConfigDict(extra="forbid")

    method: str
    model: str | None = None
    draft: str | None = None
    temperature: float = 1.0
    max_tokens: int = Field(32, ge=1, le=256)
    max_sequences: int = Field(400, ge=1, le=2000)
    seed: int = 0


async def study(work: Callable[[Tell], None]) -> AsyncIterator[list[Line]]:
    """Run some work in a thread, and pass on what it tells. When nobody listens any more, its next
    word ends it."""
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[Line | None] = asyncio.Queue()
    gone = threading.Event()

    def tell(line: Line | None) -> None:
        if gone.is_set():
            raise Gone
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(told.put_nowait, line)

    def run() -> None:
        with suppress(Gone):
            try:
                work(tell)
            except ForerunError as error:
                tell({"kind": "error", "error": str(error)})
            tell(None)

    running = asyncio.ensure_future(asyncio.to_thread(run))
    running.add_done_callback(lambda _: told.put_nowait(None))  # whatever ended it
    try:
        while (line := await told.get()) is not None:
            yield [line]
        await running
    finally:
        gone.set()


async def compare(models: Models, request: CompareRequest) -> Callable[[Tell], None]:
    """The work of a comparison, its models loaded."""
    loaded = [await models.get(name) for name in request.models]
    judge = await models.get(JUDGE) if JUDGE in models.names() else None
    return lambda tell: _compare(loaded, judge, request, tell)


def _compare(
    models: Sequence[Model], judge: Model | None, request: CompareRequest, tell: Tell
) -> None:
    from forerun.evaluate.compare import ComparisonSettings, contestants_for
    from forerun.evaluate.compare import compare as run_in_turns
    from forerun.evaluate.prompts import CODE
    from forerun.profile.machine import machine

    settings = ComparisonSettings(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        rounds=request.rounds,
        seed=request.seed,
    )
    contestants = [
        one
        for model in models
        for one in contestants_for(model, _methods_on(model, request), request.draft)
    ]
    tell({"kind": "contestants", "names": [one.label for one in contestants]})
    rows = run_in_turns(
        contestants,
        request.prompts or list(CODE),
        settings,
        judge=judge,
        progress=lambda done, total: tell({"kind": "progress", "done": done, "total": total}),
    )
    facts = {"kind": "comparison", "machine": machine(), "judge": judge and judge.name}
    tell({**facts, "rows": [asdict(row) for row in rows]})


def _methods_on(model: Model, request: CompareRequest) -> list[str] | None:
    """Of several models each runs what it can."""
    from forerun import registry

    if request.methods is None or len(request.models) == 1:
        return request.methods
    return [n for n in request.methods if registry.method_named(n).runs_on(model.family)]


async def certify(models: Models, request: CertifyRequest) -> Callable[[Tell], None]:
    """The work of a certification, its model loaded."""
    if request.model is None:
        return lambda tell: _enumerate(request.method, tell)
    model = await models.get(request.model)
    return lambda tell: _test(model, request, tell)


def _enumerate(method: str, tell: Tell) -> None:
    from forerun.certify.cases import standard_cases
    from forerun.certify.enumeration import CERTAIN

    cases = standard_cases(method)
    found = []
    for done, case in enumerate(cases, 1):
        found.append(case())
        tell({"kind": "progress", "done": done, "total": len(cases)})
    tell(
        {
            "kind": "certificate",
            "method": method,
            "verdict": "holds" if all(one.holds for one in found) else "fails",
            "limit": CERTAIN,
            "cases": [asdict(one) for one in found],
        }
    )


def _test(model: Model, request: CertifyRequest, tell: Tell) -> None:
    from forerun.certify.testing import certify

    def report(verdict: Any) -> None:
        tell({"kind": "evidence", **asdict(verdict)})

    verdict = certify(
        model,
        request.method,
        draft=request.draft,
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        max_sequences=request.max_sequences,
        seed=request.seed,
        progress=report,
    )
    tell({"kind": "verdict", **asdict(verdict)})
