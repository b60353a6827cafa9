"""What log-likelihood means for each family, and how it is found.

- causal: the chain rule from left to right. Exact: one forward for all tokens.
- any-subset: the joint density, by the chain rule over the blanks from left to right, given all
  that is known. Exact: one forward.
- masked: a bound from below. With l of the L tokens masked at random, l uniform on 1..L,
  (L / l) x the sum of the masked tokens' log-probabilities has as its mean the log-likelihood of a
  random order of decoding, averaged over all orders (Nie et al., 2025, arXiv 2502.09992, equation
  14). `draws` of them are averaged, with l spread evenly over 1..L; the seed decides on all.
- block: block by block. Of each block the same bound, given the finished blocks before it; in
  blocks of one token it is exact. `chain=True` takes the model's left-to-right reading instead,
  which is exact for that reading.

A bound says less than the truth: compare it only with bounds of the same kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from forerun.api import Model
from forerun.engine.ticket import Ticket
from forerun.errors import BadOption
from forerun.evaluate.benchmarks.base import seed_of
from forerun.families.base import ChainScorer
from forerun.families.block import BlockFiller, BlockSpan
from forerun.families.masked import CanvasFiller
from forerun.options import Sampling
from forerun.probability.outcomes import Placement
from forerun.sequence.canvas import BLANK

DRAWS = 32
AT_ONCE = 256  # continuations whose tickets are in the engine together
SMALLEST = 1e-30  # probabilities below it count as this: a law is kept in single precision


class Continuation(NamedTuple):
    """Tokens after a context."""

    context: Sequence[int]
    tokens: Sequence[int]


def digest(asked: Continuation) -> str:
    """A name for what is asked, so that its random maskings do not hang on its neighbours."""
    numbers = np.array([len(asked.context), *asked.context, *asked.tokens], np.int64)
    return hashlib.sha256(numbers.tobytes()).hexdigest()


class Likely(NamedTuple):
    """How likely a continuation is, in nats, and whether greedy decoding writes it."""

    logprob: float
    greedy: bool


class Draw(NamedTuple):
    """Which of a block's blanks are masked; the others are as they are in the text."""

    masked: list[int]
    given: Placement


