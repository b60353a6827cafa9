"""A trace as JSON lines: one schema for files, for streams and for the page.

Every line has a `kind`. A request begins with `start`, which has its canvas, and closes with `end`,
which has its text and what it cost. Between them stand, in the order in which they happened,
`forward` (what a model said), `draft` (what is judged next), `router` (whether to verify), `choice`
(who drafts) and `commit` (what was decided). A request that recorded nothing has commits only.
`docs/page.md` lists the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from forerun.requests.model import DecodableModel
from forerun.requests.request import DecodeRequest
from forerun.requests.result import Result
from forerun.sequence.canvas import BLANK
from forerun.sequence.trace import Event

VERSION = 2  # of the schema; 1 had commits only

# For each list of tokens, where their texts stand.
TEXTS = {"tokens": "texts", "rejected": "rejected_texts", "chain": "chain_texts"}

Line = dict[str, Any]
Decode = Callable[[list[int]], str]


def start_line(model: DecodableModel, request: DecodeRequest, tokens: Sequence[int]) -> Line:
    """What a request is, without its texts. Blanks are null."""
    sampling = request.sampling
    return {
        "version": VERSION,
        "model": model.name,
        "family": model.family.name,
        "method": request.method.name,
        "guarantee": request.method.guarantee,
        "reference": request.method.reference,
        "options": _plain(request.options),
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "tokens": [None if token == BLANK else int(token) for token in tokens],
    }


def _plain(options: object) -> Line:
    """Options as JSON; a value that JSON has no word for is written out."""
    simple = (str, int, float, bool, type(None))
    return {
        name: value if isinstance(value, simple) else str(value)
        for name, value in vars(options).items()
    }


def end_line(result: Result) -> Line:
    """What became of a request."""
    line: Line = {
        "kind": "end",
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stats": asdict(result.stats),
    }
    if result.error is not None:
        line["error"] = str(result.error)
    return line


def commit_line(event: Event) -> Line:
    """What was decided at once, of a request that records nothing else."""
    return {"kind": "commit", **asdict(event)}


def with_texts(line: Mapping[str, Any], request: int, decode: Decode) -> Line:
    """A line with its request, and with a text beside every token."""
    told: Line = {**line, "request": request}
    for tokens, texts in TEXTS.items():
        if tokens in line:
            told[texts] = _texts(line[tokens], decode)
    if line.get("laws"):
        told["laws"] = [
            law and {**law, "texts": _texts(law["tokens"], decode)} for law in line["laws"]
        ]
    return told


def _texts(tokens: Sequence[int | None], decode: Decode) -> list[str]:
    return ["" if token is None else decode([token]) for token in tokens]


def trace_lines(result: Result, request: int, decode: Decode) -> list[Line]:
    """The trace of a result: all that was recorded, or its commits."""
    recorded: list[Mapping[str, Any]] = [commit_line(event) for event in result.trace]
    if result.recorded is not None:
        recorded = [*result.recorded, end_line(result)]
    return [with_texts(line, request, decode) for line in recorded]
