"""Conversations of several turns."""

import asyncio

import pytest

from forerun.errors import BadOption
from tests.helpers import fresh, model
from tests.requests.test_errors import with_template

LETTERS = model().encode("abcdefghijklmnopqrstuvwxyz")
HOW = dict(method="ar", max_tokens=6, ignore_eos=True, allowed_tokens=LETTERS)


def test_a_chat_remembers_what_was_said():
    m = with_template()
    chat = m.chat("be brief", **HOW)
    first = chat.send("hi")
    second = chat.send("and?", max_tokens=3)
    assert [message["role"] for message in chat.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert chat.messages[2]["content"] == first.text and len(second.token_ids) == 3
    expected = m.generate(messages=chat.messages[:4], **{**HOW, "max_tokens": 3})
    assert second.prompt_ids == expected.prompt_ids and second.token_ids == expected.token_ids


def test_a_turn_computes_only_what_is_new():
    m = with_template(lanes=3)
    chat = m.chat(**HOW)
    chat.send("a long first message, " * 3)
    before = m.host.work.rows
    second = chat.send("ok")
    new = len(m.encode("<user>ok<assistant>"))
    # the last token of the first answer was never run
    assert m.host.work.rows - before == 1 + new + len(second.token_ids) - 1


def test_a_turn_goes_on_from_the_tokens_that_were_written():
    m = with_template()
    end = m.encode(".")[0]
    chat = m.chat(**{**HOW, "allowed_tokens": [*LETTERS, end], "stop_token_ids": [end]})
    first = chat.send("hi")
    second = chat.send("again")
    written = [*first.prompt_ids, *first.token_ids]
    assert second.prompt_ids[: len(written)] == written
    assert m.decode(second.prompt_ids).endswith("<user>again<assistant>")
    chat.messages[1] = {"role": "assistant", "content": "changed"}
    assert "changed" in m.decode(chat.send("and now").prompt_ids)


def test_a_chat_streams_and_waits():
    m = with_template()
    chat = m.chat(**HOW)
    expected = chat.send("hi").text
    streamed = m.chat(**HOW)
    assert "".join(streamed.stream("hi")) == expected
    awaited = m.chat(**HOW)
    assert asyncio.run(awaited.asend("hi")).text == expected
    assert chat.messages == streamed.messages == awaited.messages


def test_what_is_no_chat_is_refused():
    with pytest.raises(BadOption, match="no chat template"):
        model().chat()
    with pytest.raises(BadOption, match="message=5"):
        with_template().chat().send(5)
    assert fresh().tokenizer.chat_template is None
