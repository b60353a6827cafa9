"""Texts in step: where all write plain text, one forward and one draw serve all, without an object
for each. That changes only how long it takes."""

import gc
from contextlib import suppress

import pytest

from forerun.backbones.table import TableBackbone
from forerun.certify.enumeration import certify_case
from forerun.engine import engine as engine_file
from forerun.engine import rules as rules_file
from forerun.engine.engine import Engine
from forerun.engine.pace import Pace
from forerun.engine.prefetch import TokenPrefetch
from forerun.engine.rules import Applied, ProgramSize, RuleBatch, RuleProgram, Rules, TokenDraws
from forerun.engine.ticket import Running
from forerun.families.base import ChainScorer
from forerun.families.causal import Causal
from forerun.probability.logits import MaskedLogits
from forerun.probability.pending import PendingLaws
from forerun.registry import BUILT_IN, NoOptions, method
from forerun.sequence.canvas import Canvas
from forerun.sequence.question import NextToken, Question
from tests.engine.test_rules import ByProgram
from tests.helpers import PROMPTS, fresh, stepped

HOW = {
    "greedy": {},
    "sampled": dict(temperature=0.8, top_p=0.9, seed=5),
    "held to a language": dict(temperature=1.0, regex="[a-z ]*", seed=4),
    "told": dict(temperature=1.0, logprobs=2, seed=3),
    "penalised": dict(temperature=1.0, repetition_penalty=1.3, seed=2),
}
DRAWN_AT_ONCE = ("greedy", "sampled", "held to a language")


@pytest.fixture
def at_once(monkeypatch):
    """Every engine goes ahead and has programs; the list grows by how many tokens were drawn."""
    drawn = []
    run = RuleProgram.run_tokens

    def counted(self, draws):
        drawn.append(len(draws.seqs))
        return run(self, draws)

    monkeypatch.setattr(RuleProgram, "run_tokens", counted)
    monkeypatch.setattr(engine_file, "Rules", ByProgram)
    monkeypatch.setattr(rules_file, "SEEN_BEFORE", 0)
    monkeypatch.setattr(Engine, "prefetches", True)
    return drawn


@pytest.fixture(params=["by programs", "plainly"])
def either_way(request, monkeypatch):
    """The same; or as on a CPU, where nothing is captured and nobody goes ahead."""
    if request.param == "by programs":
        return request.getfixturevalue("at_once")
    drawn = []
    apply = TokenDraws.apply_plain

    def counted(self, sampler):
        drawn.append(len(self.seqs))
        return apply(self, sampler)

    monkeypatch.setattr(TokenDraws, "apply_plain", counted)
    return drawn


def said(results):
    return [(r.token_ids, r.finish_reason, r.stats.forwards, told(r)) for r in results]


def told(result):
    return [sorted(entry) for entry in result.logprobs or ()]


def alone(how, monkeypatch, **more):
    """The same by the plain code, each on its own."""
    with monkeypatch.context() as plain:
        plain.setattr(Rules, "draw_tokens", lambda self, draws: None)
        plain.setattr(Engine, "prefetches", False)
        return said(fresh(lanes=1).generate(PROMPTS, method="ar", max_tokens=16, **how, **more))


@pytest.mark.parametrize("name", HOW)
def test_texts_in_step_are_those_decoded_alone(name, either_way, monkeypatch):
    if "regex" in HOW[name]:
        pytest.importorskip("llguidance")
    expected = alone(HOW[name], monkeypatch)
    either_way.clear()
    m = fresh(lanes=5)
    assert said(m.generate(PROMPTS, method="ar", max_tokens=16, **HOW[name])) == expected
    assert bool(either_way) == (name in DRAWN_AT_ONCE)
    if name == "greedy":
        assert either_way.count(5) >= 8  # and fewer as texts end


def test_all_kinds_in_one_batch(either_way, monkeypatch):
    pytest.importorskip("llguidance")
    expected = [alone(how, monkeypatch)[i] for i, how in enumerate(HOW.values())]
    m = stepped(fresh(lanes=5))
    asked = zip(PROMPTS, HOW.values())
    jobs = [m.submit(prompt, method="ar", max_tokens=16, **how) for prompt, how in asked]
    m.engine.run()
    assert [said(job.results())[0] for job in jobs] == expected


