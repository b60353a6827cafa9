"""A device that takes no time, to see what the host does in a step.

Tensors of torch's device `meta` have shapes and no numbers, so a forward, a rule and a copy are
over at once. Everything that the host does for a GPU is done: plans, fixed memory, draws, forwards
that begin before their tokens are known. What a GPU would draw is written down beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.api import Model
from forerun.engine import graphs
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import Slots
from forerun.engine.loop import InCaller
from forerun.engine.pack import Batch
from forerun.engine.rules import Applied, RuleBatch, RuleProgram, Rules
from forerun.families.causal import Causal
from forerun.probability.outcomes import Outcome, PackedOutcome, Token
from forerun.sequence.canvas import Canvas, Draw

NextToken = Callable[[Canvas], int]


class NoNetwork(SlottedBackbone):
    """A model of a size that the engine takes for worth hiding work behind, which does nothing."""

    cost = 7e9
    device = torch.device("meta")
    dtype = torch.bfloat16
    layers = 1
    heads = 28
    key_heads = 4
    head_dim = 1
    capturable = True

    def __init__(self, vocab: int, context: int, rows: int):
        self.vocab = vocab
        self.context = context
        self._logits_RV = torch.empty(rows, vocab, dtype=self.dtype, device=self.device)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        return self._logits_RV[: len(batch.reads_R)]


class Written(Applied):
    """A rule that was run, and whose outcomes were written down."""

    def __init__(self, packed: PackedOutcome, tokens: Sequence[int]):
        self.packed = packed
        self.count = len(tokens)
        self._tokens = tokens

    def column(self, name: str) -> Tensor:
        return torch.tensor(self._tokens)

    def outcomes(self) -> list[Outcome | None]:
        return [self.packed.unpack([token]) for token in self._tokens]


class NoProgram(RuleProgram):
    """A program that is filled as ever and then not run."""

    def _program(self) -> Tensor:
        token_B = torch.empty(self.size.batch, dtype=torch.long, device="meta")
        self._used = 1
        self._ahead = 0
        self._packed = PackedOutcome(Token.of_batch(token=token_B))
        return self._packed.tensor


class NoRules(Rules):
    """Rules as programs, whose outcomes are written down."""

    def __init__(self, next_token: NextToken):
        super().__init__(graphs=True)
        self._next_token = next_token

    def _apply_plain(self, batch: RuleBatch) -> Applied:
        size = self._capturable_size(batch)
        self.programs[size] = NoProgram(size, batch, None)
        return self.programs[size].run(batch)

    def apply(self, draws: Sequence[Draw[Any]]) -> Applied:
        applied = super().apply(draws)
        return Written(applied.packed, [self._next_token(draw.seq) for draw in draws])


def model_without_device(tokenizer: Any, lanes: int, context: int, next_token: NextToken) -> Model:
    """A model whose texts are what `next_token` says, and whose forwards take no time."""
    backbone = NoNetwork(len(tokenizer), context, lanes)
    model = Model(
        "nothing",
        Causal(),
        backbone,
        tokenizer,
        [tokenizer.eos_token_id],
        lanes=lanes,
        context=context,
        graphs=True,
    )
    engine = model.engine
    engine.rules = NoRules(next_token)
    engine.prefetches = True
    host = model.handle().host
    host.runner.capture_enabled = True  # by our own forward: no kernels are needed
    host.writer = None
    graphs.check_logits = lambda plain, replayed: None  # there are no numbers to compare
    model.driver = InCaller(engine)
    return model
