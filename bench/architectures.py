"""Which causal architectures of the installed `transformers` decode here as in the library.

Each is built tiny from its own config, with random weights. It counts as equal if `ar` and a method
that drafts write, in float32 and at temperature 0, the tokens of `generate`, past its sliding
window too.

    python bench/architectures.py [NAME ...] [--write]
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers import __version__ as library_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as library_logging

import forerun

MOST_PARAMETERS = 4e6
CONTEXT = 96
WINDOW = 16
PROMPT = [5, 9, 5, 9, 7, 3, 11, 5, 9, 5, 9, 7]
NEW_TOKENS = 28
VOCABULARY = 100

# Small sizes, by the names that configs have for them.
SIZES: dict[object, str] = {
    64: "hidden_size d_model n_embd dim embed_dim hidden_dim embedding_size word_embed_proj_dim "
    "d_embed dim_model",
    96: "intermediate_size ffn_dim d_inner n_inner d_ff decoder_ffn_dim ffn_hidden_size "
    "encoder_ffn_dim feed_forward_size dff dim_ff",
    VOCABULARY: "vocab_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    2: "num_key_value_heads num_experts_per_tok moe_k moe_topk num_experts_per_token",
    3: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers",
    256: "max_position_embeddings n_positions n_ctx max_seq_len",
    WINDOW: "sliding_window head_dim kv_lora_rank kv_channels rotary_dim attention_head_dim",
    24: "q_lora_rank",
    8: "qk_nope_head_dim qk_rope_head_dim",
    12: "v_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    1: "n_shared_experts n_group topk_group first_k_dense_replace num_nextn_predict_layers",
    None: "pad_token_id bos_token_id eos_token_id",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
LATENT = dict(head_dim=8, num_key_value_heads=4)  # the head size is that of the rotated part
ALTERNATING = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
# What else an architecture needs to be built small.
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 youtu "
        "hy_v4 longcat_flash".split(),
        LATENT,
    ),
    **dict.fromkeys(
        "bert bert-generation big_bird electra ernie megatron-bert rembert roformer".split(),
        dict(is_decoder=True),
    ),
    **dict.fromkeys(
        "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl "
        "xmod".split(),
        dict(is_decoder=True, pad_token_id=0, max_position_embeddings=260),
    ),
    **dict.fromkeys(
        "gemma2 gemma3_text cohere2 olmo3 gpt_oss exaone4 smollm3 vaultgemma".split(), ALTERNATING
    ),
    "roc_bert": dict(is_decoder=True, pronunciation_vocab_size=16, shape_vocab_size=16),
    "deepseek_v2": dict(topk_method="greedy", n_group=1, topk_group=1, **LATENT),
    "longcat_flash": dict(num_layers=2, zero_expert_num=2, qk_head_dim=16, **LATENT),
    "dots1": dict(n_shared_experts=1, num_experts_per_tok=2, n_routed_experts=4, moe_intermediate_size=32),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0), ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2)),
    "smollm3": dict(pad_token_id=0),
    "cohere_compass_text": ALTERNATING,
    "lfm2_moe": dict(layer_types=["full_attention", "conv", "full_attention"]),
    "gemma3n_text": dict(layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4, num_kv_shared_layers=2, vocab_size_per_layer_input=100, hidden_size_per_layer_input=16, laurel_rank=8),
    "gemma4_text": dict(global_head_dim=32, vocab_size_per_layer_input=100, hidden_size_per_layer_input=16, **ALTERNATING),
    "gemma4_unified_text": dict(global_head_dim=32, vocab_size_per_layer_input=100, hidden_size_per_layer_input=16, **ALTERNATING),
    "cwm": dict(bos_token_id=1, eos_token_id=2, **ALTERNATING),
    "ministral": dict(head_dim=16, **ALTERNATING),
    "hunyuan_v1_dense": dict(head_dim=16),
    "hunyuan_v1_moe": dict(head_dim=16),
    "nemotron": dict(num_key_value_heads=2, head_dim=16),
    "modernbert-decoder": dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], num_layers=2, window_size=WINDOW),
    "phi3": dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
}


@dataclass(frozen=True)
class Verdict:
    """What became of one architecture: 'equal', 'refused', 'wrong', 'crashed' or 'not built'."""

    name: str
    outcome: str
    why: str = ""


def small_config(name: str, **changes: Any) -> Any:
    """The config of an architecture with small sizes."""
    kind = CONFIG_MAPPING[name]
    default = kind()
    sizes = {
        key: size
        for key, size in SMALL.items()
        if key in default.__dict__ and (size is None or default.__dict__[key] is not None)
    }
    return kind(**{**sizes, **CHANGES.get(name, {}), **changes})


def build(name: str, **changes: Any) -> Any:
    """A tiny network of an architecture, with seeded random weights."""
    config = small_config(name, **changes)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in whole.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters even when small")
    torch.manual_seed(0)
    network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            # Fresh weights are small, or all 0 or 1: then much of a network decides nothing.
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network.eval()


def own_tokens(network: Any) -> list[int]:
    """What the library's `generate` writes."""
    network.generation_config = GenerationConfig()  # some force tokens
    inputs = torch.tensor([PROMPT])
    written = network.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    return written[0, len(PROMPT) :].tolist()


def judge(name: str) -> Verdict:
    """Build one architecture, and compare what we write with what the library writes."""
    try:
        network = build(name)
        expected = own_tokens(network)
    except Exception as error:
        return Verdict(name, "not built", _line(error))
    try:
        model = forerun.from_network(network, None, lanes=2, max_context=CONTEXT)
        for method in ("ar", "lookup"):
            found = model.generate(
                [PROMPT, PROMPT[2:]], method=method, max_tokens=NEW_TOKENS, ignore_eos=True
            )
            if found[0].token_ids != expected:
                return Verdict(name, "wrong", f"{method} writes other tokens")
    except forerun.ForerunError as error:
        return Verdict(name, "refused", str(error).partition("\n")[0])
    except Exception as error:
        return Verdict(name, "crashed", _line(error))
    return Verdict(name, "equal", type(model.backbone).__name__)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    library_logging.set_verbosity_error()
    for name in arguments.names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        verdict = judge(name)
        print(f"{name:26} {verdict.outcome:10} {verdict.why}", flush=True)


if __name__ == "__main__":
    main()
