"""Requests on their way through the engine."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np

from forerun.constraints.canvas import OnCanvas
from forerun.constraints.healing import Healing
from forerun.constraints.holes import Hole
from forerun.constraints.left_to_right import LeftToRight
from forerun.constraints.parsing import parsed
from forerun.drafters.base import Drafter
from forerun.engine.loop import Driver
from forerun.engine.ticket import DecodingCoroutine, Ticket, do_nothing
from forerun.errors import BadOption, ForerunError
from forerun.methods.healing import Healed, heal, heal_border
from forerun.probability.logits import TokenHistory
from forerun.requests.detokenizer import Detokenizer
from forerun.requests.healing import Onset, OpenHole, respelled, said_before
from forerun.requests.model import DecodableModel
from forerun.requests.request import DecodeRequest, stop_tokens
from forerun.requests.result import NO_COST, Promise, Result, promise_of, stats_of
from forerun.requests.scoring import Scoring, scoring_of_prompt, with_texts
from forerun.requests.structure import constraint_of
from forerun.requests.tools import ToolFormat, parse_calls
from forerun.requests.traces import start_line
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.logprobs import TokenLogprob
from forerun.sequence.recording import Recorder
from forerun.sequence.trace import Event

Progress = bool | Callable[[int, int], object] | None

SOON = 1.2  # pauses: looks that end one follow one another, give or take
LOOKS_EVERY = 0.1  # seconds, for those who want to see progress


class Job:
    """One sequence to decode: its canvas, its text so far, and its ticket in the engine.

    `sample` numbers the samples of one prompt. With `streams`, text is made as tokens come.
    `forbidden` tokens are never written. `holes` say what must be in them, `opened` which of them
    are healed. `before` is what the output follows, as `text_before` has it.
    """

    def __init__(  # noqa: PLR0913 - most of them are keywords
        self,
        model: DecodableModel,
        request: DecodeRequest,
        canvas: Sequence[int],
        drafter: Drafter | None,
        *,
        sample: int = 0,
        streams: bool = False,
        forbidden: frozenset[int] = frozenset(),
        holes: Sequence[Hole] = (),
        healing: Healing | None = None,
        opened: Sequence[OpenHole] = (),
        before: tuple[Sequence[int], str] = ((), ""),
    ):
        self.model = model
        self.request = request
        self.drafter = drafter
        self.forbidden = forbidden
        self.holes = holes
        self.healing = healing
        self.opened = opened
        # Is the canvas the one that is decoded?
        self.begun = healing is None and not opened
        self.prompt = [token for token in canvas if token != BLANK]
        self.respelled: list[TokenLogprob] = []  # the healed end of the prompt, or around holes
        self.healed_in = 0  # how many of those write into a hole
        self.streams = streams
        self.stopped_by: str | int | None = None
        self.first_token_at: float | None = None
        self._spoken = before  # what the output follows
        sampling = request.sampling
        self.stop_tokens = stop_tokens(model, sampling)
        self.detokenizer: Detokenizer | None = None
        if streams or sampling.stop:
            self.detokenizer = Detokenizer(model.decode, sampling.stop)
            self.detokenizer.begin_after(*self._spoken)
        history = TokenHistory(
            sampling,
            np.asarray(self.prompt, np.int64),
            model.vocab,
            self.stop_tokens,
            forbidden,
            constraint_of(model, request, canvas, forbidden, holes),
        )
        if healing is not None:
            canvas = [*healing.kept, *[BLANK] * (len(canvas) - len(healing.kept))]
        for hole in opened:
            canvas = [
                *canvas[: hole.start],
                *[BLANK] * (hole.end - hole.start),
                *canvas[hole.end :],
            ]
        self.seq = Canvas(
            canvas, history=history, ending=self._ending, seed=sampling.seed, sample=sample
        )
        if request.note:
            self.seq.trace.notes.append(request.note)
        self._check_possible()
        self.ticket = Ticket(
            self.seq,
            self._start,
            asks_costs=request.asks_costs,
            ends_early=not sampling.ignore_eos or bool(sampling.stop or sampling.stop_token_ids),
        )

    def _check_possible(self) -> None:
        constraint = self.seq.history.constraint
        if isinstance(constraint, OnCanvas) and not constraint.possible:
            self.seq.finish_reason = "unmet"  # no text is short or long enough: nothing is asked

    def _start(self) -> DecodingCoroutine:
        if self.healing is not None:
            return self._heal_and_decode(self.healing)
        return self._heal_holes_and_decode() if self.opened else self._decode()

    def _decode(self) -> DecodingCoroutine:
        arguments = {} if self.drafter is None else {"drafter": self.drafter}
        run = self.request.method.run
        return run(self.seq, self.model.handle(), self.request.options, **arguments)

    async def _heal_and_decode(self, healing: Healing) -> None:
        """Choose the end of the prompt anew, and go on from there. Tokens that write the prompt
        only are the prompt's; the one that writes more is the first of the output."""
        history = self.seq.history
        constraint = history.constraint
        history.constraint = None  # it speaks of what follows the prompt
        onset = None if constraint is None else Onset(healing, constraint)
        usable = None if onset is None else onset.usable()
        healed = await heal(self.seq, self.model.handle(), healing, usable)
        over = healing.over(healed.cover.spelling, healed.cover.token)
        self._begin_after(healing, healed, over)
        if over:
            self._fill_first(healed, over)
        if constraint is not None:
            self._constrain([] if onset is None else onset.spell(over))
        if not self.seq.done:
            await self._decode()

    async def _heal_holes_and_decode(self) -> None:
        """Choose the tokens around holes anew, one border after the other, and fill the rest."""
        history = self.seq.history
        constraint = history.constraint
        history.constraint = None  # none of it is healed
        for hole in self.opened:
            room = hole.size
            for healing, first, step in hole.borders:
                room += len(healing.taken)
                room -= await self._heal_border(healing.within(room), first, step)
        self.prompt = [int(token) for token in self.seq.tokens if token != BLANK]
        history.begin(np.asarray(self.prompt, np.int64))
        self.begun = True
        if constraint is not None:
            canvas = self.seq.tokens.tolist()
            forbidden = self.forbidden
            again = constraint_of(self.model, self.request, canvas, forbidden, self.holes)
            history.constraint = again
        if not self.seq.remaining:
            self.seq.finish_reason = "length"
        if not self.seq.done:
            await self._decode()

    async def _heal_border(self, healing: Healing, first: int, step: int) -> int:
        """Choose the tokens at one border of a hole anew. They are given from then on. How many
        there are."""
        healed = await heal_border(self.seq, self.model.handle(), healing, first, step)
        tokens = [*healing.spellings[healed.cover.spelling], healed.cover.token]
        canvas = self.seq.tokens.tolist()
        for i, token in enumerate(tokens):
            canvas[first + step * i] = token
        self.seq.begin(canvas)
        self.respelled += respelled(healing, healed, tokens)
        self.healed_in += bool(healing.over(healed.cover.spelling, healed.cover.token))
        return len(tokens)

    def _begin_after(self, healing: Healing, healed: Healed, over: bytes) -> None:
        """Take what the cover writes of the prompt for the prompt."""
        spelling = healing.spellings[healed.cover.spelling]
        tokens = [*spelling, *([] if over else [healed.cover.token])]
        room = len(self.seq.tokens) - len(self.prompt)
        self.prompt = [*healing.kept, *tokens]
        self.respelled = respelled(healing, healed, tokens)
        self.seq.history.begin(np.asarray(self.prompt, np.int64))
        self.seq.begin([*self.prompt, *[BLANK] * room])
        self.begun = True
        self._spoken = said_before(self.model, healing, tokens, self._spoken)
        if self.detokenizer is not None:
            self.detokenizer.begin_after(*self._spoken)

    def _fill_first(self, healed: Healed, over: bytes) -> None:
        """Write the token that goes beyond the prompt."""
        position = len(self.prompt)
        row = healed.cover.spelling
        record = self.seq.logprobs
        if record.wanted:
            laws = (healed.logits_NV[row : row + 1], healed.law_NV[row : row + 1])
            record.answered(healed.branch, [position], *laws)
        self.seq.fill([position], [healed.cover.token], "healed", branches=[healed.branch])
        if record.wanted:
            record.entries[-1]["text"] = over.decode(errors="replace")

    def _constrain(self, first: Sequence[int]) -> None:
        """Hold what follows the prompt to the request's constraint, which takes the token that is
        written already, if one is, for these."""
        canvas = [*self.prompt, *[BLANK] * len(self.seq.blanks)]
        constraint = constraint_of(self.model, self.request, canvas, self.forbidden, self.holes)
        assert constraint is not None, "there was one"
        if first and isinstance(constraint, LeftToRight):
            constraint.begin(len(self.prompt), first)
        self.seq.history.constraint = constraint
        self._check_possible()
        if first and not self.seq.done and self._is_complete():
            self.seq.finish_reason = "stop"

    def _ending(self, token: int) -> str | None:
        """Why the text ends with this token, if it does."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if token in self.stop_tokens:
            self.stopped_by = token
        if self.detokenizer is not None:
            self.detokenizer.push(token)
            if self.stopped_by is None:
                self.stopped_by = self.detokenizer.stopped_by
        if self._is_complete():
            return "stop"
        return "stop" if self.stopped_by is not None else None

    def record(self) -> None:
        """Have the trace show everything it can."""
        start = start_line(self.model, self.request, self.seq.tokens.tolist())
        self.seq.recorder = Recorder(self.seq.trace, start)

    def _is_complete(self) -> bool:
        """Is the text all that its constraint asks for, so that nothing may follow?"""
        history = self.seq.history
        if history.constraint is None or not history.constraint.finished:
            return False
        least = self.request.sampling.min_tokens
        if history.generated < least:
            raise BadOption(
                f"min_tokens={least}, but what the constraint asks for is complete after "
                f"{history.generated} tokens: leave min_tokens out."
            )
        return True

    @property
    def over(self) -> bool:
        return self.ticket.over

    @property
    def safe_text(self) -> str:
        """The text that no stop string will take back; all of it once the job is over."""
        if self.over:
            return self._finished_detokenizer().text
        return self.detokenizer.safe_text if self.detokenizer is not None else ""

    def _finished_detokenizer(self) -> Detokenizer:
        if self.detokenizer is None:
            self.detokenizer = Detokenizer(self.model.decode)
            self.detokenizer.begin_after(*self._spoken)
            self.detokenizer.push(*self.seq.output)
        self.detokenizer.finish()
        return self.detokenizer

    def fail(self, error: Exception) -> None:
        """It is over, and its text cannot be made."""
        self.ticket.error = self.ticket.error or error
        self.seq.finish_reason = "error"
        self.detokenizer = Detokenizer(lambda tokens: "")

    def result(self) -> Result:
        """The result of a job that is over."""
        ticket = self.ticket
        seq = self.seq
        ended = ticket.ended or 0.0
        started = ticket.started if ticket.started is not None else ended
        first = self.first_token_at
        stats = stats_of(
            seq.trace,
            prompt_tokens=len(self.prompt) - self.healed_in,
            tokens=len(seq.output) + self.healed_in,
            seconds=ended - started,
            queued_seconds=started - ticket.submitted,
            first_token_seconds=None if first is None else first - started,
        )
        text = self._finished_detokenizer().text
        return Result(
            text=text,
            token_ids=seq.output,
            finish_reason=seq.finish_reason or "cancelled",
            **promise_of(
                self.request.method,
                self.request.options,
                self.model.name,
                self.model.weights + self._read_by(),
            ),
            stats=stats,
            trace=seq.trace.events,
            choices=seq.trace.choices,
            prompt_ids=self.prompt,
            stopped_by=self.stopped_by,
            logprobs=self._logprobs(),
            error=ticket.error,
            recorded=seq.recorder.lines if seq.recorder is not None else None,
            parsed=self._parsed(text),
        )

    def _read_by(self) -> str:
        """How the constraint is read, if there is one: engines differ in what they allow."""
        constraint = self.seq.history.constraint
        spec = self.request.sampling.constraint
        if isinstance(constraint, OnCanvas):
            return " under the same constraint"
        return "" if spec is None else f" with {spec.argument} as {spec.engine} reads it"

    def _parsed(self, text: str) -> Any:
        """The value of a text that is what the request's constraint asks for."""
        spec = self.request.sampling.constraint
        constraint = self.seq.history.constraint
        unfinished = constraint is None or not constraint.met or self.ticket.error
        if spec is None or unfinished or self.holes:
            return None
        return parsed(spec, self.request.sampling.schema, text)

    def _logprobs(self) -> list[TokenLogprob] | None:
        record = self.seq.logprobs
        return with_texts(self.model, record.entries) if record.wanted else None


