"""How sampling parameters turn a model's logits into the law that drafts and verdicts are drawn
from.

R rows of logits, V vocabulary. The order, for every row: allowed tokens and logit bias, minimum
length, repetition penalty (prompt and output), presence and frequency penalties (output),
constraint, temperature, top-k, top-p, min-p. Temperature 0 is the point mass on the arg max of what
stands before it. Laws are float32, or float64 where the logits are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.constraints.base import ANY, BITS, Constraint, words
from forerun.constraints.canvas import OnCanvas
from forerun.constraints.left_to_right import look_ahead, masks_found_together
from forerun.constraints.sum_product import conditioned
from forerun.options import Sampling
from forerun.probability.distributions import point_mass
from forerun.probability.transfer import array_to_device, can_fuse, to_device


class TokenHistory:
    """What the laws of one sequence look back on: how often each token occurred, for penalties, and
    how far its constraint is, if it has one."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: np.ndarray,
        vocab: int,
        stop_tokens: frozenset[int],
        forbidden: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ):
        self.sampling = sampling
        self.vocab = vocab
        self.stop_tokens = stop_tokens
        self.forbidden = forbidden
        self.constraint = constraint
        self.adds_to_logits = sampling.edits_logits or bool(forbidden)
        self.generated = 0
        self.in_output_V = np.zeros(vocab if sampling.penalised else 0, np.int32)
        self.begin(prompt)
        self._static: Tensor | None = None

    def begin(self, prompt: np.ndarray) -> None:
        """Take these tokens for the prompt."""
        self.in_prompt_V = np.zeros_like(self.in_output_V)
        if self.sampling.penalised:
            np.add.at(self.in_prompt_V, prompt[prompt < self.vocab], 1)

    @property
    def edits_logits(self) -> bool:
        """Does anything but temperature and truncation stand between logits and laws?"""
        return self.adds_to_logits or self.constraint is not None

    def add(self, token: int, position: int = -1) -> None:
        """A token was decided; its position matters to a constraint only."""
        self.generated += 1
        if self.sampling.penalised:
            self.in_output_V[token] += 1
        if self.constraint is not None:
            self.constraint.add(position, token)

    def replace(self, old: int, token: int, position: int = -1) -> None:
        """A token took another's place."""
        if self.sampling.penalised:
            self.in_output_V[old] -= 1
            self.in_output_V[token] += 1
        if self.constraint is not None:
            self.constraint.replace(position, token)

    def static_V(self, like: Tensor) -> Tensor:
        """Logit bias, allowed and forbidden tokens as one vector to add, made once."""
        if self._static is None:
            add_V = torch.zeros(self.vocab, dtype=like.dtype)
            if self.sampling.allowed_tokens is not None:
                add_V.fill_(-math.inf)[list(self.sampling.allowed_tokens)] = 0
            for token, bias in (self.sampling.logit_bias or {}).items():
                add_V[int(token)] += bias
            add_V[list(self.forbidden)] = -math.inf
            self._static = add_V.to(like.device)
        return self._static


