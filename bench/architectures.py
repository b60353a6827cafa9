"""Which causal architectures of the installed `transformers` decode here as in the library.

Each is built tiny from its own config, with random weights. It counts as equal if `ar` and `lookup`
write, in float32 and at temperature 0, the tokens of `generate` with its log-probabilities, alone,
beside another sequence, and past its sliding window.

    python bench/architectures.py [NAME ...] [--write]

`make architectures` tries all and writes docs/models.md. Verdicts are kept in docs/models.json, so
that some can be tried again without the others.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers import __version__ as library_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as library_logging

import forerun

MOST_PARAMETERS = 12e6
KEPT = Path(__file__).parents[1] / "docs" / "models.json"
CONTEXT = 96
WINDOW = 16
PROMPT = [5, 9, 5, 9, 7, 3, 11, 5, 9, 5, 9, 7]
NEW_TOKENS = 28
VOCABULARY = 100

METHODS = ("ar", "lookup")
LARGEST_ERROR = 1e-3  # of a log-probability
OUTCOMES = ("equal", "refused", "wrong", "crashed", "not built")
DRIVERS = {
    "LeanBackbone": "lean decoder",
    "LibraryBackbone": "attention interface",
    "StandInBackbone": "stand-in for its cache",
}

# XLNet runs as an any-subset model, with a backbone and tests of its own.
ARCHITECTURES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name != "xlnet"]

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


def same(names: str, **changes: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names.split(), changes)


ALTERNATING = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
EXPERTS = dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2)
# the head size is that of the rotated part of a key
LATENT = dict(head_dim=8, num_key_value_heads=4)
PER_LAYER = dict(vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=16)
# What else an architecture needs to be built small.
CHANGES: dict[str, dict[str, Any]] = {
    **same(
        "axk1 axk2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 youtu hy_v4",
        **LATENT,
    ),
    **same(
        "bert bert-generation big_bird electra ernie megatron-bert rembert roformer",
        is_decoder=True,
    ),
    **same(
        "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl",
        is_decoder=True,
        pad_token_id=0,
        max_position_embeddings=260,
    ),
    **same("gemma2 gemma3_text cohere2 olmo3 gpt_oss exaone4 vaultgemma", **ALTERNATING),
    **same("hunyuan_v1_dense hunyuan_v1_moe", head_dim=16),
    **same("gemma4_text gemma4_unified_text", global_head_dim=32, **PER_LAYER, **ALTERNATING),
    "cwm": dict(bos_token_id=1, eos_token_id=2, **ALTERNATING),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek_v2": dict(topk_method="greedy", **EXPERTS, **LATENT),
    "dots1": dict(moe_intermediate_size=32, **EXPERTS),
    "gemma3n_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        laurel_rank=8,
        **PER_LAYER,
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], num_layers=2, window_size=WINDOW),
    "lfm2_moe": dict(layer_types=["full_attention", "conv", "full_attention"]),
    "llama4_text": dict(no_rope_layers=[1, 0, 1], floor_scale=8, attn_scale=0.5),
    "longcat_flash": dict(num_layers=2, zero_expert_num=2, qk_head_dim=16, **LATENT),
    "ministral": dict(head_dim=16, **ALTERNATING),
    "modernbert-decoder": dict(
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
    "nemotron": dict(num_key_value_heads=2, head_dim=16),
    "phi3": dict(sliding_window=WINDOW),
    "mllama": dict(
        text_config=dict(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            cross_attention_layers=[1],
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
    ),
    "reformer": dict(
        is_decoder=True,
        axial_pos_embds=False,
        attn_layers=["local", "lsh"],
        num_hidden_layers=2,
        attention_head_size=16,
        feed_forward_size=96,
        num_buckets=2,
    ),
    "mamba2": dict(hidden_size=64, expand=2, head_dim=16, num_heads=8, n_groups=1, state_size=8),
    "xlm": dict(emb_dim=64, n_heads=4, n_layers=3, n_words=VOCABULARY, causal=True),
    "roc_bert": dict(is_decoder=True, pronunciation_vocab_size=16, shape_vocab_size=16),
    "smollm3": dict(pad_token_id=0),
}


@dataclass(frozen=True)
class Verdict:
    """What became of one architecture: 'equal', 'refused', 'wrong', 'crashed' or 'not built'."""

    name: str
    outcome: str
    why: str = ""


def small_config(name: str, **changes: Any) -> Any:
    """The config of an architecture with small sizes, those of its parts too."""
    kind = CONFIG_MAPPING[name]
    default = kind()
    parts = {
        key: small_config(part.model_type).to_dict()
        for key, part in default.__dict__.items()
        if isinstance(part, PreTrainedConfig) and part.model_type in CONFIG_MAPPING
    }
    sizes = {
        key: size
        for key, size in SMALL.items()
        if key in default.__dict__ and (size is None or default.__dict__[key] is not None)
    }
    return kind(**{**sizes, **parts, **CHANGES.get(name, {}), **changes})


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


def own_answer(network: Any) -> tuple[list[int], list[float]]:
    """What the library's `generate` writes, and the log-probability of each token."""
    network.generation_config = GenerationConfig()  # some force tokens
    inputs = torch.tensor([PROMPT])
    written = network.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = written.sequences[0, len(PROMPT) :].tolist()
    laws = torch.cat(written.logits).log_softmax(-1)
    return tokens, [float(law[token]) for law, token in zip(laws, tokens)]


