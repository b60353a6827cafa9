"""Progressive consistency distillation (pcLLM): a left-to-right model learns to say the right tokens after wrong ones.

Blocks of a text that the model wrote itself are shown as they were on the way to it, noisier from block to block within a window
(equation 7), beside the finished text; one forward gives both the student's laws (of the guesses) and the teacher's (of the text),
and the loss draws the first to the second (equation 8). An autoregressive loss keeps the model what it was (equation 9).

B sequences, P tokens given, N blocks of n tokens, L = P + N n, R = L + N n rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption, unknown
from forerun.methods.jacobi import STARTS
from forerun.parameters import check_between, check_whole
from forerun.train.base import Objective
from forerun.train.data import Corpus
from forerun.train.trajectories import Trajectories, block_mask, collect, packed_logits, read_folder

SCHEDULES = ("progressive", "random", "reverse")
CONTEXTS = ("noisy", "window", "clean")


@dataclass(frozen=True)
class Consistency(Objective):
    """`schedule: random` with `context: clean` is the plain consistency loss of CLLM (equation 5)."""

    block: int = 16  # n
    blocks: int = 12  # N, of every sequence
    schedule: str = "progressive"  # how noisy the blocks of a window are: more and more, at random, or less and less
    window: int = 8  # w, blocks per window
    context: str = "noisy"  # what a noisy block sees before it: noisy blocks, or those of its window only, or the text (Table 5)
    own_weight: float = 0.0  # of the autoregressive loss on the model's own text, as in equation 9
    real_weight: float = 1.0  # of the autoregressive loss on the corpus: what keeps the held-out loss
    start: str = "repeat"  # the first guess
    sequences: int = 8192  # that are written, with their trajectories, before training begins

    def __post_init__(self) -> None:
        for name in ("block", "blocks", "window", "sequences"):
            check_whole(name, getattr(self, name))
        for name in ("own_weight", "real_weight"):
            check_between(name, getattr(self, name), most=float("inf"))
        for name, known in (("schedule", SCHEDULES), ("context", CONTEXTS), ("start", STARTS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)

    def gather(self, corpus: Any, network: Any, context: int, seed: int, out: Path) -> Any:
        given = context - self.block * self.blocks
        if given < 1:
            raise BadOption(f"context={context} leaves nothing to be given before {self.blocks} blocks of {self.block} tokens.")
        folder = out / "trajectories"
        if (out / "checkpoint.pt").exists():  # a resumed run, whose network is no longer the one that wrote them
            return Written(corpus, read_folder(folder))
        found = collect(network, corpus.batch(0, self.sequences, given, seed), self.blocks, self.block, self.start, folder)
        assert found is not None, "one process collects them all"
        return Written(corpus, found)

    def prepare(self, batch: Any, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        """For every block the state whose noise is nearest to what the schedule wants."""
        real_BL, prompt_BP, states_BJG, noisy_BJN = batch
        wanted_BN = np.ceil(self._ratios(rng, len(prompt_BP)) * self.block)
        state_BN = np.abs(noisy_BJN - wanted_BN[:, None]).argmin(1)
        state_BG = state_BN.repeat(self.block, 1)
        guess_BG = np.take_along_axis(states_BJG, state_BG[:, None], 1)[:, 0]
        first_wrong_BN = self.block - np.take_along_axis(noisy_BJN, state_BN[:, None], 1)[:, 0]
        taught_BG = np.arange(states_BJG.shape[2]) % self.block >= first_wrong_BN.repeat(self.block, 1)
        text_BL = np.concatenate([prompt_BP, states_BJG[:, -1]], 1)
        share = np.full(len(text_BL), max(1, taught_BG.sum()) / len(text_BL), np.float32)
        arrays = (real_BL, text_BL.astype(np.int64), guess_BG.astype(np.int64), taught_BG, share)
        return tuple(torch.from_numpy(a) for a in arrays)

    def _ratios(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """The share of noisy tokens that each block should have, [B, N]: from none to all within a window (the paper stops one
        step short of all); every sequence begins its window somewhere else."""
        if self.schedule == "random":
            return rng.random((size, self.blocks))
        # Where the mask knows windows, noise and mask must agree on where they begin.
        offset_B1 = 0 if self.context == "window" else rng.integers(0, self.window, (size, 1))
        place = (np.arange(self.blocks) + np.zeros((size, 1), int) + offset_B1) % self.window
        ratio = place / max(1, self.window - 1)
        return ratio if self.schedule == "progressive" else 1 - ratio

    def loss(self, network: Any, *batch: Tensor) -> Tensor:
        real_BL, text_BL, guess_BG, taught_BG, share_B = batch
        length, guesses = text_BL.shape[1], guess_BG.shape[1]
        mask_RR = rows_mask(length - guesses, self.blocks, self.block, self.context, self.window, text_BL.device)
        logits_BRV = packed_logits(network, text_BL, guess_BG, mask_RR)
        student_MV = logits_BRV[:, length:][taught_BG].float().log_softmax(-1)
        teacher_MV = logits_BRV[:, length - guesses : length][taught_BG].detach().float().log_softmax(-1)
        total = F.kl_div(student_MV, teacher_MV, log_target=True, reduction="sum") / share_B.sum()
        if self.own_weight:
            total = total + self.own_weight * next_token_loss(logits_BRV[:, :length], text_BL)
        if self.real_weight:
            total = total + self.real_weight * next_token_loss(network(real_BL, use_cache=False).logits, real_BL)
        return total

    def held_out(self) -> Objective:
        """The loss that the model had before: how much of it was paid."""
        from forerun.train.objectives import Autoregressive

        return Autoregressive()


def next_token_loss(logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), tokens_BL[:, 1:].flatten())


@lru_cache(maxsize=4)
def rows_mask(given: int, blocks: int, block: int, context: str, window: int, device: torch.device) -> Tensor:
    return block_mask(given, blocks, block, context, window).to(device)


class Written:
    """A corpus, and beside every batch of it text that the model wrote, with its trajectories."""

    def __init__(self, corpus: Corpus, trajectories: Trajectories):
        self.corpus, self.trajectories, self.noisy_SJN = corpus, trajectories, trajectories.noisy()

    def batch(self, step: int, size: int, length: int, seed: int) -> tuple[np.ndarray, ...]:
        rows = np.random.default_rng([seed, step, 2]).integers(0, len(self.trajectories), size)
        real_BL = self.corpus.batch(step, size, length, seed).numpy()
        return real_BL, self.trajectories.prompts_SP[rows], self.trajectories.states_SJL[rows], self.noisy_SJN[rows]

    def held_out(self, size: int, length: int) -> Tensor:
        return self.corpus.held_out(size, length)
