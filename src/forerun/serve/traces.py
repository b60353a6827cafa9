"""The traces of the last requests that asked for theirs to be kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forerun.api import Model
from forerun.requests.result import Result
from forerun.requests.traces import trace_lines


@dataclass(frozen=True)
class KeptTrace:
    """Who may read it, and its events."""

    client: str
    model: str
    method: str
    lines: list[dict[str, Any]]


class Traces:
    """A bounded store; the oldest goes first."""

    def __init__(self, most: int):
        self.most = most
        self._kept: OrderedDict[str, KeptTrace] = OrderedDict()

    def keep(self, id: str, client: str, model: Model, results: Sequence[Result]) -> None:
        if not self.most or not results:
            return
        decode = partial(model.decode, special=True)
        lines = [
            line
            for index, result in enumerate(results)
            for line in trace_lines(result, index, decode)
        ]
        self._kept[id] = KeptTrace(client, model.name, results[0].method, lines)
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def get(self, id: str, client: str) -> KeptTrace | None:
        """A client's own trace."""
        kept = self._kept.get(id)
        return kept if kept is not None and kept.client == client else None
