"""Masks of a whole batch: asked for at once, and applied where rules run. Both change nothing but
time."""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from forerun.checkpoints import tiny
from forerun.constraints.base import ANY, bitmask_without, words
from forerun.constraints.engines import compiled
from forerun.constraints.left_to_right import LeftToRight, look_ahead, masks_found_together
from forerun.engine import engine as engine_file
from forerun.engine.rules import Rules
from forerun.options import Sampling
from forerun.probability.logits import (
    ChainRows,
    MaskedLogits,
    TokenHistory,
    allowed_by,
    masks_of,
    unpacked,
)
from forerun.probability.pending import PendingLaws
from tests.engine.test_rules import ByProgram
from tests.helpers import fresh, stepped, without_device

llguidance_engine = pytest.importorskip("forerun.constraints.llguidance_engine")
pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
KINDS = [
    {"schema": SCHEMA},
    {"regex": r"[a-f]{2,9}"},
    {"grammar": 'start: "ab" | "a" WORD\nWORD: /[c-z]{1,5}/'},
    {"choices": ["abc", "abd", "xyz"]},
]


def constraint(model, **kind):
    language = compiled(Sampling(**kind).constraint, model.vocabulary).language()
    return LeftToRight(language, 0, frozenset([0]), model.vocab)


def written(model, kind):
    text = {"schema": '{"age": 4', "regex": "abc", "grammar": "acde", "choices": "ab"}
    return model.vocabulary.encode(text[next(iter(kind))])


@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
def test_what_engines_say_at_once_is_what_each_says_alone(engine):
    pytest.importorskip(engine)
    m = fresh()
    kinds = [{**kind, "grammar_engine": engine} for kind in KINDS[: 4 if engine[0] == "l" else 2]]
    chains = [written(m, kind) for kind in kinds]
    chains[1] = [*chains[1], *m.vocabulary.encode("}}")]  # what is not allowed ends a chain
    together = [constraint(m, **kind) for kind in kinds]
    # A second chain of the same text, which the engine must go back for.
    tails = [m.vocabulary.encode(text) for text in ('{ "', "fed", "az", "xyz")]
    look_ahead([*zip(together, tails), *zip(together, chains)])
    for one, kind, tail in zip(together, kinds, tails):
        prefixes = range(len(tail) + 1)
        expected = constraint(m, **kind).masks(tail, prefixes, prefixes, prefixes)
        assert np.array_equal(one.masks(tail, prefixes, prefixes, prefixes), expected)
    for one, kind, chain in zip(together, kinds, chains):
        assert not one.open_states(chain)
        alone = constraint(m, **kind)
        prefixes = range(len(chain) + 1)
        expected = alone.masks(chain, prefixes, prefixes, prefixes)
        assert np.array_equal(one.masks(chain, prefixes, prefixes, prefixes), expected)
        assert one.usable(chain) == alone.usable(chain) > 0
        for token in chain[: one.usable(chain)]:
            one.add(one.next, token)
            alone.add(alone.next, token)
        assert (one.met, one.forced()) == (alone.met, alone.forced())


def test_an_engine_that_fails_ahead_of_time_is_asked_again(monkeypatch):
    m = fresh()
    one, other = constraint(m, **KINDS[0]), constraint(m, **KINDS[1])

    def fail(self, others):
        raise RuntimeError("too much")

    with monkeypatch.context() as context:
        context.setattr(llguidance_engine._Matcher, "allowed_together", fail)
        [a, b] = written(m, KINDS[0])[:1], written(m, KINDS[1])[:1]
        look_ahead([(one, a), (other, b)])
    assert other.masks(b, [0], [1], [1]).any() and other.error == ""


def test_a_step_asks_for_the_masks_of_all_sequences_at_once(monkeypatch):
    """Those who were drawn a token; a first mask is asked for by each on its own."""
    asked = []
    together = llguidance_engine._Matcher.allowed_together
    alone = llguidance_engine._Matcher.allowed
    monkeypatch.setattr(
        llguidance_engine._Matcher,
        "allowed_together",
        lambda self, others: asked.append(1 + len(others)) or together(self, others),
    )
    monkeypatch.setattr(
        llguidance_engine._Matcher, "allowed", lambda self: asked.append(1) or alone(self)
    )
    m = stepped(fresh(lanes=4))
    options = dict(regex="[a-z]{30,60}", max_tokens=12, temperature=1.0, method="ar")
    jobs = m.submit([[5, 6, i] for i in range(4)], **options)
    begun = len(asked)
    m.engine.run()
    steps = max(result.stats.forwards for result in jobs.results())
    assert steps > 8
    assert asked[begun:] == [4] * len(asked[begun:]) and len(asked) - begun <= steps
    assert m.engine.clock.masks > 0


