"""The engine's loop: methods wait, the engine serves the cheapest thing that is wanted, batched
over all who want it.

A request's life: `submit` queues it. `step` gives it a lane and starts its method, a coroutine for
one sequence. Each time that coroutine awaits, it hands over a `Draw` (a rule on laws) or a
`Question` (a plan for one model). `step` answers all requests of the cheapest kind at once and lets
them go on, until the method returns and its lane is free again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from forerun.constraints.left_to_right import look_ahead
from forerun.engine.backbone import Backbone
from forerun.engine.clock import Clock
from forerun.engine.continuation import Continuations, WrittenBatch
from forerun.engine.costs import StepWatch
from forerun.engine.flag import Flag
from forerun.engine.host import Host
from forerun.engine.pace import Pace
from forerun.engine.pack import Batch
from forerun.engine.pages import PAGE, PageShape, pages_for
from forerun.engine.prefetch import Prefetch, Source, TokenPrefetch, foresee, hides_host
from forerun.engine.prefetch_copies import CopyPrefetch
from forerun.engine.prefetch_drafts import Drafted, DraftPrefetch, foresee_judging
from forerun.engine.prefetch_looks import DrawnAhead, JudgeDrawn, LookPrefetch
from forerun.engine.prefetch_rounds import LookRounds, RoundPrograms
from forerun.engine.rounds import ROUNDS_SECONDS, Rounds, writer_of
from forerun.engine.rules import Applied, MakeSampler, Rules, TokenDraws
from forerun.engine.schedule import Foresight, next_ticket, overdue
from forerun.engine.ticket import Running, Ticket
from forerun.engine.turns import Part, Turn, has_room
from forerun.errors import ForerunError, NotAble, NothingPossible, NothingToSee
from forerun.probability.logits import (
    MaskedLogits,
    edited_logits,
    next_token_logits,
    own_logits,
)
from forerun.probability.noise import Noise
from forerun.probability.outcomes import Token, Tokens, Verdict
from forerun.probability.pending import PendingLaws, made
from forerun.probability.transfer import to_device
from forerun.sequence.canvas import Canvas, Draw, MoreRounds
from forerun.sequence.question import BlankLaws, Continuation, NextToken, Question, Written

log = logging.getLogger("forerun")


class NoOutcome(NothingPossible):
    """A law without mass."""

    def __init__(self, seq: Canvas) -> None:
        constraint = seq.history.constraint
        asked = "" if constraint is None else "nothing that the constraint allows can be spelled, "
        if constraint is not None and constraint.error:
            asked = f"the constraint cannot be followed ({constraint.error}), "
        super().__init__(
            f"no token is possible here: {asked}the sampling parameters forbid all of them, or the "
            f"model's logits are not numbers."
        )


class Interrupted(ForerunError):
    """The caller's program was interrupted."""

    def __init__(self) -> None:
        super().__init__("interrupted while this request was being decoded.")


def no_messages() -> bool:
    """Nobody can say anything while a step runs."""
    return False


class NotYet:
    """The answer of a forward to whoever has only begun to read: it is asked again."""


