"""Left-to-right models: a row's output is the law of the token after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forerun.core import Canvas, Conditional
from forerun.families import Family
from forerun.rows import Plan, branch_rows, causal_rows


class Causal(Family):
    """Every `transformers` causal language model with full attention."""

    name = "causal"
    answers = (Conditional,)

    @classmethod
    def of(cls, config: Any) -> Causal:
        """Families are asked before this one, which takes the rest."""
        return cls()

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
            parts.append(branch_rows(np.asarray(chain, np.int32), n, start))
            reads.append(np.concatenate([[n - 1], np.arange(start, start + len(chain))]))
            start += len(chain)
        if last_only:
            reads = [branch[-1:] for branch in reads]
        return Plan(np.concatenate(parts, 1) if len(parts) > 1 else parts[0], reads, stored=len(main))
