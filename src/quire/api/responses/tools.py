"""Builds the toolbox of a response's tools."""

from __future__ import annotations

from collections.abc import Sequence

from quire.api.responses.own_tools import OWN_TOOLS, ClientRunTool, HostedTool, OwnChoice
from quire.api.responses.schema import (
    AdditionalToolsItem,
    CustomTool,
    FunctionTool,
    Item,
    NamespaceTool,
    PromptFields,
    SearchOutputItem,
    SearchTool,
    Tool,
)
from quire.api.responses.tool_choice import AllowedChoice, NamedChoice, RequestedChoice
from quire.api.shared.toolbox import (
    SEARCH,
    AllowedTools,
    Choice,
    ClientTool,
    Toolbox,
    ToolboxBuilder,
)


def toolbox(fields: PromptFields, items: Sequence[Item]) -> Toolbox:
    """Return the tools of a request and of its conversation, and the choice among them.

    OpenAI's own search finds nothing here, so if it is offered, the model sees deferred tools, too.

    Raises:
        RequestError: two tools of the request with one name, a deferred tool without a search, or a
            choice that names no offered tool.
    """
    builder, tools = ToolboxBuilder(), fields.tools or ()
    searched = any(isinstance(each, HostedTool) and each.type == "tool_search" for each in tools)
    for index, tool in enumerate(tools):
        _add(builder, tool, f"tools[{index}]", unique=True, loaded=searched)
    for item in items:
        if isinstance(item, AdditionalToolsItem | SearchOutputItem):
            for tool in item.tools:
                loaded = searched or isinstance(item, SearchOutputItem)
                _add(builder, tool, item.type, loaded=loaded)
    return builder.build(_choice(fields.tool_choice))


def _add(
    builder: ToolboxBuilder, tool: Tool, param: str, *, unique: bool = False, loaded: bool = False
) -> None:
    """Add the tools of one entry of a list.

    Args:
        unique: whether to refuse the name of an earlier tool.
        loaded: whether the model sees a deferred tool.
    """
    match tool:
        case HostedTool():
            builder.leave_out(param)
        case ClientRunTool(type=kind):
            own = OWN_TOOLS[kind]
            builder.add_function(
                ClientTool(kind, kind=kind),
                own.description,
                own.parameters,
                unique=param if unique else "",
            )
        case SearchTool():
            builder.add_function(
                ClientTool(SEARCH, kind="search"),
                tool.description,
                tool.parameters,
                unique=param if unique else "",
            )
        case NamespaceTool():
            for each in tool.tools:
                _add_own(builder, each, tool.name, param=param, unique=unique, loaded=loaded)
        case _:
            _add_own(builder, tool, namespace=None, param=param, unique=unique, loaded=loaded)


def _add_own(
    builder: ToolboxBuilder,
    tool: FunctionTool | CustomTool,
    namespace: str | None,
    param: str,
    *,
    unique: bool,
    loaded: bool,
) -> None:
    """Add one of OpenAI's tools that the client runs."""
    named, once = ClientTool(tool.name, namespace, tool.type), param if unique else ""
    strict = isinstance(tool, FunctionTool) and tool.strict is True
    if set(tool.allowed_callers or ()) - {"direct"}:
        builder.leave_out(f"{param}.allowed_callers")
    if tool.defer_loading and not loaded:
        builder.defer(named, param, strict=strict, unique=once)
    elif isinstance(tool, FunctionTool):
        builder.add_function(named, tool.description, tool.parameters, strict=strict, unique=once)
    else:
        syntax = tool.format
        grammar = (
            None
            if syntax is None or syntax.definition is None
            else (str(syntax.syntax), syntax.definition)
        )
        builder.add_custom(
            named,
            tool.description,
            grammar,
            param=f"{param}.format.definition",
            unique=once,
        )


def _choice(choice: RequestedChoice | None) -> Choice:
    match choice:
        case AllowedChoice(mode=mode, tools=tools):
            return AllowedTools(mode, [_named(each) for each in tools])
        case NamedChoice() | OwnChoice():
            return _named(choice)
        case mode:
            return mode


def _named(choice: NamedChoice | OwnChoice) -> ClientTool:
    if isinstance(choice, OwnChoice):
        return ClientTool(choice.type)
    return ClientTool(choice.name, choice.namespace)
