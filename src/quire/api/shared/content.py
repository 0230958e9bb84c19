"""OpenAI's messages, content parts and tools, and their translation for chat templates.

Templates read the shape that Hugging Face's chat templates agreed on: content is a string, or a
list of typed parts; a tool call's arguments are an object, not JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import from_json

from quire.api.shared.answered_calls import MadeCalls
from quire.api.shared.media_parts import URL_PARTS, UrlPart, media_part
from quire.api.shared.schema import CacheBreakpoint, History, TextOrList, tag_by_role, tag_by_type
from quire.media.source import DOCUMENT
from quire.serving import messages
from quire.serving.messages import JsonObject, SourcePart, text_part

INPUT = "input"
"""Name of the only argument of the function that represents a custom tool."""

MALFORMED = "arguments"
"""Name of the argument that holds a call's arguments if they are not a JSON object."""


class TextPart(History):
    """Plain text. Clients that also speak OpenAI's responses mix the names of its types in."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class RefusalPart(History):
    """A refusal in place of the assistant's answer; read as text."""

    type: Literal["refusal"]
    refusal: str


class ReasoningPart(History):
    """Reasoning among the parts of an answer, as Mistral's and LangChain's clients send it back."""

    type: Literal["thinking", "reasoning"]
    thinking: TextOrList[TextPart] | None = None
    reasoning: str | None = None
    text: str | None = None

    def read(self) -> str:
        """Return the reasoning."""
        if isinstance(self.thinking, list):
            return "".join(part.text for part in self.thinking)
        return self.thinking or self.reasoning or self.text or ""


class InputAudio(History):
    """Sound as base64. Its format is recognised from the first bytes, whatever `format` says."""

    data: str = Field(min_length=1)
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm"]

    @property
    def url(self) -> str:
        """The sound as a `data:` URL."""
        return f"data:audio/{self.format};base64,{self.data}"


class AudioPart(History):
    """A sound in OpenAI's format."""

    type: Literal["input_audio"]
    input_audio: InputAudio
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    def to_template(self, param: str) -> SourcePart:
        """Return the part in the form that templates read; `param` is its path in the request."""
        return media_part(
            "audio", self.input_audio.url, f"{param}.input_audio.data", named=self.type
        )


class File(History):
    """A file, by id or as base64."""

    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(History):
    """A document."""

    type: Literal["file"]
    file: File
    prompt_cache_breakpoint: CacheBreakpoint | None = None


_TextParts = (
    Annotated[TextPart, Tag("@text")]
    | Annotated[TextPart, Tag("@input_text")]
    | Annotated[TextPart, Tag("@output_text")]
)
Part = Annotated[
    _TextParts
    | Annotated[AudioPart, Tag("@input_audio")]
    | Annotated[UrlPart, URL_PARTS, Tag(URL_PARTS.tag)]
    | Annotated[FilePart, Tag("@file")]
    | Annotated[RefusalPart, Tag("@refusal")],
    Discriminator(URL_PARTS.tag_of),
]
Content = TextOrList[Part]
_Written = _TextParts | Annotated[RefusalPart, Tag("@refusal")]
WrittenContent = TextOrList[Annotated[_Written, Discriminator(tag_by_type)]]
AnswerContent = TextOrList[
    Annotated[
        _Written
        | Annotated[ReasoningPart, Tag("@thinking")]
        | Annotated[ReasoningPart, Tag("@reasoning")],
        Discriminator(tag_by_type),
    ]
]


def _nowhere(value: object) -> None:
    if value not in (None, []):
        raise ValueError("send images as parts of 'content', of the type 'image_url'")


Images = Annotated[None, BeforeValidator(_nowhere)]
"""A field of Ollama's native API for a message's pictures. It is refused, because ignoring it would
give a wrong answer."""


class SystemMessage(History):
    """Operator instructions."""

    role: Literal["system", "developer"]
    content: WrittenContent
    name: str | None = None


class UserMessage(History):
    """A user's message."""

    role: Literal["user"]
    content: Content
    name: str | None = None
    images: Images = None


class CalledFunction(History):
    """The name and arguments of a call. Arguments are JSON text; some clients send an object, or
    nothing if they were given none.
    """

    name: str
    arguments: str | JsonObject | None = None


class FunctionCall(History):
    """A call that the assistant made. `index` comes from clients that send back merged stream
    chunks.
    """

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name

    def to_template(self, unnamed: str) -> messages.Call:
        """Return the shape that chat templates read; `unnamed` is the id of a call without one."""
        arguments = read_arguments(self.function.arguments)
        return function_call(self.id or unnamed, self.name, arguments)


class CalledCustom(History):
    """The name of a custom tool, and the text that it was called with."""

    name: str
    input: str


class CustomCall(History):
    """A call of a custom tool that the assistant made."""

    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustom
    index: int | None = None

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.custom.name

    def to_template(self, unnamed: str) -> messages.Call:
        """Return the shape that chat templates read; `unnamed` is the id of a call without one."""
        return function_call(self.id or unnamed, self.name, {INPUT: self.custom.input})


ToolCall = Annotated[
    Annotated[FunctionCall, Tag("@function")] | Annotated[CustomCall, Tag("@custom")],
    Discriminator(lambda value: tag_by_type(value) or "@function"),
]


class AssistantMessage(History):
    """An earlier answer. All fields that this server sends are accepted."""

    role: Literal["assistant"]
    content: AnswerContent | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    annotations: list[Any] | None = None
    audio: None = Field(default=None, description="earlier audio answers are not kept")
    function_call: None = Field(default=None, description="use tool_calls")

    def read_reasoning(self) -> str:
        """Return the reasoning, whichever field or parts hold it."""
        parts = self.content if isinstance(self.content, list) else ()
        said = "\n".join(part.read() for part in parts if isinstance(part, ReasoningPart))
        return self.reasoning_content or self.reasoning or said


