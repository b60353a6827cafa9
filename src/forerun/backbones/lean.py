"""One decoder for the Llama shape (Llama, Mistral, Qwen2, Qwen3): the library's weights and logits,
in far fewer small steps.

Queries, keys and values are one matrix product, gate and up another. Rotations are looked up, not
computed. Logits are made only for rows that are read. In float32 its logits equal the library's
(tested); it exists because it is measurably faster (`make bench`).

T rows, R rows read, E hidden size, H heads, G key heads, D head size, I inner size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.backbones import native
from forerun.backbones.attention import LayerAttention, attend
from forerun.backbones.blocks import Blocks, joined_blocks
from forerun.backbones.cpu_forward import (
    CpuForward,
    CpuLayer,
    CpuShape,
    PairRotation,
    Rotation,
)
from forerun.backbones.measure import layout_for, product_for, this_machine
from forerun.backbones.native import (
    NativeForward,
    NativeLayer,
    NativeProduct,
    NativeShape,
    native_product,
    native_product_of,
    runs_floats,
)
from forerun.backbones.native.rounds import Runner
from forerun.backbones.plain import Part, PlainNetwork, Weight
from forerun.backbones.products import HEAD, FloatProduct, Matrix, Packed, Product, joined, times
from forerun.backbones.quantised import Quantised, QuantisedLinear, int4_product, joined_codes
from forerun.backbones.rotary import rotations
from forerun.backbones.threads import ThreadChoice
from forerun.engine.backbone import (
    Forwards,
    LikeliestText,
    RoundsAsked,
    RoundsMade,
    SlottedBackbone,
    WrittenText,
)
from forerun.engine.cache import Slots, SlotShape
from forerun.engine.pack import Batch, Tiles
from forerun.engine.pages import PageShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = ("llama", "mistral", "qwen2", "qwen3")
LAYERS = (nn.Linear, QuantisedLinear, Part)
Given = Weight | Quantised  # what a network has for a matrix
# Attention of a quantised model looks at so many slots at once, masked where a row must not see
# them: then a row's sums are cut at the same places whatever runs beside it.
SLOTS_AT_ONCE = 16


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. A matrix is a tensor [in, out], a packed one on a GPU, or a
    quantised product on a CPU, which has its bias in it."""

    norm_attn: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    norm_mlp: Tensor
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.out, self.gate_up, self.down


def processes(model: Any) -> int:
    """Over how many processes the library split its layers. Each process then has its share of the
    heads, and of their keys and values."""
    return int(getattr(model, "tp_size", None) or 1)


def fits(model: PreTrainedModel | PlainNetwork, context: int) -> bool:
    """Is this a network of the Llama shape, whole, with plain weights, and full attention within so
    many positions?"""
    config: Any = model.config
    if processes(model) > 1:
        return False
    if config.model_type not in SHAPES or getattr(config, "hidden_act", None) != "silu":
        return False
    # Quantised weights are packed, in layers of a class of their own.
    base: Any = model.model
    parts = [part for layer in base.layers for part in (*_projections(layer), *_gates(layer))]
    parts += [end for layer in base.layers for end in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    if _names_quantisation(config) or not all(type(part) in LAYERS for part in parts):
        return False
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None) if "sliding_attention" in types else None
    return window is None or window >= context


def _names_quantisation(config: Any) -> bool:
    """Does a config say that weights are packed? Those of a .gguf file are not, once they are read,
    though the config still says what they were."""
    named: Any = getattr(config, "quantization_config", None)
    if named is None:
        return False
    method = named.get("quant_method") if isinstance(named, dict) else named.quant_method
    return str(getattr(method, "value", method)) != "gguf"


