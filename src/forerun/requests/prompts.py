"""Prompts and chats as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forerun.errors import BadOption, ForerunError
from forerun.requests.model import DecodableModel

DEFAULT_MAX_TOKENS = 128

Message = Mapping[str, Any]


class Prompts(NamedTuple):
    """The token ids of every prompt, or what is wrong with it; and whether a list was given."""

    ids: list[list[int] | ForerunError]
    several: bool


def parse_prompts(model: DecodableModel, prompt: Any, messages: Any = None) -> Prompts:
    """Prompts (text, token ids, or a list of these) or chat messages (or a list of chats)."""
    if (prompt is None) == (messages is None):
        raise BadOption("give either a prompt or messages=, not both and not neither.")
    if messages is not None:
        chats, several = _chats(messages)
        texts = [_chat_text(model, chat) for chat in chats]
        return Prompts([_token_ids(model, text, special=False) for text in texts], several)
    prompt = as_list(prompt)
    several = isinstance(prompt, list | tuple) and not _is_ids(prompt)
    prompts = list(prompt) if several else [prompt]
    if not prompts:
        raise BadOption("prompt=[] has no prompts in it.")
    return Prompts([_token_ids(model, one, special=True) for one in prompts], several)


def as_list(values: Any) -> Any:
    """Arrays of NumPy and tensors as lists; everything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _chats(messages: Any) -> tuple[Sequence[Sequence[Message]], bool]:
    """One chat or several, and which of the two it was."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadOption(
            f"messages={messages!r} must be a list of {{'role': ..., 'content': ...}}, or a list "
            f"of such lists."
        )
    several = not isinstance(messages[0], Mapping)
    return (messages if several else [messages]), several


def _chat_text(model: DecodableModel, messages: Sequence[Message]) -> str | ForerunError:
    if model.tokenizer is None or not getattr(model.tokenizer, "chat_template", None):
        raise BadOption(
            f"'{model.name}' has no chat template: give a plain prompt instead of messages."
        )
    try:
        return model.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
    except Exception as error:
        return BadOption(
            f"messages={messages!r} do not fit the chat template of '{model.name}': {error}"
        )


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


def _token_ids(model: DecodableModel, prompt: Any, special: bool) -> list[int] | ForerunError:
    """The token ids of one prompt, or what is wrong with it: a bad prompt fails alone."""
    if isinstance(prompt, ForerunError):
        return prompt
    try:
        ids = _encode(model, prompt, special)
        check_not_empty(ids, model)
        check_ids(ids, model)
    except ForerunError as error:
        return error
    return ids


def _encode(model: DecodableModel, prompt: Any, special: bool) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise BadOption(
                f"'{model.name}' has no tokenizer: give the prompt as a list of token ids."
            )
        check_text(prompt)
        return model.tokenizer(prompt, add_special_tokens=special).input_ids if prompt else []
    if _is_ids(prompt) or prompt in ([], ()):
        return [int(token) for token in prompt]
    raise BadOption(f"prompt={prompt!r} must be text or a list of token ids.")


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
