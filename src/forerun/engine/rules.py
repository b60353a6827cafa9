"""How rules are run: from the logits that their laws are made of to the few numbers that the host
needs, for all sequences that want the same rule.

The plain code makes the laws and calls the rule. It is the definition, and what is enumerated. On a
GPU it is dozens of small launches, each of which costs the host more than the device. So there the
same code is captured once per size and replayed: logits, tokens, noise and sampling parameters go
into fixed memory, and laws, draws and the packing of their outcome are one launch. Sizes are
rounded up, as for forwards. Every capture is checked once against the plain code on the same input.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from forerun.constraints.base import words
from forerun.engine.graphs import capture_graph, capturing_alone, current_device
from forerun.engine.pack import RuleArgument, stack
from forerun.errors import NotAble
from forerun.probability.acceptance import Sampler, sample_token
from forerun.probability.certain import CERTAIN, CERTAIN_TOGETHER, certain_token, choices
from forerun.probability.logits import (
    MaskedLogits,
    Warp,
    Warps,
    likeliest,
    model_laws,
    row_laws,
)
from forerun.probability.markov import ChainRule
from forerun.probability.noise import FixedNoise, Noise, uniforms, uniforms_ahead
from forerun.probability.outcomes import Outcome, PackedOutcome
from forerun.probability.pending import (
    LawRows,
    PendingLaws,
    made,
    write_masks,
)
from forerun.probability.transfer import HostCopy, send, to_device
from forerun.sequence.canvas import Canvas, Draw

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as PoolHandle

MakeSampler = Callable[[Sequence[tuple[int, int]]], Sampler]

# Rows of one sequence's laws. A verdict on k tokens has k + 1, and k is often a power of two.
ROWS = (1, 2, 3, 5, 7, 9, 12, 17, 24, 33, 48, 65, 96, 129, 192, 257)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_PROGRAMS = 128
MOST_NOTED = 1024  # sizes that were met
MUCH_LARGER = 8  # times the laws: a program for so many is no substitute
SEEN_BEFORE = 1  # times that a size is met before it is captured
COVERED_BEFORE = 64  # the same, if a program for more serves meanwhile
MOST_BYTES = 1 << 29  # of logits in one program: above it, launches do not matter
TOLERANCE = 1e-4  # of fractions in an outcome
log = logging.getLogger("forerun")


class Late(NamedTuple):
    """Tokens of an argument that only the device knows yet."""

    number: int  # of the argument
    known_B: Tensor  # the first token of each sequence, or its first ones [B, K], or
    is_shift: bool  # what is to be added to all of them


class Ran(NamedTuple):
    """A program that was run, and with what it was filled."""

    program: RuleProgram
    fills: int


class Applied:
    """A rule that was run, or is queued on the device."""

    used_noise = True  # or was it certain, whatever the noise?
    ran: Ran | None = None  # by which program, where that can be run again

    def __init__(self, packed: PackedOutcome, count: int, copy: HostCopy):
        self.packed = packed
        self.type = packed.type
        self.device = packed.tensor.device
        self.count = count  # sequences; what is behind them pads
        self._copy = copy
        self._arrived: list[Outcome | None] | None = None

    def column(self, name: str) -> Tensor:
        """A column of the outcome, on the device."""
        return self.packed.outcome.columns()[name][: self.count]

    def outcomes(self) -> list[Outcome | None]:
        """Every sequence's outcome, as soon as it has arrived; None where a law had no mass."""
        if self._arrived is None:
            rows = self._copy.numbers()[: self.count]
            self._arrived = [self.packed.unpack(row) for row in rows]
        return self._arrived

    def only(self, numbers: Sequence[int]) -> Applied:
        """The same for some of the sequences."""
        return self if [*numbers] == [*range(self.count)] else Chosen(self, numbers)


class Chosen(Applied):
    """The outcomes of some sequences."""

    def __init__(self, applied: Applied, numbers: Sequence[int]):
        self.type = applied.type
        self.device = applied.device
        self.count = len(numbers)
        self._applied = applied
        self._numbers = numbers

    def column(self, name: str) -> Tensor:
        return self._applied.column(name)[to_device(self._numbers, torch.long, self.device)]

    def outcomes(self) -> list[Outcome | None]:
        outcomes = self._applied.outcomes()
        return [outcomes[number] for number in self._numbers]


class Decided(Applied):
    """Outcomes that the host knows already."""

    def __init__(self, outcomes: list[Outcome | None], device: torch.device):
        self.type = next((type(one) for one in outcomes if one is not None), Outcome)
        self.device = device
        self._outcomes = outcomes

    def column(self, name: str) -> Tensor:
        values: list[Any] = [getattr(one, name, -1) for one in self._outcomes]
        if any(isinstance(value, list) for value in values):
            values = [value if isinstance(value, list) else [value] for value in values]
            longest = max(map(len, values))
            values = [[*value, *[0] * (longest - len(value))] for value in values]
        return to_device(values, torch.long, self.device)

    def outcomes(self) -> list[Outcome | None]:
        return self._outcomes


