"""Checkpoints in the layouts in which they are published, with small random weights: the configs,
index files, tokenizer files, special tokens and keys are those of the hub, the sizes are not.

Ids are as far from the end of the small base vocabulary as the real ones are from the end of
theirs. Every folder brings Python files that its config names; they must never run.

    python -m tests.published FOLDER [NAME ...]
    python -m tests.published --write
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from forerun.backbones.dit import DiTShape, tensor_shapes

TEXT = "def f(x):\n    return x + 1\n"
HELLO = [{"role": "user", "content": "Hi"}]
BASE = 260  # tokens of every byte-level vocabulary here: the bytes and four merges
ROWS_TO_SPARE = 24  # of an embedding that has more rows than there are tokens
WIDTH = 32
HEADS = 4
LAYERS = 2
CODE = "raise SystemExit('code of a checkpoint has run')\n"

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """A published checkpoint, and what must be found in it."""

    name: str  # on the hub
    config: dict[str, Any]
    shapes: Shapes
    tokenizer: Callable[[Path], None] | None
    family: str
    mask: int | None = None
    shifted: bool = False
    block: int | None = None
    ends: frozenset[int] = frozenset()
    chat: str | None = None  # how a model card's template renders HELLO
    generation: dict[str, Any] = field(default_factory=dict)
    files: str = "whole"  # or "shards", "bin"
    method: str = "stepwise"

    def write(self, folder: Path) -> Path:
        """The files of this checkpoint, in a folder of its own under this one."""
        place = folder / self.name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(self.config))
        if self.generation:
            (place / "generation_config.json").write_text(json.dumps(self.generation))
        for reference in self.config.get("auto_map", {}).values():
            (place / f"{reference.split('.')[0]}.py").write_text(CODE)
        if self.tokenizer is not None:
            self.tokenizer(place)
        write_weights(place, self.weights(), self.files)
        return place

    def weights(self, seed: int = 0) -> Weights:
        rng = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(*shape, generator=rng) * 0.3 + ("norm" in name or "ln_" in name)
            for name, shape in self.shapes.items()
        }


def write_weights(place: Path, weights: Weights, files: str) -> None:
    if files == "bin":
        torch.save(weights, place / "pytorch_model.bin")
    elif files == "whole":
        save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    else:
        names = list(weights)
        halves = [names[::2], names[1::2]]
        where = {}
        for number, half in enumerate(halves, 1):
            file = f"model-0000{number}-of-00002.safetensors"
            save_file({n: weights[n] for n in half}, place / file, metadata={"format": "pt"})
            where |= dict.fromkeys(half, file)
        index = {"metadata": {"total_size": 0}, "weight_map": where}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))


# Tokenizers.

QWEN = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
]
QWEN3 = [*QWEN, "<tool_response>", "</tool_response>", "<think>", "</think>"]
CHATML = (
    "{% if messages[0]['role'] != 'system' %}SYSTEM{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
HEADERS = (
    "{{ '<|startoftext|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ROLES = (
    "{% for m in messages %}{{ '<role>' + {'user': 'HUMAN', 'system': 'SYSTEM', 'assistant': "
    "'ASSISTANT'}[m['role']] + '</role>' + m['content'] + '<|role_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)
CHATML_HELLO = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
HEADERS_HELLO = (
    "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
ROLES_HELLO = "<role>HUMAN</role>Hi<|role_end|><role>ASSISTANT</role>"


def byte_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("r", "e"), ("t", "u"), ("re", "tu"), ("r", "n")]
    symbols = [*alphabet, *("".join(pair) for pair in merges)]
    return {symbol: i for i, symbol in enumerate(symbols)}, merges


def added(tokens: list[str], first: int = BASE, special: bool = True) -> dict[str, Any]:
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=special)
    return {str(first + i): {"content": token, **flags} for i, token in enumerate(tokens)}


def bpe_files(tokens: list[str], fast: bool, **settings: Any) -> Callable[[Path], None]:
    """vocab.json and merges.txt, with added tokens in tokenizer_config.json; with `fast`, a
    tokenizer.json beside them."""

    def write(place: Path) -> None:
        vocabulary, merges = byte_vocabulary()
        (place / "vocab.json").write_text(json.dumps(vocabulary))
        lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
        (place / "merges.txt").write_text("\n".join(lines) + "\n")
        config = {"added_tokens_decoder": added(tokens), **settings}
        (place / "tokenizer_config.json").write_text(json.dumps(config))
        for reference in settings.get("auto_map", {}).get("AutoTokenizer") or ():
            if reference:
                (place / f"{reference.split('.')[0]}.py").write_text(CODE)
        if fast:
            byte_level_core(tokens).save(str(place / "tokenizer.json"))

    return write


def byte_level_core(tokens: list[str]) -> Tokenizer:
    from tokenizers import AddedToken

    vocabulary, merges = byte_vocabulary()
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    return core


def dream_tokenizer(place: Path) -> None:
    """Its class is remote code, and there is no tokenizer.json."""
    bpe_files(
        [*QWEN, "<|beginoftext|>", "<|mask|>"],
        fast=False,
        tokenizer_class="DreamTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        bos_token="<|beginoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        unk_token=None,
        chat_template=CHATML.replace("SYSTEM", SYSTEM),
        model_max_length=131072,
        add_bos_token=False,
        add_prefix_space=False,
        clean_up_tokenization_spaces=False,
        errors="replace",
    )(place)


def qwen_tokenizer(tokens: list[str], eos: str, template: str) -> Callable[[Path], None]:
    return bpe_files(
        tokens,
        fast=True,
        tokenizer_class="Qwen2Tokenizer",
        eos_token=eos,
        pad_token="<|endoftext|>",
        unk_token=None,
        bos_token=None,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def plain_fast(tokens: list[str], **settings: Any) -> Callable[[Path], None]:
    """A tokenizer.json alone, of no class in particular."""

    def write(place: Path) -> None:
        byte_level_core(tokens).save(str(place / "tokenizer.json"))
        config = {
            "added_tokens_decoder": added(tokens),
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **settings,
        }
        (place / "tokenizer_config.json").write_text(json.dumps(config))

    return write


def gpt2_tokenizer(tokens: list[str], **settings: Any) -> Callable[[Path], None]:
    return bpe_files(
        tokens,
        fast=True,
        tokenizer_class="GPT2Tokenizer",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        **settings,
    )


XLNET_TOKENS = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
XLNET_WORDS = ["\u2581", "\u2581def", "\u2581return", *"abcdefghijklmnopqrstuvwxyz():+=0123456789"]


def xlnet_tokenizer(place: Path) -> None:
    from transformers import XLNetTokenizer

    pieces = [(token, 0.0) for token in XLNET_TOKENS]
    pieces += [(word, -2.0 - i / 10) for i, word in enumerate(XLNET_WORDS)]
    XLNetTokenizer(vocab=pieces).save_pretrained(place)


LLAMA_VOCAB = 3 + 256 + 200


def llama_tokenizer(place: Path) -> None:
    """Llama 2's: sentence pieces, bytes as a fallback."""
    from transformers import LlamaTokenizer

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz():+=0123456789_,."]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    LlamaTokenizer(vocab=vocabulary, merges=[]).save_pretrained(place)


