"""Planted mistakes in what sampling parameters do inside drafts and on canvases. Texts of three
tokens hid several of them; each must be caught by the law of the definition."""

import inspect
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch

import forerun.engine.engine as engine_file
import forerun.families.base as base_file
import forerun.probability.logits as logits_file
import forerun.probability.pending as pending_file
import forerun.sequence.question as question_file
from forerun.certify.cases import deep_cases
from forerun.drafters.autoregressive import ModelDrafter
from forerun.drafters.base import Draft
from forerun.drafters.diffusion import DiffusionDrafter
from forerun.errors import ForerunError
from forerun.families.causal import TreeScorer
from forerun.probability.logits import ChainRows
from forerun.sequence.canvas import Canvas
from forerun.sequence.question import Branch, BranchQuestion
from tests.certify.definitions import EXACT, certify_each
from tests.helpers import caught


def any_caught(method, *parameters):
    """Refused by a certificate, or stopped by the engine before. Only cases with these parameters
    are run: the others cannot show the mistake."""
    try:
        cases = [case for case in deep_cases(method) if case.keywords.keys() >= {*parameters}]
        return any(caught(certificate) for certificate in certify_each(cases))
    except (AssertionError, ForerunError):
        return True


def replant(monkeypatch, owner, name, old, new):
    """One piece of a function or method replaced."""
    original = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, source
    module = inspect.getmodule(original)
    space = dict(vars(module))
    exec(compile(source.replace(old, new), "mutant", "exec"), space)
    monkeypatch.setattr(owner, name, space[name])


def any_refused(method, *parameters):
    """Refused, though perhaps by little: what only a long draft shows is rare."""
    cases = [case for case in deep_cases(method) if case.keywords.keys() >= {*parameters}]
    return not all(certificate.holds for certificate in certify_each(cases))


ON_CANVASES = ["ssd", "block-ssd"]
ANYWHERE = ["ar", "assd", "stepwise", "block-stepwise"]


@pytest.mark.parametrize("method", ON_CANVASES)
def test_penalties_that_ignore_placed_tokens_are_caught(monkeypatch, method):
    replant(
        monkeypatch,
        base_file.ModelHandle,
        "ask_canvases",
        "[len(tokens)] * len(where)",
        "[0] * len(where)",
    )
    assert any_caught(method, "frequency_penalty")


@pytest.mark.parametrize("method", ANYWHERE)
def test_bias_after_the_penalties_is_caught(monkeypatch, method):
    def edit(self, logits_LV):
        sampling = self.history.sampling
        bias_V = torch.zeros(logits_LV.shape[-1], dtype=logits_LV.dtype)
        for token, bias in (sampling.logit_bias or {}).items():
            bias_V[token] = bias
        return original(self, logits_LV - bias_V) + bias_V

    original = ChainRows.edit
    monkeypatch.setattr(ChainRows, "edit", edit)
    assert any_caught(method, "logit_bias", "repetition_penalty")


@pytest.mark.parametrize("method", ANYWHERE)
def test_min_p_before_top_p_is_caught(monkeypatch, method):
    def row_laws(logits_RV, sampling):
        first = original(logits_RV, [replace(s, top_p=1.0) for s in sampling])
        then = [replace(s, temperature=1.0, top_k=0, min_p=0.0) for s in sampling]
        return original(first.log(), then)

    original = pending_file.row_laws
    monkeypatch.setattr(pending_file, "row_laws", row_laws)
    assert any_caught(method, "top_p", "min_p")


def test_tails_that_forget_the_chain_before_them_are_caught(monkeypatch):
    """Their penalties look back on the tail alone. Lookahead decides nothing after such tails."""

    def ask_branches(self, seq, chain, tails):
        plan = self.family.branches(seq, chain, tails)
        asked = [Branch(chain, range(len(chain) + 1))]
        asked += [Branch(tail.tokens, range(1, len(tail.tokens) + 1)) for tail in tails]
        return self.ask(seq, plan, asked)

    monkeypatch.setattr(TreeScorer, "_ask_branches", ask_branches)
    assert any_caught("multiblock", "frequency_penalty")


