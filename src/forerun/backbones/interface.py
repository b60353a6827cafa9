"""Our attention as `transformers` models call it, by the name `INTERFACE`: rows over slots.

T rows, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from forerun.backbones.attention import LayerAttention, attend
from forerun.engine.cache import LayerSize, Slots
from forerun.engine.pack import Batch

INTERFACE = "forerun"


@dataclass(frozen=True)
class HeardLayer:
    """What one layer keeps per slot, how far it looks back, and whether it attends in the plain way
    that kernels know."""

    heads: int
    size: LayerSize
    window: int | None = None
    plain: bool = False


class RowAttention:
    """The attention of a model that is being run: it knows the rows and their slots, and which
    layer comes next. A model asks once per layer, in every forward in the same order.

    Before there are rows it only listens, and notes what each layer keeps.
    """

    def __init__(self, context: int):
        self.context = context
        self.heard: list[HeardLayer] = []
        self._batch: Batch | None = None
        self._slots: Slots | None = None
        self._next = 0

    def begin(self, batch: Batch, slots: Slots, first_layer: int = 0) -> None:
        self._batch = batch
        self._slots = slots
        self._next = first_layer

    @property
    def running(self) -> tuple[Batch, Slots]:
        assert self._batch is not None and self._slots is not None, "a forward has begun"
        return self._batch, self._slots

    @property
    def listening(self) -> bool:
        return self._batch is None

    def next_layer(self) -> int:
        self._next += 1
        return self._next - 1

    def hear(self, heads: int, key: Tensor, value: Tensor, how: ScoreOptions | None = None) -> None:
        size = LayerSize(key.shape[1], key.shape[-1], value.shape[-1])
        window = None if how is None else how.window
        plain = how is not None and how.plain and size.key_dim == size.value_dim
        self.heard.append(HeardLayer(heads, size, window, plain))

    def temperatures(self, module: Any) -> Tensor | float:
        """By what Llama 4 multiplies the query of each row, [T, 1]. It counts the rows of a
        forward; here they go by their positions."""
        if self._batch is None:
            return 1.0
        steps_T = torch.floor((self._batch.positions_T + 1.0) / module.floor_scale)
        return (torch.log1p(steps_T) * module.attn_scale + 1.0)[:, None]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, how: ScoreOptions) -> Tensor:
        """Tensors come as [1, heads, T, D], rotated already; [1, T, heads, D] goes back."""
        heads = query.shape[1]
        if how.window is not None and how.window >= self.context:
            how = replace(how, window=None)  # no row is so far from another
        if self.listening:
            self.hear(heads, key, value, how)
            return query.new_zeros(1, query.shape[2], heads, value.shape[-1])
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        batch, slots = self.running
        call = LayerAttention(
            self.next_layer(), batch, slots, how.scale, how.window, how.softcap, how.sinks_H
        )
        return attend(q, k, v, call).view(1, q.shape[0], heads, -1)


class RowDriver:
    """Whose rows a network runs now. Several backbones may drive one network, one at a time."""

    def __init__(self) -> None:
        self.attention: RowAttention | None = None
        self.proven = False  # that rows give the logits of the network's own forward

    @classmethod
    def of(cls, network: nn.Module) -> RowDriver:
        """The driver of a network, and of all its modules."""
        driver = getattr(network, "row_driver", None) or cls()
        for module in network.modules():
            module.row_driver = driver  # type: ignore[assignment]
        return driver

    def current(self) -> RowAttention:
        if self.attention is None:
            raise RuntimeError(
                "this network runs rows for Forerun since it was given to it: to call it yourself, "
                "load another, or set its attention with network.set_attn_implementation('sdpa')"
            )
        return self.attention


@dataclass(frozen=True)
class ScoreOptions:
    """How a layer makes and masks its scores."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and self.softcap is None and self.sinks_H is None


def _interface(  # noqa: PLR0913 - the library calls it so
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What `transformers` calls in place of its attention."""
    attention = module.row_driver.current()
    if getattr(module, "tuned_by_rows", False):
        query = query * attention.temperatures(module)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    how = ScoreOptions(scale, sliding_window or _window_of(module), softcap, s_aux)
    return attention(query, key, value, how), None


AttentionInterface.register(INTERFACE, _interface)


def _window_of(module: Any) -> int | None:
    """The window of a layer that does not tell its attention."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if not types or index is None or types[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
