"""Log-probabilities of tokens that are given: continuations, prompts, and their texts."""

import pytest
import torch

from forerun.errors import BadOption, NotAble
from tests.helpers import PROMPTS, fresh, model, network


def by_hand(ids, start):
    """The log-probability of every token from `start` on, by the library's own forward."""
    with torch.no_grad():
        logits = network("llama")(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [float(logits[i - 1, ids[i]]) for i in range(start, len(ids))]


def test_continuations_are_scored_together():
    m = fresh(lanes=4)
    continuations = [[1, 2, 3], [9], [200, 100]]
    found = m.score(PROMPTS[0], continuations)
    assert m.engine.clock.forwards == 1
    for score, tokens in zip(found, continuations, strict=True):
        expected = by_hand([*PROMPTS[0], *tokens], len(PROMPTS[0]))
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        assert score.logprob == pytest.approx(sum(expected), abs=1e-4)
        assert score.token_ids == tokens and not score.is_greedy
    pairs = m.score([PROMPTS[0], PROMPTS[1]], [[9], [4]])
    assert pairs[0].logprob == pytest.approx(found[1].logprob, abs=1e-5)
    assert pairs[1].logprobs == pytest.approx(by_hand([*PROMPTS[1], 4], 1), abs=1e-4)


def test_what_greedy_decoding_writes_is_greedy():
    m = model()
    written = m.generate(PROMPTS[2], max_tokens=5, ignore_eos=True).token_ids
    assert m.score(PROMPTS[2], [written])[0].is_greedy


def test_texts_are_scored_as_they_are_tokenised():
    m = model()
    [score] = m.score("The quick ", ["brown"])
    assert score.token_ids == m.encode("The quick brown")[len(m.encode("The quick ")) :]
    assert score.logprob == pytest.approx(m.logprob("The quick <|fill|>", "brown"), abs=1e-6)


@pytest.mark.parametrize(
    ("prompt", "continuations", "said"),
    [
        ("x", "y", "must be a list"),
        ("x", [""], "continuation is empty"),
        ([], [[1]], "prompt is empty"),
        (["x", "y"], ["z"], "2 prompts and 1 continuations"),
        ("x", [[1] * 200], "shorten"),
        ("x", [[10**6]], "token id"),
    ],
)
def test_what_cannot_be_scored_is_refused(prompt, continuations, said):
    with pytest.raises(BadOption, match=said):
        model().score(prompt, continuations)


def test_a_model_that_only_fills_blanks_does_not_score():
    with pytest.raises(NotAble, match="does not score"):
        model("masked").score("x", ["y"])


def test_the_prompts_own_tokens_have_logprobs():
    m = model()
    plain = m.generate(PROMPTS[2], max_tokens=3)
    r = m.generate(PROMPTS[2], max_tokens=3, prompt_logprobs=2)
    assert r.token_ids == plain.token_ids and plain.prompt_logprobs is None
    first, *rest = r.prompt_logprobs
    assert first is None
    assert [entry["token"] for entry in rest] == PROMPTS[2][1:]
    expected = by_hand(PROMPTS[2], 1)
    assert [entry["logprob"] for entry in rest] == pytest.approx(expected, abs=1e-4)
    assert all(len(entry["top"]) == 2 for entry in rest)
    assert m.generate([7], max_tokens=2, prompt_logprobs=0).prompt_logprobs == [None]
    assert "prompt_logprobs" in r.as_dict() and "prompt_logprobs" not in plain.as_dict()


def test_logprobs_say_which_text():
    m = model()
    r = m.generate("AB", max_tokens=4, allowed_tokens=[65, 66], logprobs=3)
    assert "".join(entry["text"] for entry in r.logprobs) == r.text
    for entry in r.logprobs:
        for other in entry["top"]:
            assert other["text"] == m.decode([other["token"]], special=True)