class Engine:
    """Continuous batching: a fixed number of lanes, a queue, and one `step` per forward or batch of
    draws. Lanes share `slots` slots, in pages; without it each has a whole context."""

    # Do forwards begin before their tokens are known? None: where a device works on its own.
    prefetches: bool | None = None
    # Rows of prompts that one forward reads while others write. None: by what steps take.
    chunk: int | None = None

    def __init__(
        self,
        lanes: int,
        sampler: MakeSampler = Noise,
        graphs: bool | None = None,
        slots: int | None = None,
        page: int = PAGE,
    ):
        self.lanes = lanes
        self.slots = slots
        self.page = page
        self.graphs = graphs
        self.hosts: list[Host] = []
        self.queue: deque[Ticket] = deque()
        self.running: list[Running] = []
        self.free_lanes = list(range(lanes))
        self.clock = Clock()
        self.watch = StepWatch()
        self.foresight = Foresight()
        self._prefetched: Prefetch | None = None
        self._drafted: Drafted | None = None  # by a model, last
        self._looked: LookPrefetch | None = None  # that was begun last
        self._drawn: DrawnAhead | None = None  # from blocks that were handed over last
        self._rounds = RoundPrograms()
        self._gone_on: Rounds | None = None  # in this step
        self._going_on: LookRounds | None = None  # on the device
        self._held_lanes: list[int] = []  # that it may still write to, of texts that are over
        self.rules = Rules(sampler, graphs)
        self._deadlines = 0  # requests that have one
        self._parts: list[Part] = []  # of the forward that is being run
        self._only_read = False  # the last forward: a chunk of a prompt, by a draft model
        self._in_step = False
        self._to_cancel: deque[Ticket] = deque()
        self.has_messages = no_messages  # of whoever steps it: what it applies after this step
        self.stop = Flag()  # had a step better end soon? Somebody wants to join, or to go

    def add_model(
        self, backbone: Backbone, room: int, impossible_tokens: Sequence[int] = ()
    ) -> Host:
        """Make room for a model: up to `room` slots in every lane."""
        count = self.lanes * pages_for(room, self.page)
        if self.slots is not None:
            count = min(count, self.slots // self.page)
        if self.hosts:  # a draft's longest plan may be longer than its target's
            count = max(count, pages_for(room, self.page))
        pages = PageShape(count, self.page)
        host = Host(backbone, self.lanes, room, impossible_tokens, self.graphs, pages)
        if self.chunk is not None:
            host.pace = Pace(host.costs, self.chunk)
        if self.rules.by_noise:
            host.writer = Continuations(host, self.stop)
            host.costs.at_once = host.at_once
            host.costs.launch = ROUNDS_SECONDS if host.runner.moves_rows else 0.0
            host.costs.writes_any_length = host.writes_any_length
        self.hosts.append(host)
        return host

    def submit(self, ticket: Ticket) -> Ticket:
        self.queue.append(ticket)
        self._deadlines += ticket.due is not None
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request; its lane is free at once. Nothing happens if it is over already.

        Whoever cancels in the middle of a step, such as the garbage collector that finds an
        abandoned stream, leaves a message: it is applied when the step is done.
        """
        if self._in_step:
            self._to_cancel.append(ticket)
            self.stop.set()
        elif not ticket.over:
            self._cancel(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        ticket.seq.finish_reason = ticket.seq.finish_reason or "cancelled"
        if ticket in self.queue:
            self.queue.remove(ticket)
            self._end_ticket(ticket)
        for one in list(self.running):
            if one.ticket is ticket:
                self._end(one)

    def fail_all(self, error: Exception) -> None:
        """End every request with this error."""
        for one in list(self.running):
            self._fail(one, error)
        while self.queue:
            self._fail_ticket(self.queue.popleft(), error)

    @property
    def page_use(self) -> float:
        """Share of the target's pages that sequences hold now."""
        if not self.hosts:
            return 0.0
        host = self.hosts[0]
        held = {page for one in list(self.running) for page in host.memos[one.lane].pages}
        return len(held) / host.slots.table.count

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the target's prompt rows that were found in pages."""
        return self.hosts[0].pool.stats.hit_rate if self.hosts else 0.0

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.running)

    @torch.inference_mode()
    def run(self) -> None:
        """Serve until nothing is left to do."""
        while self.busy:
            self.step()

    def step(self) -> None:
        """Admit who is waiting for a lane, then serve the cheapest thing wanted, to all who want
        it."""
        if torch.is_inference_mode_enabled():  # as in the engine's own thread
            self._step()
        else:
            with torch.inference_mode():
                self._step()

    def _step(self) -> None:
        self.stop.clear()  # before all else: whoever comes now sets it
        self._in_step = True
        if self.has_messages():
            self.stop.set()
        try:
            self._serve_cheapest()
        finally:
            self._in_step = False
            self._parts = []  # a finished request must not be held, nor its model
            while self._to_cancel:
                self.cancel(self._to_cancel.popleft())

    def _serve_cheapest(self) -> None:
        began = time.perf_counter()
        for host in self.hosts:
            if host.begin_features():
                self._forget_ahead()
        self._admit()
        self._refuse_blind_looks()
        going_on = [one for one in self.running if isinstance(one.waits_for, MoreRounds)]
        draws = [one for one in self.running if isinstance(one.waits_for, Draw)]
        prefetched = self._prefetched
        if self._going_on is not None and not going_on:  # nobody is left
            self._forget_ahead()
        if going_on:
            self._serve(going_on, self._hand_over_rounds)
        elif draws:
            self._serve(draws, self._draw)
        elif prefetched and (begun := [one for one in self.running if prefetched.matches(one)]):
            self._serve(begun, self._finish_prefetched)
        elif self.running:
            parts = self._next_for_forward()
            writing = next_to_write(parts)
            if writing:
                self._parts = [part for part in parts if part.one in writing]
                self._serve(writing, self._write)
            else:
                self._parts = parts
                self._serve([part.one for part in parts], self._forward)
        self.clock.total += time.perf_counter() - began

    def _refuse_blind_looks(self) -> None:
        """Tell those who ask a drafter that looks into its target, if there is nothing to look at:
        the target gave its pages back, or tokens were placed that it has not run. Without a draft
        it runs the text, and the next look sees it."""
        if all(host.looks_into is None for host in self.hosts):
            return
        for one in filter(looks_in_vain, list(self.running)):
            self._throw(one, NothingToSee("the target has not run what is to be looked at."))

    def _next_for_forward(self) -> list[Part]:
        """All who wait for the cheapest model that anybody waits for, and for whose rows there is
        room. For the oldest there always is."""
        wanted = {host_of(one): None for one in self.running}
        hosts = sorted(wanted, key=lambda host: (host.backbone.cost, self.hosts.index(host)))
        if self._only_read:  # a draft model, in the last forward: streams need not wait for all
            hosts = hosts[1:] + hosts[:1]
        for from_all, host in product((False, True), hosts):
            turn = Turn(host, self.running, from_all)
            parts = turn.parts(self._usual_step(host))
            if turn.gave_back:
                self._forget_ahead()
            if parts:
                chunks = all(part.is_prompt and not part.is_whole for part in parts)
                self._only_read = chunks and question_of(parts[0].one).drafting
                return parts
        raise AssertionError("the oldest sequence has room")

    def _usual_step(self, host: Host) -> float | None:
        """What a step of those takes who wait for the model that a draft model drafts for."""
        target = self.hosts[0]
        if host is target or not (host.costs.known and target.costs.known):
            return None
        return target.costs.plain(len(self.running))

    def _serve(
        self, served: list[Running], answer: Callable[[list[Running]], Sequence[object]]
    ) -> None:
        try:
            answers = answer(served)
        except Exception as error:
            answers = [error] * len(served)
        for one, value in zip(served, answers, strict=True):
            if isinstance(value, Exception):
                self._throw(one, value)
            elif isinstance(value, Draw):
                one.wait_for(value)
            elif not isinstance(value, NotYet):
                self._resume(one, value)
        if self._gone_on is not None:  # once methods have taken over what came of it
            rounds, self._gone_on = self._gone_on, None
            if self.running:
                self.watch.went_on(rounds.host.costs, rounds.tokens)

    def _end_late(self) -> None:
        """End those whose time is up, with what they have; refuse those who would be late."""
        for ticket in overdue(one.ticket for one in self.running):
            ticket.seq.finish_reason = "deadline"
            self._cancel(ticket)
        ahead = 0
        for ticket in sorted(self.queue, key=lambda each: -each.priority):
            waits = self.foresight.wait(ahead, self.lanes) if not self.free_lanes else 0.0
            refusal = self.foresight.refusal(ticket, waits)
            if refusal is not None:
                self.queue.remove(ticket)
                self._fail_ticket(ticket, refusal)
            else:
                ahead += 1

    def _know_costs(self) -> None:
        """Find out what forwards cost, in a lane that is free."""
        for host in self.hosts:
            host.know_costs(self.free_lanes[0])

    def _admit(self) -> None:
        if self._deadlines:
            self._end_late()
        while self.queue and self.free_lanes:
            ticket = next_ticket(self.queue)
            if not self._has_pages_for(ticket):
                break
            self.queue.remove(ticket)
            ticket.started = time.perf_counter()
            try:
                if ticket.asks_costs or ticket.due is not None:
                    self._know_costs()
                if refusal := self.foresight.refusal(ticket, 0.0):
                    raise refusal
                coroutine = ticket.start()
                check_coroutine(coroutine)
            except Exception as error:
                self._fail_ticket(ticket, error)
                continue
            one = Running(ticket, self._best_lane(ticket), coroutine)
            self.free_lanes.remove(one.lane)
            for host in self.hosts:
                host.memos[one.lane].begin(ticket.seq.text)
            self.running.append(one)
            self._resume(one, None)

    def _has_pages_for(self, ticket: Ticket) -> bool:
        """Is there room for a text, and for those who run to grow?"""
        running = len(self.running)
        text = ticket.seq.text
        return not running or all(has_room(host, text, running) for host in self.hosts)

    def _best_lane(self, ticket: Ticket) -> int:
        """The free lane whose slots, of all models together, hold the longest part of this text
        already."""
        text = ticket.seq.text
        best = self.free_lanes[0]
        most_held = -1
        for lane in self.free_lanes:
            held = sum(host.memos[lane].common_prefix(text) for host in self.hosts)
            if held > most_held:
                best = lane
                most_held = held
            if held == len(text) * len(self.hosts):  # all of it: no lane holds more
                break
        return best

    def _resume(self, one: Running, answer: object) -> None:
        """Let one method go on until it waits again or returns. Its errors end only itself.

        What it waited for counts only now. If an interrupt comes before that, it is served again,
        and with the same noise.
        """
        known = one.seq.known
        one.count_answered(answer)
        try:
            one.resume(answer)
            self._check_room(one)
        except StopIteration:
            self._end(one)
        except Exception as error:
            self._fail(one, error)
        except BaseException:  # interrupted in the midst of a decision, which cannot be made again
            self._fail(one, Interrupted())
            for other in self.running:  # they will ask again
                other.seq.rounds = []
                other.seq.more_rounds = False
            self._forget_ahead()
            raise
        else:
            if one.seq.known != known:
                self.watch.tokens += one.seq.known - known
                one.ticket.on_change()

    def _throw(self, one: Running, error: Exception) -> None:
        """Tell a method that what it waits for has failed. Most end with that; one that can do
        without, such as without a drafter, goes on."""
        try:
            one.throw(error)
            self._check_room(one)
        except StopIteration:
            self._end(one)
        except Exception as uncaught:
            self._fail(one, uncaught)

    @staticmethod
    def _check_room(one: Running) -> None:
        """Refuse a plan that is longer than a lane, which would write into the next one, and one
        without rows, which would fail the forward of all."""
        if isinstance(one.waits_for, Question):
            rows = one.waits_for.length
            room = host_of(one).most_rows
            if not 0 < rows <= room:
                raise NotAble(f"a plan of {rows} rows does not fit into a lane of {room} slots.")

    def _fail(self, one: Running, error: Exception) -> None:
        one.ticket.error = error
        one.seq.finish_reason = "error"
        self._end(one)

    def _end(self, one: Running) -> None:
        with suppress(Exception):  # a method that awaits while it is closed ends all the same
            one.coroutine.close()
        one.waits_for = None
        one.last_question = None
        one.looked = None
        one.drew = None
        self._drafted = None  # a finished request must not be held
        self._looked = None
        self.running.remove(one)
        self._held_lanes.append(one.lane)
        if self._going_on is None:
            self._free_lanes()
        if not self.running:
            self._forget_ahead()
            self.watch.idle()
        self._end_ticket(one.ticket)

    def _free_lanes(self) -> None:
        """Give up the lanes of texts that are over: the device goes on with none of them."""
        for lane in self._held_lanes:
            for host in self.hosts:
                host.memos[lane].rest()
        self.free_lanes += self._held_lanes
        self.free_lanes.sort()
        self._held_lanes.clear()

    def _fail_ticket(self, ticket: Ticket, error: Exception) -> None:
        ticket.error = error
        ticket.seq.finish_reason = "error"
        self._end_ticket(ticket)

    def _end_ticket(self, ticket: Ticket) -> None:
        ticket.ended = time.perf_counter()
        self._deadlines -= ticket.due is not None
        self.foresight.ended(ticket)
        ticket.seq.logprobs.forget_answers()
        ticket.on_change()

    def _draw(self, served: list[Running]) -> Sequence[object]:
        """Answer all draws. Who wants just what was drawn ahead gets that."""
        began = time.perf_counter()
        draws = [draw_of(one) for one in served]
        for one, draw in zip(served, draws):
            if one.looked is not None and one.last_question is one.looked:
                one.drew = draw
        early = self._take_drawn_ahead(served)
        return self._decide(served, draws, began, early)

    def _decide(
        self,
        served: list[Running],
        draws: Sequence[Draw[Any]],
        began: float,
        early: tuple[list[int], Applied] | None = None,
        in_step: bool = False,
    ) -> list[object]:
        """Apply rules, one batch per kind of them, but for those (by index) that were applied
        `early`, with what a step before has begun. All outcomes come to the host together."""
        answers: list[object] = [None] * len(served)
        applied: list[tuple[Sequence[int], Applied]] = []
        left: Sequence[int] = range(len(draws))
        if early is None:
            self.watch.drawing()
        else:
            applied.append(early)
            left = sorted(set(left).difference(early[0]))
        for members in by_kind(draws, left):
            try:
                applied.append((members, self.rules.apply([draws[i] for i in members])))
                if not self.rules.is_warm:
                    self.watch.unusual()
            except Exception as error:  # a rule that fails takes with it only those who use it
                for i in members:
                    answers[i] = error
        self.clock.rules += time.perf_counter() - began
        self._arrive(served, answers, applied, in_step)
        return answers

    def _take_drawn_ahead(self, served: list[Running]) -> tuple[list[int], Applied] | None:
        """What was drawn ahead for those who want just that, and who they are, by index; the
        forward about it may have begun."""
        drawn = self._drawn
        early = [] if drawn is None else [i for i, one in enumerate(served) if drawn.holds(one)]
        if drawn is None or not early:
            self._drop_prefetched()
            return None
        self._prefetched = drawn.judging
        self._drawn = None
        return early, drawn.outcomes([served[i] for i in early])

    def _arrive(
        self,
        served: list[Running],
        answers: list[object],
        applied: Sequence[tuple[Sequence[int], Applied]],
        in_step: bool = False,
    ) -> None:
        """Wait for the outcomes of draws, and write them down. The next forward begins before that,
        if it can be foreseen. `in_step`: the one that is drawn from began so, too."""
        if applied:
            self.clock.mark("rules", applied[0][1].device)
        together = len(applied) == 1 and len(applied[0][0]) == len(served)
        if together and self._prefetched is None:
            self._try_to_prefetch(served, applied[0][1], in_step)
        rounds = self._go_on_ahead()
        began = time.perf_counter()
        with self._dropped_on_error(rounds):
            for members, one in applied:
                for i, outcome in zip(members, one.outcomes(), strict=True):
                    answers[i] = outcome or NoOutcome(served[i].seq)
            self.watch.arrived()
            self.clock.waits += time.perf_counter() - began
            self._look_ahead(served, answers)
            if self._prefetched is not None:
                self._prefetched.learn(answers)
        if rounds is not None:
            self._take_rounds(rounds, partial(rounds.hand_over, answers))
        self.clock.rules += time.perf_counter() - began

    @contextmanager
    def _dropped_on_error(self, rounds: LookRounds | None) -> Iterator[None]:
        """Rounds that were queued are of no use if they cannot be handed over, as when the host is
        interrupted: the device has gone on from what will be asked again."""
        try:
            yield
        except BaseException:
            if rounds is not None:
                rounds.drop()
                self._forget_ahead()
            raise

    def _go_on_ahead(self) -> LookRounds | None:
        """Queue rounds behind the verdicts that are on their way, where the device can go on by
        itself and nobody waits for the step to end."""
        look = self._prefetched
        if not isinstance(look, LookPrefetch):
            return None
        rounds = None
        try:
            if look.logits_RV is None or not self._somebody_comes:
                rounds = self._queue_rounds(look)
        except Exception as error:
            log.warning("rounds that were begun ahead failed: %r", error)
            self._forget_ahead()
        if rounds is None and look.logits_RV is None:  # it was held for them, and not begun
            self._forget_ahead()
        return rounds

    def _queue_rounds(self, look: LookPrefetch) -> LookRounds | None:
        rounds = LookRounds.guess(look, first_ends=bool(self.queue))
        if rounds is None or not rounds.queue(self.rules, self._rounds, self._count_further):
            return None
        self._queue_next_rounds(rounds, rounds.running)
        self.watch.unusual()
        return rounds

    @property
    def _somebody_comes(self) -> bool:
        return bool(self.stop or (self.queue and (self.free_lanes or self._held_lanes)))

    def _queue_next_rounds(self, rounds: LookRounds, waiting: Sequence[Running]) -> None:
        alone = len(waiting) == len(self.running) and not self._somebody_comes
        first_ends = bool(self.queue)
        rounds.queue_next(self.rules, self._count_further, waiting, alone, first_ends)

    def _take_rounds(self, rounds: LookRounds, hand_over: Callable[[], None]) -> None:
        """Give methods what has arrived. What was drawn stays drawn, whatever becomes of rounds
        behind it."""
        try:
            with self._dropped_on_error(rounds):
                hand_over()
        except Exception as error:
            log.warning("rounds that were begun ahead failed: %r", error)
            return
        if rounds.goes_on:
            self._going_on = rounds
        elif rounds.is_of_use:
            self._free_lanes()
        else:
            self._forget_ahead()

    def _hand_over_rounds(self, served: list[Running]) -> Sequence[object]:
        """Hand over the next of the rounds that the device goes on with, once others are queued
        behind them."""
        rounds, self._going_on = self._going_on, None
        if rounds is not None:
            self.watch.unusual()
            began = time.perf_counter()
            self._take_rounds(rounds, partial(self._next_rounds, rounds, served))
            self.clock.waits += time.perf_counter() - began
        return [None] * len(served)

    def _next_rounds(self, rounds: LookRounds, served: list[Running]) -> None:
        self._queue_next_rounds(rounds, served)
        rounds.hand_over_next(served)

    def _count_further(self, host: Host, batch: Batch) -> None:
        self.clock.forwards += 1
        host.work.add(batch)

    def _look_ahead(self, served: Sequence[Running], answers: Sequence[object]) -> None:
        """Tell constraints which tokens were drawn, of all sequences at once: what may follow is
        found while the device works."""
        began = time.perf_counter()
        asked = [
            (one.seq.history.constraint, [*chain_of(one), answer.token])
            for one, answer in zip(served, answers)
            if isinstance(answer, Token) and one.seq.history.constraint is not None
        ]
        look_ahead(asked, follow_forced=True)
        self.clock.masks += time.perf_counter() - began

    def _drop_prefetched(self) -> None:
        """Something else is asked for than what was foreseen, if anything was. (Where a text ends,
        or gives its pages back, nobody was mistaken.)"""
        if self._prefetched is not None:
            self._prefetched.in_vain()
        if self._drawn is not None and self._drawn.judging is not None:
            self._drawn.judging.in_vain()
        self._prefetched = None
        self._drawn = None

    def _forget_ahead(self) -> None:
        """Slots no longer hold what they held: nothing that was begun is of use."""
        self._prefetched = None
        self._drawn = None
        self._looked = None
        self._going_on = None
        self._free_lanes()

    def _try_to_prefetch(
        self, served: list[Running], applied: Source, in_step: bool = False
    ) -> None:
        """What was drawn stays drawn, whatever becomes of a forward that is only a guess. If it
        fails, it is run again when it is asked for, and fails those who ask."""
        try:
            self._prefetch(served, applied, in_step)
        except Exception as error:
            log.warning("a forward that was begun ahead failed: %r", error)
            self._prefetched = None
            self.watch.unusual()

    def _prefetch(self, served: list[Running], applied: Source, in_step: bool) -> None:
        """Begin the forward that all will ask for when they know what they drew, if there is one.
        Nobody may be left out, or batches would fall apart."""
        works_on_its_own = applied.device.type == "cuda"
        enabled = works_on_its_own if self.prefetches is None else self.prefetches
        alone = len(served) == len(self.running)
        prefetched = self._foresee(served, applied, alone, in_step) if enabled else None
        if prefetched is None or not (alone or self._read_beside(prefetched)):
            return
        if isinstance(prefetched, LookPrefetch):
            self._look(prefetched, applied)
        elif self._begin(prefetched, applied):
            self._prefetched = prefetched

    def _look(self, look: LookPrefetch, applied: Source) -> None:
        """Begin a drafter's next block, and what follows it; or have rounds begin with it."""
        held = self._hold_rounds(look, applied)
        if not held and not self._begin(look, applied):
            return
        self._prefetched = self._looked = look
        if not held:
            self._draw_ahead(look)
        look.forget_before()

    def _hold_rounds(self, look: LookPrefetch, applied: Source) -> bool:
        """Have rounds of what was foreseen begin with a program for them, if there is one."""
        if self._somebody_comes:
            return False
        first_ends = bool(self.queue)
        return LookRounds.hold(look, applied, self.hosts[0], self._rounds, first_ends)

    def _draw_ahead(self, look: LookPrefetch) -> None:
        """Queue what will be drawn from blocks behind them, and the forward about it behind
        that."""
        drawn = DrawnAhead.guess(look)
        if drawn is None or not drawn.apply(self.rules, look) or drawn.applied is None:
            return
        look.drawn = drawn
        self.clock.mark("rules", drawn.applied.device)
        if drawn.applied.type is Tokens:
            judging = JudgeDrawn.after(look, drawn, self.hosts[0])
            if judging is not None and self._begin(judging, drawn.applied):
                drawn.judging = judging

    def _begin(self, prefetched: Prefetch, applied: Source) -> bool:
        """Begin a forward ahead, if it can."""
        host = prefetched.host
        batch = prefetched.batch(applied)
        if not prefetched.prepare(batch):
            if not host.runner.is_warm:
                self.watch.unusual()
            return False
        prefetched.begin()
        parts = prefetched.reading
        for part in parts:
            host.memos[part.one.lane].forget()  # as in any forward
        rows = sum(part.plan.length - part.start for part in parts)
        logits_RV = self._timed_forward(host, batch, prefetched.drafting, reading=rows)
        if more := prefetched.follow(logits_RV):
            self.clock.forwards += more
            self.watch.wrote(1 + more)
        for part in parts:
            host.memos[part.one.lane].ran(part.plan, part.start)
        return True

    def _foresee(
        self, served: list[Running], applied: Source, alone: bool, in_step: bool
    ) -> Prefetch | None:
        if applied.type not in (Tokens, Verdict):
            return foresee(served, applied, alone, in_step)
        target = self.hosts[0]
        if not alone or not hides_host(target):
            return None
        if applied.type is Tokens:
            return foresee_judging(served, target)
        copying = CopyPrefetch.guess(served, target)
        if copying is not None:
            return copying
        if self._drafted is not None:
            return DraftPrefetch.guess(served, self._drafted)
        return LookPrefetch.guess(served, self._looked)

    def _read_beside(self, prefetched: Prefetch) -> bool:
        """Have the others read in a forward that begins ahead, if that is what they wait for."""
        if not isinstance(prefetched, TokenPrefetch):
            return False
        parts = Turn(prefetched.host, self.running).beside(prefetched.running)
        return parts is not None and prefetched.read_beside(parts)

    def _forward(self, served: list[Running]) -> Sequence[object]:
        """Run one model once for all who ask it, and turn what they read into laws."""
        host = host_of(served[0])
        logits_RV = self._run_parts(host)
        whole = [part.one for part in self._parts if part.is_whole]
        if len(whole) == len(served):
            drawn = self._draw_at_once(served, logits_RV)
            if drawn is not None:
                self._go_on(served, drawn)
                return drawn
        if len(whole) < len(served):
            reads = [part.plan.read_count for part in self._parts]
            asked = np.repeat([part.is_whole for part in self._parts], reads)
            logits_RV = logits_RV[to_device(asked.nonzero()[0], torch.long, logits_RV.device)]
        answers = dict(zip(whole, self._answers(whole, logits_RV), strict=True))
        return [answers.get(one, NotYet()) for one in served]

    def _go_on(self, served: list[Running], verdicts: Sequence[object]) -> None:
        """Draft and judge on by the model itself, where all who run do nothing else."""
        if len(served) < len(self.running) or self._prefetched is not None or self.stop:
            return
        began = time.perf_counter()
        try:
            rounds = Rounds.after(served, verdicts)
            if rounds is None:
                return
            self.clock.mark("host", rounds.host.device)
            rounds.make(self.stop, first_ends=bool(self.queue))
        except (MemoryError, RuntimeError) as error:  # what was decided stays decided
            log.warning("rounds behind a verdict failed: %r", error)
            return
        self.clock.mark("forward", rounds.host.device)
        self.clock.forward += time.perf_counter() - began
        self.clock.forwards += rounds.forwards
        self._gone_on = rounds

    def _run_parts(self, host: Host) -> Tensor:
        parts = self._parts
        memos = [host.memos[part.one.lane] for part in parts]
        batch = host.batch([(part.one.lane, part.plan, part.start) for part in parts])
        for memo in memos:
            memo.forget()  # should the forward fail half-way, what the slots hold is unknown
        self._drop_prefetched()
        drafting = question_of(parts[0].one).drafting
        reading = sum(n for n, part in zip(batch.row_counts, parts) if part.is_prompt)
        logits_RV = self._timed_forward(host, batch, drafting, reading)
        for memo, part in zip(memos, parts):
            memo.ran(part.plan, part.start)
        return logits_RV

    def _write(self, served: list[Running]) -> Sequence[object]:
        """Let one model write on for all who ask for so many tokens."""
        host = host_of(served[0])
        logits_BV = self._run_parts(host)
        began = time.perf_counter()
        asked = [continuation_of(one) for one in served]
        lanes = [one.lane for one in served]
        writer = writer_of(host)
        written = writer.begin(asked, lanes, logits_BV)
        if written is None:
            return self._answers(served, logits_BV)
        self.clock.mark("forward", host.device)
        self.clock.forward += time.perf_counter() - began
        self.clock.forwards += writer.wrote - 1
        if asked[0].drafting:
            self.watch.wrote(writer.wrote)
            return self._hand_over_drafts(served, written)
        texts = self._arrived_texts(served, written)
        self.watch.wrote_text(writer.wrote)
        pairs = zip(asked, texts, strict=True)
        return [NoOutcome(one.seq) if -1 in text.tokens else text for one, text in pairs]

    def _hand_over_drafts(self, served: list[Running], written: WrittenBatch) -> list[Written]:
        """Give each its draft. The forward that judges them begins before they arrive."""
        self._try_to_prefetch(served, written)
        drafts = self._arrived_texts(served, written)
        if self._prefetched is not None:
            self._prefetched.learn(drafts)
        drafts = [up_to_missing(draft) for draft in drafts]
        asked = [continuation_of(one) for one in served]
        tokens = [draft.tokens for draft in drafts]
        for one, draft, own in zip(served, asked, tokens):
            one.note_draft(draft, own)
        self._drafted = Drafted(served, asked, tokens, written.tokens_Bk)
        return drafts

    def _arrived_texts(self, served: list[Running], written: WrittenBatch) -> list[Written]:
        began = time.perf_counter()
        asked = [continuation_of(one) for one in served]
        lanes = [one.lane for one in served]
        texts = writer_of(host_of(served[0])).finish(asked, lanes, written)
        self.clock.forward += time.perf_counter() - began
        return texts

    def _finish_prefetched(self, served: list[Running]) -> Sequence[object]:
        """Answer those whose forward has begun already."""
        prefetched = self._prefetched
        assert prefetched is not None
        self._prefetched = None
        host = prefetched.host
        self.clock.mark("host", host.device)  # the time that the device waited, if it did
        for one in served:
            prefetched.ran(one)
        if isinstance(prefetched, DraftPrefetch):
            return self._hand_over_drafts(served, prefetched.written_for(served))
        logits_RV = prefetched.logits_of(served)
        if isinstance(prefetched, LookPrefetch):
            self._drawn = prefetched.drawn
        drawn = self._draw_at_once(served, logits_RV, in_step=True)
        return self._answers(served, logits_RV) if drawn is None else drawn

    def _draw_at_once(
        self, served: list[Running], logits_RV: Tensor, in_step: bool = False
    ) -> Sequence[object] | None:
        """Draw from what a forward has read, where that is all that anybody wants of it; else None.
        `in_step`: the forward began ahead."""
        if in_step or self.rules.runs_plainly(logits_RV.device):
            drawn = self._draw_next_tokens(served, logits_RV, in_step)
            if drawn is not None:
                return drawn
        if not all(map(wants_only_draw, served)):
            return None
        began = time.perf_counter()
        draws: list[Draw[Any]] = []
        first = 0
        for one in served:
            question = question_of(one)
            rows = question.plan.read_count
            laws = PendingLaws.of(logits_RV, first, rows, one.seq.history.sampling)
            draw = drawn_from(question, [laws])
            if not isinstance(draw, Draw):
                return None  # who fails, fails alone
            draws.append(draw)
            one.last_question = question
            first += rows
        answers = self._decide(served, draws, began, in_step=in_step)
        count_failed(served, answers)
        return answers

    def _draw_next_tokens(
        self, served: list[Running], logits_RV: Tensor, in_step: bool = False
    ) -> Sequence[object] | None:
        """Draw at once what nearly all ask for, a token each. None if somebody asks for more, or a
        draw would be the first of its kind. `in_step`: the forward began ahead."""
        if not all(map(asks_for_token, served)):
            return None
        began = time.perf_counter()
        seqs = [one.seq for one in served]
        logits = next_token_logits(logits_RV, [(seq.history, seq.known) for seq in seqs])
        applied = None if logits is None else self.rules.draw_tokens(TokenDraws(seqs, logits))
        self.clock.rules += time.perf_counter() - began
        if applied is None:
            return None
        for one in served:
            one.last_question = question_of(one)
        self.watch.drawing()
        answers: list[object] = [None] * len(served)
        self._arrive(served, answers, [(range(len(served)), applied)], in_step)
        count_failed(served, answers)
        return answers

    def _timed_forward(
        self, host: Host, batch: Batch, drafting: bool = False, reading: int = 0
    ) -> Tensor:
        began = time.perf_counter()
        self.watch.forward(host.costs, batch.row_counts, batch.read_counts, drafting)
        self.watch.rows(host.pace, len(batch.slots), reading)
        logits_RV = host.runner.forward(batch, lambda: self.clock.mark("host", batch.device))
        if not host.runner.is_warm:
            self.watch.unusual()
        self.clock.mark("forward", batch.device)
        self.clock.forward += time.perf_counter() - began
        self.clock.forwards += 1
        host.work.add(batch)
        return host.remove_impossible(logits_RV)

    def _answers(self, served: list[Running], logits_RV: Tensor) -> Sequence[object]:
        """The laws of what was read, for each sequence branch by branch."""
        began = time.perf_counter()
        questions = [question_of(one) for one in served]
        chains = [chain for question in questions for chain in question.chains]
        edited = edited_logits(logits_RV, chains)
        if edited.masks_RW is not None:
            self.clock.masks += time.perf_counter() - began
        own = MaskedLogits(logits_RV)
        if any(question.with_model_law for question in questions):
            own = own_logits(logits_RV, chains, edited)
        answers: list[object] = []
        first = 0
        for one, question in zip(served, questions):
            one.note_question(question, looks=host_of(one).looks_into is not None)
            answer: list[Tensor | BlankLaws] = []
            begin = first
            logprobs = question.seq.logprobs.wanted and not question.drafting
            for chain in question.chains:
                rows = len(chain.prefixes)
                law = PendingLaws.of(edited, first, rows, chain.history.sampling)
                if logprobs:
                    branch = len(answer)
                    logits = logits_RV[first : first + rows]
                    keep_for_logprobs(question, branch, logits, law)
                if question.with_model_law:
                    answer.append(BlankLaws(law, PendingLaws.of(own, first, rows, None)))
                else:
                    answer.append(law)
                first += rows
            if question.seq.recorder is not None:
                show_to_recorder(question, logits_RV[begin:first], answer)
            drawn = drawn_from(question, answer)
            if question.features:
                rows = question.plan.stored
                answer.append(host_of(one).features(one.lane, rows, question.features))
            answers.append(answer if drawn is None else drawn)
        self.clock.rules += time.perf_counter() - began
        return answers


