"""`auto` drafts where it pays and nowhere else, and writes what plain decoding writes."""

from types import SimpleNamespace

import pytest

import forerun
import forerun.engine.costs as costs_file
import forerun.methods.auto as auto_file
from forerun.backbones.table import FREE_ROWS, TableBackbone
from forerun.certify.cases import STEEP
from forerun.certify.enumeration import certify_case, table_model
from forerun.drafters.base import Draft
from forerun.engine.costs import FixedCosts, StepCosts
from forerun.methods.sources import Drafted
from forerun.requests.traces import trace_lines
from tests.helpers import caught, fresh, model, tokens_of

REPEATING = [10, 20, 30, 40, 50] * 8
COSTLY = {1: 1.0, 2: 2.5, 3: 4.0}  # a drafted row costs more than the token that it could bring
FREE = FREE_ROWS


def with_costs(m, curve):
    """A model whose steps cost what we say."""
    m.host.costs = FixedCosts(curve)
    m.host.shared_state.clear()
    return m


def drafted(result):
    return sum(len(event.drafted) for event in result.trace)


def certificate(costs=STEEP, **options):
    target = TableBackbone(vocab=3, seed=1, step_costs=costs)
    draft = TableBackbone(vocab=3, seed=2, like=target, blend=0.4, cost=0.1)
    how = dict(draft=draft, eos=(1,), max_tokens=4, temperature=1.0)
    return certify_case(
        "auto", target, [0, 1, 0], method_options={"learn": False}, **{**how, **options}
    )


def test_what_drafts_cost_goes_by_forwards():
    """A block is one of them, however many tokens it has."""

    class Blocks:
        model = SimpleNamespace(costs=FixedCosts({1: 2.0}))

        def forwards(self, k):
            return [k]

    target = SimpleNamespace(costs=SimpleNamespace(draft_forward=lambda: None))
    assert Drafted(None, target, None, Blocks()).seconds(5) == 2.0
    target.costs.draft_forward = lambda: 3.0
    assert Drafted(None, target, None, Blocks()).seconds(5) == 3.0
    assert Drafted(None, target, None, object()).seconds(5) == 0.0


def test_every_draft_model_is_new_once():
    m = fresh()
    named = [fresh(), fresh(seed=1)]
    known = []
    sources = auto_file.sources_of

    def noted(*arguments):
        found = sources(*arguments)
        known.extend(each.known_as for each in found if each.name == "draft")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_file, "sources_of", noted)
        for draft in (*named, named[0]):
            m.generate([1, 2, 3], draft=draft, max_tokens=2)
    assert known[0] == known[2] != known[1]


def test_it_is_exact_where_rows_are_free_and_where_they_cost():
    assert certificate().holds
    assert certificate(FREE, max_tokens=3).holds
    assert certificate(FREE, draft=None, temperature=0.7).holds


def test_a_length_that_hangs_on_the_draft_is_caught(monkeypatch):
    """Whoever looks at a drawn draft and then decides how much of it to have judged changes the
    law."""
    original = auto_file.draft_by

    async def peeks(source, k, sources):
        draft = await original(source, k, sources)
        count = next((i for i, token in enumerate(draft.tokens) if token == 1), len(draft))
        q = None if draft.q is None or not count else draft.q[:count]
        return Draft(draft.positions[:count], draft.tokens[:count], q)

    monkeypatch.setattr(auto_file, "draft_by", peeks)
    assert caught(certificate(FREE, max_tokens=3))
    # A copy of the text is known beforehand: there is nothing to peek at.
    assert certificate(FREE, max_tokens=3, draft=None).holds


def test_nothing_is_drafted_where_it_does_not_pay():
    m = with_costs(fresh(), COSTLY)
    result = m.generate(REPEATING, max_tokens=40)
    assert result.method == "auto" and drafted(result) == 0
    assert result.stats.choices == {"none": result.stats.forwards}


