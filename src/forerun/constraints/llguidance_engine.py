"""Grammars read by llguidance."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from forerun.constraints.base import bitmask_without, words
from forerun.constraints.matching import BeginningsKept, Matcher, MatcherLanguage
from forerun.constraints.spec import MOST_WHITESPACE, ConstraintSpec, one_line
from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import BadOption

WHITESPACE: Any = {"whitespace_pattern": rf"[ \n\r\t]{{1,{MOST_WHITESPACE}}}"}
WAKES_IN = 1e-4  # seconds that threads take to wake, before any did
LEAST = 2e-5
BELIEVED = 1.2  # times as long as before, if they took that much longer
FORGOTTEN = 0.99  # times, with every step that does without them
LARGEST = 2**62  # integer that bounds are narrowed to
DATA = ("const", "enum", "default", "examples")  # what is no schema inside a schema
# The work that a grammar may cost: about a second to read, a tenth for a mask.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 5_000_000,
    "step_lexer_fuel": 1_000_000,
    "step_max_items": 100_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


# Tokens of which a string may hold any while it has so much room left: the engine's own, and
# shorter ones besides. They change how long masks take, not what is in them.
INSIDE = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{INSIDE}{{1,{n}}}" for n in (3, 6, 10, 30)), f"{INSIDE}+"]


class LlguidanceGrammar:
    """A compiled grammar; every sequence gets a matcher of its own."""

    def __init__(self, spec: ConstraintSpec, vocabulary: Vocabulary):
        import llguidance

        tokenizer, self._form = vocabulary.once("llguidance", lambda: _tokenizer(vocabulary))
        self._matcher = llguidance.LLMatcher(
            tokenizer, _grammar(spec), log_level=0, limits=llguidance.LLParserLimits(**LIMITS)
        )
        error = self._matcher.get_error()
        if error:
            raise BadOption(f"{spec.argument}= cannot be used: {one_line(error)}")
        self._kept = BeginningsKept()

    def language(self) -> MatcherLanguage:
        return MatcherLanguage(_Matcher(self._matcher.deep_copy(), self._form), self._kept)


@dataclass(frozen=True, eq=False)
class MaskForm:
    """What the engine's bitmasks are like."""

    words: int  # of the engine's masks, which may know a token more than the model
    ordinary_W: np.ndarray  # the model's tokens, but for the one that the engine ends a text with

    def of_model(self, masks_NW: np.ndarray) -> np.ndarray:
        """Some of the engine's masks as the model's, in place."""
        own_NW = masks_NW[:, : len(self.ordinary_W)]
        return np.bitwise_and(own_NW, self.ordinary_W, out=own_NW)


class MaskThreads:
    """The engine's threads. To wake them takes long where there are many: so masks are made one
    after the other until threads promise to be done sooner with those that are left."""

    def __init__(self) -> None:
        import llguidance

        self._executor: Any = llguidance.LLExecutor()
        self._count = max(1, (os.cpu_count() or 1) - 1)  # as it has them
        self._wakes_in = WAKES_IN

    def fill(self, matchers: Sequence[Any], masks_NW: np.ndarray) -> None:
        """Have matchers write what they allow, each into its row."""
        first = _address(masks_NW)
        size = masks_NW.strides[0]
        began = time.perf_counter()
        for done, matcher in enumerate(matchers, 1):
            matcher.unsafe_compute_mask_ptr(first + (done - 1) * size, size)
            left = len(matchers) - done
            work = (time.perf_counter() - began) / done * left
            shared = work / min(self._count, left or 1)
            if work > shared + self._wakes_in:
                self._fill_together(matchers[done:], first + done * size, size, shared)
                return
        self._wakes_in = max(LEAST, FORGOTTEN * self._wakes_in)  # and are tried again one day

    def _fill_together(
        self, matchers: Sequence[Any], first: int, size: int, expected: float
    ) -> None:
        numbered = [(matcher, i) for i, matcher in enumerate(matchers)]
        began = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(numbered, first, size, len(matchers))
        woken_in = max(0.0, time.perf_counter() - began - expected)
        # What others take may be more than was expected: so it is believed little by little.
        self._wakes_in = min(BELIEVED * self._wakes_in, max(LEAST, woken_in))


