"""Rounds of draft and verdict that a device goes on with by itself.

Behind a verdict that is on its way, the next block, what is drawn from it, and the target's forward
about that are queued already (`prefetch_looks.py`). The verdict on that draft is arithmetic on what
the device has, too, and so is all that follows. So several rounds are queued one behind the other,
and their outcomes come to the host together: what it does for a step, it does once for all of them.
At temperature 0 a round needs nothing that the host would have to say. Where the same kind of round
comes again, it is captured whole.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from forerun.engine.continuation import Continuations
from forerun.engine.graphs import (
    CapturedForward,
    Replayed,
    capture_graph,
    capturing_alone,
    check_logits,
    current_device,
)
from forerun.engine.host import Host
from forerun.engine.pack import Batch, MovedOn
from forerun.engine.prefetch_drafts import judged_tokens
from forerun.engine.prefetch_looks import DrawnAhead, JudgeDrawn, LookPrefetch, Verdicts
from forerun.engine.rules import Applied, Late, RuleProgram, Rules
from forerun.engine.ticket import Running
from forerun.probability.acceptance import matching
from forerun.probability.outcomes import PackedOutcome, Tokens, Verdict
from forerun.probability.pending import LawRows, PendingLaws
from forerun.probability.transfer import HostCopy
from forerun.sequence.canvas import Draw, Round
from forerun.sequence.rows import PlainText, text_and_chain

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as PoolHandle

MOST_ROUNDS = 8  # in one go
FORWARDS = 1.5  # of the target, that a round takes about as long as
ASKED_BEFORE = 1  # times that a kind of round is met before it is captured
MOST_PROGRAMS = 16
log = logging.getLogger("forerun")

CountForward = Callable[[Host, Batch], None]


class Judged(NamedTuple):
    """A draft, and the verdict on it; -1 where there is none."""

    draft: list[int]
    accepted: int
    token: int

    @classmethod
    def of(cls, row: Sequence[float]) -> Judged:
        """From a row of a program's outcome."""
        *draft, accepted, token = map(int, row)
        return cls(draft, accepted, token)

    @property
    def is_there(self) -> bool:
        return min(self.accepted, self.token) >= 0


