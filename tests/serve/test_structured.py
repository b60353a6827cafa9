"""Answers that are held to a form, and calls of tools, as openai-python asks for them."""

import json
import re
import sys
import threading

import openai
import pytest

from forerun.serve.models import Models
from forerun.serve.server import Server
from forerun.serve.settings import Settings
from tests.serve.servers import Live, in_process, local_server, slow

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
CALLS = (
    'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def client(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def chat(client, **options):
    how = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "seed": 3, **options}
    return client.chat.completions.create(**how)


def streamed(client, **options):
    """A stream put together as a client would: message and finish reason."""
    content, calls, reason = "", {}, None
    for chunk in chat(client, stream=True, **options):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                if part.id:
                    assert part.type == "function" and part.index == len(calls)
                    calls[part.index] = [part.function.name, ""]
                calls[part.index][1] += part.function.arguments
    return content, [tuple(call) for call in calls.values()], reason


def whole(client, **options):
    [choice] = chat(client, **options).choices
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


def exactly(text):
    """A choice that makes any model write this."""
    return {"extra_body": {"choices": [text]}}


@pytest.mark.parametrize("method", ["ar", "lookup"])
def test_a_chat_writes_json_of_a_schema(client, method):
    r = chat(client, response_format=FORMAT, extra_body={"forerun": {"method": method}})
    jsonschema.validate(json.loads(r.choices[0].message.content), SCHEMA)
    assert r.choices[0].finish_reason == "stop"
    assert r.forerun["reference"].endswith("with schema as llguidance reads it")
    content, _, reason = streamed(client, response_format=FORMAT)
    assert (json.loads(content).keys(), reason) == ({"kind", "legs"}, "stop")


def test_the_embedded_model_writes_forms_and_calls():
    settings = Settings(models=["zoo:ar"], lanes=2, chat_template="plain")
    with Live(Server.of(settings, Models(settings))) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        how = dict(
            model="zoo:ar", max_tokens=200, seed=1, extra_body={"forerun": {"method": "lookup"}}
        )
        pet = chat(client, response_format=FORMAT, **how)
        jsonschema.validate(json.loads(pet.choices[0].message.content), SCHEMA)
        told = whole(client, tools=TOOLS, tool_choice=NAMED, temperature=0, **how)
        assert told[1][0][0] == "weather" and told[2] == "tool_calls"
        assert streamed(client, tools=TOOLS, tool_choice=NAMED, temperature=0, **how) == told


def test_openai_python_parses_what_it_asked_for(client):
    pydantic = pytest.importorskip("pydantic")

    class Pet(pydantic.BaseModel):
        legs: int = pydantic.Field(ge=0, le=9)

    messages = [{"role": "user", "content": "x"}]
    r = client.chat.completions.parse(model="chat", messages=messages, response_format=Pet)
    assert 0 <= r.choices[0].message.parsed.legs <= 9
    r = client.responses.parse(model="chat", input="x", text_format=Pet)
    assert 0 <= r.output_parsed.legs <= 9
    assert r.text.format.type == "json_schema" and r.status == "completed"


def test_a_json_object_is_one(client):
    r = client.completions.create(
        model="plain",
        prompt="x",
        max_tokens=100,
        logit_bias={str(ord("}") - 33): 100},  # a model of bytes without an end of its own
        extra_body={"response_format": {"type": "json_object"}},
    )
    assert isinstance(json.loads(r.choices[0].text), dict)


