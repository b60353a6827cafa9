"""Planted mistakes in masked decoding, each of which the certification must catch."""

import inspect
import textwrap

import numpy as np

import forerun.methods.ssd as ssd_file
import forerun.methods.stepwise as stepwise_file
from forerun.backbones.table import TableBackbone
from forerun.certify.enumeration import certify_case
from forerun.drafters.base import Draft
from forerun.drafters.diffusion import DiffusionDrafter
from forerun.families.masked import Masked
from forerun.probability.selection import most_confident
from forerun.sequence.rows import HI, HORIZON, LO, Plan
from tests.helpers import caught

TARGET = TableBackbone(vocab=3, seed=1)
MIXED = {"drafts": 3, "tree": "mixed"}


class Loose(dict):
    """Leads that look at a part of a choice only."""

    def __init__(self, leads, part):
        super().__init__({(node, part(placed)): to for (node, placed), to in leads.items()})
        self.part = part

    def __contains__(self, key):
        return super().__contains__((key[0], self.part(key[1])))

    def __getitem__(self, key):
        return super().__getitem__((key[0], self.part(key[1])))


def certificates():
    return (
        certify_case(
            "ssd", TARGET, hole, mask=2, temperature=t, method_options=dict(MIXED, block=block)
        )
        for hole in (
            [None, 0, None, None, 1],
            [0, 1, None, None, None],
            [None, None, 0, None, None],
        )
        for block in (2, 9)
        for t in (1.0, 0.0)
    )


def any_caught():
    """Refused by the certificate, or stopped before by the canvas, which lets no blank be decided
    twice."""
    try:
        return any(caught(c) for c in certificates())
    except AssertionError as error:
        return "decided already" in str(error)


def with_loop(old, new):
    """The certificates with one piece of the loop replaced."""
    original = ssd_file.verify
    source = textwrap.dedent(inspect.getsource(original))
    assert old in source
    space = {**vars(ssd_file), "Loose": Loose}
    exec(compile(source.replace(old, new), "mutant", "exec"), space)
    try:
        ssd_file.verify = space["verify"]
        return any_caught()
    finally:
        ssd_file.verify = original


def test_without_a_mutant_the_checks_pass():
    assert all(c.holds for c in certificates())


def test_drafts_that_are_never_compared_are_caught():
    assert with_loop(
        "if (node, choices[-1]) in leads:\n            path.append(leads[node, choices[-1]])",
        "if node + 1 < len(nodes):\n            path.append(node + 1)",
    )


def test_a_verdict_on_the_token_without_its_position_is_caught():
    assert with_loop(
        "leads = plant_tree(guesses, order, options)",
        "leads = plant_tree(guesses, order, options); "
        "leads = Loose(leads, lambda placed: placed[1])",
    )


def test_a_verdict_on_the_position_without_its_token_is_caught():
    assert with_loop(
        "leads = plant_tree(guesses, order, options)",
        "leads = plant_tree(guesses, order, options); "
        "leads = Loose(leads, lambda placed: placed[0])",
    )


def test_a_node_of_the_mixed_tree_that_lacks_its_draft_is_caught(monkeypatch):
    def wrong(guesses, most):
        nodes, leads = original(guesses, most)
        return [node[:-1] if i > len(guesses) else node for i, node in enumerate(nodes)], leads

    original = ssd_file.mixed
    monkeypatch.setattr(ssd_file, "mixed", wrong)
    assert any_caught()


def test_blanks_of_the_next_block_among_the_open_ones_are_caught():
    assert with_loop(
        "stepwise_choice(seq, open_at[node], laws, order.by)",
        "stepwise_choice(seq, look_at[node], answers[node], order.by)",
    )


def test_the_least_sure_blank_first_is_caught(monkeypatch):
    def least(count, by):
        rule = most_confident(count, by)
        return lambda where, law, own, sample: rule(where, law, 1 - own, sample)

    monkeypatch.setattr(ssd_file, "most_confident", least)
    assert any_caught()


def test_the_least_sure_blank_first_is_caught_in_the_reference_too(monkeypatch):
    rule = most_confident(1)
    monkeypatch.setattr(
        stepwise_file,
        "most_confident",
        lambda count, by: lambda where, law, own, sample: rule(where, law, 1 - own, sample),
    )
    assert caught(
        certify_case(
            "stepwise",
            TARGET,
            [0, None, None, None],
            mask=2,
            temperature=1.0,
            method_options={"block": 9},
        )
    )


def test_a_diffusion_draft_with_the_laws_of_other_tokens_is_caught(monkeypatch):
    original = DiffusionDrafter.propose

    async def wrong(self, seq, k):
        draft = await original(self, seq, k)
        return Draft(
            draft.positions, draft.tokens, draft.q.roll(1, 0) if draft.q is not None else None
        )

    monkeypatch.setattr(DiffusionDrafter, "propose", wrong)
    target = TableBackbone(vocab=4, seed=1)
    draft = TableBackbone(vocab=4, seed=2, like=target, blend=0.5, cost=0.1)
    how = dict(
        draft=draft, draft_family=Masked(3), max_tokens=3, logit_bias={3: -1e6}, temperature=1.0
    )
    assert caught(certify_case("specdiff", target, [0, 1], method_options={"k": 2}, **how))


def test_canvases_that_see_each_other_are_caught(monkeypatch):
    original = Masked.canvases

    def wrong(self, seq, positions, placed, scope):
        plan = original(self, seq, positions, placed, scope)
        rows = plan.rows.copy()
        rows[HORIZON], rows[LO], rows[HI] = rows.shape[1], 0, 0
        return Plan(rows, plan.reads, plan.stored, plan.trusted)

    monkeypatch.setattr(Masked, "canvases", wrong)
    assert any_caught()


def test_tokens_placed_on_the_wrong_canvas_are_caught(monkeypatch):
    original = Masked.canvases
    monkeypatch.setattr(
        Masked,
        "canvases",
        lambda self, seq, at, placed, scope: original(
            self, seq, at, [placed[0]] * len(placed), scope
        ),
    )
    assert any_caught()


def test_rows_read_one_position_off_are_caught(monkeypatch):
    original = Masked.canvases

    def wrong(self, seq, positions, placed, scope):
        plan = original(self, seq, positions, placed, scope)
        return Plan(
            plan.rows, [np.maximum(r - 1, 0) for r in plan.reads], plan.stored, plan.trusted
        )

    monkeypatch.setattr(Masked, "canvases", wrong)
    assert any_caught()
