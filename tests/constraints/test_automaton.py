"""Regular languages become automata over bytes and over tokens, within limits."""

import itertools
import time

import numpy as np
import pytest

from forerun.checkpoints import tiny
from forerun.constraints import regular
from forerun.constraints.automaton import (
    automaton_of_choices,
    restricted,
    token_automaton,
    with_ends,
    without_ends,
)
from forerun.constraints.regular import language_of_choices, language_of_regex
from forerun.constraints.spelling import Spelling, spelling_of
from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import BadOption, NotAble
from tests.helpers import ROOT

# Tokens that overlap, cut a character in two, stand for nothing, and one that is no start.
TOKENS = [b"a", b"b", b"ab", b"ba", b"abb", None, "é".encode(), "é".encode()[:1], "é".encode()[1:]]
SPELLING = Spelling(TOKENS)


def texts_of(automaton, length):
    every = itertools.product(range(len(TOKENS)), repeat=length)
    return {tokens for tokens in every if automaton.accepts(tokens)}


@pytest.mark.parametrize(
    "regex", ["(ab)*", "a?b{1,3}", "[^b]+", ".", "é|ab|b", "(a|b)*abb", "", "b+(ab)?"]
)
def test_a_token_automaton_accepts_what_the_expression_matches(regex):
    import re

    language = language_of_regex(regex)
    automaton = token_automaton(language, SPELLING)
    for length in range(4):
        for tokens in itertools.product(range(len(TOKENS)), repeat=length):
            spelled = [TOKENS[token] for token in tokens]
            whole = b"".join(part or b"" for part in spelled)
            try:
                matches = re.fullmatch(regex, whole.decode(), re.DOTALL) is not None
            except UnicodeDecodeError:
                matches = False
            expected = matches and None not in spelled
            assert automaton.accepts(tokens) == expected, (regex, spelled)
            if None not in spelled:
                assert language.accepts(whole) == expected


def test_tokens_that_do_the_same_everywhere_are_one_class():
    letters = Spelling([bytes([byte]) for byte in b"abcdefgh01"])
    automaton = token_automaton(language_of_regex("[a-h]+[01]"), letters)
    assert automaton.next_SC.shape[1] == 3  # letters, digits, and what leads nowhere
    assert len(set(automaton.class_V[:8])) == 1
    assert automaton.class_V[8] == automaton.class_V[9] != automaton.class_V[0]


def test_parentheses_in_sets_and_behind_a_backslash_open_and_close_nothing():
    assert language_of_regex(r"[)(]\)[]a)]").accepts(b")))")


def test_anchors_at_the_ends_say_nothing_new_and_an_escaped_one_is_a_letter():
    assert language_of_regex("^ab$").accepts(b"ab")
    assert language_of_regex(r"a\$").accepts(b"a$")
    assert not language_of_regex(r"a\$").accepts(b"a")
    assert language_of_regex(r"a\\$").accepts(b"a\\")


def test_choices_need_no_extra_and_may_begin_alike(monkeypatch):
    monkeypatch.setattr(regular, "compiled", None)
    language = language_of_choices(("ab", "abb", "é"))
    accepted = [
        text for text in ("a", "ab", "abb", "é", "b", "") if language.accepts(text.encode())
    ]
    assert accepted == ["ab", "abb", "é"]
    assert automaton_of_choices([b"", b"a"]).accepts(b"")


def test_the_lengths_of_a_language_are_those_of_its_texts():
    automaton = token_automaton(language_of_choices(("abb", "ab")), SPELLING)
    assert automaton.lengths(5) == [1, 2, 3]  # abb; ab; a b; ab b, a b b
    assert token_automaton(language_of_regex("(bb)+"), SPELLING).lengths(5) == [2, 4]
    assert token_automaton(language_of_choices(("xyz",)), SPELLING).lengths(5) == []


