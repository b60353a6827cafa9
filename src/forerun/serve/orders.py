"""From what clients send to what models are asked."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun import registry
from forerun.api import Model
from forerun.errors import BadOption, ForerunError, unknown
from forerun.requests.jobs import Failed, Jobs
from forerun.requests.prompts import parse_prompts, room_after
from forerun.requests.request import drafter_class_of, drafter_option_names
from forerun.serve.errors import ApiError, refused
from forerun.serve.models import Models, Served
from forerun.serve.wire import Extension, Sampled

LARGEST_OPTION = 4096  # a number that a client may give for an option of a method
DEFAULT_COMPLETION = 16  # tokens, as OpenAI has it
seeds = random.Random()  # for requests without one: the system's own would let go of the thread
FILL_OPTIONS = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")


@dataclass(frozen=True)
class How:
    """How a request is to be decoded, before its model is known."""

    models: Models
    served: Served
    extension: Extension
    sampling: Mapping[str, Any]
    draft_model: Model | None = None
    prediction: str | None = None

    def arguments(self, model: Model) -> dict[str, Any]:
        """What `submit` takes by name."""
        method = self._method(model)
        draft = self._draft(method)
        options = dict(self.extension.options)
        check_options(method, draft, options, self.models.ids)
        if self.prediction is not None:
            options["prediction"] = self.prediction
        schedule: dict[str, Any] = {"priority": self.extension.priority}
        if self.extension.deadline is not None:
            schedule |= {"deadline": self.extension.deadline, "allow_partial": True}
        return {"method": method.name, "draft": draft, **schedule, **self.sampling, **options}

    def _method(self, model: Model) -> registry.Method:
        named = self.extension.method
        if self.prediction is None:
            named = None if named == "auto" else named
            return registry.method_named(named or self.served.method(model.family))
        if named not in (None, "predicted"):
            raise refused(
                f"method={named!r} does not take a prediction: leave one of the two out.",
                "prediction",
            )
        return registry.method_named("predicted")

    def _draft(self, method: registry.Method) -> Any:
        named = self.draft_model or self.extension.draft
        fixed = method.drafter is not None and method.drafter.startswith("diffusion")
        takes_one = fixed or (method.drafts and method.drafter is None)
        has_one = method.asks_costs and self.models.settings.draft is not None
        if named is None and takes_one and (has_one or not method.drafts_itself):
            return self.models.default_draft()
        return named


async def how_to(
    models: Models, request: Sampled, prediction: str | None = None, **sampling: Any
) -> How:
    """Resolve names. A draft is a drafter, or a model that is served here: never a file."""
    served = models.served(request.model)
    extension = request.forerun
    if extension.method is not None:
        registry.method_named(extension.method)
    draft_model = None
    if extension.draft in models.ids:
        _, draft_model = await models.loaded(extension.draft)
    elif extension.draft is not None and extension.draft not in drafter_names():
        raise unknown("draft", extension.draft, [*drafter_names(), *models.ids])
    given = {**request.sampling(), **sampling}
    given.setdefault("seed", seeds.randrange(2**31))
    return How(models, served, extension, given, draft_model, prediction)


def drafter_names() -> list[str]:
    """Drafters that need no model."""
    found = registry.usable("drafters").items()
    return [name for name, kind in found if "model" not in kind.__dataclass_fields__]


def check_options(
    method: registry.Method, draft: Any, options: Mapping[str, Any], ids: Sequence[str]
) -> None:
    """Refuse what is no option of the method or its drafter, and numbers without measure."""
    known = {*method.option_names(), *drafter_option_names(drafter_class_of(method, draft))}
    for name, value in options.items():
        if name not in known:
            raise unknown(f"option of method={method.name!r}", name, known)
        if isinstance(value, int | float) and not abs(value) <= LARGEST_OPTION:
            raise BadOption(f"{name}={value!r} must be at most {LARGEST_OPTION} here.")
        if name == "first_draft" and value not in ("lookup", *ids):
            raise unknown("first_draft", str(value), ["lookup", *ids])
        if name == "steps" and isinstance(value, list) and len(value) > LARGEST_OPTION:
            raise BadOption(f"steps has {len(value)} numbers, and {LARGEST_OPTION} are the most.")


def check_sequences(count: int, most: int) -> None:
    """Refuse a request that brings too many sequences, or none."""
    if not 1 <= count <= most:
        raise refused(f"n times prompts is {count}: it must be from 1 to {most} here.", "n")


def prompt_ids(
    model: Model, prompt: Any = None, messages: Any = None, template: Mapping[str, Any] = {}
) -> list[list[int]]:
    """Prompts as token ids. The first that is wrong is told."""
    found = parse_prompts(model, prompt, messages, template)
    ids: list[list[int]] = []
    for one in found.ids:
        if isinstance(one, ForerunError):
            raise one
        ids.append(one)
    return ids


def check_fits(model: Model, ids: Sequence[Sequence[int]], max_tokens: int | None) -> None:
    """Refuse what a context does not hold, in the words and with the code that clients know."""
    for prompt in ids:
        try:
            room_after(prompt, model, max_tokens)
        except BadOption as error:
            param = "max_tokens" if len(prompt) < model.context else "prompt"
            raise refused(str(error), param, "context_length_exceeded") from error


def submit_prompts(model: Model, ids: list[list[int]], **arguments: Any) -> Jobs:
    """Hand prompts over. If one is refused, none is decoded."""
    jobs = model.submit(ids, **arguments)
    for request in jobs.requests:
        if isinstance(request, Failed):
            jobs.cancel()
            error = request.results()[0].error
            raise error or ApiError(400, "this prompt cannot be decoded.")
    return jobs
