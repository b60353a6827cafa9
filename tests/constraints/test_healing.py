"""Token healing: which tokens are taken back, and that what is chosen instead has the law of its
definition."""

import itertools

import pytest

from forerun.backbones.table import TableBackbone
from forerun.certify.cases import SYLLABLES, healed_cases
from forerun.certify.enumeration import canvas_reading, certify_case, method_law
from forerun.certify.reference import context
from forerun.checkpoints.tokenizers import with_white_space
from forerun.constraints.healing import (
    Healing,
    TokenIndex,
    encode_inside,
    healing_of,
    known_tokens,
)
from forerun.constraints.spelling import spelling_of
from forerun.constraints.vocabulary import Vocabulary
from forerun.families.masked import Masked
from forerun.methods import healing as coroutine
from forerun.probability import covers
from forerun.requests import infill
from tests.certify.definitions import EXACT
from tests.helpers import caught, sentence_tokenizer

TARGET = TableBackbone(vocab=4, seed=1)
MASKED = TableBackbone(vocab=5, seed=3)
WITH_MASK = dict(mask=4, spelled=(*SYLLABLES, b""), text=True)


def heal(spelled, ids, least=1):
    return healing_of(Vocabulary(len(spelled), spelled=spelled), ids, least)


def test_the_healing_point_is_as_far_back_as_a_token_reaches():
    spelled = [b"x", b"im", b"por", b"port", b"import", b" "]
    found = heal(spelled, [0, 5, 1, 2])  # x␣impor
    assert found.kept == [0, 5]
    assert found.rest == b"impor"
    assert found.taken == [1, 2]
    # A token that is there in any case is not taken back.
    assert heal(spelled, [1, 2], least=1).rest == b"por"


@pytest.mark.parametrize(
    "ids",
    [[0, 4], [0, 6], [0, 7, 7, 7, 7, 7, 7], []],
    ids=["nothing goes on", "a special token", "too far back", "no text"],
)
def test_nothing_is_healed_where_no_token_goes_on(ids):
    spelled = [b"x", b"im", b"por", b"port", b"import", b" ", b"", b"q", b"q" * 9]
    if ids[-1:] == [7]:
        found = heal(spelled, ids)
        assert len(found.taken) == 4  # of six
    else:
        assert heal(spelled, ids) is None


def test_a_prompt_is_not_cut_inside_a_character():
    euro = "€".encode()
    spelled = [b"x", euro[:1], euro[1:], euro + b"5", euro[1:] + b"7"]
    assert heal(spelled, [0, 1, 2]).taken == [1, 2]


def test_spellings_are_those_of_the_tokenizer():
    spelled = [b"a", b"b", b"ab", b"abab", b"x", b"ababa", b"abaab"]
    found = heal(spelled, [4, 2, 0])  # x, ab, a
    # Of "a" and "ab"; a then b, which nobody writes, is not among them.
    assert set(found.spellings) == {(), (0,), (2,)}
    assert found.left == [b"aba", b"ba", b"a"]
    assert found.chains()[0] == (2,)


def test_what_a_token_begins_with_is_found():
    index = TokenIndex(heal([b"a", b"ab", b"b", b"abc"], [2, 0]).index.spelling)
    assert index.writing(b"a").tolist() == [0]
    assert sorted(index.beyond(b"a").tolist()) == [1, 3]
    assert not len(index.beyond(b"abc"))


@pytest.mark.parametrize("method", EXACT)
def test_methods_have_the_law_of_the_definition_after_a_text(method):
    for case in healed_cases(method):
        if method != "ar" and not {"top_p", "top_k"} & case.keywords.keys():
            continue  # with fewer outcomes all methods are soon through
        certificate = case()
        assert certificate.holds, certificate


def test_it_is_the_models_law_given_the_bytes():
    """Every text that the model may write after what is kept, if it begins with the bytes that were
    taken back: nothing else is asked of it, where those are one byte."""
    ours = method_law(
        "ar", TARGET, [1, 0], spelled=SYLLABLES, text=True, temperature=1.0, max_tokens=3
    )
    free = method_law("ar", TARGET, [1], temperature=1.0, max_tokens=4)
    texts = {}
    for tokens, p in free.items():
        said = b"".join(SYLLABLES[token] for token in tokens)
        if said.startswith(b"a"):
            # After "a" alone three more are written, after a longer token two.
            kept = tokens if tokens[0] == 0 else tokens[:3]
            texts[(1, *kept)] = texts.get((1, *kept), 0.0) + p
    mass = sum(texts.values())
    assert len(ours) == len(texts)
    assert max(abs(ours[text] - p / mass) for text, p in texts.items()) < 1e-12


