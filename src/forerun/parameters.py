"""Sampling parameters: what a user may ask of one request. Free of torch, so that the command line can list them at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from forerun.errors import BadOption


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Sampling:
    """What the user asks of one request. Every field is a keyword of `generate` and a flag of the command line."""

    max_tokens: int | None = _help(None, "most tokens to generate (default: 128, or what the context leaves)")
    temperature: float = _help(0.0, "0 is greedy")
    top_k: int = _help(0, "keep the k likeliest tokens; 0 keeps all")
    top_p: float = _help(1.0, "keep the likeliest tokens up to this mass, and the one that crosses it")
    min_p: float = _help(0.0, "keep tokens at least this likely, relative to the likeliest")
    repetition_penalty: float = _help(1.0, "divide (multiply if negative) the logits of tokens in the prompt or output")
    presence_penalty: float = _help(0.0, "subtract from the logit of every token in the output")
    frequency_penalty: float = _help(0.0, "subtract for every occurrence of a token in the output")
    logit_bias: Mapping[int, float] | None = _help(None, "token id -> number added to its logit")
    allowed_tokens: Sequence[int] | None = _help(None, "the only token ids that may be generated")
    min_tokens: int = _help(0, "no stop token before this many tokens")
    stop: Sequence[str] | str = _help((), "stop when the output contains one of these strings")
    stop_token_ids: Sequence[int] = _help((), "stop after one of these tokens, besides the model's own end token")
    ignore_eos: bool = _help(False, "go on past the model's own end token")
    seed: int = _help(0, "same seed, same output")
    n: int = _help(1, "samples of each prompt")
    logprobs: int | None = _help(None, "return log-probabilities, with this many alternatives per token")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in ("max_tokens", "n", "min_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not (value is None and name == "max_tokens") and (not isinstance(value, int) or isinstance(value, bool)):
                raise BadOption(f"{name}={value!r} must be a whole number.")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(_finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number, 0 or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (keep all) or more")
        _require(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(
            _finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0 (1 is none)",
        )
        _require(_finite(self.presence_penalty), "presence_penalty", self.presence_penalty, "a number")
        _require(_finite(self.frequency_penalty), "frequency_penalty", self.frequency_penalty, "a number")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens={self.max_tokens}",
        )
        _require(
            all(isinstance(s, str) and s for s in self.stop),
            "stop",
            self.stop,
            "one or more strings, none of them empty",
        )
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", self.logprobs, "between 0 and 100")
        _require(
            self.allowed_tokens is None or len(self.allowed_tokens) > 0,
            "allowed_tokens",
            self.allowed_tokens,
            "at least one token id",
        )
        _require(all(_finite(b) for b in (self.logit_bias or {}).values()), "logit_bias", self.logit_bias, "finite numbers")

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @cached_property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def edits_logits(self) -> bool:
        return self.penalised or bool(self.logit_bias) or self.allowed_tokens is not None or self.min_tokens > 0

    def check_tokens(self, vocab: int) -> None:
        """Refuse token ids that this model does not have."""
        for name in ("logit_bias", "allowed_tokens", "stop_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= int(token) < vocab:
                    raise BadOption(f"{name} has token id {token}, but this model's ids run from 0 to {vocab - 1}.")


def _finite(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _require(fine: bool, name: str, value: Any, right: str) -> None:
    if not fine:
        raise BadOption(f"{name}={value!r} must be {right}.")
