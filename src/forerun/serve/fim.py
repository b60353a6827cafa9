"""Fill-in-the-middle tokens: what left-to-right models are given to see both sides of a gap."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.api import Model
from forerun.constraints.healing import encode_inside, healing_of
from forerun.constraints.vocabulary import Vocabulary
from forerun.requests.prompts import Tokenised, check_ids, encode

# (before the prefix, before the suffix, before the middle), as families of models write them.
NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
# Codestral puts the suffix first, and has no token before the middle.
SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")


@dataclass(frozen=True)
class FimTokens:
    """The tokens of a model. `middle` is None where the suffix comes first."""

    prefix: int
    suffix: int
    middle: int | None

    @property
    def all(self) -> list[int]:
        """None of them may be written: a model that does has finished."""
        return [self.prefix, self.suffix, *([] if self.middle is None else [self.middle])]


def fim_tokens(model: Model) -> FimTokens | None:
    """The tokens of a model's own, if it has any. They are looked up once: to list a vocabulary
    takes long."""
    vocabulary = model.vocabulary
    if vocabulary is None or vocabulary.tokenizer is None:
        return None
    return vocabulary.once("fim tokens", lambda: _find(vocabulary))


def _find(vocabulary: Vocabulary) -> FimTokens | None:
    assert vocabulary.tokenizer is not None
    known = vocabulary.tokenizer.get_vocab()
    ids = {name: i for name, i in known.items() if i < vocabulary.size}
    for names in NAMES:
        if all(name in ids for name in names):
            prefix, suffix, middle = (ids[name] for name in names)
            return FimTokens(prefix, suffix, middle)
    if all(name in ids for name in SUFFIX_FIRST):
        return FimTokens(ids["[PREFIX]"], ids["[SUFFIX]"], None)
    return None


def fim_prompt(
    model: Model, tokens: FimTokens, prefix: str, suffix: str, heal: bool = True
) -> Tokenised:
    """A text with a gap, as the model was trained to see it. With `heal`, the last tokens of the
    prefix stand where the middle begins: there they are healed, as a prompt's are."""
    assert model.vocabulary is not None, "it has tokens for this, so it has a tokenizer"
    vocabulary = model.vocabulary
    opening = opening_ids(model)
    before = encode(model, prefix, special=False) if prefix else []
    after = encode_inside(vocabulary, suffix) if suffix else []
    if tokens.middle is None:
        ids = Tokenised([*opening, tokens.suffix, *after, tokens.prefix, *before])
    else:
        healing = healing_of(vocabulary, before, 0) if heal else None
        kept = before if healing is None else healing.kept
        taken = [] if healing is None else healing.taken
        prompt = [*opening, tokens.prefix, *kept, tokens.suffix, *after, tokens.middle, *taken]
        ids = Tokenised(prompt)
        ids.text = kept
    check_ids(ids, model)
    return ids


def opening_ids(model: Model) -> list[int]:
    """The start token, where the tokenizer puts one before every text."""
    start = getattr(model.tokenizer, "bos_token_id", None)
    ids = encode(model, "a")
    return [start] if start is not None and ids[:1] == [start] else []
