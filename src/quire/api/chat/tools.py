"""Chat's tools and the choice among them: the same as those of responses, nested differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.api.responses import schema as flat
from quire.api.responses.tools import chat_toolbox
from quire.api.shared.content import FunctionName, Tool, custom_input
from quire.api.shared.schema import History, Wire, tag_by_type
from quire.api.shared.toolbox import Toolbox


class Grammar(History):
    """What a custom tool's text has to follow."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(History):
    """What a custom tool's text has to be; a grammar is told to the model, not enforced."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class Custom(History):
    """A custom tool's name, and what it is for."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(History):
    """A tool that takes a text instead of arguments."""

    type: Literal["custom"]
    custom: Custom


ChatTool = Annotated[
    Annotated[Tool, Tag("@function")] | Annotated[CustomTool, Tag("@custom")],
    Discriminator(tag_by_type),
]


class Named(Wire):
    """A tool's name."""

    name: str


class FunctionChoice(Wire):
    """The function that must be called, or in a list of allowed tools, that may be."""

    type: Literal["function"]
    function: Named

    def to_flat(self) -> flat.NamedChoice:
        """As responses have it."""
        return flat.NamedChoice(type=self.type, name=self.function.name)


class CustomChoice(Wire):
    """The custom tool that must be called, or in a list of allowed tools, that may be."""

    type: Literal["custom"]
    custom: Named

    def to_flat(self) -> flat.NamedChoice:
        """As responses have it."""
        return flat.NamedChoice(type=self.type, name=self.custom.name)


NamedChoice = Annotated[
    Annotated[FunctionChoice, Tag("@function")] | Annotated[CustomChoice, Tag("@custom")],
    Discriminator(tag_by_type),
]


class AllowedTools(Wire):
    """Some of the tools, one of which may or must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1)


class AllowedChoice(Wire):
    """`tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChatChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("@mode")]
    | Annotated[FunctionChoice, Tag("@function")]
    | Annotated[CustomChoice, Tag("@custom")]
    | Annotated[AllowedChoice, Tag("@allowed_tools")],
    Discriminator(lambda value: "@mode" if isinstance(value, str) else tag_by_type(value)),
]


def toolbox(tools: Sequence[ChatTool] | None, choice: ChatChoice | None = None) -> Toolbox:
    """The tools of a request, and the choice among them.

    Raises:
        RequestError: a choice that names none of them.
    """
    return chat_toolbox(
        [_flat_tool(tool) for tool in tools or ()], None if choice is None else _flat_choice(choice)
    )


def _flat_tool(tool: ChatTool) -> flat.Tool:
    if isinstance(tool, Tool):
        return flat.FunctionTool(type="function", **dict(tool.function))
    custom, given = tool.custom, tool.custom.format
    rules = None if given is None or given.grammar is None else given.grammar
    return flat.CustomTool(
        type="custom",
        name=custom.name,
        description=custom.description,
        format=None if rules is None else flat.CustomFormat(type="grammar", **dict(rules)),
    )


def _flat_choice(choice: ChatChoice) -> flat.Choice:
    match choice:
        case FunctionChoice() | CustomChoice():
            return choice.to_flat()
        case AllowedChoice(allowed_tools=allowed):
            tools = [each.to_flat() for each in allowed.tools]
            return flat.AllowedChoice(type="allowed_tools", mode=allowed.mode, tools=tools)
        case mode:
            return mode


def opening_call(tools: Toolbox, call_id: str, name: str) -> dict[str, Any]:
    """A call whose arguments are still to come, as a stream begins it."""
    if tools.client_name(name).kind == "custom":
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": ""}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def complete_call(tools: Toolbox, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call with its arguments, or with the text of a custom tool."""
    call = opening_call(tools, call_id, name)
    if call["type"] == "custom":
        call["custom"]["input"] = custom_input(arguments)
    else:
        call["function"]["arguments"] = arguments
    return call
