"""Any-subset models: any tokens given, the others decided from left to right, each asked for by a query at its place.

Content rows come in decoding order (equation 4 of Guo & Ermon): the given tokens, which all see each other, then the decided
ones, each of which sees what was decided before it. A query row is a mask token at a blank's position that sees the content rows
below its horizon; nobody sees a query, so any number of them ride in one forward without a trace. Decided tokens never join
the given ones, which is what makes their keys and values worth keeping (appendix F.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forerun.core import AnySubset as Question
from forerun.core import Canvas, Conditional, Marginal
from forerun.errors import NotAble
from forerun.families import Family
from forerun.rows import HI, HORIZON, LO, POSITION, TOKEN, Plan


class AnySubset(Family):
    """A decoder whose mask-token rows are queries. They see themselves, so even an empty canvas has something to look at."""

    name = "any-subset"
    answers = (Conditional, Marginal, Question)
    needs_prompt = False
    default = "assd"
    sees_itself = True

    def __init__(self, mask_token: int):
        self.mask_token, self.never = mask_token, (mask_token,)

    @classmethod
    def of(cls, config: Any) -> AnySubset | None:
        marks = getattr(config, "forerun", None) or {}
        return cls(marks["mask_token"]) if marks.get("family") == cls.name and config.model_type != "xlnet" else None

    def masked_as(self, token: int) -> AnySubset:
        """The same kind of model with another number for its mask."""
        return type(self)(token)

    def slots(self, context: int) -> int:
        """Room for a content row and a query of every token: the joint density of a whole canvas is one forward."""
        return 2 * context

    def conditionals(self, seq: Canvas, chains: Sequence[Sequence[int]], last_only: bool = False) -> Plan:
        if len(chains) > 1:
            raise NotAble(f"a model of the family '{self.name}' scores one chain per question, not {len(chains)}.")
        return self._plan(seq, chains[0], [self._chain(seq, chains[0])[-1:] if last_only else self._chain(seq, chains[0])])

    def marginals(self, seq: Canvas, positions: Sequence[int]) -> Plan:
        return self._plan(seq, (), [np.array([(0, p) for p in positions])])

    def outlook(self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]) -> Plan:
        ahead = []
        for n in prefixes:
            after = seq.blanks[seq.filled + n + 1 :][:k]
            ahead.append(np.stack([np.full(len(after), n), after], 1))
        return self._plan(seq, chain, [self._chain(seq, chain), *ahead])

    @staticmethod
    def _chain(seq: Canvas, chain: Sequence[int]) -> np.ndarray:
        """Queries of a chain's every token given those before it, and of the blank after it if there is one."""
        positions = seq.blanks[seq.filled :][: len(chain) + 1]
        return np.stack([np.arange(len(positions)), positions], 1)

    def _plan(self, seq: Canvas, chain: Sequence[int], branches: Sequence[np.ndarray]) -> Plan:
        """Content rows of what is decided and of the chain, then queries (known chain tokens, position), branch by branch."""
        given, decided = len(seq.given), len(seq.given) + seq.filled
        places = np.concatenate([seq.given, seq.blanks[: seq.filled + len(chain)]])
        content = decided + len(chain)
        queries = np.concatenate(branches)
        index = np.arange(content + len(queries))
        rows = np.zeros((5, len(index)), np.int32)
        rows[TOKEN] = self.mask_token
        rows[TOKEN, :decided] = seq.canvas[places[:decided]]
        rows[TOKEN, decided:content] = chain
        rows[POSITION] = np.concatenate([places, queries[:, 1]])
        rows[HORIZON] = np.concatenate([np.maximum(index[:content] + 1, given), decided + queries[:, 0]])
        if self.sees_itself:
            rows[LO, content:], rows[HI, content:] = index[content:], index[content:] + 1
        elif (rows[HORIZON] == 0).any():
            raise NotAble(
                "nothing is given: a query of this model sees only given and decided tokens, and would look at nothing. "
                "Give at least one token."
            )
        reads = np.split(index[content:], np.cumsum([len(branch) for branch in branches])[:-1])
        return Plan(rows, reads, stored=content)


class XLNet(AnySubset):
    """XLNet checkpoints. Their queries see only other rows, so something must be given: a row that sees nothing would, under the
    library's own mask, look at everything instead."""

    needs_prompt = True
    sees_itself = False
    MASK = 6  # of xlnet-base-cased, xlnet-large-cased and what was tuned from them

    @classmethod
    def of(cls, config: Any) -> XLNet | None:
        marks = getattr(config, "forerun", None) or {}
        return cls(marks.get("mask_token", cls.MASK)) if config.model_type == "xlnet" else None

    @staticmethod
    def backbone(network: Any, vocab: int, context: int) -> Any:
        from forerun.backbones.xlnet import XLNetBackbone

        return XLNetBackbone(network, vocab, context)