def test_no_way_counts_on_a_token_that_is_never_written():
    automaton = token_automaton(language_of_choices(("abb", "bab")), SPELLING)
    possible_V = np.ones(len(TOKENS), bool)
    possible_V[[0, 4]] = False  # neither a nor abb
    less = restricted(automaton, possible_V)
    for length in range(1, 4):
        expected = {t for t in texts_of(automaton, length) if not {0, 4} & set(t)}
        assert texts_of(less, length) == expected
    assert less.next_SC.shape[1] <= automaton.next_SC.shape[1]


def test_a_text_may_end_before_its_last_place_and_only_where_the_language_does():
    automaton = with_ends(token_automaton(language_of_regex("(ab)+"), SPELLING), [5])
    assert automaton.accepts([2, 5, 1, 7])  # after the end comes anything
    assert automaton.accepts([2, 2])  # or nothing
    assert not automaton.accepts([0, 5, 1])
    early = without_ends(automaton)
    assert early.states == automaton.states
    assert early.accepts([2, 2]) and not early.accepts([2, 5])


@pytest.mark.parametrize(
    ("regex", "said"),
    [
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "back reference"),
        ("(a", "cannot be used"),
        ("a)|(b", "does not open"),
        (r"\bword", "cannot be used"),
        ("a" * 200_000, "100000 are the most"),
    ],
)
def test_expressions_that_mean_nothing_here_are_refused_in_one_line(regex, said):
    with pytest.raises(BadOption, match=said) as refused:
        language_of_regex(regex)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_an_expression_that_explodes_is_stopped_in_time(monkeypatch):
    monkeypatch.setattr(regular, "SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(BadOption, match="more than 1 s"):
        language_of_regex("(a|b)*a(a|b){40}")
    assert time.monotonic() - began < 5


def test_an_expression_that_explodes_is_stopped_in_memory(monkeypatch):
    monkeypatch.setattr(regular, "MEGABYTES", 300)
    monkeypatch.setattr(regular, "SECONDS", 300)
    with pytest.raises(BadOption, match="300 MB"):
        language_of_regex("(a|b)*a(a|b){22}")


def test_an_automaton_of_too_many_states_is_refused(monkeypatch):
    monkeypatch.setattr(regular, "MOST_STATES", 50)
    with pytest.raises(BadOption, match="50 are the most"):
        language_of_regex("a{100}")


def test_without_outlines_core_the_error_names_the_extra(monkeypatch, tmp_path):
    (tmp_path / "outlines_core.py").write_text("raise ImportError('gone')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotAble, match=r"forerun\[grammar\]"):
        language_of_regex("a unique expression")


def test_the_worker_imports_nothing_of_the_package():
    worker = ROOT / "src" / "forerun" / "constraints" / "regex_worker.py"
    assert "forerun" not in worker.read_text().replace("nothing of\nForerun", "")


def test_a_byte_level_vocabulary_spells_what_the_tokenizer_writes():
    tokenizer = tiny.tokenizer()
    spelling = spelling_of(Vocabulary(len(tokenizer), tokenizer))
    for text in ("def f(x):\n    return x", "naïve – 🙂", "  two  spaces"):
        assert spelling.spell(tokenizer(text).input_ids).decode() == text


def test_sentencepiece_tokens_are_spaces_bytes_and_text():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = {"<unk>": 0, "\u2581the": 1, "<0xC3>": 2, "<0xA9>": 3, "x": 4}
    backend = Tokenizer(models.BPE(pieces, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    spelling = spelling_of(Vocabulary(6, tokenizer))
    assert spelling.tokens == [None, b" the", b"\xc3", b"\xa9", b"x", None]


def test_a_tokenizer_whose_bytes_are_unknown_is_refused():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(NotAble, match="WordPiece"):
        spelling_of(Vocabulary(2, PreTrainedTokenizerFast(tokenizer_object=backend)))
    with pytest.raises(NotAble, match="fast tokenizer"):
        spelling_of(Vocabulary(2, object()))
