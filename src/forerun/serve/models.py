"""The models that a server offers: loaded when first asked for, within a limit of memory."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forerun import registry, zoo
from forerun.api import Model, load
from forerun.errors import BadOption, EngineStopped, ForerunError, NoRoom, unknown
from forerun.families.any_subset import SubsetScorer
from forerun.families.masked import CanvasFiller
from forerun.serve.admission import Gate
from forerun.serve.errors import ApiError, unavailable
from forerun.serve.settings import GIBIBYTE, Settings

log = logging.getLogger("forerun.serve")

MOST_RESTARTS = 3  # of one model's engine; a further failure ends the server
PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"  # for models that never saw a chat


class Served:
    """A model by the name that clients know it by. It may not be loaded yet."""

    def __init__(self, id: str, source: str, settings: Settings):
        self.id = id
        self.source = source
        self.settings = settings
        self.model: Model | None = None
        self.gate = Gate(settings.lanes or 1, settings.queue)
        self.last_used = 0.0
        self.created = int(time.time())
        self.restarts = 0
        self.bytes = 0  # once it was loaded
        self.lock = asyncio.Lock()  # one load at a time

    @property
    def busy(self) -> bool:
        return bool(self.gate.inside or self.gate.waiting)

    def method(self, family: Any) -> str:
        """The method of requests that name none."""
        chosen = self.settings.method
        if chosen is not None and registry.method_named(chosen).runs_on(family):
            return chosen
        return str(family.default_method)

    def describe(self) -> dict[str, Any]:
        """What `/v1/models` says of it."""
        told: dict[str, Any] = {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "forerun",
            "root": self.id,
            "parent": None,
            "max_model_len": None,
            "forerun": {"loaded": self.model is not None},
        }
        if self.model is not None:
            told["max_model_len"] = self.model.context
            told["forerun"] |= self._promises(self.model.family)
            told["forerun"] |= {
                "lanes": self.model.lanes,
                "has_chat_template": bool(getattr(self.model.tokenizer, "chat_template", None)),
            }
        elif embedded_family(self.source) is not None:
            told["max_model_len"] = self.settings.max_context or embedded_context(self.source)
            told["forerun"] |= self._promises(FamilyKind(str(embedded_family(self.source))))
        return told

    def _promises(self, family: Any) -> dict[str, Any]:
        """What can be asked of models of a family, and what is promised by default."""
        chosen = registry.method_named(self.method(family))
        methods = registry.usable("methods").items()
        return {
            "family": family.name,
            "methods": [name for name, each in methods if each.runs_on(family)],
            "method": chosen.name,
            "guarantee": chosen.guarantee,
            "reference": f"{chosen.reference} on {self.id}",
            "fills_holes": fills_holes(family),
        }


class FamilyKind:
    """A family by name, as far as it is known before a model of it is loaded."""

    def __init__(self, name: str):
        self._kind = registry.get("families", name)
        self.name = name
        self.default_method = self._kind.default_method

    def can(self, capability: Any) -> bool:
        return issubclass(self._kind.handle, capability)


def fills_holes(family: Any) -> bool:
    """Do its models look past a hole?"""
    return bool(family.can(SubsetScorer) or family.can(CanvasFiller))


class Models:
    """All models of a server.

    A model whose engine has failed is loaded anew for the next request, a few times; then the
    server is no longer `healthy`, and says why.
    """

    def __init__(self, settings: Settings, loader: Callable[..., Model] = load):
        self.settings = settings
        self.loader = loader
        self.failure: str | None = None
        self._draft: Model | None = None
        self._drafting = threading.Lock()
        self._served = {each.id: each for each in map(self._named, source_names(settings))}

    def _named(self, name: str) -> Served:
        id, equals, source = name.partition("=")
        return Served(id, source if equals else id, self.settings)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    @property
    def ids(self) -> list[str]:
        return list(self._served)

    def served(self, id: str | None) -> Served:
        """A model by name; without a name, the first."""
        if id is None:
            return next(iter(self))
        if id not in self._served:
            error = unknown("model", id, self._served)
            raise ApiError(404, str(error), param="model", code="model_not_found")
        return self._served[id]

    async def loaded(self, id: str | None) -> tuple[Served, Model]:
        """A model that is ready, loaded now if need be."""
        served = self.served(id)
        served.last_used = time.monotonic()
        async with served.lock:
            if served.model is None:
                if self.failure is not None:
                    raise unavailable("this server has failed; its log says why.", "failed")
                served.model = await asyncio.to_thread(self._load, served)
                served.gate.lanes = served.model.lanes
        return served, served.model

    def _load(self, served: Served) -> Model:
        began = time.perf_counter()
        self._make_room(served, served.bytes)
        settings = self.settings
        shared = {} if settings.cache_gib is None else {"memory": settings.cache_gib}
        try:
            model = self.loader(
                served.source,
                device=settings.device,
                dtype=settings.dtype,
                lanes=settings.lanes,
                max_context=settings.max_context,
                **shared,
                quantize=settings.quantize,
            )
        except ForerunError as error:
            log.error("%s cannot be loaded: %s", served.id, error)
            raise unavailable(f"'{served.id}' cannot be loaded here.", "not_loaded") from error
        model.name = served.id  # what clients call it: no path is in an answer
        served.bytes = bytes_of(model)
        self._make_room(served, served.bytes)
        add_template(model, settings.chat_template)
        log.info("loaded %s in %.1f s", served.id, time.perf_counter() - began)
        return model

    def _make_room(self, wanted: Served, size: int) -> None:
        """Let go of models that nobody uses, the longest unused first, until one fits."""
        limit = self.settings.memory_gib
        if limit is None:
            return
        others = [each for each in self if each is not wanted and each.model is not None]
        taken = sum(each.bytes for each in others)
        for other in sorted(others, key=lambda each: each.last_used):
            if taken + size <= limit * GIBIBYTE:
                return
            if not other.busy:
                taken -= other.bytes
                self._unload(other)
        if taken + size > limit * GIBIBYTE:
            log.error("%s takes %.2f GiB, and %.2f are left", wanted.id, size / GIBIBYTE, limit)
            raise NoRoom(f"'{wanted.id}' does not fit into the memory limit beside the others.")

    def _unload(self, served: Served) -> None:
        model = served.model
        served.model = None
        if model is not None:
            model.close()
            log.info("unloaded %s", served.id)

    def note(self, served: Served, model: Model, error: BaseException) -> None:
        """An error of a request to a model. If its engine is gone, the model is loaded anew when it
        is next asked for."""
        if not isinstance(error, EngineStopped) or served.model is not model:
            return
        served.model = None
        served.restarts += 1
        log.error("the engine of %s has stopped: %s", served.id, error)
        if served.restarts > MOST_RESTARTS:
            self.failure = f"the engine of '{served.id}' has stopped {served.restarts} times"
        model.close()

    def default_draft(self) -> Model | str | None:
        """What drafts where a request names nothing: a drafter, or a model, loaded once. Called in
        threads."""
        name = self.settings.draft
        if name is None or name in registry.names("drafters"):
            return name
        with self._drafting:
            if self._draft is None:
                settings = self.settings
                self._draft = self.loader(
                    name,
                    device=settings.device,
                    dtype=settings.dtype,
                    lanes=1,
                    max_context=None,
                    quantize=settings.quantize,
                )
                self._draft.name = "draft"  # no path is in an answer
            return self._draft

    def close(self) -> None:
        for served in self:
            served.gate.close()
            self._unload(served)

    def able_to_fill(self) -> list[str]:
        """Models here that fill holes; of those not loaded, the embedded ones are known."""
        found = []
        for served in self:
            name = embedded_family(served.source)
            if served.model is not None:
                able = fills_holes(served.model.family)
            else:
                able = name is not None and fills_holes(FamilyKind(name))
            if able:
                found.append(served.id)
        return found


def source_names(settings: Settings) -> Sequence[str]:
    names = list(settings.models) or [f"zoo:{name}" for name in sorted_zoo()]
    ids = [name.partition("=")[0] for name in names]
    if len(set(ids)) < len(ids) or not all(ids):
        raise BadOption(f"models={names!r}: give each model a name of its own, as in ID=NAME.")
    return names


def sorted_zoo() -> list[str]:
    """The embedded models, the left-to-right one first: it is the default."""
    return sorted(zoo.shipped(), key=lambda name: (name != "ar", name))


def embedded_family(source: str) -> str | None:
    kind, _, name = source.partition(":")
    return zoo.family(name) if kind == "zoo" and name in zoo.shipped() else None


def embedded_context(source: str) -> int:
    return zoo.context(source.partition(":")[2])


def bytes_of(model: Model) -> int:
    """What a model takes: its weights and the slots of all lanes."""
    backbone = model.backbone
    weights = int(backbone.cost) * backbone.dtype.itemsize
    slots = model.engine.slots or model.lanes * model.family.slots(model.context)
    return weights + backbone.bytes_per_lane(slots)


def add_template(model: Model, template: str | None) -> None:
    """Give a chat template to a model that has none."""
    tokenizer = model.tokenizer
    if template is None or tokenizer is None or getattr(tokenizer, "chat_template", None):
        return
    tokenizer.chat_template = PLAIN if template == "plain" else Path(template).read_text()
