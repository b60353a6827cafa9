"""A device that takes no time, to see what the host does in a step.

Tensors of torch's device `meta` have shapes and no numbers, so a forward, a rule and a copy are
over at once. Everything that the host does for a GPU is done: plans, fixed memory, draws, forwards
that begin before their tokens are known. What a GPU would draw is written down beforehand.

Some integer arithmetic takes `meta` a millisecond of Python. Where that counts, and the vocabulary
is small, the tensors live on the CPU instead: there a small call takes about as long as a launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from forerun.api import Model
from forerun.drafters.lookup import continuation
from forerun.engine import graphs
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import Slots
from forerun.engine.continuation import (
    Continuations,
    KnownProgram,
    WritingProgram,
    WrittenBatch,
)
from forerun.engine.engine import Engine, no_messages
from forerun.engine.flag import Flag
from forerun.engine.host import Host
from forerun.engine.loop import InCaller
from forerun.engine.pack import Batch
from forerun.engine.prefetch_copies import CopyPrefetch
from forerun.engine.prefetch_looks import Verdicts
from forerun.engine.prefetch_rounds import Judged, LookRounds, RoundProgram, RoundPrograms
from forerun.engine.rules import (
    Applied,
    Late,
    ProgramSize,
    RuleBatch,
    RuleProgram,
    Rules,
    TokenDraws,
)
from forerun.engine.ticket import Running
from forerun.families.base import Family
from forerun.families.causal import Causal
from forerun.families.features import Features
from forerun.methods.lookahead import LookaheadOptions
from forerun.probability.acceptance import matching, sample_token
from forerun.probability.outcomes import (
    Descent,
    JacobiStep,
    Outcome,
    PackedOutcome,
    Token,
    Tokens,
    Verdict,
)
from forerun.probability.transfer import HostCopy
from forerun.sequence.canvas import Canvas, Draw

AHEAD = LookaheadOptions().ngram - 1  # places between the text and what a window's columns end in
TokenAt = Callable[[Canvas, int], int]  # of a text, at its n-th blank


@dataclass
class Script:
    """What is drawn: the text of every sequence, and what a draft or a guess says of it."""

    text: TokenAt
    drafted: TokenAt
    guessed: TokenAt
    seconds: float = field(default=0.0, init=False)  # that it took to look up what is written
    waited: float = field(default=0.0, init=False)  # seconds of the host while nothing was begun
    forwards: int = field(default=0, init=False)
    _idle_since: float | None = field(default=None, init=False)

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.seconds += time.thread_time() - began

    def begin(self) -> None:
        """Begin to measure."""
        self.seconds = 0.0
        self.waited = 0.0
        self._idle_since = None

    def now(self) -> float:
        """Seconds that the host has worked."""
        return time.thread_time() - self.seconds

    def arrived(self, forwards: int) -> None:
        """An outcome arrived that was queued behind so many forwards: the last ones?"""
        if forwards == self.forwards:
            self._idle_since = self.now()

    def begin_forward(self) -> None:
        if self._idle_since is not None:
            self.waited += self.now() - self._idle_since
        self._idle_since = None
        self.forwards += 1

    def outcome(self, draw: Draw[Any], kind: type[Outcome]) -> Outcome:
        """What a rule comes to."""
        seq = draw.seq
        if kind is Token:
            return Token(self.text(seq, seq.filled))
        tokens = list(draw.arguments[0])  # type: ignore[call-overload]
        if kind is Descent:
            return self.descent(seq, tokens, *cast("Any", draw.arguments[1:]))
        if kind is Tokens:
            return Tokens([self.drafted(seq, seq.filled + i) for i in range(len(tokens))])
        accepted = 0
        while accepted < len(tokens) and tokens[accepted] == self.text(seq, seq.filled + accepted):
            accepted += 1
        token = self.text(seq, seq.filled + accepted)
        if kind is Verdict:
            return Verdict(accepted, token)
        assert kind is JacobiStep, f"nothing is written down of {kind.__name__}"
        said = [self.guessed(seq, seq.filled + i) for i in range(accepted + 1, len(tokens) + 1)]
        likeliest = [*tokens[:accepted], token, *said]
        known = likeliest[accepted + 1 : len(tokens)]
        last = known[-1] if known else token
        return JacobiStep(accepted, token, likeliest, [*known, *[last] * (accepted + 1)])

    def descent(
        self, seq: Canvas, tokens: Sequence[int], parents: Sequence[int], laws: Sequence[object]
    ) -> Descent:
        """Where the text leaves a tree of guesses. What stands behind a wrong guess is guessed."""
        node = 0
        depths = [0]
        is_right = [True]
        for number, (token, parent) in enumerate(zip(tokens, parents), 1):
            right = is_right[parent] and token == self.text(seq, seq.filled + depths[parent])
            depths.append(depths[parent] + 1)
            is_right.append(right)
            node = number if right else node
        said = [
            self.text(seq, seq.filled + depth) if right else self.guessed(seq, seq.filled + depth)
            for depth, right in zip(depths, is_right)
        ]
        columns = range(AHEAD, AHEAD + len(laws) - len(depths))
        said += [self.guessed(seq, seq.filled + place) for place in columns]
        return Descent(node, said[node], said)


class Clock:
    """Goes on only while forwards would run: what the engine learns of costs is always the same."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


