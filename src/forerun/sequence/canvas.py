"""One sequence as methods see it: a canvas of tokens and blanks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from forerun.errors import NotAble
from forerun.probability.logits import TokenHistory
from forerun.probability.noise import mix
from forerun.probability.outcomes import Outcome, Placement
from forerun.sequence.logprobs import LogprobRecord
from forerun.sequence.recording import Recorder
from forerun.sequence.trace import Trace

BLANK = -1

O = TypeVar("O", bound=Outcome)  # noqa: E741


def never_ends(token: int) -> str | None:
    """The `ending` of a canvas that only its length ends."""
    return None


def not_a_token(token: int, vocab: int) -> NotAble:
    """The refusal of what is no token: it would fail the next forward of everybody."""
    return NotAble(f"a method decided on token {token}, but ids run from 0 to {vocab - 1}.")


@dataclass(eq=False)
class Draw(Generic[O]):
    """What a method awaits to have a rule applied, batched with the others of its kind."""

    rule: Callable[..., O]
    arguments: tuple[object, ...]
    seq: Canvas

    def __await__(self) -> Generator[Draw[O], O, O]:
        return (yield self)


class Copies(NamedTuple):
    """How a draft was copied from the text: what followed its last tokens before."""

    known: int  # tokens of the text that it follows
    run: int  # of last tokens that are looked up, at most
    length: int  # of the draft, if so much was found
    most: int = 0  # tokens that the next one may have, likewise
    reach: int | None = None  # that this one was to have; None: does not follow the last verdict


class Begun(NamedTuple):
    """A draft that the engine has begun to judge."""

    known: int  # tokens of the text that it follows
    tokens: Sequence[int]


class Round(NamedTuple):
    """A draft that the engine has judged by itself, in the way of the last one, and the verdict."""

    drafted: Sequence[int]
    accepted: int
    token: int  # behind those that are accepted
    draws: int  # that a method makes for as much
    draft_forwards: int = 0  # of a draft model


class MoreRounds:
    """What `Canvas.rounds_ahead` awaits: rounds that are on their way."""

    def __await__(self) -> Generator[MoreRounds, None, None]:
        yield self


class Canvas:
    """A canvas of tokens with blanks. Once begun, only `fill`, `append` and `edit` change it, and
    they leave a trace.

    Generating fills a suffix; infilling fills holes. `ending(token)` says why the decided prefix
    ends with this token, if it does.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        history: TokenHistory,
        ending: Callable[[int], str | None] = never_ends,
        seed: int = 0,
        sample: int = 0,
    ):
        self.history = history
        self.ending = ending
        self.trace = Trace()
        self.recorder: Recorder | None = None  # for requests that want all that a trace can show
        self.logprobs = LogprobRecord(history.sampling.logprobs)
        self.noise_key = mix(seed, sample)
        self.draws = 0
        self.copies: Copies | None = None  # how the last draft was copied from the text, if it was
        self.begun: Begun | None = None  # the next draft, if the engine has begun to judge one
        self.rounds: list[Round] = []  # that the engine has gone on with by itself
        self.more_rounds = False  # are more of them on their way?
        self.draft_follows = False  # is the next question no plain one? Then none is begun ahead
        self.finish_reason: str | None = None
        self.begin(tokens)

    def begin(self, tokens: Sequence[int]) -> None:
        """Take these tokens and blanks for the canvas as it was given; nothing is decided yet. A
        prompt whose end is chosen anew comes to be so."""
        self.tokens = np.array(tokens, dtype=np.int32)
        self.blanks = np.flatnonzero(self.tokens == BLANK)  # positions to fill, from left to right
        self.given = np.flatnonzero(self.tokens != BLANK)
        # the same memory as plain numbers: NumPy takes long to read or write one at a time
        self._token_at = self.tokens.data
        self._blank_at = self.blanks.data
        self.final_end = len(self.tokens)  # tokens from here on may still be edited
        self.known = self._first_blank_from(0)  # everything before this position is final
        self._filled = 0  # blanks that are final, from the left
        self._decided = 0  # blanks that are decided, wherever they are
        if self.recorder is not None:
            self.recorder.begin(self.tokens.tolist(), BLANK)

    def _first_blank_from(self, start: int) -> int:
        blanks = np.flatnonzero(self.tokens[start:] == BLANK)
        return start + int(blanks[0]) if len(blanks) else len(self.tokens)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> np.ndarray:
        """The decided prefix. A view: valid until the next `fill`."""
        return self.tokens[: self.known]

    @property
    def filled(self) -> int:
        """How many blanks, from the left, are decided with everything before them."""
        return self._filled

    @property
    def first_blank(self) -> int:
        """The position of the first blank; the canvas's end if there is none."""
        return self._first_blank_from(self.known)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.blanks[: self.filled]].tolist()

    @property
    def remaining(self) -> int:
        """How many blanks are left."""
        return len(self.blanks) - self._decided

    @property
    def at_last(self) -> bool:
        """Is at most one blank left?"""
        return len(self.blanks) - self._filled <= 1

    def goes_on(self) -> bool:
        """Is something left to decide, once the next tokens that a constraint leaves no choice of
        are placed? Those cost no forward of their own; where log-probabilities are wanted, they get
        one, as others do."""
        constraint = self.history.constraint
        while constraint is not None and not self.done and not self.logprobs.wanted:
            token = constraint.forced()
            if token is None:
                break
            self.fill(self.next(1), [token], "forced")
            self.draws += 1  # as if it had been drawn: a token's noise goes by its place
        return not self.done

    def next(self, n: int) -> list[int]:
        """The positions of the next n blanks, fewer if fewer are left."""
        if self._decided == self._filled:  # as in left-to-right decoding: all ahead is blank
            return self.blanks[self._filled : self._filled + n].tolist()
        ahead = np.flatnonzero(self.tokens[self.known :] == BLANK)
        return (self.known + ahead[:n]).tolist()

    def take_begun_draft(self) -> Sequence[int] | None:
        """The tokens after the text that the engine has begun to judge, if it has. They are a guess
        as good as any; to judge others takes another forward."""
        begun, self.begun = self.begun, None
        return begun.tokens if begun is not None and begun.known == self.known else None

    async def rounds_ahead(self) -> AsyncIterator[Round]:
        """The rounds that the engine has gone on with by itself, until the text ends. Each counts
        as what a method would have asked for."""
        while True:
            rounds, self.rounds = self.rounds, []
            more, self.more_rounds = self.more_rounds, False
            for one in rounds:
                if self.done:
                    return
                self.trace.forwards += 1
                self.trace.draft_forwards += one.draft_forwards
                self.draws += one.draws
                yield one
            if self.done or not more:
                return
            await MoreRounds()

    def ends(self, token: int) -> bool:
        """Would this token end the text? Drafting past it is wasted."""
        return token in self.history.stop_tokens

    def up_to_end(self, draft: Sequence[int]) -> list[int]:
        """A draft up to the token that ends the text."""
        if self.history.stop_tokens.isdisjoint(draft):
            return list(draft)
        for count, token in enumerate(draft, 1):
            if self.ends(token):
                return list(draft[:count])
        return list(draft)

    def usable(self, draft: Sequence[int]) -> list[int]:
        """A draft of the next blanks up to the first token that a constraint does not allow."""
        constraint = self.history.constraint
        return list(draft if constraint is None else draft[: constraint.usable(draft)])

    def draw(self, rule: Callable[..., O], *arguments: object) -> Draw[O]:
        """Apply a rule to laws. Its outcome comes back as plain numbers."""
        return Draw(rule, arguments, self)

    def fill(
        self,
        positions: Sequence[int],
        tokens: Sequence[int],
        reason: str,
        drafted: Sequence[int] = (),
        branches: Sequence[int] = (),
    ) -> None:
        """Decide some blanks, up to the token that ends the text.

        `drafted` is the whole draft that `tokens` were accepted from; the trace records a verdict
        that accepts none of it, too. `branches` names the branches of the last answer whose laws
        the tokens were drawn from, where that is not the first one.
        """
        written = 0
        canvas = self._token_at
        history = self.history
        for position, token in zip(positions, tokens, strict=True):
            if self.finish_reason is not None:
                break
            assert canvas[position] == BLANK, f"position {position} is decided already"
            if not 0 <= token < history.vocab:
                raise not_a_token(token, history.vocab)
            canvas[position] = token
            history.add(token, position)
            self._decided += 1
            if self.logprobs.wanted:
                self.logprobs.decided(position, token, branches[written] if branches else 0)
            written += 1
            if position == self.known:
                self._extend()
        if written or drafted:
            rejected = drafted[len(tokens) :]
            self.trace.record(reason, positions[:written], tokens[:written], drafted, rejected)
            self._record_commit(branches)

    def append(self, token: int, reason: str, branches: Sequence[int] = ()) -> None:
        """`fill` the next blank. That is what plain decoding does, so it had better be quick."""
        position = self.known
        in_order = self._decided == self._filled and position < self.final_end
        is_token = 0 <= token < self.history.vocab
        if not (in_order and is_token) or self.logprobs.wanted or self.done:
            self.fill(self.next(1), [token], reason, branches=branches)
            return
        self._token_at[position] = token
        self.history.add(token, position)
        self._decided += 1
        self._extend()
        self.trace.record(reason, [position], [token])
        self._record_commit(branches)

    def note_draft(
        self, positions: Sequence[int], tokens: Sequence[int], q_KV: Tensor | None = None
    ) -> None:
        """Tell the trace what is judged next, and the laws it was drawn from. It decides
        nothing."""
        if self.recorder is not None and len(tokens):
            self.recorder.drafted(positions, tokens, q_KV)

    def note_route(self, verify: bool, seen: Mapping[str, float]) -> None:
        """Tell the trace what a router decided, and from what."""
        if self.recorder is not None:
            self.recorder.routed(verify, seen)

    def note_choice(self, drafter: str, length: int, expected: Sequence[float]) -> None:
        """Tell the trace who was chosen to draft how many tokens. `expected` are the tokens of the
        step, its seconds, and those of a step without a draft."""
        choice = self.trace.choose(drafter, length, expected)
        if self.recorder is not None:
            self.recorder.chose(choice)

    def _record_commit(self, branches: Sequence[int] = ()) -> None:
        if self.recorder is not None:
            self.recorder.committed(self.trace.events[-1], branches)

    def place(self, placement: Placement, reason: str) -> int:
        """`fill`, with each token beside its position. Tokens that were drawn at once may break a
        constraint together: those that would stay blank. How many are decided."""
        placement = self.compatible(placement)
        positions = [position for position, _ in placement]
        self.fill(positions, [token for _, token in placement], reason)
        return len(placement)

    def compatible(self, placement: Placement) -> Placement:
        """What of some decisions a constraint lets stand together, asked one after the other."""
        constraint = self.history.constraint
        return placement if constraint is None else constraint.compatible(placement)

    def finalize(self, end: int) -> None:
        """Make everything before `end` final. What lies behind may still be edited."""
        self.final_end = end
        self._extend()

    def edit(self, placement: Placement) -> None:
        """Replace decided tokens that are not final. The trace holds the tokens they replace."""
        positions = [position for position, _ in placement]
        replaced = self.tokens[positions].tolist()
        for (position, token), old in zip(placement, replaced, strict=True):
            assert position >= self.known and old != BLANK, f"position {position} is not editable"
            self.tokens[position] = token
            self.history.replace(old, token, position)
            self.logprobs.decided(position, token)
        tokens = [token for _, token in placement]
        self.trace.record("edited", positions, tokens, rejected=replaced)
        self._record_commit()

    def _extend(self) -> None:
        """Move the final prefix over what was filled, until the text ends, a blank comes, or tokens
        may still be edited."""
        length = len(self.tokens)
        end = min(length, self.final_end)
        while self.known < end and self.finish_reason is None:
            token = self._token_at[self.known]
            if token == BLANK:
                break
            reason = self._publish_next_blank(token)
            self.known += 1
            if reason is None and self.known == length:
                reason = self._at_full_length()
            self.finish_reason = reason

    def _at_full_length(self) -> str:
        constraint = self.history.constraint
        return "length" if constraint is None or constraint.met else "unmet"

    def _publish_next_blank(self, token: int) -> str | None:
        """If the next final position was a blank, count it. Why the text ends there, if it does."""
        is_blank = self._filled < len(self._blank_at) and self._blank_at[self._filled] == self.known
        if not is_blank:  # a given token
            return None
        if self.logprobs.wanted:
            self.logprobs.publish(self.known)
        self._filled += 1
        return self.ending(token)
