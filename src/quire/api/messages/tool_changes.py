"""Blocks of system messages that add and remove tools in the middle of a conversation.

Source: https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from quire.api.messages.blocks import ContentBlock, TextBlock
from quire.api.messages.tools import ClientTool, HostedTool, Tool
from quire.api.shared.schema import History, TextOrList, tag_by_type


class ToolReference(History):
    """A tool of the request, or one that an earlier block defined."""

    type: Literal["tool_reference"]
    name: str


class McpReference(History):
    """A tool of an MCP server, or all of its tools; without effect."""

    type: Literal["mcp_tool_reference", "mcp_toolset_reference"]
    server_name: str
    name: str | None = None


class ToolDefinition(History):
    """A further tool."""

    type: Literal["tool_definition"]
    definition: Tool


_Reference = (
    Annotated[ToolReference, Tag("@tool_reference")]
    | Annotated[McpReference, Tag("@mcp_tool_reference")]
    | Annotated[McpReference, Tag("@mcp_toolset_reference")]
)


class ToolAddition(ContentBlock):
    """From here on, the model sees the tool."""

    type: Literal["tool_addition"]
    tool: Annotated[
        _Reference | Annotated[ToolDefinition, Tag("@tool_definition")], Discriminator(tag_by_type)
    ]


class ToolRemoval(ContentBlock):
    """From here on, the model does not see the tool."""

    type: Literal["tool_removal"]
    tool: Annotated[_Reference, Discriminator(tag_by_type)]


_Change = (
    Annotated[ToolAddition, Tag("@tool_addition")] | Annotated[ToolRemoval, Tag("@tool_removal")]
)
ToolChange = Annotated[_Change, Discriminator(tag_by_type)]
"""A change of the tools that the model sees."""
SystemBlocks = TextOrList[
    Annotated[Annotated[TextBlock, Tag("@text")] | _Change, Discriminator(tag_by_type)]
]
"""Content of a system message in the middle of a conversation."""


def without_effect(param: str, block: ToolAddition | ToolRemoval) -> str | None:
    """Return the path of what has no effect in the block at `param`: the block, if a server would
    run its tools, or the callers of a tool besides the model. None if all has an effect.
    """
    match block.tool:
        case McpReference() | ToolDefinition(definition=HostedTool()):
            return param
        case ToolDefinition(definition=ClientTool(called_by_code=True)):
            return f"{param}.tool.definition.allowed_callers"
        case _:
            return None
