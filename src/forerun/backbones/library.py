"""Any `transformers` causal model with softmax attention, driven by rows.

The model sees one long sequence: all rows of all requests end to end. In every layer the library
calls our attention function, which knows where each row's keys live. No cache and no mask of the
library is used. A model that does not call it gets a stand-in (`backbones/stand_in.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forerun.backbones.interface import INTERFACE, RowAttention, RowDriver, ScoreOptions
from forerun.backbones.lean import processes
from forerun.backbones.rotary import begins_anew, replace_changing, trained_context
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import LayerSize, Slots, SlotShape
from forerun.engine.pack import Batch
from forerun.engine.pages import PageShape
from forerun.errors import NotAble

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LISTENING = 3  # tokens of the forward in which a model shows what it keeps


class LibraryBackbone(SlottedBackbone):
    """Rows to logits through a `transformers` model."""

    capturable = True
    _own_attention: Sequence[tuple[Any, Any]] = ()  # configs, and the attention they name

    def __init__(self, model: PreTrainedModel, vocab: int, context: int):
        self.model: Any = model.eval()
        self.vocab = vocab
        self.context = context
        self.device = model.device
        self.dtype = model.dtype
        self.cost = float(sum(p.numel() for p in model.parameters()))
        self.attention = RowAttention(context)
        self.config: Any = model.config.get_text_config()
        self._tables = replace_changing(model, context)
        self._anew = begins_anew(self.config, context)
        self._takes = inspect.signature(model.forward).parameters
        self._attach()
        self._listen()
        self._check_heard()
        heard = self.attention.heard
        self.heads = heard[0].heads
        self.key_heads, self.head_dim, _ = heard[0].size
        self.layers = len(heard) * (2 if self._anew else 1)
        same = all(layer == heard[0] for layer in heard)
        # several processes talk to each other in a forward
        self.capturable = self.capturable and same and heard[0].plain and processes(model) == 1

    def _attach(self) -> None:
        """Have the model call our attention."""
        if self.config.model_type == "gpt_neo":
            replace_neo_attention(self.model)
        configs: dict[int, Any] = {
            id(module.config): module.config
            for module in self.model.modules()
            if hasattr(getattr(module, "config", None), "_attn_implementation")
        }
        self._own_attention = [(c, c._attn_implementation) for c in configs.values()]
        self.model.set_attn_implementation(INTERFACE)
        self._give_back()
        self._told_positions = self._tell_positions()
        self.driver = RowDriver.of(self.model)
        for module in self.model.modules():
            if getattr(module, "attn_temperature_tuning", False):
                module.attn_temperature_tuning = False
                module.tuned_by_rows = not module.use_rope

    def _give_back(self) -> None:
        """Let the network use its own attention, so that it works for others too."""
        for config, own in self._own_attention:
            config._attn_implementation = own

    def _take(self) -> None:
        for config, _ in self._own_attention:
            config._attn_implementation = INTERFACE

    def _tell_positions(self) -> int:
        """Where a model takes no positions, tell them to its position embeddings, which else count
        from the length of a cache."""

        def tell(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if self._drives:
                kwargs = {**kwargs, "position_ids": self._positions_T}
            return args, kwargs

        if "position_ids" in self._takes:
            return 0
        counting = [module for module in self.model.modules() if _counts_positions(module)]
        for module in counting:
            module.register_forward_pre_hook(tell, with_kwargs=True)
        return len(counting)

    @torch.inference_mode()
    def _listen(self) -> None:
        """Run a few tokens to hear what every layer keeps."""
        positions = torch.arange(LISTENING, device=self.device)[None]
        self._call(positions % self.vocab, positions)

    def _check_heard(self) -> None:
        """Refuse a model that did not show all that rows need."""
        kind = self.config.model_type
        heard = self.attention.heard
        if not heard:
            raise NotAble(f"'{kind}' has no softmax attention that rows could drive.")
        if "position_ids" not in self._takes and not self._knows_positions():
            raise NotAble(
                f"'{kind}' counts positions itself, from the length of its cache: rows, which "
                "stand at any position, cannot drive it."
            )
        window = getattr(self.config, "sliding_window", None)
        types = getattr(self.config, "layer_types", None)
        slides = getattr(self.config, "use_sliding_window", True) and not types
        unheard = all(layer.window is None for layer in heard)
        if slides and window and window < self.context and unheard:
            raise NotAble(
                f"'{kind}' has a sliding window of {window} in its config but not in its "
                f"attention. Within max_context={window} it makes no difference: load it with that."
            )

    def _knows_positions(self) -> bool:
        """Does a model without `position_ids` learn positions in another way?"""
        return self._told_positions > 0

    def layer_sizes(self) -> Sequence[LayerSize]:
        sizes = [layer.size for layer in self.attention.heard]
        return sizes * 2 if self._anew else sizes

    def bytes_per_lane(self, context: int) -> int:
        per_slot = sum(
            size.key_heads * (size.key_dim + size.value_dim) for size in self.layer_sizes()
        )
        return per_slot * context * self.dtype.itemsize

    def make_slots(self, lanes: int, context: int, pages: PageShape | None = None) -> Slots:
        heads = (self.key_heads, self.head_dim)
        shape = SlotShape(self.layers, lanes, context, *heads, self.layer_sizes(), pages)
        return Slots(shape, self.dtype, self.device)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        logits_RV = self._run(batch, slots)
        if not self._anew:
            return logits_RV
        # The library computes a text anew once it passes the trained context. Here every row runs
        # for either case, in slots of its own.
        for table in self._tables:
            table.anew = True
        anew_RV = self._run(batch, slots, first_layer=len(self.attention.heard))
        for table in self._tables:
            table.anew = False
        past_R = batch.positions_T[batch.reads_R] >= trained_context(self.config)
        return torch.where(past_R[:, None], anew_RV, logits_RV)

    def _run(self, batch: Batch, slots: Slots, first_layer: int = 0) -> Tensor:
        self.attention.begin(batch, slots, first_layer)
        return self._call(batch.tokens_T[None], batch.positions_T[None], batch.reads_R)

    @property
    def _drives(self) -> bool:
        return self.driver.attention is self.attention

    def _call(
        self, tokens: Tensor, positions: Tensor, reads_R: Tensor | None = None, **options: Any
    ) -> Tensor:
        """The whole model, because some scale or cap their logits: [R, V]."""
        options = {"position_ids": positions, "use_cache": False, **options}
        self._positions_T = positions[0]
        if getattr(self.config, "index_topk", None):
            # An index of tokens asks for a mask. Within its size it leaves none out.
            rows = tokens.shape[1]
            options["attention_mask"] = tokens.new_zeros(1).expand(1, 1, rows, rows)
        keeps = "logits_to_keep" in self._takes and reads_R is not None
        if keeps:
            options["logits_to_keep"] = reads_R
        options = {name: value for name, value in options.items() if name in self._takes}
        self.driver.attention = self.attention
        self._take()
        try:
            logits_TV = self.model(input_ids=tokens, **options).logits[0]
        finally:
            self.driver.attention = None
            self._give_back()
        rows = logits_TV if keeps or reads_R is None else logits_TV[reads_R]
        return rows[:, : self.vocab]


def _counts_positions(module: nn.Module) -> bool:
    """Is this a position embedding that counts from the length of a cache, unless it is told?"""
    takes = inspect.signature(module.forward).parameters
    return "past_key_values_length" in takes and "position_ids" in takes and len(takes) <= 3


class NeoAttention(nn.Module):
    """GPT-Neo's attention over slots: unscaled, and every other layer looks back only `window_size`
    tokens.

    The library's own attention has no interface and a triangle built into its weights. This module
    replaces it and keeps its projections.
    """

    row_driver: RowDriver

    def __init__(self, original: Any, window: int | None):
        super().__init__()
        self.q_proj = original.q_proj
        self.k_proj = original.k_proj
        self.v_proj = original.v_proj
        self.out_proj = original.out_proj
        self.heads = original.num_heads
        self.window = window
        self._original = [original]  # no submodule: its weights are this one's

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        if self.row_driver.attention is None:  # the network is used by itself
            return self._original[0](hidden_states, *args, **options)
        q, k, v = (
            proj(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.row_driver.current()(q, k, v, ScoreOptions(1.0, self.window))
        return self.out_proj(out.flatten(2)), None


def replace_neo_attention(model: PreTrainedModel) -> None:
    base: Any = model.transformer
    for block in base.h:
        original = block.attn.attention
        if isinstance(original, NeoAttention):
            continue  # another backbone drives this network too
        window = model.config.window_size if original.attention_type == "local" else None
        block.attn.attention = NeoAttention(original, window)
