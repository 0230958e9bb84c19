"""A conversation and its tools, in the shape that chat templates read.

Hugging Face's chat templates agreed on it: content is a string, or a list of typed parts; a call's
arguments are an object, not JSON text.
"""

from __future__ import annotations

from typing import Literal, NotRequired, Required, TypedDict, final

from quire.media.parts import Parts
from quire.media.source import MediaSource

JsonObject = dict[str, object]
"""A JSON object whose members its owner defines: a JSON schema, or the arguments of a call."""


@final
class TextPart(TypedDict):
    """Plain text."""

    type: Literal["text"]
    text: str


@final
class SourcePart(TypedDict):
    """A file that is not read yet; `type` is its media kind."""

    type: str
    source: MediaSource


@final
class ReadPart(TypedDict):
    """A file that was read, as the parts that encoders take; `type` is its media kind."""

    type: str
    parts: Parts


Part = TextPart | SourcePart | ReadPart


class CalledFunction(TypedDict):
    """The name and arguments of a call."""

    name: str
    arguments: JsonObject


class Call(TypedDict):
    """A call that the assistant made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class TemplateMessage(TypedDict, total=False):
    """A message of a conversation.

    Attributes:
        name: of the speaker, or of the function that a tool's message answers.
        reasoning_content: the reasoning before an assistant's content.
        tool_calls: the calls of an assistant, after its content.
        tool_call_id: the call that a tool's message answers.
    """

    role: Required[str]
    content: Required[str | list[Part]]
    name: str
    reasoning_content: str
    tool_calls: list[Call]
    tool_call_id: str


class Function(TypedDict):
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of its arguments.
    """

    name: str
    description: NotRequired[str]
    parameters: NotRequired[JsonObject]


class TemplateTool(TypedDict):
    """A tool that is shown to the model."""

    type: Literal["function"]
    function: Function


def text_part(text: str) -> TextPart:
    """Return a text as a part of a message."""
    return {"type": "text", "text": text}
