"""Token healing: which tokens are taken back, and that what is chosen instead has the law of its
definition."""

import itertools

import pytest

from forerun.backbones.table import TableBackbone
from forerun.certify.cases import SYLLABLES, healed_cases
from forerun.certify.enumeration import certify_case, method_law
from forerun.constraints.healing import Healing, TokenIndex, healing_of
from forerun.constraints.vocabulary import Vocabulary
from forerun.methods import healing as coroutine
from forerun.probability import covers
from tests.certify.definitions import EXACT
from tests.helpers import caught

TARGET = TableBackbone(vocab=4, seed=1)


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
