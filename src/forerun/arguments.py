"""From what a caller wrote to what the engine needs: names and options checked, prompts turned into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from forerun import registry
from forerun.errors import BadOption, ForerunError, NotAble, TokenizerMismatch, unknown
from forerun.parameters import Sampling

if TYPE_CHECKING:
    from forerun.api import Model

DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True)
class Wish:
    """How to decode, checked as far as that is possible without a model."""

    method: registry.Method
    sampling: Sampling
    options: Any  # of the method, an instance of method.options
    drafter: Any | None  # the drafter's class
    drafter_options: dict[str, Any]
    draft: Any  # as it was given: a name, a model, or nothing

    @property
    def needs_draft_model(self) -> bool:
        return self.drafter is not None and "model" in {f.name for f in fields(self.drafter)}


def read_wish(method: str, draft: Any, options: Mapping[str, Any]) -> Wish:
    """Sort the options of a request into sampling, method and drafter, refusing those that belong to none."""
    how: registry.Method = registry.get("methods", method)
    drafter = drafter_class(how, draft)
    of_drafter = {f.name for f in fields(drafter) if "help" in f.metadata} if drafter else set()
    known = {*Sampling.names(), *how.option_names(), *of_drafter}
    for key in options:
        if key not in known:
            raise unknown(f"option of method={method!r}", key, known)

    def those(names: Any) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key in names}

    wish = Wish(
        how, Sampling(**those(Sampling.names())), how.options(**those(how.option_names())), drafter, those(of_drafter), draft
    )
    if drafter is not None and not wish.needs_draft_model:
        drafter(**wish.drafter_options)  # a bad value shows here, not inside the engine
    return wish


def drafter_class(how: registry.Method, draft: Any) -> Any | None:
    """The drafter that a method is to use, from `draft=`: a drafter's name, or a model that drafts."""
    fixed = registry.get("drafters", how.drafter) if how.drafter else None
    if fixed is not None and "model" in {f.name for f in fields(fixed)}:
        if draft is None:
            raise BadOption(f"method={how.name!r} needs draft=: the name of a model that fills blanks, such as 'zoo:any-subset'.")
        return fixed
    if not how.drafts or how.drafter is not None:
        if draft is not None:
            does = f"always drafts with {how.drafter!r}" if how.drafts else "does not draft"
            raise BadOption(f"draft={draft!r}: method={how.name!r} {does}; leave draft= out, or use speculative, specdiff or assd.")
        return fixed
    if draft is None and how.drafts_itself:
        return None
    if draft is None:
        free = ", ".join(repr(name) for name in registry.names("drafters") if name != "model")
        raise BadOption(f"method={how.name!r} needs draft=: the name of a smaller model, or {free}.")
    by_name = isinstance(draft, str) and draft != "model" and draft in registry.names("drafters")
    return registry.get("drafters", draft if by_name else "model")


def check_for(model: Model, wish: Wish) -> None:
    """What can be said about a wish only when the model is there."""
    wish.method.check(model.family, model.name)
    wish.sampling.check_tokens(model.vocab)
    ends = model.eos | set(wish.sampling.stop_token_ids)
    if wish.sampling.min_tokens and wish.sampling.allowed_tokens is not None and ends >= set(wish.sampling.allowed_tokens):
        raise BadOption(
            f"allowed_tokens={list(wish.sampling.allowed_tokens)!r} are all end tokens, which min_tokens="
            f"{wish.sampling.min_tokens} forbids: allow another token."
        )
    if wish.sampling.stop and model.tokenizer is None:
        raise BadOption(f"stop={wish.sampling.stop!r} needs a tokenizer, and '{model.name}' has none: use stop_token_ids.")


def check_drafts(draft: Model, wish: Wish) -> None:
    """Refuse a draft model that does not answer what its drafter asks, from the annotation of the drafter's `model`."""
    need = get_type_hints(wish.drafter).get("model")
    if isinstance(need, type) and need.__name__ in registry.ASKED and need not in draft.family.answers:
        other = "specdiff" if need.__name__ == "Conditional" else "speculative"
        raise NotAble(
            f"draft '{draft.name}' (family '{draft.family.name}'): method={wish.method.name!r} drafts with a model that "
            f"{registry.ASKED[need.__name__]}. Try method={other!r}."
        )