def asks_for_token(one: Running) -> bool:
    """Does it wait for the next token of a text, and for nothing else that a forward can tell?"""
    seq = one.seq
    alone = seq.recorder is None and not seq.logprobs.wanted
    return alone and isinstance(one.waits_for, NextToken) and one.waits_for.reads_text


def count_failed(served: Sequence[Running], answers: Sequence[object]) -> None:
    """Count the forward of those whose draw failed. That of others counts when they go on."""
    for one, answer in zip(served, answers):
        if isinstance(answer, Exception):
            one.count_answered()


def wants_only_draw(one: Running) -> bool:
    """Does it wait for what a rule says of laws, which nothing but its sampling parameters shapes
    and nobody else looks at?"""
    seq = one.seq
    seen = seq.recorder is not None or seq.logprobs.wanted or seq.history.edits_logits
    asked = one.waits_for
    if seen or not isinstance(asked, Question) or asked.then is None:
        return False
    return not (asked.drafting or asked.with_model_law or asked.features)


def looks_in_vain(one: Running) -> bool:
    """Does it ask a drafter about hidden states that the target's slots do not hold?"""
    if not isinstance(one.waits_for, Question):
        return False
    target = host_of(one).looks_into
    context = one.seq.text[: one.waits_for.plan.stored]
    return target is not None and not target.memos[one.lane].holds_text(context)


