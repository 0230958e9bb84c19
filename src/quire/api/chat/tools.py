"""Chat's tools and the choice among them. Each is nested under its type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from quire.api.shared import toolbox as shared
from quire.api.shared.content import FunctionName, Tool, custom_input
from quire.api.shared.schema import History, Wire, tag_by_type
from quire.api.shared.toolbox import ClientTool, Toolbox, ToolboxBuilder


class Grammar(History):
    """A grammar for the text of a custom tool."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(History):
    """The format of a custom tool's text; see `ToolboxBuilder.add_custom`."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class Custom(History):
    """The name and description of a custom tool."""

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

    @property
    def tool(self) -> ClientTool:
        """The tool that is named."""
        return ClientTool(self.function.name)


class CustomChoice(Wire):
    """The custom tool that must be called, or in a list of allowed tools, that may be."""

    type: Literal["custom"]
    custom: Named

    @property
    def tool(self) -> ClientTool:
        """The tool that is named."""
        return ClientTool(self.custom.name, kind="custom")


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
    """Return the tools of a request, and the choice among them.

    Raises:
        RequestError: two tools have one name, or the choice names a tool that is not offered.
    """
    builder = ToolboxBuilder()
    for index, tool in enumerate(tools or ()):
        param = f"tools[{index}]"
        if isinstance(tool, Tool):
            function = tool.function
            builder.add_function(
                ClientTool(function.name),
                function.description,
                function.parameters,
                strict=function.strict is True,
                unique=param,
            )
        else:
            custom, given = tool.custom, tool.custom.format
            rules = None if given is None else given.grammar
            builder.add_custom(
                ClientTool(custom.name, kind="custom"),
                custom.description,
                None if rules is None else (rules.syntax, rules.definition),
                param=f"{param}.custom.format.grammar.definition",
                unique=param,
            )
    return builder.build(_choice(choice))


def _choice(choice: ChatChoice | None) -> shared.Choice:
    match choice:
        case FunctionChoice() | CustomChoice():
            return choice.tool
        case AllowedChoice(allowed_tools=allowed):
            return shared.AllowedTools(allowed.mode, [each.tool for each in allowed.tools])
        case mode:
            return mode


def opening_call(tools: Toolbox, call_id: str, name: str) -> dict[str, object]:
    """Return the first delta of a streamed call, without arguments."""
    return _call(tools, call_id, name, arguments=None)


def whole_call(tools: Toolbox, call_id: str, name: str, arguments: str) -> dict[str, object]:
    """Return a call with its arguments so far, or with the text of a custom tool."""
    return _call(tools, call_id, name, arguments=arguments)


def _call(tools: Toolbox, call_id: str, name: str, arguments: str | None) -> dict[str, object]:
    if tools.client_name(name).kind == "custom":
        text = "" if arguments is None else custom_input(arguments)
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
    function = {"name": name, "arguments": arguments or ""}
    return {"id": call_id, "type": "function", "function": function}
