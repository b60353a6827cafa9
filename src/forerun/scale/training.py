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
from forerun.train import head_loss

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


def layer_weights(shape: Shape) -> int:
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return (weights_of(shape) - embeddings) // shape.layers


@dataclass(frozen=True)
class DrafterRun:
    """Training a drafter that reads its target's hidden states, on one GPU."""

    target: Shape
    layers: int
    features: int  # target layers that it reads
    texts: int  # of a step
    longest: int  # tokens of a text
    anchors: int  # blocks of a text
    block: int
    markov_rank: int = 0
    written: int = 2048  # texts at once, while the target writes them

    @property
    def weights(self) -> int:
        shape = self.target
        fused = self.features * shape.hidden**2
        return self.layers * layer_weights(shape) + fused + 2 * self.markov_rank * shape.vocab


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


def kept_of_layer(shape: Shape) -> int:
    """Bytes of a row that the way back through one layer needs."""
    return (8 * shape.hidden + 4 * shape.inner) * HALF


def memory_of(run: Run) -> Memory:
    shape = run.shape
    rows = run.share * run.rows
    layer = layer_weights(shape)
    embeddings = weights_of(shape) - shape.layers * layer
    inside = rows * kept_of_layer(shape)  # one layer at a time is whole
    logits = run.share * (run.predicted or run.rows) * shape.vocab
    return Memory(
        state=weights_of(shape) * STATE_BYTES / run.gpus / GIBIBYTE,
        gathered=(LAYERS_GATHERED * layer + embeddings) * HALF / GIBIBYTE,
        activations=(shape.layers * rows * shape.hidden * HALF + inside) / GIBIBYTE,
        logits=logits * FULL * LOGIT_COPIES / GIBIBYTE,
        frozen=run.frozen * HALF / GIBIBYTE,
    )


def memory_of_step(run: Run) -> Memory:
    """Of one forward and its way back on one GPU, as `bench/train_step.py` measures it: weights and
    gradients in bfloat16, nothing shared out, no optimiser."""
    whole = memory_of(run)
    state = weights_of(run.shape) * 2 * HALF / GIBIBYTE
    return Memory(state, 0.0, whole.activations, whole.logits, whole.frozen)


def memory_of_drafter(run: DrafterRun) -> Memory:
    """Nothing is shared out, and no layer runs again on the way back. The loss makes logits of some
    rows at a time. The target keeps no activations."""
    shape = run.target
    rows = run.texts * (run.longest + run.anchors * run.block)
    features = run.texts * run.longest * run.features * shape.hidden * HALF
    return Memory(
        state=run.weights * STATE_BYTES / GIBIBYTE,
        gathered=run.weights * HALF / GIBIBYTE,
        activations=(run.layers * rows * kept_of_layer(shape) + features) / GIBIBYTE,
        logits=head_loss.LOGITS * FULL * LOGIT_COPIES / GIBIBYTE,
        frozen=weights_of(shape) * HALF / GIBIBYTE,
    )


def memory_of_own_text(run: DrafterRun) -> float:
    """GiB while the target writes: its weights, and the slots of all texts."""
    shape = run.target
    head = shape.head_dim or shape.hidden // shape.heads
    slot = 2 * shape.layers * shape.key_heads * head * HALF
    return (weights_of(shape) * HALF + run.written * run.longest * slot) / GIBIBYTE


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
