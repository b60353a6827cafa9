"""The engine's loop: methods wait, the engine serves the cheapest thing that is wanted, batched over all who want it.

A request's life: `submit` queues it; `step` gives it a lane and starts its method, a coroutine for one sequence; each time that
coroutine awaits, it hands over a `Draw` (a rule on laws) or an `Ask` (a plan for one model); `step` answers all requests of the
cheapest kind at once and lets them go on, until the method returns and its lane is free again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.core import EVERYTHING, Canvas, Draw, Frame, Placement, Scope, Tail
from forerun.engine.ahead import Ahead
from forerun.engine.cache import Memo
from forerun.engine.graphs import Runner
from forerun.engine.pack import Batch, stack
from forerun.errors import ForerunError, NotAble
from forerun.noise import Noise
from forerun.rows import Plan
from forerun.sampling import Chain, laws
from forerun.transfer import Coming


class NoOutcome(ForerunError):
    """A law without mass."""

    def __init__(self) -> None:
        super().__init__(
            "no token is possible here: the sampling parameters forbid all of them, or the model's logits are not numbers."
        )


class Backbone(Protocol):
    """A network that runs rows."""

    vocab: int
    context: int
    cost: float  # of one forward, in any unit: cheaper models are served first
    device: torch.device

    def bytes_per_lane(self, context: int) -> int: ...

    def make_slots(self, lanes: int, context: int) -> Any: ...

    def forward(self, batch: Batch, slots: Any) -> Tensor:
        """Logits [R, V] of the rows that are read."""


@dataclass
class Work:
    """What a model was made to do: rows run, (row, slot) pairs looked at, slots read, forwards."""

    rows: int = 0
    pairs: int = 0
    slots: int = 0
    forwards: int = 0

    def add(self, batch: Batch) -> None:
        self.forwards += 1
        for segment in batch.segments:
            self.rows += segment.rows
            self.pairs += segment.rows * segment.end
            self.slots += segment.end


class Host:
    """A backbone with its slots: one lane per sequence that is being decoded, `room` slots each. Tokens that are `never` a
    possible outcome (a mask) have no probability, whoever asks."""

    def __init__(self, backbone: Backbone, lanes: int, room: int, never: Sequence[int] = (), graphs: bool | None = None):
        self.backbone, self.room = backbone, room
        self.never = [token for token in never if token < backbone.vocab]
        self.slots = backbone.make_slots(lanes, room)
        self.runner = Runner(backbone, self.slots, graphs)
        self.memos = [Memo(room) for _ in range(lanes)]
        self.shelf: dict[str, Any] = {}
        self.work = Work()


@dataclass
class Ask:
    """A request to the engine: run a plan on a model and answer with the laws of what it reads."""

    host: Host
    plan: Plan
    chains: Sequence[Chain]  # for each branch that is read, what its rows stand for
    positions: Sequence[Sequence[int]]  # for each branch, the blanks that its laws are of
    seq: Canvas
    drafting: bool
    plain: bool = False  # answer with the model's own laws too, before any sampling parameter

    def __await__(self) -> Generator[Ask, Any, Any]:
        return (yield self)


@dataclass(frozen=True)
class Branch:
    """Rows that are read together: each knows so many tokens of a chain. Without positions they are of the blanks after those, and
    every row knows one token more than the one before it."""

    chain: Sequence[int]
    prefixes: Sequence[int]
    positions: Sequence[int] | None = None


class Questions:
    """The questions that one sequence may ask one model: its family makes the plan, the engine answers it."""

    def __init__(self, family: Any, host: Host, drafting: bool = False):
        self.family, self.host, self.drafting = family, host, drafting
        self.shelf = host.shelf
        self.block, self.row_before = getattr(family, "block", 1), getattr(family, "shifted", False)

    async def conditionals(self, seq: Canvas, *chains: Sequence[int]) -> list[Tensor]:
        chains = chains or ((),)
        plan = self.family.conditionals(seq, chains)
        return await self._ask(seq, plan, [Branch(c, range(len(read))) for c, read in zip(chains, plan.reads, strict=True)])

    async def following(self, seq: Canvas, chain: Sequence[int] = ()) -> Tensor:
        plan = self.family.conditionals(seq, [chain], last_only=True)
        [law_1V] = await self._ask(seq, plan, [Branch(chain, [len(chain)])])
        return law_1V[0]

    async def branches(self, seq: Canvas, chain: Sequence[int], tails: Sequence[Tail]) -> list[Tensor]:
        plan = self.family.branches(seq, chain, tails)
        branches = [Branch(chain, range(len(chain) + 1))]
        for depart, tokens in tails:
            whole = [*chain[:depart], *tokens]
            branches.append(Branch(whole, range(depart + 1, len(whole) + 1)))
        return await self._ask(seq, plan, branches)

    async def marginals(self, seq: Canvas, positions: Sequence[int]) -> Tensor:
        plan = self.family.marginals(seq, positions)
        [law_NV] = await self._ask(seq, plan, [Branch((), [0] * len(positions), positions)])
        return law_NV

    async def outlook(self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]) -> list[Tensor]:
        plan = self.family.outlook(seq, chain, k, prefixes)
        verdict, *ahead = plan.reads
        branches = [Branch(chain, range(len(verdict))), *(Branch(chain, [n] * len(r), ()) for n, r in zip(prefixes, ahead))]
        return await self._ask(seq, plan, branches)

    async def canvases(
        self, seq: Canvas, positions: Sequence[Sequence[int]], placed: Sequence[Placement], scope: Scope = EVERYTHING
    ) -> list[tuple[Tensor, Tensor]]:
        return await self._filled(seq, self.family.canvases(seq, positions, placed, scope), positions, placed)

    async def blocks(
        self, seq: Canvas, positions: Sequence[Sequence[int]], placed: Sequence[Placement], frame: Frame
    ) -> list[tuple[Tensor, Tensor]]:
        return await self._filled(seq, self.family.blocks(seq, positions, placed, frame), positions, placed)

    async def verdict(self, seq: Canvas, chain: Sequence[int], frame: Frame) -> Tensor:
        at = range(seq.first_blank, seq.first_blank + len(chain))
        [law_NV] = await self._ask(seq, self.family.verdict(seq, chain, frame), [Branch(chain, range(len(chain)), at)])
        return law_NV

    def _filled(self, seq: Canvas, plan: Plan, positions: Sequence[Sequence[int]], placed: Sequence[Placement]) -> Ask:
        """A question about some canvases: each has tokens placed on it, and its laws are of some of its positions."""
        branches = [Branch([t for _, t in done], [len(done)] * len(at), at) for at, done in zip(positions, placed, strict=True)]
        return self._ask(seq, plan, branches, plain=True)

    def _ask(self, seq: Canvas, plan: Plan, branches: Sequence[Branch], plain: bool = False) -> Ask:
        chains, positions = [], []
        for branch in branches:
            at: Any = branch.positions
            if at is None:  # the blanks right after what each row knows
                first = seq.filled + branch.prefixes[0] if len(branch.prefixes) else 0
                at = seq.blanks[first : first + len(branch.prefixes)]
            ordinals = None if branch.positions is None or not len(at) else np.searchsorted(seq.blanks, at).tolist()
            chains.append(Chain(seq.history, branch.chain, branch.prefixes, ordinals))
            positions.append(at)
        return Ask(self.host, plan, chains, positions, seq, self.drafting, plain)


@dataclass(eq=False)
class Ticket:
    """A request inside the engine. `on_change` is called whenever its sequence has grown or ended."""

    seq: Canvas
    start: Callable[[], Coroutine[Any, Any, None]]
    on_change: Callable[[], None] = lambda: None
    lane: int | None = None
    coroutine: Coroutine[Any, Any, None] | None = None
    waits_for: Draw | Ask | None = None
    asked: Ask | None = None  # the last question that was answered
    error: Exception | None = None
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    ended: float | None = None

    @property
    def over(self) -> bool:
        return self.ended is not None


@dataclass
class Clock:
    """Where the engine's time went, in seconds. A GPU works on its own, while the engine already asks for the next thing: `asks` it
    for the times at which forwards and rules really began and ended there, which `settle` adds up."""

    asks: bool = False
    forward: float = 0.0
    rules: float = 0.0
    total: float = 0.0
    forwards: int = 0
    _marks: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def outside_share(self) -> float:
        """The share of all time that was not spent inside a backbone's forward."""
        return 1 - self.forward / self.total if self.total else 0.0

    def mark(self, name: str, device: torch.device) -> None:
        """What the GPU does from the last mark to here is called so."""
        if self.asks and device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            self._marks.append((name, event))

    def settle(self) -> None:
        """Put the GPU's own times in place of the host's."""
        if self._marks:
            self._marks[-1][1].synchronize()
            taken = {"forward": 0.0, "rules": 0.0, "host": 0.0}
            for (_, begin), (name, end) in pairwise(self._marks):
                taken[name] += begin.elapsed_time(end) / 1e3
            self.forward, self.rules = taken["forward"], taken["rules"]
            self._marks.clear()


