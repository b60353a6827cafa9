"""How likely a judge, a left-to-right model, finds a text. A judge may have tokens of its own."""

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


Completion = tuple[Sequence[int], Sequence[int]]  # prompt and output


def check_judge(judge: Model, model: Model) -> None:
    """Refuse a judge that cannot score text, or that cannot read what the model writes."""
    if not judge.family.can(ChainScorer):
        raise NotAble(
            f"judge='{judge.name}' (family '{judge.family.name}') scores no text: use a "
            f"left-to-right model, such as 'zoo:ar'."
        )
    if not _same_tokens(judge, model) and None in (judge.tokenizer, model.tokenizer):
        check_same_tokens(model, judge)


def _same_tokens(judge: Model, model: Model) -> bool:
    try:
        check_same_tokens(judge, model)
    except TokenizerMismatch:
        return False
    return True


def judged(judge: Model, model: Model, texts: Iterable[Completion]) -> list[Completion]:
    """Prompts and outputs in the judge's own tokens: a judge with other tokens reads their text.

    What does not fit its context loses its beginning.
    """
    texts = list(texts)
    if not _same_tokens(judge, model):
        texts = [_retokenised(judge, model, prompt, output) for prompt, output in texts]
    return [_fitting(judge, prompt, output) for prompt, output in texts]


def _retokenised(
    judge: Model, model: Model, prompt: Sequence[int], output: Sequence[int]
) -> Completion:
    before = model.decode(prompt)
    whole = model.decode([*prompt, *output])
    known = judge.encode(before)
    tokens = judge.encode(whole)
    if tokens[: len(known)] != known:  # a token of the judge's reaches over the edge
        return known, judge.encode(whole[len(before) :], special=False)
    return known, tokens[len(known) :]


def _fitting(judge: Model, prompt: Sequence[int], output: Sequence[int]) -> Completion:
    output = output[: judge.context - 1]
    room = judge.context - len(output)
    return prompt[max(0, len(prompt) - room) :], output


def surprises(judge: Model, texts: Iterable[Completion], model: Model | None = None) -> list[float]:
    """How surprised a judge is by each (prompt, completion) of a model, in nats per token of the
    judge's. Without a model, the tokens are the judge's."""
    if model is not None:
        texts = judged(judge, model, texts)
    twin = judge.twin()
    return [_surprise(twin, prompt, output) for prompt, output in texts]


def _surprise(judge: Model, prompt: Sequence[int], output: Sequence[int]) -> float:
    laws_TV = laws_along(judge, prompt, output, Sampling(temperature=1.0), frozenset())
    picked_T = laws_TV[torch.arange(len(output)), torch.tensor(output)]
    return float(-picked_T.double().log().mean())


def perplexity(judge: Model, tokens: Sequence[int], model: Model | None = None) -> float:
    """How surprised a judge is by a sequence of a model's, from its second token on (Guo & Ermon,
    equation 21)."""
    if model is not None and not _same_tokens(judge, model):
        tokens = judge.encode(model.decode(tokens))
    [(first, rest)] = judged(judge, judge, [(tokens[:1], tokens[1:])])
    return math.exp(_surprise(judge, first, rest))


def completion_perplexity(judge: Model, model: Model, results: Sequence[Result]) -> float | None:
    """How surprised a judge is by all completions together, per token of the judge's; None if it
    cannot read them."""
    if not _same_tokens(judge, model) and None in (judge.tokenizer, model.tokenizer):
        return None
    texts = judged(judge, model, [(result.prompt_ids, result.token_ids) for result in results])
    texts = [(prompt, output) for prompt, output in texts if prompt and output]
    if not texts:
        return None
    nats = surprises(judge, texts)
    lengths = [len(output) for _, output in texts]
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
