"""A model that writes on by itself: k forwards and the draws between them, in one launch.

What the next row will be is arithmetic on what was drawn: the token, one position on, in the next
slot. So a program runs the forward, draws, moves its rows on by one and begins again, without a
word from the host, which gets all tokens at the end. It is captured as forwards are, and checked
once against forwards that are run one by one. On a CPU there is nothing to capture: rows are moved
on where they lie, and what the engine does between two steps is left out.

Drafts are written so, and plain text of models so small that the host takes longer than they do.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from forerun.engine.backbone import LikeliestText
from forerun.engine.cache import Slots
from forerun.engine.flag import Flag
from forerun.engine.graphs import (
    SIZES,
    CaptureSize,
    StaticBatch,
    capture_graph,
    capturing_alone,
    check_logits,
    current_device,
    fastest_blas,
    warn_not_captured,
)
from forerun.engine.host import Host
from forerun.engine.pack import Batch, MovingRows, Tiles, round_up
from forerun.options import Sampling
from forerun.probability.acceptance import sample_token
from forerun.probability.distributions import tempered
from forerun.probability.logits import Warp, Warps, likeliest, warp_columns
from forerun.probability.noise import FixedNoise, uniforms_ahead
from forerun.probability.outcomes import Tokens
from forerun.probability.pending import PendingLaws
from forerun.probability.transfer import HostCopy, send, to_device
from forerun.sequence.question import Continuation, Written
from forerun.sequence.rows import PlainText, next_token_plan, text_and_chain

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as PoolHandle

MOST_TOKENS = 32  # in one launch
MOST_PROGRAMS = 32
# Plain text: one launch should take so long at most, or those who join would wait for it.
LAUNCH_SECONDS = 1.2e-2
LEAST_TOKENS_ON_CPU = 4  # fewer are written as fast one by one
# On a GPU a longer forward hides what the host does, if it begins before the last token is known.
LEAST_TOKENS = 32
SECONDS_PER_LAYER = 2e-5  # of a forward of few rows, as on an H200, and per parameter
SECONDS_PER_PARAMETER = 1e-12
LAUNCH_SECONDS_ON_CPU = 2.5e-2
BYTES_PER_SECOND_ON_CPU = 2e10
ASKED_BEFORE = 4  # times that a size is met before it is worth a capture
COVERED_BEFORE = 64  # the same, if a program for more sequences serves meanwhile
MUCH_LARGER = 8  # times the sequences: a program for so many is no substitute


class ProgramSize(NamedTuple):
    """What a program has room for, and what it does."""

    forward: CaptureSize
    tokens: int
    warp: Warp
    temperature: float

    def covers(self, other: ProgramSize) -> bool:
        """Does it do the same, for as many sequences at least?"""
        most_rows = MUCH_LARGER * other.forward.rows
        return self[1:] == other[1:] and self.forward.covers(other.forward, most_rows)


Example = tuple[Batch, Tiles[np.ndarray], Tensor]  # rows, and the logits before them


class Continuations:
    """Writes on with one model, where its forwards are captured. Where it can, it ends a launch of
    plain text early once `stop` is set: somebody waits for the step to end."""

    def __init__(self, host: Host, stop: Flag):
        self._host = host
        self._stop = stop
        self._programs: OrderedDict[ProgramSize, WritingProgram] = OrderedDict()
        self._pool: PoolHandle | None = None
        self._works = True
        self.wrote = 0  # tokens for each, in the last launch
        self._asked: Counter[ProgramSize] = Counter()
        self._warps = Warps()

    @property
    def at_once(self) -> int:
        """Tokens of plain text that are best written in one launch."""
        if not self._can:
            return 1
        tokens = 1
        while 2 * tokens <= min(self.forwards_in_a_launch, MOST_TOKENS):
            tokens *= 2
        on_cpu = self._host.runner.moves_rows
        return tokens if tokens >= (LEAST_TOKENS_ON_CPU if on_cpu else LEAST_TOKENS) else 1

    @property
    def _can(self) -> bool:
        runner = self._host.runner
        return self._works and (runner.capture_enabled or runner.moves_rows)

    @property
    def forwards_in_a_launch(self) -> float:
        """How many forwards take as long as a launch should."""
        backbone = self._host.backbone
        if self._host.runner.moves_rows:
            size = getattr(backbone, "read_bytes", backbone.cost * backbone.dtype.itemsize)
            return LAUNCH_SECONDS_ON_CPU * BYTES_PER_SECOND_ON_CPU / size
        layers = getattr(backbone, "layers", 1)
        return LAUNCH_SECONDS / (layers * SECONDS_PER_LAYER + backbone.cost * SECONDS_PER_PARAMETER)

    def forget(self) -> None:
        """Capture anew what is met again: a forward has something more to do."""
        self._programs.clear()
        self._pool = None  # nobody may use a pool again whose last capture is gone

    def can_write(self, end: int, tokens: int) -> bool:
        """Is there room for so many tokens after a text that ends there?"""
        host = self._host
        if not self._can:
            return False
        return tokens <= MOST_TOKENS and end + tokens <= min(host.room, host.backbone.context)

    def has_written(self, sequences: int) -> bool:
        """Is there a program for so many sequences?"""
        rows = round_up(sequences, SIZES)
        sizes = [size.forward.rows for size in self._programs]
        return self._can and any(rows <= most <= MUCH_LARGER * rows for most in sizes)

    def begin(
        self, asked: Sequence[Continuation], lanes: Sequence[int], logits_BV: Tensor
    ) -> WrittenBatch | None:
        """Have the tokens of all written, given the logits after each text. None for plain text of
        a size that is not worth a program yet."""
        tokens = max(one.tokens for one in asked)
        plans = [next_token_plan(one.plan) for one in asked]
        known = [plan for plan in plans if plan is not None]
        assert len(known) == len(plans), "a continuation begins after plain text"
        work = [(lane, p, p.stored - 1) for lane, p in zip(lanes, known)]
        batch = self._host.batch(work, ahead=tokens - 1)
        with current_device(batch.device):
            written = self._write(asked, batch, logits_BV, tokens)
        self.wrote = 0 if written is None else written.tokens_Bk.shape[1]
        return written

    def finish(
        self, asked: Sequence[Continuation], lanes: Sequence[int], written: WrittenBatch
    ) -> list[Written]:
        """What was written, as soon as it has arrived."""
        drawn = written.tokens()
        for one, lane, row in zip(asked, lanes, drawn):
            tokens_run = [max(token, 0) for token in row[:-1]]
            self._host.memos[lane].wrote(one.plan.stored, tokens_run)
        return [written.of(i, one, drawn[i]) for i, one in enumerate(asked)]

    def known_program(self, asked: Sequence[Continuation], batch: Batch) -> KnownProgram | None:
        """A program that was run before, to write as much as was `asked` for once more, in rows
        that only the device knows the places of. None where there is none."""
        assert batch.moved is not None
        tokens = asked[0].tokens
        tiles = self._host.runner.tiles(batch, ahead=tokens + batch.moved.most)
        forward = CaptureSize.of(batch, tiles)
        samplings = [one.seq.history.sampling for one in asked]
        warp, columns_4B = self._warps.of(samplings, self._host.backbone.vocab)
        if forward is None or not self._works:
            return None
        size = ProgramSize(forward, tokens, warp, asked[0].temperature)
        covering = [one for one in self._programs if one.covers(size)]
        if not covering:
            return None
        found = min(covering, key=lambda one: one.forward)
        self._programs.move_to_end(found)
        return KnownProgram(self._programs[found], batch, tiles, columns_4B)

    def _write(
        self, asked: Sequence[Continuation], batch: Batch, logits_BV: Tensor, tokens: int
    ) -> WrittenBatch | None:
        samplings = [one.seq.history.sampling for one in asked]
        if self._host.runner.moves_rows and not any(one.temperature for one in samplings):
            return self._write_likeliest(asked, batch, logits_BV)
        u_Bk = uniforms_ahead([(one.seq.noise_key, one.seq.draws) for one in asked], tokens)
        if self._host.runner.moves_rows:
            return self._move_on(asked, batch, logits_BV, u_Bk)
        tiles = self._host.runner.tiles(batch, ahead=tokens)
        forward = CaptureSize.of(batch, tiles)
        assert forward is not None, "lanes are fewer than rows of a capture"
        warp, columns_4B = self._warps.of(samplings, logits_BV.shape[1])
        size = ProgramSize(forward, tokens, warp, asked[0].temperature)
        program = self._program(size, asked[0].drafting, (batch, tiles, logits_BV))
        if program is None:
            return None
        return program.run(batch, tiles, logits_BV, columns_4B, u_Bk)

    def _program(
        self, size: ProgramSize, drafting: bool, example: Example
    ) -> WritingProgram | None:
        """The program for a size, made with an example, or for more sequences. None for plain text
        of a size that is not worth a program yet, and where programs do not work."""
        found = size
        if size not in self._programs:
            larger = [one for one in self._programs if one.covers(size)]
            self._asked[size] += 1
            before = COVERED_BEFORE if larger else 1 if drafting else ASKED_BEFORE
            if self._asked[size] >= before:
                self._make(size, *example)
                if not self._works and not drafting:
                    return None  # a wrong draft is only slower; a wrong text is wrong
            elif larger:
                found = min(larger, key=lambda one: one.forward)
            else:
                return None
        self._programs.move_to_end(found)
        return self._programs[found]

    def _write_likeliest(
        self, asked: Sequence[Continuation], batch: Batch, logits_BV: Tensor
    ) -> WrittenBatch:
        """The same where nothing is left to chance, in one call of the backbone."""
        text = LikeliestText(
            first_BV=logits_BV,
            wanted=[min(one.tokens, one.seq.remaining) for one in asked],
            ends=[one.seq.history.stop_tokens for one in asked],
            impossible=self._host.impossible_tokens,
            keeps_logits=asked[0].drafting,
            stop=None if asked[0].drafting else self._stop,
        )
        written = self._host.write_likeliest(batch, text)
        logits_BkV = written.logits_kBV.transpose(0, 1)
        return WrittenBatch(torch.from_numpy(written.tokens_kB).T, logits_BkV)

    def _move_on(
        self, asked: Sequence[Continuation], batch: Batch, logits_BV: Tensor, u_Bk: np.ndarray
    ) -> WrittenBatch:
        """The same over the host's own memory, until all have ended or somebody waits."""
        samplings = [one.seq.history.sampling for one in asked]
        writing = Writing.of(samplings, asked[0].temperature, logits_BV, u_Bk)
        rows = MovingRows(batch)
        drawn: list[list[int]] = []  # for each token, of all sequences
        logits: list[Tensor] = []
        drafting = asked[0].drafting
        for i in range(u_Bk.shape[1]):
            logits.append(logits_BV)
            drawn.append(writing.draw(logits_BV).tolist())
            if i + 1 == u_Bk.shape[1] or all(map(_has_ended, asked, zip(*drawn))):
                break
            if not drafting and self._stop:
                break
            rows.set_tokens(np.maximum(drawn[-1], 0), steps=min(i, 1))
            logits_BV = self._host.forward_plain(rows)
        kept = torch.stack(logits, 1) if drafting else logits_BV.new_empty(0, 0, 0)
        return WrittenBatch(torch.tensor(drawn).T, kept)

    def _make(
        self, size: ProgramSize, batch: Batch, tiles: Tiles[np.ndarray], logits_BV: Tensor
    ) -> None:
        if self._pool is None and batch.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        program = WritingProgram(self._host, size, batch, tiles, logits_BV, self._pool)
        self._programs[size] = program
        if len(self._programs) > MOST_PROGRAMS:
            self._programs.popitem(last=False)
        try:
            self._check(program, batch, tiles, logits_BV)
        except RuntimeError as error:
            self._works = False  # the next ones are written token by token
            warn_not_captured("tokens written on", error)

    def _check(
        self, program: WritingProgram, batch: Batch, tiles: Tiles[np.ndarray], logits_BV: Tensor
    ) -> None:
        """Compare a program's logits with those of forwards that are run one by one."""
        count = len(batch.segments)
        middle = np.full((count, program.size.tokens), 0.5)
        written = program.run(batch, tiles, logits_BV, np.zeros((4, count)), middle)
        drawn = written.tokens()
        for i in range(1, program.size.tokens):
            work = []
            for segment, row in zip(batch.segments, drawn):
                text = segment.plan.tokens[: segment.start]
                tokens = text_and_chain(text, [max(token, 0) for token in row[:i]])
                last = len(tokens) - 1
                work.append((segment.lane, PlainText.of(tokens, last), last))
            one_by_one = self._host.runner.forward(self._host.batch(work))
            check_logits(self._host.remove_impossible(one_by_one), written.logits_BkV[:, i])


