"""What is begun ahead of a verdict, with a drafter that looks into its target, changes only speed:
its next block, what is drawn from it and the forward about that, as far on as the last draft will
be accepted."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")

import forerun
from forerun.backbones.features import FeatureBackbone
from forerun.backbones.lean import LeanBackbone
from forerun.drafters.features import FeaturesDrafter
from forerun.engine import graphs, prefetch_looks, prefetch_rounds, rules
from forerun.engine.engine import Engine
from forerun.engine.prefetch_looks import DrawnAhead, LookPrefetch, MovesOn
from forerun.methods import speculative
from forerun.probability.markov import draw_chain
from forerun.probability.outcomes import Verdict
from tests.drafters.test_features import make_drafter
from tests.engine import test_prefetch_drafts
from tests.helpers import PROMPTS, stepped

begun = test_prefetch_drafts.begun  # a fixture
said = test_prefetch_drafts.said

LONG = [[*prompt, *range(20, 27)] for prompt in PROMPTS[:3]]  # longer than a draft
SAMPLINGS = {
    "greedy": dict(temperature=0),
    "sampled": dict(temperature=1.0, seed=5),
    "told": dict(temperature=1.0, logprobs=2, stop=["e"], seed=3),
    "now longer, now shorter": dict(temperature=1.0, adapt=True, k=4, seed=2),
}
KINDS = {
    "by token": dict(markov_rank=3, draft_vocab=200),
    "at once": dict(feature_norms=True),
}


@pytest.fixture
def agreeing(monkeypatch):
    """Target and drafter both like the same token at a position, so that about half of a draft is
    accepted; all else that they say is their own."""

    def liking(forward, later):
        def liked(self, batch, slots):
            logits_RV = forward(self, batch, slots)
            tokens_R = (batch.positions_T[batch.reads_R] + later) * 7 % 200
            bonus_R1 = torch.full((len(tokens_R), 1), 10.0, dtype=logits_RV.dtype)
            return logits_RV.scatter_add(1, tokens_R[:, None], bonus_R1)

        return liked

    monkeypatch.setattr(LeanBackbone, "forward", liking(LeanBackbone.forward, 1))
    monkeypatch.setattr(FeatureBackbone, "forward", liking(FeatureBackbone.forward, 0))


@pytest.fixture(autouse=True)
def adapted(monkeypatch):
    """Drafts that adapt are now longer and now shorter."""
    length = "forerun.drafters.features.adaptive_length"
    monkeypatch.setattr(length, lambda seq, k: min(k, 2 + seq.known % 3 // 2))


@pytest.fixture
def step_by_step(monkeypatch):
    """No device goes on with several rounds: every step is seen."""
    monkeypatch.setattr(prefetch_rounds, "MOST_ROUNDS", 0)


@pytest.fixture
def drafts(monkeypatch):
    """All drafts and their laws, by text, of one run after the other."""
    noted = []
    propose = FeaturesDrafter.propose

    async def note(self, seq, k):
        draft = await propose(self, seq, k)
        noted.append((seq.text.tolist(), list(draft.tokens), draft.q))
        return draft

    monkeypatch.setattr(FeaturesDrafter, "propose", note)
    return noted


def decode(folder, lanes, prompts=LONG, **options):
    m = forerun.load("tiny:llama", lanes=lanes, max_context=128, graphs=True)
    how = dict(method="specdiff", draft=str(folder), k=3, max_tokens=40, ignore_eos=True)
    return m, m.generate(prompts, raise_errors=True, **{**how, **options})


def drafted_alike(one, other):
    for (text, tokens, q), (same_text, same_tokens, same_q) in zip(one, other, strict=True):
        assert (text, tokens) == (same_text, same_tokens)
        if q is not None:
            torch.testing.assert_close(q.clone(), same_q.clone(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_going_ahead_changes_only_speed(
    kind, sampling, lanes, step_by_step, begun, agreeing, drafts, monkeypatch, tmp_path
):
    make_drafter(tmp_path, **KINDS[kind])
    _, went = decode(tmp_path, lanes, **SAMPLINGS[sampling])
    assert {"JudgePrefetch", "LookPrefetch"} <= {name for name, _ in begun}
    ahead = drafts.copy()
    drafts.clear()
    monkeypatch.setattr(Engine, "prefetches", False)
    _, waited = decode(tmp_path, lanes, **SAMPLINGS[sampling])
    assert said(went) == said(waited)
    assert sum(r.stats.forwards for r in went) < 0.8 * sum(len(r.token_ids) for r in went)
    drafted_alike(sorted(ahead, key=str), sorted(drafts, key=str))


def test_nearly_every_step_of_a_whole_batch_begins_ahead(step_by_step, begun, agreeing, tmp_path):
    make_drafter(tmp_path, markov_rank=3)
    _, results = decode(tmp_path, 3, prompts=[LONG[0]] * 3, temperature=0)
    steps = min(r.stats.forwards for r in results)
    assert begun.count(("LookPrefetch", 3)) >= steps - 6, (steps, begun)
    assert begun.count(("JudgeDrawn", 3)) >= steps - 6, (steps, begun)


def test_nearly_every_step_moves_the_rows_of_the_last_one(begun, agreeing, monkeypatch, tmp_path):
    make_drafter(tmp_path, markov_rank=3)
    moved, again = [], []
    move_on, apply_again = graphs.StaticBatch.move_on, rules.Rules.apply_again

    def note_again(*arguments):
        again.append(apply_again(*arguments))
        return again[-1]

    monkeypatch.setattr(graphs.StaticBatch, "move_on", lambda *a: (moved.append(1), move_on(*a))[1])
    monkeypatch.setattr(rules.Rules, "apply_again", note_again)
    _, results = decode(tmp_path, 3, prompts=[LONG[0]] * 3, temperature=0)
    steps = min(r.stats.forwards for r in results)
    assert len(moved) >= 2 * (steps - 8) and sum(map(bool, again)) >= steps - 8


def test_programs_of_rules_share_memory(begun, agreeing, drafts, monkeypatch, tmp_path):
    """What one left, the next writes over, as graphs of one pool do on a GPU."""
    make_drafter(tmp_path, markov_rank=3)
    decode(tmp_path, 3, temperature=1.0, seed=5)
    right = drafts.copy()
    drafts.clear()
    last = []
    run, run_ahead = rules.RuleProgram.run, rules.RuleProgram.run_ahead

    def spoil(applied):
        for one in last:
            for column in one.packed.outcome.columns().values():
                column.fill_(10**6)
        last[:] = [applied]
        return applied

    monkeypatch.setattr(rules.RuleProgram, "run", lambda *a: spoil(run(*a)))
    monkeypatch.setattr(rules.RuleProgram, "run_ahead", lambda *a: spoil(run_ahead(*a)))
    begun.clear()
    decode(tmp_path, 3, temperature=1.0, seed=5)
    drafted_alike(sorted(right, key=str), sorted(drafts, key=str))
    assert "JudgeDrawn" in {name for name, _ in begun}


def test_who_asks_the_target_before_it_draws_is_right(begun, agreeing, monkeypatch, tmp_path):
    """What it asks is written over what was begun ahead."""
    make_drafter(tmp_path, markov_rank=3)
    targets = []
    lengths = speculative.PayingLength.__init__

    def note(self, seq, target, *others, **named):
        targets[:] = [target]
        lengths(self, seq, target, *others, **named)

    async def nosy(self, seq, k, markov):
        laws = await self.model.block(seq, k)
        if seq.known % 3 == 0:
            await targets[0].conditionals(seq, [9, 9, 9])
        last = int(seq.text[-1])
        drawn = await seq.draw(draw_chain(markov, 1.0), seq.next(k), [last], laws.model_law)
        before = torch.tensor([last, *drawn.tokens[: k - 1]])
        return drawn.tokens[:k], markov.law(laws.model_law[:k], before, 1.0)

    monkeypatch.setattr(speculative.PayingLength, "__init__", note)
    monkeypatch.setattr(FeaturesDrafter, "_corrected", nosy)
    for seed in range(3):
        monkeypatch.setattr(Engine, "prefetches", True)
        _, [went] = decode(tmp_path, 1, LONG[:1], temperature=1.0, seed=seed)
        monkeypatch.setattr(Engine, "prefetches", False)
        _, [waited] = decode(tmp_path, 1, LONG[:1], temperature=1.0, seed=seed)
        assert went.token_ids == waited.token_ids
    assert "JudgeDrawn" in {name for name, _ in begun}


def test_nothing_begun_outlives_its_slots(step_by_step, begun, agreeing, tmp_path):
    """Hidden states of another layer are asked for between a look and the draw from it."""
    make_drafter(tmp_path, markov_rank=3, target_layers=(0,))
    _, [alone] = decode(tmp_path, 1, LONG[:1], temperature=0)
    m = forerun.load("tiny:llama", lanes=2, max_context=128, graphs=True)
    stepped(m)
    how = dict(method="specdiff", draft=str(tmp_path), k=3, max_tokens=40, ignore_eos=True)
    job = m.submit(LONG[0], temperature=0, **how)
    while m.engine._drawn is None or m.engine._drawn.judging is None:
        assert m.engine.running or m.engine.queue, "the text ended before anything was begun"
        m.engine.step()
    m.host.ask_features((1,))
    m.engine.step()
    assert m.engine._prefetched is None and m.engine._drawn is None
    held = m.host.memos[0]
    assert held.pages or not held.holds_rows(1)  # without pages it claims nothing
    m.engine.run()
    assert job.results()[0].token_ids == alone.token_ids


def test_rows_that_were_written_over_are_not_moved(begun, agreeing, tmp_path):
    make_drafter(tmp_path, markov_rank=3)
    m, _ = decode(tmp_path, 1, LONG[:1], temperature=0, max_tokens=30)
    replayed = m.engine.hosts[1].runner.replayed
    assert replayed is not None and replayed.can_move(40)
    assert not replayed.can_move(replayed.found.longest + 1)
    replayed.captured.fixed.fills += 1
    assert not replayed.can_move(40)


def test_those_whose_texts_end_keep_nobody_waiting(step_by_step, begun, agreeing, tmp_path):
    """Near its end a text reads less of a block, and has less judged, than was begun."""
    make_drafter(tmp_path, markov_rank=3)
    m = forerun.load("tiny:llama", lanes=3, max_context=128, graphs=True)
    stepped(m)
    how = dict(method="specdiff", draft=str(tmp_path), k=3, ignore_eos=True, temperature=0)
    jobs = [m.submit(LONG[0], max_tokens=n, **how) for n in (21, 30, 40)]
    m.engine.run()
    whole = jobs[-1].results()[0].token_ids
    assert [job.results()[0].token_ids for job in jobs] == [whole[:21], whole[:30], whole]
    begun_for = [count for kind, count in begun if kind == "JudgeDrawn"]
    most = max(job.results()[0].stats.forwards for job in jobs)
    assert len(begun_for) >= most - 6 and begun_for == sorted(begun_for, reverse=True)


async def contrary(self, seq, k, markov):
    """Draws now after the text's last token, now after another."""
    laws = await self.model.block(seq, k)
    last = int(seq.text[-1]) if seq.known % 4 else 5
    drawn = await seq.draw(draw_chain(markov, 1.0), seq.next(k), [last], laws.model_law)
    before = torch.tensor([last, *drawn.tokens[: k - 1]])
    return drawn.tokens[:k], markov.law(laws.model_law[:k], before, 1.0)


