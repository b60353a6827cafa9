"""Requests of the page on their way: what was asked, started together, as one stream of lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from forerun.api import Model
from forerun.errors import BadOption
from forerun.requests.infill import Infilled
from forerun.requests.jobs import Bell, Job, Jobs
from forerun.requests.result import Result
from forerun.requests.traces import Line, end_line, with_texts
from forerun.serve.orders import How, check_sequences, how_to
from forerun.serve.server import Server
from forerun.serve.streams import Ask, Decoding
from forerun.serve.wire import Count, Sampled, Wire

MOST_RUNS = 4  # side by side
MOST_SAMPLES = 16


class RunRequest(Sampled):
    """One run: a prompt, messages of a chat, or a text with holes."""

    prompt: str | None = None
    messages: list[dict[str, str]] | None = Field(None, max_length=1000)
    text: str | None = None
    max_tokens: Count | None = None

    def check(self) -> None:
        wanted = [
            name for name in ("prompt", "messages", "text") if getattr(self, name) is not None
        ]
        if len(wanted) != 1:
            raise BadOption("a run needs one of prompt, messages and text.")
        check_sequences(self.samples, MOST_SAMPLES)


class RunsRequest(Wire):
    """Some runs that are started together."""

    runs: list[RunRequest] = Field(min_length=1, max_length=MOST_RUNS)


@dataclass(frozen=True)
class Started:
    """A run in its model's engine. Its first job has the number `first` in the stream."""

    decoding: Decoding
    first: int

    @property
    def jobs(self) -> list[Job]:
        return self.decoding.sequences()


async def start(server: Server, request: RunsRequest, client: str) -> list[Started]:
    """Load what is needed, then start all runs together. An error in one ends all."""
    asks = []
    for run in request.runs:
        run.check()
        how = await how_to(server.models, run)
        await server.models.loaded(run.model)
        submitting = partial(submit, run, how)
        asks.append(Ask(submitting, run.model, run.samples, client, kind="run"))
    decodings = await together([server.decodings.start(ask) for ask in asks])
    started: list[Started] = []
    first = 0
    for decoding in decodings:
        started.append(Started(decoding, first))
        first += len(decoding.jobs)
    return started


async def together(starting: Sequence[Coroutine[Any, Any, Decoding]]) -> list[Decoding]:
    """Begin several decodings. If one cannot, or nobody waits any more, none goes on."""
    tasks = [asyncio.ensure_future(one) for one in starting]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                task.result().close()
        raise


def submit(run: RunRequest, how: How, model: Model) -> Jobs:
    """Have one run served, with everything that its trace can show."""
    arguments: dict[str, Any] = {**how.arguments(model), "record": True, "raise_errors": True}
    if run.text is not None:
        return model.submit_infill(run.text, **arguments)
    if run.max_tokens is not None:
        arguments["max_tokens"] = run.max_tokens
    return model.submit(run.prompt, messages=run.messages, **arguments)


async def lines(started: Sequence[Started]) -> AsyncIterator[list[Line]]:
    """The traces of some runs as they grow, a few lines at a time. Whoever stops reading cancels
    what still runs."""
    arrived = asyncio.Event()
    wake_up = partial(Bell.of(asyncio.get_running_loop()).ring, arrived)
    readers = [
        Reader(one.decoding.model, job, one.first + index)
        for one in started
        for index, job in enumerate(one.jobs)
    ]
    for reader in readers:
        reader.recorder.on_line = wake_up
    over = asyncio.gather(*[one.decoding.results() for one in started])
    over.add_done_callback(partial(_note_end, arrived))
    try:
        finished = False
        while not finished:
            arrived.clear()  # before looking: what comes after the look sets it again
            finished = over.done()
            grown = [line for reader in readers for line in reader.new_lines()]
            if grown:
                yield grown
            if not finished:
                await arrived.wait()
        for one, results in zip(started, over.result()):
            yield completions(one, [result for group in results for result in group])
    finally:
        over.cancel()
        close(started)


def _note_end(arrived: asyncio.Event, over: asyncio.Future[Any]) -> None:
    """All is over. An error that nobody waits for, as after a cancel, needs no report."""
    if not over.cancelled():
        over.exception()
    arrived.set()


def close(started: Sequence[Started]) -> None:
    """Cancel what is left. Closing twice does nothing."""
    for one in started:
        one.decoding.close()


class Reader:
    """Reads the trace of one job while it grows."""

    def __init__(self, model: Model, job: Job, request: int):
        self.job = job
        self.request = request
        self.ended = False
        self._decode = partial(model.decode, special=True)
        self._read = 0
        assert job.seq.recorder is not None, "runs are recorded"
        self.recorder = job.seq.recorder

    def new_lines(self) -> list[Line]:
        """Lines since the last look; the end of a job as soon as it has ended. The first line has
        the canvas, which is another once the prompt's end is healed."""
        over = self.job.over and not self.ended
        if not (over or self.ended or self.job.begun):
            return []
        new = self.recorder.lines[self._read :]
        self._read += len(new)
        told = [with_texts(line, self.request, self._decode) for line in new]
        if over:
            self.ended = True
            told.append({**end_line(self.job.result()), "request": self.request})
        return told


def completions(one: Started, results: Sequence[Result]) -> list[Line]:
    """What a text with holes became: its completions, the best first."""
    filled = [result for result in results if isinstance(result, Infilled)]
    if not filled:
        return []
    requests = {}
    for index, job in enumerate(one.jobs):
        if job.seq.recorder is not None:
            requests[id(job.seq.recorder.lines)] = one.first + index
    alternatives = [
        {
            "request": requests[id(result.recorded)],
            "given": list(result.given),
            "fills": list(result.fills),
            "lengths": [len(ids) for ids in result.fill_ids],
            "logprob": result.logprob,
        }
        for result in filled
    ]
    return [{"kind": "fills", "request": one.first, "alternatives": alternatives}]