def _has_ended(asked: Continuation, tokens: Sequence[int]) -> bool:
    """Does a text take no more tokens than these?"""
    enough = len(tokens) >= min(asked.tokens, asked.seq.remaining)
    return enough or len(asked.seq.up_to_end(tokens)) < len(tokens) or asked.seq.ends(tokens[-1])


@dataclass(frozen=True)
class Writing:
    """How tokens are drawn, one after the other."""

    warp: Warp
    temperature: float
    columns_4B: Tensor
    noise: FixedNoise

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        temperature: float,
        logits_BV: Tensor,
        u_Bk: np.ndarray,
    ) -> Writing:
        columns = torch.from_numpy(np.array(warp_columns(samplings)))
        warp = Warp.of(samplings, logits_BV.shape[1])
        return cls(warp, temperature, columns, FixedNoise(torch.from_numpy(u_Bk)))

    def draw(self, logits_BV: Tensor) -> Tensor:
        """The next token of each, -1 where there is none."""
        if self.warp.warm:
            law_BV = tempered(self.warp.laws(logits_BV, self.columns_4B), self.temperature)
            return sample_token(law_BV, self.noise).columns()["token"]
        return likeliest(logits_BV)


class WrittenBatch:
    """What a program wrote for all sequences."""

    type = Tokens

    def __init__(self, tokens_Bk: Tensor, logits_BkV: Tensor):
        self.tokens_Bk = tokens_Bk
        self.logits_BkV = logits_BkV
        self.device = tokens_Bk.device
        self._copy = HostCopy(tokens_Bk)

    def column(self, name: str) -> Tensor:
        """As of a rule that was run: the tokens, on the device."""
        assert name == "tokens", name
        return self.tokens_Bk

    def tokens(self) -> list[list[int]]:
        return cast("list[list[int]]", self._copy.numbers())

    def of(self, index: int, asked: Continuation, drawn: Sequence[int]) -> Written:
        """One sequence's tokens, up to the one that ends its text, and their laws."""
        tokens = asked.seq.up_to_end(drawn[: min(asked.tokens, asked.seq.remaining)])
        asked.drawn = len(tokens)
        if not asked.drafting:
            return Written(tokens, self.logits_BkV.new_empty(0))
        first = index * self.logits_BkV.shape[1]
        sampling = asked.seq.history.sampling
        laws = PendingLaws.of(self._logits_RV, first, len(tokens), sampling)
        return Written(tokens, tempered(laws, asked.temperature))

    def only(self, numbers: Sequence[int]) -> WrittenBatch:
        """What was written for some of them."""
        kept = to_device(numbers, torch.long, self.device)
        return WrittenBatch(self.tokens_Bk[kept], self.logits_BkV[kept])

    @cached_property
    def _logits_RV(self) -> Tensor:
        return self.logits_BkV.flatten(0, 1)