@dataclass(frozen=True)
class Likelihood:
    """Scores continuations and whole texts under a model."""

    model: Model
    draws: int = DRAWS
    seed: int = 0
    chain: bool = False  # block models: read from left to right, in blocks of one token
    check_greedy: bool = True  # masked and block models have to decode for it
    kind: str = field(init=False)  # chain | bound | blocks

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise BadOption(f"draws={self.draws} must be 1 or more.")
        family = self.model.family
        kind = "chain" if family.can(ChainScorer) else "bound"
        if family.can(BlockFiller) and not self.chain:
            kind = "blocks"
        object.__setattr__(self, "kind", kind)

    @property
    def meaning(self) -> str:
        """What the number is."""
        return {
            "chain": "the exact log-likelihood",
            "bound": f"a lower bound, the mean of {self.draws} random maskings, seed {self.seed}",
            "blocks": f"block by block a lower bound, the mean of {self.draws} random maskings "
            f"each, seed {self.seed}",
        }[self.kind]

    def continuations(self, asked: Sequence[Continuation]) -> list[Likely]:
        """All of them, in the same order. A context that is too long loses its beginning."""
        found: list[Likely] = []
        for first in range(0, len(asked), AT_ONCE):
            part = [self._fitting(one) for one in asked[first : first + AT_ONCE]]
            found += self._chained(part) if self.kind == "chain" else self._bounded(part)
        return found

    def text(self, tokens: Sequence[int]) -> float:
        """The log-likelihood of a whole text, in windows as long as the context where it is
        longer."""
        return sum(self.texts([tokens]))

    def texts(self, texts: Sequence[Sequence[int]]) -> list[float]:
        parts = [(i, window) for i, text in enumerate(texts) for window in self.windows(text)]
        found = self.continuations([window for _, window in parts])
        totals = [0.0] * len(texts)
        for (i, _), likely in zip(parts, found):
            totals[i] += likely.logprob
        return totals

    def windows(self, tokens: Sequence[int]) -> Iterator[Continuation]:
        """A text in parts, each after as much of what comes before as there is room for: one token
        at least, where the model needs one."""
        context = self.model.context
        start = self.first_context()
        size = context - max(len(start), 1)
        yield Continuation(start, tokens[:size])
        for first in range(size, len(tokens), size):
            part = tokens[first : first + size]
            yield Continuation(tokens[first + len(part) - context : first], part)

    def pair(self, context: str, text: str) -> Continuation:
        """A text after a context, tokenised together; white space at the end of the context
        belongs to what follows it."""
        kept = context.rstrip()
        text = context[len(kept) :] + text
        before = self.model.encode(kept) if kept else self.first_context()
        whole = self.model.encode(kept + text)
        if kept and whole[: len(before)] == before and len(whole) > len(before):
            return Continuation(before, whole[len(before) :])
        return Continuation(before, self.model.encode(text, special=False))

    def first_context(self) -> list[int]:
        """What comes before the first token of a text, where something must."""
        if not self.model.family.needs_prompt:
            return []
        tokenizer = self.model.tokenizer
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(tokenizer, name, None)
            if token is not None:
                return [token]
        return [min(self.model.eos, default=0)]

    def _fitting(self, asked: Continuation) -> Continuation:
        room = self.model.context - len(asked.tokens)
        context = list(asked.context) or self.first_context()
        if room < len(context):
            context = context[len(context) - room :]
        if room < 0 or not asked.tokens or (not context and self.model.family.needs_prompt):
            raise BadOption(
                f"a continuation of {len(asked.tokens)} tokens does not fit the context of "
                f"'{self.model.name}', which holds {self.model.context}."
            )
        return Continuation(context, asked.tokens)

    def _chained(self, asked: Sequence[Continuation]) -> list[Likely]:
        contexts = [list(one.context) for one in asked]
        scores = self.model.score(contexts, [list(one.tokens) for one in asked])
        return [Likely(score.logprob, score.is_greedy) for score in scores]

    def _bounded(self, asked: Sequence[Continuation]) -> list[Likely]:
        bounds = [
            [
                _Bound(self, one, span, seed_of(self.seed, digest(one), span.start))
                for span in self._spans(one)
            ]
            for one in asked
        ]
        self.model.run_all([bound.ticket for parts in bounds for bound in parts])
        greedy = self._greedy(asked) if self.check_greedy else [False] * len(asked)
        totals = [sum(bound.mean() for bound in parts) for parts in bounds]
        return [Likely(total, same) for total, same in zip(totals, greedy)]

    def _spans(self, asked: Continuation) -> list[BlockSpan]:
        """The blocks that hold some of the continuation. To a masked model it is one block."""
        start = len(asked.context)
        end = start + len(asked.tokens)
        if self.kind == "bound":
            return [BlockSpan(start, end, end)]
        handle = self.model.handle()
        assert isinstance(handle, BlockFiller)
        size = handle.block
        firsts = range(start // size * size, end, size)
        return [BlockSpan(first, min(first + size, end), size) for first in firsts]

    def _greedy(self, asked: Sequence[Continuation]) -> list[bool]:
        """Does greedy decoding, by the family's own method, write the continuation?"""
        results = self.model.generate_all(
            [list(one.context) for one in asked],
            max_tokens=[len(one.tokens) for one in asked],
            ignore_eos=True,
        )
        return [list(one.tokens) == result.token_ids for one, result in zip(asked, results)]


class _Bound:
    """The bound of a block's blanks, on its way through the engine."""

    def __init__(self, likelihood: Likelihood, asked: Continuation, span: BlockSpan, seed: int):
        self.model = likelihood.model
        self.span = span
        whole = np.array([*asked.context, *asked.tokens])
        first = max(span.start, len(asked.context))
        self.blanks = np.arange(first, span.end)
        self.truth = whole
        canvas = whole[: span.end].copy()
        canvas[self.blanks] = BLANK
        self.seq = self.model.canvas(canvas.tolist(), Sampling(temperature=1.0))
        self.draws = list(self._drawn(likelihood.draws, seed))
        self.found: list[float] = []
        self.ticket = Ticket(self.seq, self._ask)

    def _drawn(self, count: int, seed: int) -> Iterator[Draw]:
        rng = np.random.default_rng(seed)
        total = len(self.blanks)
        offset = rng.uniform()
        for i in range(count):  # evenly spread, so that the mean varies less
            masks = int((i + offset) / count * total) + 1
            masked = np.sort(rng.permutation(self.blanks)[:masks])
            given = np.setdiff1d(self.blanks, masked).tolist()
            yield Draw(masked.tolist(), [(p, int(self.truth[p])) for p in given])

    async def _ask(self) -> None:
        handle = self.model.handle()
        for masked, given in self.draws:
            if isinstance(handle, BlockFiller):
                [laws] = await handle.blocks(self.seq, [masked], [given], self.span)
            else:
                assert isinstance(handle, CanvasFiller)
                [laws] = await handle.canvases(self.seq, [masked], [given])
            law_NV = laws.model_law
            truth_N = torch.as_tensor(self.truth[masked], device=law_NV.device)
            picked_N = law_NV.gather(1, truth_N[:, None]).double().clamp_min(SMALLEST)
            self.found.append(float(picked_N.log().sum()) * len(self.blanks) / len(masked))

    def mean(self) -> float:
        if self.ticket.error is not None:
            raise self.ticket.error
        return float(np.mean(self.found))
