"""Prompts and chats as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forerun.errors import BadOption, ForerunError
from forerun.requests.model import DecodableModel

DEFAULT_MAX_TOKENS = 128

Message = Mapping[str, Any]


class Tokenised(list[int]):
    """The token ids of a text as its tokenizer wrote them. Where the text ends, no token need end:
    what was given as token ids is taken as it is, and this may be healed.

    What is generated stands in the text behind the last of them, or else behind those of `text`.
    """

    text: Sequence[int] | None = None


class Prompts(NamedTuple):
    """The token ids of every prompt, or what is wrong with it; and whether a list was given."""

    ids: list[list[int] | ForerunError]
    several: bool


def parse_prompts(
    model: DecodableModel, prompt: Any, messages: Any = None, template: Mapping[str, Any] = {}
) -> Prompts:
    """Prompts (text, token ids, chat messages, or a list of these) or chat messages (or a list of
    chats). `template` holds options of the chat template."""
    if (prompt is None) == (messages is None):
        raise BadOption("give either a prompt or messages=, not both and not neither.")
    if messages is not None:
        prompts, several = _chats(messages)
        chats = [True] * len(prompts)
    else:
        prompts, several = _listed(as_list(prompt))
        chats = [is_chat(one) for one in prompts]
    if any(chats):
        check_template(model)
    if template and not all(chats):
        raise BadOption(f"{', '.join(template)}: only chat messages go through a template.")
    ids = [_token_ids(model, one, template if chat else None) for one, chat in zip(prompts, chats)]
    return Prompts(ids, several)


def _listed(prompt: Any) -> tuple[Sequence[Any], bool]:
    """The prompts that were given, and whether as a list."""
    several = isinstance(prompt, list | tuple) and not (_is_ids(prompt) or is_chat(prompt))
    if several and not prompt:
        raise BadOption("prompt=[] has no prompts in it.")
    return (list(prompt) if several else [prompt]), several


def is_chat(prompt: Any) -> bool:
    """Is it a list of messages?"""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(message, Mapping) for message in prompt)


def as_list(values: Any) -> Any:
    """Arrays of NumPy and tensors as lists; everything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _chats(messages: Any) -> tuple[Sequence[Any], bool]:
    """One chat or several, and which of the two it was."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadOption(
            f"messages={messages!r} must be a list of {{'role': ..., 'content': ...}}, or a list "
            f"of such lists."
        )
    several = not isinstance(messages[0], Mapping)
    return (messages if several else [messages]), several


def check_template(model: DecodableModel) -> None:
    if model.tokenizer is None or not getattr(model.tokenizer, "chat_template", None):
        raise BadOption(
            f"'{model.name}' has no chat template: give a plain prompt instead of messages."
        )


def chat_text(
    model: DecodableModel, messages: Sequence[Message], template: Mapping[str, Any]
) -> str:
    """A chat as text that ends where the answer begins."""
    assert model.tokenizer is not None, "checked"
    options = {"add_generation_prompt": True, **template, "tokenize": False}
    try:
        return model.tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:
        raise BadOption(
            f"messages={messages!r} do not fit the chat template of '{model.name}': {error}"
        ) from error


def check_text(text: str) -> None:
    """Refuse text with halves of characters in it. Bytes that are not UTF-8 become such text on a
    command line."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadOption(
            f"text has a broken character at {error.start}: it must be valid Unicode (UTF-8)."
        ) from None


def _is_ids(prompt: Any) -> bool:
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    kinds = set(map(type, prompt))
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds)


def _token_ids(
    model: DecodableModel, prompt: Any, template: Mapping[str, Any] | None
) -> list[int] | ForerunError:
    """The token ids of one prompt, or what is wrong with it: a bad prompt fails alone. With a
    `template`'s options, it is a chat."""
    try:
        if template is None:
            ids = encode(model, prompt)
            if isinstance(prompt, str | Tokenised):
                ids = Tokenised(ids)
                ids.text = getattr(prompt, "text", None)
        else:
            ids = encode(model, chat_text(model, prompt, template), special=False)
        check_not_empty(ids, model)
        check_ids(ids, model)
    except ForerunError as error:
        return error
    return ids


def encode(model: DecodableModel, prompt: Any, special: bool = True) -> list[int]:
    """Text as token ids, with the `special` tokens that its tokenizer puts around it; token ids as
    they are. Without a text, the start token if there is one."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise BadOption(
                f"'{model.name}' has no tokenizer: give the prompt as a list of token ids."
            )
        check_text(prompt)
        ids = list(model.tokenizer(prompt, add_special_tokens=special).input_ids)
        return ids or (_start(model) if special else [])
    if _is_ids(prompt) or prompt in ([], ()):
        return [int(token) for token in prompt]
    raise BadOption(f"prompt={prompt!r} must be text, token ids, or chat messages.")


def _start(model: DecodableModel) -> list[int]:
    """What a text that is still empty goes on from, where something must be there."""
    start = getattr(model.tokenizer, "bos_token_id", None)
    return [start] if start is not None and model.family.needs_prompt else []


def check_ids(ids: Sequence[int], model: DecodableModel) -> None:
    """Refuse token ids that the model does not have."""
    for token in ids:
        if not 0 <= token < model.vocab:
            raise BadOption(
                f"prompt has token id {token}, but the ids of '{model.name}' run from 0 to "
                f"{model.vocab - 1}."
            )


def check_not_empty(ids: Sequence[int], model: DecodableModel) -> None:
    """Refuse to go on from nothing where a model cannot, the one that decodes or the one that
    drafts for it."""
    if not ids and model.family.needs_prompt:
        raise BadOption(
            f"prompt is empty: '{model.name}' (family '{model.family.name}') needs at least one "
            f"token to go on from."
        )


def room_after(
    prompt: Sequence[int], model: DecodableModel, max_tokens: int | None, min_tokens: int = 0
) -> int:
    """How many tokens may follow a prompt, or the error that says how many could."""
    room = model.context - len(prompt)
    holds = f"the {model.context} that '{model.name}' holds"
    if room < 1:
        raise BadOption(
            f"prompt has {len(prompt)} tokens, and the context of '{model.name}' holds "
            f"{model.context}: shorten it to {model.context - 1} or less."
        )
    if max_tokens is None and min_tokens > room:
        raise BadOption(
            f"min_tokens={min_tokens} after a prompt of {len(prompt)} tokens is more than {holds}."
        )
    if max_tokens is not None and max_tokens > room:
        raise BadOption(
            f"max_tokens={max_tokens} after a prompt of {len(prompt)} tokens is more than {holds}: "
            f"use max_tokens={room} or less."
        )
    return max_tokens or min(max(DEFAULT_MAX_TOKENS, min_tokens), room)
