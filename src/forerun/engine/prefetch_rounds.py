"""Rounds of draft and verdict that a device goes on with by itself.

Behind a verdict that is on its way, the next block, what is drawn from it, and the target's forward
about that are queued already (`prefetch_looks.py`). The verdict on that draft is arithmetic on what
the device has, too, and so is all that follows. So several rounds are queued one behind the other,
and their outcomes come to the host together: what it does for a step, it does once for all of them.
At temperature 0 a round needs nothing that the host would have to say. Where the same kind of round
comes again, it is captured whole. Then rounds come in waves: the next one is queued before the host
looks at the last, so that it works while the device does.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from forerun.engine.continuation import Continuations
from forerun.engine.graphs import (
    TOLERANCE,
    CapturedForward,
    Replayed,
    capture_graph,
    capturing_alone,
    current_device,
)
from forerun.engine.host import Host
from forerun.engine.pack import Batch, MovedOn
from forerun.engine.prefetch import Source
from forerun.engine.prefetch_drafts import judged_tokens
from forerun.engine.prefetch_looks import DrawnAhead, JudgeDrawn, LookPrefetch, Verdicts
from forerun.engine.rules import Applied, Late, Rules
from forerun.engine.ticket import Running
from forerun.probability.acceptance import Rule, matching
from forerun.probability.certain import Drawn, judge_rows, likeliest_drafts
from forerun.probability.outcomes import Verdict
from forerun.probability.pending import LawRows, PendingLaws
from forerun.probability.transfer import HostCopy, to_device
from forerun.sequence.canvas import Draw, Round
from forerun.sequence.rows import PlainText, text_and_chain

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as PoolHandle

MOST_ROUNDS = 8  # that are queued at a time
WAVES = 2  # that these come in
LEAST_ROUNDS = 2  # of a wave, if so many are in time
MOST_ENDED = 8  # times as many texts as are not over yet
FORWARDS = 1.5  # of the target, that a round takes about as long as
ASKED_BEFORE = 1  # times that a kind of round is met before it is captured
MOST_PROGRAMS = 64
MOST_NOTED = 256  # kinds that were met
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
        return min(self.accepted, self.token, *self.draft) >= 0


class RawVerdict(NamedTuple):
    """Verdicts on the device, -1 where a law had no mass."""

    accepted_B: Tensor
    token_B: Tensor

    @classmethod
    def of(cls, applied: Applied) -> RawVerdict:
        return cls(applied.column("accepted"), applied.column("token"))

    def on(self, drafted_BK: Tensor) -> Tensor:
        """Beside the drafts that they are about, [B, K + 2]."""
        return torch.cat([drafted_BK, self.accepted_B[:, None], self.token_B[:, None]], 1)

    def clamped(self) -> Verdicts:
        """As what follows takes them, in memory of their own."""
        return Verdicts(self.accepted_B.clamp(min=0), self.token_B.clamp(min=0))


class LookRounds:
    """Rounds of a drafter that looks into its target: each as the last one, further on. What was
    begun ahead moves on with them, and is what comes behind the last one."""

    def __init__(self, look: LookPrefetch, drawn: DrawnAhead, judging: JudgeDrawn):
        self.running = look.running
        self.count = 0  # rounds of the first wave
        self.goes_on = False  # are rounds queued that nobody has been given?
        self.is_of_use = False  # what was begun behind the last one
        self.look = look
        self.drawn = drawn
        self.judging = judging
        self._each = judging.length + 1  # the most tokens of a round
        self._known = [one.seq.known for one in look.running]
        self._moved = [0 for _ in look.running]  # tokens that are known since, past an end, too
        self._left = 0  # rounds that may be queued yet, while methods draft as they did
        self._waves: deque[list[HostCopy]] = deque()  # of what each round came to
        self._verdicts: Verdicts | None = None  # the last that were queued
        self._program: RoundProgram | None = None  # of every further round, if it is checked
        self._unchecked: RoundPrograms | None = None  # if one of them was run for the first time

    @classmethod
    def guess(cls, look: LookPrefetch, first_ends: bool) -> LookRounds | None:
        """As many as pay and as there is room for, behind what was begun for all. `first_ends`:
        none after one text has ended, as somebody waits for its lane."""
        drawn = look.drawn
        judging = None if drawn is None else drawn.judging
        if drawn is None or judging is None or not all(map(is_certain, look.running)):
            return None
        if len(set(look.rows_of.values())) > 1:  # what pads a draft would be judged as a part of it
            return None
        self = cls(look, drawn, judging)
        self._left = min(repeats_of(one) for one in look.running)
        self.count = self._wave(first_ends)
        return self if self.count else None

    def _wave(self, first_ends: bool) -> int:
        """Rounds of the next wave: as many as pay, as there is room for, and pages for."""
        in_time = rounds_in_time(self.judging.host)
        at_once = min(in_time, max(LEAST_ROUNDS, in_time // WAVES))
        # one more costs no more than what else comes behind the last one
        until_end = max(1, self._rounds_until_end(first_ends) - self._on_their_way)
        pays = min(at_once, until_end, self._left, self._rounds_with_room())
        return pays if pays > 0 and self._has_pages(pays) else 0

    @property
    def _on_their_way(self) -> int:
        """Rounds that were queued and not handed over."""
        return sum(map(len, self._waves))

    def _rounds_until_end(self, first_ends: bool) -> int:
        """That all texts have to go, or the first, if each brings as much as those before."""
        going = [one.seq for one in self.running if not one.seq.done]
        left = [seq.remaining for seq in going]
        rounds = sum(seq.trace.forwards for seq in going)
        gained = max(1.0, sum(seq.filled for seq in going) / max(1, rounds))
        return math.ceil((min(left) if first_ends else max(left)) / gained)

    def _ends(self, forward: LookPrefetch | JudgeDrawn) -> list[int]:
        """The slots that its rows may reach, behind all rounds that were queued."""
        more = self._on_their_way * self._each
        return [end + moved + more for end, moved in zip(forward.ends(), self._moved)]

    def _rounds_with_room(self) -> int:
        """How many more rounds captures and lanes have room for."""
        room = [self.judging.host.backbone.context - max(self._ends(self.judging))]
        for forward in (self.look, self.judging):
            replayed = forward.replayed
            end = max(self._ends(forward))
            if replayed is None or not replayed.can_move(end):
                return 0
            if forward.host.runner.had_better_capture(replayed):
                return 0
            most = min(replayed.found.longest, forward.host.room, forward.host.most_rows)
            room.append(most - end)
        return max(0, min(room)) // self._each

    def _has_pages(self, count: int) -> bool:
        """Are there pages for so many more rounds? Then they are the lanes' own."""
        more = count * self._each
        for forward in (self.look, self.judging):
            host = forward.host
            spans = [
                (one.lane, one.seq.known, end + more)
                for one, end in zip(self.running, self._ends(forward))
            ]
            needed = sum(host.memos[lane].pages_needed(*span) for lane, *span in spans)
            if not host.pool.ensure(needed):
                return False
            host.claim(spans)
        return True

    @classmethod
    def hold(
        cls,
        look: LookPrefetch,
        applied: Source,
        target: Host,
        programs: RoundPrograms,
        first_ends: bool,
    ) -> bool:
        """Where a program for such rounds was run before, have rows ready for it behind the first
        verdict of these, which is on its way: then nothing needs to be begun beside it."""
        drawn = DrawnAhead.guess(look)
        if drawn is None or look.before is not None or not all(map(is_certain, look.running)):
            return False
        if not programs.may_have(drawn.rule, len(look.running), look.drafted):
            return False
        if not look.hold(applied):
            return False
        judging = JudgeDrawn.after(look, drawn, target)
        if judging is None or not judging.hold():
            return False
        look.drawn = drawn
        drawn.judging = judging
        rounds = cls.guess(look, first_ends)
        if rounds is None or not programs.has(rounds):
            look.drawn = None
            return False
        look.begin()
        judging.begin()
        return True

    def queue(self, rules: Rules, programs: RoundPrograms, count: CountForward) -> bool:
        """Queue the first wave, if that can be."""
        assert self.look.verdicts is not None
        if self.drawn.applied is None:
            self._program = programs.of(self, self.look.verdicts)
            wave = [] if self._program is None else self._run(self._program, self.count)
        else:
            wave = self._from_what_began(rules, programs)
        if wave:
            self._queued(wave, count)
        return bool(wave)

    def _run(self, program: RoundProgram, length: int) -> list[HostCopy]:
        wave = [HostCopy(program.run(self)) for _ in range(length)]
        self._verdicts = program.verdicts
        return wave

    def _from_what_began(self, rules: Rules, programs: RoundPrograms) -> list[HostCopy]:
        """The verdict that is on its way comes to the host before what follows it is queued: it
        does its part meanwhile. Nothing, if there is no program for such a verdict yet."""
        drafted_BK = self.drafted_BK.clone()  # programs of rules share memory
        applied = rules.apply_ahead(self._draws(), [Late(0, drafted_BK, is_shift=False)])
        if applied is None:
            return []
        verdict = RawVerdict.of(applied)
        wave = [HostCopy(verdict.on(drafted_BK))]
        self._verdicts = verdict.clamped()
        program = programs.of(self, self._verdicts) if self.count > 1 else None
        if program is not None:
            self._unchecked = None if program.is_checked else programs
            self._program = program if program.is_checked else None
            return wave + self._run(program, self.count - 1)
        for _ in range(self.count - 1):
            self._go_further(rules, self._verdicts)
            drafted_BK = self.drafted_BK.clone()
            verdict = self._judge_again(rules, applied, drafted_BK)
            wave.append(HostCopy(verdict.on(drafted_BK)))
            self._verdicts = verdict.clamped()
        return wave

    def queue_next(
        self,
        rules: Rules,
        count: CountForward,
        waiting: Collection[Running],
        alone: bool,
        first_ends: bool,
    ) -> None:
        """Queue the next wave, if nobody but those who are `waiting` for it runs or comes; else
        what comes behind the last one. Rows of those whose text has ended go on in their lanes, if
        they are few: to leave them out would take a new beginning."""
        self.goes_on = self.is_of_use = False
        if any(one not in waiting and one.waits_for is not None for one in self.running):
            return  # somebody asks for something else
        enough = len(waiting) * MOST_ENDED >= len(self.running)
        length = self._wave(first_ends) if alone and enough and self._program is not None else 0
        if length:
            assert self._program is not None
            self._queued(self._run(self._program, length), count)
            self.goes_on = True
        elif self._can_move:
            assert self._verdicts is not None
            self.is_of_use = self._go_further(rules, self._verdicts)

    @property
    def _can_move(self) -> bool:
        """Do captures still hold the rows that would move on?"""
        return all(
            forward.replayed is not None and forward.replayed.can_move(max(self._ends(forward)))
            for forward in (self.look, self.judging)
        )

    def _queued(self, wave: list[HostCopy], count: CountForward) -> None:
        self._waves.append(wave)
        self._left -= len(wave)
        for forward in (self.look, self.judging) * len(wave):
            assert forward.replayed is not None
            count(forward.host, forward.replayed.batch)

    def _judge_again(self, rules: Rules, applied: Applied, drafted_BK: Tensor) -> RawVerdict:
        """The verdict on a draft, by the rule that judged before."""
        late = [Late(0, drafted_BK, is_shift=False)]
        judged = rules.apply_again(applied, self.logits_RV, late)
        assert judged is not None, "what ran once runs again"
        return RawVerdict.of(judged)

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

    def _go_further(self, rules: Rules, verdicts: Verdicts) -> bool:
        """Behind a verdict: the next block, what is drawn from it, and the forward about that, if
        there is a program for the draw."""
        look, drawn, judging = self.look, self.drawn, self.judging
        look.logits_RV = forward_further(look.host, look.further(verdicts))
        look.verdicts = verdicts
        if not drawn.apply(rules, look):
            return False
        further = judging.further(verdicts, self.drafted_BK)
        judging.logits_RV = forward_further(judging.host, further)
        return True

    @property
    def drafts(self) -> Drawn | None:
        """How tokens are drawn from a block, if that is known here."""
        return likeliest_drafts(self.drawn.rule)

    def hand_over(self, answers: Sequence[object]) -> None:
        """The first wave has arrived: give each sequence its rounds, behind its verdict."""
        judged = self.judged()
        if self._unchecked is not None:
            checked = can_be_checked(answers, judged)
            if not checked or not self._unchecked.are_right(self, answers, judged):
                # nothing of what an unchecked program said is taken
                self.drop()
                return
            self.is_of_use = False  # the check writes over what was begun
        for number, (one, answer) in enumerate(zip(self.running, answers, strict=True)):
            if isinstance(answer, Verdict):
                before = [*judged_tokens(one)[: answer.accepted], answer.token]
                self._hand_over(number, one, before, judged[number])
            else:
                self._moved[number] += steps_of([Judged([], 0, 0), *judged[number]])

    def hand_over_next(self, running: Collection[Running]) -> None:
        """The next wave has arrived: give these their rounds."""
        judged = self.judged()
        for number, one in enumerate(self.running):
            if one in running:
                self._hand_over(number, one, [], judged[number])
            else:
                self._moved[number] += steps_of(judged[number])

    def drop(self) -> None:
        """Nothing of it is known: take nothing for granted that slots hold. Each method goes on
        from what it has."""
        self.goes_on = self.is_of_use = False
        for one in self.running:
            one.seq.rounds = []
            one.seq.more_rounds = False
            for forward in (self.look, self.judging):
                forward.surprised(one)
                forward.host.memos[one.lane].forget()

    def judged(self) -> list[list[Judged]]:
        """What was drafted and judged for each sequence in the wave that comes first."""
        rows_NB = [copy.numbers() for copy in self._waves.popleft()]
        return [[Judged.of(row) for row in rows] for rows in zip(*rows_NB)]

    def _hand_over(
        self, number: int, one: Running, before: Sequence[int], judged: Sequence[Judged]
    ) -> None:
        """Give a sequence its rounds, which follow what a verdict has brought `before`."""
        seq = one.seq
        rounds = [*until_missing(judged)]
        tokens = [*before, *tokens_of(rounds)]
        self._moved[number] += len(before) + steps_of(judged)
        is_whole = len(rounds) == len(judged)
        for forward in (self.look, self.judging):
            if is_whole and self.is_of_use:
                forward.expect_text(one, seq.known + len(tokens), tokens[-1])
            else:
                forward.surprised(one)
        self.look.starts[one] = self._known[number] - self._each
        behind = [*seq.text[-1:].tolist(), *tokens]
        self.judging.host.memos[one.lane].wrote(seq.known - 1, behind[:-1])
        seq.rounds = rounds_of(one, len(before), rounds)
        seq.more_rounds = is_whole and self.goes_on


