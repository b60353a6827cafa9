"""Training data by several workers: Jacobi trajectories, and text that a teacher writes.

A part is a chunk of the folder that one process would write. Workers send it back, and this process
stores it: the folder is what a run that was stopped goes on from, and no file is there in part.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.scale.work import Answered, Part, Pool, Worker
from forerun.train import samples, trajectories
from forerun.train.data import Corpus
from forerun.train.networks import load_network
from forerun.train.samples import SamplePlan
from forerun.train.trajectories import TrajectoryPlan

Progress = Callable[[Answered, int, int], None]


def packed(arrays: Mapping[str, np.ndarray]) -> str:
    """Arrays as text."""
    file = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(file, **named)
    return base64.b64encode(file.getvalue()).decode()


def unpacked(words: str) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(base64.b64decode(words))) as held:
        return {name: held[name] for name in held.files}


@dataclass(frozen=True)
class TrajectoryWorkers:
    """Workers that write texts and iterate their blocks."""

    model: str
    plan: TrajectoryPlan

    def make(self) -> Worker:
        network = load_network(self.model).eval()
        name = samples.fingerprint(network)

        def work(value: Mapping[str, Any]) -> dict[str, str]:
            given = unpacked(value["prompts"])
            pads_B = torch.from_numpy(given["pads"]) if "pads" in given else None
            prompts_BP = torch.from_numpy(given["prompts"])
            chunk = trajectories.make_chunk(network, prompts_BP, self.plan, value["number"], pads_B)
            return {"model": name, "chunk": packed(chunk)}

        return work


def collect_trajectories(
    workers: TrajectoryWorkers,
    prompts_SP: torch.Tensor,
    folder: Path,
    pool: Pool,
    *,
    pads_S: torch.Tensor | None = None,
    progress: Progress = lambda answered, done, total: None,
) -> None:
    """What `trajectories.collect` writes, file by file. `read_folder` reads it."""
    size = trajectories.CHUNK
    files = trajectories.chunk_files(folder, len(prompts_SP))
    parts = []
    for number in range(len(files)):
        rows = slice(number * size, (number + 1) * size)
        arrays = {"prompts": prompts_SP[rows].numpy()}
        if pads_S is not None:
            arrays["pads"] = pads_S[rows].numpy()
        parts.append(Part(str(number), {"number": number, "prompts": packed(arrays)}))
    left = [part for part, file in zip(parts, files, strict=True) if not file.exists()]
    for done, answered in enumerate(pool.run(workers, left), 1 + len(parts) - len(left)):
        model = answered.answer["model"]
        folder.mkdir(parents=True, exist_ok=True)
        samples.check_folder(folder, trajectories.made_by(model, prompts_SP, workers.plan, pads_S))
        file = files[int(answered.name)]
        trajectories.store_chunk(file, unpacked(answered.answer["chunk"]))
        progress(answered, done, len(parts))


@dataclass(frozen=True)
class SampleWorkers:
    """Workers that write on where a corpus is cut."""

    teacher: str
    plan: SamplePlan

    def make(self) -> Worker:
        network = load_network(self.teacher).eval()
        name = samples.fingerprint(network)

        def work(value: Mapping[str, Any]) -> dict[str, str]:
            prompts_BP = torch.from_numpy(unpacked(value["prompts"])["prompts"])
            tokens = samples.write_chunk(network, prompts_BP, self.plan, value["number"])
            return {"model": name, "chunk": packed({"tokens": tokens})}

        return work


def collect_samples(
    workers: SampleWorkers,
    corpus: Corpus,
    folder: Path,
    pool: Pool,
    progress: Progress = lambda answered, done, total: None,
) -> None:
    """What `samples.write_samples` writes, and a training run then finds."""
    plan = workers.plan
    files = samples.sample_files(folder, plan)
    parts = []
    for number, file in enumerate(files):
        if not file.exists():
            prompts_BP = samples.chunk_prompts(corpus, plan, number).numpy()
            value = {"number": number, "prompts": packed({"prompts": prompts_BP})}
            parts.append(Part(str(number), value))
    for done, answered in enumerate(pool.run(workers, parts), 1 + len(files) - len(parts)):
        folder.mkdir(parents=True, exist_ok=True)
        samples.check_folder(folder, plan.made_by(answered.answer["model"]))
        chunk = unpacked(answered.answer["chunk"])
        samples.store(files[int(answered.name)], chunk["tokens"])
        progress(answered, done, len(files))
    if not (folder / samples.WHOLE).exists():
        samples.join_chunks(folder, plan)