class KnownProgram(NamedTuple):
    """A program, and the rows that it is to begin with."""

    program: WritingProgram
    batch: Batch
    tiles: Tiles[np.ndarray]
    columns_4B: np.ndarray

    def run(self, logits_BV: Tensor, u_Bk: np.ndarray) -> WrittenBatch:
        with current_device(self.batch.device):
            return self.program.run(self.batch, self.tiles, logits_BV, self.columns_4B, u_Bk)


class WritingProgram:
    """So many tokens for so many sequences: on CUDA a graph, elsewhere the same code over fixed
    memory."""

    def __init__(
        self,
        host: Host,
        size: ProgramSize,
        batch: Batch,
        tiles: Tiles[np.ndarray],
        logits_BV: Tensor,
        pool: PoolHandle | None,
    ):
        self.size = size
        self._host = host
        device = batch.device
        on_gpu = device.type == "cuda"
        assert isinstance(host.slots, Slots)
        self._fixed = StaticBatch(size.forward, host.slots.table, device)
        rows = size.forward.rows
        self._first_BV = torch.zeros(rows, logits_BV.shape[1], dtype=logits_BV.dtype, device=device)
        vocab = logits_BV.shape[1]
        self._logits_BkV = self._first_BV.new_zeros(rows, size.tokens, vocab)
        # sampling parameters and noise of every sequence
        self._numbers = torch.zeros(rows, 4 + size.tokens, dtype=torch.float64)
        self._numbers_BN = torch.zeros_like(self._numbers, device=device)
        self._run: Callable[[], Tensor] = self._program
        count = len(logits_BV)
        self._fill(batch, tiles, logits_BV, np.zeros((4, count)), np.zeros((count, size.tokens)))
        if on_gpu:
            with capturing_alone(), fastest_blas(rows):
                self._run = capture_graph(self._program, pool)

    def run(
        self,
        batch: Batch,
        tiles: Tiles[np.ndarray],
        logits_BV: Tensor,
        columns: np.ndarray,
        u_Bk: np.ndarray,
    ) -> WrittenBatch:
        self._fill(batch, tiles, logits_BV, columns, u_Bk)
        count = len(logits_BV)
        # The next run writes over both.
        return WrittenBatch(self._run()[:count].clone(), self._logits_BkV[:count].clone())

    def _fill(
        self,
        batch: Batch,
        tiles: Tiles[np.ndarray],
        logits_BV: Tensor,
        columns: np.ndarray,
        u_Bk: np.ndarray,
    ) -> None:
        count = len(logits_BV)
        self._fixed.fill(batch, tiles)
        self._first_BV[:count] = logits_BV
        numbers = self._numbers.numpy()
        numbers[:count, :4] = columns.T
        numbers[:count, 4:] = u_Bk
        send(self._numbers, self._numbers_BN)

    def _program(self) -> Tensor:
        columns_4B = self._numbers_BN[:, :4].T
        noise = FixedNoise(self._numbers_BN[:, 4:])
        writing = Writing(self.size.warp, self.size.temperature, columns_4B, noise)
        vocab = self._host.backbone.vocab
        logits_BV = self._first_BV
        drawn = []
        for i in range(self.size.tokens):
            self._logits_BkV[:, i] = logits_BV
            token_B = writing.draw(logits_BV)
            drawn.append(token_B)
            if i + 1 < self.size.tokens:
                self._fixed.set_tokens(token_B.clamp(0, vocab - 1), steps=min(i, 1))
                logits_BV = self._host.forward_plain(self._fixed)[: len(logits_BV)]
        return torch.stack(drawn, 1)