def test_an_interrupt_changes_no_text(either_way, monkeypatch):
    """Wherever it comes: what was not counted is drawn again, with the same noise."""
    how = dict(temperature=1.0, seed=6, ignore_eos=True)
    expected = [one[0] for one in alone(how, monkeypatch)]
    m = stepped(fresh(lanes=5))
    jobs = m.submit(PROMPTS, method="ar", max_tokens=16, **how)
    calls = iter(range(1000))

    def interrupts(owner, name):
        once = getattr(owner, name)

        def interrupted(self, *given, **more):
            if next(calls) % 7 == 1:
                raise KeyboardInterrupt
            found = once(self, *given, **more)
            if next(calls) % 7 == 3:
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(owner, name, interrupted)

    interrupts(Engine, "_arrive")
    interrupts(Engine, "_try_to_prefetch")
    interrupts(Applied, "outcomes")
    interrupts(TokenPrefetch, "learn")
    stopped = 0
    while m.engine.busy:
        try:
            m.engine.step()
        except KeyboardInterrupt:
            stopped += 1
    assert stopped > 5 and [r.token_ids for r in jobs.results()] == expected


@method("unsteady", guarantee="approximate", reference="unsteady")
async def unsteady(seq: Canvas, target: ChainScorer, options: NoOptions) -> None:
    """Write what was drawn, or another token, or one that is as long but says something else."""
    while not seq.done:
        [token] = await target.write(seq)
        seq.append((token + (seq.filled % 3 == 1)) % 256, "sampled")
        if seq.filled % 4 == 2 and not seq.done:  # a guess of the same length, with the same end
            chain = [(token + 1) % 256]
            law_V = await target.next_law(seq, chain)
            seq.append(token, "said")
            if not seq.done:
                seq.append(int(law_V.argmax()), "said")


def test_what_is_written_instead_is_answered(either_way, monkeypatch):
    monkeypatch.setitem(BUILT_IN["methods"], "unsteady", f"{__name__}:unsteady")
    how = dict(method="unsteady", max_tokens=24, temperature=1.0, seed=8, ignore_eos=True)
    m = fresh(lanes=5)
    went = [r.token_ids for r in m.generate(PROMPTS, **how)]
    monkeypatch.setattr(Engine, "prefetches", False)
    monkeypatch.setattr(Rules, "draw_tokens", lambda self, draws: None)
    assert went == [r.token_ids for r in fresh(lanes=5).generate(PROMPTS, **how)] and either_way


def test_a_draw_of_many_has_the_size_that_a_batch_of_them_has(monkeypatch):
    monkeypatch.setattr(Engine, "_draw_at_once", lambda *_, **__: None)
    m = stepped(fresh(lanes=3))
    jobs = m.submit(PROMPTS[:3], method="ar", max_tokens=4, temperature=0.7, top_p=0.9)
    m.engine.step()  # now all wait for a draw
    draws = [one.waits_for for one in m.engine.running]
    batch = RuleBatch(draws)
    logits_RV = batch.sources[0].logits()
    many = TokenDraws([draw.seq for draw in draws], MaskedLogits(logits_RV))
    rules = m.engine.rules
    assert many.size(rules._warps) == ProgramSize.of(batch, rules._warps)
    assert many.noise == batch.noise
    jobs.cancel()


def not_counted(self, answer=None):
    drawn = self.seq.draws
    COUNT(self, answer)
    if isinstance(self.waits_for, Question):  # in step
        self.seq.draws = drawn


COUNT = Running.count_answered
MUTANTS = {
    "a draw that is not counted": (Running, "count_answered", not_counted),
    "numbers of another's draw": (
        TokenDraws,
        "noise",
        property(lambda self: [(seq.noise_key, seq.draws) for seq in self.seqs[::-1]]),
    ),
    "masks of another": (
        TokenDraws,
        "__init__",
        lambda self, seqs, logits: (
            INIT(self, seqs, logits._replace(masks_RW=logits.masks_RW[::-1]))
            if logits.masks_RW is not None
            else INIT(self, seqs, logits)
        ),
    ),
    "logits of another": (
        TokenDraws,
        "__init__",
        lambda self, seqs, logits: INIT(
            self, seqs, logits._replace(logits_RV=logits.logits_RV.flip(0))
        ),
    ),
}
INIT = TokenDraws.__init__


