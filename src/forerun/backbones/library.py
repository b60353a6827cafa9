"""Any `transformers` causal model with full attention, driven by rows through the library's
attention interface.

The model sees one long sequence: all rows of all requests end to end. The library calls our
attention function in every layer, and that function knows where each row's keys live. No cache and
no mask of the library is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from forerun.backbones.attention import LayerAttention, attend
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch
from forerun.errors import NotAble
from forerun.sequence.rows import Plan, causal_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INTERFACE = "forerun"


class _AttentionModule(Protocol):
    layer_idx: int


def _interface(  # noqa: PLR0913 - the library calls it so
    module: _AttentionModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    *,
    batch: Batch,
    slots: Slots,
    **_: object,
) -> tuple[Tensor, None]:
    """What `transformers` calls in place of its attention. Tensors come as [1, heads, T, D],
    rotated already."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out_TE = attend(q, k, v, LayerAttention(module.layer_idx, batch, slots, scale))
    return out_TE.view(1, out_TE.shape[0], query.shape[1], -1), None


AttentionInterface.register(INTERFACE, _interface)


def processes(model: PreTrainedModel) -> int:
    """Over how many processes the library split its layers. Each process then has its share of the
    heads, and of their keys and values."""
    return int(getattr(model, "tp_size", None) or 1)


class LibraryBackbone(SlottedBackbone):
    """Rows to logits through a `transformers` model."""

    def __init__(self, model: PreTrainedModel, vocab: int, context: int):
        self.model: Any = model.eval()
        self.vocab = vocab
        self.context = context
        self.device = model.device
        self.dtype = model.dtype
        self.cost = float(sum(p.numel() for p in model.parameters()))
        config: Any = model.config.get_text_config()
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        self.layers = config.num_hidden_layers
        self.heads = heads // processes(model)
        self.key_heads = key_heads // processes(model)
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        # GPT-Neo has local layers; several processes talk to each other in a forward.
        self.capturable = config.model_type != "gpt_neo" and processes(model) == 1
        if config.model_type == "gpt_neo":
            _replace_neo_attention(model)
        elif not getattr(model, "_supports_attention_backend", False):
            raise NotAble(
                f"'{config.model_type}' does not use transformers' attention interface, so rows "
                "cannot drive it."
            )
        else:
            model.set_attn_implementation(INTERFACE)

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
    """GPT-Neo's attention over slots: unscaled, and every other layer looks back only `window_size`
    tokens.

    The library's own attention has no interface and a triangle built into its weights. This module
    replaces it and keeps its projections.
    """

    def __init__(self, original: Any, window: int | None):
        super().__init__()
        self.q_proj = original.q_proj
        self.k_proj = original.k_proj
        self.v_proj = original.v_proj
        self.out_proj = original.out_proj
        self.layer = original.layer_id
        self.heads = original.num_heads
        self.window = window
        self.batch: Batch
        self.slots: Slots

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        q, k, v = (
            proj(hidden_states)[0].unflatten(-1, (self.heads, -1))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        call = LayerAttention(self.layer, self.batch, self.slots, 1.0, self.window)
        return self.out_proj(attend(q, k, v, call))[None], None


def _replace_neo_attention(model: PreTrainedModel) -> None:
    modules: list[NeoAttention] = []
    base: Any = model.transformer
    for block in base.h:
        original = block.attn.attention
        window = model.config.window_size if original.attention_type == "local" else None
        replacement = NeoAttention(original, window)
        block.attn.attention = replacement
        modules.append(replacement)

    def hand_over(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        batch = kwargs.pop("batch")
        slots = kwargs.pop("slots")
        for module in modules:
            module.batch = batch
            module.slots = slots
        return args, kwargs

    model.base_model.register_forward_pre_hook(hand_over, with_kwargs=True)


@torch.inference_mode()
def prove(backbone: LibraryBackbone) -> None:
    """Refuse an untried architecture unless rows in two steps over slots give the logits of the
    model's own forward."""
    tokens = (np.arange(8) * 7 + 3) % backbone.vocab
    slots = backbone.make_slots(2, 8)
    for end, start in ((5, 0), (8, 5)):
        rows = causal_rows(tokens[:end])
        plan = Plan(rows, [np.array([end - 1])], stored=end, causal=end)
        ours = backbone.forward(Batch([(1, plan, start)], 8, backbone.device), slots)
    model = backbone.model
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    ids = torch.from_numpy(tokens)[None].to(backbone.device)
    theirs = model(ids).logits[0, -1:, : backbone.vocab]
    model.set_attn_implementation(INTERFACE)
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not error < (1e-3 if backbone.dtype in (torch.float32, torch.float64) else 5e-2):
        raise NotAble(
            f"'{model.config.model_type}' computes attention in a way that rows do not express "
            f"(its logits came out {error:.1%} off), so this engine refuses it."
        )
