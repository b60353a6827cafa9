"""Certification by testing: right methods pass, each planted fault is caught, and the error rate is
what it says."""

from dataclasses import replace

import pytest
import torch

import forerun.methods.speculative as speculative_file
import forerun.probability.acceptance
from forerun.certify.bets import Bets, faults
from forerun.certify.testing import certify
from forerun.errors import BadOption
from forerun.probability.outcomes import Verdict
from tests.helpers import fresh, model


def check(**how):
    return certify(fresh(), "speculative", draft=model("llama", seed=1), **how)


def test_a_right_method_holds_with_the_power_that_was_asked_for():
    verdict = check(alpha=0.01, beta=0.05)
    assert (
        verdict.verdict == "holds"
        and min(verdict.power.values()) >= 0.95
        and verdict.evidence < 100
    )


def test_it_holds_under_sampling_parameters_too():
    assert (
        check(
            temperature=0.7, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.2, beta=0.2
        ).verdict
        == "holds"
    )


def test_a_missing_residual_is_refuted(monkeypatch):
    monkeypatch.setattr(forerun.probability.acceptance, "residual", lambda p, q: p)
    verdict = check()
    assert verdict.verdict == "fails" and verdict.evidence >= 100


def test_drafts_accepted_unseen_are_refuted(monkeypatch):
    def wrong(x, q, p, sample):
        n = (x >= 0).sum(-1)
        return Verdict(n, sample(p[torch.arange(len(n)), n]))

    monkeypatch.setattr(speculative_file, "rejection", wrong)
    assert check().verdict == "fails"


def test_lookup_that_takes_its_copies_unseen_is_refuted(monkeypatch):
    def wrong(x, p, sample):
        n = (x >= 0).sum(-1)
        return Verdict(n, sample(p[torch.arange(len(n)), n]))

    monkeypatch.setattr(speculative_file, "matching", wrong)
    assert certify(fresh(), "lookup").verdict == "fails"


def test_too_few_sequences_leave_it_undecided():
    verdict = check(max_sequences=1, max_tokens=2)
    assert verdict.verdict == "undecided" and min(verdict.power.values()) < 0.95


def test_at_temperature_zero_tokens_are_compared(monkeypatch):
    assert check(temperature=0.0).verdict == "holds"

    def wrong(x, q, p, sample):
        return Verdict((x >= 0).sum(-1), sample(p[:, -1]))

    monkeypatch.setattr(speculative_file, "rejection", wrong)
    verdict = check(temperature=0.0)
    assert verdict.verdict == "fails" and not verdict.differences[0]["explained"]


def test_tokens_that_the_reference_cannot_write_refute(monkeypatch):
    """Generation that ignores top_k is refuted, though no bettor staked on it."""
    from forerun.engine import rules
    from forerun.probability import pending

    m, original = fresh(), pending.row_laws
    calls = {"top_k": True}

    def row_laws(logits, s):
        return original(logits, s if calls["top_k"] else [replace(x, top_k=0) for x in s])

    for module in (pending, rules):  # laws that a method gets, and those of plain text
        monkeypatch.setattr(module, "row_laws", row_laws)
    honest = m.submit

    def cheating(*args, **kwargs):
        calls["top_k"] = False  # before the engine's thread begins
        jobs = honest(*args, **kwargs)
        run = jobs.run

        def without_top_k():
            run()
            calls["top_k"] = True

        jobs.run = without_top_k
        return jobs

    m.submit = cheating
    verdict = certify(m, "ar", top_k=5)
    assert verdict.verdict == "fails" and verdict.impossible > 2


def test_sequences_of_one_test_never_share_their_noise(monkeypatch):
    m, seeds = fresh(), []
    honest = m.submit
    m.submit = lambda *args, **kwargs: seeds.append(kwargs["seed"]) or honest(*args, **kwargs)
    certify(m, "ar", max_sequences=20, max_tokens=4)
    assert len(seeds) == len(set(seeds)) >= 20


def test_the_error_rate_is_kept():
    """Runs that do have the law p are refuted no more often than alpha says."""
    p, q = (
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64),
    )
    generator, refuted = torch.Generator().manual_seed(0), 0
    for seed in range(150):
        bets = Bets(alpha=0.1, seed=seed, shadows=0)
        for token in torch.multinomial(p, 200, replacement=True, generator=generator).tolist():
            bets.record(token, p, q)
        refuted += bets.best >= bets.limit
    assert refuted <= 0.1 * 150 + 3 * (150 * 0.1 * 0.9) ** 0.5


def test_every_fault_is_a_law():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.0, 0.9, 0.1])
    for law in faults(p, q).values():
        assert law.sum() == pytest.approx(1, abs=1e-6) and (law >= 0).all()


def test_error_rates_must_be_probabilities():
    with pytest.raises(BadOption, match="alpha"):
        check(alpha=0)
