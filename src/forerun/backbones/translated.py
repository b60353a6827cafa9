"""A draft model with another vocabulary, seen through the target's: tokens go in by a table, logits
come out by it.

A token that only one side has is never drafted, and where it stands in the text the draft model
sees something else. Neither harms the law of the output. The draft has the law that is left, made
whole again by the softmax, and it is judged by that law.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Protocol

import torch
from torch import Tensor

from forerun.engine.backbone import Backbone, SlotStorage
from forerun.engine.pack import Batch
from forerun.engine.pages import PageShape
from forerun.errors import TokenizerMismatch
from forerun.families.base import Family
from forerun.sequence.rows import TOKEN, Plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_SHARED = 0.1  # of the target's tokens; with fewer, a draft would hardly ever be right


class TokenModel(Protocol):
    """What this module needs to know of a target or draft model."""

    @property
    def name(self) -> str: ...

    @property
    def vocab(self) -> int: ...

    @property
    def family(self) -> Family: ...

    @property
    def backbone(self) -> Backbone: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...


class TranslatedBackbone(Generic[SlotStorage]):
    """Speaks the target's tokens. The token after the last of them is the draft model's mask."""

    def __init__(self, backbone: Backbone[SlotStorage], theirs_V: Tensor, mask: int | None):
        self.backbone = backbone
        self.vocab = len(theirs_V)
        self.context = backbone.context
        self.cost = backbone.cost
        self.device = backbone.device
        self.dtype = backbone.dtype
        self.layers = backbone.layers
        self.heads = backbone.heads
        self.key_heads = backbone.key_heads
        self.head_dim = backbone.head_dim
        self.capturable = backbone.capturable
        self.has_fixed_kernels = backbone.has_fixed_kernels
        self.deterministic = backbone.deterministic
        self.theirs_V = theirs_V.to(self.device)
        known_V = self.theirs_V.clamp(min=0)  # a token that the draft lacks reads as token 0
        self.into = torch.cat([known_V, known_V.new_tensor([mask if mask is not None else 0])])
        self._into = self.into.cpu().numpy()

    def bytes_per_lane(self, context: int) -> int:
        return self.backbone.bytes_per_lane(context)

    def make_slots(self, lanes: int, context: int, pages: PageShape | None = None) -> SlotStorage:
        return self.backbone.make_slots(lanes, context, pages)

    def forward(self, batch: Batch, slots: SlotStorage) -> Tensor:
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


def translated(target: TokenModel, draft: TokenModel) -> tuple[Family, Backbone]:
    """(family, backbone) of a draft model with the target's tokens. Where both have the same
    tokens, these are the draft's own."""
    ours = target.tokenizer
    theirs = draft.tokenizer
    same = ours is None or theirs is None or ours.get_vocab() == theirs.get_vocab()
    if same and target.vocab == draft.vocab:
        return draft.family, draft.backbone
    who = (
        f"draft '{draft.name}' ({draft.vocab} tokens) and target '{target.name}' "
        f"({target.vocab} tokens)"
    )
    if (ours is None) != (theirs is None) and abs(target.vocab - draft.vocab) > 1:
        raise TokenizerMismatch(
            f"{who}: one of them has no tokenizer, so nobody knows whether their tokens mean the "
            "same. Give both a tokenizer, or neither."
        )
    family = draft.family
    mask = family.mask_token
    if mask is not None:
        family = family.masked_as(target.vocab)
    table_V = table(ours, theirs, target.vocab, draft.vocab, mask)
    shared = int((table_V >= 0).sum())
    if shared < LEAST_SHARED * target.vocab:
        raise TokenizerMismatch(
            f"{who} share only {shared} tokens: choose a draft that was trained with the target's "
            "tokenizer, or one like it."
        )
    return family, TranslatedBackbone(draft.backbone, table_V, mask)


def table(
    ours: PreTrainedTokenizerBase | None,
    theirs: PreTrainedTokenizerBase | None,
    our_size: int,
    their_size: int,
    mask: int | None,
) -> Tensor:
    """For each of our tokens the one of theirs that means the same text, -1 where there is none."""
    if ours is None or theirs is None or agree_on_names(ours.get_vocab(), theirs.get_vocab()):
        ids = torch.arange(our_size)
        found_V = torch.where(ids < their_size, ids, -1)
    else:
        by_text: dict[str, int] = {}
        for token, text in enumerate(texts(theirs, their_size)):
            if "\ufffd" not in text:  # half a character has no text of its own
                by_text.setdefault(text, token)
        found_V = torch.tensor(
            [by_text.get(text, -1) if text else -1 for text in texts(ours, our_size)]
        )
    return found_V if mask is None else torch.where(found_V == mask, -1, found_V)


def agree_on_names(ours: dict[str, int], theirs: dict[str, int]) -> bool:
    """Does every number that both sides use have the same name on both?"""
    fewest = min(len(ours), len(theirs))
    our_names = {number: name for name, number in ours.items() if number < fewest}
    their_names = {number: name for name, number in theirs.items() if number < fewest}
    return our_names == their_names


def texts(tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    """What each token means alone."""
    return tokenizer.batch_decode(
        [[token] for token in range(size)], clean_up_tokenization_spaces=False
    )
