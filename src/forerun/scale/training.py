"""What training a model takes: memory of each GPU by arithmetic, hours from a measured step.

Weights, gradients and AdamW's two moments are float32 and shared out over n GPUs (FSDP2):
16 bytes a weight, divided by n. While a layer runs its weights are gathered in bfloat16; the next
one is fetched meanwhile. With layers run again on the way back (`recompute`) a layer keeps its
input. The logits of a share of the batch are there a few times over, in float32.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from forerun.profile.shapes import Shape

STATE_BYTES = 16  # of a weight: itself, its gradient, two moments
HALF = 2
FULL = 4
LOGIT_COPIES = 4  # bfloat16 and float32 logits, log-probabilities, their gradients
LAYERS_GATHERED = 2  # the one that runs and the next
GIBIBYTE = 2**30


def weights_of(shape: Shape) -> int:
    """How many weights a decoder of a shape has, norms left out."""
    head = shape.head_dim or shape.hidden // shape.heads
    attention = shape.hidden * head * (2 * shape.heads + 2 * shape.key_heads)
    inner = 3 * shape.hidden * shape.inner
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return shape.layers * (attention + inner) + embeddings


@dataclass(frozen=True)
class Run:
    """A training run, as far as it costs."""

    shape: Shape
    gpus: int
    share: int  # sequences of a forward on one GPU
    rows: int  # of a sequence: its tokens, and what an objective shows beside them
    sequences: int  # of a step, over all GPUs
    steps: int
    predicted: int | None = None  # rows whose logits are made; None: all
    frozen: int = 0  # weights beside the trained ones, in bfloat16 on every GPU: a teacher

    @property
    def layer_weights(self) -> int:
        shape = self.shape
        embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
        return (weights_of(shape) - embeddings) // shape.layers


@dataclass(frozen=True)
class Memory:
    """GiB of one GPU."""

    state: float
    gathered: float
    activations: float
    logits: float
    frozen: float

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.activations + self.logits + self.frozen

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def memory_of(run: Run) -> Memory:
    shape = run.shape
    rows = run.share * run.rows
    embeddings = weights_of(shape) - shape.layers * run.layer_weights
    # one layer at a time is whole: its input in, all that its way back needs
    inside = rows * (8 * shape.hidden + 4 * shape.inner) * HALF
    logits = run.share * (run.predicted or run.rows) * shape.vocab
    return Memory(
        state=weights_of(shape) * STATE_BYTES / run.gpus / GIBIBYTE,
        gathered=(LAYERS_GATHERED * run.layer_weights + embeddings) * HALF / GIBIBYTE,
        activations=(shape.layers * rows * shape.hidden * HALF + inside) / GIBIBYTE,
        logits=logits * FULL * LOGIT_COPIES / GIBIBYTE,
        frozen=run.frozen * HALF / GIBIBYTE,
    )


def network_gigabytes(run: Run) -> float:
    """What one GPU receives in a step: weights for the way there, again for the way back, and its
    share of the gradients, in bfloat16, bfloat16 and float32."""
    forwards = run.sequences // (run.share * run.gpus)
    away = weights_of(run.shape) * (1 - 1 / run.gpus)
    return forwards * away * (2 * HALF + FULL) / 1e9


def hours_of(run: Run, seconds: float, efficiency: float = 0.85) -> float:
    """From the seconds of one forward and its way back of `share` sequences on one GPU. What the
    network and the optimiser take of a step is left to `efficiency`."""
    forwards = run.sequences / (run.share * run.gpus)
    return run.steps * forwards * seconds / efficiency / 3600
