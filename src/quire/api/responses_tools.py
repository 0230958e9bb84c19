"""The tools of a response: what the model calls them, and what the client does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.api.content import function_tool
from quire.api.responses_schema import (
    AllowedChoice,
    CustomTool,
    FunctionTool,
    HostedTool,
    NamedChoice,
    NamespaceTool,
    ResponsesRequest,
)
from quire.engine.service import ToolChoice
from quire.errors import RequestError

INPUT = "input"
"""The one argument of the function that stands for a custom tool."""


@dataclass(frozen=True, slots=True)
class Named:
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What may be called.

    Attributes:
        named: the client's name of each tool, by the name that the model reads.
        templates: the tools in the shape that chat templates read, in the same order.
        left_out: types of the tools that nobody runs here.
    """

    named: dict[str, Named] = field(default_factory=dict)
    templates: tuple[dict[str, Any], ...] = ()
    left_out: tuple[str, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)

    def client_name(self, name: str) -> Named:
        """What the client calls the tool that the model called."""
        return self.named.get(name) or Named(name)


def model_name(name: str, namespace: str | None) -> str:
    """What the model reads for a tool in a namespace."""
    if namespace is None:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def toolbox(fields: ResponsesRequest) -> Toolbox:
    """The tools of a request, and the choice among them.

    Raises:
        RequestError: two tools with one name, or a choice that names none of them.
    """
    named: dict[str, Named] = {}
    templates: list[dict[str, Any]] = []
    left_out = []
    namespace: str | None
    for index, tool in enumerate(fields.tools or ()):
        match tool:
            case HostedTool():
                left_out.append(tool.type)
                continue
            case NamespaceTool():
                namespace, members = tool.name, tool.tools
            case _:
                namespace, members = None, [tool]
        for each in members:
            name = model_name(each.name, namespace)
            if name in named:
                raise RequestError(
                    f"'tools[{index}]' holds '{name}', which an earlier tool is called.",
                    param=f"tools[{index}]",
                    code="invalid_value",
                )
            named[name] = Named(each.name, namespace, isinstance(each, CustomTool))
            templates.append(_template(each, name))
    return _chosen(fields, named, templates, tuple(left_out))


def _chosen(
    fields: ResponsesRequest,
    named: dict[str, Named],
    templates: list[dict[str, Any]],
    left_out: tuple[str, ...],
) -> Toolbox:
    match fields.tool_choice:
        case AllowedChoice(mode=mode, tools=allowed):
            names = {_named(each, named) for each in allowed}
            kept = tuple(each for each in templates if each["function"]["name"] in names)
            return Toolbox(named, kept, left_out, ToolChoice(mode))
        case NamedChoice() as one:
            choice = ToolChoice("named", _named(one, named))
        case None:
            choice = ToolChoice()
        case mode:
            choice = ToolChoice(mode)
    return Toolbox(named, tuple(templates), left_out, choice)


def _named(choice: NamedChoice, named: dict[str, Named]) -> str:
    name = model_name(choice.name, choice.namespace)
    if name not in named:
        raise RequestError(
            f"'tool_choice' names '{name}', which is not among 'tools'.",
            param="tool_choice",
            code="invalid_value",
        )
    return name


def _template(tool: FunctionTool | CustomTool, name: str) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return function_tool(name, tool.description, tool.parameters)
    text: dict[str, Any] = {"type": "string"}
    if tool.format is not None and tool.format.definition is not None:
        text["description"] = f"Follows this {tool.format.syntax} grammar: {tool.format.definition}"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    return function_tool(name, tool.description, parameters)
