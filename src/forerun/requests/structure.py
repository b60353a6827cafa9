"""The constraint of one sequence, from the request that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forerun.constraints.automaton import TokenAutomaton
from forerun.constraints.base import Constraint, bitmask, bitmask_without
from forerun.constraints.canvas import OnCanvas, Stretch
from forerun.constraints.engines import Grammar, compiled
from forerun.constraints.holes import Hole, automaton_of, ending_stretch
from forerun.constraints.left_to_right import LeftToRight
from forerun.constraints.spec import ENGINES, ConstraintSpec
from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import BadOption
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
    return compiled(spec, vocabulary_of(model, spec))


def constraint_of(
    model: DecodableModel,
    request: DecodeRequest,
    canvas: Sequence[int],
    forbidden: frozenset[int] = frozenset(),
    holes: Sequence[Hole] = (),
) -> Constraint | None:
    """The constraint of a sequence, at its beginning; None without one. `holes` says what each hole
    must hold, where a text has holes."""
    if holes or not request.method.left_to_right:
        return _on_canvas(model, request, canvas, forbidden, holes)
    grammar = grammar_of(model, request)
    if grammar is None:
        return None
    first = list(canvas).index(BLANK)
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


def never_written(
    model: DecodableModel, request: DecodeRequest, forbidden: frozenset[int]
) -> frozenset[int]:
    """Tokens that no text has, whatever the constraint."""
    every = frozenset(range(model.vocab))
    never = forbidden | frozenset(model.family.impossible_tokens)
    allowed = request.sampling.allowed_tokens
    return every & (never if allowed is None else never | (every - set(allowed)))


def check_no_engine(engine: str | None) -> None:
    """Refuse an engine for grammars where none reads the constraint."""
    if engine not in (None, ENGINES[0]):
        raise BadOption(
            f"grammar_engine={engine!r}: in holes and on canvases constraints are regular, "
            f"and no engine reads them. Leave grammar_engine out."
        )


def _on_canvas(
    model: DecodableModel,
    request: DecodeRequest,
    canvas: Sequence[int],
    forbidden: frozenset[int],
    holes: Sequence[Hole],
) -> OnCanvas | None:
    """The constraint of a canvas that is not filled from left to right, or has text behind a
    hole."""
    never = never_written(model, request, forbidden)
    spec = request.sampling.constraint
    if holes:
        stretches = [
            Stretch(start, end, hole_automaton(model, one, never))
            for start, end, one in holes
            if one is not None
        ]
    elif spec is not None:
        check_no_engine(spec.engine)
        ends = (stop_tokens(model, request.sampling) & set(range(model.vocab))) - never
        automaton = hole_automaton(model, spec, never | ends)
        first = list(canvas).index(BLANK)
        least = request.sampling.min_tokens
        stretches = [ending_stretch(automaton, first, len(canvas), ends, least)]
    else:
        stretches = []
    return OnCanvas(stretches, canvas, model.vocab) if stretches else None


def hole_automaton(
    model: DecodableModel, spec: ConstraintSpec, never: frozenset[int]
) -> TokenAutomaton:
    """What a hole must hold, over the model's tokens."""
    return automaton_of(spec, vocabulary_of(model, spec), never)


def vocabulary_of(model: DecodableModel, spec: ConstraintSpec) -> Vocabulary:
    if model.vocabulary is None:
        raise BadOption(
            f"{spec.argument}= needs a tokenizer, and '{model.name}' has none: use allowed_tokens."
        )
    return model.vocabulary
