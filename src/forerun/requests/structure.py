"""The constraint of one sequence, from the request that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forerun.constraints.base import Constraint, bitmask, bitmask_without
from forerun.constraints.engines import Grammar, compiled
from forerun.constraints.left_to_right import LeftToRight
from forerun.constraints.spec import ConstraintSpec
from forerun.errors import BadOption, NotAble
from forerun.options import Sampling
from forerun.requests.model import DecodableModel
from forerun.requests.request import DecodeRequest, stop_tokens
from forerun.sequence.canvas import BLANK


def with_constraint(options: Mapping[str, Any], spec: ConstraintSpec | None) -> dict[str, Any]:
    """The options of a request whose text a constraint is put on besides."""
    if spec is None:
        return dict(options)
    sampling = options.get("sampling")
    if isinstance(sampling, Sampling):
        return {**options, "sampling": replace(sampling, grammar=spec)}
    if options.get("grammar") is not None:
        raise BadOption("grammar= and tool_choice=: give one of them.")
    return {**options, "grammar": spec}


def grammar_of(model: DecodableModel, request: DecodeRequest) -> Grammar | None:
    """The compiled grammar of a request that has one."""
    spec = request.sampling.constraint
    if spec is None:
        return None
    if model.vocabulary is None:
        raise BadOption(
            f"{spec.argument}= needs a tokenizer, and '{model.name}' has none: use allowed_tokens."
        )
    return compiled(spec, model.vocabulary)


def constraint_of(
    model: DecodableModel,
    request: DecodeRequest,
    canvas: Sequence[int],
    forbidden: frozenset[int] = frozenset(),
) -> Constraint | None:
    """The constraint of a sequence, at its beginning; None without one."""
    grammar = grammar_of(model, request)
    if grammar is None:
        return None
    first = list(canvas).index(BLANK)
    _check_order(request, canvas[first:])
    allowed = request.sampling.allowed_tokens
    possible_W = bitmask_without(forbidden.union(model.family.impossible_tokens), model.vocab)
    if allowed is not None:
        possible_W = possible_W & bitmask(allowed, model.vocab)
    return LeftToRight(
        grammar.language(),
        first,
        stop_tokens(model, request.sampling),
        model.vocab,
        possible_W,
    )


def _check_order(request: DecodeRequest, behind: Sequence[int]) -> None:
    """Refuse a constraint where tokens behind a blank are known before it is decided."""
    spec = request.sampling.constraint
    assert spec is not None
    if not request.method.left_to_right:
        raise NotAble(
            f"{spec.argument}=: method={request.method.name!r} does not decide from left to right."
        )
    if any(token != BLANK for token in behind):
        raise NotAble(f"{spec.argument}=: text behind a hole cannot be constrained.")