class LookRounds:
    """Rounds of a drafter that looks into its target: each as the last one, further on. What was
    begun ahead moves on with them, and is what comes behind the last one."""

    def __init__(self, look: LookPrefetch, drawn: DrawnAhead, judging: JudgeDrawn):
        self.running = look.running
        self.count = 0  # rounds that are to be queued
        self.look = look
        self.drawn = drawn
        self.judging = judging
        self._each = judging.length + 1  # the most tokens of a round
        self._known = [one.seq.known for one in look.running]
        self._copies: list[HostCopy] = []  # of what each round came to
        self._verdict: Applied | None = None  # the first one
        self._unchecked: RoundPrograms | None = None  # if one of them was run for the first time

    @classmethod
    def guess(cls, look: LookPrefetch) -> LookRounds | None:
        """As many as pay and as there is room for, behind what was begun for all."""
        drawn = look.drawn
        judging = None if drawn is None else drawn.judging
        if drawn is None or judging is None or not all(map(goes_on, look.running)):
            return None
        self = cls(look, drawn, judging)
        self.count = min(rounds_that_pay(judging.host, look.running), self._rounds_with_room())
        return self if self.count > 0 and self._has_pages() else None

    def _rounds_with_room(self) -> int:
        """How many rounds captures and lanes have room for."""
        room = [self.judging.host.backbone.context - max(self.judging.ends())]
        for forward in (self.look, self.judging):
            replayed = forward.replayed
            end = max(forward.ends())
            if replayed is None or not replayed.can_move(end):
                return 0
            if forward.host.runner.had_better_capture(replayed):
                return 0
            most = min(replayed.found.longest, forward.host.room, forward.host.most_rows)
            room.append(most - end)
        return max(0, min(room)) // self._each

    def _has_pages(self) -> bool:
        """Are there pages for all rounds? Then they are the lanes' own."""
        more = self.count * self._each
        for forward in (self.look, self.judging):
            host = forward.host
            spans = [
                (one.lane, start, end + more)
                for one, start, end in zip(self.running, self._known, forward.ends())
            ]
            needed = sum(host.memos[lane].pages_needed(*span) for lane, *span in spans)
            if not host.pool.ensure(needed):
                return False
            host.claim(spans)
        return True

    def queue(self, rules: Rules, programs: RoundPrograms, count: CountForward) -> None:
        """Queue all rounds: the first by what it is made of, the others whole, where that is
        captured."""
        first = rules.apply_ahead(self._draws(), self._late())
        if first is None:  # there is no program for it yet
            self.count = 0
            return
        self._verdict = first
        self._go_further(rules, first)
        again = self.count - 1
        program = programs.of(self) if again else None
        if program is None:
            for _ in range(again):
                applied = rules.apply_again(self._verdict, self.logits_RV, self._late())
                assert applied is not None, "what ran once runs again"
                self._go_further(rules, applied)
        else:
            self._unchecked = None if program.is_checked else programs
            self._copies += [HostCopy(program.run(self)) for _ in range(again)]
            program.leave(self)
        for forward in (self.look, self.judging) * self.count:
            assert forward.replayed is not None
            count(forward.host, forward.replayed.batch)

    def _draws(self) -> list[Draw[Verdict]]:
        """What a verdict is drawn from, with tokens that are not known yet."""
        draws = []
        for number, one in enumerate(self.running):
            sampling = one.seq.history.sampling
            rows = LawRows(self.logits_RV, number * self._each, self._each, sampling)
            unknown = [0] * self.judging.length
            draws.append(Draw(matching, (unknown, PendingLaws([rows])), one.seq))
        return draws

    @property
    def logits_RV(self) -> Tensor:
        """What the target says of what was drawn last."""
        assert self.judging.logits_RV is not None
        return self.judging.logits_RV

    @property
    def drafted_BK(self) -> Tensor:
        """What was drawn last."""
        assert self.drawn.applied is not None
        return self.drawn.applied.column("tokens")[:, : self.judging.length]

    def _late(self) -> list[Late]:
        return [Late(0, self.drafted_BK, is_shift=False)]

    def _go_further(self, rules: Rules, verdict: Applied) -> None:
        """Behind a verdict: the next block, what is drawn from it, and the forward about that."""
        look, drawn, judging = self.look, self.drawn, self.judging
        assert drawn.applied is not None
        outcome = verdict.column("accepted"), verdict.column("token")
        self._copies.append(HostCopy(judged_rows(self.drafted_BK, *outcome)))
        verdicts = Verdicts.of(verdict, look.host.backbone.vocab)
        look.logits_RV = forward_further(look.host, look.further(verdicts))
        drawn.applied = rules.apply_again(drawn.applied, look.logits_RV, drawn.late(verdicts))
        assert drawn.applied is not None, "what ran once runs again"
        judging.drawn = drawn.applied
        further = judging.further(verdicts, self.drafted_BK)
        judging.logits_RV = forward_further(judging.host, further)

    def rule_programs(self) -> tuple[RuleProgram, RuleProgram] | None:
        """Those that judge and that draw, if both can run again."""
        rans = [self._verdict, self.drawn.applied]
        verdict, drawn = (None if one is None else one.ran for one in rans)
        return None if verdict is None or drawn is None else (verdict.program, drawn.program)

    def hand_over(self, answers: Sequence[object]) -> None:
        """All outcomes have arrived: give each sequence its rounds, behind the first verdict."""
        judged = self.judged(answers)
        if self._unchecked is not None and not self._unchecked.is_right(self, answers, judged):
            judged = [rounds[:1] for rounds in judged]
        for number, (one, answer) in enumerate(zip(self.running, answers, strict=True)):
            if isinstance(answer, Verdict):
                self._hand_over(number, one, answer, judged[number])

    def judged(self, answers: Sequence[object]) -> list[list[Judged]]:
        """What was drafted and judged for each sequence, behind its first verdict."""
        rows_NB = [copy.numbers() for copy in self._copies]
        return [[Judged.of(row) for row in rows] for rows in zip(*rows_NB)]

    def _hand_over(
        self, number: int, one: Running, first: Verdict, judged: Sequence[Judged]
    ) -> None:
        known = self._known[number]
        rounds = [*until_missing(judged)]
        tokens = tokens_of(one, first, rounds)
        if len(rounds) == self.count:
            for forward in (self.look, self.judging):
                forward.expect_text(one, known + len(tokens), tokens[-1])
        else:
            for forward in (self.look, self.judging):
                forward.surprised(one)
        self.look.starts[one] = known - self._each
        self.judging.host.memos[one.lane].wrote(known, tokens[:-1])
        one.seq.rounds = rounds_of(one, first, rounds)


