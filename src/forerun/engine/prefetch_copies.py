"""The next draft of those who copy from their own text, and the forward about it, begun before the
verdict on the last draft is known.

Where a text goes on repeating itself is arithmetic on what the device has: the text, the draft, how
much of it is accepted, and the token behind that. So the device looks for the next copy itself, and
the forward that judges it is queued behind that. The drafter takes what was begun for its draft
(`Canvas.begun`): a copy decides nothing, so any will do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.engine.copies import copies_after
from forerun.engine.graphs import SIZES
from forerun.engine.host import Host
from forerun.engine.pack import Batch, Moved
from forerun.engine.prefetch import Source
from forerun.engine.prefetch_drafts import SURPRISES, JudgeBegun, judged_tokens
from forerun.engine.prefetch_looks import Verdicts
from forerun.engine.ticket import Running
from forerun.probability.outcomes import Verdict
from forerun.probability.transfer import HostCopy, to_device
from forerun.sequence.canvas import Begun, Copies
from forerun.sequence.rows import PlainText, Plan, text_and_chain

# Tokens of all texts, which are sent each time; more of them are left to the host.
MOST_SEARCHED = 1 << 17
LONGEST_RUN = 8  # of last tokens that are looked up
# Parameters for each sequence, below which the host takes longer for rows that are begun ahead than
# the device for the forward: on an H200 it paid for one text of SmolLM2-135M, not for eight.
LEAST_COST_EACH = 2.5e7


class CopyPrefetch(JudgeBegun):
    """The target's forward about the next copy of every sequence, as far on as the last one is
    accepted. Each is as long as the drafter asked for last."""

    def __init__(self, host: Host, running: Sequence[Running], copies: Sequence[Copies]):
        super().__init__(host, running)
        self.texts = [one.seq.text for one in running]
        self.judged = [judged_tokens(one) for one in running]
        self.lengths = [each.length for each in copies]
        self.rows_of = {one: 1 + length for one, length in zip(running, self.lengths)}
        self._most = max(map(len, self.judged))  # tokens that may be accepted
        self._run = min(LONGEST_RUN, max(each.run for each in copies))
        self._copied: HostCopy | None = None  # what is drafted

    @classmethod
    def guess(cls, running: Sequence[Running], host: Host) -> CopyPrefetch | None:
        copies = [
            each for one in running if (each := one.seq.copies) and each.known == one.seq.known
        ]
        if len(copies) < len(running) or not host.runner.capture_enabled:
            return None
        if host.backbone.cost < LEAST_COST_EACH * len(running):
            return None
        self = cls(host, running, copies)
        if sum(self.rows_of.values()) > SIZES[-1] or self._searched > MOST_SEARCHED:
            return None
        ends = [one.seq.known + 1 + self._most + n for one, n in zip(running, self.lengths)]
        if not all(map(self._is_likely, running, ends)):
            return None
        if all(one.seq.remaining <= 1 + len(x) for one, x in zip(running, self.judged)):
            return None  # each may be over
        pages = sum(
            host.memos[one.lane].pages_needed(one.seq.known, end) for one, end in zip(running, ends)
        )
        return self if host.pool.ensure(pages) else None

    @property
    def _searched(self) -> int:
        """Tokens that are searched, with those that pad."""
        return len(self.texts) * max(map(len, self.texts))

    def _is_likely(self, one: Running, end: int) -> bool:
        """Do slots hold its text and the draft that is judged, and are there some for the next?"""
        asked = one.last_question
        assert asked is not None
        plan = asked.plan
        fits = 0 < end <= min(self.host.room, self.host.backbone.context)
        of_text = isinstance(plan, PlainText) and plan.first_read == one.seq.known - 1
        held = of_text and self.host.memos[one.lane].holds_text(plan.tokens)
        return fits and held and asked.host is self.host and self._surprises(one) < SURPRISES

    def batch(self, applied: Source) -> Batch:
        verdicts = self._verdicts(applied)
        drafts_BK = self._copies(verdicts)
        self._copied = HostCopy(drafts_BK)
        work: list[tuple[int, Plan, int]] = []
        for one, text, length in zip(self.running, self.texts, self.lengths):
            tokens = text_and_chain(text, [0] * (1 + length))  # as if nothing were accepted
            work.append((one.lane, PlainText.of(tokens, len(text)), len(text)))
        batch = self.host.batch(work, ahead=self._most)
        tokens_BL = torch.cat([verdicts.token_B[:, None], drafts_BK.clamp(min=0)], 1)
        batch.drawn_T = self._only_asked(tokens_BL)
        batch.moved = Moved(verdicts.accepted_B, self._most)
        return batch

    def _verdicts(self, applied: Source) -> Verdicts:
        """How much is accepted, at most what was judged: a method may have drawn from something
        else than its last answer, and no row may leave its slots for that."""
        accepted_B, token_B = Verdicts.of(applied, self.host.backbone.vocab)
        most_B = to_device([len(x) for x in self.judged], torch.long, self.host.device)
        return Verdicts(torch.minimum(accepted_B, most_B), token_B)

    def _copies(self, verdicts: Verdicts) -> Tensor:
        """The next copy of each sequence."""
        device = self.host.device
        lengths = [len(text) for text in self.texts]
        longest = max(n + len(x) for n, x in zip(lengths, self.judged))
        rows_BT = np.zeros((len(lengths), longest + 1), np.int64)
        for row_T, text, judged in zip(rows_BT, self.texts, self.judged):
            row_T[: len(text)] = text
            row_T[len(text) : len(text) + len(judged)] = judged
        end_B = to_device(lengths, torch.long, device) + verdicts.accepted_B
        tokens_BT = to_device(rows_BT, torch.long, device)
        return copies_after(tokens_BT, end_B, verdicts.token_B, self._run, max(self.lengths))

    def _only_asked(self, tokens_BL: Tensor) -> Tensor:
        """The tokens of all rows that run: of each sequence its first ones."""
        rows = [1 + length for length in self.lengths]
        if min(rows) == max(rows):
            return tokens_BL.flatten()
        asked_BL = np.arange(max(rows)) < np.array(rows)[:, None]
        numbers = np.flatnonzero(asked_BL)
        return tokens_BL.flatten()[to_device(numbers, torch.long, tokens_BL.device)]

    def prepare(self, batch: Batch) -> bool:
        return self._prepare_or_capture(batch)

    def begin(self) -> None:
        """What is accepted of the last draft stays, but how much that is, is not known yet."""
        for one, text in zip(self.running, self.texts):
            self.host.memos[one.lane].keep(len(text))

    def learn(self, answers: Sequence[object]) -> None:
        assert self._copied is not None
        drafts = self._copied.numbers()
        for number, (one, answer) in enumerate(zip(self.running, answers, strict=True)):
            if isinstance(answer, Verdict):
                text = self.texts[number]
                kept = self.judged[number][: answer.accepted]
                draft = [int(token) for token in drafts[number][: self.lengths[number]]]
                if -1 in draft:
                    draft = []
                end = len(text) + len(kept)
                self.host.memos[one.lane].wrote(len(text), kept)
                tokens = text_and_chain(text, [*kept, answer.token, *draft])
                self.foreseen[one] = PlainText.of(tokens, end)
                one.seq.begun = Begun(end + 1, draft)
