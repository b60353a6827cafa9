"""Any `transformers` causal model with full attention, driven by rows through the library's attention interface.

The model sees one long sequence (all rows of all requests end to end); our attention function, which the library calls in every
layer, knows where each row's keys live. No cache object of the library is used, and no mask of its making.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from forerun.backbones.attention import attend
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch
from forerun.errors import NotAble

INTERFACE = "forerun"


def _interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None = None,
    *,
    batch: Batch,
    slots: Slots,
    **_: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls in place of its attention: tensors come as [1, heads, T, D], rotated already."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out_TE = attend(module.layer_idx, q, k, v, batch, slots, scale)
    return out_TE.view(1, out_TE.shape[0], query.shape[1], -1), None


AttentionInterface.register(INTERFACE, _interface)


def processes(model: Any) -> int:
    """Over how many processes the library split its layers; each then has its share of the heads, and of their keys and values."""
    return int(getattr(model, "tp_size", None) or 1)


class LibraryBackbone:
    """Rows to logits through a `transformers` model."""

    def __init__(self, model: Any, vocab: int, context: int):
        self.model, self.vocab, self.context = model.eval(), vocab, context
        self.device, self.dtype = model.device, model.dtype
        self.cost = float(sum(p.numel() for p in model.parameters()))
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self.layers = config.num_hidden_layers
        self.key_heads = (getattr(config, "num_key_value_heads", None) or heads) // processes(model)
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.fold = heads // processes(model) // self.key_heads
        self.capturable = config.model_type != "gpt_neo" and processes(model) == 1  # local layers, and talk between processes
        if config.model_type == "gpt_neo":
            _replace_neo_attention(model)
        elif not getattr(model, "_supports_attention_backend", False):
            raise NotAble(f"'{config.model_type}' does not use transformers' attention interface, so rows cannot drive it.")
        else:
            model.set_attn_implementation(INTERFACE)

    def bytes_per_lane(self, context: int) -> int:
        return 2 * self.layers * context * self.key_heads * self.head_dim * self.dtype.itemsize

    def make_slots(self, lanes: int, context: int) -> Slots:
        return Slots(self.layers, lanes, context, self.key_heads, self.head_dim, self.dtype, self.device)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        base = self.model.base_model
        hidden_1TE = base(
            input_ids=batch.tokens_T[None],
            position_ids=batch.positions_T[None],
            use_cache=False,
            attention_mask=None,
            batch=batch,
            slots=slots,
        ).last_hidden_state
        head = self.model.get_output_embeddings()
        return head(hidden_1TE[0, batch.reads_R])[:, : self.vocab]


class NeoAttention(nn.Module):
    """GPT-Neo's attention over slots: unscaled, and every other layer looks back only `window_size` tokens.

    The library's own has no attention interface and a triangle built into its weights, hence this stand-in with its projections.
    """

    def __init__(self, original: Any, window: int | None):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            original.q_proj,
            original.k_proj,
            original.v_proj,
            original.out_proj,
        )
        self.layer, self.heads, self.window = original.layer_id, original.num_heads, window
        self.batch: Batch
        self.slots: Slots

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        q, k, v = (proj(hidden_states)[0].unflatten(-1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(attend(self.layer, q, k, v, self.batch, self.slots, 1.0, self.window))[None], None


def _replace_neo_attention(model: Any) -> None:
    modules = []
    for block in model.transformer.h:
        original = block.attn.attention
        window = model.config.window_size if original.attention_type == "local" else None
        block.attn.attention = NeoAttention(original, window)
        modules.append(block.attn.attention)

    def hand_over(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        batch, slots = kwargs.pop("batch"), kwargs.pop("slots")
        for module in modules:
            module.batch, module.slots = batch, slots
        return args, kwargs

    model.base_model.register_forward_pre_hook(hand_over, with_kwargs=True)


@torch.inference_mode()
def prove(backbone: LibraryBackbone) -> None:
    """Refuse an architecture nobody has tried unless rows in two steps over slots give the logits of the model's own forward."""
    import numpy as np

    from forerun.families.causal import Causal

    tokens = (np.arange(8) * 7 + 3) % backbone.vocab
    slots = backbone.make_slots(2, 8)
    for text, start in ((tokens[:5], 0), (tokens, 5)):
        plan = Causal.after(text.astype(np.int32), [()])
        ours = backbone.forward(Batch([(1, plan, start)], 8, backbone.device), slots)
    backbone.model.set_attn_implementation("sdpa" if backbone.model._supports_sdpa else "eager")
    theirs = backbone.model(torch.from_numpy(tokens)[None].to(backbone.device)).logits[0, -1:, : backbone.vocab]
    backbone.model.set_attn_implementation(INTERFACE)
    off = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not off < (1e-3 if backbone.dtype in (torch.float32, torch.float64) else 5e-2):
        raise NotAble(
            f"'{backbone.model.config.model_type}' computes attention in a way that rows do not express "
            f"(its logits came out {off:.1%} off), so this engine refuses it."
        )
