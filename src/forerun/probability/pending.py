"""Laws that nobody has looked at yet.

A model answers with logits. Most methods hand the laws that are asked for on to a rule without a
look at them: there logits become an outcome in one program, and no law of a whole vocabulary is
made in between. To a method, `PendingLaws` are a tensor [N, V]: they can be cut and joined by rows,
and whatever else is done with them makes the laws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from forerun.constraints.base import ANY
from forerun.options import Sampling
from forerun.probability.logits import MaskedLogits, model_laws, row_laws
from forerun.probability.transfer import to_device


class LawRows(NamedTuple):
    """Neighbouring rows of logits, or every `step`-th row, and what turns them into laws: sampling
    parameters, or nothing but the softmax where only the model's own laws are wanted; and of the
    same rows, bitmasks of what constraints allow."""

    logits_RV: Tensor
    first: int
    rows: int
    sampling: Sampling | None
    masks_RW: np.ndarray | None = None
    step: int = 1

    @property
    def numbers(self) -> range:
        """Which rows of the logits they are."""
        return range(self.first, self.first + self.rows * self.step, self.step)

    def has_rows_of(self, other: LawRows) -> bool:
        """Are these the same rows?"""
        return (
            self.logits_RV is other.logits_RV
            and self.first == other.first
            and self.rows == other.rows
            and self.step == other.step
            and self.masks_RW is other.masks_RW
        )

    def cut(self, start: int, stop: int, step: int = 1) -> LawRows:
        first = self.first + start * self.step
        rows = len(range(start, stop, step))
        step *= self.step
        return LawRows(self.logits_RV, first, rows, self.sampling, self.masks_RW, step)


class PendingLaws:
    """Laws [N, V] of some rows of logits, made when they are looked at; with `single`, the one law
    [V]."""

    def __init__(self, parts: Sequence[LawRows], single: bool = False):
        self.parts = parts
        self.single = single
        # of laws; most are of one part
        self.count = parts[0].rows if len(parts) == 1 else sum(part.rows for part in parts)

    @classmethod
    def of(
        cls, logits: Tensor | MaskedLogits, first: int, count: int, sampling: Sampling | None
    ) -> Tensor:
        """The laws of neighbouring rows of logits: to whoever gets them, a tensor."""
        logits_RV, masks_RW = logits if isinstance(logits, MaskedLogits) else (logits, None)
        return cast("Tensor", cls([LawRows(logits_RV, first, count, sampling, masks_RW)]))

    @property
    def logits_NV(self) -> Tensor:
        """The logits that the laws are made of."""
        return MaskedLogits(gather_rows(self.parts), gather_masks(self.parts)).applied()

    @cached_property
    def tensor(self) -> Tensor:
        """The laws themselves."""
        if self.of_model:
            law_NV = model_laws(self.logits_NV)
        else:
            samplings = [p.sampling for p in self.parts for _ in range(p.rows)]
            law_NV = row_laws(self.logits_NV, cast("list[Sampling]", samplings))
        return law_NV[0] if self.single else law_NV

    @staticmethod
    def make_together(many: Sequence[PendingLaws]) -> None:
        """Make the laws of many sequences at once."""
        if len(many) > 1:
            together = PendingLaws([part for laws in many for part in laws.parts]).tensor
            for laws, law_NV in zip(many, together.split([laws.count for laws in many])):
                laws.__dict__["tensor"] = law_NV[0] if laws.single else law_NV

    @property
    def of_model(self) -> bool:
        """Are they the model's own laws?"""
        return self.parts[0].sampling is None

    @property
    def is_certain(self) -> bool:
        """Is each of them, at temperature 0, certain of one token?"""
        return all(
            part.sampling is not None and not part.sampling.temperature for part in self.parts
        )

    @property
    def device(self) -> torch.device:
        return self.parts[0].logits_RV.device

    def __len__(self) -> int:
        return self.tensor.shape[0] if self.single else self.count

    def __getitem__(self, index: Any) -> PendingLaws | Tensor:
        if self.single:
            return self.tensor[index]
        if isinstance(index, int):
            row = range(self.count)[index]
            return PendingLaws(self._cut(row, row + 1), single=True)
        if isinstance(index, slice):
            start, stop, step = index.indices(self.count)
            if step == 1:
                return PendingLaws(self._cut(start, stop))
            if step < 1:
                return self.tensor[index]  # which refuses it
            if len(self.parts) == 1:
                return PendingLaws([self.parts[0].cut(start, stop, step)])
            index = [*range(start, stop, step)]
        if not isinstance(index, list):
            return self.tensor[index]
        rows = [range(self.count)[i] for i in index]
        return PendingLaws(
            [part for row in rows for part in self._cut(row, row + 1)] or self._cut(0, 0)
        )

    def _cut(self, start: int, stop: int) -> Sequence[LawRows]:
        """The parts that hold some rows; of none, an empty part."""
        if len(self.parts) == 1 and start < stop:
            whole = stop - start == self.count
            return self.parts if whole else [self.parts[0].cut(start, stop)]
        found = []
        at = 0
        for part in self.parts:
            begin = max(start - at, 0)
            end = min(stop - at, part.rows)
            if begin < end:
                found.append(part.cut(begin, end))
            at += part.rows
        return found or [self.parts[0].cut(0, 0)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in (torch.cat, torch.stack) and len(args) == 1 and not kwargs:
            joined = _joined(args[0], single=function is torch.stack)
            if joined is not None:
                return joined
        return function(*(_made(arg) for arg in args), **(kwargs or {}))


def _by_tensor(name: str) -> Callable[..., Any]:
    def operator(self: PendingLaws, *others: Any) -> Any:
        return getattr(self.tensor, name)(*(_made(other) for other in others))

    return operator


# Python looks operators up in the class, past `__getattr__`.
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow",
              "matmul", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs"):  # fmt: skip
    setattr(PendingLaws, f"__{_name}__", _by_tensor(f"__{_name}__"))


def _joined(laws: Sequence[object], single: bool) -> PendingLaws | None:
    """Laws of the same kind as one, if none of them has been made yet."""
    parts: list[LawRows] = []
    for one in laws:
        if not isinstance(one, PendingLaws) or one.single != single:
            return None
        parts += one.parts
    if not parts or len({part.sampling is None for part in parts}) > 1:
        return None
    return PendingLaws(parts)


def _made(value: Any) -> Any:
    if isinstance(value, PendingLaws):
        return value.tensor
    if isinstance(value, list | tuple):
        return type(value)(_made(one) for one in value)
    return value


def made(value: Tensor) -> Tensor:
    """A law as the tensor that it says it is."""
    return value.tensor if isinstance(value, PendingLaws) else value


def gather_rows(parts: Sequence[LawRows]) -> Tensor:
    """The logits of some rows, part after part."""
    sources = {id(part.logits_RV): part.logits_RV for part in parts}
    if len(sources) == 1 and _are_neighbours(parts):
        first = parts[0].first
        last = parts[-1].first + parts[-1].rows
        return parts[0].logits_RV[first:last]
    sizes = [len(source) for source in sources.values()]
    offsets = dict(zip(sources, [0, *accumulate(sizes)]))
    starts = [offsets[id(part.logits_RV)] for part in parts]
    numbers = [np.array(part.numbers, np.int64) for part in parts]
    index = np.concatenate([start + own for start, own in zip(starts, numbers)])
    tensors = list(sources.values())
    source_SV = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    index_R = to_device(index, torch.long, source_SV.device)
    return source_SV.index_select(0, index_R)


def gather_masks(parts: Sequence[LawRows]) -> np.ndarray | None:
    """The bitmasks of some rows, part after part; None where there are none."""
    known = [part.masks_RW for part in parts if part.masks_RW is not None]
    if not known:
        return None
    masks_NW = np.empty((sum(part.rows for part in parts), known[0].shape[1]), np.int32)
    write_masks(masks_NW, parts)
    return masks_NW


def write_masks(place_NW: np.ndarray, parts: Sequence[LawRows]) -> None:
    """Write the bitmasks of some rows, part after part."""
    whole = parts[0].masks_RW
    if whole is not None and all(p.masks_RW is whole for p in parts) and _are_neighbours(parts):
        place_NW[:] = whole[parts[0].first : parts[-1].first + parts[-1].rows]
        return
    at = 0
    for part in parts:
        end = at + part.rows
        masks_RW = part.masks_RW
        place_NW[at:end] = ANY if masks_RW is None else masks_RW[np.array(part.numbers, np.int64)]
        at = end


def _are_neighbours(parts: Sequence[LawRows]) -> bool:
    """Does each part begin where the last one ends, without gaps?"""
    together = all(one.first + one.rows == two.first for one, two in pairwise(parts))
    return together and all(part.step == 1 for part in parts)
