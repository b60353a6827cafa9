"""Predicted outputs are exact whatever is predicted, and mistakes planted in them are caught."""

import torch

import forerun.drafters.predicted as drafter_file
import forerun.methods.speculative as speculative_file
from forerun.backbones.table import TableBackbone
from forerun.certify.enumeration import certify_case
from forerun.drafters.base import Draft
from forerun.probability.outcomes import Verdict
from tests.helpers import caught

TARGET = TableBackbone(vocab=3, seed=1)


def certificate(prediction=(0, 2, 0, 1), **options):
    given = {"k": 2, "prediction": list(prediction)}
    how = dict(eos=(1,), method_options=given, max_tokens=4, temperature=1.0)
    return certify_case("predicted", TARGET, [0, 1, 0], **{**how, **options})


def test_without_a_mutant_the_checks_pass():
    assert certificate().holds
    assert certificate([2, 2, 2, 2]).holds
    assert certificate(temperature=0.6, frequency_penalty=1.0).holds


def test_a_prediction_that_is_believed_is_caught(monkeypatch):
    def believe(x, p, sample):
        n = (x >= 0).sum(-1)
        return Verdict(n, sample(p[torch.arange(len(n)), n]))

    monkeypatch.setattr(speculative_file, "matching", believe)
    assert caught(certificate())


def test_a_prediction_that_claims_to_be_drawn_is_caught(monkeypatch):
    original = drafter_file.PredictedDrafter.propose

    async def wrong(self, seq, k):
        draft = await original(self, seq, k)
        q = torch.full((len(draft), seq.history.vocab), 1 / seq.history.vocab)
        return Draft(draft.positions, draft.tokens, q.double() if len(draft) else None)

    monkeypatch.setattr(drafter_file.PredictedDrafter, "propose", wrong)
    assert caught(certificate())


def test_a_place_that_is_wrong_costs_time_and_is_no_mistake(monkeypatch):
    monkeypatch.setattr(drafter_file.Alignment, "after", lambda self, output: 0)
    assert certificate().holds
