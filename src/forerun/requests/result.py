"""What a request gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from forerun.constraints.parsing import plain
from forerun.registry import Method
from forerun.requests.tools import ToolCall
from forerun.sequence.logprobs import TokenLogprob
from forerun.sequence.trace import Choice, Event, Trace


@dataclass(frozen=True)
class Stats:
    """What a request cost. Forwards are counted per request: one that shares a batch counts each
    forward it took part in."""

    prompt_tokens: int
    tokens: int
    forwards: int
    draft_forwards: int
    tokens_per_forward: float
    # tokens per verdict on a draft, the resampled or bonus token included
    acceptance_length: float | None
    acceptance_rate: float | None  # accepted tokens per drafted token
    # accepted tokens per token judged; what follows a rejected one is not (papers: alpha)
    alpha: float | None
    acceptance_histogram: dict[int, int]  # accepted tokens -> verdicts
    seconds: float  # from the first forward to the last token; waiting for a lane not included
    queued_seconds: float
    tokens_per_second: float
    # from the first forward to the first token that was final
    first_token_seconds: float | None = None
    choices: dict[str, int] = field(
        default_factory=dict
    )  # who drafted -> steps, if that was chosen
    notes: list[str] = field(default_factory=list)  # such as a drafter that failed


NO_COST = Stats(0, 0, 0, 0, 0.0, None, None, None, {}, 0.0, 0.0, 0.0)


def stats_of(
    trace: Trace,
    *,
    prompt_tokens: int,
    tokens: int,
    seconds: float,
    queued_seconds: float,
    first_token_seconds: float | None = None,
) -> Stats:
    """What a request cost, from its trace."""
    accepted: dict[int, int] = {}  # by forward, of those that were verdicts on a draft
    for event in trace.drafts():
        accepted[event.forward] = accepted.get(event.forward, 0) + event.accepted
    added = [event for event in trace.events if event.reason in ("resampled", "bonus")]
    extra = sum(event.forward in accepted for event in added)
    total = sum(accepted.values())
    drafted = sum(len(event.drafted) for event in trace.events)
    rejections = sum(bool(event.rejected) for event in trace.drafts())
    judged = total + rejections
    return Stats(
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        forwards=trace.forwards,
        draft_forwards=trace.draft_forwards,
        tokens_per_forward=tokens / trace.forwards if trace.forwards else 0.0,
        acceptance_length=(total + extra) / len(accepted) if accepted else None,
        acceptance_rate=total / drafted if drafted else None,
        alpha=total / judged if judged else None,
        acceptance_histogram=dict(sorted(Counter(accepted.values()).items())),
        seconds=seconds,
        queued_seconds=queued_seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        first_token_seconds=first_token_seconds,
        choices=_steps_by_drafter(trace),
        notes=list(trace.notes),
    )


def _steps_by_drafter(trace: Trace) -> dict[str, int]:
    """How many steps each choice was for. Plain text may be written in several at once."""
    ends = [choice.forward for choice in trace.choices[1:]] + [trace.forwards + 1]
    steps: Counter[str] = Counter()
    for choice, end in zip(trace.choices, ends):
        steps[choice.drafter] += end - choice.forward
    return dict(steps)


class Promise(TypedDict):
    """What a result promises."""

    method: str
    model: str
    guarantee: str
    reference: str
    reason: str


def promise_of(method: Method, options: object, model: str, constraint: str = "") -> Promise:
    """`constraint` says how one is read, if there is one."""
    claim = method.claim(options)
    return {
        "method": method.name,
        "model": model,
        "guarantee": claim.guarantee,
        "reference": f"{claim.reference} on {model}{constraint}",
        "reason": claim.reason,
    }


@dataclass(frozen=True)
class Result:
    """One decoded sequence, what it promises and what it cost."""

    text: str
    token_ids: list[int]
    # stop | length | unmet (a constraint, in max_tokens) | deadline | cancelled | error
    finish_reason: str
    method: str
    model: str
    guarantee: str  # exact | approximate
    reference: str  # what the guarantee is relative to
    stats: Stats
    trace: list[Event] = field(repr=False)
    # What `auto` chose for each step, and from what.
    choices: list[Choice] = field(repr=False, default_factory=list)
    reason: str = ""  # why it is approximate, and what it equals all the same
    prompt_ids: list[int] = field(repr=False, default_factory=list)
    stopped_by: str | int | None = None  # the stop string or token, if one ended the text
    logprobs: list[TokenLogprob] | None = field(repr=False, default=None)
    # Of the prompt's tokens; None for those that the model says nothing of, such as the first.
    prompt_logprobs: list[TokenLogprob | None] | None = field(repr=False, default=None)
    error: Exception | None = None
    # Everything that a trace can show, for requests with `record=True`: see `requests/traces.py`.
    recorded: Sequence[Mapping[str, Any]] | None = field(repr=False, default=None)
    parsed: Any = None  # the value of a text that a constraint has made
    tool_calls: list[ToolCall] | None = None  # where tools were given: the calls in the text

    @property
    def promise(self) -> str:
        """Its guarantee and reference in words."""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.guarantee}{why}, reference: {self.reference}"

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
            "reason": self.reason,
            "stats": asdict(self.stats),
        }
        if self.logprobs is not None:
            out["logprobs"] = self.logprobs
        if self.prompt_logprobs is not None:
            out["prompt_logprobs"] = self.prompt_logprobs
        if self.tool_calls is not None:
            out["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.parsed is not None:
            out["parsed"] = plain(self.parsed)
        if self.error is not None:
            out["error"] = f"{type(self.error).__name__}: {self.error}"
        return out
