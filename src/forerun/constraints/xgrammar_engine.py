"""Grammars read by xgrammar."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from forerun.constraints import xgrammar_worker
from forerun.constraints.base import bitmask_without, words
from forerun.constraints.matching import BeginningsKept, Matcher, MatcherLanguage
from forerun.constraints.spec import MOST_WHITESPACE, ConstraintSpec, one_line
from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import BadOption

SECONDS = 10  # that a grammar may take to compile
MEGABYTES = 8192  # of addresses, most of which the libraries take
# Of work while decoding, in seconds of the processor: for one mask or token, and for a whole text.
MOST_AT_ONCE = 1.0
MOST_IN_ALL = 30.0


class Compiler:
    """xgrammar's compiler for a vocabulary, in a process of its own, which has limits."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.end = vocabulary.end
        self.info = _tokenizer_info(vocabulary)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def compile(self, spec: ConstraintSpec) -> Any:
        import xgrammar

        kind, text = spec.kind, spec.text
        if kind == "choices":
            kind, text = "ebnf", f"root ::= {_alternatives(spec.choices)}"
        asked = {"kind": kind, "text": text, "seconds": SECONDS, "whitespace": MOST_WHITESPACE}
        with self._lock:
            line = self._ask(json.dumps(asked))
        if not line:
            raise BadOption(
                f"{spec.argument}= cannot be used: xgrammar needs more than {SECONDS} s or too "
                f"much memory for it."
            )
        said = json.loads(line)
        if "error" in said:
            raise BadOption(f"{spec.argument}= cannot be used: {one_line(said['error'])}")
        return xgrammar.CompiledGrammar.deserialize_json(said["compiled"], self.info)

    def _ask(self, line: str) -> str:
        """What the process answers; nothing if it has ended."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return ""

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, xgrammar_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdin is not None
        first = {"tokenizer": self.info.serialize_json(), "megabytes": MEGABYTES}
        self._process.stdin.write(json.dumps(first) + "\n")
        weakref.finalize(self, self._process.kill)
        return self._process


class XgrammarGrammar:
    """A compiled grammar; every sequence gets a matcher of its own."""

    def __init__(self, spec: ConstraintSpec, vocabulary: Vocabulary):
        compiler = vocabulary.once("xgrammar", lambda: Compiler(vocabulary))
        self._vocabulary = vocabulary
        self._end = compiler.end
        self._compiled = compiler.compile(spec)
        self._kept = BeginningsKept()

    def language(self) -> MatcherLanguage:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled)
        return MatcherLanguage(_Matcher(matcher, self._vocabulary, self._end), self._kept)


class _Matcher:
    def __init__(self, matcher: Any, vocabulary: Vocabulary, end: int):
        self._matcher = matcher
        self._vocabulary = vocabulary
        vocab = vocabulary.size
        self._ordinary_W = bitmask_without([end] if end < vocab else [], vocab)
        self._buffer_1W = np.zeros((1, words(max(vocab, end + 1))), np.int32)
        self._spent = 0.0
        self._error = ""

    @contextmanager
    def _within_limits(self) -> Iterator[None]:
        """xgrammar cannot be stopped inside a call. After one that took too long there is no
        other."""
        began = time.thread_time()
        yield
        spent = time.thread_time() - began
        self._spent += spent
        if spent > MOST_AT_ONCE or self._spent > MOST_IN_ALL:
            self._error = (
                f"xgrammar needs more than {MOST_AT_ONCE:g} s for a token or {MOST_IN_ALL:g} s for "
                f"a text"
            )

    def consume(self, token: int) -> bool:
        if self._error:
            return False
        with self._within_limits():
            return self._matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def allowed(self) -> np.ndarray:
        self._buffer_1W[:] = -1  # where everything is allowed, it is left as it is
        if not self._error:
            with self._within_limits():
                self._matcher.fill_next_token_bitmask(self._buffer_1W)
        if self._error:
            return np.zeros_like(self._ordinary_W)
        return self._buffer_1W[0, : len(self._ordinary_W)] & self._ordinary_W

    def allowed_together(self, others: Sequence[Matcher]) -> np.ndarray:
        return np.stack([self.allowed(), *(other.allowed() for other in others)])

    def accepts(self) -> bool:
        return self._matcher.is_completed()

    @property
    def error(self) -> str:
        return self._error

    def guess(self) -> list[int]:
        return self._vocabulary.encode(self._matcher.find_jump_forward_string())


def _alternatives(choices: list[str]) -> str:
    def quoted(text: str) -> str:
        return '"' + "".join(f"\\U{ord(character):08x}" for character in text) + '"'

    return " | ".join(map(quoted, choices))


def _tokenizer_info(vocabulary: Vocabulary) -> Any:
    import xgrammar

    end = vocabulary.end
    if vocabulary.tokenizer is None:
        tokens = [*(vocabulary.spelled or ()), b"<end>"]
        return xgrammar.TokenizerInfo(tokens, stop_token_ids=[end])
    return xgrammar.TokenizerInfo.from_huggingface(
        vocabulary.tokenizer, vocab_size=max(vocabulary.size, end + 1), stop_token_ids=[end]
    )