class Rules:
    """Runs rules in the fastest way that works here. `graphs=False` runs their plain code alone;
    `graphs=True` uses fixed memory even where there is no GPU."""

    def __init__(self, sampler: MakeSampler = Noise, graphs: bool | None = None):
        self._sampler = sampler
        self._graphs = graphs
        self.programs: OrderedDict[ProgramSize, RuleProgram] = OrderedDict()
        self._seen: Counter[ProgramSize] = Counter()
        self._not_capturable: set[object] = set()
        self.is_warm = True  # or was the last rule one that will be captured, or just was?
        self._pool: PoolHandle | None = None
        self._warps = Warps()

    @property
    def by_noise(self) -> bool:
        """Are draws decided by noise, as ever but under certification?"""
        return self._sampler is Noise

    def apply(self, draws: Sequence[Draw[Any]]) -> Applied:
        """One rule for all who want it."""
        batch = RuleBatch(draws)
        size = self._capturable_size(batch)
        if size is None:
            self.is_warm = True
            return self._apply_certain(batch) or self._apply_plain(batch)
        found = self._find(size)
        capture_now = found != size and self._is_time_to_capture(size, found)
        self.is_warm = found is not None and not capture_now
        if capture_now:
            return self._capture(size, batch)
        if found is None:
            return self._apply_plain(batch)
        self.programs.move_to_end(found)
        with current_device(batch.device):
            return self.programs[found].run(batch)

    def apply_ahead(self, draws: Sequence[Draw[Any]], late: Sequence[Late]) -> Applied | None:
        """One rule for all who will want it after their next draw, before the host knows all of its
        arguments; None if there is no program for it yet."""
        batch = RuleBatch(draws, ahead=1)
        size = self._capturable_size(batch)
        found = None if size is None else self._find(size)
        if size is None or found is None:
            return None
        if found != size and self._is_time_to_capture(size, found):
            return None
        self.programs.move_to_end(found)
        with current_device(batch.device):
            return self.programs[found].run_ahead(batch, late)

    def apply_again(self, last: Applied, logits_RV: Tensor, late: Sequence[Late]) -> Applied | None:
        """What was applied ahead last, once more, to other logits and with arguments that only the
        device knows; None if that cannot be."""
        ran = last.ran
        if ran is None or last.used_noise or ran.program.fills != ran.fills:
            return None
        with current_device(last.device):
            return ran.program.run_again(last.count, logits_RV, late)

    def runs_plainly(self, device: torch.device) -> bool:
        """Is there nothing to capture: do rules run by their plain code, drawing by noise?"""
        return self.by_noise and device.type == "cpu" and not self._graphs

    def draw_tokens(self, draws: TokenDraws) -> Applied | None:
        """One token for each of many: by the plain code where nothing is captured, else by a
        program; None if that is not there yet."""
        if self.runs_plainly(draws.device):
            self.is_warm = True
            return draws.apply_plain(self._sampler)
        size = draws.size(self._warps) if self.by_noise else None
        program = None if size is None else self.programs.get(size)
        if size is None or program is None:
            return None
        self.is_warm = True
        self.programs.move_to_end(size)
        with current_device(draws.device):
            return program.run_tokens(draws)

    def _find(self, size: ProgramSize) -> ProgramSize | None:
        """This size if there is a program, else the least that covers it."""
        if size in self.programs:
            return size
        larger = [one for one in self.programs if one.covers(size)]
        return min(larger, key=lambda one: one.laws, default=None)

    def _is_time_to_capture(self, size: ProgramSize, found: ProgramSize | None) -> bool:
        """Is a size met often enough, given what else would serve?"""
        if len(self._seen) >= MOST_NOTED:  # rules made from options come and go
            self._seen.clear()
        self._seen[size] += 1
        return self._seen[size] > (SEEN_BEFORE if found is None else COVERED_BEFORE)

    def _capturable_size(self, batch: RuleBatch) -> ProgramSize | None:
        on_gpu = batch.device.type == "cuda"
        enabled = on_gpu if self._graphs is None else self._graphs
        if not enabled or not self.by_noise or batch.rule in self._not_capturable:
            return None
        return ProgramSize.of(batch, self._warps)

    def _apply_certain(self, batch: RuleBatch) -> Applied | None:
        """At temperature 0, what is too much for a program, from the likeliest tokens alone: laws
        of so many rows would take the device as long as a few of its layers."""
        on_gpu = batch.device.type == "cuda"
        outcome = batch.decided_together() if on_gpu and self.by_noise else None
        if outcome is None:
            return None
        packed = PackedOutcome(outcome)
        return Applied(packed, len(batch.draws), HostCopy(packed.tensor))

    def _apply_plain(self, batch: RuleBatch) -> Applied:
        if self.by_noise and (decided := batch.without_chance()):
            return Decided(decided, batch.device)
        outcome = batch.likeliest_chains()
        if outcome is None:
            arguments = [stack(column, batch.device) for column in batch.made]
            outcome = batch.rule(*arguments, self._sampler(batch.noise))
        check_outcome(outcome, len(batch.draws))
        packed = PackedOutcome(outcome)
        return Applied(packed, len(batch.draws), HostCopy(packed.tensor))

    def _capture(self, size: ProgramSize, batch: RuleBatch) -> Applied:
        plain = self._apply_plain(batch)
        try:
            with current_device(batch.device):
                if self._pool is None and batch.device.type == "cuda":
                    self._pool = torch.cuda.graph_pool_handle()
                program = RuleProgram(size, batch, self._pool)
                check_same(plain.outcomes(), program.run(batch).outcomes())
        except Exception as error:  # whatever stands in the way, the plain code can do it
            log.warning("rule %s runs by its plain code: %s", batch.rule, error)
            note(self._not_capturable, batch.rule)
            return plain
        self.programs[size] = program
        if len(self.programs) > MOST_PROGRAMS:
            self.programs.popitem(last=False)
        return plain


