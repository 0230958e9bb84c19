"""The tools that the model sees: those of the request, after the conversation's changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.api.messages.assistant_blocks import CompactionBlock
from quire.api.messages.blocks import ToolReferenceBlock, ToolResultBlock
from quire.api.messages.schema import CountRequest, Message, UserMessage
from quire.api.messages.tool_changes import (
    ToolAddition,
    ToolDefinition,
    ToolReference,
    ToolRemoval,
)
from quire.api.messages.tools import ClientTool, Tool, searches
from quire.api.shared.toolbox import name_taken
from quire.core.errors import RequestError


def loaded_tools(fields: CountRequest) -> tuple[ClientTool, ...]:
    """Return the tools shown to the model: all except deferred ones that no search has found, and
    what system messages and summaries change about that.

    Anthropic's own search finds nothing here, so if it is offered, all tools are shown.

    Raises:
        RequestError: two tools have one name, or a message adds a tool that the request does not
            have.
    """
    tools = fields.tools or ()
    searched = any(map(searches, tools))
    found = {
        part.tool_name
        for message in fields.messages
        if isinstance(message, UserMessage) and isinstance(message.content, list)
        for block in message.content
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
        for part in block.content
        if isinstance(part, ToolReferenceBlock)
    }
    known = _by_name(tools)
    shown = {
        name for name, tool in known.items() if searched or not tool.defer_loading or name in found
    }
    for param, block in changes(fields.messages):
        match block:
            case ToolAddition(tool=ToolDefinition(definition=ClientTool() as tool)):
                known[tool.name] = tool
                shown.add(tool.name)
            case ToolAddition(tool=ToolReference(name=name)):
                if name not in known:
                    raise RequestError(
                        f"'{param}.tool.name' is '{name}', which is none of the tools.",
                        param=f"{param}.tool.name",
                        code="invalid_value",
                    )
                shown.add(name)
            case ToolRemoval(tool=ToolReference(name=name)):
                shown.discard(name)
    return tuple(tool for name, tool in known.items() if name in shown)


def _by_name(tools: Sequence[Tool]) -> dict[str, ClientTool]:
    """Return the tools that the client runs. Raise `RequestError` if two have one name."""
    known = dict[str, ClientTool]()
    for index, tool in enumerate(tools):
        if isinstance(tool, ClientTool):
            if tool.name in known:
                raise name_taken(f"tools[{index}]", tool.name)
            known[tool.name] = tool
    return known


def changes(messages: Sequence[Message]) -> Iterator[tuple[str, ToolAddition | ToolRemoval]]:
    """Yield the changes of tools in a conversation, each with its path."""
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            continue
        for number, block in enumerate(message.content):
            param = f"messages[{index}].content[{number}]"
            match block:
                case ToolAddition() | ToolRemoval():
                    yield param, block
                case CompactionBlock():
                    for place, change in enumerate(block.tool_changes or ()):
                        yield f"{param}.tool_changes[{place}]", change
