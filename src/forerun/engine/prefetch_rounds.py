"""Rounds of draft and verdict that a device goes on with by itself.

Behind a verdict that is on its way, the next block, what is drawn from it, and the target's forward
about that are queued already (`prefetch_looks.py`). The verdict on that draft is arithmetic on what
the device has, too, and so is all that follows. So several rounds are queued one behind the other,
and their outcomes come to the host together: what it does for a step, it does once for all of them.
At temperature 0 a round needs nothing that the host would have to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from forerun.engine.continuation import Continuations
from forerun.engine.host import Host
from forerun.engine.pack import Batch
from forerun.engine.prefetch_drafts import judged_tokens
from forerun.engine.prefetch_looks import DrawnAhead, JudgeDrawn, LookPrefetch, Verdicts
from forerun.engine.rules import Applied, Late, Rules
from forerun.engine.ticket import Running
from forerun.probability.acceptance import matching
from forerun.probability.outcomes import Outcome, Tokens, Verdict
from forerun.probability.pending import LawRows, PendingLaws
from forerun.sequence.canvas import Draw, Round

MOST_ROUNDS = 8  # in one go
FORWARDS = 1.5  # of the target, that a round takes about as long as

RunForward = Callable[[Host, Batch], Tensor]
Outcomes = Sequence[tuple[Outcome | None, Outcome | None]]  # a draft and its verdict, of each round


class LookRounds:
    """Rounds of a drafter that looks into its target: each as the last one, further on. What was
    begun ahead moves on with them, and is what comes behind the last one."""

    def __init__(self, look: LookPrefetch, drawn: DrawnAhead, judging: JudgeDrawn):
        self.running = look.running
        self.count = 0  # rounds that are to be queued
        self._look = look
        self._drawn = drawn
        self._judging = judging
        self._each = judging.length + 1  # the most tokens of a round
        self._known = [one.seq.known for one in look.running]
        self._drafts: list[Applied] = []
        self._verdicts: list[Applied] = []

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
        room = []
        for forward, end in ((self._look, self._look_end), (self._judging, self._judge_end)):
            replayed = forward.replayed
            if replayed is None or not replayed.can_move(end):
                return 0
            if forward.host.runner.had_better_capture(replayed):
                return 0
            most = min(replayed.found.longest, forward.host.room, forward.host.most_rows)
            room.append(most - end)
        room.append(self._judging.host.backbone.context - self._judge_end)
        return max(0, min(room)) // self._each

    @property
    def _look_end(self) -> int:
        """Slots that the block which is queued already may reach."""
        return max(self._look.ends())

    @property
    def _judge_end(self) -> int:
        """The same of the forward about what is drawn from it."""
        return max(self._judging.ends())

    def _has_pages(self) -> bool:
        """Are there pages for all rounds? Then they are the lanes' own."""
        more = self.count * self._each
        for forward in (self._look, self._judging):
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

    def queue(self, rules: Rules, run: RunForward) -> None:
        """Queue all rounds."""
        for number in range(self.count):
            verdicts = self._judge(rules)
            if verdicts is None:  # there is no program for it yet
                assert not number, "what ran once runs again"
                self.count = 0
                return
            self._draft(rules, run, verdicts)

    def _judge(self, rules: Rules) -> Verdicts | None:
        """The verdicts on what was drawn last."""
        logits_RV = self._judging.logits_RV
        assert logits_RV is not None and self._drawn.applied is not None
        drafted_BK = self._drawn.applied.column("tokens")[:, : self._judging.length]
        late = [Late(0, drafted_BK, is_shift=False)]
        applied: Applied | None
        if self._verdicts:
            applied = rules.apply_again(self._verdicts[-1], logits_RV, late)
        else:
            applied = rules.apply_ahead(self._draws(logits_RV), late)
        if applied is None:
            return None
        self._drafts.append(self._drawn.applied)
        self._verdicts.append(applied)
        return Verdicts.of(applied, self._judging.host.backbone.vocab)

    def _draws(self, logits_RV: Tensor) -> list[Draw[Verdict]]:
        """What a verdict is drawn from, with tokens that are not known yet."""
        draws = []
        for number, one in enumerate(self.running):
            rows = LawRows(logits_RV, number * self._each, self._each, one.seq.history.sampling)
            unknown = [0] * self._judging.length
            draws.append(Draw(matching, (unknown, PendingLaws([rows])), one.seq))
        return draws

    def _draft(self, rules: Rules, run: RunForward, verdicts: Verdicts) -> None:
        """The next block, what is drawn from it, and the forward about that."""
        look, drawn, judging = self._look, self._drawn, self._judging
        assert drawn.applied is not None
        look.verdicts = verdicts
        look.logits_RV = run(look.host, look.further(verdicts))
        drawn.applied = rules.apply_again(drawn.applied, look.logits_RV, drawn.late(verdicts))
        assert drawn.applied is not None, "what ran once runs again"
        judging.verdicts = verdicts
        judging.drawn = drawn.applied
        judging.logits_RV = run(judging.host, judging.further(verdicts))

    def hand_over(self, answers: Sequence[object]) -> None:
        """All outcomes have arrived: give each sequence its rounds, behind the first verdict."""
        outcomes = self.outcomes(answers)
        for number, (one, answer) in enumerate(zip(self.running, answers, strict=True)):
            if isinstance(answer, Verdict):
                self._hand_over(number, one, answer, outcomes[number])

    def outcomes(self, answers: Sequence[object]) -> Sequence[Outcomes]:
        """What was drafted and judged for each sequence, behind its first verdict."""
        drafts = zip(*(applied.outcomes() for applied in self._drafts))
        verdicts = zip(*(applied.outcomes() for applied in self._verdicts))
        return [list(zip(*own)) for own in zip(drafts, verdicts)]

    def _hand_over(self, number: int, one: Running, first: Verdict, outcomes: Outcomes) -> None:
        known = self._known[number]
        tokens = judged_tokens(one)[: first.accepted]  # that slots hold now, behind the text
        last = first.token
        rounds = []
        for drafted, verdict in outcomes:
            if not isinstance(drafted, Tokens) or not isinstance(verdict, Verdict):
                self._look.surprised(one)
                self._judging.surprised(one)
                break
            draft = drafted.tokens[: self._judging.length]
            tokens += [last, *draft[: verdict.accepted]]
            last = verdict.token
            rounds.append((draft, verdict))
        else:
            end = known + len(tokens) + 1
            self._look.expect_text(one, end, last)
            self._judging.expect_text(one, end, last)
        self._look.starts[one] = known - self._each
        self._judging.host.memos[one.lane].wrote(known, tokens)
        one.seq.rounds = rounds_of(one, first, rounds)


def rounds_of(
    one: Running, first: Verdict, rounds: Sequence[tuple[Sequence[int], Verdict]]
) -> list[Round]:
    """Rounds as a method takes them, up to the end of its text."""
    left = one.seq.remaining - first.accepted - 1
    found = []
    for drafted, verdict in rounds:
        if left <= 0:
            break
        draft = one.seq.up_to_end(drafted[: left - 1])
        accepted = min(verdict.accepted, len(draft))
        behind = [*drafted[: verdict.accepted], verdict.token]  # and what is right of the draft
        looked = len(draft) > 0
        # as often as plain decoding would have drawn, and for the draft
        draws = accepted + 1 + looked
        found.append(Round(draft, accepted, behind[accepted], draws, draft_forwards=looked))
        left -= accepted + 1
    return found


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
