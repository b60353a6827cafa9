"""Sampling parameters: what a user may ask of one request. Free of torch, so that the command line
can list them at once."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from forerun.constraints.spec import ConstraintSpec, spec_of
from forerun.errors import BadOption


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Sampling:
    """What the user asks of one request. Every field is a keyword of `generate` and a flag of the
    command line."""

    max_tokens: int | None = _help(
        None, "most tokens to generate (default: 128, or what the context leaves)"
    )
    temperature: float = _help(0.0, "0 is greedy")
    top_k: int = _help(0, "keep the k likeliest tokens; 0 keeps all")
    top_p: float = _help(
        1.0, "keep the likeliest tokens up to this mass, and the one that crosses it"
    )
    min_p: float = _help(0.0, "keep tokens at least this likely, relative to the likeliest")
    repetition_penalty: float = _help(
        1.0, "divide (multiply if negative) the logits of tokens in the prompt or output"
    )
    presence_penalty: float = _help(0.0, "subtract from the logit of every token in the output")
    frequency_penalty: float = _help(0.0, "subtract for every occurrence of a token in the output")
    logit_bias: Mapping[int, float] | None = _help(None, "token id -> number added to its logit")
    allowed_tokens: Sequence[int] | None = _help(None, "the only token ids that may be generated")
    min_tokens: int = _help(0, "no stop token before this many tokens")
    stop: Sequence[str] | str = _help((), "stop when the output contains one of these strings")
    stop_token_ids: Sequence[int] = _help(
        (), "stop after one of these tokens, besides the model's own end token"
    )
    ignore_eos: bool = _help(False, "go on past the model's own end token")
    heal: bool = _help(
        True,
        "choose tokens where a text prompt ends, or at its holes, anew: it may be cut inside one",
    )
    seed: int = _help(0, "same seed, same output")
    n: int = _help(1, "samples of each prompt")
    logprobs: int | None = _help(
        None, "return log-probabilities, with this many alternatives per token"
    )
    schema: Any = _help(  # noqa: RUF009 - a field, as the others
        None, "write JSON of this schema: a JSON schema, a Pydantic model or a type"
    )
    regex: str | None = _help(None, "write a text that this regular expression matches")
    grammar: str | ConstraintSpec | None = _help(  # noqa: RUF009
        None, "write a text of this grammar, in Lark's form or EBNF"
    )
    choices: Sequence[str] | None = _help(None, "write one of these texts")
    grammar_engine: str = _help(
        "llguidance", "what reads schemas and grammars: llguidance or xgrammar"
    )

    def __post_init__(self) -> None:
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        for name in ("max_tokens", "n", "min_tokens", "top_k", "seed", "logprobs"):
            optional = name in ("max_tokens", "logprobs")
            set_(
                name,
                None
                if optional and getattr(self, name) is None
                else _whole(name, getattr(self, name)),
            )
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            set_(name, _number(name, getattr(self, name)))
        set_("stop", (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop))
        set_(
            "stop_token_ids",
            tuple(
                _whole("stop_token_ids", t)
                for t in _sequence("stop_token_ids", self.stop_token_ids)
            ),
        )
        if self.allowed_tokens is not None:
            allowed = _sequence("allowed_tokens", self.allowed_tokens)
            set_("allowed_tokens", tuple(_whole("allowed_tokens", token) for token in allowed))
        if self.logit_bias is not None:
            _require(
                isinstance(self.logit_bias, Mapping),
                "logit_bias",
                self.logit_bias,
                "a mapping from token id to number",
            )
            set_(
                "logit_bias",
                {
                    _whole("logit_bias", t): _number("logit_bias", b)
                    for t, b in self.logit_bias.items()
                },
            )
        self._check()

    def _check(self) -> None:
        """Refuse values that mean nothing."""
        self._require(self.temperature >= 0, "temperature", "0 or more")
        self._require(self.top_k >= 0, "top_k", "0 (keep all) or more")
        self._require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._require(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        self._require(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        self._require(isinstance(self.heal, bool), "heal", "True or False")
        self._require(self.n >= 1, "n", "at least 1")
        logprobs = self.logprobs is None or 0 <= self.logprobs <= 100
        self._require(logprobs, "logprobs", "between 0 and 100")
        stops = all(isinstance(text, str) and text for text in self.stop)
        self._require(stops, "stop", "one or more strings, none of them empty")
        self._check_lengths()
        self._check_logit_edits()
        self._check_constraint()

    def _check_constraint(self) -> None:
        constraint = self.constraint
        if constraint is not None and self.stop:
            raise BadOption(
                f"stop={self.stop!r} and {constraint.argument}=: a stop string could end the text "
                f"before it is what {constraint.argument} asks for. Leave one of them out."
            )

    @cached_property
    def constraint(self) -> ConstraintSpec | None:
        """What the text must look like, if anything is asked of it."""
        return spec_of(self.schema, self.regex, self.grammar, self.choices, self.grammar_engine)

    def _check_lengths(self) -> None:
        longest = self.max_tokens
        self._require(longest is None or longest >= 1, "max_tokens", "at least 1")
        self._require(self.min_tokens >= 0, "min_tokens", "0 or more")
        fits = longest is None or self.min_tokens <= longest
        self._require(fits, "min_tokens", f"at most max_tokens={longest}")

    def _check_logit_edits(self) -> None:
        sensible = 1e-3 <= self.repetition_penalty <= 1e3
        self._require(sensible, "repetition_penalty", "between 0.001 and 1000 (1 is none)")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(abs(getattr(self, name)) <= 1e6, name, "between -1e6 and 1e6")
        biases = (self.logit_bias or {}).values()
        small = all(abs(bias) <= 1e6 for bias in biases)
        self._require(small, "logit_bias", "between -1e6 and 1e6")
        some = self.allowed_tokens is None or len(self.allowed_tokens) > 0
        self._require(some, "allowed_tokens", "at least one token id")

    def _require(self, fine: bool, name: str, right: str) -> None:
        _require(fine, name, getattr(self, name), right)

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @cached_property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @cached_property
    def edits_logits(self) -> bool:
        return (
            self.penalised
            or bool(self.logit_bias)
            or self.allowed_tokens is not None
            or self.min_tokens > 0
        )

    @property
    def keeps_all(self) -> bool:
        """Is no token cut off for being unlikely?"""
        return not self.top_k and self.top_p >= 1 and not self.min_p

    def check_tokens(self, vocab: int) -> None:
        """Refuse token ids that this model does not have."""
        for name in ("logit_bias", "allowed_tokens", "stop_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= int(token) < vocab:
                    raise BadOption(
                        f"{name} has token id {token}, but this model's ids run from 0 to "
                        f"{vocab - 1}."
                    )


def _whole(name: str, value: Any) -> int:
    """A whole number, NumPy's included; no truth values, no fractions."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise BadOption(f"{name}={value!r} must be a whole number.") from None


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise BadOption(f"{name}={value!r} must be a number.") from None
    _require(math.isfinite(number), name, value, "a finite number")
    return number


