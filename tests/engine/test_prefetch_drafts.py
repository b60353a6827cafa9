"""What is begun ahead around a draft changes only speed: the forward that judges it, before the
draft is known, and the next draft, before the verdict is."""

import pytest
import torch

pytest.importorskip("triton")

import forerun
from forerun.engine import prefetch as prefetch_file
from forerun.engine import prefetch_drafts
from forerun.engine.cache import Memo
from forerun.engine.continuation import WrittenBatch
from forerun.engine.engine import Engine
from forerun.engine.graphs import ForwardRunner
from forerun.engine.prefetch_drafts import DraftPrefetch, JudgePrefetch
from tests import kernels_in_torch
from tests.helpers import PROMPTS, stepped

SAMPLINGS = {
    "greedy": {},
    "sampled": dict(temperature=0.8, top_p=0.9, seed=5),
    "told": dict(temperature=1.0, logprobs=2, stop=["e"], seed=3),
    "colder drafts": dict(temperature=0.9, draft_temperature=0.5, seed=4),
}


@pytest.fixture
def begun(monkeypatch):
    """Every engine goes ahead, over fixed memory as on a GPU; the list that comes back grows by the
    kind of what was begun ahead and asked for."""
    kernels_in_torch.use(monkeypatch)
    monkeypatch.setattr(prefetch_file, "LEAST_COST", 0)
    monkeypatch.setattr(Engine, "prefetches", True)
    kinds = []
    finish = Engine._finish_prefetched

    def noted(self, served):
        kinds.append((type(self._prefetched).__name__, len(served)))
        return finish(self, served)

    monkeypatch.setattr(Engine, "_finish_prefetched", noted)
    return kinds


def pair(lanes, same=False, **settings):
    """A model and another that drafts for it; the `same` one is nearly always right."""
    how = dict(lanes=lanes, max_context=128, graphs=True, **settings)
    return forerun.load("tiny:llama", **how), forerun.load(
        "tiny:llama" if same else "tiny:qwen2", **how
    )


def speculate(lanes, same=False, prompts=PROMPTS[:3], **options):
    m, draft = pair(lanes, same)
    how = dict(method="speculative", draft=draft, k=3, max_tokens=40, ignore_eos=True)
    return m, said(m.generate(prompts, **{**how, **options}))


def said(results):
    return [
        (r.token_ids, r.text, r.finish_reason, r.stats.forwards, r.stats.draft_forwards, likely(r))
        for r in results
    ]


def likely(result):
    return [round(entry["logprob"], 4) for entry in result.logprobs or ()]


@pytest.mark.parametrize("same", [False, True], ids=["wrong drafts", "right drafts"])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_going_ahead_changes_only_speed(sampling, lanes, same, begun, monkeypatch):
    _, went = speculate(lanes, same, **SAMPLINGS[sampling])
    kinds = {kind for kind, _ in begun}
    assert {"JudgePrefetch", "DraftPrefetch"} <= kinds
    monkeypatch.setattr(Engine, "prefetches", False)
    assert went == speculate(lanes, same, **SAMPLINGS[sampling])[1]


def test_nearly_every_step_of_a_whole_batch_begins_ahead(begun):
    _, results = speculate(3)
    judged = begun.count(("JudgePrefetch", 3))
    drafted = begun.count(("DraftPrefetch", 3))
    steps = min(forwards for *_, forwards, _, _ in results)
    assert judged >= steps - 4 and drafted >= steps - 10, begun


@pytest.mark.parametrize("end", [9, 15], ids=["in a draft", "after one"])
def test_a_text_that_ends_leaves_the_others_what_was_begun(end, begun):
    m, whole = speculate(2, same=True, prompts=PROMPTS[:2])
    begun.clear()
    m, draft = pair(2, same=True)
    stepped(m)
    how = dict(method="speculative", draft=draft, k=3, max_tokens=40, ignore_eos=True)
    text = whole[0][0]
    jobs = [m.submit(PROMPTS[0], stop_token_ids=[text[end]], **how), m.submit(PROMPTS[1], **how)]
    m.engine.run()
    first, second = (job.results()[0] for job in jobs)
    assert first.token_ids == text[: end + 1]
    assert said([second]) == whole[1:], "as many forwards, too: its draft is its own"
    assert any(count == 1 for _, count in begun) and any(count == 2 for _, count in begun)
    assert m.engine._drafted is None, "a finished request is not held"


def test_who_joins_in_the_midst_changes_nothing(begun):
    _, alone = speculate(1, prompts=PROMPTS[:3])
    m, draft = pair(3)
    stepped(m)
    how = dict(method="speculative", draft=draft, k=3, max_tokens=40, ignore_eos=True)
    jobs = []
    for prompt in PROMPTS[:3]:
        jobs.append(m.submit(prompt, **how))
        for _ in range(9):
            m.engine.step()
    m.engine.run()
    assert [job.results()[0].token_ids for job in jobs] == [tokens for tokens, *_ in alone]