def failed_result(error: ForerunError, promise: Promise) -> Result:
    """The result of a request that never started."""
    return Result(
        text="",
        token_ids=[],
        finish_reason="error",
        **promise,
        stats=NO_COST,
        trace=[],
        error=error,
    )


class RequestJobs(Protocol):
    """The jobs of one request, and the results that they become."""

    @property
    def jobs(self) -> Sequence[Job]: ...

    @property
    def scoring(self) -> Scoring | None:
        """What is to be found out about the prompt, if anything is."""

    def results(self) -> Sequence[Result]: ...


class Completion:
    """One prompt: a job for each sample."""

    def __init__(
        self,
        jobs: Sequence[Job],
        prompt_logprobs: int | None = None,
        tool_format: ToolFormat | None = None,
    ):
        self.jobs = jobs
        self.tool_format = tool_format  # of calls in the texts, where tools were given
        self.prompt = jobs[0].prompt
        self.told = prompt_logprobs is not None
        self.scoring = None
        if prompt_logprobs is not None:
            self.scoring = scoring_of_prompt(jobs[0].model, self.prompt, prompt_logprobs)

    def results(self) -> list[Result]:
        results = [job.result() for job in self.jobs]
        if self.tool_format is not None:
            form = self.tool_format
            results = [replace(r, tool_calls=parse_calls(r.text, form)[1]) for r in results]
        if not self.told:
            return results
        error = self.scoring.ticket.error if self.scoring else None
        return [
            replace(one, prompt_logprobs=self._of_prompt(job), error=one.error or error)
            for job, one in zip(self.jobs, results)
        ]

    def _of_prompt(self, job: Job) -> list[TokenLogprob | None]:
        """The log-probabilities of a prompt's tokens, up to where its end was healed as they were
        scored, and from there as the model said then."""
        found = self.scoring.entries if self.scoring is not None else []
        unknown = [None] * (len(self.prompt) - len(found))
        kept = len(job.prompt) - len(job.respelled)
        entries: list[TokenLogprob | None] = [*unknown, *found]
        if job.prompt != self.prompt:
            entries = [*entries[:kept], *job.respelled]
        return [one and with_texts(job.model, [one])[0] for one in entries]