class NoNetwork(SlottedBackbone):
    """A model of a size that the engine takes for worth hiding work behind, which does nothing."""

    dtype = torch.bfloat16
    layers = 1
    heads = 28
    key_heads = 4
    head_dim = 1
    capturable = True

    def __init__(
        self,
        device: str,
        vocab: int,
        context: int,
        rows: int,
        clock: Clock,
        cost: float,
        script: Script,
    ):
        self.device = torch.device(device)
        self.vocab = vocab
        self.context = context
        self.cost = cost
        self._clock = clock
        self._script = script
        self._logits_RV = torch.zeros(rows, vocab, dtype=self.dtype, device=self.device)

    def seconds(self, rows: int) -> float:
        """What a forward would take, roughly as of 1.5 billion parameters on an H200."""
        return (1e-3 if self.cost > 1e9 else 3e-4) * (1 + rows / 512)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        self._script.begin_forward()
        self._clock.seconds += self.seconds(len(batch.tokens_T))
        return self._logits_RV[: len(batch.reads_R)]


class ScriptedOutcomes:
    """Outcomes on their way to the host, as they were written down."""

    def __init__(self, packed: PackedOutcome, script: Script, draws: Sequence[Draw[Any]]):
        self._packed = packed
        self._script = script
        self._draws = draws
        self._behind = script.forwards

    def numbers(self) -> list[list[float]]:
        with self._script.timed():
            kind = self._packed.type
            rows = [self._row(self._script.outcome(draw, kind)) for draw in self._draws]
        self._script.arrived(self._behind)
        return rows

    def _row(self, outcome: Outcome) -> list[float]:
        row: list[float] = []
        for column in self._packed.columns:
            value = getattr(outcome, column.name)
            width = column.width
            row += [value] if width is None else [*value, *[0] * width][:width]
        return row


class ScriptedApplied(Applied):
    """A rule whose outcome the next forward takes from the CPU: integer arithmetic takes `meta` a
    millisecond of Python."""

    draws: Sequence[Draw[Any]] = ()  # where the same may be drawn again

    def column(self, name: str) -> Tensor:
        column = super().column(name)
        return torch.zeros(column.shape, dtype=column.dtype) if column.is_meta else column


class NoProgram(RuleProgram):
    """A program that is filled as ever and run only once."""

    def _program(self) -> Tensor:
        return super()._program() if self._packed is None else self._packed.tensor


