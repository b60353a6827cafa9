"""Own text as a drafter learns from it: blocks that begin at anchors within a target's answers, and
the target's hidden states of it all.

B texts of a step, L tokens of a text, A anchors of a text, S slots of a block, T tokens of all
text, N hidden states of a token side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.engine.cache import available_bytes
from forerun.errors import BadOption
from forerun.train.frozen import FrozenTarget
from forerun.train.own_text import CODE, GREEDY, OwnText

Log = Callable[[str], None]
TEXTS_SORTED = 32  # steps whose texts are put in order of length
AT_ONCE = 32  # texts whose hidden states are made together


@dataclass(frozen=True)
class Blocks:
    """Anchors of a step and the tokens of their blocks."""

    tokens_BL: Tensor
    anchors_BA: Tensor
    inside_BAS: Tensor  # does the text reach so far?
    places_BL: Tensor  # of the tokens in all own text

    def tokens(self, slots: int) -> Tensor:
        """The text from every anchor on, [B, A, S]; where it is over, its last token."""
        places = self.anchors_BA[..., None] + torch.arange(slots, device=self.anchors_BA.device)
        places = places.clamp(max=self.tokens_BL.shape[1] - 1)
        return self.tokens_BL[:, None].expand(-1, places.shape[1], -1).gather(2, places)


class Texts:
    """Own text as batches: whole texts side by side, and anchors within their answers."""

    def __init__(self, text: OwnText, longest: int, held_out: int, device: torch.device):
        self.text = text
        self.longest = longest
        self.device = device
        spans = text.spans()
        marks = text.marks[spans[:, 2]]
        kinds = {
            "chat": (marks & GREEDY > 0) & (marks & CODE == 0),
            "code": (marks & GREEDY > 0) & (marks & CODE > 0),
            "sampled": marks & GREEDY == 0,
        }
        order = np.random.default_rng(0).permutation(len(spans))
        kept = np.ones(len(spans), bool)
        self.held_out = {}
        for kind, here in kinds.items():
            chosen = order[here[order]][: min(held_out, int(here.sum()) // 4)]
            kept[chosen] = False
            self.held_out[kind] = spans[chosen]
        self.spans = text.apart(spans[kept], np.concatenate([*self.held_out.values()]))
        if not len(self.spans):
            raise BadOption(
                "there is too little own text to train on: give it more seconds, or more prompts."
            )
        self._ordered: tuple[tuple[int, int], list[np.ndarray]] = ((-1, 0), [])

    def batch(self, step: int, count: int, anchors: int, slots: int) -> Blocks:
        rng = np.random.default_rng([step, 1])
        per_epoch = max(1, len(self.spans) // count)
        order = self._order(step // per_epoch, count)
        spans = self.spans[order[step % per_epoch]]
        lengths = (spans[:, 1] - spans[:, 0])[:, None]
        begins = (spans[:, 2] - spans[:, 0])[:, None]
        # an anchor has at least one token of the answer after it
        u = (rng.random((len(spans), anchors)) + np.arange(anchors)) / anchors
        places = begins + (u * (lengths - 1 - begins)).astype(np.int64)
        return self.blocks(spans, places, slots)

    def _order(self, epoch: int, count: int) -> list[np.ndarray]:
        """The texts of every step of an epoch: texts of like length together, steps in any
        order."""
        if self._ordered[0] != (epoch, count):
            rng = np.random.default_rng([epoch, 0])
            order = rng.permutation(len(self.spans))
            pool = count * TEXTS_SORTED
            lengths = (self.spans[:, 1] - self.spans[:, 0])[order]
            order = order[np.lexsort((lengths, np.arange(len(order)) // pool))]
            steps = max(1, len(order) // count)
            batches = np.array_split(order[: steps * count], steps)
            self._ordered = ((epoch, count), [batches[i] for i in rng.permutation(steps)])
        return self._ordered[1]

    def all_in_order(self, count: int) -> Iterator[Blocks]:
        """Every text once, those of like length together, as one block as long as its row."""
        spans = self.text.spans()
        spans = spans[np.argsort(spans[:, 1] - spans[:, 0], kind="stable")]
        for first in range(0, len(spans), count):
            part = spans[first : first + count]
            width = self._width(part)
            yield self.blocks(part, np.zeros((len(part), 1), np.int64), width)

    def _width(self, spans: np.ndarray) -> int:
        """Of a step's rows, in few sizes."""
        longest = int((spans[:, 1] - spans[:, 0]).max())
        return min(self.longest, -(-longest // 64) * 64)

    def every_anchor(self, spans: np.ndarray, slots: int) -> Blocks:
        """All anchors of some texts, as many for each: those past its end are void."""
        begins = (spans[:, 2] - spans[:, 0])[:, None]
        most = int((spans[:, 1] - spans[:, 2]).max())
        return self.blocks(spans, begins + np.arange(most)[None], slots)

    def blocks(self, spans: np.ndarray, places: np.ndarray, slots: int) -> Blocks:
        lengths = np.minimum(spans[:, 1] - spans[:, 0], self.longest)
        width = self._width(spans)
        columns = np.minimum(spans[:, :1] + np.arange(width), len(self.text.tokens) - 1)
        tokens = self.text.tokens[columns].astype(np.int64)
        inside = places[..., None] + np.arange(slots) < lengths[:, None, None]
        places = np.minimum(places, width - 1)
        arrays = (tokens, places, inside, columns)
        parts = (torch.from_numpy(x).to(self.device) for x in arrays)
        return Blocks(*parts)


class KeptFeatures:
    """Hidden states of all own text, made once: every text is seen many times. Where they do not
    fit, they are made for each step."""

    def __init__(self, target: FrozenTarget, layers: Sequence[int], kept_TN: Tensor | None):
        self.target = target
        self.layers = layers
        self.kept_TN = kept_TN

    @classmethod
    @torch.no_grad()
    def of(
        cls, target: FrozenTarget, layers: Sequence[int], texts: Texts, log: Log
    ) -> KeptFeatures:
        began = time.perf_counter()
        weights = target.weights
        shape = (len(texts.text.tokens), len(layers) * weights.hidden_size)
        size = shape[0] * shape[1] * weights.dtype.itemsize
        if size > cls.room(weights.device):
            return cls(target, layers, None)
        # zeros, since what a block must not see is still multiplied by nothing
        self = cls(target, layers, torch.zeros(shape, dtype=weights.dtype, device=weights.device))
        for blocks in texts.all_in_order(AT_ONCE):
            self._keep(blocks)
        seconds = time.perf_counter() - began
        log(f"hidden states of {shape[0]:,} tokens: {size / 2**30:.0f} GiB, {seconds:.0f} s")
        return self

    @staticmethod
    def room(device: torch.device) -> float:
        """Bytes that they may take."""
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of what own text was written with
        return 0.6 * available_bytes(device)

    def _keep(self, blocks: Blocks) -> None:
        """Of whole texts; what lies behind a text in its row is another text's."""
        assert self.kept_TN is not None
        found_BLN = self.target.features(blocks.tokens_BL, self.layers)
        within_BL = blocks.inside_BAS[:, 0]
        self.kept_TN[blocks.places_BL[within_BL]] = found_BLN[within_BL]

    def __call__(self, blocks: Blocks) -> Tensor:
        """Of the texts of a step, [B, L, N]."""
        if self.kept_TN is None:
            return self.target.features(blocks.tokens_BL, self.layers)
        return self.kept_TN[blocks.places_BL]
