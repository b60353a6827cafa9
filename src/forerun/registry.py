"""What can be named: methods, drafters, routers and families; our own, and those that installed packages bring as entry points.

A package outside this repository adds a method with an entry point in the group `forerun.methods` (or `.drafters`, `.routers`,
`.families`) that names the decorated object; see docs/extending.md.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from forerun.errors import BadOption, NotAble, unknown

# Our own, by the same "module:object" references that entry points use, so that nothing is imported before it is named.
BUILT_IN: dict[str, dict[str, str]] = {
    "methods": {
        "ar": "forerun.methods.autoregressive:autoregressive",
        "speculative": "forerun.methods.speculative:speculative",
        "lookup": "forerun.methods.speculative:lookup",
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
        "diffusion": "forerun.drafters.diffusion:DiffusionDrafter",
        "diffusion-confidence": "forerun.drafters.diffusion:ConfidenceDrafter",
        "ngram": "forerun.drafters.ngram:NgramDrafter",
    },
    "routers": {
        "span": "forerun.routers:Span",
        "score": "forerun.routers:Score",
        "hysteresis": "forerun.routers:Hysteresis",
        "bandit": "forerun.routers:Bandit",
    },
    "families": {
        "causal": "forerun.families.causal:Causal",
        "any-subset": "forerun.families.any_subset:AnySubset",
        "masked": "forerun.families.masked:Masked",
        "block": "forerun.families.block:Block",
        "xlnet": "forerun.families.any_subset:XLNet",
    },
}


# What a model does that answers a question of `core`, for errors.
ASKED = {
    "Conditional": "scores chains",
    "Branching": "scores several continuations at once",
    "Marginal": "fills blanks",
    "AnySubset": "scores chains through blanks anywhere",
    "Canvases": "looks at a whole canvas at once",
    "BlockWise": "fills a block at a time",
}


@dataclass(frozen=True)
class NoOptions:
    """For methods that have none."""


@dataclass(frozen=True)
class Method:
    """A decoding method: an async function for one sequence, and what it promises."""

    name: str
    run: Callable[..., Coroutine[Any, Any, None]]
    guarantee: str  # exact | greedy-exact | approximate
    reference: str  # the method whose law (or tokens) it has
    options: type = NoOptions
    drafter: str | None = None  # the drafter it always uses; None leaves the choice to `draft=`
    reason: str = ""  # why it is approximate, if it is
    asks: tuple[type, ...] = ()  # the questions its target must answer, where the annotation of `target` does not say all

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.run) or "").split("\n")[0]

    @cached_property
    def needs(self) -> tuple[type, ...]:
        """The questions its target must answer, from the annotation of its parameter `target` unless given."""
        if self.asks:
            return self.asks
        wanted = get_type_hints(self.run).get("target")
        return tuple(getattr(wanted, "__args__", None) or ([wanted] if wanted else []))

    @cached_property
    def drafts(self) -> bool:
        return "drafter" in inspect.signature(self.run).parameters

    @cached_property
    def drafts_itself(self) -> bool:
        """Does it draft without a drafter too? Then its parameter `drafter` may be None."""
        return self.drafts and inspect.signature(self.run).parameters["drafter"].default is None

    def option_names(self) -> list[str]:
        return [f.name for f in fields(self.options)]

    def check(self, family: Any, model_name: str) -> None:
        """Refuse a model that cannot answer what this method asks."""
        missing = [ASKED[need.__name__] for need in self.needs if need not in family.answers]
        if missing:
            able = [n for n in names("methods") if all(q in family.answers for q in get("methods", n).needs)]
            raise NotAble(
                f"method={self.name!r} needs a model that {' and '.join(missing)}, and '{model_name}' (family '{family.name}') "
                f"does not. Try method={' or '.join(map(repr, able))}."
            )


def method(
    name: str,
    *,
    guarantee: str,
    reference: str,
    options: type = NoOptions,
    drafter: str | None = None,
    reason: str = "",
    needs: tuple[type, ...] = (),
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Method]:
    """Make a decoding method of an async function `(seq, target[, drafter], **options)`."""
    if guarantee not in ("exact", "greedy-exact", "approximate"):
        raise BadOption(f"guarantee={guarantee!r} must be 'exact', 'greedy-exact' or 'approximate'.")
    return lambda run: Method(name, run, guarantee, reference, options, drafter, reason, needs)


def _outside(kind: str) -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=f"forerun.{kind}")}


def names(kind: str) -> list[str]:
    return sorted(BUILT_IN[kind].keys() | _outside(kind).keys())


def get(kind: str, name: str) -> Any:
    """The named object; our own names cannot be taken over by a package."""
    if not isinstance(name, str):
        raise BadOption(f"{kind.removesuffix('s')}={name!r} must be a name.")
    if name in BUILT_IN[kind]:
        module, _, attribute = BUILT_IN[kind][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    outside = _outside(kind)
    if name not in outside:
        raise unknown(kind.removesuffix("s").replace("familie", "family"), name, names(kind))
    try:
        return outside[name].load()
    except (ImportError, AttributeError) as error:
        raise BadOption(
            f"{kind.removesuffix('s')}={name!r} comes from a package that cannot be used ({outside[name].value}): {error}"
        ) from error


def family_for(config: Any) -> Any:
    """The family that a checkpoint belongs to: the first that claims its config, left-to-right models last."""
    candidates = [get("families", name) for name in sorted(names("families"), key=lambda name: name == "causal")]
    return next(family for kind in candidates if (family := kind.of(config)) is not None)
