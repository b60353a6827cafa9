"""What a plan rests on: forwards of a shape, and methods with several sequences in flight.

Methods run with some numbers of requests in flight, from which the plan's constants follow, and
with others, which the plan then has to foretell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from forerun.api import Model
from forerun.engine.cache import available_bytes
from forerun.engine.graphs import SIZES
from forerun.evaluate.evaluation import forget
from forerun.profile.forward import forwards
from forerun.profile.machine import machine
from forerun.scale.plan import PLAIN, Load, Measured, MethodCost, request_seconds

ROWS = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640)
CONTEXT = 256  # tokens before the rows that are timed
AGREE = 0.03  # two runs that differ by less: nothing is compiled or captured any more
MOST_RUNS = 8

Options = Mapping[str, Any]


class Asked(NamedTuple):
    """Tokens of a request."""

    prompt: int
    tokens: int  # of its answer


CALIBRATION = Asked(64, 48)
LONG = Asked(256, 48)  # the same with longer prompts, whose price follows
CHECK = Asked(128, 64)


@dataclass(frozen=True)
class Trial:
    """What is served while a plan's constants are measured, and what while they are checked: other
    numbers in flight, and other requests."""

    calibrated: tuple[int, ...] = (1, 8, 32)  # in flight
    checked: tuple[int, ...] = (4, 24)
    calibration: Asked = CALIBRATION
    long: Asked = LONG
    check: Asked = CHECK
    waves: int = 2  # requests, for each that is in flight
    rows: tuple[int, ...] = ROWS  # of the forwards that are timed

    @property
    def lanes(self) -> int:
        return max(*self.calibrated, *self.checked)


TRIAL = Trial()


@dataclass(frozen=True)
class Closed:
    """Requests in a closed loop: when one ends the next begins."""

    method: str
    in_flight: int
    asked: Asked
    seconds: float  # of a request, from its first forward to its last
    rows: float  # of a sequence in a forward, prompts left out
    tokens_per_forward: float

    @property
    def per_second(self) -> float:
        return self.in_flight / self.seconds


@dataclass(frozen=True)
class Check:
    """What was foretold, and what came."""

    method: str
    in_flight: int
    predicted: float  # requests a second
    measured: float
    prompt: int
    tokens: int
    tokens_per_forward: float  # as counted meanwhile: a plan is told it

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class Bench:
    """A model, and the text that its prompts are cut from; without one they are drawn."""

    model: Model
    text: Sequence[int] = ()
    about: str = "random tokens"

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """No two begin alike, so that no prompt is in the slots already."""
        if not len(self.text):
            rng = np.random.default_rng(0)
            return rng.integers(5, min(self.model.vocab, 4000), (count, length)).tolist()
        starts = np.linspace(0, len(self.text) - length, count).astype(int)
        return [list(self.text[start : start + length]) for start in starts]

    def closed_loop(
        self, method: str, options: Options, in_flight: int, asked: Asked, waves: int
    ) -> Closed:
        """Serve some requests, `in_flight` at a time, again until two runs agree: what is met for
        the first time is compiled and captured meanwhile, which takes longer than to run it. If no
        two do, those two count that differ least."""
        prompts = self.prompts(waves * in_flight, asked.prompt)
        wanted = {"method": method, "max_tokens": asked.tokens, "ignore_eos": True, **options}
        runs = [self._run(wanted, prompts, in_flight)]
        found: tuple[Timed, Timed] | None = None
        while len(runs) < MOST_RUNS and (found is None or _apart(*found) > AGREE):
            runs.append(self._run(wanted, prompts, in_flight))
            found = min(combinations(runs, 2), key=lambda pair: _apart(*pair))
        assert found is not None
        each = 0.5 * sum(run.seconds for run in found) / waves
        last = found[-1]
        return Closed(method, in_flight, asked, each, last.rows, last.tokens_per_forward)

    def _run(self, wanted: Options, prompts: Sequence[list[int]], in_flight: int) -> Timed:
        forget(self.model)
        work = self.model.host.work
        before = work.rows
        began = time.perf_counter()
        results = asyncio.run(_serve(self.model, wanted, prompts, in_flight))
        seconds = time.perf_counter() - began
        forwards = sum(result.stats.forwards for result in results)
        tokens = sum(result.stats.tokens for result in results)
        rows = work.rows - before - sum(map(len, prompts))
        return Timed(seconds, max(1.0, rows / forwards), tokens / forwards)


class Timed(NamedTuple):
    """One run of a closed loop."""

    seconds: float
    rows: float
    tokens_per_forward: float


def _apart(one: Timed, other: Timed) -> float:
    """By which share two runs differ."""
    return abs(one.seconds - other.seconds) / other.seconds


async def _serve(
    model: Model, wanted: Options, prompts: Sequence[list[int]], in_flight: int
) -> list[Any]:
    places = asyncio.Semaphore(in_flight)

    async def one(prompt: list[int]) -> Any:
        async with places:
            return await model.agenerate(prompt, **wanted)

    return await asyncio.gather(*map(one, prompts))


def measure(
    bench: Bench, shape: str, methods: Mapping[str, Options], trial: Trial = TRIAL
) -> tuple[Measured, list[Check]]:
    """The constants of a shape on this machine, and how well they foretell what they were not made
    from."""
    found = _forwards(bench.model, shape, trial.rows)

    def runs(method: str, in_flight: Sequence[int], asked: Asked) -> list[Closed]:
        options = methods.get(method, {})
        return [bench.closed_loop(method, options, n, asked, trial.waves) for n in in_flight]

    short = runs(PLAIN, trial.calibrated, trial.calibration)
    long = runs(PLAIN, trial.calibrated, trial.long)
    prices = {one.in_flight: _prompt_row(found, one, more) for one, more in zip(short, long)}
    found = replace(found, prompt_row=prices)
    costs = []
    loops = []
    for method in methods:
        calibrated = short if method == PLAIN else runs(method, trial.calibrated, trial.calibration)
        costs.append(cost_from(found, calibrated, bench.about))
        loops += runs(method, trial.checked, trial.check)
    whole = replace(found, methods=costs)
    return whole, [check_of(whole, loop) for loop in loops]


def _forwards(model: Model, shape: str, rows: Sequence[int]) -> Measured:
    best, timed = forwards(model, rows, [1], [CONTEXT], turns=5)
    backbone = model.backbone
    return Measured(
        shape=shape,
        machine=machine(),
        chain={one.tokens: one.seconds for one in timed},
        context=CONTEXT,
        bytes_per_second=best.bytes_per_second,
        bytes_per_slot=backbone.bytes_per_lane(1),
        weight_bytes=int(backbone.cost) * backbone.dtype.itemsize,
        memory_bytes=memory_of(backbone.device),
        methods=(),
        in_flight=model.lanes,
        captured=SIZES if model.host.runner.capture_enabled else (),
    )


def memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return available_bytes(device)


def cost_from(measured: Measured, runs: Sequence[Closed], text: str) -> MethodCost:
    """The constants of one method: its rows, and what its steps took beyond their forwards."""
    method = runs[0].method
    return MethodCost(
        method,
        rows={run.in_flight: run.rows for run in runs},
        tokens_per_forward=float(np.mean([run.tokens_per_forward for run in runs])),
        outside={run.in_flight: _outside(measured, run) for run in runs},
        text="" if method == PLAIN else text,
    )


def _prompt_row(measured: Measured, run: Closed, longer: Closed) -> float:
    """What a row of a prompt costs, by what more of them take. Steps look at more slots, too."""
    more_slots = _forward_of(measured, longer) - _forward_of(measured, run)
    steps = run.asked.tokens / run.tokens_per_forward
    rows = run.in_flight * (longer.asked.prompt - run.asked.prompt)
    return max(0.0, longer.seconds - run.seconds - steps * more_slots) / rows


def _outside(measured: Measured, run: Closed) -> float:
    """Seconds of a step that are not its forward's."""
    prompts = run.in_flight * run.asked.prompt * measured.prompt_row_at(run.in_flight)
    step = (run.seconds - prompts) * run.tokens_per_forward / run.asked.tokens
    return step - _forward_of(measured, run)


def _forward_of(measured: Measured, run: Closed) -> float:
    """The forward of a usual step."""
    slots = run.in_flight * (run.asked.prompt + run.asked.tokens / 2)
    return measured.forward(run.in_flight * run.rows, slots)


def check_of(measured: Measured, run: Closed) -> Check:
    load = Load(1.0, *run.asked)
    counted = run.tokens_per_forward
    method = replace(measured.method(run.method), tokens_per_forward=counted)
    seconds = request_seconds(measured, method, run.in_flight, load)
    predicted = run.in_flight / seconds
    return Check(run.method, run.in_flight, predicted, run.per_second, *run.asked, counted)