def judge(name: str, **changes: Any) -> Verdict:
    """Build one architecture, and compare what we write with what the library writes."""
    try:
        network = build(name, **changes)
    except Exception as error:
        return Verdict(name, "not built", first_line(error))
    try:
        answer, trouble = own_answer(network), ""
    except Exception as error:  # it may still be refused for a reason
        answer, trouble = ([], []), first_line(error)
    try:
        model = forerun.from_network(network, None, lanes=2, max_context=CONTEXT)
        wrong = [error for method in METHODS if (error := compare(model, method, *answer))]
    except forerun.ForerunError as error:
        return Verdict(name, "refused", str(error).partition("\n")[0])
    except Exception as error:
        return Verdict(name, "not built" if trouble else "crashed", trouble or first_line(error))
    if trouble:
        return Verdict(name, "not built", trouble)
    if wrong:
        return Verdict(name, "wrong", wrong[0])
    return Verdict(name, "equal", DRIVERS[type(model.backbone).__name__])


def compare(model: forerun.Model, method: str, tokens: list[int], logprobs: list[float]) -> str:
    """What is wrong with what a method writes, alone and beside another sequence; nothing, if it
    is equal."""
    if not tokens:
        return ""
    options: Any = dict(method=method, max_tokens=len(tokens), ignore_eos=True, logprobs=0)
    for how, prompts in (("alone", [PROMPT]), ("batched", [PROMPT, PROMPT[2:]])):
        found = model.generate(prompts, **options)[0]
        if found.token_ids != tokens:
            return f"{method} writes other tokens, {how}"
        ours = [entry["logprob"] for entry in found.logprobs or ()]
        error = max(abs(a - b) for a, b in zip(ours, logprobs, strict=True))
        if error >= LARGEST_ERROR:
            return f"{method}: log-probabilities are {error:.2g} off, {how}"
    return ""


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:120]


def judge_all(names: Iterable[str]) -> list[Verdict]:
    verdicts = []
    for name in names:
        verdict = judge(name)
        print(f"{name:26} {verdict.outcome:10} {verdict.why}", flush=True)
        verdicts.append(verdict)
    return verdicts


def page(verdicts: list[Verdict]) -> str:
    """The table of docs/models.md."""
    count = {outcome: [v for v in verdicts if v.outcome == outcome] for outcome in OUTCOMES}
    built = len(verdicts) - len(count["not built"])
    lines = [
        f"transformers {library_version} has {len(verdicts)} causal architectures. {built} of them "
        f"could be built tiny. Of these {len(count['equal'])} are equal, {len(count['refused'])} "
        f"are refused, {len(count['wrong'])} write something else and {len(count['crashed'])} "
        "crash.",
        "",
        "| architecture | loads | greedy, float32: alone, batched | how it is driven, or why not |",
        "|---|---|---|---|",
    ]
    for outcome in OUTCOMES:
        marks = {"equal": "yes | equal, equal", "wrong": "yes | not equal"}
        said = marks.get(outcome, f"{outcome} | ")
        lines += [f"| `{v.name}` | {said} | {brief(v)} |" for v in count[outcome]]
    return "\n".join(lines)


def brief(verdict: Verdict) -> str:
    """A reason without the name, and without what it says twice."""
    why = verdict.why.removeprefix(f"'{verdict.name}' ").removesuffix(".")
    return why.replace("|", " ").replace("is refused: ", "")


def kept() -> dict[str, Verdict]:
    """What was found before."""
    if not KEPT.is_file():
        return {}
    return {name: Verdict(name, *said) for name, said in json.loads(KEPT.read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="architectures; all without any")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    library_logging.set_verbosity_error()
    found = {v.name: v for v in judge_all(arguments.names or ARCHITECTURES)}
    if arguments.write:
        from page import DOCS, write_part

        found = kept() | found if arguments.names else found
        verdicts = [found[name] for name in ARCHITECTURES if name in found]
        rows = {v.name: [v.outcome, v.why] for v in verdicts}
        KEPT.write_text(json.dumps(rows, indent=0) + "\n")
        write_part(
            DOCS / "models.md", page(verdicts), "<!-- architectures -->", "<!-- end of it -->"
        )


if __name__ == "__main__":
    main()