@pytest.mark.parametrize(
    "form, fits",
    [
        ({"regex": "[0-9]{3}-[ab]"}, "[0-9]{3}-[ab]"),
        ({"choices": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "<" /[a-z]{2}/ ">"'}, "<[a-z]{2}>"),
        ({"grammar": 'root ::= "<" [a-z] ">"'}, "<[a-z]>"),
    ],
)
def test_our_own_forms_hold_everywhere(client, form, fits):
    r = client.completions.create(model="plain", prompt=["x", "y"], n=2, extra_body=form)
    assert len(r.choices) == 4 and all(re.fullmatch(fits, c.text) for c in r.choices)
    assert {c.finish_reason for c in r.choices} == {"stop"}
    assert re.fullmatch(fits, whole(client, extra_body=form)[0])
    r = client.responses.create(model="chat", input="x", extra_body=form)
    assert re.fullmatch(fits, r.output_text)


def test_a_form_that_is_not_met_in_time_is_cut_off(client):
    r = chat(client, response_format=FORMAT, max_tokens=5)
    assert r.choices[0].finish_reason == "length" and r.forerun["finish_reasons"] == ["unmet"]
    text = {"format": {"type": "json_schema", "name": "pet", "schema": SCHEMA}}
    r = client.responses.create(model="chat", input="x", text=text, max_output_tokens=5)
    assert r.status == "incomplete" and r.forerun["finish_reasons"] == ["unmet"]


def test_a_named_tool_is_called(client, live):
    content, calls, reason = whole(client, tools=TOOLS, tool_choice=NAMED)
    [(name, arguments)] = calls
    assert (content, name, reason) == ("", "weather", "tool_calls")
    jsonschema.validate(json.loads(arguments), CITY)
    told = streamed(client, tools=TOOLS, tool_choice=NAMED)
    assert told == (content, calls, reason)
    live.settled("chat")


def test_a_required_call_is_one_of_the_tools(client):
    how = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    _, [(name, _)], reason = whole(client, **how)
    assert name in ("weather", "stop") and reason == "tool_calls"
    assert streamed(client, **how)[1:] == whole(client, **how)[1:]


def test_calls_are_found_and_told_as_they_come(client):
    calls = [("weather", '{"city": "Rome"}'), ("stop", "{}")]
    expected = ("Well.", calls, "tool_calls")
    assert whole(client, tools=TOOLS, **exactly(CALLS)) == expected
    assert streamed(client, tools=TOOLS, **exactly(CALLS)) == expected


def test_arguments_come_in_parts():
    """What comes together is told together, so steps must not be too fast for the test."""
    free = re.escape(CALLS).replace("Rome", "[a-z]{9}")
    with Live(local_server(slow(0.02), models=["chat"], stream_interval=0)) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        parts = [
            part.function.arguments
            for chunk in chat(client, tools=TOOLS, stream=True, extra_body={"regex": free})
            for part in chunk.choices[0].delta.tool_calls or []
        ]
    assert len(parts) > 6, "two calls that come whole are four parts"


def test_without_a_call_a_text_is_told_as_it_is(client):
    for text in (" two \n", "a <tool_", "<tool_call>x</tool_call>"):
        assert whole(client, tools=TOOLS, **exactly(text)) == (text, [], "stop")
        assert streamed(client, tools=TOOLS, **exactly(text)) == (text, [], "stop")
    told = whole(client, tools=TOOLS, tool_choice="none", **exactly(CALLS))
    assert told == (CALLS, [], "stop"), "who may call nothing says what was written"
    auto = whole(client, tools=TOOLS, tool_choice="auto", max_tokens=8)
    assert auto[1:] == ([], "length") and auto[0]


def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(client):
    how = dict(tools=TOOLS, tool_choice=NAMED, max_tokens=CALLS.index("Rome") - CALLS.index("<"))
    content, [(name, arguments)], reason = whole(client, **how)
    assert (content, name, arguments, reason) == ("", "weather", '{"city": "', "length")
    assert streamed(client, **how) == (content, [(name, arguments)], reason)


def test_a_conversation_goes_on_after_a_call(live):
    """Templates write earlier calls as JSON themselves."""
    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    with in_process(local_server(models=["chat"])) as caller:
        served = caller.server.models.served("chat")
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        body = {"model": "chat", "messages": [said], "max_tokens": 1}
        assert caller.post("/v1/chat/completions", body).status_code == 200
        served.model.tokenizer.chat_template = template
        answer = caller.post("/v1/chat/completions", body).json()
        written = json.dumps([{**call, "function": {"name": "f", "arguments": {"a": 1}}}])
        assert answer["usage"]["prompt_tokens"] == len(written)


@pytest.mark.parametrize(
    "body, words, param",
    [
        (dict(response_format={"type": "json_schema"}), "json_schema must be", "response_format"),
        (
            dict(response_format={**FORMAT, "json_schema": {"name": "x", "schema": {"type": "z"}}}),
            "schema",
            "response_format",
        ),
        (
            dict(response_format=FORMAT, extra_body={"regex": "a"}),
            "give one of them",
            "response_format",
        ),
        (dict(response_format=FORMAT, stop="x"), "stop", "stop"),
        (dict(extra_body={"regex": "("}), "regex", "regex"),
        (dict(extra_body={"regex": "(?=a)b"}), "look-around", "regex"),
        (dict(extra_body={"choices": []}), "must be a list of texts", "choices"),
        (dict(extra_body={"grammar": "start: nope"}), "grammar", "grammar"),
        (dict(extra_body={"grammar_engine": "xgrammar"}), "grammar_engine", "grammar_engine"),
        (
            dict(extra_body={"regex": "a", "forerun": {"options": {"grammar_engine": "xgrammar"}}}),
            "option of method='auto'",
            None,
        ),
        (dict(tool_choice="required"), "needs tools=", "tool_choice"),
        (dict(tools=TOOLS, tool_choice="other"), "names no tool", "tool_choice"),
        (dict(tools=[{"type": "function"}]), "tools: ", "tools"),
        (
            dict(tools=TOOLS, tool_choice="required", response_format=FORMAT),
            "response_format cannot be had together with tool_choice",
            "response_format",
        ),
        (
            dict(tools=TOOLS, tool_choice="auto", extra_body={"regex": "a"}),
            "regex cannot be had together with tool_choice",
            "regex",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_our_words(client, live, body, words, param):
    with pytest.raises(openai.BadRequestError, match=re.escape(words)) as refused:
        chat(client, **body)
    assert refused.value.body.keys() == {"message", "type", "param", "code"}
    assert refused.value.type == "invalid_request_error" and refused.value.param == param
    live.settled("chat")


def test_deep_schemas_do_not_break_the_server(client):
    deep = {"type": "object"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    for body in (
        dict(tools=tools, tool_choice="required"),
        dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}),
    ):
        try:
            chat(client, max_tokens=2, **body)
        except openai.BadRequestError as refused:
            assert refused.message


def test_a_suffix_cannot_have_a_form(client):
    with pytest.raises(openai.BadRequestError, match="regex cannot be had together with suffix"):
        client.completions.create(
            model="holes", prompt="x", suffix="y", extra_body={"regex": "[0-9]"}
        )


def test_grammars_are_compiled_off_the_event_loop(monkeypatch):
    from forerun.constraints import llguidance_engine

    threads = []
    make = llguidance_engine.LlguidanceGrammar.__init__

    def noted(self, spec, vocabulary):
        threads.append(threading.current_thread().name)
        make(self, spec, vocabulary)

    monkeypatch.setattr(llguidance_engine.LlguidanceGrammar, "__init__", noted)
    body = {"model": "plain", "prompt": "x", "regex": "[q-t]{3}", "max_tokens": 9}
    with in_process(local_server(models=["plain"])) as caller:
        assert caller.post("/v1/completions", body).status_code == 200
        loop = caller.portal.call(threading.current_thread).name
    assert len(threads) == 1 and loop not in threads


def test_without_the_extra_the_answer_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "forerun.constraints.llguidance_engine", None)
    with in_process(local_server(models=["chat"])) as caller:
        body = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        for more in ({"regex": "[x-z]"}, {"tools": TOOLS, "tool_choice": "required"}):
            answer = caller.post("/v1/chat/completions", {**body, **more})
            assert answer.status_code == 400
            assert "pip install 'forerun[grammar]'" in answer.json()["error"]["message"]
        assert caller.post("/v1/chat/completions", {**body, "tools": TOOLS}).status_code == 200