def is_certain(one: Running) -> bool:
    """Is nothing left to chance, and does nobody look at what is in between?"""
    seq = one.seq
    seen = seq.recorder is not None or seq.logprobs.wanted
    return seq.history.sampling.temperature == 0 and not seen


def rounds_in_time(target: Host) -> int:
    """As many as take about as long as a launch may."""
    if not isinstance(target.writer, Continuations):
        return 0
    return min(MOST_ROUNDS, int(target.writer.forwards_in_a_launch / FORWARDS))


def repeats_of(one: Running) -> int:
    """How often its method will draft and judge as it did."""
    return 0 if one.last_question is None else one.last_question.repeats


def forward_further(host: Host, batch: Batch) -> Tensor:
    """Run rows that the device has moved on. The watch counts none of it: its steps are those of
    one verdict."""
    return host.remove_impossible(host.runner.forward(batch))


def until_missing(judged: Sequence[Judged]) -> list[Judged]:
    """Rounds up to one without an outcome: the method asks for that itself, and is told why."""
    missing = [number for number, one in enumerate(judged) if not one.is_there]
    return list(judged[: missing[0]] if missing else judged)


def tokens_of(rounds: Sequence[Judged]) -> list[int]:
    """All tokens that they bring."""
    tokens: list[int] = []
    for judged in rounds:
        tokens += [*judged.draft[: judged.accepted], judged.token]
    return tokens