def test_copies_are_drafted_where_rows_are_free():
    m = with_costs(fresh(), FREE)
    result = m.generate(REPEATING, max_tokens=40)
    assert result.stats.choices.get("lookup", 0) + result.stats.choices.get("jacobi", 0) > 0
    assert result.token_ids == m.generate(REPEATING, max_tokens=40, method="ar").token_ids


def test_nothing_is_drafted_where_nothing_is_known():
    """Processes that share a model never know what forwards cost: they must all decide alike."""
    m = fresh()
    m.host.know_costs = lambda lane: None
    result = m.generate(REPEATING, max_tokens=12)
    assert result.stats.choices == {"none": 12}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.8])
def test_the_text_is_plain_decodings_whatever_is_chosen(temperature):
    """At any temperature, token for token: choices hang on times and company, texts must not."""
    m = fresh()
    prompts = [REPEATING, [7], [5, 5, 5, 9, 5, 5]]
    how = dict(max_tokens=24, temperature=temperature, seed=11)
    plain = tokens_of(m.generate(prompts, method="ar", **how))
    for curve in (FREE, STEEP, COSTLY):
        with_costs(m, curve)
        assert tokens_of(m.generate(prompts, **how)) == plain
        assert [m.generate(prompt, **how).token_ids for prompt in prompts] == plain
    for method, options in [("lookup", {"k": 3}), ("jacobi", {"block": 5})]:
        assert tokens_of(m.generate(prompts, method=method, **options, **how)) == plain


def test_a_draft_model_is_used_while_it_is_right():
    target = TableBackbone(vocab=8, seed=1, sharpness=6.0)
    good = TableBackbone(vocab=8, seed=2, like=target, blend=1.0, cost=0.1)
    bad = TableBackbone(vocab=8, seed=3, sharpness=6.0, cost=0.1)
    shares = []
    for draft in (good, bad):
        m = table_model(target)
        m.host.costs = FixedCosts({1: 1.0, 2: 1.1, 8: 1.7}, draft_forward=0.3)
        result = m.generate([1, 2], draft=table_model(draft), max_tokens=40)
        assert result.token_ids == m.generate([1, 2], method="ar", max_tokens=40).token_ids
        shares.append(result.stats.choices.get("draft", 0) / result.stats.forwards)
    assert shares[0] > 0.9 and shares[1] < 0.5


def test_what_was_seen_of_a_draft_model_is_known_to_the_next_request():
    m = table_model(TableBackbone(vocab=8, seed=1, sharpness=6.0))
    m.host.costs = FixedCosts({1: 1.0, 2: 1.1, 8: 1.7}, draft_forward=0.3)
    bad = table_model(TableBackbone(vocab=8, seed=3, sharpness=6.0, cost=0.1))
    tries = []
    for prompt in range(6):
        result = m.generate([prompt, 2], draft=bad, max_tokens=24)
        tries.append(result.stats.choices.get("draft", 0))
    assert tries[0] > 0 and sum(tries[3:]) <= 2


def test_a_drafter_that_fails_is_dropped_and_said_so():
    target = TableBackbone(vocab=8, seed=1, sharpness=6.0)
    draft = TableBackbone(vocab=8, seed=2, like=target, blend=1.0, cost=0.1)
    m = table_model(target)
    drafting = table_model(draft)
    plain = m.generate([1, 2], max_tokens=20, method="ar")
    forward = draft.forward
    calls = []

    def breaks(batch, slots):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("out of order")
        return forward(batch, slots)

    draft.forward = breaks
    result = m.generate([1, 2], draft=drafting, max_tokens=20)
    assert result.token_ids == plain.token_ids and result.error is None
    [note] = result.stats.notes
    assert "draft" in note and "dropped" in note and "out of order" in note
    with pytest.raises(RuntimeError, match="out of order"):  # other methods need theirs
        m.generate([1, 2], method="speculative", draft=drafting, max_tokens=20)