def together(asked, lanes):
    """What some requests say, all at once or one after the other."""
    m = stepped(fresh(lanes=lanes))
    jobs = [
        m.submit(prompt, method="ar", max_tokens=16, temperature=1.0, ignore_eos=True, **how)
        for prompt, how in zip(PROMPTS, asked)
    ]
    m.engine.run()
    return [job.results()[0].token_ids for job in jobs]


OWN_SEEDS = [dict(seed=i) for i in range(5)]
OWN_LANGUAGES = [dict(seed=1, regex=f"[{letters}]*") for letters in ("ab", "cd", "ef", "gh", "ij")]


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_its_mutants_are_caught(mutant, either_way, monkeypatch):
    pytest.importorskip("llguidance")
    asked = (OWN_SEEDS, OWN_LANGUAGES)
    with monkeypatch.context() as plain:
        plain.setattr(Engine, "prefetches", False)
        plain.setattr(Rules, "draw_tokens", lambda self, draws: None)
        expected = [together(each, lanes=1) for each in asked]
    if mutant is None:
        assert [together(each, lanes=5) for each in asked] == expected and either_way.count(5) > 8
        return
    monkeypatch.setattr(*MUTANTS[mutant])
    assert [together(each, lanes=5) for each in asked] != expected


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_prompts_are_read_beside_texts_in_step(sampling, at_once):
    """No second forward waits for the host while a prompt is read in chunks."""
    long = [7 + i % 50 for i in range(60)]
    how = dict(max_tokens=40, ignore_eos=True, method="ar", **HOW[sampling])
    texts = (*PROMPTS[:2], long)
    alone = [fresh(max_context=160).generate(prompt, **how).token_ids for prompt in texts]
    m = stepped(fresh(lanes=3, max_context=160))
    m.host.pace = Pace(m.host.costs, 8)
    jobs = [m.submit(prompt, **how) for prompt in PROMPTS[:2]]
    for _ in range(6):
        m.engine.step()
    jobs.append(m.submit(long, **how))
    m.engine.step()
    begun, before = 0, m.engine.clock.forwards
    while not jobs[-1].jobs[0].seq.trace.forwards:
        m.engine.step()
        begun += m.engine._prefetched is not None and bool(m.engine._prefetched.reading)
    chunks = m.engine.clock.forwards - before
    assert begun >= chunks - 2 > 3
    m.engine.run()
    assert [job.results()[0].token_ids for job in jobs] == alone


def test_a_law_without_an_outcome_counts_its_forward(at_once, monkeypatch):
    def decode():
        m = fresh(lanes=2)
        forward = m.backbone.forward
        calls = iter(range(1000))

        def broken(batch, slots):
            logits_RV = forward(batch, slots)
            if next(calls) == 7:
                logits_RV[0] = float("nan")
            return logits_RV

        m.backbone.forward = broken
        found = m.generate(PROMPTS[:2], method="ar", max_tokens=12, ignore_eos=True)
        return [(r.token_ids, r.stats.forwards, bool(r.error)) for r in found]

    in_step = decode()
    assert at_once and in_step[0][2] and not in_step[1][2]
    monkeypatch.setattr(Rules, "draw_tokens", lambda self, draws: None)
    assert decode() == in_step


def test_questions_are_gone_when_they_are_answered(at_once):
    """Without the collector, which is put off while an engine works."""
    m = stepped(fresh(lanes=5))
    m.generate(PROMPTS, method="ar", max_tokens=4)
    gc.collect()
    gc.disable()
    try:
        m.generate(PROMPTS, method="ar", max_tokens=12, ignore_eos=True)
        asked = [one for one in gc.get_objects() if type(one) is NextToken]
        assert not [one for one in asked if one.host is m.host] and at_once
    finally:
        gc.enable()


