"""A decode request: which method, which options, which drafter, checked before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from forerun import registry
from forerun.drafters.adaptive import DraftLength
from forerun.drafters.base import Drafter
from forerun.drafters.features import names_drafter
from forerun.errors import BadOption, NotAble, TokenizerMismatch, unknown
from forerun.families.base import ChainScorer, Family, ModelHandle
from forerun.options import Sampling
from forerun.requests.model import DecodableModel
from forerun.requests.prompts import as_list

Options = Mapping[str, Any]


@dataclass(frozen=True)
class DecodeRequest:
    """How to decode, checked as far as that is possible without a model."""

    method: registry.Method
    sampling: Sampling
    options: object  # of the method: an instance of `method.options`
    drafter_class: type[Drafter] | None
    drafter_options: Options
    note: str = ""  # for the result: why this method, where none was named

    @property
    def asks_costs(self) -> bool:
        """Does it choose by what forwards cost here?"""
        lengths = self.options
        open_length = isinstance(lengths, DraftLength) and lengths.follows_costs(self.sampling)
        return self.method.asks_costs or open_length

    @property
    def needs_draft_model(self) -> bool:
        return self.drafter_class is not None and needs_model(self.drafter_class)


def method_for(family: Family, method: str | registry.Method | None) -> str | registry.Method:
    """The method of a request. Where none is named, or 'auto', it is what models of the family
    decode by: for left-to-right models that is the method `auto` itself."""
    return family.default_method if method in (None, "auto") else method


def note_on_method(family: Family, method: str | registry.Method | None) -> str:
    """Why a method was taken that nobody named. `auto` itself says so step by step."""
    if method not in (None, "auto") or family.default_method == "auto":
        return ""
    return f"auto took method '{family.default_method}': {family.default_reason}."


def parse_request(method: str | registry.Method, draft: object, options: Options) -> DecodeRequest:
    """Sort the options of a request into those of sampling, method and drafter. Refuse an option
    that belongs to none of them."""
    chosen = registry.method_named(method)
    drafter_class = drafter_class_of(chosen, draft)
    sampling_names = Sampling.names()
    method_names = chosen.option_names()
    drafter_names = drafter_option_names(drafter_class)
    known = {*sampling_names, *method_names, *drafter_names, "sampling", "options"}
    for name in options:
        if name not in known:
            suggested = {*known, "method", "draft", "messages"}
            own = ", ".join(sorted({*method_names, *drafter_names})) or "no options of its own"
            otherwise = (
                f"it takes {own} (`forerun methods {chosen.name}`), and sampling parameters."
            )
            raise unknown(f"option of method={chosen.name!r}", name, suggested, otherwise=otherwise)
    drafter_options = _among(options, drafter_names)
    if drafter_class is not None and not needs_model(drafter_class):
        drafter_class(**drafter_options)  # a bad value shows here, not inside the engine
    return DecodeRequest(
        method=chosen,
        sampling=_one_or_all("sampling", Sampling, options, sampling_names),
        options=_one_or_all("options", chosen.options, options, method_names),
        drafter_class=drafter_class,
        drafter_options=drafter_options,
    )


def _one_or_all(name: str, kind: type, options: Options, names: Collection[str]) -> Any:
    """An object that was given whole, as `name`, or made of the options that are its fields."""
    parts = _among(options, names)
    whole = options.get(name)
    if whole is None:
        return kind(**parts)
    if not isinstance(whole, kind):
        raise BadOption(f"{name}={whole!r} must be a {kind.__name__}.")
    defaults = {f.name: f.default for f in fields(kind)}
    extra = [part for part, value in parts.items() if not _same(value, defaults[part])]
    if extra:
        raise BadOption(
            f"{name}= and {', '.join(extra)}=: give the values in one of the two, not both."
        )
    return whole


def _same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and value == default)


# What may differ from prompt to prompt: given as a list, one value for each.
PER_PROMPT = {
    "method",
    "draft",
    "sampling",
    "options",
    *set(Sampling.names()),
} - {"n", "stop", "stop_token_ids", "allowed_tokens", "logit_bias", "choices"}


def for_each_prompt(count: int, arguments: Options) -> list[Options]:
    """The arguments of each prompt; the very same ones where none is given prompt by prompt."""
    lists = {}
    for name in PER_PROMPT & arguments.keys():
        values = as_list(arguments[name])
        if isinstance(values, list | tuple):
            lists[name] = values
    for name, values in lists.items():
        if len(values) != count:
            raise BadOption(
                f"{name} has {len(values)} values for {count} prompts: give a list of prompts and "
                f"one value for each, or one value for all."
            )
    if not lists:
        return [arguments] * count
    return [
        {**arguments, **{name: values[i] for name, values in lists.items()}} for i in range(count)
    ]


def _among(options: Options, names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def drafter_option_names(drafter_class: Any | None) -> set[str]:
    """The fields of a drafter that users may set: those with a help text."""
    if drafter_class is None:
        return set()
    return {f.name for f in fields(drafter_class) if "help" in f.metadata}


def needs_model(drafter_class: Any) -> bool:
    """Does a drafter draft with a model?"""
    return "model" in {f.name for f in fields(drafter_class)}


def drafter_class_of(method: registry.Method, draft: object) -> Any | None:
    """The drafter that a method is to use, from `draft=`: a drafter's name or class, or a model."""
    if names_drafter(draft) and method.drafter in (None, "diffusion") and method.drafts:
        return registry.get("drafters", "features")
    if method.drafter is not None:
        return _fixed_drafter(method, draft)
    if not method.drafts:
        _refuse_draft(method, draft, "does not draft")
        return None
    if draft is None and method.drafts_itself:
        return None
    if draft is None:
        others = ", ".join(repr(name) for name in registry.names("drafters") if name != "model")
        raise BadOption(
            f"method={method.name!r} needs draft=: the name of a smaller model, or {others}."
        )
    if isinstance(draft, type) and hasattr(draft, "propose"):
        return draft
    by_name = isinstance(draft, str) and draft != "model" and draft in registry.names("drafters")
    return registry.get("drafters", str(draft) if by_name else "model")


