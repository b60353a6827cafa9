"""Planted mistakes in drafts that look into their target: certification must catch each."""

import pytest

from forerun.backbones.table import TableBackbone
from forerun.certify.cases import feature_families
from forerun.certify.enumeration import certify_case
from forerun.drafters.base import Draft
from forerun.drafters.features import FeaturesDrafter
from forerun.probability.markov import Markov
from tests.helpers import caught

TARGET = TableBackbone(vocab=4, seed=1)
DRAFT = TableBackbone(vocab=4, seed=2, like=TARGET, blend=0.5, cost=0.1)
PLAIN, CORRECTED, AUTOREGRESSIVE = feature_families(4)
HOW = dict(draft=DRAFT, max_tokens=4, logit_bias={3: -1e6}, temperature=1.0)


def certificate(family):
    options = {"k": 2}
    return certify_case(
        "specdiff", TARGET, [0, 1], draft_family=family, method_options=options, **HOW
    )


def test_laws_that_do_not_know_the_token_before_are_caught(monkeypatch):
    """Drawn with the correction, judged without it."""
    original = FeaturesDrafter._corrected

    async def wrong(self, seq, k, markov):
        tokens, _ = await original(self, seq, k, markov)
        laws = await self.model.block(seq, k)
        return tokens, laws.law

    monkeypatch.setattr(FeaturesDrafter, "_corrected", wrong)
    assert caught(certificate(CORRECTED))


def test_a_correction_by_the_wrong_token_is_caught(monkeypatch):
    original = FeaturesDrafter._corrected

    async def wrong(self, seq, k, markov):
        tokens, q = await original(self, seq, k, markov)
        return tokens, q.roll(1, 0)

    monkeypatch.setattr(FeaturesDrafter, "_corrected", wrong)
    assert caught(certificate(CORRECTED))


def test_draws_hotter_than_their_laws_are_caught(monkeypatch):
    law = Markov.law
    calls = []

    def wrong(self, law_NV, before_N, temperature):
        calls.append(temperature)
        hotter = 3.0 if len(law_NV.shape) == 2 and len(calls) % 3 else temperature
        return law(self, law_NV, before_N, hotter)

    monkeypatch.setattr(Markov, "law", wrong)
    assert caught(certificate(CORRECTED))


@pytest.mark.parametrize("family", [PLAIN, AUTOREGRESSIVE])
def test_laws_of_other_tokens_are_caught(monkeypatch, family):
    original = FeaturesDrafter.propose

    async def wrong(self, seq, k):
        draft = await original(self, seq, k)
        q = draft.q.roll(1, 0) if draft.q is not None else None
        return Draft(draft.positions, draft.tokens, q)

    monkeypatch.setattr(FeaturesDrafter, "propose", wrong)
    assert caught(certificate(family))
