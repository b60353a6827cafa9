"""Which kind of product is fastest on this machine, found by measuring and kept in a file.

A choice holds for a machine (processor, cores, threads, torch) and a shape. Measuring one shape
takes some tenths of a second. A file that cannot be read, or is of another machine, is measured
again; one that cannot be written is no error.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.backbones import products
from forerun.backbones.products import FloatLayout, Product
from forerun.errors import NotAble

ROWS = (1, 8, 32)
WEIGHT_OF_ROWS = {1: 2.0, 8: 1.0, 32: 0.5}  # how much each counts: most forwards have few rows
TURNS = 7
LONG_ENOUGH = 0.02  # seconds for one kind and number of rows
MOST_SECONDS = 4.0  # for all shapes of a model; what is not measured by then takes the first kind
MOST_WEIGHTS = 1 << 22  # of a larger matrix a part is measured
LEAST_WEIGHTS = 1 << 16  # in a smaller one nothing is to be gained
FORMAT = 2
WORTH_THE_BITS = 10.0  # times slower that a product may be if a row keeps its bits in it

Times = dict[str, float]  # microseconds by number of rows


def cache_folder() -> Path | None:
    """Where what is found once is kept; None where nothing is to be kept."""
    named = os.environ.get("FORERUN_CACHE")
    if named == "off":
        return None
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"


def machine() -> str:
    """What a measurement holds for."""
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{FORMAT} {platform.machine()} {_processor()} {capability}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )


def _processor() -> str:
    return _told_by_linux("model name", "CPU part") or platform.processor()


def instruction_sets() -> str:
    """What the processor can do, as far as it is told: a virtual one may hide some of it under the
    same name."""
    return _told_by_linux("flags", "Features")


def _told_by_linux(*names: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


class Table:
    """The times that were measured on this machine: by shape, kind and number of rows."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / "products.json"
        self.times: dict[str, dict[str, Times]] = self._read()
        self._seconds = 0.0

    def _read(self) -> dict[str, dict[str, Times]]:
        if self._file is None:
            return {}
        try:
            found = json.loads(self._file.read_text())
            return _checked(found) if found["machine"] == machine() else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"machine": machine(), "times": self.times}, indent=1))
            part.replace(self._file)

    def fastest(self, what: str, shape: tuple[int, int], kinds: Mapping[str, Any]) -> str:
        """The fastest of some kinds for a matrix [out, in]. A kind is what makes a product from a
        weight; one that fails, or that does not keep a row's bits, is left out. Where nothing is
        kept, nothing is measured either, so that all processes take the same."""
        if self._file is None:
            return next(iter(kinds))
        key = f"{what} {shape[0]}x{shape[1]}"
        if key not in self.times and len(kinds) > 1 and self._seconds < MOST_SECONDS:
            start = time.perf_counter()
            self.times[key] = _measure(shape, kinds)
            self._seconds += time.perf_counter() - start
            self.write()
        found = {kind: t for kind, t in self.times.get(key, {}).items() if kind in kinds}
        scores = {kind: _score(times) for kind, times in found.items()}
        if "widened" in scores:  # it does not keep a row's bits, so it must be worth that
            scores["widened"] *= WORTH_THE_BITS
        return min(scores, key=scores.__getitem__) if scores else next(iter(kinds))

    def described(
        self, kinds: Mapping[str, str], quantize: str | None, numbers: str = "float32"
    ) -> dict[str, str]:
        """How the products of a model run here, with the times that decided it. `numbers` are what
        plain matrices have."""
        found = {}
        for name, kind in kinds.items():
            shape = name.removeprefix("head ")
            bits = quantize or "float32"
            if quantize and name != shape:
                bits = products.HEAD[quantize]
            if kind in LAYOUTS:
                bits = numbers
            times = self.times.get(f"{bits} {shape}", {})
            rows = " / ".join(map(str, ROWS))
            words = [f"{k} {' / '.join(str(t[str(n)]) for n in ROWS)}" for k, t in times.items()]
            measured = f" (us for {rows} rows: {', '.join(words)})" if words else ""
            found[f"product {name}"] = f"{bits}, {kind}{measured}"
        return found


def this_machine() -> Table:
    """The table of this machine in the folder that is named now: one per process, so that equal
    models are made alike."""
    return _table_in(cache_folder())


@cache
def _table_in(folder: Path | None) -> Table:
    return Table(folder)


