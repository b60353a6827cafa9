"""Text that a left-to-right model writes after prefixes of a corpus. A drafter must foresee what
its target writes, not what people write.

B sequences, P tokens given.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadCheckpoint
from forerun.probability.noise import mix
from forerun.train.data import Corpus
from forerun.train.networks import move

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

CHUNK = 2048  # sequences written at once, and what an interruption loses at most
WHOLE = "samples.npz"


@dataclass(frozen=True)
class SamplePlan:
    """How much a model writes: `count` sequences of `length` tokens, in equal parts at each
    temperature."""

    count: int
    length: int
    temperatures: tuple[float, ...]
    seed: int

    def made_by(self, teacher: str) -> dict[str, object]:
        """What the sequences hang on. `teacher` is the fingerprint of who writes them."""
        return dict(
            count=self.count,
            length=self.length,
            temperatures=list(self.temperatures),
            seed=self.seed,
            teacher=teacher,
        )


def write_samples(
    network: PreTrainedModel, corpus: Corpus, plan: SamplePlan, folder: Path
) -> np.ndarray:
    """The sequences, [count, length], an eighth to a half of each given. They are kept in files,
    chunk by chunk, so that an interrupted run goes on where it stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    check_folder(folder, plan.made_by(fingerprint(network)))
    whole = folder / WHOLE
    if not whole.exists():
        for number, file in enumerate(sample_files(folder, plan)):
            _store_chunk(network, corpus, plan, number, file)
        join_chunks(folder, plan)
    return np.load(whole)["tokens"]


def sample_files(folder: Path, plan: SamplePlan) -> list[Path]:
    """The files of all chunks."""
    return [folder / f"chunk{number}.npy" for number in range(-(-plan.count // CHUNK))]


def join_chunks(folder: Path, plan: SamplePlan) -> None:
    """All chunks in one file, once they are there."""
    whole = folder / WHOLE
    unfinished = whole.with_suffix(".tmp.npz")
    np.savez(unfinished, tokens=np.concatenate([*map(np.load, sample_files(folder, plan))]))
    unfinished.replace(whole)


def store(file: Path, tokens: np.ndarray) -> None:
    """Write another file and rename it: an interruption leaves no half of one."""
    unfinished = file.with_suffix(".tmp.npy")
    np.save(unfinished, tokens)
    unfinished.replace(file)


def _store_chunk(
    network: PreTrainedModel, corpus: Corpus, plan: SamplePlan, number: int, file: Path
) -> None:
    """One chunk of sequences, written where its file is missing."""
    if not file.exists():
        store(file, _chunk(network, corpus, plan, number))


def _chunk(network: PreTrainedModel, corpus: Corpus, plan: SamplePlan, number: int) -> np.ndarray:
    return write_chunk(network, chunk_prompts(corpus, plan, number), plan, number)


def chunk_prompts(corpus: Corpus, plan: SamplePlan, number: int) -> Tensor:
    """Equally long prompts of a chunk."""
    size = min(CHUNK, plan.count - number * CHUNK)
    seed = mix(plan.seed, number)
    shortest = max(1, plan.length // 8)
    given = int(np.random.default_rng(seed).integers(shortest, max(2, plan.length // 2)))
    return corpus.batch(0, size, given, seed)


def write_chunk(
    network: PreTrainedModel, prompts_BP: Tensor, plan: SamplePlan, number: int
) -> np.ndarray:
    """What follows the prompts of a chunk, as many at each temperature."""
    torch.manual_seed(mix(plan.seed, number) % 2**31)
    written = []
    parts = prompts_BP.tensor_split(len(plan.temperatures))
    for part_BP, temperature in zip(parts, plan.temperatures, strict=True):
        if len(part_BP):
            written.append(continue_texts(network, part_BP, plan.length, temperature).cpu())
    return torch.cat(written).numpy().astype(np.int32)


class TextWriter(Protocol):
    """What transformers adds to every causal network."""

    def generate(
        self, inputs: Tensor, *, attention_mask: Tensor, generation_config: GenerationConfig
    ) -> Tensor: ...


@torch.no_grad()
def continue_texts(
    network: PreTrainedModel,
    prompts_BP: Tensor,
    length: int,
    temperature: float,
    pads_B: Tensor | None = None,
    end_tokens: tuple[int, ...] = (),
) -> Tensor:
    """Prompts continued to `length` tokens; temperature 0 is greedy. The first `pads_B` tokens of
    each prompt are nothing. Behind one of `end_tokens` the first of them is repeated."""
    from transformers import GenerationConfig

    # Only these settings, none of the checkpoint's own: a repetition penalty would change the law.
    # Without `end_tokens` none ends the text: as in the corpus, more text follows it.
    settings = GenerationConfig(
        max_new_tokens=length - prompts_BP.shape[1],
        eos_token_id=list(end_tokens) or network.config.vocab_size,
        pad_token_id=end_tokens[0] if end_tokens else 0,
        do_sample=temperature > 0,
    )
    if temperature > 0:
        settings.update(temperature=float(temperature), top_k=0, top_p=1.0)
    prompts_BP = prompts_BP.to(device())
    move(network, device())
    seen_BP = torch.ones_like(prompts_BP)
    if pads_B is not None:
        seen_BP = (torch.arange(prompts_BP.shape[1]) >= pads_B[:, None]).long().to(device())
    text_BL = cast("TextWriter", network).generate(
        prompts_BP, attention_mask=seen_BP, generation_config=settings
    )
    # all texts may have ended before
    return F.pad(text_BL, (0, length - text_BL.shape[1]), value=settings.pad_token_id)


def device() -> torch.device:
    """Where this process computes. Each of several processes has its own GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")


def fingerprint(network: PreTrainedModel) -> str:
    """Tells networks apart by a few weights of every part. Adapters in training do not count: they
    begin as nothing."""
    rows, columns = network.get_input_embeddings().get_parameter("weight").shape
    total = 0.0
    for name, weight in network.named_parameters():
        if ".lora_" not in name:
            total += float(weight.detach().flatten()[::97].double().abs().sum())
    return f"{rows}x{columns}:{total:.6e}"


def digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.cpu().numpy().astype(np.int64).tobytes()).hexdigest()[:16]


def check_folder(folder: Path, made_by: Mapping[str, object]) -> None:
    """Refuse a folder whose files were made otherwise. In a new one, write down how they are
    made."""
    file = folder / "made_by.json"
    if not file.exists():
        unfinished = folder / f"made_by.{os.getpid()}.tmp"
        unfinished.write_text(json.dumps(made_by))
        unfinished.replace(file)
    before = json.loads(file.read_text())
    changed = [key for key, value in made_by.items() if before.get(key) != value]
    if changed:
        raise BadCheckpoint(
            f"{folder} was made otherwise (it differs in {', '.join(changed)}): choose another "
            "folder, or remove it."
        )
