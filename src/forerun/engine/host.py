"""A model inside the engine: its backbone, its slots, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.engine.backbone import (
    Backbone,
    Forwards,
    LikeliestText,
    RoundsAsked,
    RoundsMade,
    SlottedBackbone,
    WrittenText,
)
from forerun.engine.cache import Memo
from forerun.engine.choosing import Account, BatchChooser
from forerun.engine.company import Company
from forerun.engine.costs import (
    ROWS,
    FixedCosts,
    StepCosts,
    identity,
    load_curve,
    measure,
    save_curve,
)
from forerun.engine.graphs import ForwardRunner
from forerun.engine.pace import Pace, several_processes
from forerun.engine.pack import Batch, NextRows
from forerun.engine.pages import PagePool, PageShape, pages_for
from forerun.errors import NotAble
from forerun.probability.transfer import to_device
from forerun.sequence.canvas import Canvas
from forerun.sequence.rows import PlainText, Plan


@dataclass
class Work:
    """What a model was made to do: rows run, (row, slot) pairs looked at, slots read, forwards."""

    rows: int = 0
    pairs: int = 0
    slots: int = 0
    forwards: int = 0

    def add(self, batch: Batch) -> None:
        self.forwards += 1
        self.rows += sum(batch.row_counts)
        self.pairs += sum(map(mul, batch.row_counts, batch.slot_counts))
        self.slots += sum(batch.slot_counts)

    def add_forwards(self, made: Forwards) -> None:
        self.forwards += made.total
        self.rows += made.rows
        self.pairs += made.pairs
        self.slots += made.slots


class Writer(Protocol):
    """Writes on with a model, several tokens in one launch."""

    @property
    def at_once(self) -> int: ...

    def can_write(self, end: int, tokens: int) -> bool: ...

    def has_written(self, sequences: int) -> bool: ...

    def forget(self) -> None: ...


class Host:
    """A backbone with its slots: one lane per sequence that is being decoded, `room` slots each.

    Tokens that are never a possible outcome (a mask) have no probability, whoever asks.
    """

    def __init__(
        self,
        backbone: Backbone,
        lanes: int,
        room: int,
        impossible_tokens: Sequence[int] = (),
        graphs: bool | None = None,
        pages: PageShape | None = None,
    ):
        self.backbone = backbone
        self.room = room
        self.impossible_tokens = [token for token in impossible_tokens if token < backbone.vocab]
        self.slots = backbone.make_slots(lanes, room, pages)
        self.runner = ForwardRunner(backbone, self.slots, graphs)
        on_cpu = backbone.device.type == "cpu"
        self.pool = PagePool(self.slots.table, self.slots.copy, copies=on_cpu)
        self.memos = [Memo(room, self.pool, lane) for lane in range(lanes)]
        self.shared_state: dict[str, Any] = {}
        self.work = Work()
        self.writer: Writer | None = None  # where the engine has one
        given = getattr(backbone, "step_costs", None)
        self.costs = FixedCosts(given) if given else StepCosts(backbone.device.type)
        self.pace = Pace(self.costs)
        self.company = Company()
        self.account = Account()
        self._tried_costs = False  # by this process, not read from a file
        self.looks_into: Host | None = None  # the model whose hidden states this one reads
        self._asked_features: tuple[int, ...] = ()

    @cached_property
    def most_rows(self) -> int:
        """That a plan may have: those of a lane, and of all pages."""
        return min(self.room, self.slots.table.scratch_slot)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def rows_are_cheap(self) -> bool:
        """Do more rows in one forward cost little more time, as on a GPU?"""
        return self.costs.rows_are_cheap

    def chooser(self, seq: Canvas, learns: bool) -> BatchChooser:
        """Whoever says which drafts pay for a sequence."""
        company = self.company if self.costs.shared else Company()
        account = self.account
        if not learns:
            account = Account(tried=account.tried, made=account.made, missed=account.missed)
        return BatchChooser(seq, self.costs, company, account)

    def know_costs(self, lane: int) -> None:
        """Find out what a forward costs, if nobody knows: from a file, or by trying in a lane that
        is free. What was kept from a busier time is tried again, once. Processes that share a model
        must all decide alike, so they never know."""
        outdated = self.costs.is_outdated and not self._tried_costs
        if several_processes() or (self.costs.known and not outdated):
            return
        about = identity(self.backbone)
        if not outdated:
            self.costs.curve = load_curve(about)
        if self.costs.known and not outdated:
            return
        most = min(self.room, self.backbone.context, ROWS[-1])
        self.pool.wake(lane)
        self.memos[lane].release()
        if not self.pool.ensure(pages_for(most, self.pool.size)):
            return
        curve = measure(lambda rows: self._try(lane, rows), most, self.device.type)
        self._tried_costs = True
        self.memos[lane].release()
        self.costs.learn_anew(curve)
        save_curve(about, curve)

    def _try(self, lane: int, rows: int) -> None:
        """Run a forward of so many rows, and wait for it."""
        plan = PlainText.of(np.zeros(rows, np.int32), 0)
        self.runner.forward(self.batch([(lane, plan, 0)]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def batch(self, work: Sequence[tuple[int, Plan, int]], ahead: int = 0) -> Batch:
        """The rows that must run: (lane, plan, first row of the plan that runs). Their slots are
        made the lanes' own; so are those that they need `ahead` positions on."""
        self.claim([(lane, start, plan.length) for lane, plan, start in work], ahead)
        return self._with_sources(Batch(work, self.slots.table, self.device))

    def claim(self, spans: Sequence[tuple[int, int, int]], ahead: int = 0) -> None:
        """Make the slots of some rows the lanes' own, (lane, start, end); and those that they need
        `ahead` positions on."""
        for lane, start, end in spans:
            self.memos[lane].claim(start, min(end + ahead, self.room), end if ahead else start)
        self.slots.table.to_device()

    def next_rows(
        self,
        lanes: Sequence[int],
        lengths: Sequence[int],
        make_plans: Callable[[], Sequence[Plan]],
    ) -> Batch:
        """The last rows of plain texts of these lengths, one in each lane."""
        for lane, length in zip(lanes, lengths):
            memo = self.memos[lane]
            if not memo.owns(length - 1):
                memo.claim(length - 1, length)
        self.slots.table.to_device()
        return self._with_sources(
            NextRows(lanes, lengths, self.slots.table, self.device, make_plans)
        )

    def _with_sources(self, batch: Batch) -> Batch:
        """Say where the hidden states lie that rows are made of, if they are."""
        if self.looks_into is not None:
            batch.sources = self.looks_into.feature_slots(batch)
            batch.source_table = self.looks_into.slots.table
            batch.source_table.to_device()
        return batch

    def ask_features(self, layers: Sequence[int]) -> None:
        """Have forwards from now on keep the hidden states after these layers."""
        shows = isinstance(self.backbone, SlottedBackbone) and self.backbone.gives_features
        if not shows:
            raise NotAble(
                "a drafter with features needs a target that gives its hidden states: one of the "
                "Llama shape (llama, mistral, qwen2, qwen3), on one device."
            )
        new = [layer for layer in layers if layer not in self.slots.features]
        self._asked_features = (*self._asked_features, *new)

    def begin_features(self) -> bool:
        """Between two forwards: make room for what was asked for, if anything was. Rows that ran
        without it are forgotten, and so are captures that do not write it."""
        asked = self._asked_features
        self._asked_features = ()
        if not asked or not isinstance(self.backbone, SlottedBackbone):
            return False
        new = self.slots.add_features(asked, self.backbone.hidden_size)
        if new:
            self.runner.forget_captures()
            if self.writer is not None:
                self.writer.forget()
            self.forget()
        return new

    def features(self, lane: int, rows: int, layers: Sequence[int]) -> Tensor:
        """The hidden states of the first rows of a lane, after these layers, [rows, N]."""
        places = self.slots.table.places(np.array(lane), np.arange(rows))
        places_T = to_device(places, torch.long, self.device)
        return self.slots.features_at(layers, places_T)

    def feature_slots(self, batch: Batch) -> np.ndarray:
        """Where the hidden states of another model's rows lie: at the same places of the same
        lanes, for rows that are remembered."""
        table = self.slots.table
        most = table.per_lane * table.size
        kept_T = batch.for_rows([min(each.plan.stored, most) for each in batch.segments])
        within_T = np.minimum(batch.places, kept_T - 1).clip(0)
        found_T = table.places(batch.lanes, within_T)
        # A lane without so many pages has no such slots: forwards that only measure ask for them.
        is_there_T = (batch.places < kept_T) & (found_T < table.scratch_slot)
        return np.where(is_there_T, found_T, table.scratch_slot)

    def forget(self) -> None:
        """Let go of everything that slots hold, to begin cold."""
        for memo in self.memos:
            memo.release()
        self.pool.clear()

    @property
    def at_once(self) -> int:
        """Tokens of plain text that the model had best write in one launch."""
        return 1 if self.writer is None else self.writer.at_once

    @property
    def writes_any_length(self) -> bool:
        """Does a launch of fewer tokens cost as much less?"""
        return self.runner.moves_rows

    def can_write(self, end: int, tokens: int) -> bool:
        """Can the model write so many tokens by itself after a text that ends there?"""
        return self.writer is not None and self.writer.can_write(end, tokens)

    def forward_plain(self, batch: Batch) -> Tensor:
        """Logits by the forward's plain code, as captures take it."""
        return self.remove_impossible(self.backbone.forward(batch, self.slots))

    def write_likeliest(self, batch: Batch, asked: LikeliestText) -> WrittenText:
        """Have the backbone write on, where it moves rows."""
        write: Any = getattr(self.backbone, "write_likeliest")  # noqa: B009
        return write(batch, self.slots, asked)

    def go_on(self, asked: RoundsAsked, drafter: Host | None) -> RoundsMade:
        """Have the backbone draft and judge by itself, where it moves rows; with drafts of a second
        model, if one is named."""
        go_on: Any = getattr(self.backbone, "go_on")  # noqa: B009
        by = None if drafter is None else (drafter.backbone, drafter.slots)
        made: RoundsMade = go_on(self.slots, asked, by)
        self.work.add_forwards(made.forwards)
        if drafter is not None and made.drafting is not None:
            drafter.work.add_forwards(made.drafting)
        return made

    def remove_impossible(self, logits_RV: Tensor) -> Tensor:
        for token in self.impossible_tokens:
            logits_RV[:, token] = -torch.inf
        return logits_RV