@pytest.mark.parametrize("mutant", [False, True])
def test_who_draws_otherwise_gets_that(mutant, begun, agreeing, drafts, monkeypatch, tmp_path):
    make_drafter(tmp_path, markov_rank=3)
    monkeypatch.setattr(FeaturesDrafter, "_corrected", contrary)
    monkeypatch.setattr(Engine, "prefetches", False)
    decode(tmp_path, 3, temperature=1.0, seed=5)
    right = drafts.copy()
    drafts.clear()
    monkeypatch.setattr(Engine, "prefetches", True)
    if mutant:
        monkeypatch.setattr(DrawnAhead, "holds", lambda self, one: one in self._number)
    with pytest.raises((AssertionError, ValueError)) if mutant else nullcontext():
        decode(tmp_path, 3, temperature=1.0, seed=5)
        drafted_alike(sorted(right, key=str), sorted(drafts, key=str))
    assert "JudgeDrawn" in {name for name, _ in begun}


def test_who_joins_in_the_midst_changes_nothing(begun, agreeing, tmp_path):
    make_drafter(tmp_path, markov_rank=3)
    _, alone = decode(tmp_path, 1)
    m = forerun.load("tiny:llama", lanes=3, max_context=128, graphs=True)
    stepped(m)
    how = dict(method="specdiff", draft=str(tmp_path), k=3, max_tokens=40, ignore_eos=True)
    jobs = []
    for prompt in LONG:
        jobs.append(m.submit(prompt, **how))
        for _ in range(9):
            m.engine.step()
    m.engine.run()
    assert [job.results()[0].token_ids for job in jobs] == [r.token_ids for r in alone]


