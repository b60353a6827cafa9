"""Jacobi trajectories: the guesses that led to every block of a text that a model wrote greedily.

A block's trajectory depends only on the finished text before it and on its own guesses. So once the
text is written, all blocks of all sequences iterate together, in one forward over the text and the
guesses beside it. Each block sees the text before it and itself. That is the same as decoding block
after block (tested), and needs as many forwards as a block has tokens, not as the text has.

B sequences, P tokens given, N blocks of n tokens, G = N n, L = P + G, R = L + G rows, J + 1 states
of every block: the first guess to the fixed point. S sequences of a whole collection.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadCheckpoint, NotAble
from forerun.methods.jacobi import STARTS
from forerun.train.samples import check_folder, continue_texts, digest, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 512  # sequences per file, and what an interruption loses at most
TOGETHER = 64  # sequences per forward


@dataclass(frozen=True)
class TrajectoryPlan:
    """What is written after every prompt: `blocks` blocks of `block` tokens. `start` is the kind of
    first guess."""

    blocks: int
    block: int
    start: str

    @property
    def guesses(self) -> int:
        return self.blocks * self.block


@dataclass(frozen=True)
class Trajectories:
    """Text that a model wrote after prompts, with all states of its blocks."""

    prompts_SP: np.ndarray
    states_SJL: np.ndarray  # of the blocks only; the last state is the text itself
    block: int

    def __len__(self) -> int:
        return len(self.prompts_SP)

    def noisy(self) -> np.ndarray:
        """[S, J + 1, N]: how many tokens of each block are not yet right, from the first wrong one
        on."""
        wrong = self.states_SJL != self.states_SJL[:, -1:]
        wrong = wrong.reshape(*wrong.shape[:2], -1, self.block)
        return np.where(wrong.any(-1), self.block - wrong.argmax(-1), 0)

    def facts(self) -> dict[str, float]:
        """How fast blocks come right, and what is right in them before its turn.

        Fast-forwarded: tokens that come right per iteration. Stationary: tokens of an unfinished
        block that are right behind a wrong one, and stay so. Useful n-grams: runs of three of them
        or more, at their place or another.
        """
        noisy_SJN = self.noisy()
        unfinished = max(1, int((noisy_SJN > 0).sum()))
        per_block = float((noisy_SJN > 0).sum(1).mean())
        sequences, steps = self.states_SJL.shape[:2]
        states_SNJn = self.states_SJL.reshape(sequences, steps, -1, self.block).swapaxes(1, 2)
        right = states_SNJn == states_SNJn[:, :, -1:]
        stays = np.flip(np.logical_and.accumulate(np.flip(right, 2), 2), 2)
        behind = np.arange(self.block) > (self.block - noisy_SJN.swapaxes(1, 2))[..., None]
        ngrams = sum(map(useful_ngrams, states_SNJn.reshape(-1, steps, self.block)))
        return {
            "sequences": float(sequences),
            "iterations per block": per_block,
            "fast-forwarded tokens per iteration": self.block / (per_block or 1),
            "stationary tokens": float((stays & behind).sum() / unfinished),
            "useful n-grams": ngrams / unfinished,
        }


def useful_ngrams(states_Jn: np.ndarray, least: int = 3) -> int:
    """Runs of at least `least` tokens, behind the first wrong one, that also stand somewhere in the
    fixed point."""
    final = states_Jn[-1].tolist()
    found = 0
    ngrams = {tuple(final[i : i + least]) for i in range(len(final) - least + 1)}
    for state in states_Jn[:-1].tolist():
        wrong = (i for i, (guess, token) in enumerate(zip(state, final)) if guess != token)
        behind = range(next(wrong, len(state)) + 1, len(state) - least + 1)
        good = [tuple(state[i : i + least]) in ngrams for i in behind]
        found += sum(now and not before for before, now in zip([False, *good], good))
    return found


def block_mask(given: int, blocks: int, block: int, context: str, window: int = 1) -> Tensor:
    """[R, R] for R = L + N n rows, the text's and then the guesses': what each sees.

    Text rows see the text up to themselves. A guess sees its own block up to itself, and before it:
    the text (`clean`), or the prompt and the guesses of earlier blocks (`noisy`), or the text of
    earlier windows and the guesses of its own (`window`).
    """
    length = given + blocks * block
    text_L = torch.arange(length)
    guess_G = torch.arange(blocks * block)
    block_G = guess_G // block
    first_noisy_G = {  # the first block seen as guesses
        "clean": block_G,
        "noisy": torch.zeros_like(block_G),
        "window": block_G // window * window,
    }[context]
    sees_text = text_L[None] < given + first_noisy_G[:, None] * block
    sees_guess = (guess_G[None] <= guess_G[:, None]) & (block_G[None] >= first_noisy_G[:, None])
    sees_no_guess = torch.zeros(length, len(guess_G), dtype=torch.bool)
    text_rows = torch.cat([text_L[None] <= text_L[:, None], sees_no_guess], 1)
    return torch.cat([text_rows, torch.cat([sees_text, sees_guess], 1)])


def packed_logits(
    network: PreTrainedModel, text_BL: Tensor, guess_BG: Tensor, mask_RR: Tensor, last: int = 0
) -> Tensor:
    """[B, R, V]: what follows every row of the text and of the guesses, in one forward; only for
    the `last` rows, if given."""
    config = getattr(network, "module", network).config  # DDP wraps the network
    attention = getattr(config, "_attn_implementation", None)
    if attention != "sdpa":  # other kinds add the mask to the scores, or have a mask of their own
        raise NotAble(
            "blocks side by side need a network with sdpa attention; this one "
            f"({config.model_type}) has {attention}."
        )
    length = text_BL.shape[1]
    places_L = torch.arange(length, device=text_BL.device)
    places_R = torch.cat([places_L, places_L[length - guess_BG.shape[1] :]])
    return network(
        input_ids=torch.cat([text_BL, guess_BG], 1),
        position_ids=places_R[None].expand(len(text_BL), -1),
        attention_mask=mask_RR[None, None].expand(len(text_BL), 1, -1, -1),
        use_cache=False,
        logits_to_keep=last,
    ).logits


@torch.no_grad()
def states(network: PreTrainedModel, text_BL: Tensor, plan: TrajectoryPlan, seed: int) -> Tensor:
    """[B, J + 1, G]: Jacobi iteration of all blocks of greedy texts at once, some texts at a
    time."""
    parts = text_BL.split(TOGETHER)
    return torch.cat([_states(network, part_BL, plan, seed + i) for i, part_BL in enumerate(parts)])


def _states(network: PreTrainedModel, text_BL: Tensor, plan: TrajectoryPlan, seed: int) -> Tensor:
    given = text_BL.shape[1] - plan.guesses
    final_BG = text_BL[:, given:]
    mask_RR = block_mask(given, plan.blocks, plan.block, "clean").to(text_BL.device)
    offset_G = torch.arange(plan.guesses, device=text_BL.device) % plan.block
    guess_BG = first_guess(text_BL, plan, seed, network.config.vocab_size)
    found = [guess_BG]
    for step in range(1, plan.block + 1):
        logits_BGV = packed_logits(network, text_BL, guess_BG, mask_RR, plan.guesses + 1)[:, :-1]
        # After j steps j tokens are right, whatever rounding makes of them. The first token of a
        # block follows the text alone.
        guess_BG = torch.where(offset_G < step, final_BG, logits_BGV.argmax(-1))
        found.append(guess_BG)
    return torch.stack(found, 1)


def first_guess(text_BL: Tensor, plan: TrajectoryPlan, seed: int, vocab: int) -> Tensor:
    """What a block is before anything is known of it: the kinds of guesses that
    `methods.jacobi.guess` makes."""
    assert plan.start in STARTS
    given = text_BL.shape[1] - plan.guesses
    # tokens before each guess's block
    before_G = given + torch.arange(plan.guesses) // plan.block * plan.block
    if plan.start == "repeat":
        return text_BL[:, before_G - 1]
    rng = np.random.default_rng(seed)
    numbers_BG = torch.from_numpy(rng.integers(0, 2**31, (len(text_BL), plan.guesses)))
    if plan.start == "random":
        return (numbers_BG % vocab).to(text_BL.device)
    return text_BL.gather(1, (numbers_BG % before_G).to(text_BL.device))


def collect(
    network: PreTrainedModel,
    prompts_SP: Tensor,
    plan: TrajectoryPlan,
    folder: Path,
    *,
    share: tuple[int, int] = (0, 1),
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Trajectories | None:
    """Trajectories of the texts that follow the prompts, chunk by chunk in files: an interrupted
    collection goes on where it stopped.

    Several processes may share a folder: the i-th of n (`share`) makes every n-th chunk. The result
    is None while chunks are missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count, given = prompts_SP.shape
    made_by = dict(
        count=count,
        given=given,
        blocks=plan.blocks,
        block=plan.block,
        start=plan.start,
        model=fingerprint(network),
        prompts=digest(prompts_SP),
    )
    check_folder(folder, made_by)
    files = chunk_files(folder, count)
    rank, processes = share
    for number in range(rank, len(files), processes):
        if not files[number].exists():
            part_BP = prompts_SP[number * CHUNK : (number + 1) * CHUNK]
            text_BL = continue_texts(network, part_BP, given + plan.guesses, temperature=0)
            states_BJG = states(network, text_BL, plan, number)
            write_chunk(files[number], text_BL.cpu(), states_BJG.cpu(), given)
        report(min((number + 1) * CHUNK, count), count)
    return read_folder(folder) if all(file.exists() for file in files) else None


