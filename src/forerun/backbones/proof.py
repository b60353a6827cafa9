"""The proof at load time: rows over slots must give the logits of the model's own forward.

Both run in float32 whatever the weights are: what half precision rounds away can be as large as a
real mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forerun.backbones.lean import processes
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch
from forerun.sequence.rows import Plan, causal_rows

ROWS = 8
STEPS = ((5, 0), (8, 5))  # rows in the plan, first row that runs
NEIGHBOUR = 3  # rows of another sequence in the first step
# of the largest logit, and what rounding makes of it where a proof cannot run in float32
LARGEST_ERROR = 1e-3
LARGEST_ROUNDED_ERROR = 5e-2
HALF = (torch.float16, torch.bfloat16)


def proof_tokens(vocab: int) -> np.ndarray:
    return (np.arange(ROWS) * 7 + 3) % vocab


@torch.inference_mode()
def own_logits(model: Any, vocab: int) -> Tensor:
    """What the model's own forward says after the tokens of the proof."""
    ids = torch.from_numpy(proof_tokens(vocab))[None].to(model.device)
    with widened(model):
        return model(input_ids=ids).logits[0, -1, :vocab].float()


@torch.inference_mode()
def proof_error(backbone: Any, own_V: Tensor) -> float:
    """How far the logits of rows, in two steps and beside another sequence, are off the model's
    own, as a share of the largest."""
    tokens = proof_tokens(backbone.vocab)
    with widened(backbone.model):
        slots = _float_slots(backbone)
        for end, start in STEPS:
            rows = causal_rows(tokens[:end])
            plan = Plan(rows, [np.array([end - 1])], stored=end, causal=end)
            work = [(1, plan, start)]
            if start == 0:
                other = causal_rows(tokens[::-1][:NEIGHBOUR].copy())
                work.insert(0, (0, Plan(other, [np.array([0])], stored=NEIGHBOUR), 0))
            ours_RV = backbone.forward(Batch(work, ROWS, backbone.device), slots)
    difference = (ours_RV[-1].float() - own_V).abs().max()
    return (difference / own_V.abs().max()).item()


def largest_error(backbone: Any) -> float:
    """What a proof may be off. Quantised layers may round a row by the rows beside it."""
    split = backbone.dtype in HALF and processes(backbone.model) > 1
    quantised = getattr(backbone.model.config, "quantization_config", None) is not None
    return LARGEST_ROUNDED_ERROR if split or quantised else LARGEST_ERROR


def _float_slots(backbone: Any) -> Slots:
    """Slots for the proof, in the precision in which it runs."""
    own = backbone.dtype
    if own in HALF and processes(backbone.model) == 1:
        backbone.dtype = torch.float32
    try:
        return backbone.make_slots(2, ROWS)
    finally:
        backbone.dtype = own


@contextmanager
def widened(model: Any) -> Iterator[None]:
    """Run a model in float32: each module has its weights in float32 while it runs, one module at a
    time, so that no second copy of a large model is needed. A model that is split over processes
    keeps its precision."""
    handles = []
    held: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def widen(module: nn.Module, _: Any) -> None:
        halves = [t for t in _own_tensors(module) if t.dtype in HALF]
        held[id(module)] = [(tensor, tensor.data) for tensor in halves]
        for tensor in halves:
            tensor.data = tensor.data.float()

    def narrow(module: nn.Module, _: Any, __: Any) -> None:
        for tensor, data in held.pop(id(module), []):
            tensor.data = data

    for module in model.modules() if processes(model) == 1 else ():
        if any(tensor.dtype in HALF for tensor in _own_tensors(module)):
            handles.append(module.register_forward_pre_hook(widen))
            handles.append(module.register_forward_hook(narrow, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for pairs in held.values():
            for tensor, data in pairs:
                tensor.data = data


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