class LeanBackbone(SlottedBackbone):
    """Rows to logits. It takes the weights over from a `transformers` model, or from what has its
    weights only; neither is needed afterwards."""

    capturable = True
    has_fixed_kernels = True
    slots_at_once = 1
    gives_features = True

    def __init__(
        self,
        model: PreTrainedModel | PlainNetwork,
        vocab: int,
        context: int,
        quantize: str | None = None,
        as_tensors: bool = False,  # matrices, for those who train
    ):
        config: Any = model.config
        self.vocab = vocab
        self.context = context
        self.device = model.device
        self.dtype = model.dtype
        codes = [part.matrix for part in model.modules() if isinstance(part, QuantisedLinear)]
        plain = model.weights() if isinstance(model, PlainNetwork) else model.named_parameters()
        self.cost = float(sum(weight.numel() for _, weight in plain))
        self.cost += sum(matrix.codes_OI.numel() for matrix in codes)
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.hidden_size = config.hidden_size
        self.eps = config.rms_norm_eps
        base: Any = model.model
        head: Any = model.lm_head
        self.embed = _widened(_weight(base.embed_tokens))
        self.norm: Tensor = base.norm.weight.detach()
        # as asked for, or as the checkpoint is
        self.quantize = quantize or (codes[0].bits if codes else None)
        packs = packs_on(self.device)
        self._packed = self.quantize is not None and packs
        in_cpp = not as_tensors and self.device.type == "cpu" and runs_floats(self.dtype)
        by_products = in_cpp if self.quantize is None else not packs
        if by_products:
            self.capturable = False
            self.has_fixed_kernels = False
            self.slots_at_once = SLOTS_AT_ONCE
        self.tied = head.weight is base.embed_tokens.weight
        given = self.embed if self.tied else _weight(head)
        take_head = _Taker(quantize and HEAD[quantize], packs, self.dtype, in_cpp)
        self.head: Matrix = take_head.matrix([_rows(given, vocab)])
        take = _Taker(quantize, packs, self.dtype, in_cpp)
        # No kernel looks into products of a CPU: heads may lie as its forward likes.
        paired = self.head_dim if by_products else None
        self.stack = [_take_layer(layer, take, paired) for layer in base.layers]
        self.kinds = {**take.kinds, **{f"head {k}": v for k, v in take_head.kinds.items()}}
        self._threads = ThreadChoice() if self.device.type == "cpu" else None
        cos, sin = (
            part.to(self.dtype) for part in rotations(base.rotary_emb, context, self.device)
        )
        half = self.head_dim // 2
        # rotate_half(x) * sin == roll(x) * (sin with its first half negated): no negation and no
        # cat in every layer.
        self.cos_CD = cos[0]
        self.sin_CD = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        self._turns_CD: Tensor | None = None
        if by_products:
            self._turns_CD = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())

    def make_slots(self, lanes: int, context: int, pages: PageShape | None = None) -> Slots:
        shape = SlotShape(
            layers=self.layers,
            lanes=lanes,
            context=context,
            key_heads=self.key_heads,
            head_dim=self.head_dim,
            pages=pages,
            joined=self._turns_CD is not None,
        )
        return Slots(shape, self.dtype, self.device)

    @property
    def moves_rows(self) -> bool:
        return self._native is not None

    @cached_property
    def weight_bytes(self) -> int:
        """What all weights take, as they are kept."""
        tied = isinstance(self.head, Tensor) and self.head.data_ptr() == self.embed.data_ptr()
        return self.read_bytes + (0 if tied else self.embed.nbytes)

    @cached_property
    def read_bytes(self) -> int:
        """What a forward reads of them: all but an embedding of which it wants a few rows only."""
        matrices = [self.head, *(m for layer in self.stack for m in layer.matrices)]
        return sum(m.nbytes if isinstance(m, Tensor | Packed) else m.bytes for m in matrices)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        if batch.tiles is not None:
            return self._forward_by_kernels(batch, batch.tiles, slots)
        if self._threads is None:
            return self._forward_plain(batch, slots)
        plain = self.dtype.itemsize < 4 or self._packed
        run = self._forward_plain if plain else self._forward_on_cpu
        return self._threads.run(len(batch.slots), partial(run, batch, slots))

    def write_likeliest(self, batch: Batch, slots: Slots, asked: LikeliestText) -> WrittenText:
        """Write on after rows of plain text, all tokens in one call; for those that move rows."""
        native = self._native
        threads = self._threads
        assert native is not None and threads is not None
        run = partial(native.write_on, batch, slots, asked)
        return threads.run(len(batch.slots), run, lambda written: len(written.tokens_kB) - 1)

    def go_on(self, slots: Slots, asked: RoundsAsked, by: tuple[Any, Slots] | None) -> RoundsMade:
        """Have texts go on by drafts and verdicts, all rounds in one call; for those that move
        rows. `by`: the backbone that drafts, and its slots."""
        native = self._native
        assert native is not None
        target = self._runner(slots, asked, asked.impossible)
        drafter = None if by is None else by[0].drafting_runner(by[1], asked, target)
        made = native.go_on(target, drafter, asked)
        self.note_forwards(made.forwards)
        if by is not None and made.drafting is not None:
            by[0].note_forwards(made.drafting)
        return made

    def drafting_runner(self, slots: Slots, asked: RoundsAsked, target: Runner) -> Runner:
        """As it takes part in rounds of another model's."""
        return self._runner(slots, asked, asked.never_drafted)

    def _runner(self, slots: Slots, asked: RoundsAsked, impossible: Sequence[int]) -> Runner:
        native = self._native
        threads = self._threads
        assert native is not None and threads is not None
        seen = max(text.room for text in asked.texts)
        rows = sum(text.rows for text in asked.texts)
        return native.runner(slots, seen, threads.by_rows(rows), impossible)

    def note_forwards(self, forwards: Forwards) -> None:
        """They were run elsewhere."""
        assert self._threads is not None
        self._threads.note(forwards.by_rows, forwards.seconds)

    def _forward_on_cpu(self, batch: Batch, slots: Slots) -> Tensor:
        if self._native is not None:
            return self._native(batch, slots)
        x_TE = F.embedding(batch.tokens_T, self.embed)
        turns: Rotation | PairRotation
        if self._turns_CD is not None:
            turns = PairRotation(self._turns_CD[batch.positions_T][:, None])
        else:
            cos_T1D = self.cos_CD[batch.positions_T][:, None]
            turns = Rotation(cos_T1D, self.sin_CD[batch.positions_T][:, None])
        return self._on_cpu(x_TE, turns, batch, slots)

    @cached_property
    def _native(self) -> NativeForward | None:
        """All of it in one call, where every matrix is of a kind that can."""
        matrices = [self.head, *(m for layer in self.stack for m in layer.matrices)]
        shape = NativeShape(self.heads, self.key_heads, self.head_dim, self.eps)
        products = all(isinstance(matrix, NativeProduct) for matrix in matrices)
        if self._turns_CD is None or not products or not shape.fits:
            return None
        head: Any = self.head
        layers = [
            NativeLayer(*(getattr(layer, name) for name in NativeLayer._fields))
            for layer in self.stack
        ]
        return NativeForward(layers, (self.embed, self.norm, head), self._turns_CD, shape)

    @cached_property
    def _on_cpu(self) -> CpuForward:
        """The same weights as a CPU's forward takes them."""
        layers = [
            CpuLayer(
                norm_attn=_times_length(layer.norm_attn),
                qkv=_as_product(layer.qkv, layer.qkv_bias),
                q_norm=None if layer.q_norm is None else _times_length(layer.q_norm),
                k_norm=None if layer.k_norm is None else _times_length(layer.k_norm),
                out=_as_product(layer.out, layer.out_bias),
                norm_mlp=_times_length(layer.norm_mlp),
                gate_up=_as_product(layer.gate_up, layer.gate_up_bias),
                down=_as_product(layer.down, layer.down_bias),
            )
            for layer in self.stack
        ]
        shape = CpuShape(self.heads, self.key_heads, self.head_dim, self.eps, self.slots_at_once)
        return CpuForward(layers, _times_length(self.norm), _as_product(self.head, None), shape)

    def _forward_plain(self, batch: Batch, slots: Slots) -> Tensor:
        x_TE = F.embedding(batch.tokens_T, self.embed)
        cos_T1D = self.cos_CD[batch.positions_T][:, None]
        sin_T1D = self.sin_CD[batch.positions_T][:, None]
        for index, layer in enumerate(self.stack):
            call = LayerAttention(index, batch, slots, self.head_dim**-0.5)
            x_TE = x_TE + self._attention(layer, x_TE, cos_T1D, sin_T1D, call)
            if index == self.layers - 1 and index not in slots.features:
                # past the last keys and values only the rows that are read matter
                x_TE = x_TE[batch.reads_R]
            gate_up = times(self._norm(x_TE, layer.norm_mlp), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, -1)
            x_TE = x_TE + times(F.silu(gate).mul_(up), layer.down, layer.down_bias)
            slots.keep_features(index, batch.slots_T, x_TE)
        if self.layers - 1 in slots.features:
            x_TE = x_TE[batch.reads_R]
        return times(self._norm(x_TE, self.norm), self.head, None)

    def _forward_by_kernels(self, batch: Batch, tiles: Tiles[Tensor], slots: Slots) -> Tensor:
        """The same in our own kernels, which need Triton: fewer launches, and none that depends on
        what a batch holds."""
        from forerun.backbones.kernels.attention import attention
        from forerun.backbones.kernels.elementwise import RMSNorm, Rotary, rotate_and_keep
        from forerun.backbones.kernels.matmul import product

        product = partial(product, fixed=self.deterministic)
        x_TE = F.embedding(batch.tokens_T, self.embed)
        stack: list[Any] = self.stack  # of tensors or packed: products on a CPU have no tiles
        head: Any = self.head
        for index, layer in enumerate(stack):
            norm_attn = RMSNorm(layer.norm_attn, self.eps)
            norm_mlp = RMSNorm(layer.norm_mlp, self.eps)
            rotary = Rotary(self.cos_CD, self.sin_CD, self.eps, layer.q_norm, layer.k_norm)
            qkv_TN = product(x_TE, layer.qkv, layer.qkv_bias, normed=norm_attn)
            q_THD = rotate_and_keep(index, qkv_TN, rotary, batch, slots)
            seen_TE = attention(index, q_THD, tiles, slots, self.head_dim**-0.5)
            x_TE = product(seen_TE, layer.out, layer.out_bias, onto=x_TE)
            if index == self.layers - 1 and index not in slots.features:
                x_TE = x_TE[batch.reads_R]
            h_TI = product(x_TE, layer.gate_up, layer.gate_up_bias, normed=norm_mlp, gated=True)
            x_TE = product(h_TI, layer.down, layer.down_bias, onto=x_TE)
            slots.keep_features(index, batch.slots_T, x_TE)
        if self.layers - 1 in slots.features:
            x_TE = x_TE[batch.reads_R]
        return product(x_TE, head, normed=RMSNorm(self.norm, self.eps))

    def unembed(self, x_RE: Tensor) -> Tensor:
        """Logits of hidden states that are normed already, for a drafter that shares the head."""
        return times(x_RE, self.head, None)

    def _attention(
        self, layer: Layer, x_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, call: LayerAttention
    ) -> Tensor:
        qkv = times(self._norm(x_TE, layer.norm_attn), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        qk, v = qkv.split([self.heads + self.key_heads, self.key_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([self.heads, self.key_heads], 1)
            qk = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], 1)
        turned = qk.roll(self.head_dim // 2, -1)
        qk = (qk * cos_T1D).addcmul_(turned, sin_T1D)
        q, k = qk.split([self.heads, self.key_heads], 1)
        return times(attend(q, k, v, call), layer.out, layer.out_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def _times_length(norm: Tensor) -> Tensor:
    """The weights of a norm that divides by a length instead of a root mean square."""
    return norm * norm.shape[-1] ** 0.5


def _as_product(matrix: Matrix, bias: Tensor | None) -> Product:
    assert not isinstance(matrix, Packed), "packed matrices are for a GPU"
    return FloatProduct(matrix, bias) if isinstance(matrix, Tensor) else matrix


def packs_on(device: torch.device) -> bool:
    """Are quantised matrices packed for kernels on such a device?"""
    return device.type == "cuda"


class _Taker:
    """Takes matrices over: as floats in the layout, or quantised in the kind of product, that is
    fastest here."""

    def __init__(self, quantize: str | None, packs: bool, dtype: torch.dtype, in_cpp: bool):
        self._quantize = quantize
        self._packs = packs
        self._dtype = dtype
        self._in_cpp = in_cpp  # floats, too
        self.kinds: dict[str, str] = {}  # of product, by shape

    def matrix(self, weights: list[Given], bias: Tensor | None = None) -> Matrix:
        codes = joined_codes(weights)
        found = None if codes is None else self._kept(codes, bias)
        kind, matrix = found or self._taken(joined_blocks(weights) or self._plain(weights), bias)
        outputs = sum(weight.shape[0] for weight in weights)
        self.kinds[f"{outputs}x{weights[0].shape[1]}"] = kind
        return matrix

    def _plain(self, weights: Sequence[Given]) -> Tensor:
        return joined(
            [w if isinstance(w, Tensor) else _widened(w).to(self._dtype) for w in weights]
        )

    def _kept(self, codes: Quantised, bias: Tensor | None) -> tuple[str, Matrix] | None:
        """A matrix with the codes that its checkpoint has, where that runs here. On a CPU 8-bit
        numbers are made anew: the nearest of the kind that runs there."""
        if self._packs:
            from forerun.backbones.kernels.packed import packed_codes

            made = packed_codes(codes, self._dtype)
            return None if made is None else ("packed, its own codes", made)
        product = native_product_of(codes, bias) or int4_product(codes, bias)
        if product is not None:
            return "its own codes", product
        bits = "int4" if codes.bits == "int4" else "int8"
        kind, near = quantised_product(codes.widened(), bias, bits)
        return f"nearest {bits}, {kind}", near

    def _taken(self, weight: Tensor | Blocks, bias: Tensor | None) -> tuple[str, Matrix]:
        """The kind of product, and the matrix as that takes it."""
        if self._quantize is not None and not self._packs:
            return quantised_product(weight, bias, self._quantize)
        product = native_product(weight, bias, None) if self._in_cpp else None
        if product is not None:
            return "native", product
        weight_OI = self._plain([weight])
        if self._quantize is not None:
            from forerun.backbones.kernels.packed import packed

            made = packed(weight_OI, self._quantize)
            if made is not None:
                return "packed", made
        layout = layout_for(weight_OI, this_machine())
        return "by inputs" if layout.by_inputs else "by outputs", layout.of(weight_OI)


def quantised_product(
    weight: Tensor | Blocks, bias: Tensor | None, bits: str
) -> tuple[str, Product]:
    """A matrix in few bits, and the kind of its product on this CPU: ours, where it can be
    compiled."""
    made = native_product(weight, bias, bits)
    if made is not None:
        return "native", made
    return product_for(_widened(weight), bias, bits, this_machine())


def _projections(layer: Any) -> list[nn.Linear]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _gates(layer: Any) -> list[nn.Linear]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


def _take_layer(layer: nn.Module, take: _Taker, paired: int | None = None) -> Layer:
    """The weights of a layer. `paired` interleaves the two halves of query and key heads of so
    many numbers, so that what is turned together lies together."""
    attn: Any = layer.self_attn
    mlp: Any = layer.mlp
    norm_attn: Any = layer.input_layernorm
    norm_mlp: Any = layer.post_attention_layernorm
    matrices: dict[str, Any] = {}
    parts = {
        "qkv": _projections(layer),
        "out": [attn.o_proj],
        "gate_up": _gates(layer),
        "down": [mlp.down_proj],
    }
    for name, linears in parts.items():
        order = [paired if name == "qkv" and index < 2 else None for index in range(len(linears))]
        bias = _joined_bias(linears, order)
        weights = [_paired(_weight(linear), o) for linear, o in zip(linears, order)]
        matrices[name] = take.matrix(weights, bias)
        matrices[f"{name}_bias"] = bias
    return Layer(
        norm_attn=norm_attn.weight.detach(),
        norm_mlp=norm_mlp.weight.detach(),
        q_norm=in_pairs(attn.q_norm.weight.detach(), paired) if hasattr(attn, "q_norm") else None,
        k_norm=in_pairs(attn.k_norm.weight.detach(), paired) if hasattr(attn, "k_norm") else None,
        **matrices,
    )


def _weight(linear: nn.Module) -> Given:
    weight: Any = linear.weight
    return weight.detach() if isinstance(weight, Tensor) else weight


def _widened(weight: Given) -> Tensor:
    """As numbers of their own."""
    if isinstance(weight, Blocks):
        return native.widened(weight)
    return weight if isinstance(weight, Tensor) else weight.widened()


def _rows(weight: Given, count: int) -> Given:
    if isinstance(weight, Tensor):
        return weight[:count]
    return weight.by_outputs(lambda rows: rows[:count])


def _paired(weight: Given, size: int | None) -> Given:
    """Interleave the two halves of every head, if heads of a size are named."""
    if size is None:
        return weight
    if isinstance(weight, Tensor):
        return _interleaved(weight, size)
    return weight.by_outputs(partial(_interleaved, size=size))


def in_pairs(weight: Tensor, size: int | None) -> Tensor:
    """As `_paired`, of a tensor."""
    return weight if size is None else _interleaved(weight, size)


def _interleaved(rows: Tensor, size: int) -> Tensor:
    return rows.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)


def _joined_bias(parts: list[nn.Linear], order: list[int | None]) -> Tensor | None:
    if parts[0].bias is None:
        return None
    biases = [part.bias.detach() for part in parts]
    return torch.cat(
        [bias if o is None else _interleaved(bias, o) for bias, o in zip(biases, order)]
    )
