"""What can be named: methods, drafters, routers and families; our own, and those that installed
packages bring as entry points.

A package outside this repository adds a method with an entry point in the group `forerun.methods`
(or `.drafters`, `.routers`, `.families`) that names the decorated object; see docs/extending.md. A
method of a plain file has its name as soon as the file is imported.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, NamedTuple, Protocol, get_type_hints

from forerun.errors import BadOption, NotAble, unknown

# Our own, by the same "module:object" references that entry points use, so that nothing is imported
# before it is named.
BUILT_IN: dict[str, dict[str, str]] = {
    "methods": {
        "auto": "forerun.methods.auto:auto",
        "ar": "forerun.methods.autoregressive:autoregressive",
        "speculative": "forerun.methods.speculative:speculative",
        "lookup": "forerun.methods.speculative:lookup",
        "predicted": "forerun.methods.predicted:predicted",
        "sequential": "forerun.methods.autoregressive:sequential",
        "assd": "forerun.methods.assd:assd",
        "stepwise": "forerun.methods.stepwise:stepwise",
        "steps": "forerun.methods.stepwise:steps",
        "threshold": "forerun.methods.stepwise:threshold",
        "entropy-bounded": "forerun.methods.stepwise:bounded",
        "ssd": "forerun.methods.ssd:ssd",
        "ancestral": "forerun.methods.ancestral:ancestral",
        "specdiff": "forerun.methods.specdiff:specdiff",
        "specdiff-confidence": "forerun.methods.specdiff:confidence_specdiff",
        "specdiff-ddpm": "forerun.methods.specdiff:ddpm_specdiff",
        "jacobi": "forerun.methods.jacobi:jacobi",
        "multiblock": "forerun.methods.multiblock:multiblock",
        "lookahead": "forerun.methods.lookahead:lookahead",
        "block": "forerun.methods.block:block",
        "block-stepwise": "forerun.methods.block:stepwise",
        "block-ssd": "forerun.methods.ssd:block_ssd",
        "s2d2": "forerun.methods.s2d2:s2d2",
        "s2d2-exact": "forerun.methods.s2d2:s2d2_exact",
        "s2d2-canvases": "forerun.methods.s2d2:s2d2_canvases",
        "assd-tolerant": "forerun.methods.assd:tolerant_assd",
    },
    "drafters": {
        "model": "forerun.drafters.autoregressive:ModelDrafter",
        "lookup": "forerun.drafters.lookup:LookupDrafter",
        "predicted": "forerun.drafters.predicted:PredictedDrafter",
        "diffusion": "forerun.drafters.diffusion:DiffusionDrafter",
        "diffusion-confidence": "forerun.drafters.diffusion:ConfidenceDrafter",
        "ddpm_cache": "forerun.drafters.diffusion:DdpmCacheDrafter",
        "ngram": "forerun.drafters.ngram:NgramDrafter",
        "features": "forerun.drafters.features:FeaturesDrafter",
    },
    "routers": {
        "span": "forerun.methods.routers:SpanRouter",
        "score": "forerun.methods.routers:ScoreRouter",
        "hysteresis": "forerun.methods.routers:HysteresisRouter",
        "bandit": "forerun.methods.routers:BanditRouter",
    },
    "families": {
        "causal": "forerun.families.causal:Causal",
        "any-subset": "forerun.families.any_subset:AnySubset",
        "masked": "forerun.families.masked:Masked",
        "block": "forerun.families.block:Block",
        "xlnet": "forerun.families.any_subset:XLNet",
    },
}


SINGULAR = {
    "methods": "method",
    "drafters": "drafter",
    "routers": "router",
    "families": "family",
}
GUARANTEES = ("exact", "approximate")
LEFT_TO_RIGHT = ("ar", "sequential")  # references that decide blank after blank

Run = Callable[..., Coroutine[Any, Any, None]]


class Capability(Protocol):
    """A class of handles, as far as an error needs to know it."""

    does: str  # "a model that …"


class Capable(Protocol):
    """A family, as far as a method needs to know it."""

    name: ClassVar[str]

    def can(self, capability: Any) -> bool: ...


class Departure(NamedTuple):
    """An option that makes an exact method read its model otherwise than the model is defined."""

    option: str
    reason: str


Departs = Callable[[Any], Departure | None]  # of a method's options


class Claim(NamedTuple):
    """What a method promises with the options that it was given."""

    guarantee: str  # one of GUARANTEES
    reference: str  # the method whose law (or tokens) it has, or comes close to
    reason: str = ""  # why it is approximate, and what it equals all the same


@dataclass(frozen=True)
class NoOptions:
    """For methods that have none."""


@dataclass(frozen=True)
class Method:
    """A decoding method: an async function for one sequence, and what it promises.

    What it needs of a model and which options it takes are read from the annotations of its
    parameters `target` and `options`, unless they are given.
    """

    name: str
    run: Run
    guarantee: str  # one of GUARANTEES
    reference: str  # the method whose law (or tokens) it has
    drafter: str | None = None  # the drafter it always uses; None leaves the choice to `draft=`
    reason: str = ""  # why it is approximate, if it is
    options_type: type | None = None
    target_types: tuple[type[Capability], ...] = ()
    left_to_right: bool = False  # is every blank decided after all before it?
    departs: Departs | None = None  # which options make it approximate to the model
    asks_costs: bool = False  # does it choose by what forwards cost here?
    about: str = ""  # what it does, where it shares its function with others

    def claim(self, options: object) -> Claim:
        """What it promises with these options, an instance of `self.options`."""
        departure = self.departs(options) if self.departs is not None else None
        if departure is None:
            return Claim(self.guarantee, self.reference, self.reason)
        reason = f"approximate to the model: {departure.reason}"
        if self.guarantee == "approximate":
            reason = f"{self.reason}; {departure.reason}"
        elif self.name != self.reference:
            same = f"identical to {self.reference} under the same {departure.option}"
            reason = f"{same}; {reason}"
        return Claim("approximate", self.reference, reason)

    @property
    def summary(self) -> str:
        """What it does: the first paragraph of its docstring, unless it has words of its own."""
        if self.about:
            return self.about
        paragraphs = (inspect.getdoc(self.run) or "").split("\n\n")
        return " ".join(paragraphs[0].split())

    @cached_property
    def options(self) -> type:
        """The dataclass of its options."""
        if self.options_type is not None:
            return self.options_type
        return get_type_hints(self.run).get("options", NoOptions)

    @cached_property
    def needs(self) -> tuple[type[Capability], ...]:
        """What its target must be able to do."""
        if self.target_types:
            return self.target_types
        target = get_type_hints(self.run).get("target")
        return () if target is None else (target,)

    @cached_property
    def drafts(self) -> bool:
        return "drafter" in inspect.signature(self.run).parameters

    @cached_property
    def drafts_itself(self) -> bool:
        """Does it draft without a drafter too? Then its parameter `drafter` may be None."""
        return self.drafts and inspect.signature(self.run).parameters["drafter"].default is None

    def option_names(self) -> list[str]:
        return [f.name for f in fields(self.options)]

    def runs_on(self, family: Capable) -> bool:
        """Can models of this family do what the method asks?"""
        return all(family.can(need) for need in self.needs)

    def check(self, family: Capable, model_name: str) -> None:
        """Refuse a model that cannot do what this method asks."""
        missing = [need.does for need in self.needs if not family.can(need)]
        if missing:
            known = usable("methods").items()
            possible = [name for name, method in known if method.runs_on(family)]
            raise NotAble(
                f"method={self.name!r} needs a model that {' and '.join(missing)}, and "
                f"'{model_name}' (family '{family.name}') does not. "
                f"Try method={' or '.join(map(repr, possible))}."
            )


def method(  # noqa: PLR0913 - keywords of a public function
    name: str,
    *,
    guarantee: str,
    reference: str,
    options: type | None = None,
    drafter: str | None = None,
    reason: str = "",
    needs: tuple[type[Any], ...] = (),
    left_to_right: bool | None = None,
    departs: Departs | None = None,
    asks_costs: bool = False,
    about: str = "",
) -> Callable[[Run], Method]:
    """Make a decoding method of an async function `(seq, target, options[, drafter])`.

    It is `left_to_right` if it decides every blank after all before it; not given, if its reference
    is. `departs` tells, of its options, which one makes it approximate to the model, if any does.
    With `asks_costs`, the engine finds out what forwards cost before it begins. `about` says what
    it does, where the function's docstring does not.
    """
    if guarantee not in GUARANTEES:
        raise BadOption(f"guarantee={guarantee!r} must be 'exact' or 'approximate'.")

    ordered = reference in LEFT_TO_RIGHT if left_to_right is None else left_to_right

    def define(run: Run) -> Method:
        made = Method(
            name,
            run,
            guarantee,
            reference,
            drafter,
            reason,
            options,
            needs,
            ordered,
            departs,
            asks_costs,
            about,
        )
        _defined[name] = made
        return made

    return define


_defined: dict[str, Method] = {}  # in this process, by `method`; a name's last one counts


def method_named(name: str | Method) -> Method:
    """A method by its name; a method is itself."""
    return name if isinstance(name, Method) else get("methods", name)


def _outside(kind: str) -> dict[str, EntryPoint]:
    return _installed(kind, entry_points, tuple(sys.path))


@lru_cache
def _installed(
    kind: str, find: Callable[..., Iterable[EntryPoint]], path: tuple[str, ...]
) -> dict[str, EntryPoint]:
    """Looking through all packages takes milliseconds, so it is done once."""
    return {point.name: point for point in find(group=f"forerun.{kind}")}


def names(kind: str) -> list[str]:
    return sorted(BUILT_IN[kind].keys() | _outside(kind).keys())


def get(kind: str, name: str) -> Any:
    """The named object; our own names cannot be taken over by a package."""
    if not isinstance(name, str):
        raise BadOption(f"{SINGULAR[kind]}={name!r} must be a name.")
    if name in BUILT_IN[kind]:
        module, _, attribute = BUILT_IN[kind][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    outside = _outside(kind)
    if kind == "methods" and name in _defined and name not in outside:
        return _defined[name]
    if name not in outside:
        raise unknown(SINGULAR[kind], name, names(kind))
    try:
        found = outside[name].load()
        if kind == "methods":
            _check_method(found)
        return found
    except BaseException as error:  # whatever a package does when it is imported, even exit
        raise BadOption(
            f"{SINGULAR[kind]}={name!r} comes from a package that cannot be used "
            f"({outside[name].value}): {type(error).__name__}: {error}"
        ) from error


def _check_method(found: Any) -> None:
    """Refuse what is no method, or one whose annotations cannot be read."""
    if not isinstance(found, Method):
        raise TypeError(f"{found!r} was not made by @forerun.method")
    found.option_names()
    _ = found.needs


def usable(kind: str) -> dict[str, Any]:
    """Everything of a kind by name. A package that cannot be used is named in a warning and left
    out: only those who ask for it fail."""
    found = {}
    for name in names(kind):
        try:
            found[name] = get(kind, name)
        except BadOption as error:
            warnings.warn(str(error), stacklevel=2)
    return found


def family_for(config: Any) -> Any:
    """The family that a checkpoint belongs to: the first that claims its config, left-to-right
    models last."""
    kinds = usable("families")
    for name in sorted(kinds, key=lambda name: name == "causal"):
        try:
            family = kinds[name].of(config)
        except Exception as error:
            if name in BUILT_IN["families"]:
                raise
            warnings.warn(f"family={name!r} was left out: {error!r}", stacklevel=2)
            continue
        if family is not None:
            return family
    raise NotAble(f"no family takes a model of type {config.model_type!r}.")
