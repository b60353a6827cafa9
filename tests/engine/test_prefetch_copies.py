"""Copies that are found on the device, and judged before the host knows them, change only speed."""

from contextlib import suppress

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import forerun
from forerun.drafters.lookup import LookupDrafter, continuation
from forerun.engine import copies_kernel, prefetch_copies
from forerun.engine import prefetch as prefetch_file
from forerun.engine.copies import plain_copies
from forerun.engine.copies_kernel import find_copies
from forerun.engine.engine import Engine
from forerun.engine.prefetch_copies import CopyPrefetch
from forerun.engine.rules import Applied, Decided
from forerun.families.base import ChainScorer
from forerun.probability.acceptance import matching
from forerun.registry import BUILT_IN, NoOptions, method
from forerun.sequence.canvas import Canvas
from tests import kernels_in_torch
from tests.helpers import PROMPTS, stepped

SAMPLINGS = {
    "greedy": {},
    "sampled": dict(temperature=0.8, top_p=0.9, seed=5),
    "long copies": dict(k=9, adapt=False),
    "stopped": dict(temperature=1.0, stop=["e"], seed=3),
    "told": dict(temperature=1.0, logprobs=2, seed=3),
}


@pytest.fixture
def begun(monkeypatch):
    """Every engine goes ahead, over fixed memory as on a GPU; the list that comes back grows by how
    many were given what was begun."""
    kernels_in_torch.use(monkeypatch)
    monkeypatch.setattr(prefetch_file, "LEAST_COST", 0)
    monkeypatch.setattr(prefetch_copies, "LEAST_COST_EACH", 0)
    monkeypatch.setattr(Engine, "prefetches", True)
    served_of = []
    finish = Engine._finish_prefetched

    def noted(self, served):
        if isinstance(self._prefetched, CopyPrefetch):
            served_of.append(len(served))
        return finish(self, served)

    monkeypatch.setattr(Engine, "_finish_prefetched", noted)
    return served_of


def model(lanes, **settings):
    return forerun.load("tiny:llama", lanes=lanes, max_context=128, graphs=True, **settings)


def looked_up(m, prompts=PROMPTS[:3], **options):
    how = dict(method="lookup", max_tokens=40, ignore_eos=True)
    if options.get("method", "lookup") == "lookup":
        how["k"] = 10  # else it would hang on what forwards cost here
    return said(m.generate(prompts, **{**how, **options}))


def said(results):
    return [(r.token_ids, r.text, r.finish_reason, *likely(r)) for r in results]


def likely(result):
    """Nearly, as it is added up in another order beside other rows."""
    return [pytest.approx(entry["logprob"], abs=1e-3) for entry in result.logprobs or ()]


@pytest.fixture
def mostly_right(begun, monkeypatch):
    """Copies that are what will be written, but for every fifth token: chance hardly repeats
    itself."""
    whole = [
        [*prompt, *result.token_ids]
        for prompt in PROMPTS[:3]
        for result in model(1).generate([prompt], method="ar", max_tokens=90, ignore_eos=True)
    ]

    def follows(text, count):
        [known] = [one for one in whole if one[: len(text)] == text]
        places = range(len(text), len(text) + count)
        return [7 if at % 5 == 4 else known[at] for at in places]

    def found(tokens_BT, end_B, token_B, longest_run, count):
        rows = zip(tokens_BT.tolist(), end_B.tolist(), token_B.tolist())
        return torch.tensor([follows([*row[:end], token], count) for row, end, token in rows])

    monkeypatch.setattr(prefetch_copies, "copies_after", found)
    monkeypatch.setattr(
        "forerun.drafters.lookup.continuation",
        lambda text, longest, count: follows(text.tolist(), count),
    )
    begun.clear()