class ChainRows(NamedTuple):
    """Rows that stand for one chain: row i is a law given the text so far and the first
    `prefixes[i]` tokens of the chain.

    Penalties and the minimum length hold inside the chain too.
    """

    history: TokenHistory
    tokens: Sequence[int]
    prefixes: Sequence[int]
    # how many tokens come before each row's own; without it, all that are known
    ordinals: Sequence[int] | None = None
    # For constraints: where the chain's tokens stand, and the blank that each row is a law of.
    places: Sequence[int] = ()
    positions: Sequence[int] = ()
    drafts: bool = False  # are the rows a draft, of blanks that know nothing of each other?

    @property
    def rows(self) -> int:
        return len(self.prefixes)

    @property
    def is_first_blank(self) -> bool:
        """Is it one row, of the text as it is, under a constraint?"""
        one = len(self.prefixes) == len(self.positions) == 1 and not self.prefixes[0]
        return one and self.history.constraint is not None

    def edit(self, logits_LV: Tensor) -> Tensor:
        """The logits after everything that depends on the text so far, but for its constraint."""
        sampling = self.history.sampling
        history = self.history
        logits_LV = logits_LV + history.static_V(logits_LV)
        before = (
            self.ordinals
            if self.ordinals is not None
            else [history.generated + n for n in self.prefixes]
        )
        for row, count in enumerate(before):
            if count < sampling.min_tokens and history.stop_tokens:
                logits_LV[row, list(history.stop_tokens)] = -math.inf
        if sampling.penalised:
            out_LV = np.stack([self._output_counts(length) for length in self.prefixes])
            logits_LV = penalise(
                logits_LV,
                torch.from_numpy(history.in_prompt_V).to(logits_LV.device),
                torch.from_numpy(out_LV).to(logits_LV.device),
                sampling,
            )
        return logits_LV

    def bitmasks(self) -> np.ndarray:
        """What the constraint allows, [L, W]; everything if there is none."""
        constraint = self.history.constraint
        if constraint is None or not self.rows:
            return np.full((self.rows, words(self.history.vocab)), ANY, np.int32)
        return constraint.masks(self.tokens, self.places, self.prefixes, self.positions)

    def _output_counts(self, length: int) -> np.ndarray:
        counts_V = self.history.in_output_V.copy()
        np.add.at(counts_V, np.asarray(self.tokens[:length], dtype=np.int64), 1)
        return counts_V


def penalise(logits_LV: Tensor, prompt_V: Tensor, output_LV: Tensor, sampling: Sampling) -> Tensor:
    """Repetition, presence and frequency penalties, given how often each token occurred."""
    output_LV = output_LV.to(logits_LV.dtype)
    seen_LV = (prompt_V > 0) | (output_LV > 0)
    r = sampling.repetition_penalty
    logits_LV = torch.where(
        seen_LV, torch.where(logits_LV > 0, logits_LV / r, logits_LV * r), logits_LV
    )
    # A bool times a number would be float32, and round the penalty of a float64 law.
    present_LV = (output_LV > 0).to(logits_LV.dtype)
    return (
        logits_LV - sampling.presence_penalty * present_LV - sampling.frequency_penalty * output_LV
    )


class MaskedLogits(NamedTuple):
    """Logits, and what constraints leave of them. Whoever makes the laws applies the masks: on a
    GPU the rule's own program does, so that they are sent with all else that it needs."""

    logits_RV: Tensor
    masks_RW: np.ndarray | None = None  # bitmasks; None where everything is allowed

    def applied(self) -> Tensor:
        """The logits of what is allowed."""
        if self.masks_RW is None:
            return self.logits_RV
        return masked(self.logits_RV, self.masks_RW)


def edited_logits(logits_RV: Tensor, chains: Sequence[ChainRows]) -> MaskedLogits:
    """The logits of a batch after everything that depends on each row's text so far. `logits_RV` is
    read only."""
    if any(chain.history.adds_to_logits for chain in chains):
        parts = _at_least_single(logits_RV).split([chain.rows for chain in chains])
        logits_RV = torch.cat(
            [c.edit(p) if c.history.adds_to_logits and c.rows else p for c, p in zip(chains, parts)]
        )
    return constrained(logits_RV, chains)


def next_token_logits(
    logits_RV: Tensor, places: Sequence[tuple[TokenHistory, int]]
) -> MaskedLogits | None:
    """The same for one row each, the law of the next token at this position, where constraints
    are all that stands between logits and laws, and what they allow is known already; else None."""
    if any(history.adds_to_logits for history, _ in places):
        return None
    constraints = [history.constraint for history, _ in places]
    if constraints.count(None) == len(constraints):
        return MaskedLogits(logits_RV)
    masks_RW = masks_found_together([(one.constraint, position) for one, position in places])
    return None if masks_RW is None else MaskedLogits(logits_RV, masks_RW)


