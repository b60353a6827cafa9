"""Text that a left-to-right model writes after prefixes of a corpus: what a drafter must foresee is not what people write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.noise import mix
from forerun.train.data import Corpus

CHUNK = 2048  # sequences written at once, and what an interruption loses at most


def write_samples(
    network: Any, corpus: Corpus, count: int, length: int, temperatures: Sequence[float], seed: int, folder: Path
) -> Path:
    """`count` sequences of `length` tokens, an eighth to a half of each given; chunk by chunk, so that it can be interrupted."""
    whole = folder / "samples.npz"
    if whole.exists():
        return whole
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number in range(-(-count // CHUNK)):
        file = folder / f"chunk{number}.npy"
        if not file.exists():
            rows = min(CHUNK, count - number * CHUNK)
            np.save(file, _chunk(network, corpus, rows, length, temperatures[number % len(temperatures)], mix(seed, number)))
        parts.append(np.load(file))
    np.savez(whole, tokens=np.concatenate(parts))
    return whole


def _chunk(network: Any, corpus: Corpus, rows: int, length: int, temperature: float, seed: int) -> np.ndarray:
    given = int(np.random.default_rng(seed).integers(max(1, length // 8), max(2, length // 2)))
    torch.manual_seed(seed % 2**31)
    how = dict(do_sample=True, temperature=float(temperature), top_k=0, top_p=1.0) if temperature else {}
    return _continue(network, corpus.batch(0, rows, given, seed), length, **how).cpu().numpy().astype(np.int32)


def continue_greedily(network: Any, prompts_BP: Tensor, length: int) -> Tensor:
    """Prompts continued to `length` tokens, the likeliest one after the other."""
    return _continue(network, prompts_BP, length)


@torch.no_grad()
def _continue(network: Any, prompts_BP: Tensor, length: int, **how: Any) -> Tensor:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompts_BP = prompts_BP.to(device)
    # No end token ends it: text goes on behind one, as it does in the corpus.
    return network.to(device).generate(
        prompts_BP,
        attention_mask=torch.ones_like(prompts_BP),
        max_new_tokens=length - prompts_BP.shape[1],
        eos_token_id=network.config.vocab_size,
        pad_token_id=0,
        **{"do_sample": False, **how},
    )