def _fixed_drafter(method: registry.Method, draft: object) -> Any:
    """The drafter that a method always uses. `draft=` names its model, if it has one."""
    drafter_class = registry.get("drafters", str(method.drafter))
    if not needs_model(drafter_class):
        _refuse_draft(method, draft, f"always drafts with {method.drafter!r}")
    elif draft is None:
        raise BadOption(
            f"method={method.name!r} needs draft=: the name of a model that fills blanks, such as "
            f"'zoo:any-subset', or 'auto', the drafter that belongs to the model."
        )
    elif isinstance(draft, str) and draft in registry.names("drafters"):
        raise BadOption(
            f"draft={draft!r}: method={method.name!r} drafts with a model that fills blanks; name "
            f"one, such as 'zoo:any-subset', or use method='speculative'."
        )
    return drafter_class


def _refuse_draft(method: registry.Method, draft: object, why: str) -> None:
    if draft is not None:
        raise BadOption(
            f"draft={draft!r}: method={method.name!r} {why}; leave draft= out, or use speculative, "
            f"specdiff or assd."
        )


def check_request(model: DecodableModel, request: DecodeRequest) -> None:
    """Refuse what does not fit this model."""
    request.method.check(model.family, model.name)
    sampling = request.sampling
    sampling.check_tokens(model.vocab)
    ends = model.eos | set(sampling.stop_token_ids)
    allowed = sampling.allowed_tokens
    if sampling.min_tokens and allowed is not None and ends >= set(allowed):
        raise BadOption(
            f"allowed_tokens={list(allowed)!r} are all end tokens, which "
            f"min_tokens={sampling.min_tokens} forbids: allow another token."
        )
    if sampling.stop and model.tokenizer is None:
        raise BadOption(
            f"stop={sampling.stop!r} needs a tokenizer, and '{model.name}' has none: use "
            f"stop_token_ids."
        )


def check_draft_model(draft: DecodableModel, request: DecodeRequest) -> None:
    """Refuse a draft model that cannot do what its drafter asks, by the annotation of the drafter's
    `model`."""
    need = get_type_hints(request.drafter_class).get("model")
    if not isinstance(need, type) or not issubclass(need, ModelHandle):
        return
    if not draft.family.can(need):
        other = "specdiff" if need is ChainScorer else "speculative"
        raise NotAble(
            f"draft '{draft.name}' (family '{draft.family.name}'): method="
            f"{request.method.name!r} drafts with a model that {need.does}. Try method={other!r}."
        )


def check_same_tokens(target: DecodableModel, draft: DecodableModel) -> None:
    """Refuse a draft whose tokens do not mean what the target's mean."""
    same = target.vocab == draft.vocab
    if same and target.tokenizer is not None and draft.tokenizer is not None:
        same = target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
    if not same:
        raise TokenizerMismatch(
            f"draft '{draft.name}' ({draft.vocab} tokens) and target '{target.name}' "
            f"({target.vocab} tokens) have different tokenizers: choose a draft that was trained "
            f"with the target's tokenizer."
        )


def stop_tokens(model: DecodableModel, sampling: Sampling) -> frozenset[int]:
    """The tokens that end a text."""
    end_tokens = frozenset() if sampling.ignore_eos else model.eos
    return end_tokens | frozenset(int(token) for token in sampling.stop_token_ids)
