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
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadCheckpoint, NotAble
from forerun.methods.jacobi import STARTS
from forerun.train.samples import check_folder, continue_texts, digest, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STORED = ("prompts", "first", "where", "tokens", "steps")  # arrays of a chunk
KEPT = 2 * 2**30  # bytes of chunks in memory
CHUNK = 512  # sequences per file, and what an interruption loses at most
TOGETHER = 64  # sequences per forward
WRITTEN = 128  # texts written at once: a large model has no room for more keys and values


@dataclass(frozen=True)
class TrajectoryPlan:
    """What is written after every prompt: `blocks` blocks of `block` tokens. `start` is the kind of
    first guess."""

    blocks: int
    block: int
    start: str
    end_tokens: tuple[int, ...] = ()  # at which a text ends; none: it goes on

    @property
    def guesses(self) -> int:
        return self.blocks * self.block


class Spans(NamedTuple):
    """Prompts of several lengths stand at the end of their rows; texts end with an end token."""

    pads_S: np.ndarray  # tokens before each prompt that are nothing
    ends_S: np.ndarray  # tokens that were written after it, the end token included


class TrajectoryRows(Protocol):
    """Trajectories, in memory or on disk."""

    block: int

    def __len__(self) -> int: ...
    def rows(self, chosen: np.ndarray) -> Trajectories: ...


@dataclass(frozen=True)
class Trajectories:
    """Text that a model wrote after prompts, with all states of its blocks."""

    prompts_SP: np.ndarray
    states_SJL: np.ndarray  # of the blocks only; the last state is the text itself
    block: int
    spans: Spans | None = None  # where texts begin and end, if they do not fill their rows

    def __len__(self) -> int:
        return len(self.prompts_SP)

    def rows(self, chosen: np.ndarray) -> Trajectories:
        """Some of the sequences."""
        spans = self.spans and Spans(self.spans.pads_S[chosen], self.spans.ends_S[chosen])
        return Trajectories(self.prompts_SP[chosen], self.states_SJL[chosen], self.block, spans)

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
    network: PreTrainedModel,
    text_BL: Tensor,
    guess_BG: Tensor,
    mask_RR: Tensor,
    last: int = 0,
    pads_B: Tensor | None = None,
) -> Tensor:
    """[B, R, V]: what follows every row of the text and of the guesses, in one forward; only for
    the `last` rows, if given. The first `pads_B` rows of a text are nothing: nobody sees them."""
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
    places_BR = places_R[None].expand(len(text_BL), -1)
    mask_BRR = mask_RR[None].expand(len(text_BL), -1, -1)
    if pads_B is not None:
        mask_BRR = without_pads(mask_BRR, pads_B)
        places_BR = (places_BR - pads_B[:, None]).clamp(min=0)
    return network(
        input_ids=torch.cat([text_BL, guess_BG], 1),
        position_ids=places_BR,
        attention_mask=mask_BRR[:, None],
        use_cache=False,
        logits_to_keep=last,
    ).logits


def without_pads(mask_BRR: Tensor, pads_B: Tensor) -> Tensor:
    """The mask with the first rows of some texts hidden; they see themselves, so that no row sees
    nothing."""
    index_R = torch.arange(mask_BRR.shape[-1], device=mask_BRR.device)
    real_BR = index_R >= pads_B[:, None]
    itself_RR = torch.eye(len(index_R), dtype=torch.bool, device=mask_BRR.device)
    return (mask_BRR & real_BR[:, None]) | itself_RR


def ends_of(text_BL: Tensor, plan: TrajectoryPlan) -> Tensor:
    """[B]: how many tokens were written, up to the first end token."""
    written_BG = text_BL[:, text_BL.shape[1] - plan.guesses :]
    ends_BG = torch.isin(written_BG, torch.tensor(plan.end_tokens, device=text_BL.device))
    first_B = ends_BG.int().argmax(1) + 1
    return torch.where(ends_BG.any(1), first_B, plan.guesses)


@torch.no_grad()
def states(
    network: PreTrainedModel,
    text_BL: Tensor,
    plan: TrajectoryPlan,
    seed: int,
    pads_B: Tensor | None = None,
) -> Tensor:
    """[B, J + 1, G]: Jacobi iteration of all blocks of greedy texts at once, some texts at a
    time. What stands behind an end token is right from the start."""
    found = []
    for i, first in enumerate(range(0, len(text_BL), TOGETHER)):
        part_BL = text_BL[first : first + TOGETHER]
        part_B = None if pads_B is None else pads_B[first : first + TOGETHER].to(text_BL.device)
        found.append(_states(network, part_BL, plan, seed + i, part_B))
    return torch.cat(found)


