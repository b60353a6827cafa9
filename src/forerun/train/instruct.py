"""Chats as prompts: of any length, in the model's template, with the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forerun.checkpoints import resolve
from forerun.errors import BadOption


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """A chat as the model reads it before it answers."""
    if not getattr(tokenizer, "chat_template", None):
        raise BadOption("--chat: the tokenizer of this model has no chat template.")
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return [*tokenizer(text, add_special_tokens=False).input_ids]


def as_rows(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """[S, P] tokens, each prompt at the end of its row, and [S] how many before it are nothing."""
    longest = max(map(len, prompts))
    pads_S = np.array([longest - len(prompt) for prompt in prompts])
    rows = [[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    return np.array(rows), pads_S


def end_tokens(model: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the checkpoint's own list, or the tokenizer's one."""
    from transformers import GenerationConfig

    found: Any = None
    base, _ = resolve.split_adapters(model)
    if not base.startswith("zoo:"):
        try:
            found = GenerationConfig.from_pretrained(resolve.find(base).place).eos_token_id
        except OSError:
            found = None
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        raise BadOption(f"--chat: {model!r} has no end token, so no answer would end.")
    return tuple(found) if isinstance(found, list) else (int(found),)
