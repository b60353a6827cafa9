"""Text around holes that is cut inside a token: what callers get."""

import json

import pytest

import forerun
from forerun.checkpoints import tiny
from forerun.constraints.spelling import spelling_of
from forerun.errors import BadOption
from forerun.requests.infill import parse_text
from tests.helpers import byte_tokenizer, run, sentence_tokenizer, stepped

TEXTS = [
    "def a(a<|fill:2|>ab):\n  ab",
    "x<|fill:3|>  def\n<|fill:1|>\n ab ",
    "<|fill:2|>ab x",
    "<|fill:2|> ab",
    "é<|fill:2|>ü日<|fill:1|>",
    "\n<|fill:2|>\n\n  x",
    "a\tb<|fill:1-3|>\tb",
]
TOKENIZERS = {
    **{scheme: lambda scheme=scheme: sentence_tokenizer(scheme)
       for scheme in ("always", "first", "never", "legacy")},
    "bytes": lambda: byte_tokenizer(["Ġ a", "a b", "Ġa b", "b )", ") :", "Ċ Ġ", "ĊĠ Ġ", "e f"]),
}  # fmt: skip


def built(arch, tokenizer, seed=0):
    network = tiny.build(arch, seed, vocab_size=len(tokenizer) + 1)
    return forerun.from_network(network, tokenizer, name="cut", lanes=4, max_context=160)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("arch", ["any-subset", "masked"])
def test_given_bytes_stay_and_tokens_write_the_text(name, arch):
    """Whatever a model writes: its tokens spell the text, in which all that was given stands."""
    tokenizer = TOKENIZERS[name]()
    with built(arch, tokenizer) as model:
        spelled = spelling_of(model.vocabulary).tokens
        whole = [i for i, text in enumerate(spelled) if text and text.isascii()]
        options = dict(n=3, temperature=1.0, allowed_tokens=whole)
        healed = 0
        for text in TEXTS:
            for found in model.infill(text, **options):
                pieces = parse_text(text).pieces
                assert list(found.given) == list(pieces)
                assert found.text == "".join(g + f for g, f in zip(pieces, [*found.fills, ""]))
                assert model.decode(found.token_ids) == found.text
                assert found.finish_reason == "length"
                healed += len(found.fill_ids[0]) != 2
            for found in model.infill(text, heal=False, **options):
                assert model.decode(found.token_ids) == found.text
        assert healed


@pytest.fixture(scope="module", params=["zoo:any-subset", "zoo:masked"])
def zoo(request):
    with forerun.load(request.param, lanes=4) as model:
        yield model


def test_words_that_are_cut_are_completed(zoo):
    before = "import nu<|fill:2|>\n\ndef f():"
    found = zoo.infill(before)
    assert found.text.startswith("import numpy")
    assert zoo.decode(found.token_ids) == found.text
    # The text has as many tokens as it had with the hole: those beside it are no tokens more.
    assert len(found.token_ids) == len(zoo.infill(before, heal=False).token_ids)
    assert not zoo.infill(before, heal=False).text.startswith("import numpy")
    after = zoo.infill("<|fill:3|>mport numpy as np")
    assert after.text.endswith("import numpy as np")
    assert zoo.decode(after.fill_ids[0][-1:]).lstrip() == "import"


def test_what_is_told_of_a_healed_hole_adds_up(zoo):
    found = zoo.infill("def f(a, <|fill:3|>):\n    return a", logprobs=0)
    [fill] = found.fills
    assert fill[:1] != " " and found.text == f"def f(a, {fill}):\n    return a"
    assert found.stats.tokens == len(found.fill_ids[0])
    assert found.stats.tokens + found.stats.prompt_tokens == len(found.token_ids)
    assert found.logprob < sum(entry["logprob"] for entry in found.logprobs) <= 0
    assert zoo.decode(found.fill_ids[0]).strip().startswith(fill.strip())


def test_a_range_is_healed_at_every_length(zoo):
    best = zoo.infill("import nu<|fill:1-4|>\n", n=4)
    assert len({len(result.token_ids) for result in best}) == 4
    assert all(result.text.startswith("import nu") for result in best)
    alone = zoo.infill("import nu<|fill:3|>\n")
    assert alone.text in [result.text for result in best]


def test_token_ids_are_taken_as_they_are(zoo):
    left = zoo.encode("import nu", special=False)
    right = zoo.encode("\n\ndef f():", special=False)
    ids = zoo.infill(token_ids=[*left, None, None, *right])
    assert ids.token_ids == zoo.infill("import nu<|fill:2|>\n\ndef f():", heal=False).token_ids
    assert ids.token_ids[: len(left)] == left


def test_a_hole_that_must_hold_something_is_not_healed(zoo):
    text = "x = nu<|fill|>; y = nu<|fill:2|>\n"
    found = zoo.infill(text, holes=[{"choices": ["mpy"]}, None])
    assert found.fills[0] == "mpy" and found.text.startswith("x = numpy; y = nu")
    assert zoo.decode(found.token_ids) == found.text


def test_what_is_cancelled_before_it_is_healed_has_what_was_given():
    with built("any-subset", byte_tokenizer(["a b"])) as model:
        jobs = stepped(model).submit_infill("xa<|fill:2|>y")
        jobs.cancel()
        [found] = jobs.results()
        assert found.finish_reason == "cancelled" and list(found.fills) == [""]
        assert found.text == model.decode(found.token_ids) == "xay"
        assert found.logprob is None


def test_a_model_that_must_see_something_is_left_something():
    tokenizer = byte_tokenizer(["a b"])
    with built("xlnet", tokenizer) as model:
        found = model.infill("a<|fill:2|>")
        assert found.text.startswith("a") and len(found.fill_ids[0]) == 2
        assert model.infill("xa<|fill:2|>").text.startswith("xa")


def test_it_is_a_flag_for_holes_too():
    words = ("infill", "import nu<|fill:2|>\n\ndef f():", "--json", "-q")
    healed = json.loads(run(*words).stdout)
    plain = json.loads(run(*words, "--no-heal").stdout)
    assert healed["text"].startswith("import numpy")
    assert not plain["text"].startswith("import numpy")
    with pytest.raises(BadOption, match="heal='no' must be True or False"):
        forerun.load("zoo:any-subset").infill("a<|fill:1|>", heal="no")


@pytest.mark.parametrize("scheme", ["always", "first", "never", "legacy"])
def test_a_space_behind_a_text_is_written(scheme):
    """Tokenizers drop one where they take tokens for a beginning; behind a prompt they are none."""
    tokenizer = sentence_tokenizer(scheme)
    spaced, longer = tokenizer.convert_tokens_to_ids(["▁b", "▁def"])
    with built("llama", tokenizer) as model:
        options = dict(max_tokens=2, logit_bias={spaced: 50.0}, allowed_tokens=[spaced, longer])
        for prompt in ("(a:", "é", "x", "(:\n", "x de"):
            for heal in (True, False):
                found = model.generate(prompt, heal=heal, **options)
                assert model.decode([*found.prompt_ids, *found.token_ids]) == prompt + found.text
                assert found.text.endswith(" b")
                pieces = model.stream(prompt, heal=heal, **options)
                assert "".join(pieces) == found.text
