"""A request from its admission to its end: where HTTP meets the engine.

`Decodings.start` waits for a place, has the engine begin, and returns a `Decoding`. Iterating over
that yields text, and trace events where they were asked for, in the order in which they came.
Closing it cancels what is left: the lane is free before the engine's next step.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from forerun.api import Model
from forerun.requests.jobs import Job, Jobs
from forerun.requests.result import Result
from forerun.requests.traces import commit_line, with_texts
from forerun.sequence.trace import Event
from forerun.serve.admission import Visit
from forerun.serve.errors import unavailable
from forerun.serve.models import Models, Served
from forerun.serve.settings import Settings
from forerun.serve.traces import Traces

if TYPE_CHECKING:  # what is here runs without HTTP, and without what only HTTP needs
    from forerun.serve.metrics import Metrics

log = logging.getLogger("forerun.serve")

# Results of so few sequences and tokens, of all together, are made in about a millisecond.
QUICK_SEQUENCES = 4
QUICK_TOKENS = 512


class Wishes(Protocol):
    """What a request may say of ours."""

    @property
    def draft(self) -> str | None: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def deadline(self) -> float | None: ...

    @property
    def priority(self) -> int: ...

    @property
    def trace(self) -> bool | str: ...


@dataclass(frozen=True)
class PlainWishes:
    draft: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    deadline: float | None = None  # seconds
    priority: int = 0
    trace: bool | str = False


@dataclass(frozen=True)
class Ask:
    """A request, as far as admission and delivery need to know it.

    `submit` is called in a thread: it may tokenise, or load a draft model.
    """

    submit: Callable[[Model], Jobs]
    model: str | None = None
    sequences: int = 1
    client: str = ""
    kind: str = "cmpl"  # what the answer's id begins with
    extension: Wishes = field(default_factory=PlainWishes)


@dataclass(slots=True)
class Text:
    """A piece of the text of a sequence."""

    index: int
    text: str


@dataclass(slots=True)
class Traced:
    """An event of the trace of a sequence."""

    index: int
    event: Event


@dataclass(eq=False)
class Decoding:
    """A request that runs. `id` is what its answer is called."""

    id: str
    served: Served
    model: Model
    ask: Ask
    jobs: Jobs
    visit: Visit
    owner: Decodings
    arrived: float  # on the clock of time.monotonic
    waited: float  # seconds, before the engine knew of it
    created: int = field(default_factory=lambda: int(time.time()))
    ended_by: str | None = None  # 'deadline' or 'shutdown', if one of them ended it
    _timer: asyncio.TimerHandle | None = None
    _closed: bool = False
    _counted: bool = False
    _last_piece: dict[int, float] = field(default_factory=dict)

    async def __aiter__(self) -> AsyncIterator[Text | Traced]:
        """What comes, until all is over."""
        async for burst in self.bursts():
            for item in burst:
                yield item

    async def bursts(self) -> AsyncIterator[list[Text | Traced]]:
        """What comes, as much at a time as there is. A sequence's text of several steps of the
        engine is one piece, unless events came between."""
        async for burst in self.jobs.bursts():
            told: list[Text | Traced] = []
            pieces: dict[int, Text] = {}  # that may still grow
            for index, piece in burst:
                if isinstance(piece, Event):
                    told.append(Traced(index, piece))
                    pieces.pop(index, None)
                elif index in pieces:
                    pieces[index].text += piece
                else:
                    pieces[index] = Text(index, piece)
                    told.append(pieces[index])
            self._time_pieces(told)
            yield told

    def _time_pieces(self, told: list[Text | Traced]) -> None:
        now = time.monotonic()
        for item in told:
            if isinstance(item, Text):
                self._time_piece(item.index, now)

    def _time_piece(self, index: int, now: float) -> None:
        metrics = self.owner.metrics
        last = self._last_piece.get(index)
        if last is None:
            metrics.first_token.labels(self.served.id).observe(now - self.arrived)
        else:
            metrics.between.note(self.served.id, now - last)
        self._last_piece[index] = now

    async def results(self) -> list[list[Result]]:
        """The results of each prompt, once all is over."""
        async for _ in self.jobs:
            pass
        if self._results_are_quick():
            results = self._results()
        else:
            results = await asyncio.to_thread(self._results)
        self._counted = True
        self.owner.count(self, results)
        return results

    def _results_are_quick(self) -> bool:
        """Do they take less time than a thread that makes them takes from the others? Texts of many
        tokens, with their log-probabilities, do not."""
        scored = any(request.scoring is not None for request in self.jobs.requests)
        logprobs = any(job.seq.logprobs.wanted for job in self.sequences())
        extras = scored or logprobs or bool(self.ask.extension.trace)
        few = len(self.jobs) <= QUICK_SEQUENCES and self.jobs.tokens <= QUICK_TOKENS
        return few and not extras

    def _results(self) -> list[list[Result]]:
        results = [list(group) for group in self.jobs.results_by_request()]
        if self.ask.extension.trace:
            flat = [result for group in results for result in group]
            self.owner.traces.keep(self.id, self.ask.client, self.model, flat)
        return results

    def tokens_so_far(self) -> tuple[int, int]:
        """Tokens read and written up to now; a prompt counts once."""
        prompts = sum(len(request.jobs[0].prompt) for request in self.jobs.requests if request.jobs)
        return prompts, self.jobs.tokens

    def told(self, traced: Traced) -> dict[str, Any]:
        """A line of a trace: the one that `/v1/traces` keeps."""
        decode = partial(self.model.decode, special=True)
        return with_texts(commit_line(traced.event), traced.index, decode)

    def sequences(self) -> list[Job]:
        return [job for job in self.jobs.jobs if isinstance(job, Job)]

    def end(self, why: str) -> None:
        """Stop decoding; what is there is the answer."""
        self.ended_by = self.ended_by or why
        self.jobs.cancel()

    def close(self) -> None:
        """Cancel what is left and give the place to the next. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.jobs.cancel()
        self.owner.ended(self)

    def reason(self, result: Result) -> str:
        """How a sequence ended: as its result says, or what ended it from outside."""
        if result.finish_reason == "cancelled" and self.ended_by is not None:
            return self.ended_by
        return result.finish_reason