class NoRules(Rules):
    """Rules as programs, whose outcomes are written down."""

    def __init__(self, script: Script):
        super().__init__(graphs=True)
        self._script = script

    def _apply_plain(self, batch: RuleBatch) -> Applied:
        size = self._capturable_size(batch)
        assert size is not None, f"{batch.rule} runs by its plain code"
        self.programs[size] = NoProgram(size, batch, None)
        return self.programs[size].run(batch)

    def _capture(self, size: ProgramSize, batch: RuleBatch) -> Applied:
        return self._apply_plain(batch)

    def apply(self, draws: Sequence[Draw[Any]]) -> Applied:
        return self._scripted(super().apply(draws).packed, draws)

    def apply_ahead(self, draws: Sequence[Draw[Any]], late: Sequence[Late]) -> Applied | None:
        applied = super().apply_ahead(draws, late)
        return None if applied is None else self._scripted_ahead(applied, draws)

    def apply_again(self, last: Applied, logits_RV: Tensor, late: Sequence[Late]) -> Applied | None:
        applied = super().apply_again(last, logits_RV, late)
        draws = cast("ScriptedApplied", last).draws
        return None if applied is None else self._scripted_ahead(applied, draws)

    def _scripted_ahead(self, applied: Applied, draws: Sequence[Draw[Any]]) -> Applied:
        scripted = self._scripted(applied.packed, draws)
        scripted.used_noise = applied.used_noise
        scripted.ran = applied.ran
        scripted.draws = draws
        return scripted

    def draw_tokens(self, draws: TokenDraws) -> Applied | None:
        applied = super().draw_tokens(draws)
        made = [Draw(sample_token, (), seq) for seq in draws.seqs]
        return None if applied is None else self._scripted(applied.packed, made)

    def _scripted(self, packed: PackedOutcome, draws: Sequence[Draw[Any]]) -> ScriptedApplied:
        copy = cast("HostCopy", ScriptedOutcomes(packed, self._script, draws))
        return ScriptedApplied(packed, len(draws), copy)


class ScriptedText(WrittenBatch):
    """What a draft model wrote, as it was written down: looked up when it arrives, since nobody
    may have known after which text when it began."""

    def __init__(self, written: WrittenBatch, seqs: Sequence[Canvas], script: Script):
        super().__init__(written.tokens_Bk, written.logits_BkV)
        self._seqs = seqs
        self._script = script

    def tokens(self) -> list[list[int]]:
        with self._script.timed():
            drafted = self._script.drafted
            count = self.tokens_Bk.shape[1]
            return [[drafted(seq, seq.filled + i) for i in range(count)] for seq in self._seqs]

    def only(self, numbers: Sequence[int]) -> WrittenBatch:
        return ScriptedText(super().only(numbers), [self._seqs[i] for i in numbers], self._script)


class ScriptedProgram(NamedTuple):
    """A program that was run before, to write what is written down."""

    known: KnownProgram
    seqs: Sequence[Canvas]
    script: Script

    def run(self, logits_BV: Tensor, u_Bk: Any) -> WrittenBatch:
        return ScriptedText(self.known.run(logits_BV, u_Bk), self.seqs, self.script)


class NoWritingProgram(WritingProgram):
    _drawn: Tensor | None = None

    def _program(self) -> Tensor:
        if self._drawn is None:
            self._drawn = super()._program()
        return self._drawn


class NoContinuations(Continuations):
    """Writes what is written down."""

    def __init__(self, host: Host, script: Script):
        super().__init__(host, Flag())
        self._script = script

    def _make(self, size: Any, batch: Any, tiles: Any, logits_BV: Tensor) -> WritingProgram:
        self._programs[size] = NoWritingProgram(self._host, size, batch, tiles, logits_BV, None)
        return self._programs[size]

    def _write(self, asked: Any, batch: Any, logits_BV: Tensor, tokens: int) -> WrittenBatch:
        written = super()._write(asked, batch, logits_BV, tokens)
        assert written is not None
        return ScriptedText(written, [one.seq for one in asked], self._script)

    def known_program(self, asked: Any, batch: Batch) -> Any:
        known = super().known_program(asked, batch)
        seqs = [one.seq for one in asked]
        return None if known is None else ScriptedProgram(known, seqs, self._script)


SEARCH = CopyPrefetch._copies