def _states(
    network: PreTrainedModel,
    text_BL: Tensor,
    plan: TrajectoryPlan,
    seed: int,
    pads_B: Tensor | None,
) -> Tensor:
    given = text_BL.shape[1] - plan.guesses
    final_BG = text_BL[:, given:]
    mask_RR = block_mask(given, plan.blocks, plan.block, "clean").to(text_BL.device)
    offset_G = torch.arange(plan.guesses, device=text_BL.device) % plan.block
    over_BG = torch.arange(plan.guesses, device=text_BL.device) >= ends_of(text_BL, plan)[:, None]
    guess_BG = first_guess(text_BL, plan, seed, network.config.vocab_size)
    guess_BG = torch.where(over_BG, final_BG, guess_BG)
    found = [guess_BG]
    for step in range(1, plan.block + 1):
        logits_BGV = packed_logits(network, text_BL, guess_BG, mask_RR, plan.guesses + 1, pads_B)[
            :, :-1
        ]
        # After j steps j tokens are right, whatever rounding makes of them. The first token of a
        # block follows the text alone.
        guess_BG = torch.where((offset_G < step) | over_BG, final_BG, logits_BGV.argmax(-1))
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


def collect(  # noqa: PLR0913 - three of them are keywords
    network: PreTrainedModel,
    prompts_SP: Tensor,
    plan: TrajectoryPlan,
    folder: Path,
    *,
    pads_S: Tensor | None = None,
    share: tuple[int, int] = (0, 1),
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Trajectories | None:
    """Trajectories of the texts that follow the prompts, chunk by chunk in files: an interrupted
    collection goes on where it stopped.

    Several processes may share a folder: the i-th of n (`share`) makes every n-th chunk. The result
    is None while chunks are missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = len(prompts_SP)
    check_folder(folder, made_by(fingerprint(network), prompts_SP, plan, pads_S))
    files = chunk_files(folder, count)
    rank, processes = share
    for number in range(rank, len(files), processes):
        if not files[number].exists():
            rows = slice(number * CHUNK, (number + 1) * CHUNK)
            pads_B = None if pads_S is None else pads_S[rows]
            chunk = make_chunk(network, prompts_SP[rows], plan, number, pads_B)
            store_chunk(files[number], chunk)
        report(min((number + 1) * CHUNK, count), count)
    return read_folder(folder) if all(file.exists() for file in files) else None


def made_by(
    model: str, prompts_SP: Tensor, plan: TrajectoryPlan, pads_S: Tensor | None
) -> dict[str, Any]:
    """What trajectories hang on. `model` is the fingerprint of who writes them."""
    count, given = prompts_SP.shape
    told: dict[str, Any] = dict(
        count=count,
        given=given,
        blocks=plan.blocks,
        block=plan.block,
        start=plan.start,
        model=model,
        prompts=digest(prompts_SP),
    )
    if pads_S is not None:
        told |= {"pads": digest(pads_S), "end_tokens": list(plan.end_tokens)}
    return told


def make_chunk(
    network: PreTrainedModel,
    prompts_BP: Tensor,
    plan: TrajectoryPlan,
    number: int,
    pads_B: Tensor | None = None,
) -> dict[str, np.ndarray]:
    """The texts that follow some prompts and their trajectories, as they are stored."""
    given = prompts_BP.shape[1]
    length = given + plan.guesses
    written = []
    for first in range(0, len(prompts_BP), WRITTEN):
        rows = slice(first, first + WRITTEN)
        part_B = None if pads_B is None else pads_B[rows]
        part_BP = prompts_BP[rows]
        written.append(continue_texts(network, part_BP, length, 0, part_B, plan.end_tokens))
    text_BL = torch.cat(written)
    states_BJG = states(network, text_BL, plan, number, pads_B)
    ends_B = None if pads_B is None else ends_of(text_BL, plan).cpu()
    spans = None if pads_B is None or ends_B is None else Spans(pads_B.numpy(), ends_B.numpy())
    return packed_chunk(text_BL.cpu(), states_BJG.cpu(), given, spans)


def chunk_files(folder: Path, count: int) -> list[Path]:
    """The files that hold `count` sequences."""
    return [folder / f"chunk{number}.npz" for number in range(-(-count // CHUNK))]


def read_folder(folder: Path) -> Trajectories:
    """What `collect` wrote, in memory; refused while chunks are missing."""
    files, block = finished_files(folder)
    return joined([read_chunk(file, block) for file in files])


def joined(parts: Sequence[Trajectories]) -> Trajectories:
    spans = [part.spans for part in parts if part.spans is not None]
    return Trajectories(
        np.concatenate([part.prompts_SP for part in parts]),
        np.concatenate([part.states_SJL for part in parts]),
        parts[0].block,
        Spans(*map(np.concatenate, zip(*spans))) if spans else None,
    )


def finished_files(folder: Path) -> tuple[list[Path], int]:
    """The files of a collection that is complete, and the size of its blocks."""
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
    return files, made_by["block"]


def write_chunk(file: Path, text_BL: Tensor, states_BJG: Tensor, given: int) -> None:
    store_chunk(file, packed_chunk(text_BL, states_BJG, given))


def store_chunk(file: Path, chunk: Mapping[str, Any]) -> None:
    """Write another file and rename it: an interruption leaves no half of one."""
    unfinished = file.with_suffix(".tmp.npz")
    np.savez_compressed(unfinished, **chunk)
    unfinished.replace(file)


def packed_chunk(
    text_BL: Tensor, states_BJG: Tensor, given: int, spans: Spans | None = None
) -> dict[str, np.ndarray]:
    """Stores the first states and the changes after them: which place of which state became
    what."""
    states = states_BJG.numpy()
    largest = max(int(states_BJG.max()), int(text_BL.max()))
    dtype = np.uint16 if largest < 1 << 16 else np.uint32
    where = np.argwhere(states[:, 1:] != states[:, :-1]).astype(np.uint16)
    tokens = states[:, 1:][tuple(where.T.astype(int))].astype(dtype)
    chunk = dict(
        prompts=text_BL[:, :given].numpy().astype(dtype),
        first=states[:, 0].astype(dtype),
        where=where,
        tokens=tokens,
        steps=np.array(states.shape[1] - 1),
    )
    if spans is not None:
        chunk |= {"pads": spans.pads_S, "ends": spans.ends_S}
    return chunk


def read_chunk(file: Path, block: int) -> Trajectories:
    chunk = load_chunk(file)
    return unpacked(chunk, np.arange(len(chunk["prompts"])), block)


def load_chunk(file: Path) -> dict[str, np.ndarray]:
    """A chunk as it is stored: small, whatever the number of states."""
    try:
        with np.load(file) as held:
            chunk = {name: held[name] for name in held.files}
        return {name: chunk[name] for name in (*STORED, *(set(chunk) & {"pads", "ends"}))}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BadCheckpoint(
            f"{file} is no file of trajectories, or a part of one: {error}. Remove it and collect "
            "again."
        ) from error


def unpacked(chunk: Mapping[str, np.ndarray], chosen: np.ndarray, block: int) -> Trajectories:
    """Some sequences of a chunk, with all their states."""
    where = chunk["where"]
    steps = int(chunk["steps"])
    starts = np.searchsorted(where[:, 0], chosen, "left")
    counts = np.searchsorted(where[:, 0], chosen, "right") - starts
    row_C = np.repeat(np.arange(len(chosen)), counts)  # of every change of these sequences
    before_C = np.repeat(np.cumsum(counts) - counts, counts)
    index_C = np.arange(len(row_C)) - before_C + np.repeat(starts, counts)
    step_C = where[index_C, 1]
    place_C = where[index_C, 2]
    token_C = chunk["tokens"][index_C]
    # A place keeps its token until it changes: carry the last change forward.
    states = np.repeat(chunk["first"][chosen][:, None], steps + 1, 1)
    for step in range(1, steps + 1):
        here = step_C == step - 1
        states[:, step] = states[:, step - 1]
        states[row_C[here], step, place_C[here]] = token_C[here]
    spans = Spans(chunk["pads"][chosen], chunk["ends"][chosen]) if "pads" in chunk else None
    return Trajectories(chunk["prompts"][chosen], states, block, spans)


class StoredTrajectories:
    """Trajectories that are read from their folder when a batch wants them.

    Chunks are kept as they are stored, a tenth of their size or less, and the least recently used
    go when they exceed `most` bytes.
    """

    def __init__(self, folder: Path, most: int = KEPT):
        self.files, self.block = finished_files(folder)
        self.most = most
        self._kept: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        last = len(self._chunk(len(self.files) - 1)["prompts"])
        self._each = last if len(self.files) == 1 else len(self._chunk(0)["prompts"])
        self._count = self._each * (len(self.files) - 1) + last

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> int:
        """What is in memory now."""
        return sum(array.nbytes for chunk in self._kept.values() for array in chunk.values())

    def _chunk(self, number: int) -> dict[str, np.ndarray]:
        if number in self._kept:
            self._kept.move_to_end(number)
        else:
            self._kept[number] = load_chunk(self.files[number])
            while self.bytes > self.most and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return self._kept[number]

    def rows(self, chosen: np.ndarray) -> Trajectories:
        """Some of the sequences, in this order."""
        number_S = chosen // self._each
        parts = []
        order = []
        for number in np.unique(number_S):
            here = np.flatnonzero(number_S == number)
            parts.append(unpacked(self._chunk(int(number)), chosen[here] % self._each, self.block))
            order.append(here)
        return joined(parts).rows(np.argsort(np.concatenate(order), kind="stable"))
