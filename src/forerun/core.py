"""The words that methods are written in: a sequence with blanks, a draft, and the questions a model may answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from forerun.noise import mix
from forerun.sampling import History

BLANK = -1


Placement = Sequence[tuple[int, int]]  # (position, token), in the order in which they were placed
Tail = tuple[int, Sequence[int]]  # (n, tokens): what might stand after the first n tokens of a chain instead
TAILS = 256  # tokens that all tails of one question may have together


@dataclass(frozen=True)
class Scope:
    """What of a canvas is computed anew, and what is taken from slots as it was: a cache policy at one moment.

    `none` computes everything. `prefix` trusts what lies before the block, `dual` all that lies outside it, unless `fresh`.
    """

    policy: str = "none"
    start: int = 0
    end: int = 0
    fresh: bool = True
    length: int | None = None  # the canvas ends here for this question: what lies behind is not looked at


EVERYTHING = Scope()


@dataclass(frozen=True)
class Frame:
    """The block of a canvas that is being filled, and how a block model reads what is decided before its first blank.

    Blocks of `size` see themselves whole. `causal` says what is read as if in blocks of one token instead: `nothing`, the `prefix`
    of this block (equation 4 of Han et al., 2026), or the `text`, all of it.
    """

    start: int
    end: int
    size: int
    causal: str = "nothing"


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for some positions, and the law each was drawn from: q = None is a point mass on every token."""

    positions: Sequence[int]
    tokens: Sequence[int]
    q: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@runtime_checkable
class Conditional(Protocol):
    """A model that scores chains."""

    def conditionals(self, seq: Canvas, *chains: Sequence[int]) -> Awaitable[list[Tensor]]:
        """For each chain, the laws [len + 1, V]: of its every token given the text and the tokens before it, and of the next."""

    def following(self, seq: Canvas, chain: Sequence[int] = ()) -> Awaitable[Tensor]:
        """The law [V] of the one token after the text and the chain: the last row of `conditionals`, without the others."""


@runtime_checkable
class Branching(Conditional, Protocol):
    """A left-to-right model that scores several continuations at once, over shared keys and values."""

    shelf: dict[str, Any]  # what methods keep from one request to the next; it may change what is guessed, never what is decided

    def branches(self, seq: Canvas, chain: Sequence[int], tails: Sequence[Tail]) -> Awaitable[list[Tensor]]:
        """What `conditionals` answers for the chain, and then for each tail the laws [len, V] of what follows its every token."""


@runtime_checkable
class Marginal(Protocol):
    """A model that fills blanks."""

    def marginals(self, seq: Canvas, positions: Sequence[int]) -> Awaitable[Tensor]:
        """The laws [len(positions), V] of each blank on its own, given what is decided."""


@runtime_checkable
class AnySubset(Conditional, Marginal, Protocol):
    """A model that scores chains through blanks, wherever they are, and whose marginal of the next blank is that blank's
    conditional: one network answers both questions, in one forward if need be."""

    def outlook(self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]) -> Awaitable[list[Tensor]]:
        """What `conditionals` answers for the chain, and then for each prefix of it, given by its length, the marginals of up to k
        blanks after the one that follows the prefix: the next draft, should the chain be accepted up to there."""


@runtime_checkable
class Canvases(Marginal, Protocol):
    """A model that looks at a whole canvas at once: masked diffusion."""

    def canvases(
        self, seq: Canvas, positions: Sequence[Sequence[int]], placed: Sequence[Placement], scope: Scope = EVERYTHING
    ) -> Awaitable[list[tuple[Tensor, Tensor]]]:
        """For each canvas (the sequence with some blanks filled as `placed` says) the laws of the blanks at its `positions`, and
        the model's own laws of them before any sampling parameter: confidence is read from those. All in one forward."""


