"""Tiny random models with a byte tokenizer. They say nothing sensible, need no download, and run
every architecture's real code.

`tiny` is a Llama; `tiny:ARCH` another shape; `tiny:any-subset` a Llama with a mask token;
`tiny:ARCH:SEED` other weights. They serve the tests and a first try of the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forerun.errors import BadOption, unknown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 257  # 256 bytes and an end token
SHAPE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SHAPES: dict[str, dict[str, object]] = {  # of those that name their sizes otherwise
    "xlnet": dict(d_model=64, n_layer=2, n_head=4, d_inner=128),
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "gpt_neo": dict(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
    ),
}
ARCHITECTURES = ("gpt2", "gpt_neo", "llama", "qwen2", "qwen3")
ANY_SUBSET = ("any-subset", "xlnet")
MASKED = ("masked", "masked-shifted")
BLOCK = ("block", "block-shifted")
BLANKS = (*ANY_SUBSET, *MASKED, *BLOCK)  # models that fill blanks


def parse(name: str) -> tuple[str, int]:
    """'tiny[:ARCH[:SEED]]' -> (arch, seed)."""
    arch, seed, *rest = [*name.split(":")[1:], "", ""]
    arch = arch or "llama"
    seed = seed or "0"
    if any(rest):
        raise BadOption(f"model={name!r} has too many parts: 'tiny:ARCH:SEED' is the most.")
    if arch not in ARCHITECTURES + BLANKS:
        raise unknown("tiny architecture", arch, ARCHITECTURES + BLANKS)
    if not (seed.isascii() and seed.isdigit() and len(seed) < 10):
        raise BadOption(
            f"model={name!r}: the seed {seed!r} must be a whole number, as in 'tiny:llama:1'."
        )
    return arch, int(seed)


def build(
    arch: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """A `transformers` model with seeded random weights, large enough to give laws with a shape.
    `changes` go to its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arguments = {**_config_arguments(arch), **changes}
    native = arch if arch in (*ARCHITECTURES, "xlnet") else "llama"
    config = AutoConfig.for_model(native, **arguments, initializer_range=0.25)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(dtype).eval()


def _config_arguments(arch: str) -> dict[str, object]:
    arguments: dict[str, object] = dict(
        vocab_size=VOCAB,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=VOCAB - 1,
        pad_token_id=None,
    )
    if arch in BLANKS:
        family = "any-subset" if arch in ANY_SUBSET else arch.partition("-")[0]
        shifted = arch.endswith("-shifted")
        settings = dict(family=family, mask_token=VOCAB, shifted=shifted, block=8)
        arguments |= dict(vocab_size=VOCAB + 1, forerun=settings)
    if arch == "xlnet":
        del arguments["max_position_embeddings"]
    return {**arguments, **SHAPES.get(arch, SHAPE)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
