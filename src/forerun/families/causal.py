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

    @staticmethod
    def after(text: np.ndarray, chains: Sequence[Sequence[int]], last_only: bool = False) -> Plan:
        """Rows that score chains after the text. The first chain continues the text's own slots, so what is accepted of it is
        remembered; further chains are branches over the shared text."""
        n = len(text)
        main = np.concatenate([text, np.asarray(chains[0], np.int32)])
        parts, start, reads = [causal_rows(main)], len(main), [np.arange(n - 1, len(main))]
        for chain in chains[1:]:
            parts.append(tail_rows(np.asarray(chain, np.int32), n, start))
            reads.append(np.concatenate([[n - 1], np.arange(start, start + len(chain))]))
            start += len(chain)
        if last_only:
            reads = [branch[-1:] for branch in reads]
        return Plan(np.concatenate(parts, 1) if len(parts) > 1 else parts[0], reads, stored=len(main))

    @staticmethod
    def branches(seq: Canvas, chain: Sequence[int], tails: Sequence[Tail]) -> Plan:
        """A chain after the text and tails that leave it: each sees the text, the chain up to there, and itself."""
        n = len(seq.text)
        main = np.concatenate([seq.text, np.asarray(chain, np.int32)])
        parts, start, reads = [causal_rows(main)], len(main), [np.arange(n - 1, len(main))]
        for depart, tokens in tails:
            parts.append(tail_rows(np.asarray(tokens, np.int32), n + depart, start))
            reads.append(np.arange(start, start + len(tokens)))
            start += len(tokens)
        return Plan(np.concatenate(parts, 1), reads, stored=len(main))
