"""How likely a judge, a left-to-right model, finds a text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from forerun.api import Model
from forerun.certify.bets import Bets
from forerun.certify.testing import laws_along
from forerun.errors import NotAble, TokenizerMismatch
from forerun.families.base import ChainScorer
from forerun.options import Sampling
from forerun.requests.request import check_same_tokens
from forerun.requests.result import Result

ALPHA = 0.01


def check_judge(judge: Model, model: Model) -> None:
    """Refuse a judge that cannot score text, or whose tokens are others."""
    if not judge.family.can(ChainScorer):
        raise NotAble(
            f"judge='{judge.name}' (family '{judge.family.name}') scores no text: use a "
            f"left-to-right model, such as 'zoo:ar'."
        )
    check_same_tokens(model, judge)


def surprises(judge: Model, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """How surprised a judge is by each (prompt, completion), in nats per token."""
    twin = judge.twin()
    return [_surprise(twin, prompt, output) for prompt, output in texts]


def _surprise(judge: Model, prompt: Sequence[int], output: Sequence[int]) -> float:
    laws_TV = laws_along(judge, prompt, output, Sampling(temperature=1.0), frozenset())
    picked_T = laws_TV[torch.arange(len(output)), torch.tensor(output)]
    return float(-picked_T.double().log().mean())


def perplexity(judge: Model, tokens: Sequence[int]) -> float:
    """How surprised a judge is by a sequence, from its second token on (Guo & Ermon, equation
    21)."""
    return math.exp(_surprise(judge, tokens[:1], tokens[1:]))


def completion_perplexity(judge: Model, model: Model, results: Sequence[Result]) -> float | None:
    """How surprised a judge is by all completions together; None if its tokens are others."""
    try:
        check_same_tokens(judge, model)
    except TokenizerMismatch:
        return None
    nats = surprises(judge, [(result.prompt_ids, result.token_ids) for result in results])
    lengths = [len(result.token_ids) for result in results]
    total = sum(n * length for n, length in zip(nats, lengths))
    return math.exp(total / sum(lengths))


def law_p_value(model: Model, results: Sequence[Result], temperature: float) -> float:
    """A p-value, valid whenever one looks, of the hypothesis that the output has the model's law:
    one over the largest mean stake against it (`certify.bets`)."""
    twin = model.twin()
    sampling = Sampling(temperature=temperature)
    bets = Bets(alpha=ALPHA, shadows=0)
    for result in results:
        laws_TV = laws_along(twin, result.prompt_ids, result.token_ids, sampling, model.eos)
        for token, p_V in zip(result.token_ids, laws_TV):
            bets.record(token, p_V, None)
    return 0.0 if bets.impossible else min(1.0, 1 / bets.best)