def test_a_constraint_goes_on_where_the_prompt_ends():
    pytest.importorskip("llguidance")
    for asked in ({"regex": "b(a|b)*"}, {"choices": ["ba", "bab"]}):
        certificate = certify_case(
            "ar", TARGET, [1, 0], spelled=SYLLABLES, text=True, temperature=1.0, max_tokens=3,
            **asked,
        )  # fmt: skip
        assert certificate.holds, certificate
        assert certificate.sequences > 2


def _without_path(monkeypatch):
    real = covers._path_logprobs
    monkeypatch.setattr(covers, "_path_logprobs", lambda *a: (real(*a)[0] * 0, real(*a)[1]))


def _step_by_step(monkeypatch):
    """Each token drawn among those that fit, whatever may follow it."""
    real = covers.cover_law

    def law(logits_NV, healing, history, usable=None):
        p_NV = real(logits_NV, healing, history, usable)
        return p_NV / p_NV.sum(-1, keepdim=True) / len(p_NV)

    monkeypatch.setattr(coroutine, "cover_law", law)


def _without_the_prompts_own_end(monkeypatch):
    real = TokenIndex.writing
    monkeypatch.setattr(TokenIndex, "writing", lambda self, text: real(self, text)[:0])


def _of_the_wrong_spelling(monkeypatch):
    real = coroutine._along_chains

    async def swapped(*arguments):
        return (await real(*arguments))[::-1]

    monkeypatch.setattr(coroutine, "_along_chains", swapped)


@pytest.mark.parametrize(
    "plant",
    [_without_path, _step_by_step, _without_the_prompts_own_end, _of_the_wrong_spelling],
    ids=lambda plant: plant.__name__,
)
def test_planted_mistakes_are_caught(plant, monkeypatch):
    plant(monkeypatch)
    assert any(caught(case()) for case in healed_cases("ar"))


def test_chains_hold_every_spelling():
    spelled = [b"a", b"b", b"ab", b"abab", b"x", b"ababa", b"aba"]
    for ids in itertools.product([0, 1, 2, 3], repeat=3):
        found = heal(spelled, [4, *ids])
        if isinstance(found, Healing):
            held = {chain[:i] for chain in found.chains() for i in range(len(chain) + 1)}
            assert held >= set(found.spellings)
            assert found.chains()[0] == tuple(found.taken[:-1])


def test_the_beginning_of_a_text_is_healed_as_its_end_is_in_reverse():
    spelled = [b"x", b"im", b"por", b"port", b"import", b" "]
    vocabulary = Vocabulary(len(spelled), spelled=spelled)
    found = healing_of(vocabulary, [2, 5, 0], 0, backward=True)  # por␣x
    assert found is None  # no token ends with "por" and has more before
    found = healing_of(vocabulary, [3, 5, 0], 0, backward=True)  # port␣x
    assert (found.taken, found.rest, found.kept) == ([3], b"trop", [0, 5])
    assert found.index.beyond(b"trop").tolist() == [4]
    assert found.over(0, 4) == b"mi"
    euro = "€".encode()
    spelled = [b"x", euro[:2], euro[2:], b"5" + euro, b"7" + euro[:2]]
    vocabulary = Vocabulary(len(spelled), spelled=spelled)
    assert healing_of(vocabulary, [1, 2, 0], 0, backward=True).taken == [2, 1]


def test_spellings_before_a_text_are_those_of_the_tokenizer():
    spelled = [b"a", b"b", b"ab", b"c", b"cab", b"x"]
    found = healing_of(Vocabulary(6, spelled=spelled), [0, 1, 5], 0, backward=True)
    # What was given is a, b: one token writes it, so of cuts nothing is known, but of b itself.
    assert set(found.spellings) == {(), (1,)}
    found = healing_of(Vocabulary(6, spelled=spelled), [2, 5], 0, backward=True)
    assert set(found.spellings) == {(), (1,)}
    assert found.left == [b"ba", b"a"]