def steps_of(rounds: Sequence[Judged]) -> int:
    """How far on the device takes a text to be behind some rounds, whatever they came to."""
    return sum(max(judged.accepted, 0) + 1 for judged in rounds)


def rounds_of(one: Running, before: int, rounds: Sequence[Judged]) -> list[Round]:
    """Rounds as a method takes them, up to the end of its text; so many tokens come `before`."""
    left = one.seq.remaining - before
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
    """A round from one verdict to the next, whole: on CUDA a graph, elsewhere the same code. It
    works over the memory of the forwards that it is made of. What rules would say at temperature 0
    is said of logits at once."""

    def __init__(
        self, rounds: LookRounds, drafts: Drawn, verdicts: Verdicts, pool: PoolHandle | None
    ):
        self.is_checked = False
        self.runners = rounds.look.host.runner, rounds.judging.host.runner
        self.verdicts = Verdicts(*(column_B.clone() for column_B in verdicts))
        self._drafts = drafts
        self._run: Callable[[], Tensor] | None = None
        if self.verdicts.token_B.is_cuda:
            self._compile(rounds)
            with capturing_alone():
                self._run = capture_graph(partial(self._round, rounds), pool, ready=True)

    def begin(self, verdicts: Verdicts) -> None:
        """Take over behind a verdict."""
        for mine_B, column_B in zip(self.verdicts, verdicts):
            mine_B.copy_(column_B)

    def is_alive(self, kind: RoundKind) -> bool:
        """Are the forwards that it is made of still kept?"""
        return all(
            any(forward is kept for kept in runner.captured.values())
            for forward, runner in zip(kind.forwards, self.runners)
        )

    def run(self, rounds: LookRounds) -> Tensor:
        """The next draft and the verdict on it, as `RawVerdict.on`: they stay until the next."""
        return self._round(rounds) if self._run is None else self._run()

    def _compile(self, rounds: LookRounds) -> None:
        """Launch once what no step has launched before: in a capture nothing can be compiled."""
        look_RV = rounds.look.logits_RV
        assert look_RV is not None
        logits_BKV = look_RV.unflatten(0, (len(self.verdicts.token_B), -1))
        drafted_BK = self._drafts(logits_BKV, self.verdicts.token_B)
        judge_rows(rounds.logits_RV, drafted_BK, *map(torch.clone, self.verdicts))

    def _round(self, rounds: LookRounds) -> Tensor:
        look, judging = rounds.look, rounds.judging
        accepted_B, token_B = self.verdicts
        look_RV = run_within(look.host, look.replayed, look.further(self.verdicts))
        logits_BKV = look_RV.unflatten(0, (len(token_B), -1))
        drafted_BK = self._drafts(logits_BKV, token_B)
        further = judging.further(self.verdicts, drafted_BK)
        logits_RV = run_within(judging.host, judging.replayed, further)
        return judge_rows(logits_RV, drafted_BK, accepted_B, token_B)


