"""Planted mistakes in block decoding and self-speculation, each of which the certification must
catch."""

import inspect
import textwrap

import numpy as np
import pytest
import torch

import forerun.methods.routers as routers_file
import forerun.methods.s2d2 as s2d2_file
from forerun.backbones.table import TableBackbone
from forerun.certify.enumeration import certify_case
from forerun.families.block import Block
from forerun.methods.block_order import ModelBlockOrder
from forerun.sequence.rows import HI, HORIZON, LO, POSITION, TOKEN, Plan
from tests.helpers import caught

TARGET = TableBackbone(vocab=3, seed=1)
PROMPTS = ([0], [0, 1, 0], [1, 0, 1, 1])


def exact_cases(shifted=False):
    own = dict(mask=2, family=Block(2, 4, shifted), max_tokens=3, temperature=1.0)
    for prompt in PROMPTS:
        for ahead in ("whole", "every"):
            yield certify_case(
                "s2d2-exact", TARGET, prompt, method_options={"k": 2, "ahead": ahead}, **own
            )


def local_cases(shifted=False, block=2):
    own = dict(mask=2, family=Block(2, 4, shifted), size=block, max_tokens=3, temperature=1.0)
    for prompt in PROMPTS:
        yield certify_case("s2d2", TARGET, prompt, method_options={"block": block}, **own)


def stepwise_cases(method="block-ssd", shifted=False):
    own = dict(mask=2, family=Block(2, 4, shifted), max_tokens=4, temperature=1.0)
    for prompt in PROMPTS:
        yield certify_case(method, TARGET, prompt, method_options={"block": 3}, **own)


def any_caught(cases):
    try:
        return any(caught(case) for case in cases)
    except AssertionError as error:
        return "decided already" in str(error)


def replanted(monkeypatch, name, old, new):
    """One piece of a function of s2d2's file replaced."""
    original = getattr(s2d2_file, name)
    run = getattr(original, "run", original)
    source = textwrap.dedent(inspect.getsource(run))
    assert old in source
    space = dict(vars(s2d2_file))
    exec(compile(source[source.index("async def") :].replace(old, new), "mutant", "exec"), space)
    if run is original:
        monkeypatch.setattr(s2d2_file, name, space[name])
    else:
        before = original.run
        object.__setattr__(original, "run", space[name])
        return lambda: object.__setattr__(original, "run", before)
    return lambda: None


def test_without_a_mutant_the_checks_pass():
    cases = [
        *exact_cases(),
        *exact_cases(True),
        *local_cases(),
        *local_cases(True),
        *stepwise_cases(),
        *stepwise_cases(shifted=True),
    ]
    assert all(case.holds for case in cases)


def test_a_draft_judged_by_the_laws_of_other_tokens_is_caught(monkeypatch):
    undo = replanted(monkeypatch, "judge_run", "q[: len(x)]", "q[: len(x)].roll(1, 0)")
    assert any_caught(local_cases())
    undo()


def test_accepting_without_a_verdict_is_caught(monkeypatch):
    replanted(monkeypatch, "judge_run", "n = verdict.accepted", "n = len(x)")
    assert any_caught(local_cases())


def test_a_rejected_token_that_stays_is_caught(monkeypatch):
    replanted(
        monkeypatch,
        "judge_run",
        'seq.fill(blanks[n : n + 1], [verdict.token], "resampled")',
        'seq.fill(blanks[n : n + 1], [x[n]], "resampled")',
    )
    assert any_caught(local_cases())


def test_a_verdict_that_reads_finished_blocks_otherwise_than_they_are_kept_is_caught(monkeypatch):
    original = Block.verdict

    def wrong(self, seq, chain, span):
        return original(self, seq, chain, type(span)(span.start, span.end, span.size, "text"))

    monkeypatch.setattr(Block, "verdict", wrong)
    assert any_caught(local_cases())


def test_queries_that_see_each_other_are_caught(monkeypatch):
    original = Block._score

    def wrong(self, *args):
        plan = original(self, *args)
        rows = plan.rows.copy()
        queries = rows[TOKEN] == self.mask_token
        if queries.any():
            first = int(queries.argmax())
            rows[LO, queries], rows[HI, queries] = first, rows.shape[1]
        return Plan(rows, plan.reads, plan.stored)

    monkeypatch.setattr(Block, "_score", wrong)
    assert any_caught(exact_cases()) and any_caught(local_cases())


def test_a_query_that_sees_the_token_it_asks_about_is_caught(monkeypatch):
    original = Block._mask_rows

    def wrong(self, first, size, slot):
        rows = original(self, first, size, slot)
        if size == 1:
            rows[HORIZON] += 1
        return rows

    monkeypatch.setattr(Block, "_mask_rows", wrong)
    assert any_caught(exact_cases())


