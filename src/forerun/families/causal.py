"""Left-to-right models: a row's output is the law of the token after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forerun.core import TAILS, Branching, Canvas, Conditional, Tail
from forerun.families import Family
from forerun.rows import Plan, causal_rows, tail_rows


class Causal(Family):
    """Every `transformers` causal language model with full attention."""

    name = "causal"
    answers = (Conditional, Branching)

    @classmethod
    def of(cls, config: Any) -> Causal:
        """Families are asked before this one, which takes the rest."""
        return cls()

    def slots(self, context: int) -> int:
        """Tails live behind the text, however long that is."""
        return context + TAILS

    def conditionals(self, seq: Canvas, chains: Sequence[Sequence[int]], last_only: bool = False) -> Plan:
        return self.after(seq.text, chains, last_only)

    @classmethod
    def after(cls, text: np.ndarray, chains: Sequence[Sequence[int]], last_only: bool = False) -> Plan:
        """Rows that score chains after the text. The first chain continues the text's own slots, so what is accepted of it is
        remembered; further chains are tails that leave it at once."""
        if len(chains) == 1:  # as nearly always, many times per forward of a large batch
            stored = len(text) + len(chains[0])
            read = np.arange(stored - 1 if last_only else len(text) - 1, stored)
            return Plan(causal_rows(text, chains[0]), [read], stored, causal=stored)
        plan = cls._with_tails(text, chains[0], [(0, chain) for chain in chains[1:]])
        first, *others = plan.reads
        reads = [first, *(np.concatenate([first[:1], own]) for own in others)]
        if last_only:
            reads = [own[-1:] for own in reads]
        return Plan(plan.rows, reads, plan.stored, causal=plan.causal)

    def branches(self, seq: Canvas, chain: Sequence[int], tails: Sequence[Tail]) -> Plan:
        return self._with_tails(seq.text, chain, tails)

    @staticmethod
    def _with_tails(text: np.ndarray, chain: Sequence[int], tails: Sequence[Tail]) -> Plan:
        """A chain after the text and tails that leave it: each sees the text, the chain up to there, and itself."""
        n, stored = len(text), len(text) + len(chain)
        parts, start, reads = [causal_rows(text, chain)], stored, [np.arange(n - 1, stored)]
        for depart, tokens in tails:
            parts.append(tail_rows(np.asarray(tokens, np.int32), n + depart, start))
            reads.append(np.arange(start, start + len(tokens)))
            start += len(tokens)
        return Plan(np.concatenate(parts, 1) if tails else parts[0], reads, stored, causal=stored)
