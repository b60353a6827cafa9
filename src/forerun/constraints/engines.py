"""From what a text must look like to the language that a sequence follows."""

from __future__ import annotations

from typing import Any, Protocol

from forerun.constraints.base import Language
from forerun.constraints.spec import ConstraintSpec
from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import BadOption


class Grammar(Protocol):
    """A compiled grammar."""

    def language(self) -> Language[Any]:
        """A language for one sequence."""


def compiled(spec: ConstraintSpec, vocabulary: Vocabulary) -> Grammar:
    """A grammar for a model's tokens, compiled once."""
    return vocabulary.once(spec, lambda: _compile(spec, vocabulary))


def _compile(spec: ConstraintSpec, vocabulary: Vocabulary) -> Grammar:
    try:
        if spec.engine == "xgrammar":
            from forerun.constraints.xgrammar_engine import XgrammarGrammar

            return XgrammarGrammar(spec, vocabulary)
        from forerun.constraints.llguidance_engine import LlguidanceGrammar

        return LlguidanceGrammar(spec, vocabulary)
    except ImportError as error:
        raise BadOption(
            f"{spec.argument}= needs {spec.engine}: `pip install 'forerun[grammar]'` ({error})."
        ) from None
