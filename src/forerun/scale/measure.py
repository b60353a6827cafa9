"""What a plan rests on: forwards of a shape, and methods with several sequences in flight.

Methods run with some numbers of requests in flight, from which the plan's constants follow, and
with others, which the plan then has to foretell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from forerun.api import Model
from forerun.engine.cache import available_bytes
from forerun.evaluate.evaluation import forget
from forerun.profile.forward import forwards
from forerun.profile.machine import machine
from forerun.scale.plan import PLAIN, Load, Measured, MethodCost, request_seconds

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXT = 256  # tokens before the rows that are timed

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """What is served while a plan's constants are measured, and while they are checked."""

    calibrated: tuple[int, ...] = (4, 16)  # in flight
    checked: tuple[int, ...] = (8, 32)
    prompt: int = 64  # tokens of a request
    tokens: int = 96  # of its answer
    waves: int = 3  # requests, for each that is in flight
    rows: tuple[int, ...] = ROWS  # of the forwards that are timed


TRIAL = Trial()


@dataclass(frozen=True)
class Closed:
    """Requests in a closed loop: when one ends the next begins."""

    method: str
    in_flight: int
    requests: int
    seconds: float
    rows: float  # of a sequence in a forward, prompts left out
    tokens_per_forward: float

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


@dataclass(frozen=True)
class Check:
    """What was foretold, and what came."""

    method: str
    in_flight: int
    predicted: float  # requests a second
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


def prompts_of(model: Model, count: int, length: int) -> list[list[int]]:
    """Token ids that no two prompts begin with alike, so that no prompt is in the slots already."""
    rng = np.random.default_rng(0)
    return rng.integers(5, min(model.vocab, 4000), (count, length)).tolist()


def closed_loop(
    model: Model, method: str, options: Options, in_flight: int, trial: Trial
) -> Closed:
    """Serve some requests, `in_flight` at a time."""
    requests = trial.waves * in_flight
    asked = {"method": method, "max_tokens": trial.tokens, "ignore_eos": True, **options}
    prompts = prompts_of(model, requests, trial.prompt)
    asyncio.run(_serve(model, asked, prompts[:in_flight], in_flight))  # captures what is captured
    forget(model)
    before = model.host.work.rows
    began = time.perf_counter()
    results = asyncio.run(_serve(model, asked, prompts, in_flight))
    seconds = time.perf_counter() - began
    forwards = sum(result.stats.forwards for result in results)
    tokens = sum(result.stats.tokens for result in results)
    rows = model.host.work.rows - before - requests * trial.prompt
    each = max(1.0, rows / forwards)
    return Closed(method, in_flight, requests, seconds, each, tokens / forwards)


async def _serve(
    model: Model, asked: Options, prompts: Sequence[list[int]], in_flight: int
) -> list[Any]:
    places = asyncio.Semaphore(in_flight)

    async def one(prompt: list[int]) -> Any:
        async with places:
            return await model.agenerate(prompt, **asked)

    return await asyncio.gather(*map(one, prompts))


def measure(
    model: Model, shape: str, methods: Mapping[str, Options], trial: Trial = TRIAL
) -> tuple[Measured, list[Check]]:
    """The constants of a shape on this machine, and how well they foretell what they were not made
    from."""
    found = _forwards(model, shape, trial.rows)
    costs = []
    loops = []
    for method, options in methods.items():
        calibrated = [closed_loop(model, method, options, n, trial) for n in trial.calibrated]
        costs.append(cost_from(found, calibrated, trial))
        loops += [closed_loop(model, method, options, n, trial) for n in trial.checked]
    whole = replace(found, methods=costs)
    return whole, [check_of(whole, loop, trial) for loop in loops]


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
    )


def memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return available_bytes(device)


def cost_from(measured: Measured, runs: Sequence[Closed], trial: Trial) -> MethodCost:
    """The constants of one method: what its steps took beyond their forwards, on a line through
    the numbers in flight."""
    rows = float(np.mean([run.rows for run in runs]))
    tokens = float(np.mean([run.tokens_per_forward for run in runs]))
    outside = [_outside(measured, run, trial) for run in runs]
    flights = [run.in_flight for run in runs]
    if len(runs) > 1:
        slope, fixed = np.polyfit(flights, outside, 1)
    else:
        slope, fixed = 0.0, outside[0]
    method = runs[0].method
    text = "" if method == PLAIN else "random tokens"
    return MethodCost(method, rows, tokens, float(fixed), float(slope), text)


def _outside(measured: Measured, run: Closed, trial: Trial) -> float:
    """Seconds of a step that are not its forward's."""
    request = run.seconds * run.in_flight / run.requests
    decoding = request - run.in_flight * trial.prompt * measured.per_row
    step = decoding * run.tokens_per_forward / trial.tokens
    slots = run.in_flight * (trial.prompt + trial.tokens / 2)
    return step - measured.forward(run.in_flight * run.rows, slots)


def check_of(measured: Measured, run: Closed, trial: Trial) -> Check:
    load = Load(1.0, trial.prompt, trial.tokens)
    method = measured.method(run.method)
    seconds = request_seconds(measured, method, run.in_flight, load)
    return Check(run.method, run.in_flight, run.in_flight / seconds, run.per_second)
