"""The content blocks of an assistant's message."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from quire.api.messages.blocks import (
    ContentBlock,
    HostedBlock,
    McpResultBlock,
    McpUseBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    or_hosted,
)
from quire.api.messages.tool_changes import ToolChange
from quire.api.shared.schema import tag_by_type


class CompactionBlock(ContentBlock):
    """A summary that stands for the whole conversation before it, and what that conversation
    changed of the request's tools. A block without `content` has no effect.

    The rest of what Anthropic packed is not read.
    """

    type: Literal["compaction"]
    content: str | None = None
    encrypted_content: str | None = None
    signature: str | None = None
    tool_changes: list[ToolChange] | None = None


AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("@text")]
    | Annotated[ThinkingBlock, Tag("@thinking")]
    | Annotated[RedactedThinkingBlock, Tag("@redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("@tool_use")]
    | Annotated[McpUseBlock, Tag("@mcp_tool_use")]
    | Annotated[McpResultBlock, Tag("@mcp_tool_result")]
    | Annotated[CompactionBlock, Tag("@compaction")]
    | Annotated[HostedBlock, Tag("@hosted")],
    Discriminator(lambda value: or_hosted(tag_by_type(value))),
]
