"""Drafters that look into their target: the text's keys and values are made of the target's hidden
states, and one row for every blank says what could stand there.

A row of text before the last token is *context*: it has keys and values and sees nothing. Its
token is written as token + `context_from`, as many as there are embeddings, by which a backbone
knows it. The last token and the masks after it are a block: they see the context and each other. A
block is never remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from forerun.families.base import BlankFiller, Family
from forerun.probability.markov import Markov
from forerun.sequence.canvas import Canvas
from forerun.sequence.question import BlankLaws, Branch
from forerun.sequence.rows import BlockPlan, Plan


class FeatureFiller(BlankFiller):
    """A drafter that looks into its target."""

    does = "looks into its target"
    family: Features

    async def block(self, seq: Canvas, k: int) -> BlankLaws:
        """The laws of the next k blanks, each on its own: one forward."""
        plan = self.family.marginals(seq, seq.next(k))
        branch = Branch((), [0] * k, seq.next(k), drafts=True)
        [laws] = await self.ask(seq, plan, [branch], with_model_law=True)
        return laws

    async def next_law(self, seq: Canvas, chain: Sequence[int]) -> Tensor:
        """The law [V] of the token after the text and a chain, of an autoregressive drafter."""
        plan = self.family.after(seq, chain)
        [law_1V] = await self.ask(seq, plan, [Branch(chain, [len(chain)])])
        return law_1V[0]


class Features(Family):
    """A few layers over the target's hidden states, and blocks of so many slots."""

    name = "features"
    handle = FeatureFiller
    default_method = "specdiff"
    default_reason = "it drafts for another model, and does nothing else"

    def __init__(
        self,
        context_from: int,
        mask_token: int,
        block: int,
        *,
        markov: Markov | None = None,
        autoregressive: bool = False,
    ):
        self.context_from = context_from
        self.mask_token: int = mask_token
        self.impossible_tokens = (mask_token,)
        self.block = block
        self.markov = markov
        self.autoregressive = autoregressive

    @classmethod
    def of(cls, config: Any) -> None:
        """No network by itself is of this family: it needs a target."""
        return None

    def slots(self, context: int) -> int:
        return context + self.block

    def marginals(self, seq: Canvas, positions: Sequence[int]) -> Plan:
        """A block has all its masks, as in training, however few are read."""
        block = [int(seq.text[-1]), *[self.mask_token] * (self.block - 1)]
        blanks = range(1, 1 + len(positions))
        return BlockPlan.of(seq.text[:-1], self.context_from, block, blanks)

    def after(self, seq: Canvas, chain: Sequence[int]) -> Plan:
        """A block of tokens that each see those before them."""
        block = [int(seq.text[-1]), *chain]
        read = [len(chain)]
        return BlockPlan.of(seq.text[:-1], self.context_from, block, read, causal_block=True)