class ToolMessage(History):
    """The result of a tool call. Agents send images here, although OpenAI's schema allows only
    text, and null for a tool that returned nothing.
    """

    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str | None = None
    name: str | None = None
    images: Images = None


Message = Annotated[
    Annotated[SystemMessage, Tag("@system")]
    | Annotated[SystemMessage, Tag("@developer")]
    | Annotated[UserMessage, Tag("@user")]
    | Annotated[AssistantMessage, Tag("@assistant")]
    | Annotated[ToolMessage, Tag("@tool")],
    Discriminator(tag_by_role),
]


FunctionName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_.:/-]+$")]


class Function(History):
    """A function that the model may call; `parameters` is a JSON schema.

    Calls that `tool_choice` forces always meet the schema. With `strict`, so do voluntary calls if
    the model's dialect marks calls with special tokens.
    """

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(History):
    """A function that the client runs."""

    type: Literal["function"]
    function: Function


def function_tool(
    name: str, description: str | None, parameters: JsonObject | None
) -> messages.TemplateTool:
    """Return a function in the shape that chat templates read."""
    function: messages.Function = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = (
        {"type": "object", "properties": {}} if parameters is None else parameters
    )
    return {"type": "function", "function": function}


def starts_answer(said: Sequence[Message]) -> bool:
    """Return whether the last message is the start of the answer, which the model continues.

    llama.cpp, Ollama and Anthropic treat a last assistant message so.
    """
    last = said[-1]
    if not isinstance(last, AssistantMessage) or last.tool_calls:
        return False
    return any(not isinstance(part, ReasoningPart) for part in last.content or ())


def continues_last(said: Sequence[Message], continues: bool | None, starts: bool | None) -> bool:
    """Return whether the model continues the last message.

    Args:
        continues: the request's `continue_final_message`, which decides if it is given.
        starts: the request's `add_generation_prompt`; true starts an answer.
    """
    if continues is not None:
        return continues
    return starts is not True and starts_answer(said)


def to_template(said: list[Message]) -> tuple[messages.TemplateMessage, ...]:
    """Return messages as chat templates read them."""
    made = MadeCalls()
    return tuple(_message(message, index, made) for index, message in enumerate(said))


def _message(message: Message, index: int, made: MadeCalls) -> messages.TemplateMessage:
    path = f"messages[{index}].content"
    content = None if message.content is None else _parts(message.content, path)
    role = "system" if message.role == "developer" else message.role
    shaped: messages.TemplateMessage = {"role": role, "content": content or ""}
    name = message.name
    if isinstance(message, AssistantMessage):
        if not shaped["content"] and message.refusal:
            shaped["content"] = message.refusal
        if reasoning := message.read_reasoning():
            shaped["reasoning_content"] = reasoning
        if message.tool_calls:
            numbered = enumerate(message.tool_calls)
            shaped["tool_calls"] = [call.to_template(f"call_{index}_{n}") for n, call in numbered]
            made.add(shaped["tool_calls"])
    if isinstance(message, ToolMessage):
        shaped["tool_call_id"], name = made.answered(message.tool_call_id, message.name)
    if name is not None:
        shaped["name"] = name
    return shaped


def _parts(
    content: Content | WrittenContent | AnswerContent, param: str
) -> str | list[messages.Part]:
    """Return content as templates read it. Parts stay separate, because parts may be
    removed later.
    """
    if isinstance(content, str):
        return content
    parts: list[messages.Part] = []
    for index, part in enumerate(content):
        match part:
            case TextPart(text=text) | RefusalPart(refusal=text):
                parts.append(text_part(text))
            case ReasoningPart():
                pass  # is a field of the message
            case FilePart(file=File(file_data=data, filename=title)):
                name = f"{param}[{index}]"
                name = f"{name}.file.file_data" if data else name
                parts += document_parts(pdf_url(data), name, part.type, title)
            case _:
                parts.append(part.to_template(f"{param}[{index}]"))
    return parts


def pdf_url(data: str | None) -> str:
    """Return a document as a `data:` URL, the form that most clients use."""
    if not data or data.startswith("data:"):
        return data or ""
    return f"data:application/pdf;base64,{data}"


def document_parts(url: str, param: str, named: str, *about: str | None) -> list[messages.Part]:
    """Return a document in the form that templates read, after its title and context.

    Args:
        url: empty for a document that cannot be read, such as an uploaded file's id. It is refused,
            or left out of a conversation's history.
    """
    texts = [text_part(text) for text in about if text and url]
    return [*texts, media_part(DOCUMENT, url, param, named=named)]


def function_call(call_id: str, name: str, arguments: JsonObject) -> messages.Call:
    """Return a call that the assistant made, in the shape that chat templates read."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def read_arguments(arguments: str | JsonObject | None) -> JsonObject:
    """Return a call's arguments as an object, whatever the model wrote, so that the conversation
    can continue.

    An object that was cut off keeps its complete members; an empty text is an empty object. Other
    text becomes a single argument, so that the model sees its mistake.
    """
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():
        return {}
    try:
        read = from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {MALFORMED: arguments}


def _started_input(arguments: str) -> str:
    try:
        started = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""  # cut off behind half of a pair of escapes
    return str(started.get(INPUT, "")) if isinstance(started, dict) else ""


def custom_input(arguments: str) -> str:
    """Return the text in a call of a custom tool, which the model wrote as a function call.

    If the call was cut off, return the text so far.
    """
    try:
        text = json.loads(arguments).get(INPUT) if arguments else ""
    except ValueError:
        return _started_input(arguments)
    return text if isinstance(text, str) else arguments
