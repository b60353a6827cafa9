"""What takes long, run from the page: comparing methods and certifying them, with progress, until
whoever asked goes away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import Field

from forerun import registry
from forerun.api import Model
from forerun.errors import ForerunError, unknown
from forerun.evaluate.compare import ComparisonSettings, Contestant, contestants_for
from forerun.evaluate.compare import compare as run_in_turns
from forerun.evaluate.prompts import CODE
from forerun.requests.traces import Line
from forerun.serve.admission import Visit
from forerun.serve.models import Models, Served
from forerun.serve.orders import drafter_names
from forerun.serve.wire import Number, Seed, Wire

JUDGE = "zoo:ar"

Tell = Callable[[Line], None]  # raises `Gone` once nobody listens
Work = Callable[[Tell], None]


class Gone(Exception):
    """Nobody waits for the answer any more."""


class CompareRequest(Wire):
    """Methods side by side on one or more models."""

    models: list[str] = Field(min_length=1, max_length=6)
    methods: list[str] | None = Field(None, max_length=30)  # all that the models can run
    draft: str | None = None
    prompts: list[str] | None = Field(None, min_length=1, max_length=64)
    max_tokens: int = Field(32, ge=1, le=1024)
    temperature: Number = 0.0
    rounds: int = Field(1, ge=1, le=10)
    seed: Seed = 0


class CertifyRequest(Wire):
    """A method: on a model by a test, without one by enumeration."""

    method: str
    model: str | None = None
    draft: str | None = None
    temperature: Number = 1.0
    max_tokens: int = Field(32, ge=1, le=256)
    max_sequences: int = Field(400, ge=1, le=2000)
    seed: Seed = 0


class Studied:
    """The models of a study, from when it is asked for to when nobody waits for it any more.

    It has a place at their gates, so that none is unloaded meanwhile, and engines of its own, so
    that closing them ends it at once and it disturbs no other request."""

    def __init__(self, models: Models, client: str):
        self.models = models
        self.client = client
        self.closed = threading.Event()
        self._visits: dict[Served, Visit] = {}
        self._twins: dict[Served, Model] = {}

    async def model(self, name: str) -> Model:
        served, model = await self.models.loaded(name)
        if served not in self._twins:
            self._visits[served] = await served.gate.enter(self.client)
            self._twins[served] = model.twin(model.lanes)
        return self._twins[served]

    async def draft(self, name: str | None) -> str | Model | None:
        """A draft is a drafter, or a model that is served here: never a file."""
        if name is None or name in drafter_names():
            return name
        if name not in self.models.ids:
            raise unknown("draft", name, [*drafter_names(), *self.models.ids])
        return await self.model(name)

    def close(self) -> None:
        """Give the places back, and end the work at its next word."""
        self.closed.set()
        for twin in self._twins.values():
            threading.Thread(target=twin.close).start()  # it waits for the step that runs
        self._twins.clear()
        while self._visits:
            served, visit = self._visits.popitem()
            served.gate.leave(visit)


async def study(studied: Studied, work: Work) -> AsyncIterator[list[Line]]:
    """Run some work in a thread, and pass on what it tells. When nobody listens any more, its next
    word ends it."""
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[Line | None] = asyncio.Queue()

    def tell(line: Line | None) -> None:
        if studied.closed.is_set():
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
        studied.close()


async def compare(studied: Studied, request: CompareRequest) -> Work:
    """The work of a comparison, its models loaded."""
    models = [await studied.model(name) for name in request.models]
    draft = await studied.draft(request.draft)
    judge = await studied.model(JUDGE) if JUDGE in studied.models.ids else None
    contestants: list[Contestant] = []
    for model in models:
        contestants += contestants_for(model, _methods_on(model, request), draft)
    return lambda tell: _compare(contestants, judge, request, tell)


def _compare(
    contestants: Sequence[Contestant], judge: Model | None, request: CompareRequest, tell: Tell
) -> None:
    from forerun.profile.machine import machine

    settings = ComparisonSettings(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        rounds=request.rounds,
        seed=request.seed,
    )
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
    if request.methods is None or len(request.models) == 1:
        return request.methods
    return [n for n in request.methods if registry.method_named(n).runs_on(model.family)]


async def certify(studied: Studied, request: CertifyRequest) -> Work:
    """The work of a certification, its model loaded."""
    if request.model is None:
        return lambda tell: _enumerate(request.method, tell)
    model = await studied.model(request.model)
    draft = await studied.draft(request.draft)
    return lambda tell: _test(model, draft, request, tell)


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


def _test(model: Model, draft: str | Model | None, request: CertifyRequest, tell: Tell) -> None:
    from forerun.certify.testing import certify

    def report(verdict: Any) -> None:
        tell({"kind": "evidence", **asdict(verdict)})

    verdict = certify(
        model,
        request.method,
        draft=draft,
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        max_sequences=request.max_sequences,
        seed=request.seed,
        progress=report,
    )
    tell({"kind": "verdict", **asdict(verdict)})