@pytest.mark.parametrize("scheme", ["always", "first", "never", "legacy"])
def test_a_text_inside_another_has_no_space_put_before_it(scheme):
    tokenizer = sentence_tokenizer(scheme)
    vocabulary = Vocabulary(len(tokenizer), tokenizer)
    spell = spelling_of(vocabulary).spell
    for text in ("ab", " ab", "  ab", "\n ab", "(a", "é", "\tab ", "日 "):
        ids = encode_inside(vocabulary, text)
        assert spell(ids) == text.encode(), text


def around(prompt, method="sequential", target=MASKED, **options):
    return certify_case(method, target, prompt, **{"temperature": 1.0, **WITH_MASK, **options})


@pytest.mark.parametrize("method", ["sequential", "stepwise"])
def test_two_holes_are_healed_one_after_the_other(method):
    """A text between two holes is the right border of one and the left border of the other."""
    certificate = around([None, 2, None, 1], method, top_k=2)
    assert certificate.holds, certificate
    assert certificate.sequences > 4


@pytest.mark.parametrize("method", ["sequential", "stepwise"])
@pytest.mark.parametrize("prompt", [[1, 0, None], [None, 1]], ids=["before", "after"])
def test_a_border_has_the_models_law_given_its_bytes(method, prompt):
    """The token that holds the one byte that is given has the law of its place on the canvas, of
    tokens that begin or end with this byte."""
    ours = method_law(method, MASKED, prompt, **{**WITH_MASK, "temperature": 1.0})
    before = prompt[0] is not None
    canvas = [1, None, None] if before else [None, None]  # once the border is open
    place = 1
    given = [(i, token) for i, token in enumerate(canvas) if token is not None]
    if method == "sequential":
        logits_V = MASKED.logits(*context(given, [], place, 4))
    else:
        reading = canvas_reading(method, MASKED, {}, Masked(4))
        logits_V = MASKED.logits(*reading.context(tuple(canvas), place, None, []))
    law = logits_V[:4].softmax(-1).tolist()
    holds = [text.startswith(b"a") if before else text.endswith(b"b") for text in SYLLABLES]
    mass = sum(p for p, fits in zip(law, holds) if fits)
    for token, (p, fits) in enumerate(zip(law, holds)):
        found = sum(chance for tokens, chance in ours.items() if tokens[place] == token)
        assert found == pytest.approx(p / mass if fits else 0.0, abs=1e-12)


def _forgets_the_bytes(monkeypatch):
    def law(logits_NV, healing, history, usable=None):
        p_NV = logits_NV.softmax(-1)
        p_NV[1:] = 0
        return p_NV

    monkeypatch.setattr(coroutine, "cover_law", law)


def _keeps_what_was_taken_back_as_well(monkeypatch):
    real = infill.open_holes

    def twice(*arguments):
        return [
            hole and hole._replace(start=hole.start + len(hole.before.taken if hole.before else ()))
            for hole in real(*arguments)
        ]

    monkeypatch.setattr(infill, "open_holes", twice)


def _counts_spellings_twice(monkeypatch):
    real = covers._path_logprobs
    monkeypatch.setattr(covers, "_path_logprobs", lambda *a: (real(*a)[0] * 2, real(*a)[1]))


def _of_another_spelling(monkeypatch):
    real = coroutine._drawn

    def swapped(seq, healing, answers, usable):
        return real(seq, healing, answers[::-1], usable)

    monkeypatch.setattr(coroutine, "_drawn", swapped)


@pytest.mark.parametrize(
    "plant",
    [
        _forgets_the_bytes,
        _keeps_what_was_taken_back_as_well,
        _counts_spellings_twice,
        _of_another_spelling,
    ],
    ids=lambda plant: plant.__name__,
)
@pytest.mark.parametrize("method", ["sequential", "stepwise"])
def test_planted_mistakes_around_holes_are_caught(method, plant, monkeypatch):
    plant(monkeypatch)
    assert any(caught(around(prompt, method)) for prompt in ([2, None], [None, 1, 0]))


def test_nothing_is_healed_where_tokens_write_other_things_than_their_names():
    """XLNet's tokenizer has tokens for white space, after which words begin without a space."""
    tokenizer = with_white_space(sentence_tokenizer("legacy"))
    vocabulary = Vocabulary(len(tokenizer), tokenizer)
    assert known_tokens(vocabulary) is None
    assert healing_of(vocabulary, tokenizer("de").input_ids, 0) is None
    plain = sentence_tokenizer("legacy")
    plain.add_tokens(["<cls>"])
    assert known_tokens(Vocabulary(len(plain), plain)) is not None