def laws_from_logits(logits_RV: Tensor, chains: Sequence[ChainRows]) -> Tensor:
    """The laws of all rows of a batch, each under its own sequence's parameters. `logits_RV` is
    read only."""
    logits_RV = edited_logits(logits_RV, chains).applied()
    return row_laws(logits_RV, [c.history.sampling for c in chains for _ in range(c.rows)])


def row_laws(logits_RV: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """The law of every row under its own temperature and truncation."""
    warp = Warp.of(sampling, logits_RV.shape[-1])
    columns_4R = torch.empty(4, 0, dtype=torch.float64)
    if warp.warm:
        columns_4R = to_device(warp_columns(sampling), torch.float64, logits_RV.device)
    return warp.laws(logits_RV, columns_4R)


def warp_columns(sampling: Sequence[Sampling]) -> list[list[float]]:
    """Temperature, top-k, top-p and min-p of every row."""
    return [
        [s.temperature for s in sampling],
        [s.top_k or 0 for s in sampling],
        [s.top_p for s in sampling],
        [s.min_p for s in sampling],
    ]


def _at_least_single(logits_RV: Tensor) -> Tensor:
    return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()


class Warp(NamedTuple):
    """Which steps turn some rows of logits into laws. The numbers are in columns [4, R]:
    temperature, top-k, top-p and min-p of every row."""

    cold: bool  # are there rows at temperature 0?
    warm: bool  # are there others?
    top_k: int  # the most tokens that any row keeps; 0 if no row is cut so
    top_p: bool
    min_p: bool

    @classmethod
    def of(cls, sampling: Sequence[Sampling], vocab: int) -> Warp:
        kept = [min(s.top_k or vocab, vocab) for s in sampling]
        return cls(
            cold=any(s.temperature == 0 for s in sampling),
            warm=any(s.temperature != 0 for s in sampling),
            top_k=max(kept) if any(s.top_k for s in sampling) else 0,
            top_p=any(s.top_p < 1 for s in sampling),
            min_p=any(s.min_p for s in sampling),
        )

    def laws(self, logits_RV: Tensor, columns_4R: Tensor, masks_RW: Tensor | None = None) -> Tensor:
        """The laws of some rows, and of what bitmasks leave of them."""
        if not self.warm:
            return greedy(logits_RV, masks_RW)
        law_RV = self._warped(logits_RV, columns_4R[..., None], masks_RW)
        if self.cold:
            is_cold_R1 = columns_4R[0, :, None] == 0
            law_RV = torch.where(is_cold_R1, greedy(logits_RV, masks_RW), law_RV)
        return law_RV

    def _warped(self, logits_RV: Tensor, columns_4R1: Tensor, masks_RW: Tensor | None) -> Tensor:
        """Rows at temperature 0 come out as if at 1."""
        temperature_R1, top_k_R1, top_p_R1, min_p_R1 = columns_4R1
        # A temperature that this kind of number does not hold would come out as 0 or as infinity.
        kind = torch.promote_types(logits_RV.dtype, torch.float32)
        numbers = torch.finfo(kind)
        temperature_R1 = torch.where(temperature_R1 == 0, 1, temperature_R1)
        temperature_R1 = temperature_R1.clamp(numbers.tiny, numbers.max).to(kind)
        if can_fuse(logits_RV) and not self.top_k:
            from forerun.probability import kernels

            p_RV = kernels.laws(logits_RV, temperature_R1[:, 0], masks_RW)
            if not (self.top_p or self.min_p):
                return p_RV
        else:
            p_RV = self._softmax(masked_by(logits_RV.to(kind), masks_RW), temperature_R1, top_k_R1)
        if self.top_p:
            p_RV = nucleus(p_RV, top_p_R1.to(p_RV.dtype))
        if self.min_p:
            least_R1 = min_p_R1.to(p_RV.dtype) * p_RV.amax(-1, keepdim=True)
            p_RV = p_RV.masked_fill(p_RV < least_R1, 0)
        return p_RV / p_RV.sum(-1, keepdim=True)

    def _softmax(self, logits_RV: Tensor, temperature_R1: Tensor, top_k_R1: Tensor) -> Tensor:
        # From the largest down, so that dividing by a tiny temperature cannot overflow.
        logits_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature_R1
        if self.top_k:
            # Rows that are not cut keep all; rows that only pad keep whatever there is room for.
            kept_R1 = torch.where(top_k_R1 > 0, top_k_R1, logits_RV.shape[-1]).long()
            kept_R1 = kept_R1.clamp(max=self.top_k)
            top_RK = logits_RV.topk(self.top_k, -1).values
            logits_RV = logits_RV.masked_fill(logits_RV < top_RK.gather(-1, kept_R1 - 1), -math.inf)
        return logits_RV.softmax(-1)


class Warps:
    """How logits of some sequences become laws, found anew only where the sequences are others."""

    def __init__(self) -> None:
        # kept as one, so that an interrupt leaves nobody another's
        self._last: tuple[list[Sampling], int, tuple[Warp, np.ndarray]] | None = None

    def of(self, samplings: list[Sampling], vocab: int) -> tuple[Warp, np.ndarray]:
        """The steps, and their numbers [4, B]: nobody's to write to."""
        last = self._last
        if last is not None and last[0] == samplings and last[1] == vocab:
            found = last[2]
        else:
            found = Warp.of(samplings, vocab), np.array(warp_columns(samplings), np.float64)
        self._last = (samplings, vocab, found)  # equal ones too: the very same compare at once
        return found


def constrained(logits_RV: Tensor, chains: Sequence[ChainRows]) -> MaskedLogits:
    """The logits, and masks of what constraints allow. They are made while the device still works
    on the logits. Only drafts on a canvas need them at once."""
    if not any(chain.history.constraint is not None for chain in chains):
        return MaskedLogits(logits_RV)
    masks_RW = masks_of(chains)
    if not any(_is_drafted(chain) for chain in chains):
        return MaskedLogits(logits_RV, masks_RW)
    logits_RV = masked(_at_least_single(logits_RV), masks_RW)
    parts = zip(chains, logits_RV.split([chain.rows for chain in chains]))
    return MaskedLogits(
        torch.cat([drafted(part, chain) if _is_drafted(chain) else part for chain, part in parts])
    )


def masks_of(chains: Sequence[ChainRows]) -> np.ndarray:
    """What every row of a batch may be, [R, W]."""
    firsts = [(c.history.constraint, c.positions[0]) for c in chains if c.is_first_blank]
    masks_RW = masks_found_together(firsts) if len(firsts) == len(chains) else None
    return _masks_of_chains(chains) if masks_RW is None else masks_RW


def _masks_of_chains(chains: Sequence[ChainRows]) -> np.ndarray:
    asked = [
        (chain.history.constraint, chain.tokens[: max(chain.prefixes)])
        for chain in chains
        if chain.history.constraint is not None and chain.rows
    ]
    look_ahead(asked)
    return np.concatenate([chain.bitmasks() for chain in chains])


def masked(logits_RV: Tensor, masks_RW: np.ndarray) -> Tensor:
    """The logits of tokens that bitmasks have."""
    return logits_RV.masked_fill(~allowed_by(masks_RW, logits_RV), -math.inf)


def _is_drafted(chain: ChainRows) -> bool:
    return chain.drafts and bool(chain.rows) and isinstance(chain.history.constraint, OnCanvas)


def drafted(logits_LV: Tensor, chain: ChainRows) -> Tensor:
    """On a canvas: laws of drafted blanks, conditioned on the language that they must spell
    together. The next blank's law is its own already."""
    constraint = chain.history.constraint
    assert isinstance(constraint, OnCanvas)
    prefix = chain.prefixes[0]
    walks = constraint.drafted_walks(chain.tokens[:prefix], chain.places[:prefix], chain.positions)
    fixed = [i for i, where in enumerate(chain.positions) if where == constraint.first_blank]
    for walk, rows in walks:
        temperature = chain.history.sampling.temperature
        logits_LV = conditioned(logits_LV, walk, rows, fixed, temperature)
    return logits_LV


def own_logits(
    logits_RV: Tensor, chains: Sequence[ChainRows], edited: MaskedLogits
) -> MaskedLogits:
    """The logits of the model's own laws, before any parameter: of what constraints leave."""
    if edited.masks_RW is not None:
        return MaskedLogits(logits_RV, edited.masks_RW)
    return constrained(logits_RV, chains)


def allowed_by(masks_RW: np.ndarray, like_RV: Tensor) -> Tensor:
    """Bitmasks as truth values, [R, V]."""
    vocab = like_RV.shape[-1]
    if like_RV.device.type == "cpu":
        bytes_RN = np.ascontiguousarray(masks_RW).view(np.uint8)
        bits_RV = np.unpackbits(bytes_RN, axis=-1, count=vocab, bitorder="little")
        return torch.from_numpy(bits_RV.view(bool))
    return unpacked(array_to_device(masks_RW, like_RV.device), vocab)


def unpacked(masks_RW: Tensor, vocab: int) -> Tensor:
    """Bitmasks on a device as truth values, [R, V]."""
    bit_B = torch.arange(BITS, dtype=torch.int32, device=masks_RW.device)
    value_B = torch.ones_like(bit_B) << bit_B
    flags_RWB = (masks_RW[:, :, None] & value_B) != 0
    return flags_RWB.flatten(1)[:, :vocab]


def masked_by(logits_RV: Tensor, masks_RW: Tensor | None) -> Tensor:
    """The logits of tokens that bitmasks on the same device have."""
    if masks_RW is None:
        return logits_RV
    return logits_RV.masked_fill(~unpacked(masks_RW, logits_RV.shape[-1]), -math.inf)


def greedy(logits_RV: Tensor, masks_RW: Tensor | None = None) -> Tensor:
    """The law that is certain of the likeliest token; nothing where no token is possible, or logits
    are not numbers."""
    kind = torch.promote_types(logits_RV.dtype, torch.float32)
    return point_mass(likeliest(logits_RV, masks_RW), logits_RV.shape[-1], kind)


def likeliest(logits_RV: Tensor, masks_RW: Tensor | None = None) -> Tensor:
    """The token that a greedy law is certain of, [R]; -1 where it is certain of nothing."""
    if can_fuse(logits_RV):
        from forerun.probability import kernels

        return kernels.likeliest(logits_RV, masks_RW)
    best_R, token_R = masked_by(logits_RV, masks_RW).max(-1)
    return torch.where(best_R > -math.inf, token_R, -1)


def model_laws(logits_RV: Tensor, masks_RW: Tensor | None = None) -> Tensor:
    """The model's own laws, float32 or float64."""
    if can_fuse(logits_RV):
        from forerun.probability import kernels

        return kernels.laws(logits_RV, torch.ones_like(logits_RV[:, 0]).float(), masks_RW)
    kind = torch.promote_types(logits_RV.dtype, torch.float32)
    return masked_by(logits_RV.to(kind), masks_RW).softmax(-1)


def nucleus(p_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Keep the likeliest tokens while the mass before them is below top_p: the token that crosses
    it stays."""
    sorted_RV, order_RV = p_RV.sort(dim=-1, descending=True, stable=True)
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    keep_RV = (before_RV < top_p_R1) | (top_p_R1 >= 1)
    return p_RV * torch.zeros_like(p_RV).scatter_(-1, order_RV, keep_RV.to(p_RV.dtype))
