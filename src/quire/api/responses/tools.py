"""The tools of a response, as a toolbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from quire.api.responses.schema import (
    AdditionalToolsItem,
    AllowedChoice,
    Choice,
    CustomTool,
    FunctionTool,
    HostedTool,
    Item,
    NamedChoice,
    NamespaceTool,
    ResponsesRequest,
    SearchOutputItem,
    SearchTool,
    Tool,
)
from quire.api.shared.content import INPUT, function_tool
from quire.api.shared.toolbox import SEARCH, Named, Toolbox, model_name
from quire.core.errors import RequestError
from quire.serving.generation import ToolChoice


def toolbox(fields: ResponsesRequest, items: Sequence[Item]) -> Toolbox:
    """The tools of a request and of its conversation, and the choice among them.

    Raises:
        RequestError: two tools of the request with one name, a tool that only a search could find
            where there is none, or a choice that names none of them.
    """
    found = _Found()
    for index, tool in enumerate(fields.tools or ()):
        found.add(tool, f"tools[{index}]", unique=True)
    for item in items:
        if isinstance(item, AdditionalToolsItem | SearchOutputItem):
            for tool in item.tools:
                found.add(tool, item.type, loaded=isinstance(item, SearchOutputItem))
    return found.chosen(fields.tool_choice)


def chat_toolbox(tools: Sequence[Tool], choice: Choice | None) -> Toolbox:
    """The tools of a chat, and the choice among them. A later tool takes the place of its like.

    Raises:
        RequestError: a choice that names none of them.
    """
    found = _Found()
    for tool in tools:
        found.add(tool, "tools")
    return found.chosen(choice)


class _Found:
    """Tools as they are found, in order. A later one of the same name takes an earlier's place."""

    def __init__(self) -> None:
        self._named: dict[str, Named] = {}
        self._templates: dict[str, dict[str, Any]] = {}
        self._strict: set[str] = set()
        self._left_out: list[str] = []
        self._deferred = ""

    def add(self, tool: Tool, param: str, *, unique: bool = False, loaded: bool = False) -> None:
        """Adds what one entry of a list of tools holds.

        Args:
            unique: refuse a name that an earlier tool has.
            loaded: the model is told of it even if it is deferred.
        """
        match tool:
            case HostedTool():
                self._left_out.append(tool.type)
            case SearchTool():
                template = function_tool(SEARCH, tool.description, tool.parameters)
                self._put(SEARCH, Named(SEARCH, kind="search"), template, param if unique else "")
            case NamespaceTool():
                for each in tool.tools:
                    self._member(each, tool.name, param, unique=unique, loaded=loaded)
            case _:
                self._member(tool, None, param, unique=unique, loaded=loaded)

    def _member(
        self,
        tool: FunctionTool | CustomTool,
        namespace: str | None,
        param: str,
        *,
        unique: bool,
        loaded: bool,
    ) -> None:
        name = model_name(tool.name, namespace)
        kind: Literal["function", "custom"] = tool.type
        if isinstance(tool, FunctionTool) and tool.strict:
            self._strict.add(name)
        hidden = bool(tool.defer_loading) and not loaded
        if hidden:
            self._deferred = self._deferred or param
        template = None if hidden else _template(tool, name)
        self._put(name, Named(tool.name, namespace, kind), template, param if unique else "")

    def _put(self, name: str, named: Named, template: dict[str, Any] | None, unique: str) -> None:
        if unique and name in self._named:
            raise RequestError(
                f"'{unique}' holds '{name}', which an earlier tool is called.",
                param=unique,
                code="invalid_value",
            )
        self._named[name] = named
        if template is not None:
            self._templates[name] = template

    def chosen(self, wanted: Choice | None) -> Toolbox:
        """All of them, and the request's choice among them."""
        if self._deferred and SEARCH not in self._named:
            raise RequestError(
                f"'{self._deferred}.defer_loading' needs a tool of type 'tool_search'.",
                param=f"{self._deferred}.defer_loading",
                code="invalid_value",
            )
        templates = self._templates
        match wanted:
            case AllowedChoice(mode=mode, tools=allowed):
                names = {self._chosen_name(each) for each in allowed}
                templates = {name: each for name, each in templates.items() if name in names}
                choice = ToolChoice(mode)
            case NamedChoice() as one:
                choice = ToolChoice("named", self._chosen_name(one))
            case None:
                choice = ToolChoice()
            case mode:
                choice = ToolChoice(mode)
        return Toolbox(
            self._named,
            tuple(templates.values()),
            frozenset(self._strict),
            tuple(self._left_out),
            choice,
        )

    def _chosen_name(self, choice: NamedChoice) -> str:
        name = model_name(choice.name, choice.namespace)
        if name not in self._named:
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