class Failed:
    """A request that cannot be decoded."""

    scoring = None

    def __init__(self, results: Sequence[Result]):
        self.jobs: Sequence[Job] = ()
        self._results = results

    def results(self) -> Sequence[Result]:
        return self._results


def wake_nobody(urgent: bool) -> None:
    """Whoever waits without an event loop sees what comes."""


class Jobs:
    """Some requests being served.

    Iterating yields (index, piece of text) where text was asked for, until all are over; `async
    for` does the same. With `traces`, (index, event) comes as well, before the text it led to. Any
    number of threads may wait for them, one may iterate. A failed request has a result in place of
    its jobs.
    """

    def __init__(
        self,
        driver: Driver,
        requests: Sequence[RequestJobs],
        several: bool,
        raise_errors: bool = False,
        traces: bool = False,
    ):
        self.driver = driver
        self.requests = requests
        self.several = several  # does the caller expect a list?
        self.raise_errors = raise_errors or not several
        self.jobs: list[Job | Result] = []
        for request in requests:
            self.jobs += request.jobs or request.results()
        self._shown = [0] * len(self.jobs)  # characters of each that were yielded
        self._events: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()  # None: all are over
        self._over = threading.Event()
        self._wake: Callable[[bool], object] = wake_nobody  # or the event loop that waits
        self._tell_over: Callable[[], object] = do_nothing
        self._tickets: list[Ticket] = []
        for index, job in enumerate(self.jobs):
            if isinstance(job, Job):
                job.ticket.on_change = partial(self._changed, index, job)
                if traces:
                    job.seq.trace.listener = partial(self._traced, index)
                self._tickets.append(job.ticket)
        for scoring in [request.scoring for request in requests]:
            if scoring is not None:
                scoring.ticket.on_change = partial(self._ended, scoring.ticket)
                self._tickets.append(scoring.ticket)
        self._unfinished = set(self._tickets)
        if self._tickets:
            driver.submit(self._tickets)
        else:
            self._finish()

    # What follows up to `_finish` is called where the engine is stepped: it must not wait.

    def _changed(self, index: int, job: Job) -> None:
        """A job has grown or ended."""
        first = not self._shown[index]
        piece = self._new_text(index, job) if job.streams else ""
        if piece:
            self._events.put((index, piece))
            self._wake(first)
        if job.over:
            self._ended(job.ticket)

    def _traced(self, index: int, event: Event) -> None:
        self._events.put((index, event))
        self._wake(False)

    def _ended(self, ticket: Ticket) -> None:
        self._unfinished.discard(ticket)
        if not self._unfinished:
            self._finish()

    def _finish(self) -> None:
        self._events.put(None)
        self._over.set()
        self._wake(True)
        self._tell_over()

    def when_over(self, tell: Callable[[], object]) -> None:
        """Have a function called once all are over: where the engine is stepped, or at once. It may
        be called twice, and must not wait."""
        self._tell_over = tell
        if self._over.is_set():
            tell()

    def _new_text(self, index: int, job: Job) -> str:
        try:
            text = job.safe_text
        except Exception as error:  # of a tokenizer: the request fails, not the engine
            job.fail(error)
            return ""
        start = self._shown[index]
        self._shown[index] = len(text)
        return text[start:]

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while (event := self.driver.next_event(self._events)) is not None:
            yield event
        self._events.put(None)  # for whoever iterates again

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        async for burst in self.bursts():
            for event in burst:
                yield event

    async def bursts(self) -> AsyncIterator[list[tuple[int, Any]]]:
        """All that came since the last look, again and again."""
        arrived = asyncio.Event()
        self._wake = partial(Bell.of(asyncio.get_running_loop()).ring, arrived)
        over = False
        while True:
            arrived.clear()  # before looking: what comes after the look sets it again
            burst = []
            while not over and not self._events.empty():
                event = self._events.get()
                over = event is None
                if event is not None:
                    burst.append(event)
            if burst:
                yield burst
            if over:
                self._events.put(None)  # for whoever iterates again
                return
            await self.driver.arrival(arrived)

    @property
    def finished(self) -> int:
        """How many jobs are over."""
        return sum(isinstance(job, Result) or job.over for job in self.jobs)

    @property
    def tokens(self) -> int:
        """Tokens generated so far, by all jobs together."""
        return sum(job.seq.history.generated for job in self._real_jobs())

    @property
    def blanks(self) -> int:
        """Tokens that all jobs together may generate."""
        return sum(len(job.seq.blanks) for job in self._real_jobs())

    def _real_jobs(self) -> list[Job]:
        return [job for job in self.jobs if isinstance(job, Job)]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all jobs are over, or for so many seconds. Whether they are."""
        return self.driver.wait(self._over, timeout)

    def run(self, progress: Progress = None) -> None:
        """Wait until all jobs are over. An interruption cancels those that are not. `progress` is
        called with (how many are over, of how many) as they come; True shows a bar."""
        try:
            if not progress:
                self.wait()
                return
            with reporting(progress) as report:
                report(self.finished, len(self))
                while not self.wait(LOOKS_EVERY):
                    report(self.finished, len(self))
                report(len(self), len(self))
        finally:
            self.cancel()

    async def arun(self) -> None:
        """Wait for all jobs without blocking the event loop. Cancelling the task cancels them."""
        try:
            async for _ in self:
                pass
        finally:
            self.cancel()

    def cancel(self, index: int | None = None) -> None:
        """Ask for the end of one job, or of all of them; it comes before the engine's next step."""
        job = self.jobs[index] if index is not None else None
        tickets = self._tickets if job is None else [job.ticket] if isinstance(job, Job) else []
        for ticket in tickets:
            if not ticket.over:
                self.driver.cancel(ticket)

    def results(self) -> list[Result]:
        """All results. Jobs that are not over are cancelled and give what there is."""
        return [result for request in self.results_by_request() for result in request]

    def results_by_request(self) -> list[Sequence[Result]]:
        """The results of each request."""
        self.cancel()
        self.wait()
        return [request.results() for request in self.requests]

    def outcome(self) -> Result | list[Result]:
        """What the caller expects: a list, or one result. An error of a single request is raised,
        and so is the first of several if the caller asked for it; otherwise a warning counts
        them."""
        results = self.results()
        failed = [i for i, result in enumerate(results) if result.error is not None]
        if failed:
            first = results[failed[0]].error
            assert first is not None
            if self.raise_errors:
                raise first
            warnings.warn(
                f"{len(failed)} of {len(results)} results have an error; the first, of result "
                f"{failed[0]}: {first} (raise_errors=True raises it)",
                stacklevel=3,
            )
        return results if self.several else results[0]


