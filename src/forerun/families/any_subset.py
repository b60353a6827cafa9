"""Any-subset models: any tokens are given; the others are decided from left to right, each asked
for by a query at its place.

Content rows come in decoding order (equation 4 of Guo & Ermon): first the given tokens, which all
see each other, then the decided ones, each of which sees what was decided before it. A query row is
a mask token at a blank's position that sees the content rows below its horizon. Nobody sees a
query, so any number of them ride in one forward without a trace. Decided tokens never join the
given ones, which makes their keys and values worth keeping (appendix F.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from forerun.errors import NotAble
from forerun.families.base import Family, SelfDrafter, family_settings
from forerun.probability.outcomes import Placement
from forerun.sequence.canvas import Canvas
from forerun.sequence.question import BlankLaws
from forerun.sequence.rows import HI, HORIZON, LO, POSITION, TOKEN, Plan


class SubsetScorer(SelfDrafter):
    """A model that scores chains through blanks, wherever they are.

    Its marginal of the next blank is that blank's conditional: one network gives both.
    """

    does = "scores chains through blanks anywhere"
    family: AnySubset

    async def verdict_and_drafts(
        self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]
    ) -> list[Tensor]:
        """As the base says, but of the prefixes only the last ones whose drafts fit into one
        forward."""
        content = len(seq.given) + seq.filled + len(chain)
        fit = (self.host.room - content - len(chain) - 1) // max(k, 1)
        return await super().verdict_and_drafts(
            seq, chain, k, prefixes[max(0, len(prefixes) - fit) :]
        )

    async def after_placements(
        self, seq: Canvas, positions: Sequence[int], placements: Sequence[Placement]
    ) -> list[BlankLaws]:
        """The law of one blank after each placement, whose tokens are decided in their order. As
        many in one forward as there is room for."""
        found: list[BlankLaws] = []
        given = len(seq.given) + seq.filled
        start = 0
        while start < len(placements):
            sizes = np.cumsum([given, *(len(one) + 1 for one in placements[start:])])[1:]
            end = start + max(1, int((sizes <= self.host.room).sum()))
            where = [[position] for position in positions[start:end]]
            plan = self.family.placed(seq, positions[start:end], placements[start:end])
            found += await self.ask_canvases(seq, plan, where, placements[start:end])
            start = end
        return found


class AnySubset(Family):
    """A decoder whose mask-token rows are queries. They see themselves, so even on an empty canvas
    a query sees something."""

    name = "any-subset"
    handle = SubsetScorer
    default_method = "assd"
    default_reason = (
        "the model drafts and judges by itself with the same weights: exact, with never more "
        "forwards than tokens"
    )
    needs_prompt = False
    sees_itself = True

    def __init__(self, mask_token: int):
        self.mask_token: int = mask_token
        self.impossible_tokens = (mask_token,)

    @classmethod
    def of(cls, config: Any) -> AnySubset | None:
        settings = family_settings(config)
        if settings.get("family") != cls.name or config.model_type == "xlnet":
            return None
        return cls(settings["mask_token"])

    def masked_as(self, token: int) -> AnySubset:
        return type(self)(token)

    def slots(self, context: int) -> int:
        """A content row and a query of every token: the joint density of a whole canvas is one
        forward."""
        return 2 * context

    def conditionals(
        self, seq: Canvas, chains: Sequence[Sequence[int]], last_only: bool = False
    ) -> Plan:
        chain = self.one_chain(chains)
        queries = self._chain_queries(seq, chain)
        return self._plan(seq, chain, [queries[-1:] if last_only else queries])

    def marginals(self, seq: Canvas, positions: Sequence[int]) -> Plan:
        return self._plan(seq, (), [np.array([(0, p) for p in positions])])

    def verdict_and_drafts(
        self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]
    ) -> Plan:
        drafts = []
        for n in prefixes:
            after = seq.blanks[seq.filled + n + 1 :][:k]
            drafts.append(np.stack([np.full(len(after), n), after], 1))
        return self._plan(seq, chain, [self._chain_queries(seq, chain), *drafts])

    def placed(
        self, seq: Canvas, positions: Sequence[int], placements: Sequence[Placement]
    ) -> Plan:
        """A query after each placement. Its tokens are content rows of its own, behind what is
        decided: each sees those before it, and the query all of them."""
        plan = self._plan(seq, (), [np.zeros((0, 2), np.int64)])
        decided = plan.rows.shape[1]
        rows = [plan.rows]
        reads = []
        first = decided
        for position, placement in zip(positions, placements, strict=True):
            both = np.array([*placement, (position, self.mask_token)], np.int32)
            index = first + np.arange(len(both))
            more = np.zeros((5, len(both)), np.int32)
            more[POSITION], more[TOKEN] = both.T
            more[HORIZON] = decided
            more[LO] = first
            more[HI] = index + 1
            more[HI, -1] -= not self.sees_itself
            rows.append(more)
            first += len(both)
            reads.append(index[-1:])
        return Plan(np.concatenate(rows, 1), reads, stored=decided)

    @staticmethod
    def _chain_queries(seq: Canvas, chain: Sequence[int]) -> np.ndarray:
        """Queries of a chain's every token given those before it, and of the blank after it if
        there is one: rows (known chain tokens, position)."""
        positions = seq.blanks[seq.filled :][: len(chain) + 1]
        return np.stack([np.arange(len(positions)), positions], 1)

    def _plan(self, seq: Canvas, chain: Sequence[int], branches: Sequence[np.ndarray]) -> Plan:
        """Content rows of what is decided and of the chain, then the queries, branch by branch."""
        given = len(seq.given)
        decided = given + seq.filled
        content = decided + len(chain)
        positions = np.concatenate([seq.given, seq.blanks[: seq.filled + len(chain)]])
        queries = np.concatenate(branches)
        index = np.arange(content + len(queries))
        rows = np.zeros((5, len(index)), np.int32)
        rows[TOKEN] = self.mask_token
        rows[TOKEN, :decided] = seq.tokens[positions[:decided]]
        rows[TOKEN, decided:content] = chain
        rows[POSITION] = np.concatenate([positions, queries[:, 1]])
        content_horizon = np.maximum(index[:content] + 1, given)
        rows[HORIZON] = np.concatenate([content_horizon, decided + queries[:, 0]])
        if self.sees_itself:
            rows[LO, content:] = index[content:]
            rows[HI, content:] = index[content:] + 1
        elif (rows[HORIZON] == 0).any():
            raise NotAble(
                "nothing is given: a query of this model sees only given and decided tokens, and "
                "would look at nothing. Give at least one token."
            )
        ends = np.cumsum([len(branch) for branch in branches])[:-1]
        return Plan(rows, np.split(index[content:], ends), stored=content)


class XLNet(AnySubset):
    """XLNet checkpoints. Their queries see only other rows, so something must be given: under the
    library's own mask, a row that sees nothing would look at everything."""

    needs_prompt = True
    sees_itself = False
    MASK = 6  # of xlnet-base-cased, xlnet-large-cased and what was tuned from them

    def can_begin(self, seq: Canvas) -> bool:
        """Given tokens may stand anywhere."""
        return len(seq.given) + seq.filled > 0

    @classmethod
    def of(cls, config: Any) -> XLNet | None:
        if config.model_type != "xlnet":
            return None
        return cls(family_settings(config).get("mask_token", cls.MASK))
