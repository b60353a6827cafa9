"""Tools that a model may call: the grammar of a call, and the calls in a text, whole or piece by
piece. Plain functions, for the library and for servers alike."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.constraints.spec import ConstraintSpec, json_spec, shortened
from forerun.errors import BadOption

Tool = Mapping[str, Any]
CHOICES = ("none", "auto", "required")


# As chat templates write earlier calls. Without a choice of white space more tokens are forced.
AS_TEMPLATES_WRITE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: JSON with a name and arguments, between two tags."""

    opening: str
    closing: str
    arguments: str = "arguments"  # the key that they stand under


TAGGED = ToolFormat("<tool_call>", "</tool_call>")  # Hermes, Qwen and many others
BARE = ToolFormat("", "", "parameters")  # Llama 3: the whole answer is one call


def tool_format(chat_template: str | None) -> ToolFormat:
    """The format that a chat template teaches."""
    template = chat_template or ""
    bare = TAGGED.opening not in template and '"parameters"' in template
    return BARE if bare else TAGGED


def parse_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools in the OpenAI form, or Python functions with types and a docstring."""
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise BadOption(f"tools={shortened(tools)} must be a list.")
    found = [_tool_of_function(tool) if callable(tool) else dict(tool) for tool in tools]
    for tool in found:
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadOption(
                f"tools: {shortened(tool)} must be {{'type': 'function', 'function': {{'name': …, "
                f"'parameters': …}}}}, or a Python function."
            )
    return found


def _tool_of_function(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        raise BadOption(f"tools: {function!r} cannot be described: {error}") from None


def tool_spec(
    tools: Sequence[Tool], choice: Any, form: ToolFormat = TAGGED, parallel: bool = True
) -> ConstraintSpec | None:
    """The constraint that a choice of tools puts on a text; None where there is none.

    "auto" lets the model write text and calls, "required" calls only, and a tool's name, or the
    OpenAI form of it, exactly one call of it.
    """
    name = _chosen_name(choice)
    if choice == "none" or (choice == "auto" and not form.opening):
        return None
    if not tools:
        raise BadOption(f"tool_choice={choice!r} needs tools=.")
    if name is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise BadOption(f"tool_choice={choice!r} names no tool of tools=.")
    schema = call_schema(tools, form)
    if not form.opening:
        return json_spec(schema)
    one = name is not None or not parallel
    return ConstraintSpec("lark", _calls(schema, form, auto=choice == "auto", one=one))


def _chosen_name(choice: Any) -> str | None:
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else None
        if choice is None:
            raise BadOption("tool_choice must be {'type': 'function', 'function': {'name': …}}.")
        return str(choice)
    if not isinstance(choice, str):
        raise BadOption(f"tool_choice={choice!r} must be none, auto, required or a tool's name.")
    return None if choice in CHOICES else choice


def call_schema(tools: Sequence[Tool], form: ToolFormat) -> dict[str, Any]:
    """The JSON schema of one call of any of these tools."""
    parameters = {}
    calls = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        own = function.get("parameters") or {"type": "object", "additionalProperties": False}
        parameters[str(number)] = _moved(own, f"#/$defs/{number}")
        properties = {
            "name": {"const": function["name"]},
            form.arguments: {"$ref": f"#/$defs/{number}"},
        }
        call = {"type": "object", "properties": properties, "required": list(properties)}
        calls.append({**call, "additionalProperties": False})
    return {"$defs": parameters, "anyOf": calls, "x-guidance": AS_TEMPLATES_WRITE}


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references to itself hold where it is moved to."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(part, to) for key, part in schema.items()}
    if isinstance(moved.get("$ref"), str) and moved["$ref"].startswith("#"):
        moved["$ref"] = to + moved["$ref"][1:]
    return moved


def _calls(schema: dict[str, Any], form: ToolFormat, auto: bool, one: bool) -> str:
    """A grammar of calls between tags; with `auto`, text may stand around them."""
    opening = json.dumps(form.opening)
    closing = json.dumps(form.closing)
    rest = f'"\\n" body "\\n" {closing}\nbody: %json {json.dumps(schema)}\n'
    if auto:
        calls = "call? TEXT" if one else "call* TEXT"
        return f"start: {calls}\ncall: head {rest}head[lazy]: TEXT {opening}\nTEXT: /(.|\\n)*/\n"
    calls = "call" if one else 'call ("\\n" call)*'
    return f"start: {calls}\ncall: {opening} {rest}"


@dataclass(frozen=True)
class ToolCall:
    """One call that a model has written."""

    name: str
    arguments: str  # as JSON, as the model wrote it
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)

    @property
    def values(self) -> Any:
        """The arguments as Python holds them."""
        return json.loads(self.arguments)

    def as_dict(self) -> dict[str, Any]:
        """The OpenAI form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Delta:
    """What a piece of text adds: content, or to the call of this index its name or a part of its
    arguments."""

    content: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The OpenAI form of `choices[].delta`."""
        if self.index is None:
            return {"content": self.content}
        call: dict[str, Any] = {"index": self.index}
        function: dict[str, Any] = {"arguments": self.arguments}
        if self.name is not None:
            call |= {"id": self.id, "type": "function"}
            function = {"name": self.name, **function}
        return {"tool_calls": [{**call, "function": function}]}


class ToolCallParser:
    """Finds calls in a text that comes piece by piece. Nothing is told that might still turn out to
    be a tag; a call's arguments are told as they come."""

    def __init__(self, form: ToolFormat = TAGGED):
        self.form = form
        self.calls: list[ToolCall] = []
        self.content = ""
        self.cut: ToolCall | None = None  # a call that was told in part when the text ended
        self._held = ""  # text that is not told yet
        self._call: _OpenCall | None = None if form.opening else _OpenCall(0, form)

    def push(self, piece: str) -> list[Delta]:
        """What a piece adds."""
        self._held += piece
        self._look_for_a_bare_call()
        found: list[Delta] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Delta]:
        """The text is over: tell what was held back."""
        found: list[Delta] = []
        if self._call is not None:
            found += self._call.take(self._held)
            found += self._close(over=True)
        elif self._held:
            found.append(self._say(self._held))
        self._held = ""
        return found

    def _look_for_a_bare_call(self) -> None:
        """Without tags, what does not begin as a call does is text, and need not wait."""
        call = self._call
        if self.form.opening or call is None or call.text.strip():
            return
        if self._held.strip()[:1] not in ("", "{"):
            self._held = call.text + self._held
            self._call = None

    def _step(self, found: list[Delta]) -> bool:
        """Go on to the next tag, if it has come. Whether it has."""
        tag = self.form.opening if self._call is None else self.form.closing
        at = self._held.find(tag) if tag else -1
        end = at if at >= 0 else len(self._held) - _overlap(self._held, tag)
        said = self._held[:end]
        self._held = self._held[end + len(tag) :] if at >= 0 else self._held[end:]
        if self._call is None:
            if said:
                found.append(self._say(said))
            if at >= 0:
                self._call = _OpenCall(len(self.calls), self.form)
        else:
            found += self._call.take(said)
            if at >= 0:
                found += self._close()
        return at >= 0

    def _say(self, text: str) -> Delta:
        self.content += text
        return Delta(content=text)

    def _close(self, over: bool = False) -> list[Delta]:
        """A call is complete, or the text is over. What is no call is content."""
        assert self._call is not None
        call = self._call
        self._call = None
        made, rest = call.close()
        if made is None and over and call.told is not None:
            self.cut = call.told
            return []
        if made is None:
            closing = "" if over else self.form.closing
            return [self._say(f"{self.form.opening}{call.text}{closing}")]
        self.calls.append(made)
        return rest