def test_copies_that_are_accepted_are_gone_on_from(mostly_right, begun, monkeypatch):
    how = dict(k=10, max_tokens=40, ignore_eos=True)
    results = model(3).generate(PROMPTS[:3], method="lookup", **how)
    steps = min(r.stats.forwards for r in results)
    assert steps < 16 and begun.count(3) >= steps - 4, begun
    monkeypatch.setattr(Engine, "prefetches", False)
    plain = model(3).generate(PROMPTS[:3], method="ar", max_tokens=40, ignore_eos=True)
    assert said(results) == said(plain)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_going_ahead_changes_only_speed(sampling, lanes, begun, monkeypatch):
    went = looked_up(model(lanes), **SAMPLINGS[sampling])
    assert begun
    monkeypatch.setattr(Engine, "prefetches", False)
    assert went == looked_up(model(lanes), **SAMPLINGS[sampling])


def test_nearly_every_step_begins_ahead(begun):
    how = dict(k=10, max_tokens=40, ignore_eos=True)
    results = model(3).generate(PROMPTS[:3], method="lookup", **how)
    steps = min(r.stats.forwards for r in results)
    assert begun.count(3) >= steps - 4, begun


def test_many_texts_of_a_small_model_are_left_to_the_host(begun, monkeypatch):
    cost = model(1).backbone.cost
    monkeypatch.setattr(prefetch_copies, "LEAST_COST_EACH", cost / 2)
    looked_up(model(3))
    assert not begun
    looked_up(model(2), prompts=PROMPTS[:2])
    assert 2 in begun


@pytest.mark.parametrize("find", [plain_copies, find_copies])
@pytest.mark.parametrize("seed", range(20))
def test_the_device_finds_the_copies_that_the_host_finds(find, seed, monkeypatch):
    monkeypatch.setattr(copies_kernel, "STRETCH", 8)
    rng = np.random.default_rng(seed)
    vocab, count = int(rng.integers(2, 12)), int(rng.integers(1, 9))
    run = int(rng.integers(1, 5))
    lengths = rng.integers(1, 30, size=4)
    accepted = [int(rng.integers(0, length + 1)) for length in lengths]
    texts = [rng.integers(0, vocab, size=length) for length in lengths]
    token_B = torch.from_numpy(rng.integers(0, vocab, size=4))
    tokens_BT = torch.zeros(4, 31, dtype=torch.long)
    for row_T, text in zip(tokens_BT, texts):
        row_T[: len(text)] = torch.from_numpy(text)
    found = find(tokens_BT, torch.tensor(accepted), token_B, run, count).tolist()
    for text, end, token, copied in zip(texts, accepted, token_B.tolist(), found):
        whole = np.array([*text[:end], token], np.int32)
        assert copied == (continuation(whole, run, count) or [-1] * count)


@pytest.mark.parametrize("prompts,much", [(1, 4), (2, 30)])
def test_texts_that_are_too_much_to_search_are_left_to_the_host(prompts, much, begun, monkeypatch):
    right = looked_up(model(2), prompts=PROMPTS[:prompts])
    assert begun
    monkeypatch.setattr(prefetch_copies, "MOST_SEARCHED", much)
    begun.clear()
    assert looked_up(model(2), prompts=PROMPTS[:prompts]) == right and len(begun) < 20
    monkeypatch.setattr(prefetch_copies, "MOST_SEARCHED", 0)
    begun.clear()
    assert looked_up(model(2), prompts=PROMPTS[:prompts]) == right and not begun


def test_more_rows_than_are_captured_are_not_made_for_nothing(begun, monkeypatch):
    rows = []
    make = CopyPrefetch.batch

    def noted(self, applied):
        rows.append(sum(self.rows_of.values()))
        return make(self, applied)

    monkeypatch.setattr(CopyPrefetch, "batch", noted)
    right = looked_up(model(3), k=9, adapt=False)
    assert max(rows) == 30
    rows.clear()
    monkeypatch.setattr(prefetch_copies, "SIZES", (1, 20))
    assert looked_up(model(3), k=9, adapt=False) == right and max(rows) <= 20