@contextmanager
def reporting(progress: Progress) -> Iterator[Callable[[int, int], object]]:
    """What is to be called as results come; for True, it moves a bar."""
    if callable(progress):
        yield progress
        return
    from tqdm.auto import tqdm

    with tqdm(unit="result") as bar:

        def move(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        yield move


class Bell:
    """Wakes an event loop from other threads, for all who wait in it: once, however many events
    come before it looks. Waking it is a system call, and a step of the engine ends with something
    for every request.

    Where looks follow one another within `pause` seconds, it rests as long after each: then it
    looks again by itself, and only who rings urgently is heard before.
    """

    _bells: WeakKeyDictionary[asyncio.AbstractEventLoop, Bell] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.pause = 0.0
        self._loop = ref(loop)
        self._arrived: deque[asyncio.Event] = deque()
        self._called = False  # is a look on its way?
        self._timer: asyncio.TimerHandle | None = None  # of the look that ends a pause
        self._looked = -math.inf  # when, on the loop's clock

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Bell:
        """The bell of a loop; to be asked for in that loop."""
        return cls._bells.setdefault(loop, cls(loop))

    def ring(self, arrived: asyncio.Event, urgent: bool = False) -> None:
        """Have an event set in the loop."""
        self._arrived.append(arrived)  # before asking who will look: that one sees it
        loop = self._loop()
        resting = self._timer is not None and not urgent
        if self._called or resting or loop is None:
            return
        self._called = True
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = self._loop()
        if self.pause and self._arrived and loop is not None:
            now = loop.time()
            if now - self._looked <= SOON * self.pause:
                self._timer = loop.call_later(self.pause, self._look)
            self._looked = now
        self._called = False  # before looking: what comes after the look rings again
        while self._arrived:
            self._arrived.popleft().set()

    def _look(self) -> None:
        """The pause is over."""
        self._timer = None
        if self._arrived:
            self._tell()


class Stream:
    """Pieces of text as they are decided. Closing it, or letting go of it, cancels the rest."""

    def __init__(self, jobs: Jobs):
        self.jobs = jobs
        self._pieces = iter(jobs)
        self._reported = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str | tuple[int, str]:
        """The next piece; with several requests, (index, piece)."""
        try:
            index, piece = next(self._pieces)
        except StopIteration:
            self._report_errors()
            raise
        return (index, piece) if self.jobs.several else piece

    async def __aiter__(self) -> AsyncIterator[str | tuple[int, str]]:
        try:
            async for index, piece in self.jobs:
                yield (index, piece) if self.jobs.several else piece
        finally:
            self.close()
        self._report_errors()

    def _report_errors(self) -> None:
        """Raise an error, or warn of several, once all pieces are out."""
        if not self._reported:
            self._reported = True
            self.jobs.outcome()

    def close(self) -> None:
        self.jobs.cancel()

    __del__ = close

    @property
    def results(self) -> list[Result]:
        """One result per request; those that are not over are cancelled."""
        return self.jobs.results()
