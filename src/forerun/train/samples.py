"""Text that a left-to-right model writes after prefixes of a corpus: what a drafter must foresee is not what people write."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadCheckpoint
from forerun.noise import mix
from forerun.train.data import Corpus

CHUNK = 2048  # sequences written at once, and what an interruption loses at most


def write_samples(
    network: Any, corpus: Corpus, count: int, length: int, temperatures: Sequence[float], seed: int, folder: Path
) -> Path:
    """`count` sequences of `length` tokens, an eighth to a half of each given; chunk by chunk, so that it can be interrupted."""
    folder.mkdir(parents=True, exist_ok=True)
    made_by = dict(count=count, length=length, temperatures=list(temperatures), seed=seed, teacher=fingerprint(network))
    check_folder(folder, made_by)
    whole = folder / "samples.npz"
    if whole.exists():
        return whole
    parts = []
    for number in range(-(-count // CHUNK)):
        file = folder / f"chunk{number}.npy"
        if not file.exists():
            rows = min(CHUNK, count - number * CHUNK)
            part = file.with_suffix(".tmp.npy")
            np.save(part, _chunk(network, corpus, rows, length, temperatures, mix(seed, number)))
            part.replace(file)
        parts.append(np.load(file))
    np.savez(whole.with_suffix(".tmp.npz"), tokens=np.concatenate(parts))
    whole.with_suffix(".tmp.npz").replace(whole)
    return whole


def _chunk(network: Any, corpus: Corpus, rows: int, length: int, temperatures: Sequence[float], seed: int) -> np.ndarray:
    """Sequences with equally long prompts, as many at each temperature."""
    given = int(np.random.default_rng(seed).integers(max(1, length // 8), max(2, length // 2)))
    prompts_BP = corpus.batch(0, rows, given, seed)
    torch.manual_seed(seed % 2**31)
    written = []
    for part_BP, temperature in zip(prompts_BP.tensor_split(len(temperatures)), temperatures):
        how = dict(do_sample=True, temperature=float(temperature), top_k=0, top_p=1.0) if temperature else {}
        written += [_continue(network, part_BP, length, **how).cpu()] if len(part_BP) else []
    return torch.cat(written).numpy().astype(np.int32)


def continue_greedily(network: Any, prompts_BP: Tensor, length: int) -> Tensor:
    """Prompts continued to `length` tokens, the likeliest one after the other."""
    return _continue(network, prompts_BP, length)


@torch.no_grad()
def _continue(network: Any, prompts_BP: Tensor, length: int, **how: Any) -> Tensor:
    from transformers import GenerationConfig

    # Nothing of the checkpoint's own settings: a repetition penalty would make it another law. And no end token ends the text: it
    # goes on behind one, as it does in the corpus.
    settings = GenerationConfig(
        max_new_tokens=length - prompts_BP.shape[1],
        eos_token_id=network.config.vocab_size,
        pad_token_id=0,
        **{"do_sample": False, **how},
    )
    prompts_BP = prompts_BP.to(device())
    return network.to(device()).generate(prompts_BP, attention_mask=torch.ones_like(prompts_BP), generation_config=settings)


def device() -> torch.device:
    """Where this process computes: of several, each has a GPU of its own."""
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")


def fingerprint(network: Any) -> str:
    """Tells one network from another by a few weights of all its parts; adapters in training begin as nothing and do not count."""
    rows, columns = network.get_input_embeddings().weight.shape
    weights = [weight.detach() for name, weight in network.named_parameters() if ".lora_" not in name]
    return f"{rows}x{columns}:{sum(float(w.flatten()[::97].double().abs().sum()) for w in weights):.6e}"


def digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.cpu().numpy().astype(np.int64).tobytes()).hexdigest()[:16]


def check_folder(folder: Path, made_by: dict[str, Any]) -> None:
    """Refuse a folder whose files were made otherwise; say in a new one how they are made."""
    file = folder / "made_by.json"
    if not file.exists():
        part = folder / f"made_by.{os.getpid()}.tmp"
        part.write_text(json.dumps(made_by))
        part.replace(file)
    before = json.loads(file.read_text())
    changed = [key for key, value in made_by.items() if before.get(key) != value]
    if changed:
        raise BadCheckpoint(
            f"{folder} was made otherwise (it differs in {', '.join(changed)}): choose another folder, or remove it."
        )
