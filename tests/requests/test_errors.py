"""No error is quiet: one request raises its own, several are counted, a chat is no bad prompt."""

import asyncio
import warnings

import pytest

from forerun.errors import BadOption
from tests.helpers import PROMPTS, fresh, model

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}[{{ tools[0].name }}]{% endif %}{% if loud %}!{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HOW = dict(max_tokens=4, ignore_eos=True)


def with_template(lanes=2):
    m = fresh(lanes=lanes)
    m.tokenizer.chat_template = TEMPLATE
    return m


def test_a_list_of_messages_is_a_chat():
    m = with_template()
    expected = m.generate(messages=CHAT, **HOW)
    assert m.generate(CHAT, **HOW).prompt_ids == expected.prompt_ids
    several = m.generate([CHAT, "hi", CHAT], **HOW)
    assert [r.prompt_ids for r in several] == [
        expected.prompt_ids,
        m.encode("hi"),
        expected.prompt_ids,
    ]
    assert "".join(m.stream(CHAT, **HOW)) == expected.text


@pytest.mark.parametrize("prompt", [CHAT, [CHAT, CHAT], [CHAT, "plain"]])
def test_a_model_without_a_template_refuses_a_chat(prompt):
    with pytest.raises(BadOption, match="no chat template"):
        model().generate(prompt, **HOW)


def test_tools_and_options_reach_the_template():
    m = with_template()
    plain = m.generate(CHAT, **HOW)
    more = m.generate(CHAT, tools=[{"name": "clock"}], template_options={"loud": True}, **HOW)
    assert m.decode(more.prompt_ids) == "[clock]!" + m.decode(plain.prompt_ids)
    bare = m.generate(CHAT, template_options={"add_generation_prompt": False}, **HOW)
    assert m.decode(plain.prompt_ids) == m.decode(bare.prompt_ids) + "<assistant>"
    with pytest.raises(BadOption, match="tools"):
        m.generate("hi", tools=[{"name": "clock"}], **HOW)


def test_errors_in_a_list_are_counted():
    with pytest.warns(UserWarning, match="2 of 3 results have an error; the first, of result 0"):
        bad, good, _ = model().generate([[], PROMPTS[0], [10**6]], **HOW)
    assert bad.finish_reason == "error" and good.error is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(model().generate(PROMPTS[:2], **HOW)) == 2


def test_errors_in_a_list_are_raised_on_demand():
    m = model()
    bad = [PROMPTS[0], [10**6]]
    for call in (m.generate, lambda *a, **k: list(m.stream(*a, **k))):
        with pytest.raises(BadOption, match="token id 1000000"):
            call(bad, raise_errors=True, **HOW)
    with pytest.raises(BadOption, match="token id 1000000"):
        asyncio.run(m.agenerate(bad, raise_errors=True, **HOW))


def test_a_stream_of_several_reports_the_bad_one():
    m = model()
    texts = ["", ""]
    with pytest.warns(UserWarning, match="1 of 2 results have an error; the first, of result 0"):
        for index, piece in m.stream([[10**6], "good"], **HOW):
            texts[index] += piece
    assert texts == ["", m.generate("good", **HOW).text]


def test_an_empty_text_goes_on_from_the_start_token():
    m = fresh()
    with pytest.raises(BadOption, match="prompt is empty"):
        m.generate("", **HOW)
    m.tokenizer.bos_token = m.tokenizer.convert_ids_to_tokens(65)
    r = m.generate("", **HOW)
    assert r.prompt_ids == [65] and len(r.token_ids) == 4
    with pytest.raises(BadOption, match="prompt is empty"):
        m.generate([[]], raise_errors=True, **HOW)
