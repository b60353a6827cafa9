"""What the holes of a text must hold, as users write it, and the lengths at which they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.constraints.spec import ENGINES, ConstraintSpec, spec_of
from forerun.errors import BadOption, unknown
from forerun.requests.model import DecodableModel
from forerun.requests.structure import hole_automaton, vocabulary_of

HOLE_KEYS = ("schema", "regex", "grammar", "choices")
LONGEST_TRIED = 64  # tokens of a text of a hole's language, to say how long one would be


def hole_specs(
    count: int, for_all: ConstraintSpec | None, holes: Any
) -> list[ConstraintSpec | None]:
    """What each hole must hold: the same for all of them, or one by one."""
    if holes is None:
        return [for_all] * count
    if for_all is not None:
        raise BadOption(f"holes= and {for_all.argument}=: give one of them.")
    if isinstance(holes, str | Mapping) or not isinstance(holes, Sequence):
        raise BadOption(f"holes={holes!r} must be a list with one entry for each hole.")
    if len(holes) != count:
        raise BadOption(
            f"holes= has {len(holes)} entries, and the text has {count} holes: give one for each, "
            f"None where anything may stand."
        )
    return [_hole_spec(one) for one in holes]


def _hole_spec(given: Any) -> ConstraintSpec | None:
    if given is None or isinstance(given, ConstraintSpec):
        return given
    if not isinstance(given, Mapping) or len(given) != 1:
        raise BadOption(
            f"holes= has {given!r} in it, which must be None or have one of {', '.join(HOLE_KEYS)}."
        )
    [(key, value)] = given.items()
    if key not in HOLE_KEYS:
        raise unknown("key of a hole", str(key), HOLE_KEYS)
    given = dict.fromkeys(HOLE_KEYS) | {key: value}
    return spec_of(given["schema"], given["regex"], given["grammar"], given["choices"], ENGINES[0])


def fitting_sizes(
    model: DecodableModel,
    sizes: Sequence[Sequence[int]],
    specs: Sequence[ConstraintSpec | None],
    never: frozenset[int],
) -> list[Sequence[int]]:
    """The sizes of every hole at which it can hold what it must."""
    numbered = enumerate(zip(sizes, specs, strict=True), 1)
    return [
        allowed if spec is None else _fitting(model, number, allowed, spec, never)
        for number, (allowed, spec) in numbered
    ]


def _fitting(
    model: DecodableModel,
    number: int,
    allowed: Sequence[int],
    spec: ConstraintSpec,
    never: frozenset[int],
) -> Sequence[int]:
    """The lengths of a hole at which a text of its language has so many tokens. A hole without a
    length takes those of its choices, as the tokenizer writes them."""
    vocabulary = vocabulary_of(model, spec)
    if not allowed and spec.kind == "choices":
        allowed = sorted({len(vocabulary.encode(text)) for text in spec.choices})
    if not allowed:
        return allowed
    possible = hole_automaton(model, spec, never).lengths(max(*allowed, LONGEST_TRIED))
    found = [size for size in allowed if size in possible]
    if not found:
        raise BadOption(
            f"hole {number} has {said_sizes(allowed)} tokens, and no text of {spec.argument}= "
            f"{_shortest(possible)}."
        )
    return found


def _shortest(possible: Sequence[int]) -> str:
    if not possible:
        return f"with up to {LONGEST_TRIED} tokens can be spelled with this model's tokens"
    return f"has so many: the shortest has {possible[0]}"


def said_sizes(sizes: Sequence[int]) -> str:
    if not sizes:
        return "at least 1"
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