@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_lost_pages_are_not_begun_ahead_from(
    whose, step_by_step, begun, agreeing, drafts, tmp_path, monkeypatch
):
    """Whoever's slots no longer hold the text: nothing is foreseen, and drafts stay as they are."""
    make_drafter(tmp_path, markov_rank=3)
    decode(tmp_path, 1, LONG[:1], temperature=0)
    right = {str(text): tokens for text, tokens, _ in drafts if tokens}
    drafts.clear()
    m = forerun.load("tiny:llama", lanes=1, max_context=128, graphs=True)
    stepped(m)
    how = dict(method="specdiff", draft=str(tmp_path), k=3, max_tokens=40, ignore_eos=True)
    arrive = Engine._arrive
    lost = []

    def losing(self, served, answers, applied, *rest):
        loses = applied[0][1].type is Verdict and served[0].seq.known % 3 == 0
        if loses:
            self.hosts[0 if whose == "target" else 1].memos[0].release()
        arrive(self, served, answers, applied, *rest)
        if loses:
            assert not isinstance(self._prefetched, LookPrefetch)
            lost.append(served[0].seq.known)

    monkeypatch.setattr(Engine, "_arrive", losing)
    job = m.submit(LONG[0], temperature=0, **how)
    m.engine.run()
    assert lost and job.results()[0].error is None
    again = [(right[str(text)], tokens) for text, tokens, _ in drafts if str(text) in right]
    assert len(again) > 2 and all(one == other or not other for one, other in again)