def test_masks_in_programs_draw_what_the_plain_code_draws(monkeypatch):
    """Constrained sequences beside others, warm and cold, in drafts and without."""
    asked = [
        {"regex": "[a-z]{3,30}", "temperature": 0.9, "seed": 1},
        {"schema": SCHEMA, "temperature": 0.0},
        {"temperature": 1.1, "seed": 2},
        {"regex": "[0-9 ]{3,30}", "repetition_penalty": 1.3, "temperature": 1.0, "seed": 3},
    ]
    found = {}
    for name, rules in (("plain", Rules), ("programs", ByProgram)):
        monkeypatch.setattr(engine_file, "Rules", rules)
        for method in ("ar", "lookup", "jacobi"):
            m = stepped(fresh(lanes=4))
            jobs = [m.submit([5, 6, 7], max_tokens=16, method=method, **one) for one in asked]
            m.engine.run()
            found[name, method] = [job.results()[0].token_ids for job in jobs]
            masked = [any(size.masked) for size in m.engine.rules.programs]
            assert any(masked) == (name == "programs")
    for method in ("ar", "lookup", "jacobi"):
        assert found["plain", method] == found["programs", method]


@pytest.mark.parametrize("vocab", [31, 32, 40, 97])
def test_bits_are_the_same_on_either_side(vocab):
    rng = np.random.default_rng(vocab)
    masks = rng.integers(-(2**31), 2**31, (3, words(vocab)), dtype=np.int64).astype(np.int32)
    flags = allowed_by(masks, torch.zeros(3, vocab))
    assert torch.equal(flags, unpacked(torch.from_numpy(masks), vocab))


def test_laws_of_masked_rows_can_be_cut_and_joined_with_others():
    logits = torch.randn(4, 40)
    masks = np.full((4, 2), ANY, np.int32)
    masks[1] = [6, 0]  # tokens 1 and 2
    laws = PendingLaws.of(MaskedLogits(logits, masks), 0, 4, Sampling(temperature=1.0))
    free = PendingLaws.of(logits, 0, 4, Sampling(temperature=1.0))
    joined = torch.cat([laws[1:2], free[1:2], laws[0:1]])
    assert (joined[0] > 0).nonzero()[:, 0].tolist() == [1, 2]
    torch.testing.assert_close(joined[1].tensor, logits[1].softmax(-1))
    assert (joined[2] > 0).all()
    assert torch.equal(laws[1].logits_NV[0].isfinite(), joined[0] > 0)


def test_texts_of_one_grammar_share_what_is_known_of_their_beginning(monkeypatch):
    """A later text asks nothing before its first token, and begins with the same law."""
    m = stepped(fresh())
    options = dict(regex="[a-z]{3,9}", max_tokens=6, method="ar", temperature=1.0)
    first = m.generate("def f():\n", **options)
    asked = []
    alone = llguidance_engine._Matcher.allowed
    monkeypatch.setattr(
        llguidance_engine._Matcher, "allowed", lambda self: asked.append(1) or alone(self)
    )
    asked_before = []  # each draw
    draw = Rules.draw_tokens
    monkeypatch.setattr(
        Rules,
        "draw_tokens",
        lambda self, draws: asked_before.append(len(asked)) or draw(self, draws),
    )
    jobs = m.submit("def f():\n", **options)
    m.engine.run()
    assert asked_before[0] == 0 and asked
    assert jobs.results()[0].token_ids == first.token_ids


def test_masks_that_were_found_together_are_used_as_they_are():
    """Of all texts in their order: the array itself. Of some, or in another order: their rows."""
    m = fresh()
    constraints = [constraint(m, **kind) for kind in KINDS]
    tokens = [written(m, kind)[:1] for kind in KINDS]
    look_ahead(list(zip(constraints, tokens)))
    for one, [token] in zip(constraints, tokens):
        one.add(0, token)
    places = [(one, 1) for one in constraints]
    expected = np.concatenate([one.masks((), (), [0], [1]) for one in constraints])
    found = masks_found_together(places)
    assert np.array_equal(found, expected)
    assert masks_found_together(places) is found
    order = [2, 0, 3]
    assert np.array_equal(masks_found_together([places[i] for i in order]), expected[order])
    assert masks_found_together([places[0], (constraints[1], 2)]) is None  # not its first blank
    alone = constraint(m, **KINDS[0])
    assert masks_found_together([places[1], (alone, 0)]) is None
    chains = [ChainRows(history(m, one), (), [0], positions=[1]) for one in constraints]
    assert masks_of(chains) is found
    assert np.array_equal(masks_of(chains[:2]), expected[:2])
    drafted = ChainRows(history(m, alone), tokens[0], [0, 1], positions=[0, 1])
    both = masks_of([chains[2], drafted])
    assert np.array_equal(both[0], expected[2]) and np.array_equal(both[2], expected[0])