def note(seen: set[Any], one: object) -> None:
    """Add to a set that is begun anew when it is large: rules made from options come and go."""
    if len(seen) >= MOST_NOTED:
        seen.clear()
    seen.add(one)


class RuleBatch:
    """The draws of some sequences that want the same rule, now or so many draws `ahead`."""

    def __init__(self, draws: Sequence[Draw[Any]], ahead: int = 0):
        self.draws = draws
        self.rule = draws[0].rule
        self.columns = list(zip(*(draw.arguments for draw in draws)))
        self.noise = [(draw.seq.noise_key, draw.seq.draws + ahead) for draw in draws]
        self.warp_4B: np.ndarray | None = None  # sampling parameters, once a size is known

    @cached_property
    def device(self) -> torch.device:
        """The model's: a drafter that counts makes its laws on the CPU, but the rule runs there."""
        firsts = [column[0] for column in self.columns]
        devices = [a.device for a in firsts if isinstance(a, (Tensor, PendingLaws))]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    @cached_property
    def pending(self) -> list[Sequence[PendingLaws] | None]:
        """The arguments that are laws of some rows of logits, and not made yet."""
        return [
            cast("Sequence[PendingLaws]", column) if is_pending(column) else None
            for column in self.columns
        ]

    @cached_property
    def sources(self) -> list[LawSource]:
        """The rows of logits that the laws are of. A law and the model's own law are often of the
        same rows, and then share a copy of them."""
        found: list[LawSource] = []
        for laws in self.pending:
            if laws is not None and not any(one.has_rows_of(laws) for one in found):
                found.append(LawSource(laws))
        return found

    def source_of(self, laws: Sequence[PendingLaws]) -> int:
        """Which of the sources an argument's laws are of."""
        return next(i for i, one in enumerate(self.sources) if one.has_rows_of(laws))

    def without_chance(self) -> list[Outcome | None] | None:
        """What is decided on a CPU where all laws are certain, by a rule that is known there."""
        decide = CERTAIN.get(self.rule)
        on_cpu = self.device.type == "cpu"
        if not on_cpu or decide is None or not all(is_certain(column) for column in self.columns):
            return None
        columns = [choices_of(column) for column in self.columns]
        return [decide(*arguments) for arguments in zip(*columns)]

    def likeliest_chains(self) -> Outcome | None:
        """What chains draw at temperature 0 on a CPU, from logits: laws of a whole vocabulary, and
        their logarithms, take as long as the model that drafts."""
        rule = self.rule
        if not isinstance(rule, ChainRule) or rule.temperature or self.device.type != "cpu":
            return None
        laws = cast("Sequence[PendingLaws]", self.columns[-1])
        if not is_pending(laws) or not all(one.of_model for one in laws):
            return None
        columns = [*self.columns[:-1], [one.logits_NV for one in laws]]
        where_BK, last_B1, logits_BKV = [stack(column, self.device) for column in columns]
        assert where_BK is not None and last_B1 is not None and logits_BKV is not None
        return rule.likeliest(where_BK, last_B1, logits_BKV)

    def decided_together(self) -> Outcome | None:
        """What is decided on the device where all laws are certain, by a rule that is known
        there."""
        decide = CERTAIN_TOGETHER.get(self.rule)
        if decide is None or not all(is_certain(column) for column in self.columns):
            return None
        return decide(*(self._choices_or_tokens(column) for column in self.columns))

    def _choices_or_tokens(self, column: Sequence[Any]) -> Tensor | None:
        """What laws are certain of, -1 behind the last one of each sequence; other arguments as
        rules take them."""
        if not isinstance(column[0], PendingLaws):
            return stack(column, self.device)
        choice_R = likeliest(PendingLaws([part for one in column for part in one.parts]).logits_NV)
        if column[0].single:
            return choice_R
        counts = [one.count for one in column]
        ends_B1 = np.cumsum(counts)[:, None]
        number_BL = ends_B1 - np.array(counts)[:, None] + np.arange(max(counts))
        padded_BL = np.where(number_BL < ends_B1, number_BL, len(choice_R))
        index_BL = to_device(padded_BL, torch.long, self.device)
        return torch.cat([choice_R, choice_R.new_full((1,), -1)])[index_BL]

    @cached_property
    def made(self) -> list[list[RuleArgument]]:
        """The arguments as rules take them: laws are made."""
        for column in self.columns:
            if all(isinstance(value, PendingLaws) for value in column):
                PendingLaws.make_together(cast("Sequence[PendingLaws]", column))
        return [[made(cast("Any", value)) for value in column] for column in self.columns]


