"""What real checkpoints are taught in a timed run: to find several tokens per Jacobi step, to fill
blocks of masks, to fill blanks anywhere.

B texts, L tokens of a text, N blocks of n tokens, G = N n, R rows of a forward, E hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadOption
from forerun.train.any_subset import AnySubsetObjective, two_streams
from forerun.train.base import FamilySettings
from forerun.train.block import BlockObjective, clean_and_masked, from_row_before
from forerun.train.data import Corpus
from forerun.train.head_loss import head_loss, twin_loss
from forerun.train.own_text import OwnText
from forerun.train.timed import Decoder


@dataclass(frozen=True)
class Answers:
    """Texts side by side, each from its beginning; the answer stands in [begin, end)."""

    tokens_BL: Tensor
    begins_B: Tensor
    ends_B: Tensor

    def to(self, device: torch.device) -> Answers:
        return Answers(self.tokens_BL.to(device), self.begins_B.to(device), self.ends_B.to(device))

    def inside_BL(self) -> Tensor:
        place_L = torch.arange(self.tokens_BL.shape[1], device=self.tokens_BL.device)
        return (place_L >= self.begins_B[:, None]) & (place_L < self.ends_B[:, None])


class AnswerSource:
    """A model's own answers as batches of one length, some of them held out."""

    def __init__(self, text: OwnText, length: int, held_out: int = 64, seed: int = 0):
        self.text = text
        self.length = length
        self.seed = seed
        spans = text.spans()
        # An answer must have begun well before its text is cut off.
        spans = spans[spans[:, 2] - spans[:, 0] < length - length // 4]
        if len(spans) < 8:
            raise BadOption("there is too little own text to train on: give it more seconds.")
        order = np.random.default_rng(seed).permutation(len(spans))
        kept = min(held_out, len(spans) // 4)
        self.held = spans[order[:kept]]
        self.spans = text.apart(spans[order[kept:]], self.held)

    def batch(self, step: int, count: int) -> Answers:
        rng = np.random.default_rng([self.seed, step])
        return self._answers(self.spans[rng.integers(0, len(self.spans), count)])

    def held_out(self) -> Answers:
        return self._answers(self.held)

    def _answers(self, spans: np.ndarray) -> Answers:
        places = spans[:, :1] + np.arange(self.length)
        tokens = self.text.tokens[np.minimum(places, spans[:, 1:2] - 1)].astype(np.int64)
        ends = np.minimum(spans[:, 1] - spans[:, 0], self.length)
        parts = (tokens, spans[:, 2] - spans[:, 0], ends)
        return Answers(*(torch.from_numpy(part) for part in parts))


@dataclass
class Guesses:
    """Blocks of texts as they are guessed, beside the texts."""

    answers: Answers
    starts_B: Tensor  # where the first block begins
    tokens_BG: Tensor

    def places_BG(self) -> Tensor:
        index_G = torch.arange(self.tokens_BG.shape[1], device=self.tokens_BG.device)
        return self.starts_B[:, None] + index_G

    def right_BG(self, ahead: int = 0) -> Tensor:
        """The text's own tokens, at the blocks' places or some further on; past its end the
        last."""
        last = self.answers.tokens_BL.shape[1] - 1
        return self.answers.tokens_BL.gather(1, (self.places_BG() + ahead).clamp(max=last))

    def first_wrong_BG(self, n: int) -> Tensor:
        """How many tokens of its block are right before the first wrong one, for every place."""
        right = (self.tokens_BG == self.right_BG()).unflatten(1, (-1, n))
        return right.int().cumprod(-1).sum(-1).repeat_interleave(n, 1)


def guess_rows(guesses: Guesses, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, positions, what sees what) of a text and of the guesses beside it. A guess sees the
    text before its block, and its block up to itself."""
    text_BL = guesses.answers.tokens_BL
    size, length = text_BL.shape
    device = text_BL.device
    text_L = torch.arange(length, device=device)
    guess_G = torch.arange(guesses.tokens_BG.shape[1], device=device)
    block_G = guess_G // n
    before_BG = guesses.starts_B[:, None] + block_G * n
    sees_text = torch.cat(
        [
            (text_L <= text_L[:, None]).expand(size, -1, -1),
            text_L < before_BG[..., None],
        ],
        1,
    )
    own_block = (block_G == block_G[:, None]) & (guess_G <= guess_G[:, None])
    nothing = torch.zeros(length, len(guess_G), dtype=torch.bool, device=device)
    sees_guess = torch.cat([nothing, own_block]).expand(size, -1, -1)
    positions = torch.cat([text_L.expand(size, -1), guesses.places_BG()], 1)
    tokens = torch.cat([text_BL, guesses.tokens_BG], 1)
    return tokens, positions, torch.cat([sees_text, sees_guess], 2)


class JacobiLesson:
    """Consistency distillation on the trajectories of the network as it is now: what it says of a
    guess in one step is the guess of the next. Of every text `ages` states are taught, texts at
    different ages side by side, so that a state costs no forward of its own. (Published recipes
    write whole trajectories of the first network down before.)
    """

    family_settings: FamilySettings = {}

    def __init__(
        self,
        source: AnswerSource,
        batch: int,
        *,
        n: int = 16,
        blocks: int = 14,
        ages: int = 6,
        own_weight: float = 1.0,
    ):
        self.source = source
        self.batch = batch
        self.n = n
        self.blocks = blocks
        self.ages = ages
        self.own_weight = own_weight
        self.guesses: Guesses | None = None

    def loss(self, decoder: Decoder, step: int) -> Tensor:
        guesses = self.guesses = self._renewed(decoder, step)
        taught_BG, own_BG = self._counted(guesses)
        text_BGE, guess_BGE = self._hidden(decoder, guesses)
        weights = (
            own_BG.flatten() * (self.own_weight / own_BG.sum().clamp(min=1)),
            taught_BG.flatten() / taught_BG.sum().clamp(min=1),
        )
        labels_N = guesses.right_BG(ahead=1).flatten()
        rows = (text_BGE.flatten(0, 1), guess_BGE.flatten(0, 1))
        loss, said_N = twin_loss(*rows, decoder.head_EV, labels_N, weights)
        self._advance(guesses, said_N.view_as(guesses.tokens_BG))
        return loss

    def _counted(self, guesses: Guesses) -> tuple[Tensor, Tensor]:
        """Which rows are taught: those from the first wrong token of their block on; and of which
        the text counts."""
        place_BG = guesses.places_BG()
        inside_BG = place_BG < guesses.answers.ends_B[:, None] - 1
        offset_G = torch.arange(place_BG.shape[1], device=place_BG.device) % self.n
        return inside_BG & (offset_G >= guesses.first_wrong_BG(self.n)), inside_BG

    def _hidden(self, decoder: Decoder, guesses: Guesses) -> tuple[Tensor, Tensor]:
        """Hidden states of the text at the guesses' places, and of the guesses, [B, G, E] each."""
        x_BRE = decoder(*guess_rows(guesses, self.n))
        length = guesses.answers.tokens_BL.shape[1]
        places_BG = guesses.places_BG().clamp(max=length - 1)
        text_BGE = x_BRE.gather(1, places_BG[..., None].expand(-1, -1, x_BRE.shape[2]))
        return text_BGE, x_BRE[:, length:]

    def _advance(self, guesses: Guesses, said_BG: Tensor) -> None:
        """One Jacobi step: what was said becomes the guess. One token more of every block is
        right, whatever rounding makes of it."""
        said_BG = said_BG.roll(1, 1)
        offset_G = torch.arange(said_BG.shape[1], device=said_BG.device) % self.n
        certain_BG = offset_G <= guesses.first_wrong_BG(self.n)
        guesses.tokens_BG = torch.where(certain_BG, guesses.right_BG(), said_BG)

    def _renewed(self, decoder: Decoder, step: int) -> Guesses:
        """The guesses, with other texts in place of those that are old. A run that goes on begins
        with new ones."""
        if self.guesses is None:
            fresh = self.source.batch(step, self.batch).to(decoder.device)
            return self.begin(fresh, decoder.vocab, step, right=True)
        rows = torch.arange(self.batch, device=decoder.device)[step % self.ages :: self.ages]
        if not len(rows):
            return self.guesses
        fresh = self.source.batch(step, len(rows)).to(decoder.device)
        begun = self.begin(fresh, decoder.vocab, step, right=True)
        old = self.guesses
        answers = Answers(
            old.answers.tokens_BL.index_copy(0, rows, begun.answers.tokens_BL),
            old.answers.begins_B.index_copy(0, rows, begun.answers.begins_B),
            old.answers.ends_B.index_copy(0, rows, begun.answers.ends_B),
        )
        return Guesses(
            answers,
            old.starts_B.index_copy(0, rows, begun.starts_B),
            old.tokens_BG.index_copy(0, rows, begun.tokens_BG),
        )

    def begin(self, answers: Answers, vocab: int, seed: int, right: bool) -> Guesses:
        """First guesses: the last known token again and again, in some blocks any tokens. With
        `right`, half of the blocks begin with some right tokens, and blocks begin anywhere."""
        rng = np.random.default_rng([seed, 7])
        size = len(answers.tokens_BL)
        device = answers.tokens_BL.device
        shape = (size, self.blocks)
        offset_B = rng.integers(0, self.n, size) if right else np.zeros(size, int)
        starts_B = answers.begins_B + torch.from_numpy(offset_B).to(device)
        known_BN = rng.integers(0, self.n, shape) * (rng.random(shape) < 0.5) * right
        any_BG = torch.from_numpy(rng.integers(0, vocab, (size, self.blocks * self.n)))
        random_BN = (rng.random(shape) < 0.2) * right
        known_BG, random_BG = (
            torch.from_numpy(x).to(device).repeat_interleave(self.n, 1)
            for x in (known_BN, random_BN > 0)
        )
        guesses = Guesses(answers, starts_B, any_BG.to(device))
        offset_G = torch.arange(self.blocks * self.n, device=device) % self.n
        last = answers.tokens_BL.shape[1] - 1
        repeated = (guesses.places_BG() - offset_G + known_BG - 1).clamp(max=last)
        repeat_BG = answers.tokens_BL.gather(1, repeated)
        start_BG = torch.where(random_BG, guesses.tokens_BG, repeat_BG)
        guesses.tokens_BG = torch.where(offset_G < known_BG, guesses.right_BG(), start_BG)
        return guesses

    def measure(self, decoder: Decoder) -> dict[str, float]:
        """Tokens per forward of Jacobi decoding, block by block, with the held-out texts taken for
        right; and what the network thinks of them."""
        answers = self.source.held_out().to(decoder.device)
        guesses = self.begin(answers, decoder.vocab, 0, right=False)
        last_BN = guesses.places_BG().unflatten(1, (-1, self.n))[..., -1]
        whole_BN = last_BN < answers.ends_B[:, None]
        done_BN = ~whole_BN
        forwards = 0
        nats = 0.0
        for step in range(self.n):
            forwards += int((~done_BN).sum())
            # A forward adds one token to what is right: behind n - 1 it is the block's last one.
            done_BN = done_BN | (guesses.first_wrong_BG(self.n)[:, :: self.n] >= self.n - 1)
            text_BGE, guess_BGE = self._hidden(decoder, guesses)
            if step == 0:
                nats = self._nats(decoder, guesses, text_BGE)
            self._advance(guesses, decoder.likeliest(guess_BGE))
        tokens = float(whole_BN.sum() * self.n)
        return {"tokens_per_forward": tokens / max(1, forwards), "nats": nats}

    def _nats(self, decoder: Decoder, guesses: Guesses, text_BGE: Tensor) -> float:
        """The mean -log p of the held-out texts' own tokens."""
        own_N = self._counted(guesses)[1].flatten().float()
        labels_N = guesses.right_BG(ahead=1).flatten()
        loss = head_loss(text_BGE.flatten(0, 1), decoder.head_EV, labels_N, own_N)
        return float(loss / own_N.sum().clamp(min=1))


class BlockLesson:
    """Fast-dLLM v2's conversion: masks in blocks, every token masked once in a pair of copies, and
    rows that go on speaking of the token after their own. Text that is read from left to right also
    keeps its plain loss, so that the network goes on being the model that it was."""

    def __init__(
        self, source: AnswerSource, objective: BlockObjective, batch: int, ar_weight: float = 0.5
    ):
        self.source = source
        self.objective = objective
        self.batch = batch
        self.ar_weight = ar_weight
        self.family_settings = objective.family_settings

    def loss(self, decoder: Decoder, step: int) -> Tensor:
        rng = np.random.default_rng([self.source.seed, step, 3])
        answers = self.source.batch(step, self.batch // 2)
        # Both copies of a text stand side by side.
        answers = Answers(
            *(
                part.repeat_interleave(2, 0)
                for part in (answers.tokens_BL, answers.begins_B, answers.ends_B)
            )
        )
        drawn = self.objective.prepare(answers.tokens_BL, rng, step)
        answers = answers.to(decoder.device)
        return self._loss(decoder, answers, [x.to(decoder.device) for x in drawn[1:]])

    def _loss(self, decoder: Decoder, answers: Answers, drawn: Sequence[Tensor]) -> Tensor:
        seen_BL, block_BL, causal_B, weight_BL = drawn
        inside_BL = answers.inside_BL()
        # Of the prompt nothing is masked: decoding never meets that.
        seen_BL = torch.where(inside_BL, seen_BL, answers.tokens_BL)
        weight_BL = weight_BL * inside_BL
        x_BLE, clean_BLE = self._hidden(decoder, answers, seen_BL, block_BL, causal_B)
        asked = weight_BL > 0
        weights_M = weight_BL[asked] / weight_BL.sum().clamp(min=1e-6)
        loss = head_loss(x_BLE[asked], decoder.head_EV, answers.tokens_BL[asked], weights_M)
        plain = (inside_BL & causal_B[:, None])[:, 1:]
        plain[1::2] = False  # the copies' clean rows are the same
        if self.ar_weight:
            ones_M = torch.ones_like(answers.tokens_BL[:, 1:][plain], dtype=torch.float32)
            ones_M = ones_M * (self.ar_weight / plain.sum().clamp(min=1))
            labels_M = answers.tokens_BL[:, 1:][plain]
            loss = loss + head_loss(clean_BLE[:, :-1][plain], decoder.head_EV, labels_M, ones_M)
        return loss

    def _hidden(
        self, decoder: Decoder, answers: Answers, seen: Tensor, block: Tensor, causal: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The hidden states that speak of every token, given its block as it is seen; and those of
        the clean text."""
        length = seen.shape[1]
        position_L = torch.arange(length, device=seen.device)
        x_BRE = decoder(
            torch.cat([answers.tokens_BL, seen], 1),
            position_L.repeat(2).expand(len(seen), -1),
            clean_and_masked(block, causal),
        )
        return from_row_before(x_BRE, block), x_BRE[:, :length]

    def measure(self, decoder: Decoder) -> dict[str, float]:
        """On held-out answers: the loss as in training, and what blocks that are all masks say: the
        share that is right, and the tokens up to the first wrong one, behind text that is read in
        blocks and token by token."""
        answers = self.source.held_out()
        size = self.objective.sizes[-1]
        fixed = replace(self.objective, sizes=(size,), causal=0.0, complementary=False, whole=0.0)
        drawn = fixed.prepare(answers.tokens_BL, np.random.default_rng(0), 10**9)
        answers = answers.to(decoder.device)
        found = {"loss_held_out": 0.0}
        plain = BlockLesson(self.source, fixed, self.batch, ar_weight=0.0)
        parts = range(0, len(answers.tokens_BL), 16)
        for first in parts:
            rows = slice(first, first + 16)
            part = Answers(answers.tokens_BL[rows], answers.begins_B[rows], answers.ends_B[rows])
            on_device = [x[rows].to(decoder.device) for x in drawn[1:]]
            found["loss_held_out"] += float(plain._loss(decoder, part, on_device)) / len(parts)
        for name, causal in (("blocks", False), ("causal", True)):
            right, run = self._whole_blocks(decoder, answers, size, causal)
            found |= {f"right_{name}": right, f"run_{name}": run}
        return found

    def _whole_blocks(
        self, decoder: Decoder, answers: Answers, size: int, causal: bool
    ) -> tuple[float, float]:
        """(share of tokens that are right, right tokens before the first wrong one) of blocks
        behind a clean text, all of whose tokens are masked."""
        inside_BL = answers.inside_BL()
        device = inside_BL.device
        place_L = torch.arange(inside_BL.shape[1], device=device)
        block_BL = (place_L // size).expand(len(inside_BL), -1)
        seen_BL = inside_BL.long() * self.objective.mask_token
        seen_BL = torch.where(inside_BL, seen_BL, answers.tokens_BL)
        causal_B = torch.full((len(inside_BL),), causal, device=device)
        agree = []
        for rows in torch.arange(len(inside_BL), device=device).split(16):
            part = Answers(answers.tokens_BL[rows], answers.begins_B[rows], answers.ends_B[rows])
            x_BLE, _ = self._hidden(decoder, part, seen_BL[rows], block_BL[rows], causal_B[rows])
            agree.append(decoder.likeliest(x_BLE) == part.tokens_BL)
        right_BL = torch.cat(agree)
        whole_BN = inside_BL.unflatten(1, (-1, size)).all(-1)
        right_BN = right_BL.unflatten(1, (-1, size))[whole_BN]
        if not len(right_BN):
            return 0.0, 0.0
        return float(right_BN.float().mean()), float(
            right_BN.int().cumprod(-1).sum(-1).mean(dtype=torch.float32)
        )


class AnySubsetLesson:
    """Blanks anywhere, asked for by masks at their places: own text and a corpus, half of each."""

    def __init__(
        self,
        text: OwnText,
        corpus: Corpus | None,
        objective: AnySubsetObjective,
        *,
        batch: int,
        length: int = 256,
        seed: int = 0,
    ):
        cut = len(text.tokens) - max(length, len(text.tokens) // 50)
        self.own = Corpus(text.tokens[:cut], text.tokens[cut:])
        self.corpus = corpus
        self.objective = objective
        self.batch = batch
        self.length = length
        self.seed = seed
        self.family_settings = objective.family_settings

    def _tokens(self, step: int) -> Tensor:
        if self.corpus is None:
            return self.own.batch(step, self.batch, self.length, self.seed)
        half = self.batch // 2
        own_BL = self.own.batch(step, self.batch - half, self.length, self.seed)
        return torch.cat([own_BL, self.corpus.batch(step, half, self.length, self.seed)])

    def loss(self, decoder: Decoder, step: int) -> Tensor:
        rng = np.random.default_rng([self.seed, step, 4])
        drawn = self.objective.prepare(self._tokens(step), rng, step)
        loss, _ = self._loss(decoder, [x.to(decoder.device) for x in drawn])
        return loss

    def _loss(self, decoder: Decoder, drawn: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(nats per blank, share of blanks whose likeliest token is right)."""
        tokens_BL, order_BL, known_B, horizon_BL, _ = drawn
        length = tokens_BL.shape[1]
        content_BL = tokens_BL.gather(1, order_BL)
        masks_BL = torch.full_like(content_BL, self.objective.mask_token)
        x_BRE = decoder(
            torch.cat([content_BL, masks_BL], 1),
            torch.cat([order_BL, order_BL], 1),
            two_streams(known_B, horizon_BL),
        )
        blank_BL = torch.arange(length, device=known_B.device) >= known_B[:, None]
        rows_ME = x_BRE[:, length:][blank_BL]
        labels_M = content_BL[blank_BL]
        even_M = torch.full_like(labels_M, 1, dtype=torch.float32) / max(1, len(labels_M))
        loss = head_loss(rows_ME, decoder.head_EV, labels_M, even_M)
        if torch.is_grad_enabled():
            return loss, loss
        return loss, (decoder.likeliest(rows_ME) == labels_M).float().mean()

    def measure(self, decoder: Decoder) -> dict[str, float]:
        """With 30 % known: nats per blank and the share of right ones, asked in turn and up to
        eight blanks ahead, as drafts are asked."""
        found: dict[str, float] = {}
        sources = {"own": self.own} | ({"code": self.corpus} if self.corpus else {})
        for kind, source in sources.items():
            for name, ahead in (("", 0.0), ("_ahead", 1.0)):
                asked = replace(self.objective, masked=(0.7, 0.7), masked_warmup=0, ahead=ahead)
                tokens_BL = source.held_out(32, self.length)
                drawn = asked.prepare(tokens_BL, np.random.default_rng(0), 10**9)
                loss, right = self._loss(decoder, [x.to(decoder.device) for x in drawn])
                found |= {f"nats_{kind}{name}": float(loss), f"right_{kind}{name}": float(right)}
        return found
