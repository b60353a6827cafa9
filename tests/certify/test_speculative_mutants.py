"""Planted mistakes, each of which the certification must catch. A check that no mistake can fail
proves nothing."""

import numpy as np
import torch

import forerun.methods.speculative as speculative_file
import forerun.probability.acceptance
from forerun.backbones.table import TableBackbone
from forerun.certify.enumeration import certify_case, table_model
from forerun.engine.cache import Memo
from forerun.probability.acceptance import rejection
from forerun.probability.distributions import prefix_lengths, residual
from forerun.probability.logits import ChainRows
from forerun.probability.noise import Noise, pick, uniform, uniforms
from forerun.probability.outcomes import Verdict
from forerun.sequence.canvas import BLANK, Canvas
from tests.helpers import caught

TARGET = TableBackbone(vocab=3, seed=1)
DRAFT = TableBackbone(vocab=3, seed=2, like=TARGET, blend=0.4, cost=0.1)


def certificate(**sampling):
    options = dict(draft=DRAFT, eos=(1,), method_options={"k": 2}, max_tokens=3, temperature=1.0)
    return certify_case("speculative", TARGET, [0, 1, 0], **{**options, **sampling})


def use_rule(monkeypatch, rule):
    monkeypatch.setattr(speculative_file, "rejection", rule)


def test_without_a_mutant_the_checks_pass():
    assert certificate().holds
    assert certificate(frequency_penalty=1.0, repetition_penalty=1.5).holds
    assert certificate(min_tokens=2).holds


def test_q_of_the_wrong_row_is_caught(monkeypatch):
    use_rule(
        monkeypatch,
        lambda x, q, p, sample: rejection(
            x, q.roll(1, 1) if q is not None and q.shape[1] > 1 else q, p, sample
        ),
    )
    assert caught(certificate())


def test_a_missing_residual_is_caught(monkeypatch):
    monkeypatch.setattr(forerun.probability.acceptance, "residual", lambda p, q: p)
    assert caught(certificate())


def test_an_unclipped_residual_is_caught(monkeypatch):
    monkeypatch.setattr(
        forerun.probability.acceptance,
        "residual",
        lambda p, q: (p - q).abs() / (p - q).abs().sum(-1, keepdim=True),
    )
    assert caught(certificate())


def test_a_bonus_from_the_wrong_row_is_caught(monkeypatch):
    def wrong(x, q, p, sample):
        return rejection(
            x, q, torch.cat([p[:, :-1], p[:, -2:-1]], 1) if p.shape[1] > 1 else p, sample
        )

    use_rule(monkeypatch, wrong)
    assert caught(certificate())


def test_a_reversed_ratio_is_caught(monkeypatch):
    def wrong(x, q, p, sample):
        if q is None:
            return rejection(x, q, p, sample)
        index = x.clamp(min=0)[..., None]
        pk, qk = p[:, : x.shape[1]].gather(-1, index)[..., 0], q.gather(-1, index)[..., 0]
        n = sample(prefix_lengths((qk / pk).clamp(max=1) * (x >= 0)))
        row, zero = torch.arange(len(n)), torch.zeros_like(p[:, :1])
        return Verdict(n, sample(residual(p[row, n], torch.cat([q, zero], 1)[row, n])))

    use_rule(monkeypatch, wrong)
    assert caught(certificate())


def test_drafts_accepted_unseen_are_caught(monkeypatch):
    def wrong(x, q, p, sample):
        n = (x >= 0).sum(-1)
        return Verdict(n, sample(p[torch.arange(len(n)), n]))

    use_rule(monkeypatch, wrong)
    assert caught(certificate())


def test_a_draft_that_lies_about_its_law_is_caught(monkeypatch):
    def wrong(x, q, p, sample):
        return rejection(x, None if q is None else q**2 / (q**2).sum(-1, keepdim=True), p, sample)

    use_rule(monkeypatch, wrong)
    assert caught(certificate())