@runtime_checkable
class BlockWise(Conditional, Marginal, Protocol):
    """A model that fills a block at a time: block diffusion. In blocks of one token it goes from left to right, and so it scores
    chains; its marginals are of blanks that follow a text read that way."""

    block: int  # the largest block that it was trained for
    row_before: bool  # does the row before a token speak of it? Then a block's first token is the business of the block before

    def blocks(
        self, seq: Canvas, positions: Sequence[Sequence[int]], placed: Sequence[Placement], frame: Frame
    ) -> Awaitable[list[tuple[Tensor, Tensor]]]:
        """For each canvas (the block with some blanks filled as `placed` says) the laws of its `positions`, and the model's own
        laws of them before any sampling parameter. All in one forward."""

    def verdict(self, seq: Canvas, chain: Sequence[int], frame: Frame) -> Awaitable[Tensor]:
        """The laws [len, V] of each token of a chain that fills the block's first blanks, given what is decided before them and the
        chain before it, in blocks of one token."""

    def outlook(self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]) -> Awaitable[list[Tensor]]:
        """What `conditionals` answers for the chain, and then for each prefix of it, given by its length, the marginals of up to k
        blanks after the one that follows the prefix: the next draft, should the chain be accepted up to there."""


class Drafter(Protocol):
    """Something that proposes the next tokens of a sequence."""

    async def propose(self, seq: Canvas, k: int) -> Draft:
        """At most k tokens for the next blanks; fewer, or none, where there is nothing to say."""


@dataclass(frozen=True)
class Event:
    """One commit: what was decided, why, and at which forward of the target. The trace is a list of these."""

    forward: int
    reason: str
    positions: list[int]
    tokens: list[int]
    drafted: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)


@dataclass
class Draw:
    """A request to the engine: apply an acceptance rule, batched with the others of its kind."""

    rule: Callable[..., tuple[Tensor, ...]]
    args: tuple[Any, ...]
    seq: Canvas

    def __await__(self) -> Generator[Draw, Any, Any]:
        return (yield self)