@lru_cache(maxsize=1)
def _threads(process: int) -> MaskThreads:
    """Those of a process: one that was forked off has none of its parent's."""
    return MaskThreads()


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class _Matcher:
    def __init__(self, matcher: Any, form: MaskForm):
        self.matcher = matcher
        self.form = form

    def consume(self, token: int) -> bool:
        return self.matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)

    def allowed(self) -> np.ndarray:
        masks_1W = np.empty((1, self.form.words), np.int32)
        self.matcher.unsafe_compute_mask_ptr(_address(masks_1W), masks_1W.nbytes)
        return self.form.of_model(masks_1W)[0]

    def allowed_together(self, others: Sequence[Matcher]) -> np.ndarray:
        """If it takes long, in threads of the engine's own, without Python's lock."""
        alike = [self, *(one for one in others if isinstance(one, _Matcher))]
        if len(alike) == 1:
            return self.allowed()[None]
        if any(one.form is not self.form for one in alike):
            return np.stack([one.allowed() for one in alike])
        masks_NW = np.empty((len(alike), self.form.words), np.int32)
        _threads(os.getpid()).fill([one.matcher for one in alike], masks_NW)
        return self.form.of_model(masks_NW)

    def accepts(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def error(self) -> str:
        return one_line(self.matcher.get_error().replace("<non-verbose/>", ""))

    def guess(self) -> list[int]:
        return self.matcher.compute_ff_tokens()


def within_reach(schema: Any) -> Any:
    """The same schema, its integers held to what the engine can count. It fails where one may be
    as low as an integer of 64 bits."""
    if isinstance(schema, list):
        return [within_reach(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {k: part if k in DATA else within_reach(part) for k, part in schema.items()}
    if schema.get("type") == "integer":
        for name in ("minimum", "exclusiveMinimum"):
            if isinstance(found.get(name), int | float) and found[name] < -LARGEST:
                found[name] = -LARGEST
        for name in ("maximum", "exclusiveMaximum"):
            if isinstance(found.get(name), int | float) and found[name] > LARGEST:
                found[name] = LARGEST
    return found


def _grammar(spec: ConstraintSpec) -> str:
    import llguidance

    if spec.kind == "choices":  # a terminal: rules with thousands of ways are slow
        ways = " | ".join(map(json.dumps, spec.choices))
        return llguidance.grammar_from("lark", f"start: CHOICE\nCHOICE: {ways}")
    try:
        if spec.kind == "json":
            text = json.dumps(within_reach(json.loads(spec.text)), ensure_ascii=False)
            return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=WHITESPACE)
        form = "gbnf" if spec.kind == "ebnf" else spec.kind
        return llguidance.grammar_from(form, spec.text)  # type: ignore[arg-type]
    except ValueError as error:
        raise BadOption(f"{spec.argument}= cannot be used: {one_line(error)}") from None


class _Spelled:
    """A vocabulary without a tokenizer, and a token after its last that stands for the end."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.tokens = [*(vocabulary.spelled or ()), b"<end>"]
        self.eos_token_id = vocabulary.end
        self.special_token_ids = [vocabulary.end]
        self._vocabulary = vocabulary

    def __call__(self, text: bytes | str) -> list[int]:
        return self._vocabulary.encode(text.decode() if isinstance(text, bytes) else text)


def _tokenizer(vocabulary: Vocabulary) -> tuple[Any, MaskForm]:
    """The engine's own tokenizer, and what its masks are like."""
    import llguidance
    import llguidance.hf

    end = vocabulary.end
    if vocabulary.tokenizer is None:
        made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Spelled(vocabulary)))
    else:
        made = llguidance.hf.from_tokenizer(vocabulary.tokenizer, eos_token=end, slices=SLICES)
    size = vocabulary.size
    ordinary_W = bitmask_without([end] if end < size else [], size)
    return made, MaskForm(words(made.vocab_size), ordinary_W)