def check_whole(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Refuse an option that is not a whole number of the right size. Methods, drafters and recipes
    check theirs with it."""
    fine = (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= least
        and (most is None or value <= most)
    )
    _require(
        fine,
        name,
        value,
        f"a whole number, {least} or more"
        if most is None
        else f"a whole number from {least} to {most}",
    )


def check_between(name: str, value: Any, least: float = 0.0, most: float = 1.0) -> None:
    """Refuse an option that is not a number within bounds."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    _require(
        fine,
        name,
        value,
        f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}",
    )


def check_number(name: str, value: Any) -> None:
    """Refuse an option that is not a finite number."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _require(fine, name, value, "a number")


def check_positive(name: str, value: Any) -> None:
    """Refuse an option that is not a number above 0."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    _require(fine, name, value, "a number above 0")


def check_flag(name: str, value: Any) -> None:
    """Refuse an option that is not a truth value."""
    _require(isinstance(value, bool), name, value, "True or False")


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, str | bytes | Mapping):
        with suppress(TypeError):  # of arrays and tensors, some say that they are no list only here
            return tuple(value)
    raise BadOption(f"{name}={value!r} must be a list.")


def _require(fine: bool, name: str, value: Any, right: str) -> None:
    if not fine:
        raise BadOption(f"{name}={value!r} must be {right}.")