class Canvas:
    """A canvas of tokens with blanks. `fill` and `edit` are the only ways it changes, and they are the trace.

    Generating is filling a suffix; infilling is filling holes. `ending(token)` says why a decided prefix ends, if it does.
    """

    def __init__(
        self,
        canvas: Sequence[int],
        *,
        history: History,
        ending: Callable[[int], str | None] | None = None,
        seed: int = 0,
        sample: int = 0,
    ):
        self.canvas = np.array(canvas, dtype=np.int32)
        self.blanks = np.flatnonzero(self.canvas == BLANK)  # the positions to fill, from left to right
        self.given = np.flatnonzero(self.canvas != BLANK)
        self.history = history
        self.ending = ending or (lambda token: None)
        self.trace: list[Event] = []
        self.forwards = self.draft_forwards = self.draws = 0
        self.noise_key = mix(seed, sample)
        self.finish_reason: str | None = None
        self.settled = len(self.canvas)  # tokens from here on may still be edited, so they are not said yet
        self.known = self._known_from(0)  # everything before this position is decided and settled
        self._filled = self._decided = 0  # blanks that are decided: with everything before them, and at all
        # If log-probabilities are asked for: (branch, position) -> (logits, law) as last answered, and what was said of them.
        self.laws: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.logprobs: list[dict[str, Any]] = []
        self._entries: dict[int, dict[str, Any]] = {}

    def _known_from(self, start: int) -> int:
        blanks = np.flatnonzero(self.canvas[start:] == BLANK)
        return start + int(blanks[0]) if len(blanks) else len(self.canvas)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> np.ndarray:
        """The decided prefix. A view: valid until the next `fill`."""
        return self.canvas[: self.known]

    @property
    def filled(self) -> int:
        """How many blanks, from the left, are decided with everything before them."""
        return self._filled

    @property
    def first_blank(self) -> int:
        """The position of the first blank; the canvas's end if there is none."""
        return self._known_from(self.known)

    @property
    def output(self) -> list[int]:
        return self.canvas[self.blanks[: self.filled]].tolist()

    @property
    def remaining(self) -> int:
        """How many blanks are left."""
        return len(self.blanks) - self._decided

    @property
    def at_last(self) -> bool:
        """Is at most one blank left?"""
        return len(self.blanks) - self._filled <= 1

    def next(self, n: int) -> list[int]:
        """The next n blanks, fewer if fewer are left."""
        if self._decided == self._filled:  # from left to right, as most texts are written: all that lies ahead is blank
            return self.blanks[self._filled : self._filled + n].tolist()
        return (self.known + np.flatnonzero(self.canvas[self.known :] == BLANK)[:n]).tolist()

    def ends(self, token: int) -> bool:
        """Would this token end the text? Drafting past it is wasted."""
        return token in self.history.stop_tokens

    def draw(self, rule: Callable[..., tuple[Tensor, ...]], *args: Any) -> Draw:
        """Apply an acceptance rule to laws; what it returns comes back as plain numbers."""
        return Draw(rule, args, self)

    def fill(
        self,
        positions: Sequence[int],
        tokens: Sequence[int],
        reason: str,
        drafted: Sequence[int] = (),
        branches: Sequence[int] = (),
    ) -> None:
        """Decide some blanks. Stops at the token that ends the text: what follows it was never said.

        `drafted` is the whole draft that `tokens` were accepted from; a verdict that accepts none of it is recorded too.
        `branches` are those of the last answer whose laws the tokens were drawn from, if not the first one.
        """
        written = 0
        for position, token in zip(positions, tokens, strict=True):
            if self.done:
                break
            assert self.canvas[position] == BLANK, f"position {position} is decided already"
            self.canvas[position] = token
            self.history.add(token)
            self._decided += 1
            key = (branches[written] if branches else 0, position)
            if key in self.laws:
                self._entries[position] = self._logprob(token, *self.laws[key])
            written += 1
            if position == self.known:
                self._extend()
        if written or drafted:
            rejected = list(drafted[len(tokens) :])
            self.trace.append(
                Event(self.forwards, reason, list(positions[:written]), list(tokens[:written]), list(drafted), rejected)
            )

    def decide(self, placed: Placement, reason: str) -> None:
        """`fill`, with each token beside its position."""
        self.fill([p for p, _ in placed], [x for _, x in placed], reason)

    def settle(self, end: int) -> None:
        """Say what is decided before `end`; what is behind it, now or later, waits, because it may still be edited."""
        self.settled = end
        self._extend()

    def edit(self, placed: Placement) -> None:
        """Decide otherwise: other tokens where some were decided but not yet settled. The trace holds what they replace."""
        positions, tokens = [p for p, _ in placed], [x for _, x in placed]
        before = self.canvas[positions].tolist()
        for position, old, token in zip(positions, before, tokens, strict=True):
            assert position >= self.known and old != BLANK, f"position {position} cannot be edited"
            self.canvas[position] = token
            self.history.replace(old, token)
            if (0, position) in self.laws:
                self._entries[position] = self._logprob(token, *self.laws[0, position])
        self.trace.append(Event(self.forwards, "edited", positions, tokens, [], before))

    def _extend(self) -> None:
        """Move the decided prefix over what was just filled, token by token, until it ends, meets a blank, or is not settled."""
        while self.known < min(len(self.canvas), self.settled) and not self.done and self.canvas[self.known] != BLANK:
            token, reason = int(self.canvas[self.known]), None
            if self._filled < len(self.blanks) and self.blanks[self._filled] == self.known:  # given tokens were never said by us
                if self.known in self._entries:
                    self.logprobs.append(self._entries.pop(self.known))
                reason = self.ending(token)
                self._filled += 1
            self.known += 1
            self.finish_reason = reason or ("length" if self.known == len(self.canvas) else None)
            if self.done:
                return

    def _logprob(self, token: int, logits_V: Tensor, law_V: Tensor) -> dict[str, Any]:
        """Log-probabilities of a token: of the model's own law, and of the law after the sampling parameters."""
        model_V = logits_V.double().log_softmax(-1)
        best = model_V.topk(min(self.history.sampling.logprobs or 0, len(model_V)))
        top = [{"token": int(i), "logprob": float(p)} for p, i in zip(best.values.tolist(), best.indices.tolist())]
        return {
            "token": token,
            "logprob": float(model_V[token]),
            "sampled_logprob": float(law_V[token].double().log()),
            "top": top,
        }