def check_same_tokens(target: Model, draft: Model) -> None:
    """Refuse a draft whose tokens do not mean what the target's mean."""
    ours, theirs = target.tokenizer, draft.tokenizer
    same = target.vocab == draft.vocab and (ours is None or theirs is None or ours.get_vocab() == theirs.get_vocab())
    if not same:
        raise TokenizerMismatch(
            f"draft '{draft.name}' ({draft.vocab} tokens) and target '{target.name}' ({target.vocab} tokens) have different "
            f"tokenizers: choose a draft that was trained with the target's tokenizer."
        )


def read_prompts(model: Model, prompt: Any, messages: Any) -> tuple[list[list[int] | ForerunError], bool]:
    """The token ids of every prompt, or what is wrong with it; and whether there were several."""
    if (prompt is None) == (messages is None):
        raise BadOption("give either a prompt or messages=, not both and not neither.")
    if messages is not None:
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise BadOption(f"messages={messages!r} must be a list of {{'role': ..., 'content': ...}}, or a list of such lists.")
        several = not isinstance(messages[0], Mapping)
        given: list[Any] = [_chat_text(model, m) for m in (messages if several else [messages])]
    else:
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # NumPy's arrays and torch's tensors
        several = isinstance(prompt, list | tuple) and not _is_ids(prompt)
        given = list(prompt) if several else [prompt]
    if not given:
        raise BadOption("prompt=[] has no prompts in it.")
    return [_token_ids(model, p, special=messages is None) for p in given], several


def _chat_text(model: Model, messages: Any) -> str | ForerunError:
    if model.tokenizer is None or not getattr(model.tokenizer, "chat_template", None):
        raise BadOption(f"'{model.name}' has no chat template: give a plain prompt instead of messages.")
    try:
        return model.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except Exception as error:
        return BadOption(f"messages={messages!r} do not fit the chat template of '{model.name}': {error}")


def check_text(text: str) -> None:
    """Refuse text with halves of characters in it, which bytes that are not UTF-8 become on a command line."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadOption(f"text has a broken character at {error.start}: it must be valid Unicode (UTF-8).") from None


def _is_ids(prompt: Any) -> bool:
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return is_list and all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, prompt)))


def _token_ids(model: Model, prompt: Any, special: bool) -> list[int] | ForerunError:
    if isinstance(prompt, ForerunError):
        return prompt
    if isinstance(prompt, str) and model.tokenizer is None:
        return BadOption(f"'{model.name}' has no tokenizer: give the prompt as a list of token ids.")
    if isinstance(prompt, str):
        try:
            check_text(prompt)
        except BadOption as error:
            return error
        ids = model.tokenizer(prompt, add_special_tokens=special).input_ids if prompt else []  # type: ignore[misc]
    elif _is_ids(prompt) or prompt in ([], ()):
        ids = [int(token) for token in prompt]
    else:
        return BadOption(f"prompt={prompt!r} must be text or a list of token ids.")
    try:
        check_not_empty(ids, model)
    except BadOption as error:
        return error
    if ids and not (min(ids) >= 0 and max(ids) < model.vocab):
        bad = next(token for token in ids if not 0 <= token < model.vocab)
        return BadOption(f"prompt has token id {bad}, but the ids of '{model.name}' run from 0 to {model.vocab - 1}.")
    return ids


def check_not_empty(ids: Sequence[int], model: Model) -> None:
    """Refuse to go on from nothing where a model cannot, the one that decodes or the one that drafts for it."""
    if not ids and model.family.needs_prompt:
        raise BadOption(f"prompt is empty: '{model.name}' (family '{model.family.name}') needs at least one token to go on from.")


def room_after(prompt: Sequence[int], max_tokens: int | None, min_tokens: int, context: int, name: str) -> int:
    """How many tokens may follow a prompt, or the error that says how many could."""
    room = context - len(prompt)
    if room < 1:
        raise BadOption(
            f"prompt has {len(prompt)} tokens, and the context of '{name}' holds {context}: shorten it to {context - 1} or less."
        )
    if max_tokens is None and min_tokens > room:
        raise BadOption(
            f"min_tokens={min_tokens} after a prompt of {len(prompt)} tokens is more than the {context} that '{name}' holds."
        )
    if max_tokens is not None and max_tokens > room:
        raise BadOption(
            f"max_tokens={max_tokens} after a prompt of {len(prompt)} tokens is more than the {context} that '{name}' holds: "
            f"use max_tokens={room} or less."
        )
    return max_tokens or min(max(DEFAULT_MAX_TOKENS, min_tokens), room)
