"""Left-to-right models: a row's output is the law of the token after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from forerun.families.base import ChainScorer, Family
from forerun.probability.acceptance import descend_tree
from forerun.probability.outcomes import Descent
from forerun.sequence.canvas import Canvas, Draw
from forerun.sequence.question import Branch, Question
from forerun.sequence.rows import PlainText, Plan, TailedText, text_and_chain

MAX_TAIL_TOKENS = 256  # that all tails of one question may have together, however long the text


class Tail(NamedTuple):
    """What might follow the first `depart` tokens of a chain instead of the rest of it."""

    depart: int
    tokens: Sequence[int]


class Tree(Protocol):
    """Guesses, of which each follows its parent: node 0 is the text, node i the token i - 1."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def parents(self) -> Sequence[int]: ...


class TreeScorer(ChainScorer):
    """A left-to-right model that scores several continuations at once, over shared keys and
    values."""

    does = "scores several continuations at once"
    family: Causal

    def fitting(self, seq: Canvas, chain: Sequence[int], tails: Sequence[Tail]) -> list[Tail]:
        """The first tails that a lane has room for behind the text and the chain. There are
        `MAX_TAIL_TOKENS` slots for them in any case, and as many more as the text leaves."""
        room = self.host.room - len(seq.text) - len(chain)
        sizes = accumulate(len(tail.tokens) for tail in tails)
        return [tail for tail, size in zip(tails, sizes) if size <= room]

    async def branches(
        self, seq: Canvas, chain: Sequence[int], tails: Sequence[Tail]
    ) -> list[Tensor]:
        """What `conditionals` answers for the chain; then, for each tail, the laws [len, V] of what
        follows its every token."""
        return await self._ask_branches(seq, chain, tails)

    def descended(
        self,
        seq: Canvas,
        chain: Sequence[int],
        tails: Sequence[Tail],
        tree: Tree,
        pick: Callable[[Tensor], Tensor] = lambda p_LV: p_LV,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Question:
        """To await: how far a tree of guesses is right by the laws that `branches` answers, all of
        them in one, or those that `pick` takes of them. It is drawn as soon as those are there: the
        tree is looked at while the model works, and what else is to be done `meanwhile` is done."""

        def then(p_LV: Tensor) -> Draw[Descent]:
            meanwhile()
            return seq.draw(descend_tree, tree.tokens, tree.parents, pick(p_LV))

        asked = self._ask_branches(seq, chain, tails)
        asked.then = then
        return asked

    def _ask_branches(self, seq: Canvas, chain: Sequence[int], tails: Sequence[Tail]) -> Question:
        plan = self.family.branches(seq, chain, tails)
        return self.ask(seq, plan, TreeBranches(chain, tails))


@dataclass(frozen=True)
class TreeBranches:
    """What a chain and its tails stand for, branch by branch, made for who looks."""

    chain: Sequence[int]
    tails: Sequence[Tail]

    def __iter__(self) -> Iterator[Branch]:
        yield Branch(self.chain, range(len(self.chain) + 1))
        for depart, tokens in self.tails:
            whole = [*self.chain[:depart], *tokens]
            yield Branch(whole, range(depart + 1, len(whole) + 1))


class Causal(Family):
    """Every `transformers` causal language model with full attention."""

    name = "causal"
    handle = TreeScorer
    default_method = "auto"
    reads_text = True

    @classmethod
    def of(cls, config: Any) -> Causal:
        """The other families are asked first; this one takes the rest."""
        return cls()

    def slots(self, context: int) -> int:
        """Tails live behind the text, however long that is."""
        return context + MAX_TAIL_TOKENS

    def conditionals(
        self, seq: Canvas, chains: Sequence[Sequence[int]], last_only: bool = False
    ) -> Plan:
        return self.after(seq.text, chains, last_only)

    @classmethod
    def after(
        cls, text: np.ndarray, chains: Sequence[Sequence[int]], last_only: bool = False
    ) -> Plan:
        """Rows that score chains after the text.

        The first chain continues the text's own slots, so what is accepted of it is remembered.
        Further chains are tails that leave it at once.
        """
        if len(chains) == 1:  # as nearly always, many times per forward of a large batch
            tokens = text_and_chain(text, chains[0])
            return PlainText.of(tokens, len(tokens if last_only else text) - 1)
        plan = TailedText.of(text, chains[0], [Tail(0, chain) for chain in chains[1:]])
        first, *others = plan.reads
        reads = [first, *(np.concatenate([first[:1], read]) for read in others)]
        if last_only:
            reads = [read[-1:] for read in reads]
        return Plan(plan.rows, reads, plan.stored, causal=plan.causal)

    def branches(self, seq: Canvas, chain: Sequence[int], tails: Sequence[Tail]) -> Plan:
        if not tails:
            return self.after(seq.text, [chain])
        return TailedText.of(seq.text, chain, tails)
