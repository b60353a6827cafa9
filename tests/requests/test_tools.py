"""Tools: what a call looks like, and the calls in a text, whole or piece by piece."""

import json

import pytest

from forerun.errors import BadOption
from forerun.requests.tools import (
    BARE,
    TAGGED,
    ToolCall,
    ToolCallParser,
    parse_calls,
    parse_tools,
    response_format_options,
    tool_format,
    tool_spec,
)
from tests.helpers import fresh

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
TEXT = (
    'Let me <b>see. <tool_call>\n{"name": "f", "arguments": {"a": "}{\\"", "b": [1, {}]}}\n'
    '</tool_call> and <tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>! <tool_'
)


def told(deltas):
    """Content and calls, put together from deltas as a client would."""
    content = ""
    calls = {}
    for delta in deltas:
        plain = delta.as_dict()
        content += plain.get("content", "")
        for call in plain.get("tool_calls", []):
            known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
    return content, list(calls.values())


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_deltas_add_up_to_the_calls_and_the_content(size):
    parser = ToolCallParser()
    deltas = []
    for at in range(0, len(TEXT), size):
        deltas += parser.push(TEXT[at : at + size])
    deltas += parser.finish()
    content, calls = told(deltas)
    assert content == parser.content == "Let me <b>see.  and ! <tool_"
    assert [call["name"] for call in calls] == ["f", "g"]
    assert json.loads(calls[0]["arguments"]) == {"a": '}{"', "b": [1, {}]}
    assert [call.arguments for call in parser.calls] == [call["arguments"] for call in calls]
    assert parse_calls(TEXT) == (parser.content, parser.calls)


def test_arguments_are_told_before_the_call_is_complete():
    parser = ToolCallParser()
    deltas = parser.push('<tool_call>\n{"name": "f", "arguments": {"a": 1')
    assert [(d.name, d.arguments) for d in deltas] == [("f", ""), (None, '{"a": 1')]


def test_what_is_no_call_stays_content():
    content, calls = parse_calls("<tool_call>no json</tool_call>")
    assert content == "<tool_call>no json</tool_call>" and calls == []


def test_a_bare_call_is_the_whole_text():
    _, calls = parse_calls('{"name": "f", "parameters": {"a": 2}}', BARE)
    assert calls == [ToolCall("f", '{"a": 2}')] and calls[0].values == {"a": 2}
    assert tool_format('{"name": x, "parameters": y}') is BARE
    assert tool_format("… <tool_call> …") is TAGGED and tool_format(None) is TAGGED


def test_text_instead_of_a_bare_call_does_not_wait():
    parser = ToolCallParser(BARE)
    pieces = [" ", "\n", "So", " it is {"]
    told = [[delta.content for delta in parser.push(piece)] for piece in pieces]
    assert told == [[], [], [" \nSo"], [" it is {"]]
    assert parser.finish() == [] and parser.calls == []


def test_a_call_that_is_cut_off_is_told_once():
    parser = ToolCallParser()
    deltas = parser.push('a<tool_call>\n{"name": "f", "arguments": {"a": "1</tool')
    deltas += parser.finish()
    assert told(deltas) == ("a", [{"name": "f", "arguments": '{"a": "1</tool'}])
    assert parser.calls == [] and parser.cut == ToolCall("f", '{"a": "1</tool')
    assert parse_calls('<tool_call>\n{"na') == ('<tool_call>\n{"na', [])


def test_functions_are_tools_too():
    def add(a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: one
            b: the other
        """

    [tool] = parse_tools([add])
    assert tool["function"]["name"] == "add"


@pytest.mark.parametrize(
    "tools, choice, said",
    [
        ([], "required", "needs tools="),
        ([STOP], "other", "names no tool"),
        ([STOP], {"type": "function"}, "tool_choice must be"),
        ([STOP], 3, "must be none, auto, required"),
    ],
)
def test_choices_that_mean_nothing_are_refused(tools, choice, said):
    with pytest.raises(BadOption, match=said):
        tool_spec(tools, choice)


def test_tools_of_another_form_are_refused():
    for tools in ("f", {}, [{"name": "f"}]):
        with pytest.raises(BadOption, match="tools"):
            parse_tools(tools)


@pytest.fixture(scope="module")
def chatting():
    pytest.importorskip("llguidance")
    model = fresh()
    model.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ tools[0].function.name }}"
    )
    return model


def ask(model, choice, **options):
    same = dict(messages=[{"role": "user", "content": "hi"}], max_tokens=140, temperature=1.0)
    return model.generate(**same, tools=[WEATHER, STOP], tool_choice=choice, **options)


def test_a_named_tool_is_called_once_and_parsed(chatting):
    choice = {"type": "function", "function": {"name": "weather"}}
    result = ask(chatting, choice, method="lookup")
    assert result.finish_reason == "stop"
    [call] = result.tool_calls
    assert call.name == "weather" and call.values["city"] in ("Rome", "Oslo")
    assert result.as_dict()["tool_calls"][0]["function"]["name"] == "weather"
    assert ask(chatting, "stop").text == (
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    )


def test_automatic_calls_are_well_formed_wherever_they_stand(chatting):
    """A model of bytes that knows nothing writes the tag by chance only: it is helped along."""
    opening = chatting.tokenizer("<", add_special_tokens=False).input_ids
    result = ask(chatting, "auto", logit_bias={opening[0]: 1e3})
    assert result.finish_reason in ("length", "stop") and result.tool_calls == []
    spec = tool_spec([STOP], "auto")
    from forerun.constraints.engines import compiled

    language = compiled(spec, chatting.vocabulary).language()
    state = language.start()
    text = 'so: <tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call> done'
    for token in chatting.tokenizer(text, add_special_tokens=False).input_ids:
        state = language.advance(state, token)
        assert state is not None
    assert language.accepts(state)
    state = language.start()
    for token in chatting.tokenizer("<tool_call>\n{", add_special_tokens=False).input_ids:
        state = language.advance(state, token)
    [wrong] = chatting.tokenizer("x", add_special_tokens=False).input_ids
    assert language.advance(state, wrong) is None


def test_without_a_choice_calls_are_parsed_and_nothing_is_constrained(chatting):
    result = ask(chatting, None)
    assert result.tool_calls == [] and "llguidance" not in result.reference


def test_a_tool_choice_and_a_schema_exclude_each_other(chatting):
    with pytest.raises(BadOption, match="give one of them"):
        ask(chatting, "required", schema={})


def test_response_formats_become_options():
    schema = {"type": "object"}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert response_format_options(named) == {"schema": schema}
    assert response_format_options({"type": "json_object"}) == {"schema": schema}
    assert response_format_options({"type": "text"}) == response_format_options(None) == {}
    for wrong in ("json", {"type": "xml"}, {"type": "json_schema"}, {}):
        with pytest.raises(BadOption, match="response_format"):
            response_format_options(wrong)
