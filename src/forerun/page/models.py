"""The models that the page offers, and what it says of each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from forerun import __version__, registry, zoo
from forerun.api import Model
from forerun.catalogue import usable_rows
from forerun.families.any_subset import SubsetScorer
from forerun.families.base import BlankFiller, Family
from forerun.families.masked import CanvasFiller


class Models(Protocol):
    """Models by name, loaded on first use."""

    def names(self) -> list[str]: ...

    def loaded(self, name: str) -> Model | None:
        """The model, if it is loaded already."""

    async def get(self, name: str) -> Model:
        """The model, loaded if need be; a `ForerunError` if there is none of this name."""


def about(models: Models) -> dict[str, Any]:
    """What the page needs to know before anything runs."""
    return {
        "version": __version__,
        "models": [about_model(models, name) for name in models.names()],
        "methods": {row.method: asdict(row) for row in usable_rows()},
    }


def about_model(models: Models, name: str) -> dict[str, Any]:
    """A model that is not loaded is known by its family only, and only if it is embedded."""
    model = models.loaded(name)
    family = type(model.family) if model is not None else embedded_family(name)
    facts: dict[str, Any] = {"name": name, "loaded": model is not None, "family": None}
    if family is not None:
        facts |= {
            "family": family.name,
            "default": family.default_method,
            "methods": methods_for(family),
            "infills": issubclass(family.handle, SubsetScorer | CanvasFiller),
            "fills": issubclass(family.handle, BlankFiller),
        }
    if model is not None:
        facts["chats"] = bool(getattr(model.tokenizer, "chat_template", None))
        facts["context"] = model.context
    elif family is not None:
        facts["chats"] = False  # the embedded models share a tokenizer without a template
    return facts


def embedded_family(name: str) -> type[Family] | None:
    """The family of an embedded model, from the metadata of its weights."""
    short = name.removeprefix("zoo:")
    if not name.startswith("zoo:") or short not in zoo.shipped():
        return None
    family: type[Family] = registry.get("families", zoo.family(short))
    return family


def methods_for(family: type[Family]) -> list[str]:
    """The methods that models of a family can run."""
    return [
        name
        for name, method in registry.usable("methods").items()
        if all(issubclass(family.handle, need) for need in method.needs)
    ]
