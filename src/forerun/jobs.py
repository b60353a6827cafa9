"""Requests on their way through the engine, and the results they become."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun import registry
from forerun.arguments import Wish
from forerun.core import BLANK, Canvas
from forerun.engine.serve import Engine, Questions, Ticket
from forerun.errors import ForerunError
from forerun.result import Result, stats_of
from forerun.sampling import History
from forerun.text import Writer

if TYPE_CHECKING:
    from forerun.api import Model


class Job:
    """One request: its canvas, its text so far, and its ticket in the engine."""

    def __init__(
        self,
        model: Model,
        wish: Wish,
        canvas: Sequence[int],
        sample: int,
        drafter: Any,
        text: bool = False,
        forbidden: frozenset[int] = frozenset(),
    ):
        self.model, self.how = model, wish.method
        self.prompt = [token for token in canvas if token != BLANK]
        sampling = wish.sampling
        self.stop_tokens = stop_tokens(model, wish)
        self.writer = Writer(model.decode, sampling.stop) if text or sampling.stop else None
        self.stopped_by: str | int | None = None
        history = History(sampling, np.asarray(self.prompt, np.int64), model.vocab, self.stop_tokens, forbidden)
        self.seq = Canvas(canvas, history=history, ending=self._ending, seed=sampling.seed, sample=sample)
        arguments = {f.name: getattr(wish.options, f.name) for f in fields(wish.options)}
        if drafter is not None:
            arguments["drafter"] = drafter
        self.ticket = Ticket(self.seq, lambda: self.how.run(self.seq, Questions(model.family, model.host), **arguments))

    def _ending(self, token: int) -> str | None:
        """Why the text ends with this token, if it does."""
        if token in self.stop_tokens:
            self.stopped_by = token
        if self.writer is not None:
            self.writer.push(token)
            self.stopped_by = self.stopped_by if self.stopped_by is not None else self.writer.stopped_by
        return "stop" if self.stopped_by is not None else None

    @property
    def shown(self) -> str:
        """The text that is certain and will not be taken back by a stop string; all of it once the request is over."""
        writer = self._whole_writer() if self.ticket.over else self.writer
        return writer.shown if writer is not None else ""

    def _whole_writer(self) -> Writer:
        if self.writer is None:
            self.writer = Writer(self.model.decode)
            self.writer.push_all(self.seq.output)
        self.writer.finish()
        return self.writer

    def result(self) -> Result:
        """The result; of a request that is not over yet, what there is by now, cancelled."""
        self.model.engine.cancel(self.ticket)
        ticket, seq, started = self.ticket, self.seq, self.ticket.started or self.ticket.ended or 0.0
        output = seq.output
        stats = stats_of(
            seq.trace,
            prompt_tokens=len(self.prompt),
            tokens=len(output),
            forwards=seq.forwards,
            draft_forwards=seq.draft_forwards,
            seconds=(ticket.ended or 0.0) - started,
            queued_seconds=started - ticket.submitted,
        )
        return Result(
            text=self._whole_writer().text,
            token_ids=output,
            finish_reason=seq.finish_reason or "cancelled",
            **promise(self.how, self.model.name),
            stats=stats,
            trace=seq.trace,
            prompt_ids=self.prompt,
            stopped_by=self.stopped_by,
            logprobs=seq.logprobs if seq.history.sampling.logprobs is not None else None,
            error=ticket.error,
        )


def stop_tokens(model: Model, wish: Wish) -> frozenset[int]:
    own = frozenset() if wish.sampling.ignore_eos else model.eos
    return own | frozenset(int(token) for token in wish.sampling.stop_token_ids)


def promise(how: registry.Method, model: str) -> dict[str, Any]:
    return dict(method=how.name, model=model, guarantee=how.guarantee, reference=f"{how.reference} on {model}")


def failed(error: ForerunError, how: registry.Method, model: str) -> Result:
    """The result of a request that never started."""
    nothing = stats_of([], prompt_tokens=0, tokens=0, forwards=0, draft_forwards=0, seconds=0.0, queued_seconds=0.0)
    return Result(text="", token_ids=[], finish_reason="error", **promise(how, model), stats=nothing, trace=[], error=error)


class Jobs:
    """Some requests being served. Iterating serves them and yields (index, piece of text) where text was asked for."""

    def __init__(self, engine: Engine, jobs: Sequence[Job | Result], several: bool):
        self.engine, self.jobs, self.several = engine, jobs, several
        self._changed: deque[int] = deque()
        self._shown = [0] * len(jobs)
        for index, job in enumerate(jobs):
            if isinstance(job, Job):
                job.ticket.on_change = lambda index=index: self._changed.append(index)  # type: ignore[misc]
                engine.submit(job.ticket)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        awaited = {index for index, job in enumerate(self.jobs) if isinstance(job, Job) and not job.ticket.over}
        while True:
            while self._changed:
                index = self._changed.popleft()
                if piece := self._piece(index):
                    yield index, piece
                if self.jobs[index].ticket.over:  # type: ignore[union-attr]
                    awaited.discard(index)
            if not awaited or not self.engine.busy:  # somebody else may have served them
                return
            self.engine.step()

    def _piece(self, index: int) -> str:
        job = self.jobs[index]
        if isinstance(job, Result) or job.writer is None:
            return ""
        shown = job.shown
        piece, self._shown[index] = shown[self._shown[index] :], len(shown)
        return piece

    @property
    def finished(self) -> int:
        return sum(isinstance(job, Result) or job.ticket.over for job in self.jobs)

    @property
    def tokens(self) -> int:
        """Tokens generated so far, by all requests together."""
        return sum(len(job.token_ids) if isinstance(job, Result) else job.seq.history.generated for job in self.jobs)

    def cancel(self, index: int | None = None) -> None:
        """End one request, or all of them, now."""
        for i, job in enumerate(self.jobs):
            if isinstance(job, Job) and index in (None, i):
                self.engine.cancel(job.ticket)

    def only_result(self) -> Result:
        """The result of a single request, whose error is the caller's."""
        [result] = self.results()
        if result.error is not None:
            raise result.error
        return result

    def results(self) -> list[Result]:
        """One result per request; those that are not over are cancelled and give what there is."""
        return [job if isinstance(job, Result) else job.result() for job in self.jobs]


class Stream:
    """Pieces of text as they are decided. Closing it, or letting go of it, cancels what is not over."""

    def __init__(self, jobs: Jobs):
        self.jobs = jobs
        self._pieces = iter(jobs)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        try:
            index, piece = next(self._pieces)
        except StopIteration:
            if not self.jobs.several:
                self.jobs.only_result()  # what went wrong is not lost
            raise
        return (index, piece) if self.jobs.several else piece

    def close(self) -> None:
        self.jobs.cancel()

    __del__ = close

    @property
    def results(self) -> list[Result]:
        """One result per request; those that are not over are cancelled."""
        return self.jobs.results()


def trace_lines(result: Result, index: int, decode: Any) -> list[dict[str, Any]]:
    """The trace as JSON objects, one per commit, with the text of its tokens for those who look at it."""
    return [
        {
            **asdict(event),
            "request": index,
            **{key: [decode([t]) for t in tokens] for key, tokens in (("texts", event.tokens), ("rejected_texts", event.rejected))},
        }
        for event in result.trace
    ]