def check_coroutine(started: object) -> None:
    """Refuse a method that is no `async` function."""
    if not isinstance(started, Coroutine):
        raise NotAble(f"a method must be an async function; this one returned {started!r}.")


def drawn_from(
    question: Question, laws: Sequence[Tensor | BlankLaws]
) -> Draw[Any] | Exception | None:
    """What a question has drawn from its laws, if anything, or what stands in the way of that."""
    if question.then is None:
        return None
    try:
        return question.then(joined(laws))
    except Exception as error:
        return error


def joined(laws: Sequence[Tensor | BlankLaws]) -> Tensor:
    """The laws of all branches in one."""
    if any(isinstance(law, BlankLaws) for law in laws):
        raise NotAble("a draw that follows a question gets laws, not those of the model, too.")
    tensors = cast("Sequence[Tensor]", laws)
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def keep_for_logprobs(question: Question, branch: int, logits_NV: Tensor, law_NV: Tensor) -> None:
    """Keep what one branch of a question read."""
    positions = question.positions[branch]
    question.seq.logprobs.answered(branch, positions, logits_NV, made(law_NV))


def show_to_recorder(
    question: Question, logits_RV: Tensor, answer: Sequence[Tensor | BlankLaws]
) -> None:
    """Show what a forward gave to the request's trace, if it wants to know."""
    recorder = question.seq.recorder
    if recorder is None:
        return
    laws = [made(one.law if isinstance(one, BlankLaws) else one) for one in answer]
    logits = logits_RV.split([chain.rows for chain in question.chains])
    chains = [chain.tokens for chain in question.chains]
    pairs = list(zip(logits, laws))
    recorder.answered(chains, question.positions, pairs, question.drafting)