def test_claiming_a_point_mass_for_any_draft_is_no_mistake(monkeypatch):
    """Slower, but exact: accepted with probability p, replaced from p without x. So it must not be
    called a mistake."""
    use_rule(monkeypatch, lambda x, q, p, sample: rejection(x, None, p, sample))
    assert certificate().holds


def test_penalties_ignored_inside_the_chain_are_caught(monkeypatch):
    monkeypatch.setattr(
        ChainRows, "_output_counts", lambda self, length: self.history.in_output_V.copy()
    )
    assert caught(certificate(frequency_penalty=1.0, repetition_penalty=1.5))


def test_a_minimum_length_ignored_inside_the_chain_is_caught(monkeypatch):
    original = ChainRows.edit

    def wrong(self, logits):
        return torch.cat([original(ChainRows(self.history, [], [0]), row[None]) for row in logits])

    monkeypatch.setattr(ChainRows, "edit", wrong)
    assert caught(certificate(min_tokens=2))


def test_a_stale_slot_is_caught(monkeypatch):
    monkeypatch.setattr(
        Memo, "start", lambda self, plan: min(self.held.shape[1], plan.stored, plan.first_read)
    )
    monkeypatch.setattr(
        Memo, "common_prefix", lambda self, text: min(self.held.shape[1], len(text))
    )
    assert caught(certificate())


def test_a_memo_one_row_too_long_is_caught(monkeypatch):
    original = Memo.start
    monkeypatch.setattr(
        Memo,
        "start",
        lambda self, plan: min(original(self, plan) + 1, plan.first_read, self.held.shape[1]),
    )
    common = Memo.common_prefix
    monkeypatch.setattr(
        Memo,
        "common_prefix",
        lambda self, text: min(common(self, text) + 1, self.held.shape[1], len(text)),
    )
    assert caught(certificate())


def test_an_end_that_does_not_end_the_draft_is_caught(monkeypatch):
    def fill(self, positions, tokens, reason, drafted=(), branches=()):
        ended = None
        for position, token in zip(positions, tokens):
            if self.tokens[position] == BLANK:
                self.tokens[position] = token
                self.finish_reason = None
                self._extend()
                ended = ended or self.finish_reason
        self.finish_reason = ended

    monkeypatch.setattr(Canvas, "ends", lambda self, token: False)
    assert certificate().holds, "a drafter that drafts past the end only wastes work"
    monkeypatch.setattr(Canvas, "fill", fill)
    assert caught(certificate())


def test_noise_that_depends_on_the_batch_is_caught(monkeypatch):
    """The check that batched equals alone, on the table model, fails for noise that is drawn by
    place in the batch."""

    def together_and_alone():
        prompts, how = (
            [[0, 1], [2], [1, 1, 0], [0, 2]],
            dict(method="ar", temperature=1.0, max_tokens=12, seed=3),
        )
        together = [r.token_ids for r in table_model(TARGET).generate(prompts, **how)]
        return together, [
            table_model(TARGET).generate(prompt, **how).token_ids for prompt in prompts
        ]

    together, alone = together_and_alone()
    assert together == alone

    def by_place(self, law):
        u = [uniform(key + place, draw, self.calls) for place, (key, draw) in enumerate(self.draws)]
        self.calls += 1
        return pick(law, torch.tensor(u, dtype=torch.float64))

    monkeypatch.setattr(Noise, "__call__", by_place)
    together, alone = together_and_alone()
    assert together != alone


def test_noise_used_twice_is_caught(monkeypatch):
    """Draws that repeat their noise change the law of whole sequences, though each token's law
    looks right on its own."""
    table = TableBackbone(vocab=3, seed=5)

    def share_of_repeats():
        results = table_model(table).generate([[0]], n=2000, temperature=3.0, max_tokens=2)
        return np.mean([r.token_ids[0] == r.token_ids[1] for r in results])

    fine = share_of_repeats()
    monkeypatch.setattr(
        "forerun.probability.noise.uniforms",
        lambda draws, first, count: uniforms([(key, 0) for key, _ in draws], first, count),
    )
    assert abs(share_of_repeats() - fine) > 0.1
