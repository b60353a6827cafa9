"""Progressive consistency distillation (pcLLM): a left-to-right model learns to predict the right
tokens after wrong ones.

The model wrote a text in blocks. Beside the finished text, each block is shown in an earlier state,
noisier from block to block within a window (equation 7). One forward gives the student's laws (of
the guesses) and the teacher's (of the text). The loss draws the first to the second (equation 8).
An autoregressive loss keeps the model what it was (equation 9).

B sequences, P tokens given, N blocks of n tokens, L = P + N n, R = L + N n rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption, unknown
from forerun.methods.jacobi import STARTS
from forerun.options import check_between, check_whole
from forerun.train.autoregressive import AutoregressiveObjective
from forerun.train.base import Objective, was_begun
from forerun.train.data import Corpus
from forerun.train.trajectories import (
    Spans,
    StoredTrajectories,
    TrajectoryPlan,
    TrajectoryRows,
    block_mask,
    collect,
    packed_logits,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCHEDULES = ("progressive", "random", "reverse")
CONTEXTS = ("noisy", "window", "clean")


class TrajectoryBatch(NamedTuple):
    """Windows of a corpus, and beside them texts that the model wrote."""

    real_BL: np.ndarray
    prompt_BP: np.ndarray
    states_BJG: np.ndarray  # of the blocks, G = N n tokens; the last state is the text itself
    noisy_BJN: np.ndarray  # tokens of each block that are not yet right
    spans: Spans | None = None  # of texts that do not fill their rows


class TrajectorySource:
    """Batches of a corpus and of what the model wrote, with its trajectories."""

    def __init__(self, corpus: Corpus, trajectories: TrajectoryRows):
        self.corpus = corpus
        self.trajectories = trajectories

    def batch(self, step: int, size: int, length: int, seed: int) -> TrajectoryBatch:
        rows = np.random.default_rng([seed, step, 2]).integers(0, len(self.trajectories), size)
        chosen = self.trajectories.rows(rows)
        return TrajectoryBatch(
            self.corpus.batch(step, size, length, seed).numpy(),
            chosen.prompts_SP,
            chosen.states_SJL,
            chosen.noisy(),
            chosen.spans,
        )

    def held_out(self, size: int, length: int) -> Tensor:
        return self.corpus.held_out(size, length)


@dataclass(frozen=True)
class ConsistencyObjective(Objective[TrajectoryBatch]):
    """`schedule: random` with `context: clean` is CLLM's plain consistency loss (equation 5)."""

    block: int = 16  # n
    blocks: int = 12  # N, of every sequence
    # how noisy the blocks of a window are: more and more, at random, or less and less
    schedule: str = "progressive"
    window: int = 8  # w, blocks per window
    # what a noisy block sees before it: noisy blocks, those of its window, or the text (Table 5)
    context: str = "clean"
    # of the autoregressive loss on the model's own text (equation 9): without it the model takes
    # its own text for guesses, and the text gets worse
    own_weight: float = 1.0
    real_weight: float = 2.0  # of the autoregressive loss on the corpus: it keeps the held-out loss
    start: str = "random"  # the first guess
    sequences: int = 8192  # that the model writes, with their trajectories, before training begins
    # a folder that `forerun trajectories collect` wrote, to be read instead, as it is needed
    collected: str | None = None

    def __post_init__(self) -> None:
        for name in ("block", "blocks", "window", "sequences"):
            check_whole(name, getattr(self, name))
        for name in ("own_weight", "real_weight"):
            check_between(name, getattr(self, name), most=float("inf"))
        for name, known in (("schedule", SCHEDULES), ("context", CONTEXTS), ("start", STARTS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)

    def gather(
        self, corpus: Corpus, network: PreTrainedModel, context: int, seed: int, out: Path
    ) -> TrajectorySource:
        if self.collected is not None:
            return TrajectorySource(corpus, self._stored())
        given = context - self.block * self.blocks
        if given < 1:
            raise BadOption(
                f"context={context} leaves nothing to be given before {self.blocks} blocks of "
                f"{self.block} tokens."
            )
        folder = out / "trajectories"
        # A resumed run reads them: its network is no longer the one that wrote them.
        if was_begun(out):
            return TrajectorySource(corpus, StoredTrajectories(folder))
        prompts_SP = corpus.batch(0, self.sequences, given, seed)
        plan = TrajectoryPlan(self.blocks, self.block, self.start)
        collect(network, prompts_SP, plan, folder)
        return TrajectorySource(corpus, StoredTrajectories(folder))

    def _stored(self) -> StoredTrajectories:
        """What was collected before, if it has the blocks that are asked for."""
        found = StoredTrajectories(Path(str(self.collected)))
        tokens = found.rows(np.zeros(1, int)).states_SJL.shape[2]
        if (found.block, tokens) != (self.block, self.block * self.blocks):
            raise BadOption(
                f"collected={self.collected!r} has {tokens // found.block} blocks of {found.block} "
                f"tokens: set blocks and block to that, not {self.blocks} and {self.block}."
            )
        return found

    def prepare(
        self, batch: TrajectoryBatch, rng: np.random.Generator, step: int
    ) -> tuple[Tensor, ...]:
        """For every block the state whose noise is nearest to what the schedule wants."""
        real_BL, prompt_BP, states_BJG, noisy_BJN, spans = batch
        wanted_BN = np.ceil(self._ratios(rng, len(prompt_BP)) * self.block)
        state_BN = np.abs(noisy_BJN - wanted_BN[:, None]).argmin(1)
        state_BG = state_BN.repeat(self.block, 1)
        guess_BG = np.take_along_axis(states_BJG, state_BG[:, None], 1)[:, 0]
        first_wrong_BN = self.block - np.take_along_axis(noisy_BJN, state_BN[:, None], 1)[:, 0]
        first_wrong_BG = first_wrong_BN.repeat(self.block, 1)
        taught_BG = np.arange(states_BJG.shape[2]) % self.block >= first_wrong_BG
        text_BL = np.concatenate([prompt_BP, states_BJG[:, -1]], 1)
        padded: tuple[np.ndarray, ...] = ()
        if spans is not None:
            taught_BG &= np.arange(taught_BG.shape[1]) < spans.ends_S[:, None]
            own_BL = own_tokens(spans, text_BL.shape[1], prompt_BP.shape[1])
            own_B = np.full(len(text_BL), max(1, own_BL.sum()) / len(text_BL), np.float32)
            padded = (spans.pads_S.astype(np.int64), own_BL, own_B)
        share_B = np.full(len(text_BL), max(1, taught_BG.sum()) / len(text_BL), np.float32)
        arrays = (real_BL, text_BL.astype(np.int64), guess_BG.astype(np.int64), taught_BG, share_B)
        return tuple(torch.from_numpy(array) for array in (*arrays, *padded))

    def _ratios(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """The share of noisy tokens that each block should have, [B, N]: from none to all within a
        window (the paper stops one step short of all). Every sequence begins its window at a place
        of its own."""
        if self.schedule == "random":
            return rng.random((size, self.blocks))
        # With a mask by windows, noise and mask must agree on where windows begin.
        offset_B1 = 0 if self.context == "window" else rng.integers(0, self.window, (size, 1))
        place = (np.arange(self.blocks) + np.zeros((size, 1), int) + offset_B1) % self.window
        ratio = place / max(1, self.window - 1)
        return ratio if self.schedule == "progressive" else 1 - ratio

    def loss(self, network: PreTrainedModel, *batch: Tensor) -> Tensor:
        real_BL, text_BL, guess_BG, taught_BG, share_B, *padded = batch
        pads_B = padded[0] if padded else None
        length = text_BL.shape[1]
        given = length - guess_BG.shape[1]
        mask_RR = rows_mask(
            given, self.blocks, self.block, self.context, self.window, text_BL.device
        )
        logits_BRV = packed_logits(network, text_BL, guess_BG, mask_RR, pads_B=pads_B)
        student_MV = logits_BRV[:, length:][taught_BG].float().log_softmax(-1)
        teacher_MV = logits_BRV[:, given:length][taught_BG].detach().float().log_softmax(-1)
        total = F.kl_div(student_MV, teacher_MV, log_target=True, reduction="sum") / share_B.sum()
        if self.own_weight and padded:
            _, own_BL, own_B = padded
            nats_BL = F.cross_entropy(
                logits_BRV[:, : length - 1].flatten(0, 1).float(),
                text_BL[:, 1:].flatten(),
                reduction="none",
            ).view(len(text_BL), -1)
            total = total + self.own_weight * (nats_BL * own_BL[:, 1:]).sum() / own_B.sum()
        elif self.own_weight:
            total = total + self.own_weight * next_token_loss(logits_BRV[:, :length], text_BL)
        if self.real_weight:
            logits_BLV = network(real_BL, use_cache=False).logits
            total = total + self.real_weight * next_token_loss(logits_BLV, real_BL)
        return total

    def held_out(self) -> AutoregressiveObjective:
        """The loss that the model had before: it shows what distillation cost."""
        return AutoregressiveObjective()


def own_tokens(spans: Spans, length: int, given: int) -> np.ndarray:
    """[B, L]: which tokens of a text the model wrote, its end token included."""
    place_L = np.arange(length) - given
    return (place_L >= 0) & (place_L < spans.ends_S[:, None])


def next_token_loss(logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), tokens_BL[:, 1:].flatten())


@lru_cache(maxsize=4)
def rows_mask(
    given: int, blocks: int, block: int, context: str, window: int, device: torch.device
) -> Tensor:
    return block_mask(given, blocks, block, context, window).to(device)
