"""Planted mistakes in any-subset decoding, each of which the certification must catch."""

import inspect
import textwrap

import numpy as np

import forerun.methods.assd as assd_file
from forerun.backbones.table import TableBackbone
from forerun.certify.cases import HOLES
from forerun.certify.enumeration import certify_case
from forerun.engine.host import Host
from forerun.families.any_subset import AnySubset
from forerun.probability.acceptance import rejection
from forerun.probability.outcomes import Verdict
from forerun.sequence.rows import HI, HORIZON, LO, POSITION, Plan
from tests.helpers import caught

TARGET = TableBackbone(vocab=4, seed=1)


def certificates(**options):
    return (
        certify_case(
            "assd",
            TARGET,
            hole,
            mask=3,
            temperature=1.0,
            method_options={"k": 2, "ahead": ahead, **options},
        )
        for hole in HOLES[:3]
        for ahead in ("none", "whole", "every")
    )


def any_caught():
    return any(caught(c) for c in certificates())


def replant(monkeypatch, function, old, new):
    """The function with one piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source
    space = dict(vars(assd_file))
    exec(compile(source.replace(old, new), "mutant", "exec"), space)
    monkeypatch.setattr(assd_file, function.__name__, space[function.__name__])
    return space


def change_plan(monkeypatch, change):
    """Rows as the family makes them, changed: (rows, number of content rows, sequence)."""
    original = AnySubset._plan

    def wrong(self, seq, chain, branches):
        plan = original(self, seq, chain, branches)
        rows, stored = plan.rows.copy(), plan.stored
        stored = change(rows, stored, seq) or stored
        return Plan(rows, plan.reads, stored)

    monkeypatch.setattr(AnySubset, "_plan", wrong)


def test_without_a_mutant_the_checks_pass():
    assert all(c.holds for c in certificates())


def test_a_first_token_kept_unseen_though_its_law_was_asked_early_is_caught(monkeypatch):
    replant(
        monkeypatch,
        assd_file.self_drafted,
        "first_is_certain = q is None",
        "first_is_certain = True",
    )
    assert any_caught()


def test_a_ratio_against_the_wrong_row_is_caught(monkeypatch):
    replant(monkeypatch, assd_file.self_drafted, "q = q[1:]", "q = q[:-1]")
    assert any_caught()


def test_a_bonus_after_a_rejection_instead_of_the_residual_is_caught(monkeypatch):
    def wrong(x, q, p, sample):
        n = rejection(x, q, p, sample).accepted
        return Verdict(n, sample(p[np.arange(len(n)), n]))

    monkeypatch.setattr(assd_file, "rejection", wrong)
    assert any_caught()


def test_laws_of_a_draft_in_the_wrong_order_are_caught(monkeypatch):
    replant(
        monkeypatch, assd_file.judge, "seq.draw(rule, x, q, p)", "seq.draw(rule, x, q.flip(0), p)"
    )
    table, hole = TableBackbone(vocab=3, seed=1), [0, None, None, None, None]
    options = dict(mask=2, temperature=1.0, method_options={"k": 3, "ahead": "whole"})
    assert caught(certify_case("assd", table, hole, **options))


def test_a_query_that_sees_the_token_it_is_to_predict_is_caught(monkeypatch):
    def change(rows, stored, seq):
        rows[HORIZON, stored:] = np.minimum(rows[HORIZON, stored:] + 1, stored)

    change_plan(monkeypatch, change)
    assert any_caught()


def test_decided_tokens_that_join_the_given_ones_are_caught(monkeypatch):
    def change(rows, stored, seq):
        decided = len(seq.given) + seq.filled
        rows[HORIZON, :decided] = decided

    change_plan(monkeypatch, change)
    assert any_caught()


def test_a_prompt_that_does_not_see_itself_whole_is_caught(monkeypatch):
    def change(rows, stored, seq):
        rows[HORIZON, :stored] = np.arange(1, stored + 1)

    change_plan(monkeypatch, change)
    assert any_caught()


def test_queries_that_see_each_other_are_caught(monkeypatch):
    def change(rows, stored, seq):
        rows[LO, stored:], rows[HI, stored:] = stored, rows.shape[1]

    change_plan(monkeypatch, change)
    assert any_caught()


def test_positions_in_decoding_order_are_caught(monkeypatch):
    def change(rows, stored, seq):
        rows[POSITION, :stored] = np.arange(stored)

    change_plan(monkeypatch, change)
    assert any_caught()


def test_blanks_decided_from_right_to_left_are_caught(monkeypatch):
    original = AnySubset._chain_queries
    monkeypatch.setattr(
        AnySubset, "_chain_queries", staticmethod(lambda seq, chain: flipped(original(seq, chain)))
    )
    assert any_caught()


def flipped(queries):
    return np.stack([queries[:, 0], queries[::-1, 1]], 1)


def test_a_mask_that_may_be_written_is_caught(monkeypatch):
    original = Host.__init__
    monkeypatch.setattr(
        Host,
        "__init__",
        lambda self, backbone, lanes, room, impossible=(), *more: original(
            self, backbone, lanes, room, (), *more
        ),
    )
    assert any_caught()