@method("undaunted", guarantee="approximate", reference="undaunted")
async def undaunted(seq: Canvas, target: ChainScorer, options: NoOptions) -> None:
    """Go on where a draw has failed, first with what stands in for a token that is not known."""
    with suppress(RuntimeError):
        await target.write(seq)
    law_V = await target.next_law(seq, [0])
    seq.append(0, "said")
    seq.append(int(law_V.argmax()), "said")
    while not seq.done:
        [token] = await target.write(seq)
        seq.append(token, "sampled")


def test_tokens_that_never_came_match_nothing(monkeypatch):
    monkeypatch.setitem(BUILT_IN["methods"], "undaunted", f"{__name__}:undaunted")
    outcomes = Applied.outcomes

    def decode(prefetches):
        failing = iter([True])

        def broken(self):
            found = outcomes(self)
            if next(failing, False):
                raise RuntimeError("a copy was lost")
            return found

        monkeypatch.setattr(Engine, "prefetches", prefetches)
        monkeypatch.setattr(Applied, "outcomes", broken)
        m = stepped(fresh(lanes=1))
        how = dict(max_tokens=8, ignore_eos=True, temperature=1.0, seed=3)
        return m.generate(PROMPTS[0], method="undaunted", **how).token_ids

    assert decode(True) == decode(False)


def test_a_family_with_plans_of_its_own_is_asked_for_them():
    class Watched(Causal):
        asked = 0

        def conditionals(self, seq, chains, last_only=False):
            Watched.asked += 1
            return super().conditionals(seq, chains, last_only)

    class Renamed(Causal):
        name = "renamed"

    assert Causal.reads_text and Renamed.reads_text and not Watched.reads_text
    certify_case("ar", TableBackbone(vocab=3, seed=1), [0, 1], family=Watched(), max_tokens=2)
    assert Watched.asked


AT_ONCE = {
    "lookup": dict(method="lookup", k=4),
    "jacobi": dict(method="jacobi", block=4),
    "multiblock": dict(method="multiblock", block=4),
    "lookahead": dict(method="lookahead", window=4, ngram=3),
    "auto": dict(method="auto"),
}


def with_steps(m, **how):
    """What is said, what was counted, and the engine's steps."""
    stepped(m)
    jobs = m.submit(PROMPTS[:3], max_tokens=16, ignore_eos=True, **how)
    steps = 0
    while m.engine.busy:
        m.engine.step()
        steps += 1
    results = jobs.results()
    return [(r.token_ids, r.stats.forwards, len(r.trace)) for r in results], steps


@pytest.mark.parametrize("sampling", [{}, dict(temperature=0.9, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", list(AT_ONCE))
def test_what_a_forward_is_asked_for_is_drawn_in_its_step(kind, sampling, monkeypatch):
    at_once, few = with_steps(fresh(lanes=3), **AT_ONCE[kind], **sampling)
    monkeypatch.setattr(Engine, "_draw_at_once", lambda *_, **__: None)
    later, many = with_steps(fresh(lanes=3), **AT_ONCE[kind], **sampling)
    assert at_once == later
    assert few <= many / 2 + 4


@pytest.mark.parametrize("kind", ["lookup", "multiblock"])
@pytest.mark.parametrize(
    "wish", [dict(logprobs=2), dict(repetition_penalty=1.3), dict(min_tokens=4)]
)
def test_who_looks_at_laws_gets_them_as_before(kind, wish, monkeypatch):
    """What stands between logits and laws, and who reads them, is not passed by."""
    how = {**AT_ONCE[kind], **wish, "temperature": 0.9, "seed": 4}
    at_once, _ = with_steps(fresh(lanes=3), **how)
    monkeypatch.setattr(Engine, "_draw_at_once", lambda *_, **__: None)
    assert at_once == with_steps(fresh(lanes=3), **how)[0]


def test_a_rule_that_looks_past_its_sequence_is_caught(monkeypatch):
    """Rows of another: the mutant that taking logits by their order must not become."""
    right, _ = with_steps(fresh(lanes=3), **AT_ONCE["lookup"])
    of = PendingLaws.of
    monkeypatch.setattr(
        PendingLaws, "of", lambda logits, first, count, own: of(logits, 0, count, own)
    )
    assert with_steps(fresh(lanes=3), **AT_ONCE["lookup"])[0] != right