def _checked(found: Any) -> dict[str, dict[str, Times]]:
    """What a file says, if all of it is what we write."""
    times: dict[str, dict[str, Times]] = {}
    for shape, kinds in found["times"].items():
        times[str(shape)] = {
            str(kind): {str(rows): float(t[str(rows)]) for rows in ROWS}
            for kind, t in kinds.items()
        }
    return times


def _score(times: Times) -> float:
    """One number for the times of a kind, in units of rows' own weight."""
    return sum(weight * times[str(rows)] / rows**0.5 for rows, weight in WEIGHT_OF_ROWS.items())


@torch.inference_mode()
def _measure(shape: tuple[int, int], kinds: Mapping[str, Any]) -> dict[str, Times]:
    outputs, inputs = shape
    part = min(outputs, max(8, MOST_WEIGHTS // inputs // 8 * 8))
    weight_OI = torch.randn(part, inputs)
    made: dict[str, Callable[[Tensor], Tensor]] = {}
    for kind, make in kinds.items():
        with contextlib.suppress(Exception):  # an operation that this torch does not have here
            product = make(weight_OI, None)
            if kind == "widened" or make in FLOATS or _is_right(make, product, inputs):
                made[kind] = product
    times: dict[str, Times] = {kind: {} for kind in made}
    for rows in ROWS:
        x_TI = torch.randn(rows, inputs)
        found = {kind: _seconds(product, x_TI) for kind, product in made.items()}
        for kind, seconds in found.items():
            times[kind][str(rows)] = round(1e6 * seconds * outputs / len(weight_OI), 1)
    return times


def _seconds(product: Callable[[Tensor], Tensor], x_TI: Tensor) -> float:
    """The least of a few turns: what else the machine does only adds."""
    product(x_TI)
    turns = []
    for _ in range(TURNS):
        start = time.perf_counter()
        product(x_TI)
        turns.append(time.perf_counter() - start)
        if sum(turns) > LONG_ENOUGH:
            break
    return min(turns)


def _by_outputs(weight_OI: Tensor, _: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x_TI: x_TI @ weight_OI.t()


def _by_inputs(weight_OI: Tensor, _: Tensor | None) -> Callable[[Tensor], Tensor]:
    weight_IO = weight_OI.t().contiguous()
    return lambda x_TI: x_TI @ weight_IO


FLOATS = (_by_outputs, _by_inputs)
LAYOUTS = {"by outputs": _by_outputs, "by inputs": _by_inputs}


def layout_for(weight_OI: Tensor, table: Table) -> FloatLayout:
    """How a float matrix is best laid out here."""
    on_cpu = weight_OI.device.type == "cpu"
    if not on_cpu or weight_OI.dtype != torch.float32 or weight_OI.numel() < LEAST_WEIGHTS:
        return FloatLayout(by_inputs=on_cpu)
    kind = table.fastest("float32", (weight_OI.shape[0], weight_OI.shape[1]), LAYOUTS)
    return FloatLayout(by_inputs=kind == "by inputs")


def product_for(
    weight_OI: Tensor, bias: Tensor | None, quantize: str, table: Table
) -> tuple[str, Product]:
    """A quantised matrix as the fastest product of its kind here, and that kind."""
    kinds = products.KINDS[quantize]
    if weight_OI.shape[1] % products.GROUP:
        return "widened", kinds["widened"](weight_OI, bias)
    if weight_OI.numel() < LEAST_WEIGHTS:
        return _first_that_is_right(weight_OI, bias, kinds)
    kind = table.fastest(quantize, (weight_OI.shape[0], weight_OI.shape[1]), kinds)
    return kind, kinds[kind](weight_OI, bias)


def _is_right(make: products.MakeProduct, product: Product, inputs: int) -> bool:
    return products.has_room(make) and products.keeps_bits(product, inputs)


def _first_that_is_right(
    weight_OI: Tensor, bias: Tensor | None, kinds: Mapping[str, products.MakeProduct]
) -> tuple[str, Product]:
    """A small matrix takes no time, whatever the kind."""
    for kind, make in kinds.items():
        with contextlib.suppress(Exception):  # an operation that this torch does not have here
            product = make(weight_OI, bias)
            if kind == "widened" or _is_right(make, product, weight_OI.shape[1]):
                return kind, product
    raise NotAble("no product of a quantised matrix runs here: load the model without quantize.")
