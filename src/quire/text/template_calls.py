"""The forms in which a chat template reads contents, the history's calls, and the tools.

Templates differ: some write a call only if the content is null, some concatenate the arguments as
text, some read the tools from the system message. Each template is tried once with small
conversations; the first form in which the call is rendered completely is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.core.errors import RequestError

Message = dict[str, Any]
Render = Callable[[list[Message], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages as they are, with these tools; raises `RequestError` if the template refuses."""

_NAME, _KEY, _VALUE, _SAID = "probed_function", "probed_key", "probed_value", "probed text"
_ID = "probeid01"  # nine letters or digits, as Mistral's templates require
_ARGUMENTS = {_KEY: _VALUE}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": _SAID,
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class ContentForms:
    """The forms of a message's content that a template reads.

    Attributes:
        text: whether it reads a string.
        parts: whether it reads a list of parts, each `{"type": "text", "text": ...}` or media.
    """

    text: bool
    parts: bool


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template reads a message with calls.

    Attributes:
        content: how empty content is written; "absent" leaves the key out.
        text: whether the arguments are the text of a JSON object, instead of the object.
        apart: whether content that is not empty goes into its own message, before the calls.
    """

    content: Literal["absent", "null", "empty"] = "absent"
    text: bool = False
    apart: bool = False

    def written(self, message: Message) -> list[Message]:
        """Return the message in this form, perhaps as two messages."""
        calls = [self._call(call) for call in message["tool_calls"]]
        if not message.get("content"):
            return [self._without_content(message, calls)]
        if not self.apart:
            return [{**message, "tool_calls": calls}]
        said = {key: value for key, value in message.items() if key != "tool_calls"}
        return [said, self._without_content({"role": message["role"]}, calls)]

    def _without_content(self, message: Message, calls: list[Any]) -> Message:
        made = {key: value for key, value in message.items() if key != "content"}
        if self.content != "absent":
            made["content"] = None if self.content == "null" else ""
        return {**made, "tool_calls": calls}

    def _call(self, call: Any) -> Any:
        function = call.get("function")
        if not self.text or not isinstance(function, dict):
            return call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            return call
        text = json.dumps(arguments or {}, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}


def call_form(render: Render, user: Message, *, absent: bool, tools: bool) -> CallForm:
    """Return the form in which a template shows a call.

    Args:
        user: a user message that the template accepts.
        absent: whether the content is absent or null, instead of the empty text.
        tools: whether the request has tools.
    """
    shown: CallForm | None = None
    contents: tuple[Literal["absent", "null", "empty"], ...] = (
        ("absent", "null", "empty") if absent else ("empty", "null")
    )
    for text in (False, True):
        for content in contents:
            form = CallForm(content, text)
            if shown is None and _shows(render, user, form, said="", tools=tools):
                shown = form
    if shown is None:
        return CallForm(contents[0])
    together = _shows(render, user, shown, said=_SAID, tools=tools)
    apart = CallForm(shown.content, shown.text, apart=True)
    return apart if not together and _shows(render, user, apart, said=_SAID, tools=tools) else shown


def _shows(render: Render, user: Message, form: CallForm, said: str, tools: bool) -> bool:
    """Return whether a call is rendered with its name and arguments, not as Python's
    representation.
    """
    call = {
        "id": _ID,
        "type": "function",
        "function": {"name": _NAME, "arguments": dict(_ARGUMENTS)},
    }
    calling = form.written({"role": "assistant", "content": said, "tool_calls": [call]})
    result = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "1"}
    for answered in ([result], []):
        try:
            text = render([user, *calling, *answered], [] if tools else None)
        except RequestError:
            continue
        return all(part in text for part in (_NAME, _KEY, _VALUE)) and str(_ARGUMENTS) not in text
    return False


ToolsForm = Literal["variable", "list", "text"]
"""The place from which a template reads tools: the variable `tools`, or `tools` of the system
message, as a list or as text.
"""


def tools_form(render: Render, user: Message, system: Message) -> ToolsForm:
    """Return the place from which a template reads tools.

    Args:
        user, system: messages that the template accepts.
    """
    places: tuple[ToolsForm, ...] = ("variable", "list", "text")
    for form in places:
        try:
            text = render(with_tools([system, user], [_TOOL], form, content=""), [_TOOL])
        except RequestError:
            continue
        if _NAME in text and str(_ARGUMENTS) not in text and f"'name': '{_NAME}'" not in text:
            return form
    return "variable"


def with_tools(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], form: ToolsForm, content: Any
) -> list[Message]:
    """Return the messages, with the tools in the system message if the template reads them there.

    Args:
        content: empty content, for a new system message.
    """
    if form == "variable":
        return messages
    at = next((i for i, each in enumerate(messages) if each.get("role") == "system"), None)
    if at is None:
        messages, at = [{"role": "system", "content": content}, *messages], 0
    # Phi-4-mini's model card passes the functions, without the objects around them.
    functions = [tool.get("function", tool) for tool in tools]
    given = json.dumps(functions, ensure_ascii=False) if form == "text" else list(tools)
    return [*messages[:at], {**messages[at], "tools": given}, *messages[at + 1 :]]
