"""Calls of MCP tools within one of Anthropic's answers, which also holds their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.api.messages.assistant_blocks import AssistantBlock
from quire.api.messages.blocks import McpResultBlock, McpUseBlock
from quire.api.shared.mcp_calls import NOT_MADE, function_name
from quire.core.errors import RequestError
from quire.serving.messages import TemplateMessage

_FAILED = "The call failed: "


def turns(
    blocks: Sequence[AssistantBlock], start: int = 0
) -> Iterator[tuple[int, Sequence[AssistantBlock]]]:
    """Split an answer, from its block `start` on, after each group of results, where the model
    continued. Yield the index of each turn's first block, and the turn.
    """
    for index in range(start + 1, len(blocks)):
        before, block = blocks[index - 1], blocks[index]
        if isinstance(before, McpResultBlock) and not isinstance(block, McpResultBlock):
            yield start, blocks[start:index]
            start = index
    yield start, blocks[start:]


def results(turn: Sequence[AssistantBlock], param: str) -> list[TemplateMessage]:
    """Return the results of a turn's MCP calls. A call without one was not made.

    Raises:
        RequestError: a result without its call.
    """
    outputs = {each.tool_use_id: each for each in turn if isinstance(each, McpResultBlock)}
    uses = [each for each in turn if isinstance(each, McpUseBlock)]
    unknown = outputs.keys() - {each.id for each in uses}
    if unknown:
        raise RequestError(
            f"'{param}' holds the result of '{min(unknown)[:80]}', but no earlier "
            "mcp_tool_use has that id.",
            param=param,
            code="invalid_value",
        )
    return [
        {
            "role": "tool",
            "content": _told(outputs.get(each.id)),
            "tool_call_id": each.id,
            "name": function_name(each.server_name, each.name),
        }
        for each in uses
    ]


def _told(result: McpResultBlock | None) -> str:
    if result is None:
        return NOT_MADE
    content = result.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    return _FAILED + content if result.is_error else content
