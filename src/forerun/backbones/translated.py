"""A draft model with another vocabulary, seen through the target's: tokens go in by a table, logits come out by it.

A token that only one side has is never drafted, and where it stands in the text the draft model sees something else. Neither harms
the law of the output: what is drafted has the law that is left, made whole again by the softmax, and that is the law it is judged
by.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.engine.pack import Batch
from forerun.errors import TokenizerMismatch
from forerun.rows import TOKEN, Plan

LEAST_SHARED = 0.1  # of the target's tokens; with fewer, a draft would hardly ever be right


class TranslatedBackbone:
    """Speaks the target's tokens; the one behind the last of them is the draft model's mask."""

    def __init__(self, backbone: Any, theirs_V: Tensor, mask: int | None):
        self.backbone, self.vocab = backbone, len(theirs_V)
        self.context, self.cost, self.device = backbone.context, backbone.cost, backbone.device
        self.theirs_V = theirs_V.to(self.device)
        known_V = self.theirs_V.clamp(min=0)  # what has no name over there reads as token 0
        self.into = torch.cat([known_V, known_V.new_tensor([mask if mask is not None else 0])])
        self._into = self.into.cpu().numpy()
        self.capturable = getattr(backbone, "capturable", False)
        for name in ("dtype", "fold", "key_heads", "head_dim"):
            setattr(self, name, getattr(backbone, name, None))
        self.bytes_per_lane, self.make_slots = backbone.bytes_per_lane, backbone.make_slots

    def forward(self, batch: Batch, slots: Any) -> Tensor:
        theirs = copy.copy(batch)
        theirs.tokens_T = self.into[batch.tokens_T]
        theirs.segments = [s._replace(plan=self._plan(s.plan)) for s in batch.segments]
        logits_RV = self.backbone.forward(theirs, slots)[:, self.into[:-1]]
        return logits_RV.masked_fill(self.theirs_V < 0, -torch.inf)

    def _plan(self, plan: Plan) -> Plan:
        """A network may look at the tokens of rows that need not run: SEDD counts masks."""
        rows = plan.rows.copy()
        rows[TOKEN] = self._into[rows[TOKEN]]
        return replace(plan, rows=rows)


def translated(target: Any, draft: Any) -> tuple[Any, Any]:
    """(family, backbone) of a draft model as one that has the target's tokens; its own where they have the same."""
    ours, theirs = target.tokenizer, draft.tokenizer
    same = ours is None or theirs is None or ours.get_vocab() == theirs.get_vocab()
    if same and target.vocab == draft.vocab:
        return draft.family, draft.backbone
    if (ours is None) != (theirs is None) and abs(target.vocab - draft.vocab) > 1:
        raise TokenizerMismatch(
            f"draft '{draft.name}' ({draft.vocab} tokens) and target '{target.name}' ({target.vocab} tokens): one of them has no "
            f"tokenizer, so nobody knows whether their tokens mean the same."
        )
    mask = getattr(draft.family, "mask_token", None)
    if mask is not None and not hasattr(draft.family, "masked_as"):
        raise TokenizerMismatch(f"draft '{draft.name}' has other tokens than '{target.name}', and its mask cannot be translated.")
    table_V = table(ours, theirs, target.vocab, draft.vocab, mask)
    shared = int((table_V >= 0).sum())
    if shared < LEAST_SHARED * target.vocab:
        raise TokenizerMismatch(
            f"draft '{draft.name}' ({draft.vocab} tokens) and target '{target.name}' ({target.vocab} tokens) share only {shared} "
            f"tokens: choose a draft that was trained with the target's tokenizer, or one like it."
        )
    family = draft.family if mask is None else draft.family.masked_as(target.vocab)
    return family, TranslatedBackbone(draft.backbone, table_V, mask)


def table(ours: Any, theirs: Any, our_size: int, their_size: int, mask: int | None) -> Tensor:
    """For each of our tokens the one of theirs that means the same text, -1 where there is none."""
    if ours is None or theirs is None or prefix_of_each_other(ours.get_vocab(), theirs.get_vocab()):
        ids = torch.arange(our_size)
        found_V = torch.where(ids < their_size, ids, -1)
    else:
        by_text: dict[str, int] = {}
        for token, text in enumerate(texts(theirs, their_size)):
            if "\ufffd" not in text:  # half a character has no text of its own
                by_text.setdefault(text, token)
        found_V = torch.tensor([by_text.get(text, -1) if text else -1 for text in texts(ours, our_size)])
    return found_V if mask is None else torch.where(found_V == mask, -1, found_V)


def prefix_of_each_other(ours: dict[str, int], theirs: dict[str, int]) -> bool:
    """Does every token that both numbers allow have the same name on both sides?"""
    fewest = min(len(ours), len(theirs))
    mine, other = ({i: t for t, i in vocab.items() if i < fewest} for vocab in (ours, theirs))
    return mine == other


def texts(tokenizer: Any, size: int) -> list[str]:
    return tokenizer.batch_decode([[token] for token in range(size)], clean_up_tokenization_spaces=False)
