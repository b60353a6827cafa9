"""Requests of the page on their way: what was asked, started together, as one stream of lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from forerun.api import Model
from forerun.errors import BadOption
from forerun.page.models import Models
from forerun.requests.infill import Infilled
from forerun.requests.jobs import Job, Jobs, wake
from forerun.requests.traces import Line, end_line, with_texts

MOST_RUNS = 4  # side by side
LONGEST = 1_000_000  # characters of a prompt
MOST_TOKENS = 100_000


class RunRequest(BaseModel):
    """One run: a prompt, messages of a chat, or a text with holes."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=500)
    prompt: str | None = Field(None, max_length=LONGEST)
    messages: list[dict[str, str]] | None = Field(None, max_length=1000)
    text: str | None = Field(None, max_length=LONGEST)
    method: str | None = Field(None, max_length=100)
    draft: str | None = Field(None, max_length=500)
    options: dict[str, str | float | int | bool | None] = {}
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    temperature: float = 0.0
    seed: int = 0
    n: int = Field(1, ge=1, le=16)

    def given(self) -> dict[str, Any]:
        """What decoding takes by name."""
        arguments = {
            **self.options,
            "method": self.method,
            "draft": self.draft,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        if self.text is not None or self.n > 1:
            arguments["n"] = self.n
        if self.max_tokens is not None:
            arguments["max_tokens"] = self.max_tokens
        return arguments


class RunsRequest(BaseModel):
    """Some runs that are started together."""

    model_config = ConfigDict(extra="forbid")

    runs: list[RunRequest] = Field(min_length=1, max_length=MOST_RUNS)


@dataclass(frozen=True)
class Started:
    """A run in its model's engine. Its first job has this number in the stream."""

    model: Model
    jobs: Jobs
    first: int

    def job(self, index: int) -> Job:
        job = self.jobs.jobs[index]
        assert isinstance(job, Job), "single requests raise their errors"
        return job


async def start(models: Models, request: RunsRequest) -> list[Started]:
    """Load what is needed, then start all runs together. An error in one starts none."""
    loaded = [await models.get(run.model) for run in request.runs]
    started: list[Started] = []
    first = 0
    try:
        for model, run in zip(loaded, request.runs):
            jobs = await asyncio.to_thread(submit, model, run)
            started.append(Started(model, jobs, first))
            first += len(jobs)
    except BaseException:
        for one in started:
            one.jobs.cancel()
        raise
    return started


def submit(model: Model, run: RunRequest) -> Jobs:
    """Have one run served; a draft model may be loaded for it."""
    wanted = [name for name in ("prompt", "messages", "text") if getattr(run, name) is not None]
    if len(wanted) != 1:
        raise BadOption("a run needs one of prompt, messages and text.")
    check_option_names(run.options)
    if run.text is not None:
        return model.submit_infill(run.text, trace=True, raise_errors=True, **run.given())
    return model.submit(
        run.prompt, messages=run.messages, trace=True, raise_errors=True, **run.given()
    )


def check_option_names(options: Mapping[str, object]) -> None:
    """Refuse options that are arguments of `submit`, and none of a method."""
    taken = ("prompt", "messages", "streams", "tools", "template_options", "trace", "token_ids")
    for name in options:
        if name in taken or name in RunRequest.model_fields:
            raise BadOption(f"options: {name!r} is no option of a method.")


async def lines(started: Sequence[Started]) -> AsyncIterator[list[Line]]:
    """The traces of some runs as they grow, a few lines at a time. Whoever stops reading cancels
    what still runs."""
    arrived = asyncio.Event()
    wake_up = partial(wake, asyncio.get_running_loop(), arrived)
    readers = [Reader(one, index) for one in started for index in range(len(one.jobs))]
    for reader in readers:
        reader.recorder.on_line = wake_up
    over = asyncio.gather(*[one.jobs.arun() for one in started])
    over.add_done_callback(lambda _: arrived.set())
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
        yield [line for one in started for line in endings(one)]
    finally:
        over.cancel()
        for one in started:
            one.jobs.cancel()


class Reader:
    """Reads the trace of one job while it grows."""

    def __init__(self, started: Started, index: int):
        self.job = started.job(index)
        self.request = started.first + index
        self.ended = False
        self._decode = partial(started.model.decode, special=True)
        self._read = 0
        assert self.job.seq.recorder is not None, "runs are recorded"
        self.recorder = self.job.seq.recorder

    def new_lines(self) -> list[Line]:
        """Lines since the last look; the end of a job as soon as it has ended."""
        over = self.job.over and not self.ended
        new = self.recorder.lines[self._read :]
        self._read += len(new)
        told = [with_texts(line, self.request, self._decode) for line in new]
        if over:
            self.ended = True
            told.append({**end_line(self.job.result()), "request": self.request})
        return told


def endings(one: Started) -> list[Line]:
    """What a text with holes became: its completions, the best first."""
    results = one.jobs.results()
    recorders = {
        id(one.job(i).seq.recorder.lines): one.first + i  # type: ignore[union-attr]
        for i in range(len(one.jobs))
    }
    filled = [result for result in results if isinstance(result, Infilled)]
    if not filled:
        return []
    alternatives = [
        {
            "request": recorders[id(result.recorded)],
            "given": list(result.given),
            "fills": list(result.fills),
            "lengths": [len(ids) for ids in result.fill_ids],
            "logprob": result.logprob,
        }
        for result in filled
    ]
    return [{"kind": "fills", "request": one.first, "alternatives": alternatives}]
