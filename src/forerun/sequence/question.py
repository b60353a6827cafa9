"""What a method awaits to have a model run, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from forerun.probability.acceptance import sample_token
from forerun.probability.logits import ChainRows
from forerun.sequence.canvas import Canvas, Draw
from forerun.sequence.choosing import Chooser
from forerun.sequence.rows import PlainText, Plan


class Costs(Protocol):
    """What steps of a model cost, here and now, as far as a method may know it."""

    launch: float  # seconds of rounds that follow a verdict by themselves, at most

    @property
    def known(self) -> bool:
        """Is anything known?"""
        ...

    def forward(self, rows: int) -> float:
        """Seconds of a forward of so many rows."""
        ...

    def tokens_per_second(self, rows: int, tokens: float, draft_seconds: float = 0.0) -> float:
        """What all sequences get of a step in which one has so many rows and gets so many tokens,
        if the others do as in the last."""
        ...

    def seconds_if_all_have(self, rows: int) -> float:
        """Of a step in which each sequence of the last one has so many rows."""
        ...

    def draft_forward(self) -> float | None:
        """Seconds of one forward of a draft model, as seen beside this one; None before any."""
        ...


class ModelHost(Protocol):
    """A model with its cache, as far as a handle needs to know it."""

    # What methods keep from one request to the next. It may change guesses, never decisions.
    shared_state: dict[str, Any]
    room: int  # rows that one plan may have

    @property
    def costs(self) -> Costs:
        """What steps of the model cost."""
        ...

    def chooser(self, seq: Canvas, learns: bool) -> Chooser:
        """Whoever says which drafts pay for a sequence."""
        ...

    @property
    def rows_are_cheap(self) -> bool:
        """Do more rows in one forward cost little more time?"""
        ...

    @property
    def at_once(self) -> int:
        """Tokens of plain text that the model had best write in one launch."""
        ...

    @property
    def writes_any_length(self) -> bool:
        """Does a launch of fewer tokens cost as much less?"""
        ...

    def can_write(self, end: int, tokens: int) -> bool:
        """Can the model write so many tokens by itself after a text that ends there?"""
        ...

    def ask_features(self, layers: Sequence[int]) -> None:
        """Have forwards from now on keep the hidden states after these layers."""
        ...


class BlankLaws(NamedTuple):
    """The laws of some blanks, [N, V]."""

    law: Tensor  # under the sampling parameters: tokens are drawn from it
    # The softmax of the logits, of what a constraint leaves: confidence is read from it.
    model_law: Tensor


class Branch(NamedTuple):
    """Rows that are read together. Row i is a law given the first `prefixes[i]` tokens of a chain.

    `positions` are those that the laws are of. Without them, the rows speak of the blanks that
    follow the text, and every row knows one token more than the row before it. With none, they
    speak of the blanks behind the one that follows the prefix, and nobody asks for logprobs there.
    `places` are the positions of the chain's tokens. Without them, they are the next blanks.
    """

    chain: Sequence[int]
    prefixes: Sequence[int]
    positions: Sequence[int] | None = None
    places: Sequence[int] | None = None
    drafts: bool = False  # are the blanks a draft, each on its own?


@dataclass(eq=False)
class Question:
    """A plan for one model. Its answer is the laws of what the plan reads, branch by branch."""

    host: ModelHost
    plan: Plan
    seq: Canvas
    chains: Sequence[ChainRows]  # for each branch, what its rows stand for
    positions: Sequence[Sequence[int]]  # for each branch, the blanks that its laws are of
    drafting: bool
    with_model_law: bool  # answer with BlankLaws instead of laws
    features: Sequence[int] = ()  # layers whose hidden states are answered too, behind the laws
    # What is drawn from its laws, those of all branches in one. With it, the outcome of the draw is
    # the answer.
    then: Callable[[Any], Draw[Any]] | None = None
    # So many times whoever asks will draft and judge again in the same way. The engine may do so by
    # itself, and leave what came of it on the canvas (`Canvas.rounds_ahead`).
    repeats: int = 0

    def __await__(self) -> Generator[Question, Any, Any]:
        return (yield self)

    @property
    def length(self) -> int:
        """How many rows its plan has."""
        return self.plan.length


class NextToken(Question):
    """What follows the text, and one draw from it. Nearly all questions are of this kind, and most
    are answered together, by their lengths alone: all else is made for who looks.

    Without `make_plan` the plan is plain text: that of the sequence as it is now.
    """

    with_model_law = False
    features = ()

    def __init__(
        self,
        host: ModelHost,
        seq: Canvas,
        drafting: bool,
        make_plan: Callable[[Canvas], Plan] | None = None,
    ):
        self.host = host
        self.seq = seq
        self.drafting = drafting
        # of its sequence, not of itself: a cycle for each token would wait for the collector
        self.then = lambda law_1V: seq.draw(sample_token, law_1V[0])
        self.memory = seq.tokens  # what is known of it stays as it is
        self._make_plan = make_plan
        self._known = seq.known
        self._place = seq.filled

    @property
    def reads_text(self) -> bool:
        """Is its plan plain text?"""
        return self._make_plan is None

    @cached_property
    def plan(self) -> Plan:  # type: ignore[override]
        if self._make_plan is not None:
            return self._make_plan(self.seq)
        return PlainText.of(self.memory[: self._known], self._known - 1)

    @property
    def length(self) -> int:
        return self._known if self._make_plan is None else self.plan.length

    @cached_property
    def positions(self) -> Sequence[Sequence[int]]:  # type: ignore[override]
        return [self.seq.blanks[self._place : self._place + 1].tolist()]

    @cached_property
    def chains(self) -> Sequence[ChainRows]:  # type: ignore[override]
        history = self.seq.history
        if history.constraint is None:
            return [ChainRows(history, (), [0])]
        return [ChainRows(history, (), [0], None, (), self.positions[0])]


class Written(NamedTuple):
    """What a model wrote by itself."""

    tokens: list[int]
    laws: Tensor  # [len(tokens), V]: what each token was drawn from


@dataclass(eq=False)
class Continuation(Question):
    """A question after plain text whose answer is drawn from, and asked again with the token drawn,
    until there are so many. Its answer is `Written`. If it is no draft, it may also be answered as
    any question is: when others wait, who ask for one forward only."""

    tokens: int = 0
    temperature: float = 1.0  # of draws, times the request's own
    drawn: int = 0  # how many there were, once it is answered


class BranchQuestion(Question):
    """A question about a sequence, from the branches that its plan reads. What they stand for is
    made for who looks: most are answered by their rows alone."""

    features = ()
    then = None

    def __init__(
        self,
        host: ModelHost,
        plan: Plan,
        seq: Canvas,
        branches: Iterable[Branch],
        drafting: bool,
        with_model_law: bool,
    ):
        self.host = host
        self.plan = plan
        self.seq = seq
        self.branches = branches
        self.drafting = drafting
        self.with_model_law = with_model_law
        self._filled = seq.filled
        if seq.history.constraint is not None:  # what it allows hangs on the canvas as it is now
            _ = self.chains

    @cached_property
    def positions(self) -> Sequence[Sequence[int]]:  # type: ignore[override]
        return [_positions_of(branch, self.seq, self._filled) for branch in self.branches]

    @cached_property
    def chains(self) -> Sequence[ChainRows]:  # type: ignore[override]
        return [self._chain(*each) for each in zip(self.branches, self.positions)]

    def _chain(self, branch: Branch, where: Sequence[int]) -> ChainRows:
        seq = self.seq
        ordinals = None
        if branch.positions is not None and len(where):
            ordinals = np.searchsorted(seq.blanks, where).tolist()
        own = (seq.history, branch.chain, branch.prefixes, ordinals)
        if seq.history.constraint is None:
            return ChainRows(*own)
        ahead = where if len(where) else _blanks_ahead(branch, seq)
        return ChainRows(*own, _places_of(branch, seq), ahead, branch.drafts)


def _places_of(branch: Branch, seq: Canvas) -> Sequence[int]:
    """Where a chain's tokens stand."""
    if not len(branch.chain):
        return ()
    return seq.next(len(branch.chain)) if branch.places is None else branch.places


def _blanks_ahead(branch: Branch, seq: Canvas) -> Sequence[int]:
    """The blanks behind the one that follows a prefix: a draft of what comes after it."""
    if branch.positions is None or not len(branch.prefixes):
        return ()
    first = branch.prefixes[0] + 1
    return seq.next(first + len(branch.prefixes))[first:]


def _positions_of(branch: Branch, seq: Canvas, filled: int) -> Sequence[int]:
    if branch.positions is not None:
        return branch.positions
    if not len(branch.prefixes):
        return ()
    first = filled + branch.prefixes[0]
    return seq.blanks[first : first + len(branch.prefixes)].tolist()