class _OpenCall:
    """A call that is being written."""

    def __init__(self, index: int, form: ToolFormat):
        self.index = index
        self.text = ""
        self._id = ToolCall("", "").id
        self._head = re.compile(
            rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{form.arguments}"\s*:\s*'
        )
        self._form = form
        self._name: str | None = None
        self._told = 0  # characters of the text that are told, or need not be
        self._value = _JsonEnd()

    def take(self, piece: str) -> list[Delta]:
        self.text += piece
        found: list[Delta] = []
        if self._name is None:
            head = self._head.match(self.text)
            if head is None or head.end() == len(self.text):
                return found
            self._name = json.loads(head[1])
            self._told = head.end()
            found.append(Delta(index=self.index, id=self._id, name=self._name))
        arguments = self._value.take(self.text[self._told :])
        self._told = len(self.text)
        if arguments:
            found.append(Delta(index=self.index, arguments=arguments))
        return found

    @property
    def told(self) -> ToolCall | None:
        """The part of it that was told, if its name was."""
        return None if self._name is None else ToolCall(self._name, self._value.text, self._id)

    def close(self) -> tuple[ToolCall | None, list[Delta]]:
        """The whole call, or None if it is none; and what of it was not told."""
        if self._name is not None and self._value.over:
            return ToolCall(self._name, self._value.text, self._id), []
        try:
            call = json.loads(self.text)
            name, arguments = call["name"], call.get(self._form.arguments, {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return None, []
        made = ToolCall(str(name), json.dumps(arguments), self._id)
        return made, [
            Delta(index=self.index, id=self._id, name=made.name, arguments=made.arguments)
        ]


class _JsonEnd:
    """Where a JSON object ends, as its text comes."""

    def __init__(self) -> None:
        self.text = ""
        self.over = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def take(self, piece: str) -> str:
        """What of a piece belongs to the object."""
        for count, character in enumerate(piece):
            if self.over:
                piece = piece[:count]
                break
            self._look(character)
        self.text += piece
        return piece

    def _look(self, character: str) -> None:
        if self._quoted:
            self._quoted = character != '"' or self._escaped
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.over = self._depth <= 0


def parse_calls(text: str, form: ToolFormat = TAGGED) -> tuple[str, list[ToolCall]]:
    """The content of a whole text, and the calls in it."""
    parser = ToolCallParser(form)
    parser.push(text)
    parser.finish()
    return parser.content, parser.calls


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of the text that begins the tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def response_format_options(response_format: Any) -> dict[str, Any]:
    """The options of `generate` that an OpenAI `response_format` stands for."""
    if response_format is None:
        return {}
    if not isinstance(response_format, Mapping):
        raise BadOption(f"response_format={shortened(response_format)} must be an object.")
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"schema": {"type": "object"}}
    if kind == "json_schema":
        named = response_format.get("json_schema")
        if isinstance(named, Mapping) and isinstance(named.get("schema"), Mapping | bool):
            return {"schema": named["schema"]}
        raise BadOption("response_format: json_schema must be {'name': …, 'schema': {…}}.")
    raise BadOption(
        f"response_format: type={kind!r} must be 'text', 'json_object' or 'json_schema'."
    )