def goes_on(one: Running) -> bool:
    """Will its method draft and judge again as it did, is all of that certain, and does nobody look
    at what is in between?"""
    asked = one.last_question
    seq = one.seq
    seen = seq.recorder is not None or seq.logprobs.wanted
    certain = seq.history.sampling.temperature == 0
    return asked is not None and asked.goes_on and certain and not seen


def rounds_that_pay(target: Host, running: Sequence[Running]) -> int:
    """In about as much time as a launch may take, while texts go on."""
    if not isinstance(target.writer, Continuations):
        return 0
    in_time = int(target.writer.forwards_in_a_launch / FORWARDS)
    longest = max(one.seq.remaining for one in running)
    return min(in_time, MOST_ROUNDS, longest // 2)


def judged_rows(drafted_BK: Tensor, accepted_B: Tensor, token_B: Tensor) -> Tensor:
    """A draft of each, and the verdict on it, [B, K + 2]."""
    return torch.cat([drafted_BK, accepted_B[:, None], token_B[:, None]], 1)


def forward_further(host: Host, batch: Batch) -> Tensor:
    """Run rows that the device has moved on. The watch counts none of it: its steps are those of
    one verdict."""
    return host.remove_impossible(host.runner.forward(batch))


def until_missing(judged: Sequence[Judged]) -> list[Judged]:
    """Rounds up to one without an outcome: the method asks for that itself, and is told why."""
    missing = [number for number, one in enumerate(judged) if not one.is_there]
    return list(judged[: missing[0]] if missing else judged)


def tokens_of(one: Running, first: Verdict, rounds: Sequence[Judged]) -> list[int]:
    """All tokens that follow the text."""
    tokens = [*judged_tokens(one)[: first.accepted], first.token]
    for judged in rounds:
        tokens += [*judged.draft[: judged.accepted], judged.token]
    return tokens


def rounds_of(one: Running, first: Verdict, rounds: Sequence[Judged]) -> list[Round]:
    """Rounds as a method takes them, up to the end of its text."""
    left = one.seq.remaining - first.accepted - 1
    found = []
    for judged in rounds:
        if left <= 0:
            break
        draft = one.seq.up_to_end(judged.draft[: left - 1])
        accepted = min(judged.accepted, len(draft))
        behind = [*judged.draft[: judged.accepted], judged.token]  # and what is right of the draft
        looked = len(draft) > 0
        # as often as plain decoding would have drawn, and for the draft
        draws = accepted + 1 + looked
        found.append(Round(draft, accepted, behind[accepted], draws, draft_forwards=looked))
        left -= accepted + 1
    return found


class RoundProgram:
    """One round, whole: on CUDA a graph, elsewhere the same code. It works over the memory of the
    forwards and rules that it is made of."""

    def __init__(self, rounds: LookRounds, pool: PoolHandle | None):
        programs = rounds.rule_programs()
        assert programs is not None
        self.is_checked = False
        self._judge, self._draw = programs
        self._logits_RV = rounds.logits_RV.clone()
        self._drafted_BK = rounds.drafted_BK.clone()
        assert rounds.look.logits_RV is not None
        self._look_RV = rounds.look.logits_RV.clone()
        self._run: Callable[[], Tensor] | None = None
        if self._logits_RV.is_cuda:
            with capturing_alone():
                # its parts have run before
                self._run = capture_graph(partial(self._round, rounds), pool, ready=True)

    def begin(self, rounds: LookRounds) -> None:
        """Take over where a round has left off."""
        self._logits_RV.copy_(rounds.logits_RV)
        self._drafted_BK.copy_(rounds.drafted_BK)

    def run(self, rounds: LookRounds) -> Tensor:
        """What one more round comes to, as `judged_rows`: it stays until the next one."""
        return self._round(rounds) if self._run is None else self._run()

    def leave(self, rounds: LookRounds) -> None:
        """Put what the last round has left where single steps have it."""
        applied = rounds.drawn.applied
        assert applied is not None
        packed = PackedOutcome(Tokens.of_batch(tokens=self._drafted_BK.clone()))
        again = Applied(packed, len(self._drafted_BK), HostCopy(packed.tensor))
        again.used_noise = applied.used_noise
        again.ran = applied.ran
        rounds.drawn.applied = again
        rounds.judging.drawn = again
        rounds.look.logits_RV = self._look_RV.clone()
        rounds.judging.logits_RV = self._logits_RV.clone()

    def _round(self, rounds: LookRounds) -> Tensor:
        look, judging = rounds.look, rounds.judging
        count, length = self._drafted_BK.shape
        late = [Late(0, self._drafted_BK, is_shift=False)]
        verdict = self._judge.run_within(self._logits_RV, late).columns()
        accepted_B, token_B = verdict["accepted"][:count], verdict["token"][:count]
        rows = judged_rows(self._drafted_BK, accepted_B, token_B)
        most = look.host.backbone.vocab - 1
        verdicts = Verdicts(accepted_B.clamp(min=0), token_B.clamp(0, most))
        self._look_RV.copy_(run_within(look.host, look.replayed, look.further(verdicts)))
        drawn = self._draw.run_within(self._look_RV, rounds.drawn.late(verdicts)).columns()
        self._drafted_BK.copy_(drawn["tokens"][:count, :length])
        further = judging.further(verdicts, self._drafted_BK)
        self._logits_RV.copy_(run_within(judging.host, judging.replayed, further))
        return rows


def run_within(host: Host, replayed: Replayed | None, batch: Batch) -> Tensor:
    """A forward as a part of another program."""
    assert replayed is not None and isinstance(batch, MovedOn)
    return host.remove_impossible(replayed.captured.run_moved_within(batch))


class RoundKind(NamedTuple):
    """What a program was made of: with the same, it is the same."""

    forwards: tuple[CapturedForward, CapturedForward]
    rules: tuple[RuleProgram, RuleProgram]
    picked: tuple[object, object]  # rows of logits that the rules were filled with
    sequences: int
    drafted: int
    kinds: tuple[str, ...]  # of what is drawn from
    read: tuple[int, ...]  # rows of each sequence's block


class RoundPrograms:
    """Whole rounds that were captured."""

    def __init__(self) -> None:
        self._programs: OrderedDict[RoundKind, RoundProgram] = OrderedDict()
        self._asked: Counter[RoundKind] = Counter()
        self._pool: PoolHandle | None = None
        self._works = True

    def of(self, rounds: LookRounds) -> RoundProgram | None:
        """The program of these, if their kind was met often enough; it goes on from here."""
        kind = self._kind(rounds) if self._works else None
        if kind is None:
            return None
        if kind in self._programs:
            self._programs.move_to_end(kind)
            program = self._programs[kind]
            program.begin(rounds)
            return program
        if len(self._asked) > MOST_PROGRAMS:
            self._asked.clear()  # forwards and rules that nobody else may need any more
        self._asked[kind] += 1
        return self._make(kind, rounds) if self._asked[kind] > ASKED_BEFORE else None

    def _make(self, kind: RoundKind, rounds: LookRounds) -> RoundProgram | None:
        device = rounds.logits_RV.device
        if self._pool is None and device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with current_device(device):
                program = RoundProgram(rounds, self._pool)
        except Exception as error:  # step by step the same comes out
            log.warning("rounds are not captured: %r", error)
            self._works = False
            return None
        self._programs[kind] = program
        if len(self._programs) > MOST_PROGRAMS:
            self._programs.popitem(last=False)
        return program

    @staticmethod
    def _kind(rounds: LookRounds) -> RoundKind | None:
        look, judging = rounds.look.replayed, rounds.judging.replayed
        programs = rounds.rule_programs()
        if look is None or judging is None or programs is None:
            return None
        return RoundKind(
            (look.captured, judging.captured),
            programs,
            (programs[0].picked, programs[1].picked),
            len(rounds.running),
            rounds.judging.length,
            tuple(rounds.drawn.kinds),
            tuple(rounds.look.rows_of.values()),
        )

    def is_right(
        self, rounds: LookRounds, answers: Sequence[object], judged: Sequence[Sequence[Judged]]
    ) -> bool:
        """Are the logits that a program has left those of a forward about the same tokens? If not,
        none is used any more."""
        kind = self._kind(rounds)
        host = rounds.judging.host
        work = []
        for one, answer, own, drafted in zip(
            rounds.running, answers, judged, rounds.drafted_BK.tolist()
        ):
            if not isinstance(answer, Verdict) or len(until_missing(own)) < len(own):
                return True  # it cannot be told this time
            tokens = text_and_chain(one.seq.text, [*tokens_of(one, answer, own), *drafted])
            start = len(tokens) - len(drafted) - 1
            work.append((one.lane, PlainText.of(tokens, start), start))
        try:
            plain_RV = host.remove_impossible(host.runner.forward(host.batch(work)))
            check_logits(plain_RV, rounds.logits_RV)
        except RuntimeError as error:
            log.warning("rounds are not captured any more: %r", error)
            self._works = False
            self._programs.clear()
            return False
        if kind is not None and kind in self._programs:
            self._programs[kind].is_checked = True
        return True
