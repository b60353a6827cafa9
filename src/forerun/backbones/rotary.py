"""Rotary embeddings that change as the text grows, as rows need them: a rotation that depends on
the row's position alone.

'dynamic' frequencies follow the length of a text past the context that a model was trained with. A
row is rotated as the library rotates it when `generate` comes to its position, and stays so: from a
prompt within the trained context, the tokens are the same. 'longrope' has one set of factors within
the trained context and another beyond it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CHANGING = ("dynamic", "longrope")
# They compute a text anew with the long factors once it passes the trained context.
BEGIN_ANEW = ("phi3", "phimoe", "phi4_multimodal")


def rope_types(rotary: Any) -> dict[str | None, str]:
    """The kinds of rotations of a rotary module: one, or one for each type of layer."""
    found = getattr(rotary, "rope_type", None)
    if isinstance(found, dict):
        return dict(found)
    return {None: found} if isinstance(found, str) else {}


def changes(rotary: Any) -> bool:
    return any(kind in CHANGING for kind in rope_types(rotary).values())


def trained_context(config: Any, layer_type: str | None = None) -> int:
    """How many positions the rotations were made for before they were stretched."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get(layer_type, rope)
    trained = None
    if rope.get("rope_type") == "longrope":
        trained = rope.get("original_max_position_embeddings")
    return trained or config.max_position_embeddings


def begins_anew(config: Any, context: int) -> bool:
    """Is a text that passes the trained context computed anew from its first token?"""
    rope = getattr(config, "rope_parameters", None) or {}
    anew = config.model_type in BEGIN_ANEW and rope.get("rope_type") == "longrope"
    return (
        anew
        and hasattr(config, "original_max_position_embeddings")
        and context > trained_context(config)
    )


def rotations(
    rotary: Any, context: int, device: torch.device, layer_type: str | None = None
) -> Tensor | tuple[Tensor, ...]:
    """What a rotary module gives for every position, each as `generate` first comes to it."""
    positions = torch.arange(context, device=device)[None]
    options = {} if layer_type is None else {"layer_type": layer_type}
    x = torch.zeros(1, device=device)
    kind = rope_types(rotary).get(layer_type)
    if kind not in CHANGING:
        return rotary(x, positions, **options)
    rotary(x, positions[:, :1], **options)  # it may still be stretched by an earlier text
    trained = min(trained_context(rotary.config, layer_type), context)
    # Past the trained context every position has dynamic frequencies of its own; long factors are
    # the same for all.
    piece = 1 if kind == "dynamic" else context
    pieces = [positions[:, :trained], *positions[:, trained:].split(piece, 1)]
    found = [rotary(x, piece, **options) for piece in pieces if piece.numel()]
    if isinstance(found[0], Tensor):
        return torch.cat(found, 1)
    return tuple(torch.cat(parts, 1) for parts in zip(*found))


class PositionTable(nn.Module):
    """Stands in for a rotary module: rotations looked up by position. With `anew`, those of a text
    that was computed anew with the long factors."""

    def __init__(self, rotary: Any, context: int):
        super().__init__()
        self.rotary = rotary
        self.context = context
        self.anew = False
        self._tables: dict[tuple[str | None, bool], Any] = {}

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        key = (layer_type, self.anew)
        if key not in self._tables:
            self._tables[key] = self._table(x.device, layer_type)
        table = self._tables[key]
        if isinstance(table, Tensor):
            return table[0][position_ids]
        return tuple(part[0][position_ids].to(x.dtype) for part in table)

    def grow(self, context: int) -> None:
        if context > self.context:
            self.context = context
            self._tables.clear()

    def _table(self, device: torch.device, layer_type: str | None) -> Any:
        if not self.anew:
            return rotations(self.rotary, self.context, device, layer_type)
        positions = torch.arange(self.context, device=device)[None]
        return self.rotary(torch.zeros(1, device=device), positions)


def replace_changing(model: nn.Module, context: int) -> list[PositionTable]:
    """Put a table in the place of every rotary module that changes as the text grows. One that is
    there already grows."""
    tables = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PositionTable):
                child.grow(context)
                tables.append(child)
            elif changes(child) and not isinstance(parent, PositionTable):
                table = PositionTable(child, context)
                setattr(parent, name, table)
                tables.append(table)
    return tables