def by_kind(draws: Sequence[Draw[Any]], indices: Sequence[int]) -> list[list[int]]:
    """Those of these draws that share a rule, by index; those with and without an argument
    apart."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i in indices:
        draw = draws[i]
        kind = (draw.rule, *(argument is None for argument in draw.arguments))
        kinds.setdefault(kind, []).append(i)
    return list(kinds.values())


def draw_of(one: Running) -> Draw[Any]:
    assert isinstance(one.waits_for, Draw)
    return one.waits_for


def chain_of(one: Running) -> Sequence[int]:
    """The chain that a sequence's last law was given."""
    asked = one.last_question
    if asked is None or isinstance(asked, NextToken):
        return ()
    chain = asked.chains[0]
    return chain.tokens[: max(chain.prefixes, default=0)] if len(chain.tokens) else ()


def question_of(one: Running) -> Question:
    assert isinstance(one.waits_for, Question)
    return one.waits_for


def continuation_of(one: Running) -> Continuation:
    assert isinstance(one.waits_for, Continuation)
    return one.waits_for


def up_to_missing(draft: Written) -> Written:
    """A draft up to where its model's law had no mass, if it had none somewhere."""
    if -1 not in draft.tokens:
        return draft
    count = draft.tokens.index(-1)
    return Written(draft.tokens[:count], draft.laws[:count])


def next_to_write(parts: Sequence[Part]) -> list[Running]:
    """Those who want a model to write on, as the first of them does. Plain text is written on only
    if nobody waits for less."""
    served = [part.one for part in parts if part.is_whole]
    asked = [(one, one.waits_for) for one in served if isinstance(one.waits_for, Continuation)]
    kinds = [(wanted.drafting, wanted.tokens, wanted.temperature) for _, wanted in asked]
    writing = [one for (one, _), kind in zip(asked, kinds) if kind == kinds[0]]
    plain = bool(kinds) and not kinds[0][0]
    return [] if plain and len(writing) < len(parts) else writing


def host_of(one: Running) -> Host:
    """The model that a sequence waits for."""
    host = question_of(one).host
    assert isinstance(host, Host)
    return host
