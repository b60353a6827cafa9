"""Forms that answers are held to, and calls of tools in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.api import Model
from forerun.requests.structure import with_constraint
from forerun.requests.tools import (
    Delta,
    ToolCallParser,
    ToolFormat,
    parse_tools,
    response_format_options,
    tool_format,
    tool_spec,
)
from forerun.serve.errors import FIELDS, refused
from forerun.serve.wire import CONSTRAINTS, ChatRequest, Constrained


def form_options(body: Constrained, response_format: Any) -> dict[str, Any]:
    """The options of `submit` that say what an answer must look like. They are only named here:
    schemas and grammars are read and compiled in the thread that submits."""
    given = {name: getattr(body, name) for name in CONSTRAINTS}
    found = {name: value for name, value in given.items() if value is not None}
    return {**response_format_options(response_format), **found}


def check_free(options: Mapping[str, Any], other: str) -> None:
    """Refuse a form where there is something that does not go with one."""
    for name in ("schema", *CONSTRAINTS):
        if options.get(name) is not None:
            field = FIELDS.get(name, name)
            raise refused(f"{field} cannot be had together with {other}.", field, "unsupported")


@dataclass(frozen=True)
class Tools:
    """Tools that an answer may call. Without a choice nothing is constrained."""

    tools: list[dict[str, Any]]
    choice: Any = None
    parallel: bool = True

    def constrain(self, model: Model, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `submit` that hold an answer to the choice."""
        if self.choice is None:
            return dict(options)
        try:
            spec = tool_spec(self.tools, self.choice, call_format(model), self.parallel)
        except RecursionError:
            raise refused("tools are nested too deep.", "tools") from None
        if spec is not None:
            check_free(options, "tool_choice")
        return with_constraint(options, spec)


def tools_of(body: ChatRequest) -> Tools | None:
    """The tools of a request; None where no call can be made."""
    tools = parse_tools(body.tools or [])
    choice = body.tool_choice
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    parallel = body.parallel_tool_calls is not False
    if choice is None and not parallel:
        choice = "auto"
    return Tools(tools, choice, parallel)


def call_format(model: Model) -> ToolFormat:
    return tool_format(getattr(model.tokenizer, "chat_template", None))


class Message:
    """The text of one sequence as a message: what is said, and calls of tools. White space around
    calls is not told, whatever the pieces that it came in."""

    def __init__(self, form: ToolFormat):
        self._parser = ToolCallParser(form)
        self._space = ""
        self._said = ""

    def push(self, text: str) -> list[dict[str, Any]]:
        """The deltas that a piece of text adds."""
        return list(self._told(self._parser.push(text)))

    def finish(self) -> list[dict[str, Any]]:
        """Those that were held back. Text without calls is told as it is."""
        deltas = list(self._told(self._parser.finish()))
        if self._space and not self.calls:
            deltas.append(self._say(self._space))
        return deltas

    def _told(self, deltas: Iterable[Delta]) -> Iterable[dict[str, Any]]:
        for delta in deltas:
            if delta.index is not None:
                self._space = ""
                yield delta.as_dict()
                continue
            text = self._space + delta.content
            body = text.rstrip()
            self._space = text[len(body) :]
            if body:
                yield self._say(body)

    def _say(self, text: str) -> dict[str, Any]:
        self._said += text
        return {"content": text}

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Those that are complete, and the one that was cut off, if one was."""
        cut = [self._parser.cut] if self._parser.cut is not None else []
        return [call.as_dict() for call in [*self._parser.calls, *cut]]

    @property
    def complete(self) -> bool:
        """Does it call tools, and was no call cut off?"""
        return bool(self._parser.calls) and self._parser.cut is None

    def as_dict(self) -> dict[str, Any]:
        said = {"role": "assistant", "content": self._said, "refusal": None}
        if not self.calls:
            return said
        return {**said, "content": self._said or None, "tool_calls": self.calls}


def message_of(text: str, form: ToolFormat) -> Message:
    """A whole text as a message."""
    message = Message(form)
    message.push(text)
    message.finish()
    return message