@pytest.mark.parametrize("method", ["stepwise", "ssd", "block-stepwise", "block-ssd"])
def test_ends_that_are_ignored_on_canvases_are_caught(monkeypatch, method):
    replant(
        monkeypatch,
        Canvas,
        "_publish_next_blank",
        "return self.ending(token)",
        "return None",
    )
    assert any_caught(method, "eos")


@pytest.mark.parametrize("method", [m for m in EXACT if m not in ("lookup", "specdiff")])
def test_a_minimum_length_that_is_off_by_one_is_caught(monkeypatch, method):
    replant(monkeypatch, ChainRows, "edit", "count < sampling", "count + 1 < sampling")
    assert any_caught(method, "min_tokens")


@pytest.mark.parametrize("method", ["stepwise", "ssd", "block-ssd"])
def test_a_minimum_length_counted_in_decisions_is_caught(monkeypatch, method):
    """On a canvas it counts places: a blank far ahead may be decided first."""
    replant(monkeypatch, BranchQuestion, "_chain", "if branch.positions is not None", "if False")
    assert any_caught(method, "min_tokens")


def test_a_draft_law_that_misses_the_penalty_is_caught(monkeypatch):
    """Tokens are drawn from the penalised law, and judged as if they came from another."""
    original = ModelDrafter.propose

    async def wrong(self, seq, k):
        draft = await original(self, seq, k)
        if draft.q is None:
            return draft
        count_NV = np.zeros(draft.q.shape)
        for row in range(1, len(draft.tokens)):
            count_NV[row] = count_NV[row - 1]
            count_NV[row, draft.tokens[row - 1]] += 1
        sampling = seq.history.sampling
        undone = torch.from_numpy(np.exp(sampling.frequency_penalty * count_NV))
        q = draft.q * undone
        return Draft(draft.positions, draft.tokens, q / q.sum(-1, keepdim=True))

    monkeypatch.setattr(ModelDrafter, "propose", wrong)
    assert any_caught("speculative", "frequency_penalty")


def test_a_draft_in_two_steps_that_forgets_the_first_is_caught(monkeypatch):
    original = DiffusionDrafter._marginals

    async def wrong(self, seq, now, placed, length):
        q = await original(self, seq, now, placed, length)
        self.__dict__.setdefault("drawn", []).append(q)
        return q

    async def fill(self, seq, positions):
        self.__dict__["drawn"] = []
        draft = await original_fill(self, seq, positions)
        if draft.q is None or len(self.drawn) < 2:
            return draft
        first = self.drawn[0]
        q = torch.cat([first, *[first[-1:]] * (len(draft.tokens) - len(first))])
        return Draft(draft.positions, draft.tokens, q[: len(draft.tokens)])

    original_fill = DiffusionDrafter.fill
    monkeypatch.setattr(DiffusionDrafter, "_marginals", wrong)
    monkeypatch.setattr(DiffusionDrafter, "fill", fill)
    assert any_caught("specdiff")


@pytest.mark.parametrize(
    "method, most",
    [("speculative", 4), ("jacobi", 4), ("lookup", 4), ("assd", 2), ("s2d2-exact", 3)],
)
def test_penalties_that_look_back_on_a_part_of_a_long_draft_are_caught(monkeypatch, method, most):
    """Only a longer draft shows it."""
    replant(
        monkeypatch,
        ChainRows,
        "_output_counts",
        "self.tokens[:length]",
        f"self.tokens[:min(length, {most})]",
    )
    assert any_refused(method, "frequency_penalty")


def test_a_presence_penalty_that_is_rounded_is_caught(monkeypatch):
    """As it was once: a bool times a number is float32, whatever the logits are."""
    replant(
        monkeypatch,
        logits_file,
        "penalise",
        "sampling.presence_penalty * present_LV",
        "sampling.presence_penalty * (output_LV > 0)",
    )
    assert any_refused("ar", "presence_penalty")


def test_confidence_under_the_sampling_parameters_is_caught(monkeypatch):
    """The model's own law decides which blank is surest, before any parameter."""
    monkeypatch.setattr(
        engine_file, "BlankLaws", lambda law, model_law: question_file.BlankLaws(law, law)
    )
    assert any_caught("stepwise") and any_caught("block-stepwise")
