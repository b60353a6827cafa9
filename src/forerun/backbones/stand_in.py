"""Models that compute attention in code of their own, such as GPT-J, Falcon, BLOOM and MPT.

They do ask a cache for the keys and values of earlier tokens. Here that cache writes rows to their
slots and hands out all slots that the rows of a batch may look at, one sequence after the other;
and each attention module is given a mask that says which of them each row sees. A bias that grows
with the position (ALiBi) is made anew from the positions of the rows in the slots.

T rows, S slots of all sequences of a batch, G key heads, D head size.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from forerun.backbones.interface import RowAttention, RowDriver
from forerun.backbones.library import LibraryBackbone
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, visible
from forerun.errors import NotAble
from forerun.sequence.rows import POSITION

BIASES = ("alibi", "position_bias")  # what models call a bias that grows with the position


class SlotCache(Cache):
    """What a model takes for its cache."""

    def __init__(self, attention: RowAttention):
        super().__init__(layers=[])
        self.attention = attention

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Keep keys and values [1, G, T, D], and give back those of all slots, [1, G, S, D]."""
        key, value = key_states, value_states
        if self.attention.listening:
            self.attention.hear(key.shape[1], key, value)
            return key, value
        batch, slots = self.attention.running
        layer = self.attention.next_layer()
        slots.write(layer, batch.slots_T, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = slots.flat(layer)
        return _gathered(keys, batch), _gathered(values, batch)

    # The library makes masks and biases for these sizes, which are replaced.
    def get_seq_length(self, *_: object, **__: object) -> int:
        return 0

    def get_query_offset(self, *_: object, **__: object) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: object, **__: object) -> tuple[int, int]:
        return query_length, 0

    def get_max_cache_shape(self, *_: object, **__: object) -> int:
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        return [False]


def _gathered(stored: Tensor, batch: Batch) -> Tensor:
    """The slots of all sequences of a batch, end to end: [1, G, S, D]. What is no number becomes
    one, or a masked weight of zero would carry it into other sequences."""
    parts = [stored[batch.span(i)] for i in range(len(batch.segments))]
    return torch.cat(parts).nan_to_num_(0.0, 0.0, 0.0)[None].transpose(1, 2)


class RowMasks:
    """The masks and biases of one batch, in every form that a module asks for."""

    def __init__(self, batch: Batch):
        self.visible_TS = _visible(batch)
        self.positions_S = torch.from_numpy(
            np.concatenate([s.plan.rows[POSITION] for s in batch.segments])
        ).to(batch.device)

    def like(self, shown: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A mask of the kind that the module was shown while we listened."""
        if shown is not None and shown.dtype == torch.bool:
            # Then the first row did not see the second token. Was that True or False?
            hides = bool(shown[0, 0, 0, 1])
            mask_TS = ~self.visible_TS if hides else self.visible_TS
            return mask_TS[None, None]
        mask_TS = torch.zeros(self.visible_TS.shape, dtype=dtype, device=self.visible_TS.device)
        mask_TS.masked_fill_(~self.visible_TS, -torch.inf)
        if shown is None or shown.shape[1] == 1:
            return mask_TS[None, None]
        return mask_TS + self.bias(shown[:, :, -1:].to(dtype))

    def bias(self, shown: Tensor) -> Tensor:
        """A bias that is linear in the position of the key, for the keys in the slots."""
        return (shown[..., 1:2] - shown[..., :1]) * self.positions_S.to(shown.dtype)


def _visible(batch: Batch) -> Tensor:
    """Which row sees which slot of the batch: [T, S]."""
    whole = np.zeros((len(batch.slots), sum(s.end for s in batch.segments)), bool)
    first = 0
    for s in batch.segments:
        whole[s.offset : s.offset + s.rows, first : first + s.end] = visible(s)
        first += s.end
    return torch.from_numpy(whole).to(batch.device)


class StandInBackbone(LibraryBackbone):
    """Rows to logits through a model that only knows caches."""

    capturable = False

    def _attach(self) -> None:
        self._cache = SlotCache(self.attention)
        self._masks: RowMasks
        self._shown: dict[nn.Module, dict[str, Tensor | None]] = {}
        if "past_key_values" not in self._takes:
            raise NotAble(
                f"'{self.config.model_type}' has neither the library's attention interface nor its "
                "cache, so rows cannot drive it."
            )
        self.driver = RowDriver.of(self.model)
        self._told_positions = self._tell_positions()
        for module in _attention_modules(self.model):
            module.register_forward_pre_hook(self._give_masks, with_kwargs=True)

    def _knows_positions(self) -> bool:
        """A bias by position is enough."""
        return bool(self._told_positions) or all(
            any(shown[name] is not None for name in BIASES) for shown in self._shown.values()
        )

    def _give_masks(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._drives:
            return args, kwargs
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs)
        arguments = dict(given.arguments)
        extra = arguments.pop("kwargs", {})
        if self.attention.listening:
            names = ("attention_mask", *BIASES)
            self._shown[module] = {name: arguments.get(name) for name in names}
            return args, kwargs
        shown = self._shown[module]
        dtype = next(value.dtype for value in arguments.values() if isinstance(value, Tensor))
        arguments["attention_mask"] = self._masks.like(shown["attention_mask"], dtype)
        for name in BIASES:
            bias = shown[name]
            if bias is not None:
                arguments[name] = self._masks.bias(bias.to(dtype))
        return (), {**arguments, **extra}

    def _run(self, batch: Batch, slots: Slots, first_layer: int = 0) -> Tensor:
        self._masks = RowMasks(batch)
        return super()._run(batch, slots, first_layer)

    def _call(
        self, tokens: Tensor, positions: Tensor, reads_R: Tensor | None = None, **options: Any
    ) -> Tensor:
        cached = dict(past_key_values=self._cache, use_cache=True)
        return super()._call(tokens, positions, reads_R, **cached, **options)


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that take a mask."""

    def takes_mask(module: nn.Module) -> bool:
        return "attention_mask" in inspect.signature(module.forward).parameters

    return [
        module
        for module in model.modules()
        if takes_mask(module)
        and not any(takes_mask(child) for child in module.modules() if child is not module)
    ]