# Keys and shapes.


def decoder_shapes(vocab: int, kv_heads: int, mlp: int, bias: bool, norms: bool) -> Shapes:
    """Llama's keys; with biases Qwen2's, with norms of queries and keys Qwen3's."""
    head = WIDTH // HEADS
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, WIDTH)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        outputs = dict(q=WIDTH, k=kv_heads * head, v=kv_heads * head)
        for part, size in outputs.items():
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (size, WIDTH)
            if bias:
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = (size,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (WIDTH, WIDTH)
        if norms:
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
        shapes |= mlp_shapes(f"{layer}.mlp", mlp)
        shapes[f"{layer}.input_layernorm.weight"] = (WIDTH,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (WIDTH,)
    return shapes | {"model.norm.weight": (WIDTH,), "lm_head.weight": (vocab, WIDTH)}


def mlp_shapes(name: str, size: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (size, WIDTH),
        f"{name}.up_proj.weight": (size, WIDTH),
        f"{name}.down_proj.weight": (WIDTH, size),
    }


def expert_shapes(vocab: int, experts: int, size: int) -> Shapes:
    """LLaDA-MoE's: Qwen3's with a router and experts in place of each MLP."""
    shapes = decoder_shapes(vocab, HEADS, size, bias=False, norms=True)
    found = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    for i in range(LAYERS):
        mlp = f"model.layers.{i}.mlp"
        found[f"{mlp}.gate.weight"] = (experts, WIDTH)
        for e in range(experts):
            found |= mlp_shapes(f"{mlp}.experts.{e}", size)
    return found


def llada_shapes(vocab: int) -> Shapes:
    shapes: Shapes = {"wte.weight": (vocab, WIDTH)}
    for i in range(LAYERS):
        block = f"blocks.{i}"
        shapes |= {f"{block}.{part}_proj.weight": (WIDTH, WIDTH) for part in "qkv"}
        shapes[f"{block}.attn_out.weight"] = (WIDTH, WIDTH)
        shapes |= {f"{block}.{name}_norm.weight": (WIDTH,) for name in ("attn", "ff")}
        shapes |= {f"{block}.{name}_proj.weight": (3 * WIDTH, WIDTH) for name in ("ff", "up")}
        shapes[f"{block}.ff_out.weight"] = (WIDTH, 3 * WIDTH)
    shapes |= {"ln_f.weight": (WIDTH,), "ff_out.weight": (vocab, WIDTH)}
    return {f"model.transformer.{name}": shape for name, shape in shapes.items()}


def llada2_shapes(vocab: int, experts: int) -> Shapes:
    """The first layer is dense; the others have a router, experts, and one that all share."""
    head = WIDTH // HEADS
    shapes: Shapes = {"model.word_embeddings.weight": (vocab, WIDTH)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.attention.query_key_value.weight"] = (WIDTH + 2 * 2 * head, WIDTH)
        shapes[f"{layer}.attention.dense.weight"] = (WIDTH, WIDTH)
        shapes |= {f"{layer}.attention.{x}_layernorm.weight": (head,) for x in ("query", "key")}
        shapes[f"{layer}.input_layernorm.weight"] = (WIDTH,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (WIDTH,)
        if i == 0:
            shapes |= mlp_shapes(f"{layer}.mlp", 5 * WIDTH // 2)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (experts, WIDTH)
        shapes[f"{layer}.mlp.gate.expert_bias"] = (experts,)
        for e in range(experts):
            shapes |= mlp_shapes(f"{layer}.mlp.experts.{e}", WIDTH // 4)
        shapes |= mlp_shapes(f"{layer}.mlp.shared_experts", WIDTH // 4)
    return shapes | {"model.norm.weight": (WIDTH,), "lm_head.weight": (vocab, WIDTH)}


def dit_shapes(vocab: int, prefix: str) -> Shapes:
    shape = DiTShape(vocab, WIDTH, 8, LAYERS, HEADS, 64)
    return {f"{prefix}{name}": size for name, size in tensor_shapes(shape).items()}


def gpt2_shapes(vocab: int, positions: int) -> Shapes:
    """DiffuGPT's: GPT-2's under the names of its authors' class, the triangles included."""
    shapes: Shapes = {"embed_tokens.weight": (vocab, WIDTH)}
    shapes["denoise_model.wpe.weight"] = (positions, WIDTH)
    for i in range(LAYERS):
        block = f"denoise_model.h.{i}"
        lines = dict(attn_c_attn=(WIDTH, 3 * WIDTH), attn_c_proj=(WIDTH, WIDTH))
        lines |= dict(mlp_c_fc=(WIDTH, 4 * WIDTH), mlp_c_proj=(4 * WIDTH, WIDTH))
        for name, shape in lines.items():
            part = name.replace("_", ".", 1)
            shapes |= {f"{block}.{part}.weight": shape, f"{block}.{part}.bias": shape[1:]}
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{block}.{norm}.weight": (WIDTH,), f"{block}.{norm}.bias": (WIDTH,)}
        shapes[f"{block}.attn.bias"] = (1, 1, positions, positions)
    shapes |= {"denoise_model.ln_f.weight": (WIDTH,), "denoise_model.ln_f.bias": (WIDTH,)}
    return shapes | {"lm_head.weight": (vocab, WIDTH)}


def xlnet_shapes(vocab: int) -> Shapes:
    shapes: Shapes = {"transformer.mask_emb": (1, 1, WIDTH)}
    shapes["transformer.word_embedding.weight"] = (vocab, WIDTH)
    head = WIDTH // HEADS
    for i in range(LAYERS):
        layer = f"transformer.layer.{i}"
        shapes |= {f"{layer}.rel_attn.{part}": (WIDTH, HEADS, head) for part in "qkvor"}
        for bias in ("r_r_bias", "r_s_bias", "r_w_bias"):
            shapes[f"{layer}.rel_attn.{bias}"] = (HEADS, head)
        shapes[f"{layer}.rel_attn.seg_embed"] = (2, HEADS, head)
        for norm in ("rel_attn.layer_norm", "ff.layer_norm"):
            shapes |= {f"{layer}.{norm}.weight": (WIDTH,), f"{layer}.{norm}.bias": (WIDTH,)}
        shapes |= {f"{layer}.ff.layer_1.weight": (4 * WIDTH, WIDTH)}
        shapes |= {f"{layer}.ff.layer_1.bias": (4 * WIDTH,)}
        shapes |= {f"{layer}.ff.layer_2.weight": (WIDTH, 4 * WIDTH)}
        shapes |= {f"{layer}.ff.layer_2.bias": (WIDTH,)}
    return shapes | {"lm_loss.weight": (vocab, WIDTH), "lm_loss.bias": (vocab,)}


# The checkpoints.


def end(token: str, tokens: list[str]) -> int:
    return BASE + tokens.index(token)


def remote(stem: str, **classes: str) -> dict[str, str]:
    """Which Python files a config names for its classes."""
    kinds = {"AutoConfig": "configuration"}
    return {auto: f"{kinds.get(auto, 'modeling')}_{stem}.{name}" for auto, name in classes.items()}


LLADA_TOKENS = [
    "<|startoftext|>",
    "<|endoftext|>",
    "[CLS]",
    "[gMASK]",
    *(f"<|reserved_token_{i}|>" for i in range(8)),
    "<|mdm_mask|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
LLADA_VOCAB = BASE + len(LLADA_TOKENS) + ROWS_TO_SPARE


def llada(name: str, chat: bool, **changes: Any) -> Layout:
    template = {"chat_template": HEADERS} if chat else {}
    last = end("<|endoftext|>", LLADA_TOKENS)
    turn = {end("<|eot_id|>", LLADA_TOKENS)} if chat else set()
    config = dict(
        model_type="llada",
        architectures=["LLaDAModelLM"],
        auto_map=remote(
            "llada", AutoConfig="LLaDAConfig", AutoModel="M", AutoModelForCausalLM="LLaDAModelLM"
        ),
        activation_type="silu",
        block_type="llama",
        d_model=WIDTH,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        n_layers=LAYERS,
        mlp_hidden_size=3 * WIDTH,
        mlp_ratio=4,
        max_sequence_length=4096,
        rms_norm_eps=1e-5,
        rope=True,
        rope_theta=500000.0,
        vocab_size=LLADA_VOCAB,
        embedding_size=LLADA_VOCAB,
        weight_tying=False,
        include_bias=False,
        include_qkv_bias=False,
        layer_norm_type="rms",
        mask_token_id=end("<|mdm_mask|>", LLADA_TOKENS),
        eos_token_id=last,
        pad_token_id=last,
        use_cache=False,
    )
    return Layout(
        name,
        config,
        llada_shapes(LLADA_VOCAB),
        plain_fast(
            LLADA_TOKENS, bos_token="<|startoftext|>", eos_token="<|endoftext|>", **template
        ),
        family="masked",
        mask=end("<|mdm_mask|>", LLADA_TOKENS),
        ends=frozenset({last, *turn}),
        chat=HEADERS_HELLO if chat else None,
        **changes,
    )


MOE_TOKENS = [
    "<|startoftext|>",
    "<|endoftext|>",
    "[CLS]",
    "[gMASK]",
    "<|mask|>",
    "<|role_end|>",
    "<role>",
    "</role>",
]
MOE_VOCAB = BASE + len(MOE_TOKENS) + ROWS_TO_SPARE
MOE_ENDS = frozenset({BASE + 1, end("<|role_end|>", MOE_TOKENS)})
MOE_MASK = end("<|mask|>", MOE_TOKENS)


def moe_tokenizer() -> Callable[[Path], None]:
    return plain_fast(
        MOE_TOKENS,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        chat_template=ROLES,
    )


def llada_moe(name: str) -> Layout:
    config = dict(
        model_type="llada",
        architectures=["LLaDAMoEModelLM"],
        auto_map=remote(
            "lladamoe", AutoConfig="LLaDAMoEConfig", AutoModelForCausalLM="LLaDAMoEModelLM"
        ),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        dense_intermediate_size=4 * WIDTH,
        expert_intermediate_size=WIDTH // 2,
        shared_expert_intermediate_size=None,
        num_experts=8,
        num_experts_per_tok=2,
        moe_layer_freq=[1] * LAYERS,
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        routed_scaling_factor=1.0,
        norm_topk_prob=None,
        qk_layernorm=True,
        attention_bias=False,
        clip_qkv=None,
        hidden_act="silu",
        max_position_embeddings=8192,
        partial_rotary_factor=1,
        rms_norm_eps=1e-5,
        rope_theta=50000,
        rope_scaling=None,
        tie_word_embeddings=False,
        vocab_size=MOE_VOCAB,
        eos_token_id=BASE + 1,
        pad_token_id=BASE + 1,
        mask_token_id=MOE_MASK,
    )
    return Layout(
        name,
        config,
        expert_shapes(MOE_VOCAB, 8, WIDTH // 2),
        moe_tokenizer(),
        family="masked",
        mask=MOE_MASK,
        ends=MOE_ENDS,
        chat=ROLES_HELLO,
        files="shards",
    )


def llada2(name: str, **changes: Any) -> Layout:
    config = dict(
        model_type="llada2_moe",
        architectures=["LLaDA2MoeModelLM"],
        auto_map=remote(
            "llada2_moe", AutoConfig="LLaDA2MoeConfig", AutoModelForCausalLM="LLaDA2MoeModelLM"
        ),
        hidden_size=WIDTH,
        intermediate_size=5 * WIDTH // 2,
        moe_intermediate_size=WIDTH // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=WIDTH // HEADS,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        partial_rotary_factor=0.5,
        rope_theta=600000,
        rope_scaling=None,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        use_qk_norm=True,
        use_qkv_bias=False,
        use_bias=False,
        vocab_size=MOE_VOCAB,
        pad_token_id=BASE + 1,
        eos_token_id=BASE + 1,
        mask_token_id=MOE_MASK,
    )
    return Layout(
        name,
        {**config, **changes},
        llada2_shapes(MOE_VOCAB, 8),
        moe_tokenizer(),
        family="block",
        mask=MOE_MASK,
        block=32,
        ends=MOE_ENDS,
        chat=ROLES_HELLO,
        files="shards",
        method="block",
    )


def qwen_config(vocab: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    return dict(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        intermediate_size=2 * WIDTH,
        hidden_act="silu",
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        use_sliding_window=False,
        vocab_size=vocab,
        **changes,
    )


def dream(name: str, generation_eos: Any) -> Layout:
    tokens = [*QWEN, "<|beginoftext|>", "<|mask|>"]
    vocab = BASE + len(tokens) + ROWS_TO_SPARE
    mask = end("<|mask|>", tokens)
    return Layout(
        name,
        qwen_config(
            vocab,
            2,
            model_type="Dream",
            architectures=["DreamModel"],
            auto_map=remote("dream", AutoConfig="DreamConfig", AutoModel="DreamModel"),
            bos_token_id=BASE,
            eos_token_id=BASE,
            pad_token_id=BASE,
            mask_token_id=mask,
            use_mrope=False,
        ),
        decoder_shapes(vocab, 2, 2 * WIDTH, bias=True, norms=False),
        dream_tokenizer,
        family="masked",
        mask=mask,
        shifted=True,
        ends=frozenset({BASE, end("<|im_end|>", tokens)}),
        chat=SYSTEM + CHATML_HELLO,
        generation=dict(
            _from_model_config=True,
            alg="origin",
            alg_temp=None,
            bos_token_id=BASE,
            eos_token_id=generation_eos,
            eps=0.001,
            mask_token_id=None,
            output_history=False,
            pad_token_id=BASE,
            steps=512,
            temperature=0.0,
            top_k=None,
            top_p=None,
        ),
        files="shards",
    )


def sdar(name: str, block: int) -> Layout:
    tokens = [*QWEN3, "<|MASK|>"]
    vocab = BASE + len(tokens) + ROWS_TO_SPARE
    mask = end("<|MASK|>", tokens)
    ends = [end("<|im_end|>", tokens), BASE]
    return Layout(
        name,
        qwen_config(
            vocab,
            2,
            model_type="sdar",
            architectures=["SDARForCausalLM"],
            auto_map=remote(
                "sdar", AutoConfig="SDARConfig", AutoModelForCausalLM="SDARForCausalLM"
            ),
            head_dim=WIDTH // HEADS,
            attention_bias=False,
            bos_token_id=BASE,
            eos_token_id=ends[0],
            pad_token_id=BASE,
            mask_token_id=mask,
        ),
        decoder_shapes(vocab, 2, 2 * WIDTH, bias=False, norms=True),
        qwen_tokenizer(tokens, "<|im_end|>", CHATML.replace("SYSTEM", "")),
        family="block",
        mask=mask,
        block=block,
        ends=frozenset(ends),
        chat=CHATML_HELLO,
        generation=dict(
            bos_token_id=BASE,
            do_sample=True,
            eos_token_id=ends,
            pad_token_id=BASE,
            temperature=0.6,
            top_k=20,
            top_p=0.95,
        ),
        method="block",
    )


def fast_dllm(name: str) -> Layout:
    tokens = [*QWEN, "|<MASK>|"]
    vocab = BASE + len(tokens) + ROWS_TO_SPARE
    mask = end("|<MASK>|", tokens)
    return Layout(
        name,
        qwen_config(
            vocab,
            2,
            model_type="Fast_dLLM_Qwen",
            architectures=["Fast_dLLM_QwenForCausalLM"],
            auto_map=remote("fast_dllm", AutoConfig="C", AutoModelForCausalLM="M"),
            bd_size=32,
            bos_token_id=BASE,
            eos_token_id=end("<|im_end|>", tokens),
            mask_token_id=mask,
        ),
        decoder_shapes(vocab, 2, 2 * WIDTH, bias=True, norms=False),
        qwen_tokenizer(tokens, "<|im_end|>", CHATML.replace("SYSTEM", SYSTEM)),
        family="block",
        mask=mask,
        shifted=True,
        block=32,
        ends=frozenset({BASE, end("<|im_end|>", tokens)}),
        chat=SYSTEM + CHATML_HELLO,
        generation=dict(eos_token_id=[end("<|im_end|>", tokens), BASE]),
        method="block",
    )


def jacobi_forcing(name: str) -> Layout:
    """A Qwen2.5 as the library knows it."""
    vocab = BASE + len(QWEN) + ROWS_TO_SPARE
    last = end("<|im_end|>", QWEN)
    return Layout(
        name,
        qwen_config(
            vocab,
            2,
            model_type="qwen2",
            architectures=["Qwen2ForCausalLM"],
            bos_token_id=BASE,
            eos_token_id=last,
        ),
        decoder_shapes(vocab, 2, 2 * WIDTH, bias=True, norms=False),
        qwen_tokenizer(QWEN, "<|im_end|>", CHATML.replace("SYSTEM", SYSTEM)),
        family="causal",
        ends=frozenset({BASE, last}),
        chat=SYSTEM + CHATML_HELLO,
        generation=dict(
            bos_token_id=BASE,
            do_sample=True,
            eos_token_id=[last, BASE],
            pad_token_id=BASE,
            repetition_penalty=1.1,
            temperature=0.7,
            top_k=20,
            top_p=0.8,
        ),
        files="shards",
        method="jacobi",
    )


def llama_config(**changes: Any) -> dict[str, Any]:
    return dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=2 * WIDTH,
        hidden_act="silu",
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        vocab_size=LLAMA_VOCAB,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )


def cllm(name: str) -> Layout:
    return Layout(
        name,
        llama_config(),
        decoder_shapes(LLAMA_VOCAB, HEADS, 2 * WIDTH, bias=False, norms=False),
        llama_tokenizer,
        family="causal",
        ends=frozenset({2}),
        generation=dict(bos_token_id=1, eos_token_id=2),
        files="bin",
        method="jacobi",
    )


def diffullama(name: str) -> Layout:
    """Llama's keys and config; nothing but its name says what it is. The mask is a rare token."""
    vocab = 811 + ROWS_TO_SPARE
    return Layout(
        name,
        {**llama_config(), "vocab_size": vocab},
        decoder_shapes(vocab, HEADS, 2 * WIDTH, bias=False, norms=False),
        llama_tokenizer,
        family="masked",
        mask=811,
        shifted=True,
        ends=frozenset({2}),
        files="shards",
    )


def diffugpt(name: str) -> Layout:
    tokens = ["<|endoftext|>", "[\u00a8M\u00a8]"]
    vocab = BASE + len(tokens)
    return Layout(
        name,
        dict(
            model_type="gpt2",
            architectures=["DiscreteDiffusionModel"],
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=64,
            n_ctx=64,
            layer_norm_epsilon=1e-5,
            activation_function="gelu_new",
            vocab_size=vocab,
            bos_token_id=BASE,
            eos_token_id=BASE,
            tie_word_embeddings=False,
            task_specific_params={"text-generation": {"do_sample": True, "max_length": 64}},
        ),
        gpt2_shapes(vocab, 64),
        gpt2_tokenizer(tokens, mask_token=tokens[1]),
        family="masked",
        mask=BASE + 1,
        shifted=True,
        ends=frozenset({BASE}),
    )


def nemotron(name: str) -> Layout:
    tokens = [f"<SPECIAL_{i}>" for i in range(4)]
    vocab = BASE + len(tokens) + ROWS_TO_SPARE
    shapes = decoder_shapes(vocab, 2, 2 * WIDTH, bias=False, norms=False)
    keys = {
        key.replace("model.", "encoder.", 1).replace("lm_head", "diffusion_head"): shape
        for key, shape in shapes.items()
    }
    return Layout(
        name,
        dict(
            model_type="nemotron_labs_diffusion",
            architectures=["NemotronLabsDiffusionModel"],
            auto_map=remote("nemotron_labs_diffusion", AutoConfig="C", AutoModel="M"),
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            head_dim=WIDTH // HEADS,
            intermediate_size=2 * WIDTH,
            hidden_act="silu",
            vocab_size=vocab,
            max_position_embeddings=262144,
            rms_norm_eps=1e-5,
            block_size=32,
            dlm_paradigm="bidirectional",
            mask_token_id=100,
            tie_word_embeddings=False,
            eos_token_id=BASE + 1,
            rope_parameters=dict(
                rope_type="yarn",
                factor=16.0,
                rope_theta=1000000.0,
                original_max_position_embeddings=16384,
                llama_4_scaling_beta=0.1,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        ),
        keys,
        plain_fast(tokens, eos_token=tokens[1]),
        family="causal",
        ends=frozenset({BASE + 1}),
        files="shards",
        method="ar",
    )


def mdlm(name: str) -> Layout:
    """Published without a tokenizer: it is GPT-2's. The mask is the last token."""
    vocab = BASE + 2
    return Layout(
        name,
        dict(
            model_type="mdlm",
            architectures=["MDLM"],
            auto_map=remote("mdlm", AutoConfig="MDLMConfig", AutoModelForMaskedLM="MDLM"),
            vocab_size=vocab,
            model_length=64,
            hidden_dim=WIDTH,
            cond_dim=8,
            n_blocks=LAYERS,
            n_heads=HEADS,
            dropout=0.1,
            time_conditioning=False,
            return_dict=False,
        ),
        dit_shapes(vocab, "backbone."),
        None,
        family="masked",
        mask=vocab - 1,
    )


def bd3lm(name: str, block: int) -> Layout:
    vocab = BASE + 2
    return Layout(
        name,
        dict(
            model_type="bd3lm",
            architectures=["BD3LM"],
            auto_map=remote("bd3lm", AutoConfig="BD3LMConfig", AutoModelForMaskedLM="BD3LM"),
            vocab_size=vocab,
            model_length=64,
            block_size=block,
            hidden_dim=WIDTH,
            cond_dim=8,
            n_blocks=LAYERS,
            n_heads=HEADS,
            dropout=0.1,
            cross_attn=True,
            adaln=True,
            causal=False,
            attn_backend="sdpa",
            time_conditioning=False,
            var_min=False,
            sampling_eps_min=0.001,
            sampling_eps_max=1.0,
        ),
        dit_shapes(vocab, "backbone."),
        None,
        family="block",
        mask=vocab - 1,
        block=block,
        method="block",
    )


def sedd(name: str) -> Layout:
    """Its config is that of its training run, its weights a pickle, and it has no tokenizer."""
    return Layout(
        name,
        dict(
            ngpus=8,
            tokens=BASE + 1,
            graph=dict(type="absorb", file="data", report_all=False),
            noise=dict(type="loglinear", sigma_min=1e-4, sigma_max=20),
            sampling=dict(predictor="euler", steps=128, noise_removal=True),
            model=dict(
                name="small",
                type="ddit",
                hidden_size=WIDTH,
                cond_dim=8,
                length=64,
                n_blocks=LAYERS,
                n_heads=HEADS,
                scale_by_sigma=True,
                dropout=0.1,
            ),
        ),
        dit_shapes(BASE + 2, ""),
        None,
        family="masked",
        mask=BASE + 1,
        files="bin",
    )


def xlnet(name: str) -> Layout:
    vocab = len(XLNET_TOKENS) + len(XLNET_WORDS)
    return Layout(
        name,
        dict(
            model_type="xlnet",
            architectures=["XLNetLMHeadModel"],
            attn_type="bi",
            bi_data=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=5,
            clamp_len=-1,
            d_model=WIDTH,
            d_head=WIDTH // HEADS,
            d_inner=4 * WIDTH,
            n_head=HEADS,
            n_layer=LAYERS,
            dropout=0.1,
            end_n_top=5,
            ff_activation="gelu",
            layer_norm_eps=1e-12,
            mem_len=None,
            reuse_len=None,
            same_length=False,
            untie_r=True,
            vocab_size=vocab,
        ),
        xlnet_shapes(vocab),
        xlnet_tokenizer,
        family="any-subset",
        mask=6,
        ends=frozenset({2}),
        method="assd",
    )


LAYOUTS = [
    xlnet("xlnet/xlnet-base-cased"),
    xlnet("xlnet/xlnet-large-cased"),
    xlnet("therealgabeguo/ASARM"),
    mdlm("kuleshov-group/mdlm-owt"),
    sedd("louaaron/sedd-small"),
    llada("GSAI-ML/LLaDA-8B-Base", chat=False, files="shards"),
    llada("GSAI-ML/LLaDA-8B-Instruct", chat=True),
    llada("GSAI-ML/LLaDA-1.5", chat=True),
    llada_moe("inclusionAI/LLaDA-MoE-7B-A1B-Instruct"),
    dream("Dream-org/Dream-v0-Base-7B", BASE),
    dream("Dream-org/Dream-v0-Instruct-7B", BASE),
    dream("Dream-org/Dream-Coder-v0-Instruct-7B", [BASE]),
    dream("apple/DiffuCoder-7B-cpGRPO", BASE),
    diffugpt("diffusionfamily/diffugpt-m"),
    diffullama("diffusionfamily/diffullama"),
    *(
        sdar(f"JetLM/SDAR-8B-Chat{suffix}", block)
        for suffix, block in (("", 4), ("-b8", 8), ("-b16", 16), ("-b32", 32), ("-b64", 64))
    ),
    fast_dllm("Efficient-Large-Model/Fast_dLLM_v2_7B"),
    llada2("inclusionAI/LLaDA2.0-mini"),
    llada2("inclusionAI/LLaDA2.1-flash", max_position_embeddings=16384),
    bd3lm("kuleshov-group/bd3lm-owt-block_size4", 4),
    nemotron("nvidia/Nemotron-Labs-Diffusion-3B"),
    jacobi_forcing("JacobiForcing/JacobiForcing_Coder_7B_v1"),
    cllm("cllm/consistency-llm-7b-math"),
]


TRANSCRIBED = "a transcription of its authors' forward"
BY_HAND = "a forward written out by hand"
CHECKED = {
    "xlnet": "the library's XLNet",
    "asarm": "the library's XLNet",
    "mdlm": BY_HAND,
    "sedd": BY_HAND,
    "bd3lm": BY_HAND,
    "diffugpt": BY_HAND,
    "llada": TRANSCRIBED,
    "dream": "the library's Qwen2, rows seeing everything",
    "diffucoder": "the library's Qwen2, rows seeing everything",
    "diffullama": "the library's Llama, rows seeing everything",
    "sdar": "the library's Qwen3, in blocks",
    "fast_dllm": "the library's Qwen2, in blocks",
    "nemotron": "the library's Ministral 3",
    "jacobiforcing": "the library's Qwen2",
    "cllm": "the library's Llama",
}


def table() -> str:
    """A line for every checkpoint, from loading it."""
    lines = [
        "| checkpoint | family | runs as | weights | stops at | chat | forward compared with |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            lines.append(_row(layout, layout.write(Path(folder))))
    return "\n".join(lines)


def _row(layout: Layout, place: Path) -> str:
    import forerun

    m = forerun.load(str(place), lanes=1, max_context=64)
    family = m.family.name
    if layout.block is not None:
        family += f" of {layout.block}"
    if layout.shifted:
        family += ", shifted"
    network: Any = getattr(m.backbone, "model", None)
    native = type(network).__name__ if network is not None else type(m.backbone).__name__
    stops = "(GPT-2's)"
    if m.tokenizer is not None:
        names = m.tokenizer.convert_ids_to_tokens(sorted(m.eos))
        stops = ", ".join(f"`{name}`" for name in names).replace("|", "\\|")
    files = {"whole": "safetensors", "shards": "shards", "bin": ".bin"}[layout.files]
    chat: dict[str | None, str] = {
        CHATML_HELLO: "ChatML",
        SYSTEM + CHATML_HELLO: "ChatML with a system message",
    }
    chat |= {HEADERS_HELLO: "headers", ROLES_HELLO: "roles", None: "none"}
    checked = next(said for key, said in CHECKED.items() if key in layout.name.lower())
    cells = (f"`{layout.name}`", family, native, files, stops, chat[layout.chat], checked)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("names", nargs="*", help="as on the hub; all without any")
    parser.add_argument("--write", action="store_true", help="write the table of docs/models.md")
    arguments = parser.parse_args()
    for layout in LAYOUTS if arguments.folder else ():
        if not arguments.names or layout.name in arguments.names:
            layout.write(arguments.folder)
    if arguments.write:
        from bench.page import DOCS, write_part

        write_part(DOCS / "models.md", table(), "<!-- published -->", "<!-- end of published -->")


if __name__ == "__main__":
    main()