class Load:
    """How busy a model is, for the gauges."""

    def __init__(self, served: Served, owner: Decodings):
        self._served = served
        self._owner = owner
        self.id = served.id

    def _jobs(self) -> list[Job]:
        running = [each for each in self._owner.running if each.served is self._served]
        return [job for each in running for job in each.sequences() if not job.over]

    @property
    def running(self) -> int:
        return sum(job.ticket.started is not None for job in self._jobs())

    @property
    def waiting(self) -> int:
        queued = sum(job.ticket.started is None for job in self._jobs())
        return len(self._served.gate.waiting) + queued

    @property
    def busy_lanes(self) -> int:
        model = self._served.model
        return 0 if model is None else model.lanes - len(model.engine.free_lanes)

    @property
    def cache_use(self) -> float:
        model = self._served.model
        return 0.0 if model is None else model.engine.page_use

    @property
    def prefix_hit_rate(self) -> float:
        model = self._served.model
        return 0.0 if model is None else model.engine.prefix_hit_rate

    @property
    def restarts(self) -> int:
        return self._served.restarts


class Decodings:
    """All requests of a server that are being decoded."""

    def __init__(self, models: Models, settings: Settings, metrics: Metrics):
        self.models = models
        self.settings = settings
        self.metrics = metrics
        self.traces = Traces(settings.traces)
        self.running: set[Decoding] = set()
        self.draining = False
        metrics.watch([Load(served, self) for served in models])

    async def start(self, ask: Ask) -> Decoding:
        """Wait for a place, and begin. Whoever gets a decoding must close it."""
        if self.draining:
            raise unavailable("this server is shutting down.", "shutting_down")
        arrived = time.monotonic()
        served, model = await self.models.loaded(ask.model)
        asked = ask.extension
        deadline = min(filter(None, (asked.deadline, self.settings.deadline)), default=None)
        visit = await served.gate.enter(ask.client, ask.sequences, asked.priority, deadline)
        try:
            jobs = await in_thread_or_not_at_all(partial(ask.submit, model))
        except BaseException as error:
            served.gate.leave(visit)
            self.models.note(served, model, error)
            raise
        id = f"{ask.kind}-{secrets.token_hex(16)}"
        waited = time.monotonic() - arrived
        decoding = Decoding(id, served, model, ask, jobs, visit, self, arrived, waited)
        self.running.add(decoding)
        self._log_prompts(decoding)
        loop = asyncio.get_running_loop()
        # Who reads slowly keeps nobody else waiting: the place is free when the lanes are.
        jobs.when_over(partial(soon, loop, partial(served.gate.leave, visit)))
        if deadline is not None:
            left = max(0.0, deadline - (time.monotonic() - arrived))
            decoding._timer = loop.call_later(left, decoding.end, "deadline")
        return decoding

    def _log_prompts(self, decoding: Decoding) -> None:
        if self.settings.log_prompts:
            prompts = [decoding.model.decode(job.prompt, True) for job in decoding.sequences()]
            log.info("prompts", extra={"told": {"id": decoding.id, "prompts": prompts}})

    def ended(self, decoding: Decoding) -> None:
        self.running.discard(decoding)
        decoding.served.gate.leave(decoding.visit)
        if not decoding._counted:  # nobody waited for the end
            left = self.metrics.finished.labels(decoding.served.id, "abort")
            left.inc(len(decoding.sequences()))
        took = time.monotonic() - decoding.arrived
        self.metrics.end_to_end.labels(decoding.served.id).observe(took)
        prompt_tokens, tokens = decoding.tokens_so_far()
        told = {
            "id": decoding.id,
            "model": decoding.served.id,
            "prompt_tokens": prompt_tokens,
            "tokens": tokens,
            "queue_seconds": round(decoding.waited, 4),
            "seconds": round(took, 4),
            "ended": decoding.ended_by or ("done" if decoding._counted else "client gone"),
        }
        log.info("decoded", extra={"told": told})

    def count(self, decoding: Decoding, results: list[list[Result]]) -> None:
        """Count results, and look after an engine that has failed."""
        flat = [result for group in results for result in group]
        for result in flat:
            self.metrics.ended(decoding, result)
            if result.error is not None:
                self.models.note(decoding.served, decoding.model, result.error)

    def drain(self) -> None:
        """Begin no request any more."""
        self.draining = True
        for served in self.models:
            served.gate.close()

    def end_all(self) -> None:
        """Return what is there."""
        for decoding in list(self.running):
            decoding.end("shutdown")


def soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call something in an event loop, from any thread."""
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(call)


async def in_thread_or_not_at_all(submit: Callable[[], Jobs]) -> Jobs:
    """Run what may take long in a thread. If nobody waits for it any more, its jobs are
    cancelled."""
    work = asyncio.get_running_loop().run_in_executor(None, submit)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_cancel_jobs)
        raise


def _cancel_jobs(work: asyncio.Future[Jobs]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().cancel()


def first_error(results: list[list[Result]]) -> Exception | None:
    """The first error of some results."""
    errors = (result.error for group in results for result in group)
    return next((error for error in errors if error is not None), None)
