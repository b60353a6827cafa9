"""What a request gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.core import Event


@dataclass(frozen=True)
class Stats:
    """What a request cost. Forwards are counted per request: one that shares a batch counts each forward it took part in."""

    prompt_tokens: int
    tokens: int
    forwards: int
    draft_forwards: int
    tokens_per_forward: float
    acceptance_length: float | None  # tokens per verdict on a draft, the resampled or bonus token included
    acceptance_rate: float | None  # accepted tokens per drafted token
    acceptance_histogram: dict[int, int]  # accepted tokens -> verdicts
    seconds: float  # from the first forward to the last token; waiting for a lane not included
    queued_seconds: float
    tokens_per_second: float


def stats_of(
    trace: Sequence[Event],
    *,
    prompt_tokens: int,
    tokens: int,
    forwards: int,
    draft_forwards: int,
    seconds: float,
    queued_seconds: float,
) -> Stats:
    judged = {event.forward for event in trace if event.drafted}  # forwards that were verdicts on a draft
    accepted = dict.fromkeys(sorted(judged), 0)
    for event in trace:
        if event.drafted:
            accepted[event.forward] += len(event.drafted) - len(event.rejected)
    extra = sum(1 for event in trace if event.forward in judged and event.reason in ("resampled", "bonus"))
    drafted = sum(len(event.drafted) for event in trace)
    return Stats(
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        forwards=forwards,
        draft_forwards=draft_forwards,
        tokens_per_forward=tokens / forwards if forwards else 0.0,
        acceptance_length=(sum(accepted.values()) + extra) / len(judged) if judged else None,
        acceptance_rate=sum(accepted.values()) / drafted if drafted else None,
        acceptance_histogram=dict(sorted(Counter(accepted.values()).items())),
        seconds=seconds,
        queued_seconds=queued_seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
    )


@dataclass(frozen=True)
class Result:
    """One decoded sequence, what it promises and what it cost."""

    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | cancelled | error
    method: str
    model: str
    guarantee: str  # exact | greedy-exact | approximate
    reference: str  # what the guarantee is relative to
    stats: Stats
    trace: list[Event] = field(repr=False)
    prompt_ids: list[int] = field(repr=False, default_factory=list)
    stopped_by: str | int | None = None  # the stop string or token, if one ended the text
    logprobs: list[dict[str, Any]] | None = field(repr=False, default=None)
    error: Exception | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the trace."""
        out: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stopped_by": self.stopped_by,
            "method": self.method,
            "model": self.model,
            "guarantee": self.guarantee,
            "reference": self.reference,
            "stats": asdict(self.stats),
        }
        if self.logprobs is not None:
            out["logprobs"] = self.logprobs
        if self.error is not None:
            out["error"] = f"{type(self.error).__name__}: {self.error}"
        return out
