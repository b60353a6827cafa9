"""What two processes do in `test_shards.py`: python -m torch.distributed.run … FILE CORPUS OUT."""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from forerun.train.loop import TrainingRun, train
from tests.train.test_shards import DDP, RECIPES, STOPPED


def main() -> None:
    corpus = torch.load(sys.argv[1], weights_only=False)
    out = Path(sys.argv[2])
    for name, recipe in RECIPES.items():
        train(recipe, corpus, out / name, stop_at=STOPPED)
    run = TrainingRun(RECIPES["ar"], corpus, out / "ar", None)  # resumed by two
    assert run.step == STOPPED
    assert all(isinstance(weight, DTensor) for weight in run.network.parameters())
    held = sum(weight.to_local().numel() for weight in run.network.parameters())
    total = sum(weight.numel() for weight in run.network.parameters())
    assert 0.4 * total < held < 0.6 * total, (held, total)
    train(DDP, corpus, out / "ddp")


if __name__ == "__main__":
    main()
