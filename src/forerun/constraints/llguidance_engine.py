"""Grammars read by llguidance."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from forerun.constraints.base import bitmask_without, words
from forerun.constraints.matching import MatcherLanguage
from forerun.constraints.spec import MOST_WHITESPACE, ConstraintSpec, one_line
from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import BadOption

WHITESPACE: Any = {"whitespace_pattern": rf"[ \n\r\t]{{1,{MOST_WHITESPACE}}}"}
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


class LlguidanceGrammar:
    """A compiled grammar; every sequence gets a matcher of its own."""

    def __init__(self, spec: ConstraintSpec, vocabulary: Vocabulary):
        import llguidance

        tokenizer, self._end = vocabulary.once("llguidance", lambda: _tokenizer(vocabulary))
        self._vocab = vocabulary.size
        self._matcher = llguidance.LLMatcher(
            tokenizer, _grammar(spec), log_level=0, limits=llguidance.LLParserLimits(**LIMITS)
        )
        error = self._matcher.get_error()
        if error:
            raise BadOption(f"{spec.argument}= cannot be used: {one_line(error)}")

    def language(self) -> MatcherLanguage:
        return MatcherLanguage(_Matcher(self._matcher.deep_copy(), self._vocab, self._end))


class _Matcher:
    def __init__(self, matcher: Any, vocab: int, end: int):
        self._matcher = matcher
        self._words = words(vocab)
        self._ordinary_W = bitmask_without([end] if end < vocab else [], vocab)

    def consume(self, token: int) -> bool:
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def allowed(self) -> np.ndarray:
        mask_W = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        return mask_W & self._ordinary_W

    def accepts(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def error(self) -> str:
        return one_line(self._matcher.get_error().replace("<non-verbose/>", ""))

    def guess(self) -> list[int]:
        return self._matcher.compute_ff_tokens()


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


def _tokenizer(vocabulary: Vocabulary) -> tuple[Any, int]:
    """The engine's own tokenizer, and the token that it takes for the end of a text."""
    import llguidance
    import llguidance.hf

    tokenizer = vocabulary.tokenizer
    end = vocabulary.end
    if tokenizer is None:
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Spelled(vocabulary))), end
    return llguidance.hf.from_tokenizer(tokenizer, eos_token=end), end
