"""Jacobi trajectories: for every block of a text that a model wrote greedily, the guesses on the way to it.

A block's trajectory depends on nothing but the finished text before it and its own guesses. So once the text is written, all blocks of
all sequences iterate together: one forward over the text and, beside it, the guesses, each block seeing the text before it and
itself. That is the same as decoding block after block (tested), and needs as many forwards as a block has tokens, not as the text has.

B sequences, P tokens given, N blocks of n tokens, L = P + N n, J + 1 states of every block: the first guess to the fixed point.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadCheckpoint
from forerun.methods.jacobi import STARTS
from forerun.noise import mix
from forerun.train.data import Corpus
from forerun.train.samples import continue_greedily

CHUNK = 512  # sequences per file, and what an interruption loses at most


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


def block_mask(given: int, blocks: int, block: int, context: str, window: int = 1) -> Tensor:
    """[R, R] for R = L + N n rows, the text's and then the guesses': what each sees.

    Text rows see the text up to themselves. A guess sees its own block up to itself, and before it: the text (`clean`), or the prompt
    and the guesses of earlier blocks (`noisy`), or the text of earlier windows and the guesses of its own (`window`).
    """
    length = given + blocks * block
    text, guesses = torch.arange(length), torch.arange(blocks * block)
    own = guesses // block
    first = {"clean": own, "noisy": torch.zeros_like(own), "window": own // window * window}[context]  # first block seen as guesses
    sees_text = text[None] < given + first[:, None] * block
    sees_guess = (guesses[None] <= guesses[:, None]) & (own[None] >= first[:, None])
    top = torch.cat([text[None] <= text[:, None], torch.zeros(length, len(guesses), dtype=torch.bool)], 1)
    return torch.cat([top, torch.cat([sees_text, sees_guess], 1)])


def packed_logits(network: Any, text_BL: Tensor, guess_BG: Tensor, mask_RR: Tensor) -> Tensor:
    """[B, R, V]: what follows every row of the text and of the guesses, in one forward."""
    length, guesses = text_BL.shape[1], guess_BG.shape[1]
    places = torch.arange(length, device=text_BL.device)
    return network(
        input_ids=torch.cat([text_BL, guess_BG], 1),
        position_ids=torch.cat([places, places[length - guesses :]])[None].expand(len(text_BL), -1),
        attention_mask=mask_RR[None, None].expand(len(text_BL), 1, -1, -1),
        use_cache=False,
    ).logits


@torch.no_grad()
def states(network: Any, text_BL: Tensor, given: int, block: int, start: str, seed: int) -> Tensor:
    """[B, J + 1, N n]: Jacobi iteration of all blocks of a greedy text at once."""
    final_BG = text_BL[:, given:]
    blocks = final_BG.shape[1] // block
    mask_RR = block_mask(given, blocks, block, "clean").to(text_BL.device)
    offset_G = torch.arange(final_BG.shape[1], device=text_BL.device) % block
    guess_BG = first_guess(text_BL, given, block, start, seed, network.config.vocab_size)
    found = [guess_BG]
    for step in range(1, block + 1):
        said_BG = packed_logits(network, text_BL, guess_BG, mask_RR)[:, text_BL.shape[1] - 1 : -1].argmax(-1)
        # After j steps j tokens are right; rounding must not say otherwise. The first of a block follows the text alone.
        guess_BG = torch.where(offset_G < step, final_BG, said_BG)
        found.append(guess_BG)
    return torch.stack(found, 1)


def first_guess(text_BL: Tensor, given: int, block: int, start: str, seed: int, vocab: int) -> Tensor:
    """What a block is before anything is known of it, as `methods.jacobi.guess` says."""
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
    corpus: Corpus,
    count: int,
    given: int,
    blocks: int,
    block: int,
    start: str,
    seed: int,
    folder: Path,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Trajectories:
    """Trajectories of `count` texts that follow prefixes of a corpus, chunk by chunk in files: an interrupted collection goes on where
    it stopped, and several processes may share the chunks of one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made_by = dict(given=given, blocks=blocks, block=block, start=start, seed=seed, model=fingerprint(network))
    check_folder(folder, made_by)
    numbers = range(-(-count // CHUNK))
    for number in numbers:
        file = folder / f"chunk{number}.npz"
        if not file.exists():
            rows = min(CHUNK, count - number * CHUNK)
            prompts = corpus.batch(0, rows, given, mix(seed, number))
            text_BL = continue_greedily(network, prompts, given + blocks * block)
            write(file, text_BL.cpu(), states(network, text_BL, given, block, start, seed).cpu(), given)
        report(min((number + 1) * CHUNK, count), count)
    parts = [read(folder / f"chunk{number}.npz", block) for number in numbers]
    return Trajectories(
        np.concatenate([p.prompts_SP for p in parts]), np.concatenate([p.states_SJL for p in parts]), block
    )


def check_folder(folder: Path, made_by: dict[str, Any]) -> None:
    """Refuse a folder that holds trajectories of another model or another kind."""
    file = folder / "made_by.json"
    if not file.exists():
        file.write_text(json.dumps(made_by))
    before = json.loads(file.read_text())
    changed = [key for key, value in made_by.items() if before.get(key) != value]
    if changed:
        raise BadCheckpoint(f"{folder} holds other trajectories (they differ in {', '.join(changed)}): choose another folder.")


def fingerprint(network: Any) -> str:
    """Tells one network from another by a few of its weights."""
    weight = network.get_input_embeddings().weight.detach()
    return f"{weight.shape[0]}x{weight.shape[1]}:{float(weight[::97].double().abs().sum()):.6e}"


def write(file: Path, text_BL: Tensor, states_BJG: Tensor, given: int) -> None:
    """Only what changed: the first state, and then which places of which state became what."""
    states, small = states_BJG.numpy(), np.uint16 if int(states_BJG.max()) < 1 << 16 else np.uint32
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
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise BadCheckpoint(f"{file} is no file of trajectories, or a part of one: {error}. Remove it and collect again.") from error
    # A place keeps its token until it changes: carry the last change forward.
    states = np.repeat(first[:, None], steps + 1, 1)
    for step in range(1, steps + 1):
        here = where[:, 1] == step - 1
        states[:, step] = states[:, step - 1]
        states[where[here, 0], step, where[here, 2]] = tokens[here]
    return Trajectories(prompts, states, block)
