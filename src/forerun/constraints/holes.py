"""From what the holes of a text must hold to the constraint of its canvas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.constraints.automaton import (
    ByteAutomaton,
    TokenAutomaton,
    restricted,
    token_automaton,
    with_ends,
    without_ends,
)
from forerun.constraints.canvas import Stretch
from forerun.constraints.regular import language_of_choices, language_of_regex
from forerun.constraints.schema import language_of_schema
from forerun.constraints.spec import ConstraintSpec
from forerun.constraints.spelling import spelling_of
from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import NotAble


class Hole(NamedTuple):
    """Places [start, end) of a canvas, and what they must hold."""

    start: int
    end: int
    spec: ConstraintSpec | None


def language_of(spec: ConstraintSpec) -> ByteAutomaton:
    """The regular language that a user asks for."""
    if spec.kind == "choices":
        return language_of_choices(tuple(spec.choices))
    if spec.kind == "regex":
        return language_of_regex(spec.text)
    if spec.kind == "json":
        return language_of_schema(spec.text)
    raise NotAble(
        f"{spec.argument}=: a context-free grammar is kept from left to right only. In a hole or "
        f"on a canvas what fits at a blank hangs on the text behind it too, and that is known for "
        f"regular languages only: use regex=, choices=, or schema= of bounded depth."
    )


def automaton_of(
    spec: ConstraintSpec, vocabulary: Vocabulary, never: frozenset[int]
) -> TokenAutomaton:
    """The same over a model's tokens, without those that are never written."""

    def make() -> TokenAutomaton:
        whole = vocabulary.once(
            ("automaton", spec), lambda: token_automaton(language_of(spec), spelling_of(vocabulary))
        )
        if not never:
            return whole
        possible_V = np.ones(vocabulary.size, bool)
        possible_V[list(never)] = False
        return restricted(whole, possible_V)

    return vocabulary.once(("automaton", spec, never), make)


def ending_stretch(
    automaton: TokenAutomaton, start: int, end: int, ends: frozenset[int], least: int
) -> Stretch:
    """What is generated, up to one of the `ends`, which may not come before `least` tokens."""
    if not ends:
        return Stretch(start, end, automaton)
    ending = with_ends(automaton, sorted(ends))
    return Stretch(start, end, ending, without_ends(ending) if least else None, least)