class TokenDraws:
    """A token for each of some sequences, from neighbouring rows of logits: what a `RuleBatch` of
    `sample_token` says, without an object for each. Nearly all draws are of this kind."""

    def __init__(self, seqs: Sequence[Canvas], logits: MaskedLogits):
        self.seqs = seqs
        self.logits_RV, self.masks_RW = logits
        self.device = self.logits_RV.device
        self.warp_4B: np.ndarray | None = None  # sampling parameters, once the size is known

    @property
    def noise(self) -> list[tuple[int, int]]:
        return [(seq.noise_key, seq.draws) for seq in self.seqs]

    def apply_plain(self, sampler: MakeSampler) -> Applied:
        """Draw by the rule's plain code, or at temperature 0 what is certain."""
        logits_RV = MaskedLogits(self.logits_RV, self.masks_RW).applied()
        samplings = [seq.history.sampling for seq in self.seqs]
        if not any(sampling.temperature for sampling in samplings):
            return Decided([certain_token([one]) for one in choices(logits_RV)], self.device)
        packed = PackedOutcome(sample_token(row_laws(logits_RV, samplings), sampler(self.noise)))
        return Applied(packed, len(self.seqs), HostCopy(packed.tensor))

    def size(self, warps: Warps) -> ProgramSize | None:
        """The size that holds them, as `ProgramSize.of` has it."""
        count = len(self.seqs)
        vocab = self.logits_RV.shape[1]
        if count > BATCHES[-1]:
            return None
        warp, self.warp_4B = warps.of([seq.history.sampling for seq in self.seqs], vocab)
        return ProgramSize(
            sample_token,
            BATCHES[bisect_left(BATCHES, count)],
            (ArgumentSize("laws"),),
            vocab,
            (self.logits_RV.dtype,),
            (self.masks_RW is not None,),
            warp,
        )


class LawSource:
    """Rows of logits, of all sequences of a batch."""

    def __init__(self, laws: Sequence[PendingLaws]):
        self.laws = laws
        parts = [part for one in laws for part in one.parts]
        self._tensors = {id(part.logits_RV): part.logits_RV for part in parts}
        # does a constraint hold for any of them?
        self.masked = any(part.masks_RW is not None for part in parts)

    @property
    def dtype(self) -> torch.dtype:
        """The kind of number that holds all logits: edited ones are float32 at least."""
        return reduce(torch.promote_types, {one.dtype for one in self._tensors.values()})

    def has_rows_of(self, laws: Sequence[PendingLaws]) -> bool:
        """Are laws of other kinds of the same rows?"""
        return laws is self.laws or all(
            len(a.parts) == len(b.parts) and all(map(LawRows.has_rows_of, a.parts, b.parts))
            for a, b in zip(laws, self.laws)
        )

    def logits(self) -> Tensor:
        """All logits, mostly one tensor already."""
        found = list(self._tensors.values())
        return found[0] if len(found) == 1 else torch.cat(found)

    def row_numbers(self, length: int) -> list[int]:
        """Which rows of the logits the laws are of, so many for each sequence: where it has fewer,
        its first one pads."""
        sizes = map(len, self._tensors.values())
        starts = dict(zip(self._tensors, accumulate(sizes, initial=0)))
        numbers: list[int] = []
        for laws in self.laws:
            begin = len(numbers)
            for part in laws.parts:
                start = starts[id(part.logits_RV)]
                numbers += [start + number for number in part.numbers] if start else part.numbers
            numbers += [numbers[begin]] * (length - laws.count)
        return numbers


class ArgumentSize(NamedTuple):
    """What one argument of a program is: nothing, tokens [B, K], laws [B, L, V] or [B, V] of some
    logits, or another tensor."""

    kind: str
    shape: tuple[int, ...] = ()
    logits: int = 0  # which of the program's logits the laws are of
    dtype: torch.dtype | None = None

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