def chunk_files(folder: Path, count: int) -> list[Path]:
    """The files that hold `count` sequences."""
    return [folder / f"chunk{number}.npz" for number in range(-(-count // CHUNK))]


def read_folder(folder: Path) -> Trajectories:
    """What `collect` wrote; refused while chunks are missing."""
    try:
        made_by = json.loads((folder / "made_by.json").read_text())
        files = chunk_files(folder, made_by["count"])
    except (OSError, ValueError, KeyError) as error:
        raise BadCheckpoint(f"{folder} is no folder of trajectories: {error}") from error
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise BadCheckpoint(
            f"{folder} lacks {', '.join(missing)}: collect again, it keeps what is there."
        )
    parts = [read_chunk(file, made_by["block"]) for file in files]
    return Trajectories(
        np.concatenate([p.prompts_SP for p in parts]),
        np.concatenate([p.states_SJL for p in parts]),
        made_by["block"],
    )


def write_chunk(file: Path, text_BL: Tensor, states_BJG: Tensor, given: int) -> None:
    """Stores the first states and the changes after them: which place of which state became
    what."""
    states = states_BJG.numpy()
    largest = max(int(states_BJG.max()), int(text_BL.max()))
    dtype = np.uint16 if largest < 1 << 16 else np.uint32
    where = np.argwhere(states[:, 1:] != states[:, :-1]).astype(np.uint16)
    tokens = states[:, 1:][tuple(where.T.astype(int))].astype(dtype)
    unfinished = file.with_suffix(".tmp.npz")
    np.savez_compressed(
        unfinished,
        prompts=text_BL[:, :given].numpy().astype(dtype),
        first=states[:, 0].astype(dtype),
        where=where,
        tokens=tokens,
        steps=states.shape[1] - 1,
    )
    unfinished.replace(file)


def read_chunk(file: Path, block: int) -> Trajectories:
    try:
        held = np.load(file)
        first = held["first"]
        where = held["where"].astype(int)
        tokens = held["tokens"]
        steps = int(held["steps"])
        prompts = held["prompts"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BadCheckpoint(
            f"{file} is no file of trajectories, or a part of one: {error}. Remove it and collect "
            "again."
        ) from error
    # A place keeps its token until it changes: carry the last change forward.
    states = np.repeat(first[:, None], steps + 1, 1)
    for step in range(1, steps + 1):
        here = where[:, 1] == step - 1
        states[:, step] = states[:, step - 1]
        states[where[here, 0], step, where[here, 2]] = tokens[here]
    return Trajectories(prompts, states, block)
