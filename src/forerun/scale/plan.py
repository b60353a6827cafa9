"""What a load needs: how many GPUs, by which method, at what cost.

A step of a method with b sequences in flight takes

    S(b) = F(b r, b c) + h(b)

F is the forward: the time of b r rows in one chain, and the time to read the keys and values of b
sequences of c tokens more. Where forwards are captured, rows count as many as the capture has
that holds them. r is the rows that the method runs for a sequence, h what it does outside the
forward; both were measured with some numbers in flight, and lie on straight lines between them. A
request of P prompt and N output tokens at t tokens per forward takes

    R(b) = N / t S(b) + b P p(b)

p is what a row of a prompt costs those who wait for it, as longer prompts showed with as many in
flight: a large forward where one is alone, chunks beside the steps of others where there are many.
A GPU answers b / R(b) requests a second. F, p, h, r and t are measured (`measure.py`), none is
assumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import BadOption, unknown
from forerun.options import check_between, check_positive, check_whole

AUTO = "auto"
PLAIN = "ar"  # what break-evens are against
GIBIBYTE = 2**30
MILLION = 1e6
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class MethodCost:
    """What was measured of one method."""

    method: str
    rows: Mapping[int, float]  # of a sequence in a forward, by how many are in flight: r
    tokens_per_forward: float
    outside: Mapping[int, float]  # seconds of a step outside its forward, likewise: h
    text: str = ""  # on which tokens per forward were counted

    def __post_init__(self) -> None:
        for name in ("rows", "outside"):
            given = {int(key): float(value) for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, given)  # JSON has texts for keys

    def rows_at(self, in_flight: float) -> float:
        return between(self.rows, in_flight)

    def outside_at(self, in_flight: float) -> float:
        """Beyond what was measured it goes on as from the last number to the one before."""
        known = sorted(self.outside)
        if in_flight <= known[-1] or len(known) == 1:
            return between(self.outside, in_flight)
        before, last = known[-2:]
        slope = (self.outside[last] - self.outside[before]) / (last - before)
        return self.outside[last] + slope * (in_flight - last)


def between(known: Mapping[int, float], place: float) -> float:
    """On straight lines between what is known; beyond it, as at its end."""
    places = sorted(known)
    return float(np.interp(place, places, [known[each] for each in places]))


@dataclass(frozen=True)
class Measured:
    """A shape on a machine."""

    shape: str
    machine: str
    chain: Mapping[int, float]  # seconds of a forward by its rows
    context: int  # tokens that stood before them
    bytes_per_second: float
    bytes_per_slot: int
    weight_bytes: int
    memory_bytes: int
    methods: Sequence[MethodCost]
    in_flight: int = 32  # the most sequences that it was measured with
    captured: Sequence[int] = ()  # rows that captured forwards have, where they are captured
    # seconds that a row of a prompt costs, by how many are in flight: p
    prompt_row: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {int(key): float(value) for key, value in self.prompt_row.items()}
        object.__setattr__(self, "prompt_row", given)  # JSON has texts for keys

    @classmethod
    def read(cls, file: str | Path) -> Measured:
        try:
            told = json.loads(Path(file).read_text())
            chain = {int(rows): float(seconds) for rows, seconds in told.pop("chain").items()}
            methods = [MethodCost(**one) for one in told.pop("methods")]
            told.pop("checks", None)
            return cls(chain=chain, methods=methods, **told)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadOption(
                f"measured={str(file)!r} is no file that `forerun plan --measure` wrote ({error})."
            ) from error

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def forward(self, rows: float, slots: float) -> float:
        """Seconds of a forward of so many rows that looks at so many slots."""
        run = min((size for size in self.captured if size >= rows), default=rows)
        largest = max(self.chain)
        seconds = between(self.chain, run) + max(0.0, run - largest) * self.per_row
        read_already = self.context
        more = max(0.0, slots - read_already) * self.bytes_per_slot / self.bytes_per_second
        return seconds + more

    @property
    def per_row(self) -> float:
        """What a row adds to a forward that is large already."""
        largest, before = sorted(self.chain)[:-3:-1]
        return (self.chain[largest] - self.chain[before]) / (largest - before)

    def prompt_row_at(self, in_flight: float) -> float:
        if not self.prompt_row:  # of a file that is older
            return self.per_row
        return between(self.prompt_row, in_flight)

    def method(self, name: str) -> MethodCost:
        for each in self.methods:
            if each.method == name:
                return each
        raise unknown("method in what was measured", name, [one.method for one in self.methods])


def shipped(shape: str) -> Measured:
    """What was measured for a shape and came with the package."""
    folder = resources.files("forerun.scale") / "measured"
    found = [Path(str(file)) for file in folder.iterdir()] if folder.is_dir() else []
    files = {file.stem: file for file in found if file.suffix == ".json"}
    if shape not in files:
        raise BadOption(
            f"model={shape!r} was not measured: known: {', '.join(sorted(files)) or 'none'}. "
            "Measure it where it will run: forerun plan --measure FILE --model SHAPE."
        )
    return Measured.read(files[shape])


@dataclass(frozen=True)
class Load:
    """What is asked for."""

    requests: float  # a second
    prompt: int = 512  # tokens
    tokens: int = 256  # of an answer
    busy: float = 0.8  # share of what a GPU can do that may be used: the rest takes the bursts
    price: float | None = None  # of a GPU hour
    slowest: float = 0.0  # tokens a second that every reader must get
    in_flight: int | None = None  # sequences of a GPU at most; None: as many as were measured

    def __post_init__(self) -> None:
        if self.in_flight is not None:
            check_whole("in_flight", self.in_flight)
        check_positive("load", self.requests)
        check_whole("prompt_tokens", self.prompt)
        check_whole("tokens", self.tokens)
        check_between("busy", self.busy, least=0.01)
        if self.price is not None:
            check_positive("price", self.price)


def read_load(words: str) -> float:
    """Requests a second of words like 200/s, 5/min or 1e6/day."""
    number, _, unit = words.partition("/")
    seconds = {"s": 1, "": 1, "min": 60, "h": 3600, "day": 86400}.get(unit)
    try:
        wanted = float(number)
    except ValueError:
        wanted = math.nan
    if seconds is None or not wanted > 0 or math.isinf(wanted):
        raise BadOption(f"load={words!r} must be a number of requests: 200/s, 50/min, 1e6/day.")
    return wanted / seconds


@dataclass(frozen=True)
class Row:
    """A load by one method."""

    method: str
    in_flight: int  # sequences on a GPU
    step: float  # seconds
    break_even: float  # tokens per forward at which it is as fast as plain decoding
    tokens_per_forward: float
    tokens_per_second: float  # of a GPU
    reader: float  # tokens per second that one reader gets
    gpus: int
    gpu_hours: float  # per million tokens
    cost: float | None  # of them

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def step_seconds(measured: Measured, method: MethodCost, batch: float, context: float) -> float:
    forward = measured.forward(batch * method.rows_at(batch), batch * context)
    return forward + method.outside_at(batch)


def request_seconds(measured: Measured, method: MethodCost, batch: float, load: Load) -> float:
    """From its first forward to its last, with `batch` in flight."""
    context = load.prompt + load.tokens / 2
    steps = load.tokens / method.tokens_per_forward
    decoding = steps * step_seconds(measured, method, batch, context)
    return decoding + batch * load.prompt * measured.prompt_row_at(batch)


def most_in_flight(measured: Measured, load: Load) -> int:
    """Sequences that memory has room for beside the weights."""
    room = 0.9 * measured.memory_bytes - measured.weight_bytes
    return int(room // (measured.bytes_per_slot * (load.prompt + load.tokens)))


def plan_row(measured: Measured, method: MethodCost, load: Load) -> Row:
    """The number in flight that costs least among those that memory and readers allow."""
    most = most_in_flight(measured, load)
    if most < 1:
        raise BadOption(
            f"a sequence of {load.prompt + load.tokens} tokens does not fit beside "
            f"{measured.weight_bytes / GIBIBYTE:.1f} GiB of weights in "
            f"{measured.memory_bytes / GIBIBYTE:.0f} GiB: split the model over GPUs "
            "(tensor_parallel), or ask for less."
        )
    most = min(most, load.in_flight or measured.in_flight)
    rows = [row_at(measured, method, load, batch) for batch in (*BATCHES, most) if batch <= most]
    fast_enough = [row for row in rows if row.reader >= load.slowest]
    if not fast_enough:
        return max(rows, key=lambda row: row.reader)
    return max(fast_enough, key=lambda row: row.tokens_per_second)


def row_at(measured: Measured, method: MethodCost, load: Load, batch: int) -> Row:
    """With so many sequences in flight on every GPU."""
    context = load.prompt + load.tokens / 2
    step = step_seconds(measured, method, batch, context)
    plain = step_seconds(measured, measured.method(PLAIN), batch, context)
    seconds = request_seconds(measured, method, batch, load)
    a_second = batch / seconds
    tokens = a_second * load.tokens
    hours = MILLION / (tokens * load.busy) / 3600
    return Row(
        method=method.method,
        in_flight=batch,
        step=step,
        break_even=step / plain,
        tokens_per_forward=method.tokens_per_forward,
        tokens_per_second=tokens,
        reader=load.tokens / seconds,
        gpus=math.ceil(load.requests / (a_second * load.busy)),
        gpu_hours=hours,
        cost=None if load.price is None else hours * load.price,
    )


def plan(
    measured: Measured,
    load: Load,
    method: str = AUTO,
    tokens_per_forward: Mapping[str, float] | None = None,
) -> list[Row]:
    """All methods that were measured, or one, the cheapest first. `tokens_per_forward` is what was
    counted on the load's own text, by method, where that is known."""
    known = tokens_per_forward or {}
    for name, value in known.items():
        measured.method(name)
        check_positive(f"tokens_per_forward of {name}", value)
    wanted = measured.methods if method == AUTO else [measured.method(method)]
    counted = [
        replace(one, tokens_per_forward=known.get(one.method, one.tokens_per_forward))
        for one in wanted
    ]
    rows = [plan_row(measured, one, load) for one in counted]
    return sorted(rows, key=lambda row: (row.reader < load.slowest, row.gpu_hours))