class ProgramSize(NamedTuple):
    """What a program has room for, and what it does."""

    rule: Callable[..., Outcome]
    batch: int
    arguments: tuple[ArgumentSize, ...]
    vocab: int
    dtypes: tuple[torch.dtype, ...]  # of the logits
    masked: tuple[bool, ...]  # have the logits bitmasks?
    warp: Warp

    @classmethod
    def of(cls, batch: RuleBatch, warps: Warps) -> ProgramSize | None:
        """The size that holds these draws; None where none does. `TokenDraws.size` is the same for
        one token each."""
        sources = batch.sources
        count = len(batch.draws)
        if not sources or count > BATCHES[-1]:
            return None
        lengths = [
            longest(column) if laws is None else longest_law(laws)
            for column, laws in zip(batch.columns, batch.pending)
        ]
        most = max(lengths)
        if most > ROWS[-1]:
            return None
        more = ROWS[bisect_left(ROWS, most)] - most  # rows that pad every argument
        arguments = []
        for column, laws, length in zip(batch.columns, batch.pending, lengths):
            if laws is None:
                argument = argument_size(column, length + more)
            else:
                kind = "model laws" if laws[0].of_model else "laws"
                shape = () if laws[0].single else (length + more,)
                argument = ArgumentSize(kind, shape, batch.source_of(laws))
            if argument is None:
                return None
            arguments.append(argument)
        vocab = sources[0].laws[0].parts[0].logits_RV.shape[1]
        size = BATCHES[bisect_left(BATCHES, count)]
        rows = sum(a.rows for a in arguments if a.kind.endswith("laws"))
        if size * rows * vocab * 4 > MOST_BYTES:
            return None
        dtypes = tuple(source.dtype for source in sources)
        masked = tuple(source.masked for source in sources)
        samplings = [draw.seq.history.sampling for draw in batch.draws]
        warp, batch.warp_4B = warps.of(samplings, vocab)
        return cls(batch.rule, size, tuple(arguments), vocab, dtypes, masked, warp)

    @property
    def laws(self) -> int:
        """How many laws it has room for."""
        return self.batch * sum(a.rows for a in self.arguments if a.kind.endswith("laws"))

    def covers(self, other: ProgramSize) -> bool:
        """Does it do the same, with room for as much? All arguments have as many rows more, or
        they would no longer fit one another."""
        if self.rule is not other.rule or self.batch < other.batch:  # most are others
            return False
        if self._without_size != other._without_size:
            return False
        pairs = zip(self.arguments, other.arguments)
        more = {mine.shape[0] - theirs.shape[0] for mine, theirs in pairs if mine.shape}
        fits = len(more) <= 1 and min(more, default=0) >= 0
        return fits and self.laws <= MUCH_LARGER * other.laws

    @property
    def _without_size(self) -> tuple[object, ...]:
        kinds = tuple(
            (a.kind, len(a.shape), a.shape[1:], a.logits, a.dtype) for a in self.arguments
        )
        return (kinds, self.vocab, self.dtypes, self.masked, self.warp)

    @property
    def is_certain(self) -> bool:
        """Is every law certain of one token, and the rule one that needs to know no more?"""
        kinds = {argument.kind for argument in self.arguments}
        return (
            not self.warp.warm
            and self.rule in CERTAIN_TOGETHER
            and kinds <= {"laws", "tokens", "none"}
        )


def is_pending(column: Sequence[object]) -> bool:
    """Are these laws that are not made yet, and none of them empty?"""
    return all(isinstance(value, PendingLaws) and value.count for value in column)


def longest_law(laws: Sequence[PendingLaws]) -> int:
    return 1 if laws[0].single else max(one.count for one in laws)


def is_certain(column: Sequence[object]) -> bool:
    """Are these laws that are certain, or no laws at all?"""
    return all(
        value.is_certain if isinstance(value, PendingLaws) else not isinstance(value, Tensor)
        for value in column
    )


def choices_of(column: Sequence[object]) -> Sequence[object]:
    """What laws are certain of, all found at once; other arguments as they are."""
    if not isinstance(column[0], PendingLaws):
        return column
    laws = cast("Sequence[PendingLaws]", column)
    found = choices(PendingLaws([part for one in laws for part in one.parts]).logits_NV)
    ends = list(accumulate(one.count for one in laws))
    return [found[end - one.count : end] for one, end in zip(laws, ends)]


def longest(column: Sequence[object]) -> int:
    """How many rows, or tokens, an argument has at most; 0 for what has none."""
    if column[0] is None:
        return 0
    if isinstance(column[0], PendingLaws) and column[0].single:
        return 1
    return max(len(value) for value in cast("Sequence[Sequence[int]]", column))


def argument_size(column: Sequence[object], length: int) -> ArgumentSize | None:
    """What an argument is in a program that is no laws of logits; None where it does not fit into
    one."""
    if column[0] is None:
        return ArgumentSize("none")
    if any(isinstance(value, (PendingLaws, Tensor)) for value in column):
        tensors = [made(cast("Tensor", value)) for value in column]
        if any(tensor.dim() != 2 for tensor in tensors):
            return None
        return ArgumentSize("tensor", (length, tensors[0].shape[1]), dtype=tensors[0].dtype)
    return ArgumentSize("tokens", (length,))