def copies_as_written(script: Script) -> Callable[[CopyPrefetch, Verdicts], Tensor]:
    """What a device would find in the texts as they are written down, after as much work."""

    def found(self: CopyPrefetch, verdicts: Verdicts) -> Tensor:
        if self.host.device.type == "meta":
            drafts_BK = torch.zeros(len(self.running), max(self.lengths), dtype=torch.long)
        else:
            drafts_BK = SEARCH(self, verdicts)
        with script.timed():
            written = []
            for one, judged in zip(self.running, self.judged):
                verdict = script.outcome(Draw(matching, (judged,), one.seq), Verdict)
                assert isinstance(verdict, Verdict)
                new = [*judged[: verdict.accepted], verdict.token]
                text = np.array([*one.seq.text, *new], np.int32)
                longest = drafts_BK.shape[1]
                written.append(continuation(text, self._run, longest) or [-1] * longest)
            drafts_BK.copy_(torch.tensor(written))
        return drafts_BK

    return found


def rounds_as_written(script: Script) -> Callable[[LookRounds, Sequence[object]], Any]:
    """What a device would draft and judge by itself, behind the first verdicts."""

    def own(one: Running, first: object, self: LookRounds) -> list[Judged]:
        assert isinstance(first, Verdict)
        found = []
        at = one.seq.filled + first.accepted + 1
        for _ in range(self.count):
            draft = [script.drafted(one.seq, at + i) for i in range(self.judging.length)]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == script.text(one.seq, at + accepted):
                accepted += 1
            found.append(Judged(draft, accepted, script.text(one.seq, at + accepted)))
            at += accepted + 1
        return found

    def judged(self: LookRounds, answers: Sequence[object]) -> Any:
        with script.timed():
            return [own(*each, self) for each in zip(self.running, answers)]

    return judged


def found_right(self: RoundPrograms, *rounds: object) -> bool:
    for program in self._programs.values():
        program.is_checked = True
    return True


def without_device(host: Host, engine: Engine, script: Script) -> None:
    """Have a host do what it would do for a GPU."""
    backbone = host.backbone
    assert isinstance(backbone, NoNetwork)
    host.runner.capture_enabled = True  # by our own forward: no kernels are needed
    host.writer = NoContinuations(host, script)
    host.costs.device_type = "cuda"
    host.costs.curve = {rows: backbone.seconds(rows) for rows in (1, 8, 32, 128)}
    host.pool.copies = False
    table = host.slots.table
    table.on_device = table.on_device.to(backbone.device)


def model_without_device(
    tokenizer: Any,
    lanes: int,
    context: int,
    script: Script,
    draft: Family | None = None,
    device: str = "meta",
) -> tuple[Model, Model | None]:
    """A model whose texts are what the script says, and whose forwards take no time; and a draft
    model of a family, if there is one."""
    clock = Clock()
    rows = 64 * lanes
    eos = [tokenizer.eos_token_id]
    settings: dict[str, Any] = dict(lanes=lanes, context=context, graphs=True)

    def made(name: str, family: Family, cost: float) -> Model:
        backbone = NoNetwork(device, len(tokenizer), context, rows, clock, cost, script)
        return Model(name, family, backbone, tokenizer, eos, **settings)

    model = made("nothing", Causal(), 1.5e9)
    engine = model.engine
    engine.rules = NoRules(script)
    engine.prefetches = True
    engine.watch.now = clock.now
    model.driver = InCaller(engine)
    engine.has_messages = no_messages  # of the thread that there was
    CopyPrefetch._copies = copies_as_written(script)  # type: ignore[method-assign]
    LookRounds.judged = rounds_as_written(script)  # type: ignore[method-assign]
    without_device(model.host, engine, script)
    graphs.check_logits = lambda plain, replayed: None  # there are no numbers to compare
    RoundPrograms.are_right = found_right  # type: ignore[assignment]
    RoundProgram.run = lambda self, rounds: rounds.drafted_BK  # type: ignore[method-assign]
    if draft is None:
        return model, None
    little = model.draft_model(made("less", draft, 5e8))
    without_device(engine.hosts[1], engine, script)
    if isinstance(draft, Features):
        engine.hosts[1].looks_into = model.host
    return model, little


def plain_script(next_token: Callable[[Canvas], int]) -> Script:
    """Plain decoding of texts that are known."""

    def text(seq: Canvas, at: int) -> int:
        return next_token(seq)

    return Script(text, text, text)