def test_drafts_shrink_as_the_batch_fills():
    m = fresh(lanes=8)
    m.generate([1, 2], max_tokens=1)  # what costs are measured for
    costs = m.host.costs
    costs.corrects = False
    costs.curve = {1: 1.0, 8: 1.0, 16: 8.0, 64: 32.0}  # eight rows are as cheap as one

    def rows_drafted(count):
        m.host.shared_state.clear()
        results = m.generate([REPEATING] * count, max_tokens=32)
        return sum(map(drafted, results)) / count

    assert rows_drafted(8) < rows_drafted(1) / 2


def test_it_is_the_default_everywhere():
    for name in ("llama", "gpt2"):
        assert model(name).generate([1, 2], max_tokens=2).method == "auto"
    named = model().generate([1, 2], max_tokens=2, method="auto")
    assert (named.method, named.guarantee, named.reference) == (
        "auto",
        "exact",
        f"ar on {model().name}",
    )


def test_other_families_say_which_method_was_taken_and_why():
    for name, method in [("zoo:any-subset", "assd"), ("zoo:masked", "stepwise")]:
        m = forerun.load(name)
        for asked in ({}, {"method": "auto"}):
            result = m.generate("def", max_tokens=2, **asked)
            [note] = result.stats.notes
            assert result.method == method and f"auto took method '{method}': " in note
        assert m.generate("def", max_tokens=2, method=method).stats.notes == []


def test_it_says_what_it_chose_and_why():
    result = with_costs(fresh(), FREE).generate(REPEATING, max_tokens=30, record=True)
    lines = trace_lines(result, 0, lambda tokens: "")
    told = [line for line in lines if line["kind"] == "choice"]
    assert [line["drafter"] for line in told] == [choice.drafter for choice in result.choices]
    assert len(result.choices) == result.stats.forwards
    for choice in result.choices[:-1]:  # of the last token there is nothing to choose
        assert choice.expected >= 1 and choice.seconds > 0 and choice.plain_seconds > 0
    assert sum(result.stats.choices.values()) == len(result.choices)


def test_all_begin_to_draft_where_one_alone_would_not_pay(monkeypatch):
    """Whoever drafts first takes from all others what is begun ahead: only together it pays."""
    m = table_model(TableBackbone(vocab=8, seed=1, sharpness=9.0))
    costs = m.host.costs = StepCosts("cpu")
    costs.corrects = False
    costs.curve = {1: 1.0, 600: 1.0}
    # a judged step takes twice as long, however many rows it has
    monkeypatch.setitem(costs_file.JUDGED_SECONDS, "cpu", 1.0)
    results = m.generate([[1, 2, 3] * 9] * 8, max_tokens=36, logit_bias={1: 30.0})
    shares = [1 - r.stats.choices.get("none", 0) / r.stats.forwards for r in results]
    assert min(shares) > 0.3
    assert m.host.company.sequences == 0


def test_all_use_a_draft_model_where_none_alone_would():
    """Its forwards hold up everybody: a draft for one of eight is never worth it, for all it is."""
    target = TableBackbone(vocab=8, seed=1, sharpness=9.0)
    shares = []
    for count in (1, 8):
        m = table_model(target)
        costs = m.host.costs = StepCosts("cpu")
        costs.corrects = False
        costs.curve = {1: 1.0, 600: 1.0}
        same = TableBackbone(
            vocab=8, seed=2, like=target, blend=1.0, cost=0.1, step_costs={1: 0.3, 2: 0.3}
        )
        for n in range(8 - count):
            m.submit([3, n], method="ar", max_tokens=40)
        how = dict(draft=table_model(same), max_tokens=40)
        results = m.generate([[1, n] for n in range(count)], **how)
        drafted_by = [r.stats.choices.get("draft", 0) / r.stats.forwards for r in results]
        shares.append(min(drafted_by))
    assert shares[0] < 0.2 and shares[1] > 0.5