@pytest.mark.parametrize("pattern", [(3, 2), (3, 3, 2)])
def test_whoever_surprises_twice_is_not_foreseen_any_more(pattern, begun, monkeypatch):
    monkeypatch.setattr(prefetch_drafts, "ALIKE", len(pattern) - 1)
    went_ahead = []
    monkeypatch.setattr(
        DraftPrefetch, "follow", lambda self, logits: went_ahead.append(1) or FOLLOW(self, logits)
    )
    m, draft = pair(1)
    lengths = iter(pattern * 100)
    monkeypatch.setattr(
        "forerun.drafters.adaptive.PayingLength.__call__", lambda self: next(lengths)
    )
    how = dict(method="speculative", draft=draft, max_tokens=40, ignore_eos=True)
    went = m.generate(PROMPTS[0], **how).token_ids
    assert went == m.generate(PROMPTS[0], method="ar", max_tokens=40, ignore_eos=True).token_ids
    assert len(went_ahead) == prefetch_drafts.SURPRISES
    assert {kind for kind, _ in begun} == {"JudgePrefetch", "TokenPrefetch"}


def test_models_so_small_that_the_host_takes_longer_are_left_alone(begun, monkeypatch):
    monkeypatch.setattr(prefetch_file, "LEAST_COST", 5e7)
    speculate(2)
    assert not {kind for kind, _ in begun} & {"JudgePrefetch", "DraftPrefetch"}


def test_what_has_no_size_is_not_captured_again_and_again(begun, monkeypatch):
    """And what the draft model's slots hold is not thrown away for it."""
    tried = []
    monkeypatch.setattr(ForwardRunner, "can_capture", lambda self, batch: tried.append(1) and False)
    monkeypatch.setattr(ForwardRunner, "capture_unmoved", lambda self, batch: 1 / 0)
    _, results = speculate(3)
    assert tried and not any(kind == "DraftPrefetch" for kind, _ in begun)
    monkeypatch.setattr(Engine, "prefetches", False)
    assert results == speculate(3)[1]


def test_slots_that_drafts_were_written_to_in_vain_are_not_believed(begun):
    """The next request finds both lanes as if nothing had gone ahead."""
    m, draft = pair(1, same=True)
    how = dict(method="speculative", draft=draft, k=3, max_tokens=30, ignore_eos=True)
    text = m.generate(PROMPTS[0], **how).token_ids
    for end in range(8, 20):
        m.generate(PROMPTS[0], **{**how, "stop_token_ids": [text[end]]})
        again = m.generate([*PROMPTS[0], *text[: end + 3]], **how)
        for host in m.engine.hosts:
            host.forget()
        fresh = m.generate([*PROMPTS[0], *text[: end + 3]], **how)
        assert said([again])[0][:5] == said([fresh])[0][:5]


def other_row(self, applied):
    batch = BATCHES[type(self)](self, applied)
    batch.drawn_T = batch.drawn_T.roll(1)
    return batch


def not_moved(self, applied):
    batch = BATCHES[DraftPrefetch](self, applied)
    batch.moved = batch.moved._replace(steps_B=torch.zeros_like(batch.moved.steps_B))
    return batch


def same_noise(self, logits_RV):
    self.draws = [number - 1 for number in self.draws]
    return FOLLOW(self, logits_RV)


BATCHES = {kind: kind.batch for kind in (JudgePrefetch, DraftPrefetch)}
FOLLOW = DraftPrefetch.follow
MUTANTS = {
    "a draft that is judged by another's rows": (JudgePrefetch, "batch", other_row),
    "a draft after another's tokens": (DraftPrefetch, "batch", other_row),
    "rows that are not moved on": (DraftPrefetch, "batch", not_moved),
    "noise that was used before": (DraftPrefetch, "follow", same_noise),
    "slots that are still believed": (Memo, "keep", lambda self, rows: None),
    "another's draft": (WrittenBatch, "only", lambda self, numbers: self),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_its_mutants_are_caught(mutant, begun, monkeypatch):
    owner, name, body = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, body)
    with pytest.raises(AssertionError):
        for same in (False, True):
            test_going_ahead_changes_only_speed("sampled", 3, same, begun, monkeypatch)
            monkeypatch.setattr(Engine, "prefetches", True)
        test_slots_that_drafts_were_written_to_in_vain_are_not_believed(begun)
        test_a_text_that_ends_leaves_the_others_what_was_begun(15, begun)
