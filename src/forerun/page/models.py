"""What the page is told of the models and methods there are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from forerun import __version__, registry
from forerun.catalogue import usable_rows
from forerun.families.base import BlankFiller
from forerun.serve.models import Models, Served
from forerun.serve.orders import drafter_names


def about(models: Models) -> dict[str, Any]:
    """What the page needs to know before anything runs."""
    return {
        "version": __version__,
        "models": [about_model(served) for served in models],
        "methods": {row.method: asdict(row) for row in usable_rows()},
        "drafters": drafter_names(),
    }


def about_model(served: Served) -> dict[str, Any]:
    """A model that is not loaded is known only if it is embedded; else its family is null."""
    told = served.describe()["forerun"]
    facts = {"name": served.id, "loaded": told["loaded"], "family": told.get("family")}
    if facts["family"] is None:
        return facts
    handle = registry.get("families", facts["family"]).handle
    return {
        **facts,
        "default": told["method"],
        "methods": told["methods"],
        "infills": told["fills_holes"],
        "fills": issubclass(handle, BlankFiller),
        # the embedded models have a template only if the server gives them one
        "chats": told.get("has_chat_template", served.settings.chat_template is not None),
    }