def history(model, constraint):
    return TokenHistory(Sampling(), np.array([1]), model.vocab, frozenset(), constraint=constraint)


def test_what_may_follow_is_the_same_however_it_is_found_out():
    """At once for texts that may hold different tokens, and one by one."""
    m = fresh()
    language = compiled(Sampling(choices=["ab", "a", "abc"]).constraint, m.vocabulary).language
    [a], [b] = m.vocabulary.encode("a"), m.vocabulary.encode("b")
    some = bitmask_without([b], m.vocab)

    def texts():
        yield LeftToRight(language(), 0, frozenset([0]), m.vocab)
        yield LeftToRight(language(), 0, frozenset([0]), m.vocab, some)
        yield LeftToRight(language(), 0, frozenset([0, 1]), m.vocab)
        yield LeftToRight(language(), 0, frozenset([0]), m.vocab)

    together = list(texts())
    look_ahead([(one, [a]) for one in together])
    for one, alone in zip(together, texts()):
        one.add(0, a)
        alone.add(0, a)
        assert np.array_equal(one.masks((), (), [0], [1]), alone.masks((), (), [0], [1]))
        assert one.met and alone.met
        assert (one.finished, one.forced()) == (alone.finished, alone.forced())
    assert [one.finished for one in together] == [False, True, False, False]


def test_tokens_that_must_follow_are_looked_after_with_the_drawn_one(monkeypatch):
    """No matcher is asked alone, and the texts are those of engines that are never asked ahead."""
    options = dict(choices=["abcdefg hij", "xyz uvw rst", "kl"], max_tokens=16, temperature=1.0)
    prompts = [[5, 6, i] for i in range(4)]

    def run():
        m = stepped(fresh(lanes=4))
        jobs = m.submit(prompts, method="ar", **options)
        asked.clear()
        m.engine.run()
        return jobs.results()

    asked = []
    alone = llguidance_engine._Matcher.allowed
    monkeypatch.setattr(
        llguidance_engine._Matcher, "allowed", lambda self: asked.append(self) or alone(self)
    )
    monkeypatch.setattr(llguidance_engine._Matcher, "allowed_together", together_as_before)
    results = run()
    forced = [len(e.tokens) for r in results for e in r.trace if e.reason == "forced"]
    assert sum(forced) > 8 and not asked
    monkeypatch.setattr(engine_file, "look_ahead", lambda *_, **__: None)
    assert [r.token_ids for r in run()] == [r.token_ids for r in results] and asked


def together_as_before(self, others):
    """Masks of several, without asking any of them by the way that is counted."""
    masks = np.empty((1 + len(others), self.form.words), np.int32)
    for row, one in zip(masks, [self, *others]):
        one.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return self.form.of_model(masks)


def test_a_step_calls_torch_as_often_for_many_sequences_as_for_few(monkeypatch):
    """Nothing of a constraint is done on tensors sequence by sequence."""
    no_device = without_device(monkeypatch)
    tokenizer = tiny.tokenizer()
    text = tokenizer("abcdefghij" * 4, add_special_tokens=False).input_ids
    options = dict(regex="[a-z]{30,60}", max_tokens=40, method="ar")
    calls = {}
    for batch in (2, 8):
        script = no_device.plain_script(lambda seq: text[seq.filled])
        m, _ = no_device.model_without_device(tokenizer, batch, 64, script)
        jobs = m.submit([[5, 6]] * batch, **options)
        for _ in range(20):  # sizes that are met often have programs by then
            m.engine.step()
        with CountedCalls() as counted:
            for _ in range(20):
                m.engine.step()
        calls[batch] = counted.calls
        assert len(m.engine.running) == batch
        m.engine.run()
        assert [r.token_ids for r in jobs.results()] == [text] * batch
        assert any(any(size.masked) for size in m.engine.rules.programs)
    assert calls[2] == calls[8] > 0


class CountedCalls(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func.__name__ != "__get__"  # a look at a tensor's shape or kind
        return func(*args, **(kwargs or {}))