def test_a_text_that_ends_leaves_the_others_what_was_begun(mostly_right, begun):
    whole = looked_up(model(2), prompts=PROMPTS[:2])
    begun.clear()
    m = stepped(model(2))
    how = dict(method="lookup", k=10, max_tokens=40, ignore_eos=True)
    text = whole[0][0]
    jobs = [m.submit(PROMPTS[0], stop_token_ids=[text[25]], **how), m.submit(PROMPTS[1], **how)]
    m.engine.run()
    first, second = (job.results()[0] for job in jobs)
    assert first.token_ids == text[: text.index(text[25]) + 1] and said([second]) == whole[1:]
    assert 1 in begun and 2 in begun


def test_who_joins_in_the_midst_changes_nothing(mostly_right, begun):
    alone = [looked_up(model(1), prompts=[prompt])[0] for prompt in PROMPTS[:3]]
    m = stepped(model(3))
    jobs = []
    for prompt in PROMPTS[:3]:
        jobs.append(m.submit(prompt, method="lookup", k=10, max_tokens=40, ignore_eos=True))
        for _ in range(7):
            m.engine.step()
    m.engine.run()
    assert said(job.results()[0] for job in jobs) == alone


def test_lost_pages_are_not_begun_ahead_from(mostly_right, begun, monkeypatch):
    right = looked_up(model(1), prompts=PROMPTS[:1])
    arrive = Engine._arrive
    lost = []

    def losing(self, served, *rest):
        loses = served[0].seq.known % 3 == 0
        if loses:
            self.hosts[0].memos[0].release()
        arrive(self, served, *rest)
        if loses:
            assert not isinstance(self._prefetched, CopyPrefetch)
            lost.append(1)

    monkeypatch.setattr(Engine, "_arrive", losing)
    assert looked_up(model(1), prompts=PROMPTS[:1]) == right and lost


def interrupted_at(left, outcomes):
    def interrupted(self):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return outcomes(self)

    return interrupted


@pytest.mark.parametrize("logprobs", [None, 0])  # draws in the step that asks, and after it
@pytest.mark.parametrize("at", range(1, 9))
def test_an_interrupt_before_outcomes_arrive_changes_nothing(
    at, logprobs, mostly_right, begun, monkeypatch
):
    """The draw is made again, and the slots may not hold any more what it judged."""
    how = dict(k=6, adapt=False, max_tokens=40, ignore_eos=True)
    if logprobs is not None:
        how["logprobs"] = logprobs
    right = looked_up(model(1), prompts=PROMPTS[:1], **how)
    left = [at]
    for kind in (Applied, Decided):
        monkeypatch.setattr(kind, "outcomes", interrupted_at(left, kind.outcomes))
    m = stepped(model(1))
    job = m.submit(PROMPTS[0], method="lookup", **how)
    while m.engine.busy:
        with suppress(KeyboardInterrupt):
            m.engine.step()
    assert said(job.results()) == right and left[0] < 0 and begun


def test_drafts_of_many_lengths_find_their_pages(mostly_right, begun, caplog):
    """Slots are claimed as far on as the longest draft reaches; so pages are counted."""
    how = dict(max_tokens=60, ignore_eos=True)
    want = [r.token_ids for r in model(1).generate(PROMPTS[:2], method="ar", **how)]
    for page, slots in ((4, 100), (8, 104), (8, 108), (16, 112)):
        m = stepped(model(2))
        m.engine.page, m.engine.slots = page, slots
        jobs = [
            m.submit(prompt, method="lookup", k=k, adapt=False, **how)
            for prompt, k in zip(PROMPTS, (16, 1))
        ]
        m.engine.run()
        assert [job.results()[0].token_ids for job in jobs] == want
    assert not [r for r in caplog.records if "begun ahead failed" in r.message]


