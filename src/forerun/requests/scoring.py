"""The log-probabilities of tokens that are given: one forward for all, and nothing is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.engine.ticket import Ticket
from forerun.errors import BadOption, NotAble
from forerun.families.base import ChainScorer
from forerun.options import Sampling
from forerun.probability.logits import TokenHistory
from forerun.requests.model import DecodableModel
from forerun.requests.prompts import as_list, check_ids, encode
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.logprobs import TokenLogprob


@dataclass(frozen=True)
class Score:
    """How likely a model finds a continuation."""

    token_ids: list[int]
    logprobs: list[float]  # of its tokens, in nats, under the model's own law
    is_greedy: bool  # is every token the model's first choice?

    @property
    def logprob(self) -> float:
        """Of the whole continuation."""
        return sum(self.logprobs)


class Scoring:
    """Some tokens after a text, on their way through the engine.

    `top` is how many alternatives are told of each token.
    """

    def __init__(
        self, model: DecodableModel, text: Sequence[int], tokens: Sequence[int], top: int = 1
    ):
        self.model = model
        self.tokens = tokens
        sampling = Sampling(temperature=1.0, logprobs=top)
        history = TokenHistory(sampling, np.asarray(text, np.int64), model.vocab, frozenset())
        self.seq = Canvas([*text, *[BLANK] * len(tokens)], history=history)
        self.ticket = Ticket(self.seq, self._ask)
        self.entries: list[TokenLogprob] = []

    async def _ask(self) -> None:
        target = self.model.handle()
        assert isinstance(target, ChainScorer), "checked"
        await target.conditionals(self.seq, list(self.tokens[:-1]))
        self.entries = self.seq.logprobs.given(self.seq.blanks.tolist(), list(self.tokens))

    def score(self) -> Score:
        """What was found; an error is raised."""
        if self.ticket.error is not None:
            raise self.ticket.error
        return Score(
            token_ids=list(self.tokens),
            logprobs=[entry["logprob"] for entry in self.entries],
            is_greedy=all(entry["logprob"] >= entry["top"][0]["logprob"] for entry in self.entries),
        )


def check_scores(model: DecodableModel) -> None:
    if not model.family.can(ChainScorer):
        raise NotAble(
            f"'{model.name}' (family '{model.family.name}') does not score completions, it could "
            f"only bound them: use an any-subset model, such as 'zoo:any-subset'."
        )


def scoring_of_prompt(model: DecodableModel, prompt: Sequence[int], top: int) -> Scoring | None:
    """The tokens of a prompt, each after those before it. The first one has none before it, and
    most models say nothing of it."""
    check_scores(model)
    start = 1 if model.family.needs_prompt else 0
    return Scoring(model, prompt[:start], prompt[start:], top) if prompt[start:] else None


def scorings(model: DecodableModel, prompt: Any, continuations: Any) -> list[Scoring]:
    """Continuations of one prompt, or each of its own."""
    check_scores(model)
    if isinstance(continuations, str) or not isinstance(continuations, Sequence):
        raise BadOption(f"continuations={continuations!r} must be a list of texts or token ids.")
    prompt = as_list(prompt)
    one = isinstance(prompt, str) or all(isinstance(token, int) for token in prompt)
    prompts = [prompt] * len(continuations) if one else prompt
    if len(prompts) != len(continuations):
        raise BadOption(
            f"{len(prompts)} prompts and {len(continuations)} continuations: give one prompt, or "
            f"one for each."
        )
    pairs = map(_pair, [model] * len(prompts), prompts, continuations)
    return [Scoring(model, text, tokens) for text, tokens in pairs]


def _pair(model: DecodableModel, prompt: Any, continuation: Any) -> tuple[list[int], list[int]]:
    """A prompt and what follows it as token ids. Text is tokenised together where that leaves the
    prompt's own tokens as they are."""
    text = encode(model, prompt)
    tokens = None
    if isinstance(prompt, str) and isinstance(continuation, str):
        whole = encode(model, prompt + continuation)
        if whole[: len(text)] == text:
            tokens = whole[len(text) :]
    if tokens is None:
        tokens = encode(model, as_list(continuation), special=False)
    check_ids([*text, *tokens], model)
    if not tokens or (not text and model.family.needs_prompt):
        empty = "prompt" if tokens else "continuation"
        raise BadOption(f"{empty} is empty: there is nothing to score.")
    if len(text) + len(tokens) > model.context:
        raise BadOption(
            f"prompt and continuation have {len(text) + len(tokens)} tokens, and the context of "
            f"'{model.name}' holds {model.context}: shorten them."
        )
    return text, tokens


def with_texts(model: DecodableModel, entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """The same, with the text of every token, where it is not told already. A part of a character
    has the mark for one that is broken."""

    def text(token: int) -> str:
        return model.decode([token], special=True)

    return [
        {
            **entry,
            "text": entry["text"] if "text" in entry else text(entry["token"]),
            "top": [{**other, "text": text(other["token"])} for other in entry["top"]],
        }
        for entry in entries
    ]
