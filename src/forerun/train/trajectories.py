"""Jacobi trajectories: for every block of a text that a model wrote greedily, the guesses on the way to it.

A block's trajectory depends on nothing but the finished text before it and its own guesses. So once the text is written, all
blocks of all sequences iterate together: one forward over the text and, beside it, the guesses, each block seeing the text before
it and itself. That is the same as decoding block after block (tested), and needs as many forwards as a block has tokens, not as
the text has.

B sequences, P tokens given, N blocks of n tokens, L = P + N n, J + 1 states of every block: the first guess to the fixed point.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadCheckpoint, NotAble
from forerun.methods.jacobi import STARTS
from forerun.train.samples import check_folder, continue_greedily, digest, fingerprint

CHUNK = 512  # sequences per file, and what an interruption loses at most
TOGETHER = 64  # sequences per forward


@dataclass(frozen=True)
class Trajectories:
    """Text that a model wrote after prompts, and what its blocks looked like on the way."""

    prompts_SP: np.ndarray
    states_SJL: np.ndarray  # of the blocks only; the last state is the text itself
    block: int

    def __len__(self) -> int:
        return len(self.prompts_SP)

    def noisy(self) -> np.ndarray:
        """[S, J + 1, N]: how many tokens of each block are not yet right, from the first wrong one on."""
        wrong = self.states_SJL != self.states_SJL[:, -1:]
        wrong = wrong.reshape(*wrong.shape[:2], -1, self.block)
        return np.where(wrong.any(-1), self.block - wrong.argmax(-1), 0)

    def facts(self) -> dict[str, float]:
        """How fast blocks come right, and what is right in them before its turn.

        Fast-forwarded: tokens that come right per iteration. Stationary: tokens of an unfinished block that are right behind a
        wrong one, and stay so. Useful n-grams: runs of three of them or more, at their place or another.
        """
        noisy_SJN = self.noisy()
        iterations = (noisy_SJN > 0).sum(1)  # per block
        sequences, steps = self.states_SJL.shape[:2]
        states = self.states_SJL.reshape(sequences, steps, -1, self.block).swapaxes(1, 2)
        right = states == states[:, :, -1:]
        stays = np.flip(np.logical_and.accumulate(np.flip(right, 2), 2), 2)
        behind = np.arange(self.block) > (self.block - noisy_SJN.swapaxes(1, 2))[..., None]
        unfinished = max(1, int((noisy_SJN > 0).sum()))
        return {
            "sequences": float(sequences),
            "iterations per block": float(iterations.mean()),
            "fast-forwarded tokens per iteration": float(self.block / iterations.mean())
            if iterations.mean()
            else float(self.block),
            "stationary tokens": float((stays & behind).sum() / unfinished),
            "useful n-grams": sum(map(useful_ngrams, states.reshape(-1, steps, self.block))) / unfinished,
        }


def useful_ngrams(states_Jn: np.ndarray, least: int = 3) -> int:
    """Runs of at least so many tokens, behind the first wrong one, that also stand somewhere in the fixed point."""
    final, found = states_Jn[-1].tolist(), 0
    runs = {tuple(final[i : i + least]) for i in range(len(final) - least + 1)}
    for state in states_Jn[:-1].tolist():
        first = next((i for i, (a, b) in enumerate(zip(state, final)) if a != b), len(state))
        good = [tuple(state[i : i + least]) in runs for i in range(first + 1, len(state) - least + 1)]
        found += sum(now and not before for before, now in zip([False, *good], good))
    return found


def block_mask(given: int, blocks: int, block: int, context: str, window: int = 1) -> Tensor:
    """[R, R] for R = L + N n rows, the text's and then the guesses': what each sees.

    Text rows see the text up to themselves. A guess sees its own block up to itself, and before it: the text (`clean`), or the
    prompt and the guesses of earlier blocks (`noisy`), or the text of earlier windows and the guesses of its own (`window`).
    """
    length = given + blocks * block
    text, guesses = torch.arange(length), torch.arange(blocks * block)
    own = guesses // block
    first = {"clean": own, "noisy": torch.zeros_like(own), "window": own // window * window}[context]  # first block seen as guesses
    sees_text = text[None] < given + first[:, None] * block
    sees_guess = (guesses[None] <= guesses[:, None]) & (own[None] >= first[:, None])
    top = torch.cat([text[None] <= text[:, None], torch.zeros(length, len(guesses), dtype=torch.bool)], 1)
    return torch.cat([top, torch.cat([sees_text, sees_guess], 1)])


def packed_logits(network: Any, text_BL: Tensor, guess_BG: Tensor, mask_RR: Tensor, last: int = 0) -> Tensor:
    """[B, R, V]: what follows every row of the text and of the guesses, in one forward; of the `last` rows only, if given."""
    attention = getattr(network.config, "_attn_implementation", None)
    if attention != "sdpa":  # others would add the mask to the scores, or have one of their own
        raise NotAble(
            f"blocks side by side need a network with sdpa attention; this one ({network.config.model_type}) has {attention}."
        )
    length, guesses = text_BL.shape[1], guess_BG.shape[1]
    places = torch.arange(length, device=text_BL.device)
    return network(
        input_ids=torch.cat([text_BL, guess_BG], 1),
        position_ids=torch.cat([places, places[length - guesses :]])[None].expand(len(text_BL), -1),
        attention_mask=mask_RR[None, None].expand(len(text_BL), 1, -1, -1),
        use_cache=False,
        logits_to_keep=last,
    ).logits


@torch.no_grad()
def states(network: Any, text_BL: Tensor, given: int, block: int, start: str, seed: int) -> Tensor:
    """[B, J + 1, N n]: Jacobi iteration of all blocks of greedy texts at once, some texts at a time."""
    parts = text_BL.split(TOGETHER)
    return torch.cat([_states(network, part, given, block, start, seed + i) for i, part in enumerate(parts)])


def _states(network: Any, text_BL: Tensor, given: int, block: int, start: str, seed: int) -> Tensor:
    final_BG = text_BL[:, given:]
    blocks = final_BG.shape[1] // block
    mask_RR = block_mask(given, blocks, block, "clean").to(text_BL.device)
    offset_G = torch.arange(final_BG.shape[1], device=text_BL.device) % block
    guess_BG = first_guess(text_BL, given, block, start, seed, network.config.vocab_size)
    found = [guess_BG]
    for step in range(1, block + 1):
        said_BG = packed_logits(network, text_BL, guess_BG, mask_RR, last=guess_BG.shape[1] + 1)[:, :-1].argmax(-1)
        # After j steps j tokens are right; rounding must not say otherwise. The first of a block follows the text alone.
        guess_BG = torch.where(offset_G < step, final_BG, said_BG)
        found.append(guess_BG)
    return torch.stack(found, 1)


def first_guess(text_BL: Tensor, given: int, block: int, start: str, seed: int, vocab: int) -> Tensor:
    """What a block is before anything is known of it: the kinds of guesses that `methods.jacobi.guess` makes."""
    assert start in STARTS
    size, guesses = len(text_BL), text_BL.shape[1] - given
    before_G = given + torch.arange(guesses) // block * block  # tokens before each guess's block
    if start == "repeat":
        return text_BL[:, before_G - 1]
    numbers_BG = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**31, (size, guesses)))
    if start == "random":
        return (numbers_BG % vocab).to(text_BL.device)
    return text_BL.gather(1, (numbers_BG % before_G).to(text_BL.device))


def collect(
    network: Any,
    prompts_SP: Tensor,
    blocks: int,
    block: int,
    start: str,
    folder: Path,
    *,
    share: tuple[int, int] = (0, 1),
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Trajectories | None:
    """Trajectories of the texts that follow the prompts, chunk by chunk in files: an interrupted collection goes on where it
    stopped. Of several processes on one folder, the i-th of n (`share`) makes every n-th chunk; nothing comes back while some are
    missing."""
    folder.mkdir(parents=True, exist_ok=True)
    count, given = prompts_SP.shape
    made_by = dict(count=count, given=given, blocks=blocks, block=block, start=start)
    check_folder(folder, {**made_by, "model": fingerprint(network), "prompts": digest(prompts_SP)})
    files = [folder / f"chunk{number}.npz" for number in range(-(-count // CHUNK))]
    for number in range(share[0], len(files), share[1]):
        if not files[number].exists():
            text_BL = continue_greedily(network, prompts_SP[number * CHUNK : (number + 1) * CHUNK], given + blocks * block)
            write(files[number], text_BL.cpu(), states(network, text_BL, given, block, start, number).cpu(), given)
        report(min((number + 1) * CHUNK, count), count)
    return read_folder(folder) if all(file.exists() for file in files) else None


def read_folder(folder: Path) -> Trajectories:
    """What `collect` wrote, refused unless it is whole."""
    try:
        made_by = json.loads((folder / "made_by.json").read_text())
        files = [folder / f"chunk{number}.npz" for number in range(-(-made_by["count"] // CHUNK))]
    except (OSError, ValueError, KeyError) as error:
        raise BadCheckpoint(f"{folder} is no folder of trajectories: {error}") from error
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise BadCheckpoint(f"{folder} lacks {', '.join(missing)}: collect again, what is there is kept.")
    parts = [read(file, made_by["block"]) for file in files]
    return Trajectories(
        np.concatenate([p.prompts_SP for p in parts]), np.concatenate([p.states_SJL for p in parts]), made_by["block"]
    )


def write(file: Path, text_BL: Tensor, states_BJG: Tensor, given: int) -> None:
    """Only what changed: the first state, and then which places of which state became what."""
    states, largest = states_BJG.numpy(), max(int(states_BJG.max()), int(text_BL.max()))
    small = np.uint16 if largest < 1 << 16 else np.uint32
    where = np.argwhere(states[:, 1:] != states[:, :-1]).astype(np.uint16)
    tokens = states[:, 1:][tuple(where.T.astype(int))].astype(small)
    part = file.with_suffix(".tmp.npz")
    np.savez_compressed(
        part, prompts=text_BL[:, :given].numpy().astype(small), first=states[:, 0].astype(small), where=where, tokens=tokens,
        steps=states.shape[1] - 1,
    )  # fmt: skip
    part.replace(file)


def read(file: Path, block: int) -> Trajectories:
    try:
        held = np.load(file)
        first, where, tokens, steps = held["first"], held["where"].astype(int), held["tokens"], int(held["steps"])
        prompts = held["prompts"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BadCheckpoint(
            f"{file} is no file of trajectories, or a part of one: {error}. Remove it and collect again."
        ) from error
    # A place keeps its token until it changes: carry the last change forward.
    states = np.repeat(first[:, None], steps + 1, 1)
    for step in range(1, steps + 1):
        here = where[:, 1] == step - 1
        states[:, step] = states[:, step - 1]
        states[where[here, 0], step, where[here, 2]] = tokens[here]
    return Trajectories(prompts, states, block)
