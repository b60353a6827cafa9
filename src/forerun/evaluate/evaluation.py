"""Run a benchmark: ask a model every item by every method, write each answer down, grade it.

All requests of a method are in the engine together. An answer is written when it is there, and
graded after all are, so that programs under test take no time from the decoding that is timed. What
is on disk already is not asked again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from forerun import registry
from forerun.api import Model
from forerun.evaluate import asking
from forerun.evaluate.answers import AnswerFile, Cost, Record, digest
from forerun.evaluate.asking import Request, Style
from forerun.evaluate.benchmarks.base import (
    Answer,
    Benchmark,
    Choose,
    Examiner,
    Item,
    Read,
    Scores,
    Write,
)
from forerun.evaluate.examiner import SandboxExaminer
from forerun.evaluate.likelihood import Continuation, Likelihood
from forerun.evaluate.tasks import MethodChoice
from forerun.profile.machine import machine
from forerun.profile.progress import Progress, no_progress
from forerun.requests.jobs import Jobs
from forerun.requests.result import Result

LOOKS_EVERY = 0.05  # seconds
SCORED_TOGETHER = 32  # items
GRADERS = 8  # programs that are run at once, at most
TO_WARM_UP = 8  # tokens
LIKELIHOOD = "likelihood"  # stands for the method where nothing is decoded


@dataclass
class Evaluation:
    """One benchmark, one model, and where the answers go.

    `seconds` is how long each method may decode: what is not answered then stays open, and a
    further run goes on from there. `shown` is what else was set, such as the number of examples.
    """

    model: Model
    benchmark: Benchmark
    items: Sequence[Item]
    folder: str | Path
    style: Style = field(default_factory=Style)
    examiner: Examiner = field(default_factory=SandboxExaminer)
    likelihood: Likelihood | None = None
    seconds: float | None = None
    shown: Mapping[str, Any] = field(default_factory=dict)
    warm_up: bool | None = None  # None: where forwards are captured, on a GPU
    grade_later: bool = False  # by a `Grader`, on a machine that need not have the model

    def __post_init__(self) -> None:
        self._grader = Grader(self.benchmark, self.examiner)
        if self.likelihood is None:
            self.likelihood = Likelihood(self.model, seed=self.style.seed)

    @property
    def only_scores(self) -> bool:
        """Is nothing decoded, so that methods do not matter?"""
        return all(isinstance(item.ask, Choose | Read) for item in self.items)

    def run(
        self, choices: Sequence[MethodChoice], progress: Progress = no_progress
    ) -> list[AnswerFile]:
        """The answers of each method; one file where nothing is decoded."""
        runs_code = self.benchmark.runs_code and not self.grade_later
        if runs_code and isinstance(self.examiner, SandboxExaminer):
            self.examiner.limits  # noqa: B018 - refuses what cannot be isolated, before the work
        if self.only_scores:
            file = self._file(None)
            self._score(file, lambda done: progress(done, len(self.items)))
            self._grade(file)
            file.keep(item.id for item in self.items)
            return [file]
        total = len(choices) * len(self.items) * self.style.samples
        files = []
        for number, choice in enumerate(choices):
            file = self._file(choice)
            files.append(file)
            before = number * len(self.items) * self.style.samples
            self._decode(choice, file, partial(_told, progress, before, total))
            self._grade(file)
            file.keep(item.id for item in self.items)
        return files

    def _file(self, choice: MethodChoice | None) -> AnswerFile:
        """Its settings are all that answers and their cost hang on."""
        model = self.model
        settings: dict[str, Any] = {
            "task": self.benchmark.name,
            "model": Path(model.name).name,
            "checkpoint": model.name,
            "weights": weights_stamp(model.name),
            "family": model.family.name,
            "dtype": str(model.backbone.dtype).removeprefix("torch.") + model.weights,
            "device": model.backbone.device.type,
            "method": LIKELIHOOD if choice is None else choice.label,
            "lanes": model.lanes,
            "seed": self.style.seed,
            **self.shown,
        }
        if choice is None:
            assert self.likelihood is not None
            settings["meaning"] = self.likelihood.meaning
            return AnswerFile(self.folder, settings, {"machine": machine()})
        method = registry.method_named(choice.method)
        settings |= {
            "guarantee": method.guarantee,
            "reference": method.reference,
            "temperature": self.style.temperature,
            "samples": self.style.samples,
            "chat": self._chats(),
            "max_tokens": self.style.max_tokens,
        }
        return AnswerFile(self.folder, settings, {"machine": machine()})

    def _chats(self) -> bool:
        """Are items asked through a chat template?"""
        asked = any(isinstance(item.ask, Write) and item.ask.chat for item in self.items)
        return self.style.chat and asked and asking.has_template(self.model)

    # --- what is decoded ------------------------------------------------------

    def _decode(
        self, choice: MethodChoice, file: AnswerFile, progress: Callable[[int], None]
    ) -> None:
        session = Session(file, self.seconds)
        total = len(self.items) * self.style.samples
        done: set[tuple[str, int]] = set()
        while not session.out_of_time:
            wave = list(self._open(file, done))
            if not wave:
                break
            if not session.began:
                self._warm_up(choice, wave)
                forget(self.model)
            session.begin()
            for requests in _in_groups(wave):
                if session.out_of_time:
                    break
                jobs = asking.submit(self.model, choice, requests, self.style)
                session.collect(jobs, requests, lambda: progress(total - self._left(file)))

    def _left(self, file: AnswerFile) -> int:
        return len(self.items) * self.style.samples - len(file.records)

    def _open(self, file: AnswerFile, done: set[tuple[str, int]]) -> Iterator[Request]:
        """What can be asked now: not what is answered, nor what comes later in a conversation."""
        by_id = {item.id: item for item in self.items}
        for sample in range(self.style.samples):
            said: dict[str, str] = {}  # the answers so far, by item
            for item in self.items:
                key = (item.id, sample)
                if item.after is not None and item.after not in said:
                    continue
                if key not in done:
                    before = asking.conversation(by_id, said, item)
                    request = asking.request_for(self.model, item, sample, self.style, before)
                    if request is None:
                        self._too_long(file, item, sample)
                    elif file.answer(key, request.digest) is None:
                        yield request
                        continue
                    done.add(key)
                said[item.id] = file.records[key].answer.text

    @staticmethod
    def _too_long(file: AnswerFile, item: Item, sample: int) -> None:
        """An item that does not fit the context is an item not solved."""
        if file.answer((item.id, sample), "too long") is None:
            record = Record(item.id, sample, "too long", Answer(), finish="too long")
            file.add(record)

    def _warm_up(self, choice: MethodChoice, wave: Sequence[Request]) -> None:
        """Capture forwards, and compile what is compiled, before the clock runs."""
        wanted = self.warm_up
        if wanted is None:
            wanted = self.model.backbone.device.type == "cuda"
        first = [one for one in wave if one.group == wave[0].group][: self.model.lanes]
        if not wanted:
            return
        if not first[0].hole:
            first = [asking.with_room(one, min(one.max_tokens, TO_WARM_UP)) for one in first]
        asking.submit(self.model, choice, first, self.style).run()

    # --- what is scored -------------------------------------------------------

    def _score(self, file: AnswerFile, progress: Callable[[int], None]) -> None:
        assert self.likelihood is not None
        session = Session(file, self.seconds)
        session.begin()
        asked = {item.id: self._continuations(item) for item in self.items}
        names = {
            key: digest([[*map(int, c), *map(int, t)] for c, t in asked[key]]) for key in asked
        }
        left = [one for one in self.items if file.answer((one.id, 0), names[one.id]) is None]
        for first in range(0, len(left), SCORED_TOGETHER):
            part = left[first : first + SCORED_TOGETHER]
            likely = self.likelihood.continuations([c for item in part for c in asked[item.id]])
            for item in part:
                own = [likely.pop(0) for _ in asked[item.id]]
                whole = isinstance(item.ask, Read)
                logprobs = [one.logprob for one in own]
                answer = Answer(
                    logprobs=(sum(logprobs),) if whole else tuple(logprobs),
                    greedy=tuple(one.greedy for one in own),
                )
                tokens = sum(len(one.tokens) for one in asked[item.id])
                cost = Cost(tokens=tokens)
                session.add(Record(item.id, 0, names[item.id], answer, cost, group=item.group))
            progress(len(file.records))
            if session.out_of_time:
                break

    def _continuations(self, item: Item) -> list[Continuation]:
        assert self.likelihood is not None
        if isinstance(item.ask, Read):
            text = self.model.encode(item.ask.text, special=False)
            return list(self.likelihood.windows(text))
        assert isinstance(item.ask, Choose)
        return [self.likelihood.pair(item.ask.context, choice) for choice in item.ask.choices]

    def _grade(self, file: AnswerFile) -> None:
        if not self.grade_later:
            self._grader.grade(file, self.items)


@dataclass
class Grader:
    """Grades answers; the same answer of several methods once."""

    benchmark: Benchmark
    examiner: Examiner

    def __post_init__(self) -> None:
        self._known: dict[tuple[str, str], Scores] = {}

    def grade(self, file: AnswerFile, asked: Sequence[Item]) -> None:
        items = {item.id: item for item in asked}
        records = [record for record in file.ungraded() if record.item in items]
        workers = min(GRADERS, os.cpu_count() or 1) if self.benchmark.runs_code else 1
        pool = ThreadPoolExecutor(workers)
        try:
            graded = pool.map(lambda record: self._scores(items[record.item], record), records)
            for record, scores in zip(records, graded):
                file.grade(record.key, scores)
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt does not wait for all

    def _scores(self, item: Item, record: Record) -> Scores:
        answer = record.answer
        key = (item.id, digest([*vars(answer).values()]))
        if key not in self._known:
            self._known[key] = self.benchmark.grade(item, answer, self.examiner)
        return self._known[key]


def forget(model: Model) -> None:
    """Let a model start cold: prompts that were left in the slots, and what was learnt of the text,
    would make what comes next look faster, and change its last bits. Nothing runs now."""
    for host in model.engine.hosts:
        host.shared_state.clear()
        host.forget()


def weights_stamp(name: str) -> float | None:
    """When the weights of a checkpoint on disk were last written: a model that was trained on is
    another one, whatever it is called."""
    times = []
    for part in map(Path, name.split("+")):
        files = [part] if part.is_file() else [*part.glob("*")] if part.is_dir() else []
        kinds = (".safetensors", ".bin", ".gguf")
        times += [file.stat().st_mtime for file in files if file.suffix in kinds]
    return max(times, default=None)


def _told(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


class Session:
    """A run of one method: its clock, and the file that its answers go to."""

    def __init__(self, file: AnswerFile, seconds: float | None):
        self.file = file
        self.name = f"{time.time():.3f}"
        self.seconds = seconds
        self.start = 0.0

    @property
    def began(self) -> bool:
        return self.start > 0

    def begin(self) -> None:
        if not self.began:
            self.start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start if self.began else 0.0

    @property
    def out_of_time(self) -> bool:
        return self.seconds is not None and self.elapsed >= self.seconds

    def add(self, record: Record) -> None:
        fields = {**vars(record), "session": self.name, "at": self.elapsed}
        self.file.add(Record(**fields))

    def collect(self, jobs: Jobs, requests: Sequence[Request], told: Callable[[], None]) -> None:
        """Write down what is answered, as it comes. Whatever ends this, what was over is kept."""
        waiting = dict(enumerate(requests))
        try:
            over = False
            while not over and not self.out_of_time:
                over = jobs.wait(LOOKS_EVERY)
                self._take(jobs, waiting)
                told()
        finally:
            jobs.cancel()
            jobs.wait()
            self._take(jobs, waiting)

    def _take(self, jobs: Jobs, waiting: dict[int, Request]) -> None:
        for index in list(waiting):
            served = jobs.requests[index]
            if not all(job.over for job in served.jobs):
                continue
            request = waiting.pop(index)
            [result] = served.results()
            if result.error is not None:
                raise result.error
            if result.finish_reason != "cancelled":
                self.add(record_of(request, result))


def record_of(request: Request, result: Result) -> Record:
    stats = result.stats
    verdicts = {event.forward for event in result.trace if event.drafted}
    cost = Cost(
        tokens=stats.tokens,
        prompt_tokens=stats.prompt_tokens,
        forwards=stats.forwards,
        draft_forwards=stats.draft_forwards,
        drafted=sum(len(event.drafted) for event in result.trace),
        accepted=sum(event.accepted for event in result.trace if event.drafted),
        verdicts=len(verdicts),
        seconds=stats.seconds,
        first_token=stats.first_token_seconds,
    )
    return Record(
        item=request.item.id,
        sample=request.sample,
        asked=request.digest,
        answer=asking.answer_of(request, result),
        cost=cost,
        tokens=digest(result.token_ids),
        finish=result.finish_reason,
        group=request.item.group,
    )


def _in_groups(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that go to the model in one call. Items keep their order, so that a run that is cut
    short has answered the first ones."""
    in_order = sorted(requests, key=lambda one: repr(one.group))
    return [list(group) for _, group in groupby(in_order, key=lambda one: one.group)]