class Engine:
    """Continuous batching: a fixed number of lanes, a queue, and one `step` per forward or batch of draws."""

    goes_ahead: bool | None = None  # are forwards begun before their tokens are known? None: where a device works on its own

    def __init__(
        self,
        lanes: int,
        sample: Callable[[Sequence[tuple[int, int]]], Callable[[Tensor], Tensor]] = Noise,
        graphs: bool | None = None,
    ):
        self.lanes, self.graphs = lanes, graphs
        self.hosts: list[Host] = []
        self.queue: deque[Ticket] = deque()
        self.live: list[Ticket] = []
        self.free = list(range(lanes))
        self.clock = Clock()
        self._ahead: Ahead | None = None
        self._sample = sample

    def host(self, backbone: Backbone, room: int, never: Sequence[int] = ()) -> Host:
        """Make room for a model: `room` slots in every lane."""
        self.hosts.append(Host(backbone, self.lanes, room, never, self.graphs))
        return self.hosts[-1]

    def submit(self, ticket: Ticket) -> Ticket:
        self.queue.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request now; its lane is free at once. Nothing happens if it is over already."""
        if ticket.over:
            return
        ticket.seq.finish_reason = ticket.seq.finish_reason or "cancelled"
        if ticket in self.queue:
            self.queue.remove(ticket)
        self._end(ticket)

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.live)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit who is waiting for a lane, then serve the cheapest thing wanted, to all who want it."""
        began = time.perf_counter()
        self._admit()
        draws = [t for t in self.live if isinstance(t.waits_for, Draw)]
        if draws:
            self._serve(draws, self._draw)
        elif begun := [t for t in self.live if self._ahead is not None and self._ahead.foresaw(t)]:
            self._serve(begun, self._finish)
        elif self.live:
            host = min({t.waits_for.host for t in self.live}, key=lambda h: (h.backbone.cost, self.hosts.index(h)))  # type: ignore[union-attr]
            self._serve([t for t in self.live if t.waits_for.host is host], self._forward)  # type: ignore[union-attr]
        self.clock.total += time.perf_counter() - began

    def run(self) -> None:
        """Serve until nothing is left to do."""
        while self.busy:
            self.step()

    def _serve(self, tickets: list[Ticket], answer: Callable[[list[Ticket]], list[Any]]) -> None:
        try:
            answers = answer(tickets)
        except Exception as error:
            for ticket in tickets:
                self._fail(ticket, error)
            return
        for ticket, value in zip(tickets, answers, strict=True):
            if isinstance(value, Exception):
                self._fail(ticket, value)
            else:
                self._resume(ticket, value)

    def _admit(self) -> None:
        while self.queue and self.free:
            ticket = self.queue.popleft()
            ticket.lane = self._best_lane(ticket)
            self.free.remove(ticket.lane)
            self.live.append(ticket)
            ticket.started = time.perf_counter()
            try:
                ticket.coroutine = ticket.start()
            except Exception as error:
                self._fail(ticket, error)
            else:
                self._resume(ticket, None)

    def _best_lane(self, ticket: Ticket) -> int:
        """The free lane whose slots, of all models together, hold the longest part of this text already."""

        def held(lane: int) -> int:
            return sum(host.memos[lane].common_prefix(ticket.seq.text) for host in self.hosts)

        return max(self.free, key=lambda lane: (held(lane), -lane))

    def _resume(self, ticket: Ticket, answer: Any) -> None:
        """Let one method go on until it waits again or returns. What goes wrong in it is its own affair."""
        known, coroutine = ticket.seq.known, ticket.coroutine
        assert coroutine is not None
        try:
            ticket.waits_for = _servable(coroutine.send(answer))
        except StopIteration:
            self._end(ticket)
        except Exception as error:
            self._fail(ticket, error)
        else:
            if ticket.seq.known != known:
                ticket.on_change()

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        ticket.error, ticket.seq.finish_reason = error, "error"
        self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        if ticket.coroutine is not None:
            ticket.coroutine.close()
        if ticket.lane is not None:
            self.live.remove(ticket)
            self.free.append(ticket.lane)
            self.free.sort()
        if not self.live:
            self._ahead = None
        ticket.waits_for, ticket.asked, ticket.coroutine, ticket.ended = None, None, None, time.perf_counter()
        ticket.seq.laws.clear()
        ticket.on_change()

    def _draw(self, tickets: list[Ticket]) -> list[Any]:
        """Answer all draws, one batch per kind of rule, with a single transfer from the device at the end."""
        began, self._ahead = time.perf_counter(), None
        kinds: dict[Any, list[int]] = {}
        for i, ticket in enumerate(tickets):
            wanted: Draw = ticket.waits_for  # type: ignore[assignment]
            kinds.setdefault((wanted.rule, *(a is None for a in wanted.args)), []).append(i)
        answers: list[Any] = [None] * len(tickets)
        outcomes: list[tuple[list[int], Tensor]] = []
        for members in kinds.values():
            try:
                outcomes.append((members, self._apply([tickets[i].waits_for for i in members])))  # type: ignore[misc]
            except Exception as error:  # a rule that fails takes with it only those who use it
                for i in members:
                    answers[i] = error
        coming = [Coming(outcome) for _, outcome in outcomes]
        self.clock.rules += time.perf_counter() - began
        ahead = self._go_ahead(tickets, outcomes[0][1]) if len(kinds) == len(outcomes) == 1 else None
        began = time.perf_counter()
        for (members, _), numbers in zip(outcomes, coming):
            rows = numbers.there()
            for i, row in zip(members, rows, strict=True):
                answers[i] = NoOutcome() if min(row) < 0 else row
            if ahead is not None:
                ahead.learn([token for [token] in rows])
        for ticket in tickets:
            ticket.seq.draws += 1
        self.clock.rules += time.perf_counter() - began
        return answers

    def _go_ahead(self, tickets: list[Ticket], outcome: Tensor) -> Ahead | None:
        """Begin the forward that all will ask for when they know what they drew, if there is one; nobody may be left out, or
        batches would fall apart."""
        on_its_own = outcome.device.type == "cuda" if self.goes_ahead is None else self.goes_ahead
        could_be_tokens = outcome.shape[1] == 1 and not outcome.is_floating_point()
        ahead = Ahead.guess(tickets) if on_its_own and could_be_tokens and len(tickets) == len(self.live) else None
        if ahead is not None:
            ahead.logits_RV = self._timed_forward(ahead.host, ahead.batch(outcome[:, 0]))
        self._ahead = ahead
        return ahead

    def _apply(self, wants: list[Draw]) -> Tensor:
        """One rule for all who want it: [members, outcomes of the rule]."""
        # A drafter that counts instead of computing makes its laws on the CPU: the model's device is where the rule runs.
        devices = [a.device for want in wants for a in want.args if isinstance(a, Tensor)]
        device = next((d for d in devices if d.type != "cpu"), devices[0])
        sample = self._sample([(w.seq.noise_key, w.seq.draws) for w in wants])
        columns = wants[0].rule(*(stack(column, device) for column in zip(*(w.args for w in wants))), sample)
        outcome = torch.stack(columns, -1)
        self.clock.mark("rules", device)
        return outcome

    def _forward(self, tickets: list[Ticket]) -> list[Any]:
        """Run one model once for all who ask it, and turn what they read into laws."""
        asks: list[Ask] = [t.waits_for for t in tickets]  # type: ignore[misc]
        host = asks[0].host
        memos = [host.memos[t.lane] for t in tickets]  # type: ignore[index]
        starts = [memo.start(ask.plan) for memo, ask in zip(memos, asks)]
        work = [(t.lane, ask.plan, start) for t, ask, start in zip(tickets, asks, starts)]
        batch = Batch(work, host.room, host.backbone.device)  # type: ignore[arg-type]
        for memo in memos:
            memo.forget()  # should the forward fail half-way, what the slots hold is unknown
        self._ahead = None
        logits_RV = self._timed_forward(host, batch)
        for memo, ask, start in zip(memos, asks, starts):
            memo.ran(ask.plan, start)
        return self._answers(tickets, logits_RV)

    def _finish(self, tickets: list[Ticket]) -> list[Any]:
        """Answer those whose forward was begun already."""
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        self.clock.mark("host", ahead.host.backbone.device)  # what the device waited for, should it have
        for ticket in tickets:
            plan = ahead.plans[ticket]
            ahead.host.memos[ticket.lane].ran(plan, plan.stored - 1)  # type: ignore[index]
        return self._answers(tickets, ahead.logits_of(tickets))

    def _timed_forward(self, host: Host, batch: Batch) -> Tensor:
        began = time.perf_counter()
        logits_RV = host.runner.forward(batch, lambda: self.clock.mark("host", batch.device))
        self.clock.mark("forward", batch.device)
        self.clock.forward += time.perf_counter() - began
        self.clock.forwards += 1
        host.work.add(batch)
        for token in host.never:
            logits_RV[:, token] = -torch.inf
        return logits_RV

    def _answers(self, tickets: list[Ticket], logits_RV: Tensor) -> list[list[Any]]:
        """What was read, as laws."""
        began = time.perf_counter()
        asks: list[Ask] = [t.waits_for for t in tickets]  # type: ignore[misc]
        chains = [chain for ask in asks for chain in ask.chains]
        rows = [chain.rows for chain in chains]
        laws_RV = laws(logits_RV, chains)
        parts, logits = iter(laws_RV.split(rows)), iter(logits_RV.split(rows))
        answers: list[list[Any]] = []
        for ticket, ask in zip(tickets, asks):
            ticket.asked = ask
            own_laws = [next(parts) for _ in ask.chains]
            own_logits = [next(logits) for _ in ask.chains]
            if ask.drafting:
                ask.seq.draft_forwards += 1
            else:
                ask.seq.forwards += 1
                self._keep_for_logprobs(ask, own_logits, own_laws)
            answers.append(
                [(law, raw.to(law.dtype).softmax(-1)) for law, raw in zip(own_laws, own_logits)] if ask.plain else own_laws
            )
        self.clock.rules += time.perf_counter() - began
        return answers

    @staticmethod
    def _keep_for_logprobs(ask: Ask, logits: Sequence[Tensor], laws: Sequence[Tensor]) -> None:
        if ask.seq.history.sampling.logprobs is not None:
            for branch, (own, law, at) in enumerate(zip(logits, laws, ask.positions)):
                ask.seq.laws.update({(branch, int(p)): (own[i], law[i]) for i, p in enumerate(at)})


def _servable(wanted: Any) -> Draw | Ask:
    """What a method awaits, if the engine can serve it."""
    if isinstance(wanted, Ask) and wanted.plan.rows.shape[1] > wanted.host.room:
        raise NotAble(f"a plan of {wanted.plan.rows.shape[1]} rows does not fit into the {wanted.host.room} slots of a lane.")
    if not isinstance(wanted, Draw | Ask):
        raise NotAble(f"a method may await a model's questions and seq.draw, not {wanted!r}.")
    return wanted