class RuleProgram:
    """One rule at one size: on CUDA a graph, elsewhere the same code over fixed memory."""

    def __init__(self, size: ProgramSize, batch: RuleBatch, pool: PoolHandle | None):
        self.size = size
        device = batch.device
        on_gpu = device.type == "cuda"
        # Everything but logits and other tensors is 64 bits wide and sent in one copy.
        tokens = [size.batch * a.shape[0] for a in size.arguments if a.kind == "tokens"]
        self._calls = 2 * max(a.rows for a in size.arguments) + 2
        self._used = self._calls  # of them, as soon as that is known
        self._rows = max(a.rows for a in size.arguments)
        self._ahead = self._rows  # draws that are foreseen, as soon as it is known how many
        sources = len(batch.sources)
        rows = [size.batch * self._law_rows(index) for index in range(sources)]
        integers = [*tokens, sources * size.batch, *rows]
        numbers = [size.batch * each for each in (self._calls, self._rows, 4)]
        masks = self._mask_sizes()
        parts = [sum(integers), *numbers, sum(masks)]
        self._host = torch.zeros(sum(parts), dtype=torch.long)
        self._device = torch.zeros_like(self._host, device=device)
        self._host_integers, noise, ahead, warp, bits = np.split(
            self._host.numpy(), np.cumsum(parts)[:-1]
        )
        self._host_masks = np.split(bits.view(np.int32), 2 * np.cumsum(masks)[:-1])
        self._host_noise = noise.view(np.float64).reshape(size.batch, self._calls)
        self._host_ahead = ahead.view(np.float64).reshape(size.batch, self._rows)
        self._host_warp = warp.view(np.float64).reshape(4, size.batch)
        self._host_noise[:] = 0.5
        self._host_ahead[:] = 0.5
        self._written_warp: np.ndarray | None = None
        integers_S, noise_S, ahead_S, warp_S, bits_S = self._device.split(parts)
        split = integers_S.split(integers)
        self._tokens = split[: len(tokens)]
        self._counts_SB = split[len(tokens)].view(sources, size.batch)
        self._picked = split[len(tokens) + 1 :]  # which rows of logits are wanted
        self._masks = bits_S.view(torch.int32).split([2 * each for each in masks])
        self._noise_BC = noise_S.view(torch.float64).view(size.batch, self._calls)
        self._ahead_BL = ahead_S.view(torch.float64).view(size.batch, self._rows)
        self._warp_4B = warp_S.view(torch.float64).view(4, size.batch)
        self._logits = [
            torch.zeros(size.batch, self._law_rows(index), size.vocab, dtype=dtype, device=device)
            for index, dtype in enumerate(size.dtypes)
        ]
        self._tensors = [
            torch.zeros(size.batch, *a.shape, dtype=a.dtype, device=device)
            for a in size.arguments
            if a.kind == "tensor"
        ]
        self._logits_RV = [logits_BLV.flatten(0, 1) for logits_BLV in self._logits]
        self._packed: PackedOutcome | None = None
        self.fills = 0  # times that it was filled
        self._numbers: list[list[int]] = []  # the rows of logits that it was filled with
        self._run: Callable[[], Tensor] = self._program
        self._fill(batch)
        if on_gpu:
            with capturing_alone():
                self._run = capture_graph(self._program, pool)

    def _mask_sizes(self) -> list[int]:
        """For each of the logits, how many numbers of 64 bits hold its bitmasks."""
        per_row = words(self.size.vocab)
        rows = [self.size.batch * self._law_rows(i) for i in range(len(self.size.masked))]
        sizes = [-(-each * per_row // 2) for each in rows]
        return [size if masked else 0 for size, masked in zip(sizes, self.size.masked)]

    def _law_rows(self, index: int) -> int:
        laws = [a for a in self.size.arguments if a.kind.endswith("laws")]
        return max(argument.rows for argument in laws if argument.logits == index)

    def run(self, batch: RuleBatch) -> Applied:
        self._fill(batch)
        tensor = self._run()
        assert self._packed is not None
        return Applied(self._packed, len(batch.draws), HostCopy(tensor))

    def run_ahead(self, batch: RuleBatch, late: Sequence[Late]) -> Applied:
        """The same with arguments that only the device knows yet."""
        self._fill(batch)
        return self._run_late(len(batch.draws), late)

    def run_again(self, count: int, logits_RV: Tensor, late: Sequence[Late]) -> Applied:
        """What was run ahead, for other logits: all else that the host knows of is as it was."""
        self._pick_again(logits_RV)
        return self._run_late(count, late)

    def _pick_again(self, logits_RV: Tensor) -> None:
        for index, numbers in enumerate(self._numbers):
            self._pick(index, logits_RV, numbers)

    def _set_late(self, late: Sequence[Late]) -> None:
        """Write the tokens that only the device knows."""
        kinds = [argument.kind for argument in self.size.arguments]
        for number, known_B, is_shift in late:
            place_BK = self._tokens[kinds[:number].count("tokens")].view(self.size.batch, -1)
            mine_BK = place_BK[: len(known_B)]
            if is_shift:
                mine_BK += torch.where(mine_BK >= 0, known_B[:, None], 0)  # padding stays
            else:
                known_BK = known_B.view(len(known_B), -1)
                mine_BK[:, : known_BK.shape[1]] = known_BK

    def _run_late(self, count: int, late: Sequence[Late]) -> Applied:
        self._set_late(late)
        tensor = self._run()
        assert self._packed is not None
        applied = Applied(self._packed, count, HostCopy(tensor))
        applied.used_noise = bool(self._used or self._ahead)
        applied.ran = Ran(self, self.fills) if len(self._numbers) == 1 else None
        return applied

    def run_tokens(self, draws: TokenDraws) -> Applied:
        """The same for a token each, from rows that lie side by side: no integers are needed."""
        count = len(draws.seqs)
        self.fills += 1
        if draws.masks_RW is not None:
            bits = self._host_masks[0][: self.size.batch * words(self.size.vocab)]
            bits.reshape(self.size.batch, -1)[:count] = draws.masks_RW
        self._fill_numbers(draws.noise, draws.warp_4B)
        send(self._host, self._device)
        self._logits_RV[0][:count].copy_(draws.logits_RV)
        tensor = self._run()
        assert self._packed is not None
        return Applied(self._packed, count, HostCopy(tensor))

    def _fill(self, batch: RuleBatch) -> None:
        """Put a batch into the fixed memory. Its first sequence stands in for those that miss."""
        self.fills += 1
        size = self.size
        count = len(batch.draws)
        picked = [
            self._padded(source.row_numbers(self._law_rows(index)), count)
            for index, source in enumerate(batch.sources)
        ]
        counts = [
            number
            for source in batch.sources
            for number in self._padded([one.count for one in source.laws], count)
        ]
        self._host_integers[:] = [*self._fill_arguments(batch), *counts, *chain(*picked)]
        for index, source in enumerate(batch.sources):
            if size.masked[index]:
                self._write_masks(index, self._padded(source.laws, count))
        self._fill_numbers(batch.noise, batch.warp_4B)
        send(self._host, self._device)
        self._numbers = picked
        for index, (source, numbers) in enumerate(zip(batch.sources, picked)):
            self._pick(index, source.logits(), numbers)

    def _fill_numbers(self, noise: list[tuple[int, int]], warp_4B: np.ndarray | None) -> None:
        """Write sampling parameters, and numbers that decide draws."""
        count = len(noise)
        if self.size.warp.warm and warp_4B is not self._written_warp:
            assert warp_4B is not None
            self._host_warp[:, :count] = warp_4B
            self._host_warp[:, count:] = warp_4B[:, :1]
            self._written_warp = warp_4B
        if self._used:
            self._host_noise[:count, : self._used] = uniforms(noise, 0, self._used)
        if self._ahead:
            self._host_ahead[:count, : self._ahead] = uniforms_ahead(noise, self._ahead)

    def _padded(self, values: Sequence[Any], count: int) -> list[Any]:
        """Values of so many sequences, and those of the first one for all that miss."""
        each = len(values) // count
        return [*values, *list(values[:each]) * (self.size.batch - count)]

    def _fill_arguments(self, batch: RuleBatch) -> list[int]:
        """Write the arguments that are tensors, and return tokens, which are sent with the rest."""
        tensors = iter(self._tensors)
        tokens: list[int] = []
        for column, argument in zip(batch.columns, self.size.arguments):
            if argument.kind == "tokens":
                tokens += padded_lists(self._padded(column, len(column)), argument.shape[0])
            elif argument.kind == "tensor":
                _write_tensors(next(tensors), self._padded(column, len(column)))
        return tokens

    def _pick(self, index: int, source_RV: Tensor, numbers: Sequence[int]) -> None:
        """Copy rows of logits, as neighbours if they are."""
        out_RV = self._logits_RV[index]
        first = numbers[0]
        if numbers[-1] == first + len(numbers) - 1 and numbers == [*range(first, numbers[-1] + 1)]:
            out_RV.copy_(source_RV[first : first + len(numbers)])
        else:
            torch.index_select(source_RV, 0, self._picked[index], out=out_RV)

    def _write_masks(self, index: int, laws: Sequence[PendingLaws]) -> None:
        batch, length, vocab = self._logits[index].shape
        bits = self._host_masks[index][: batch * length * words(vocab)]
        parts = [part for one in laws for part in padded_parts(one, length)]
        write_masks(bits.reshape(batch * length, -1), parts)

    def _program(self) -> Tensor:
        tokens = iter(self._tokens)
        tensors = iter(self._tensors)
        arguments: list[Tensor | None] = []
        for argument in self.size.arguments:
            if argument.kind == "tokens":
                arguments.append(next(tokens).view(self.size.batch, -1))
            elif argument.kind == "tensor":
                arguments.append(next(tensors))
            elif argument.kind == "none":
                arguments.append(None)
            elif self.size.is_certain:
                arguments.append(self._choices(argument))
            else:
                arguments.append(self._laws(argument))
        outcome = self._decide(arguments)
        check_outcome(outcome, self.size.batch)
        self._packed = PackedOutcome(outcome)
        return self._packed.tensor

    def _decide(self, arguments: Sequence[Tensor | None]) -> Outcome:
        noise = FixedNoise(self._noise_BC, self._ahead_BL)
        if self.size.is_certain:
            outcome = CERTAIN_TOGETHER[self.size.rule](*arguments)
        else:
            outcome = self.size.rule(*arguments, noise)
        self._used = noise.calls
        self._ahead = noise.looks_ahead
        return outcome

    def _choices(self, argument: ArgumentSize) -> Tensor:
        """What the laws of an argument are certain of; -1 for rows that only pad."""
        choice_BL = likeliest(*self._rows_of(argument)).view(self.size.batch, -1)
        if not argument.shape:
            return choice_BL[:, 0]
        return torch.where(self._inside_BL(argument), choice_BL, -1)

    def _laws(self, argument: ArgumentSize) -> Tensor:
        """The laws of an argument, with zeros for rows that only pad."""
        batch, rows, _ = self._logits[argument.logits].shape
        logits_RV, masks_RW = self._rows_of(argument)
        if argument.kind == "model laws":
            law_RV = model_laws(logits_RV, masks_RW)
        else:
            columns_4R = self._warp_4B[..., None].expand(4, batch, rows).flatten(1)
            law_RV = self.size.warp.laws(logits_RV, columns_4R, masks_RW)
        law_BLV = law_RV.unflatten(0, (batch, rows))
        if not argument.shape:
            return law_BLV[:, 0]
        return torch.where(self._inside_BL(argument)[..., None], law_BLV, 0)

    def _rows_of(self, argument: ArgumentSize) -> tuple[Tensor, Tensor | None]:
        """The logits that an argument's laws are of, and their bitmasks."""
        logits_RV = self._logits_RV[argument.logits]
        if not self.size.masked[argument.logits]:
            return logits_RV, None
        bits = self._masks[argument.logits][: len(logits_RV) * words(self.size.vocab)]
        return logits_RV, bits.view(len(logits_RV), -1)

    def _inside_BL(self, argument: ArgumentSize) -> Tensor:
        """Which rows of an argument are its own?"""
        row_L = torch.arange(self._logits[argument.logits].shape[1], device=self._device.device)
        return row_L < self._counts_SB[argument.logits][:, None]


def padded_parts(laws: PendingLaws, rows: int) -> Sequence[LawRows]:
    """The parts of some laws, and their first row as often as rows are missing."""
    if laws.count == rows:
        return laws.parts
    first = laws.parts[0].cut(0, 1)
    return [*laws.parts, *[first] * (rows - laws.count)]


def padded_lists(lists: Sequence[Sequence[int]], length: int) -> list[int]:
    """The tokens of all lists, each filled up with -1."""
    padding = [-1] * length
    numbers: list[int] = []
    for values in lists:
        numbers += values
        numbers += padding[len(values) :]
    return numbers


def _write_tensors(place: Tensor, values: Sequence[Tensor]) -> None:
    place.zero_()
    for target, value in zip(place, values):
        law = made(value)
        target[: len(law)] = law


def check_outcome(outcome: object, count: int) -> None:
    """Refuse what is no outcome of so many sequences."""
    if not isinstance(outcome, Outcome):
        raise NotAble(f"a rule must return an Outcome, not {type(outcome).__name__}.")
    for name, column in outcome.columns().items():
        if len(column) != count:
            raise NotAble(
                f"a rule must return one row per sequence: {name!r} has {len(column)} for {count}."
            )


def check_same(plain: Sequence[Outcome | None], program: Sequence[Outcome | None]) -> None:
    """Refuse a program whose outcomes are not those of the plain code. Its lists may be longer, by
    padding."""
    for one, other in zip(plain, program, strict=True):
        if one is None or other is None:
            same = one is other
        else:
            pairs = zip(vars(one).values(), vars(other).values(), strict=True)
            same = all(_close(a, b) for a, b in pairs)
        if not same:
            raise RuntimeError(f"a captured rule said {other}, its plain code {one}")


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(other) >= len(one) and all(_close(a, b) for a, b in zip(one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(one == other)