@method("roundabout", guarantee="exact", reference="ar")
async def roundabout(seq: Canvas, target: ChainScorer, options: NoOptions) -> None:
    """Lookup that asks for something else between a draft and the verdict on it."""
    while seq.goes_on():
        draft = await LookupDrafter(adapt=False).propose(seq, min(6, seq.remaining - 1))
        [laws] = await target.conditionals(seq, draft.tokens)
        await target.next_law(seq)
        verdict = await seq.draw(matching, draft.tokens, laws)
        n = verdict.accepted
        seq.draws += n
        seq.fill(draft.positions[:n], draft.tokens[:n], "accepted", drafted=draft.tokens)
        if not seq.done:
            seq.append(verdict.token, "sampled")


def test_a_verdict_on_something_else_moves_no_row_out_of_its_slots(
    mostly_right, begun, monkeypatch, caplog
):
    monkeypatch.setattr(prefetch_copies, "copies_after", plain_copies)
    monkeypatch.setitem(BUILT_IN["methods"], "roundabout", f"{__name__}:roundabout")
    moved = []

    def noted(steps_B, most):
        moved.append((steps_B, most))
        return MOVED(steps_B, most)

    monkeypatch.setattr(prefetch_copies, "Moved", noted)
    right = [text for text, *_ in looked_up(model(1), prompts=PROMPTS[:1], method="ar")]
    found = looked_up(model(1), prompts=PROMPTS[:1], method="roundabout")
    assert [text for text, *_ in found] == right
    assert all(int(steps_B.max()) <= most for steps_B, most in moved)
    assert not [r for r in caplog.records if "begun ahead failed" in r.message]


def test_a_drafter_that_wants_others_gets_them(begun, monkeypatch):
    """Whoever does not take what was begun is surprised twice, and then left alone."""
    right = looked_up(model(1), prompts=PROMPTS[:1])
    monkeypatch.setattr(
        "forerun.drafters.lookup.continuation", lambda text, longest, k: [1 + len(text) % 7] * k
    )
    monkeypatch.setattr("forerun.sequence.canvas.Canvas.take_begun_draft", lambda self: None)
    begun.clear()
    assert looked_up(model(1), prompts=PROMPTS[:1]) == right
    assert len(begun) <= 3


def always_three(tokens_BT, end_B, token_B, longest_run, count):
    return torch.full((len(tokens_BT), count), 3)


def of_another(self, tokens_BL):
    return ONLY_ASKED(self, torch.cat([tokens_BL[:, :1], tokens_BL[:, 1:].flip(0)], 1))


ONLY_ASKED = CopyPrefetch._only_asked
MOVED = prefetch_copies.Moved
BEGINS = "forerun.engine.prefetch_drafts._begins_with"
MUTANTS = {
    "rows that stay where they are": lambda patch: patch.setattr(
        prefetch_copies, "Moved", lambda steps_B, most: MOVED(0 * steps_B, most)
    ),
    "rows that go too far": lambda patch: patch.setattr(
        prefetch_copies, "Moved", lambda steps_B, most: MOVED(steps_B + 1, most + 1)
    ),
    "believing every guess": lambda patch: (
        patch.setattr(BEGINS, lambda foreseen, asked: True),
        patch.setattr("forerun.sequence.canvas.Canvas.take_begun_draft", lambda self: None),
        patch.setattr(prefetch_copies, "copies_after", always_three),
    ),
    "rows of another's draft": lambda patch: patch.setattr(CopyPrefetch, "_only_asked", of_another),
}


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_its_mutants_are_caught(mutant, mostly_right, begun, monkeypatch):
    right = looked_up(model(3))
    begun.clear()
    MUTANTS[mutant](monkeypatch)
    try:
        same = looked_up(model(3)) == right
    except Exception:
        same = False
    assert begun and not same


def test_any_copy_will_do(begun, monkeypatch):
    """What is drafted decides nothing."""
    right = looked_up(model(3))
    monkeypatch.setattr(prefetch_copies, "copies_after", always_three)
    begun.clear()
    assert looked_up(model(3)) == right and begun
