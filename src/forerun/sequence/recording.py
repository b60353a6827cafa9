"""Everything that a trace can show of one sequence, line by line in the order in which it happened.

A `Trace` holds the commits and costs next to nothing. A `Recorder` also keeps what the model said,
what was drafted, what a router decided, and the laws behind every token. It asks the device for
numbers, so it is made only for requests that ask for it. Lines are plain data for JSON, without
texts: a sequence knows no tokenizer.

N rows that were read, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from forerun.probability.pending import made
from forerun.sequence.trace import Event, Trace

TOP = 5  # candidates kept of every law
DIGITS = 6  # of probabilities and seconds

Line = dict[str, Any]


def do_nothing() -> None:
    pass


class Recorder:
    """The lines of one sequence. `on_line` is called after each of them, where the engine runs: it
    must not wait."""

    def __init__(self, trace: Trace, start: Mapping[str, Any]):
        self.trace = trace
        self.lines: list[Line] = []
        self.on_line: Callable[[], object] = do_nothing
        self._began = time.perf_counter()
        self._answered: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._drafted: dict[int, tuple[int, Tensor | None]] = {}
        self.lines.append({"kind": "start", **start})

    def begin(self, tokens: Sequence[int], blank: int) -> None:
        """The canvas as it was given is another."""
        self.lines[0] = {
            **self.lines[0],
            "tokens": [None if token == blank else token for token in tokens],
        }

    def answered(
        self,
        chains: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        pairs: Sequence[tuple[Tensor, Tensor]],
        drafting: bool,
    ) -> None:
        """A forward gave (logits, law) of some positions, branch by branch."""
        if not drafting:
            self._answered.clear()
            for branch, (where, (logits_NV, law_NV)) in enumerate(zip(positions, pairs)):
                for row, position in enumerate(where):
                    self._answered[branch, int(position)] = (logits_NV[row], law_NV[row])
        asked = [int(position) for position in positions[0]]
        model_NV = pairs[0][0][: len(asked)].double().softmax(-1)
        confidence_N, likeliest_N = model_NV.max(-1)
        self._write(
            "forward",
            forward=self.trace.forwards + (not drafting),
            draft=drafting,
            positions=asked,
            tokens=likeliest_N.tolist(),
            confidence=_rounded(confidence_N),
            chain=[int(token) for token in chains[0]],
            branches=len(pairs),
        )

    def drafted(self, positions: Sequence[int], tokens: Sequence[int], q_KV: Tensor | None) -> None:
        """These tokens are judged next; q are the laws they were drawn from, None for a guess."""
        q_KV = None if q_KV is None else made(q_KV)
        self._drafted = {
            int(position): (int(token), None if q_KV is None else q_KV[i])
            for i, (position, token) in enumerate(zip(positions, tokens))
        }
        self._write(
            "draft",
            forward=self.trace.forwards,
            positions=[int(position) for position in positions],
            tokens=[int(token) for token in tokens],
            q=[self._q_of(int(position), token) for position, token in zip(positions, tokens)],
        )

    def routed(self, verify: bool, seen: Mapping[str, Any]) -> None:
        """A router decided whether to verify, from what it saw."""
        self._write("router", forward=self.trace.forwards, verify=verify, **seen)

    def committed(self, event: Event, branches: Sequence[int] = ()) -> None:
        """Tokens were decided. `branches` are those whose laws they were drawn from."""
        laws = [
            self._law(position, token, branches[i] if i < len(branches) else 0)
            for i, (position, token) in enumerate(zip(event.positions, event.tokens))
        ]
        numbers = asdict(event)
        numbers["positions"] = [int(position) for position in event.positions]
        self._write("commit", **numbers, laws=laws)

    def _law(self, position: int, token: int, branch: int) -> Line | None:
        """What the model said of a place: its own law, the law p after the sampling parameters, and
        the law q that a draft there was drawn from."""
        position = int(position)
        pair = self._answered.get((branch, position))
        if pair is None:
            return None
        model_V = pair[0].double().softmax(-1)
        p_V = pair[1]
        top = model_V.topk(min(TOP, len(model_V))).indices.tolist()
        drafted, _ = self._drafted.get(position, (None, None))
        wanted = list(dict.fromkeys([*top, token, *([] if drafted is None else [drafted])]))
        index_N = torch.tensor(wanted, device=model_V.device)
        model = _rounded(model_V[index_N])
        p = _rounded(p_V[index_N.to(p_V.device)])
        return {
            "tokens": wanted,
            "model": model,
            "p": p,
            "q": [self._q_of(position, each) for each in wanted],
            "drafted": drafted,
        }

    def _q_of(self, position: int, token: int) -> float | None:
        """A token's chance in the law of a draft. A guess is certain of itself."""
        if position not in self._drafted:
            return None
        drafted, q_V = self._drafted[position]
        return float(token == drafted) if q_V is None else round(float(q_V[token]), DIGITS)

    def _write(self, kind: str, **facts: Any) -> None:
        passed = round(time.perf_counter() - self._began, DIGITS)
        self.lines.append({"kind": kind, "time": passed, **facts})
        self.on_line()


def _rounded(values_N: Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values_N.tolist()]