def run_within(host: Host, replayed: Replayed | None, batch: Batch) -> Tensor:
    """A forward as a part of another program."""
    assert replayed is not None and isinstance(batch, MovedOn)
    return host.remove_impossible(replayed.captured.run_moved_within(batch))


class RoundKind(NamedTuple):
    """What a program was made of: with the same, it is the same."""

    forwards: tuple[CapturedForward, CapturedForward]
    rule: Rule  # that draws from blocks
    sequences: int
    drafted: int


class RoundPrograms:
    """Whole rounds that were captured."""

    def __init__(self) -> None:
        self._programs: OrderedDict[RoundKind, RoundProgram] = OrderedDict()
        self._asked: Counter[int] = Counter()  # by hash: a kind would keep its captures
        self._pool: PoolHandle | None = None
        self._works = True

    def may_have(self, rule: Rule, sequences: int, drafted: int) -> bool:
        """Is there a program like that?"""
        return self._works and any(
            program.is_checked and kind[1:] == (rule, sequences, drafted)
            for kind, program in self._programs.items()
        )

    def has(self, rounds: LookRounds) -> bool:
        """Is there a program of these, that was run before?"""
        kind = self._kind(rounds) if self._works else None
        program = None if kind is None else self._programs.get(kind)
        return program is not None and program.is_checked

    def of(self, rounds: LookRounds, verdicts: Verdicts) -> RoundProgram | None:
        """The program of these, if their kind was met often enough; it goes on behind some
        verdicts."""
        kind = self._kind(rounds) if self._works else None
        if kind is None:
            return None
        if kind in self._programs:
            self._programs.move_to_end(kind)
            program = self._programs[kind]
            program.begin(verdicts)
            return program
        if len(self._asked) > MOST_NOTED:
            self._asked.clear()
        self._asked[hash(kind)] += 1
        often = self._asked[hash(kind)] > ASKED_BEFORE
        return self._make(kind, rounds, verdicts) if often else None

    def _make(self, kind: RoundKind, rounds: LookRounds, verdicts: Verdicts) -> RoundProgram | None:
        for other in [one for one, program in self._programs.items() if not program.is_alive(one)]:
            del self._programs[other]
        device = rounds.logits_RV.device
        no_pool = self._pool is None or not self._programs
        if no_pool and device.type == "cuda":  # nor may one be used whose last capture is gone
            self._pool = torch.cuda.graph_pool_handle()
        drafts = rounds.drafts
        assert drafts is not None, "or there is no such kind"
        try:
            with current_device(device):
                program = RoundProgram(rounds, drafts, verdicts, self._pool)
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
        if look is None or judging is None or rounds.drafts is None:
            return None
        forwards = look.captured, judging.captured
        return RoundKind(forwards, rounds.drawn.rule, len(rounds.running), rounds.judging.length)

    def are_right(
        self, rounds: LookRounds, answers: Sequence[object], judged: Sequence[Sequence[Judged]]
    ) -> bool:
        """Does a forward about the last of some rounds say what a program that ran for the first
        time has said? If not, none is used any more. It writes over what was begun behind them."""
        kind = self._kind(rounds)
        host = rounds.judging.host
        work = []
        for one, answer, own in zip(rounds.running, answers, judged):
            assert isinstance(answer, Verdict), "see `can_be_checked`"
            first = [*judged_tokens(one)[: answer.accepted], answer.token]
            before = [*first, *tokens_of(own[:-1])]
            tokens = text_and_chain(one.seq.text, [*before, *own[-1].draft])
            start = len(one.seq.text) + len(before) - 1
            work.append((one.lane, PlainText.of(tokens, start), start))
        logits_RV = host.remove_impossible(host.runner.forward(host.batch(work)))
        logits_BLV = logits_RV.unflatten(0, (len(work), -1))
        if not all(is_likeliest(*each) for each in zip((own[-1] for own in judged), logits_BLV)):
            log.warning("rounds are not captured any more: they came out wrong")
            self._works = False
            self._programs.clear()
            return False
        if kind is not None and kind in self._programs:
            self._programs[kind].is_checked = True
        return True


def can_be_checked(answers: Sequence[object], judged: Sequence[Sequence[Judged]]) -> bool:
    """Is there a verdict everywhere?"""
    verdicts = all(isinstance(answer, Verdict) for answer in answers)
    return verdicts and all(one.is_there for own in judged for one in own)


def is_likeliest(judged: Judged, logits_LV: Tensor) -> bool:
    """Is a verdict what these logits say, but for rounding?"""
    said = [*judged.draft[: judged.accepted], judged.token]
    rows_LV = logits_LV[: len(said)].float()
    own_L = rows_LV.gather(1, to_device(said, torch.long, rows_LV.device)[:, None])[:, 0]
    most_L = rows_LV.amax(1)
    near = TOLERANCE[logits_LV.dtype] * float(most_L.abs().max())
    rejected = judged.draft[judged.accepted : judged.accepted + 1]
    return bool((most_L - own_L <= near).all()) and rejected != [judged.token]