def test_a_query_one_place_off_is_caught(monkeypatch):
    original = Block._mask_rows

    def wrong(self, first, size, slot):
        rows = original(self, first, size, slot)
        rows[POSITION] += size == 1
        return rows

    monkeypatch.setattr(Block, "_mask_rows", wrong)
    assert any_caught(exact_cases())


def test_rows_of_a_shifted_model_read_as_if_it_were_aligned_are_caught(monkeypatch):
    original = Block._score

    def wrong(self, *args):
        plan = original(self, *args)
        most = plan.rows.shape[1] - 1
        return Plan(plan.rows, [np.minimum(read + 1, most) for read in plan.reads], plan.stored)

    monkeypatch.setattr(Block, "_score", wrong)
    assert any_caught(local_cases(shifted=True, block=4))


def test_a_bonus_token_from_the_wrong_row_is_caught(monkeypatch):
    original = s2d2_file.judge

    async def wrong(seq, x, q, p, *rest):
        return await original(seq, x, q, torch.cat([p[:-1], p[:1]]), *rest)

    monkeypatch.setattr(s2d2_file, "judge", wrong)
    assert any_caught(exact_cases())


def test_drafts_of_another_prefix_are_harmless_but_their_laws_must_be_their_own(monkeypatch):
    """A draft may be anything, as long as it is judged by the law it was drawn from."""
    undo = replanted(
        monkeypatch, "s2d2_exact", "q = q[: len(x)] if", "q = q.roll(1, -1)[: len(x)] if"
    )
    try:
        assert any_caught(exact_cases())
    finally:
        undo()


def test_a_block_that_sees_the_next_one_is_caught(monkeypatch):
    original = Block._text_rows

    def wrong(self, tokens, span):
        rows = original(self, tokens, span)
        rows[HORIZON, : span.start] += 1
        return rows

    monkeypatch.setattr(Block, "_text_rows", wrong)
    assert any_caught(stepwise_cases("block-stepwise"))


def test_blocks_counted_from_the_end_of_the_prompt_are_caught(monkeypatch):
    def wrong(self):
        base = int(self.seq.blanks[0])
        start = base + (self.seq.first_blank - base) // self.block * self.block
        return original(self).__class__(
            start, min(start + self.block, len(self.seq.tokens)), self.block, self.causal
        )

    original = ModelBlockOrder.span
    monkeypatch.setattr(ModelBlockOrder, "span", wrong)
    assert any_caught(stepwise_cases("block-stepwise"))


def test_canvases_of_a_block_that_see_each_other_are_caught(monkeypatch):
    original = Block.blocks

    def wrong(self, seq, positions, placed, span):
        plan = original(self, seq, positions, placed, span)
        rows = plan.rows.copy()
        if len(placed) > 1:
            rows[HORIZON, span.start :], rows[LO], rows[HI] = rows.shape[1], 0, 0
        return Plan(rows, plan.reads, plan.stored)

    monkeypatch.setattr(Block, "blocks", wrong)
    assert any_caught(stepwise_cases())


def test_a_shifted_block_that_does_not_begin_with_its_first_token_is_caught(monkeypatch):
    monkeypatch.setattr(ModelBlockOrder, "alone", property(lambda self: False))
    assert any_caught(stepwise_cases("block-stepwise", shifted=True))


def test_drawing_again_until_a_draft_pleases_is_caught(monkeypatch):
    original = routers_file.RouterDriver.draft

    async def choosy(self, blanks, laws):
        found = await original(self, blanks, laws)
        sure = all(float(laws.model_law[i, x]) > 0.4 for i, x in enumerate(found.tokens))
        return found if sure else await original(self, blanks, laws)

    monkeypatch.setattr(routers_file.RouterDriver, "draft", choosy)
    assert any_caught(local_cases())


@pytest.mark.parametrize("stale", [1, 2])
def test_slots_trusted_too_long_are_caught(monkeypatch, stale):
    """Rows of the block kept although what they saw has changed."""
    from forerun.engine.cache import Memo

    original = Memo.start

    def wrong(self, plan):
        most = min(self.held.shape[1], plan.stored, plan.first_read)
        same = (self.held[:2, :most] == plan.rows[:2, :most]).all(0)
        return (
            max(original(self, plan), most if same.all() else int(same.argmin()))
            if most > stale
            else original(self, plan)
        )

    monkeypatch.setattr(Memo, "start", wrong)
    assert any_caught(local_cases()) or any_caught(stepwise_cases("block-stepwise"))
