"""Grammars read by xgrammar."""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.constraints.base import bitmask, words
from forerun.constraints.matching import MatcherLanguage
from forerun.constraints.spec import MOST_WHITESPACE, ConstraintSpec, one_line
from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import BadOption


class XgrammarGrammar:
    """A compiled grammar; every sequence gets a matcher of its own."""

    def __init__(self, spec: ConstraintSpec, vocabulary: Vocabulary):
        self._compiler, self._end = vocabulary.once("xgrammar", lambda: _compiler(vocabulary))
        self._vocabulary = vocabulary
        try:
            self._compiled = self._compile(spec)
        except (RuntimeError, ValueError) as error:
            raise BadOption(f"{spec.argument}= cannot be used: {one_line(error)}") from None

    def _compile(self, spec: ConstraintSpec) -> Any:
        if spec.kind == "json":
            return self._compiler.compile_json_schema(
                spec.text, strict_mode=False, max_whitespace_cnt=MOST_WHITESPACE
            )
        if spec.kind == "regex":
            return self._compiler.compile_regex(spec.text)
        if spec.kind == "lark":
            return self._compiler.compile_lark(spec.text)
        if spec.kind == "choices":
            return self._compiler.compile_grammar(f"root ::= {_alternatives(spec.choices)}")
        return self._compiler.compile_grammar(spec.text)

    def language(self) -> MatcherLanguage:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled)
        return MatcherLanguage(_Matcher(matcher, self._vocabulary, self._end))


class _Matcher:
    def __init__(self, matcher: Any, vocabulary: Vocabulary, end: int):
        self._matcher = matcher
        self._vocabulary = vocabulary
        vocab = vocabulary.size
        self._ordinary_W = bitmask((t for t in range(vocab) if t != end), vocab)
        self._buffer_1W = np.zeros((1, words(max(vocab, end + 1))), np.int32)

    def consume(self, token: int) -> bool:
        return self._matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def allowed(self) -> np.ndarray:
        self._buffer_1W[:] = -1  # where everything is allowed, it is left as it is
        self._matcher.fill_next_token_bitmask(self._buffer_1W)
        return self._buffer_1W[0, : len(self._ordinary_W)] & self._ordinary_W

    def accepts(self) -> bool:
        return self._matcher.is_completed()

    def guess(self) -> list[int]:
        return self._vocabulary.encode(self._matcher.find_jump_forward_string())


def _alternatives(choices: list[str]) -> str:
    def quoted(text: str) -> str:
        return '"' + "".join(f"\\U{ord(character):08x}" for character in text) + '"'

    return " | ".join(map(quoted, choices))


def _compiler(vocabulary: Vocabulary) -> tuple[Any, int]:
    """A compiler for these tokens, and the token that it takes for the end of a text."""
    import xgrammar

    end = vocabulary.end
    if vocabulary.tokenizer is not None:
        size = max(vocabulary.size, end + 1)
        info = xgrammar.TokenizerInfo.from_huggingface(
            vocabulary.tokenizer, vocab_size=size, stop_token_ids=[end]
        )
    else:
        tokens = [*(vocabulary.spelled or ()), b"<end>"]
        info = xgrammar.TokenizerInfo(tokens, stop_token_ids=[end])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), end