def test_a_short_text_is_not_begun_ahead(begun, agreeing, tmp_path):
    """There are not as many tokens as might be new."""
    make_drafter(tmp_path)
    _, [went] = decode(tmp_path, 1, prompts=[[5]], max_tokens=3)
    assert len(went.token_ids) == 3
    assert "LookPrefetch" not in {name for name, _ in begun}


def still(self, source_table):
    """Moves rows, but not the intervals that they see."""
    intervals = self._rows_7T[3:5].clone()
    MOVE(self, source_table)
    self._rows_7T[3:5] = intervals


MUTANTS = {
    "intervals stay": lambda patch: patch.setattr(graphs.StaticBatch, "_move_by_steps", still),
    "sources stay": lambda patch: patch.setattr(
        graphs.StaticBatch, "_find_sources", lambda *a: None
    ),
    "one token of context too few": lambda patch: patch.setattr(
        LookPrefetch, "_new", property(lambda self: self.drafted)
    ),
    "as if nothing were accepted": lambda patch: patch.setattr(
        prefetch_looks,
        "Moved",
        lambda steps_B, *far, **more: graphs.Moved(0 * steps_B, *far, **more),
    ),
    "however many tokens are asked for": lambda patch: patch.setattr(
        LookPrefetch, "matches", lambda self, one: one.waits_for.host is self.host
    ),
    "further on by one too few": lambda patch: patch.setattr(
        MovesOn, "moved_on", lambda *a: one_less(MOVED_ON(*a))
    ),
    "the last token stays": lambda patch: patch.setattr(
        graphs.StaticBatch, "move_on", lambda self, batch: MOVE_ON(self, without_placed(batch))
    ),
    "drawn after the token before": lambda patch: patch.setattr(
        DrawnAhead, "late", lambda self, verdicts: []
    ),
    "drawn with the verdict's noise": lambda patch: patch.setattr(
        rules, "RuleBatch", lambda draws, ahead=0: RULE_BATCH(draws)
    ),
}
RULE_BATCH = rules.RuleBatch
MOVED_ON = MovesOn.moved_on
MOVE_ON = graphs.StaticBatch.move_on


def one_less(batch):
    batch.moved = batch.moved._replace(steps_B=batch.moved.steps_B - 1)
    return batch


def without_placed(batch):
    batch.placed = None
    return batch


MOVE = graphs.StaticBatch._move_by_steps


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_its_mutants_are_caught(mutant, begun, agreeing, drafts, monkeypatch, tmp_path):
    make_drafter(tmp_path, markov_rank=3)
    monkeypatch.setattr(Engine, "prefetches", False)
    sampling = SAMPLINGS["now longer, now shorter" if "many" in mutant else "sampled"]
    decode(tmp_path, 3, **sampling)
    right = drafts.copy()
    drafts.clear()
    monkeypatch.setattr(Engine, "prefetches", True)
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(
        (AssertionError, ValueError, RuntimeError, IndexError, forerun.ForerunError)
    ):
        decode(tmp_path, 3, **sampling)
        drafted_alike(sorted(right, key=str), sorted(drafts, key=str))
