"""Anthropic's context management: old tool results leave the conversation before it is read.

`clear_tool_uses_20250919` follows
https://platform.claude.com/docs/en/build-with-claude/context-editing. Reasoning is cleared where
messages are translated (`prompt.py`); a summary (`compact_20260112`) is not made here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from quire.api.messages.blocks import ToolResultBlock, ToolUseBlock
from quire.api.messages.schema import (
    AssistantMessage,
    ClearToolUses,
    CountRequest,
    Message,
    UserMessage,
)
from quire.core.errors import ContextOverflow

Fields = TypeVar("Fields", bound=CountRequest)
Count = Callable[[Fields], Awaitable[int]]
"""Counts the tokens of a request's prompt."""

CLEARED = "[This result was cleared to make room. Call the tool again if it is needed.]"
_TRIGGER_TOKENS = 100_000
_KEPT_USES = 3


@dataclass(slots=True)
class Edited(Generic[Fields]):
    """A request after its edits.

    Attributes:
        applied: the entries of `applied_edits`.
        original_tokens: tokens of the prompt before the edits; None if no edit was considered.
    """

    fields: Fields
    applied: list[dict[str, object]] = field(default_factory=list)
    original_tokens: int | None = None


async def edited(fields: Fields, count: Count[Fields]) -> Edited[Fields]:
    """Clear old tool results as the request asks for."""
    management = fields.context_management
    made = Edited(fields)
    for edit in (management.edits or ()) if management is not None else ():
        if isinstance(edit, ClearToolUses):
            await _clear_tool_uses(made, edit, count)
    return made


async def _clear_tool_uses(made: Edited[Fields], edit: ClearToolUses, count: Count[Fields]) -> None:
    """Clear tool results in `made`, if the edit's trigger applies and it clears enough."""
    uses = _answered_uses(made.fields)
    kept = _KEPT_USES if edit.keep is None else edit.keep.value
    excluded = frozenset(edit.exclude_tools or ())
    old = [use for use in uses[: max(0, len(uses) - kept)] if use.name not in excluded]
    if not old:
        return
    before = await _counted(made.fields, count)
    if made.original_tokens is None:
        made.original_tokens = before
    trigger = edit.trigger
    by_uses = trigger is not None and trigger.type == "tool_uses"
    most = _TRIGGER_TOKENS if trigger is None else trigger.value
    if (len(uses) if by_uses else before) <= most:
        return
    shorter = _without(made.fields, old, edit.clear_tool_inputs)
    cleared = before - await _counted(shorter, count)
    if cleared < (1 if edit.clear_at_least is None else edit.clear_at_least.value):
        return
    made.fields = shorter
    made.applied.append(
        {
            "type": edit.type,
            "cleared_tool_uses": len(old),
            "cleared_input_tokens": cleared,
        }
    )


async def _counted(fields: Fields, count: Count[Fields]) -> int:
    """Return a prompt's tokens. Counting stops far beyond the context."""
    try:
        return await count(fields)
    except ContextOverflow as error:
        tokens, _ = error.overflow or (0, 0)
        return tokens


def _answered_uses(fields: CountRequest) -> list[ToolUseBlock]:
    """Return the calls whose results are not cleared yet, oldest first."""
    answered = {
        block.tool_use_id
        for message in fields.messages
        if isinstance(message, UserMessage) and isinstance(message.content, list)
        for block in message.content
        if isinstance(block, ToolResultBlock) and block.content != CLEARED
    }
    return [
        block
        for message in fields.messages
        if isinstance(message, AssistantMessage) and isinstance(message.content, list)
        for block in message.content
        if isinstance(block, ToolUseBlock) and block.id in answered
    ]


def _without(fields: Fields, uses: list[ToolUseBlock], inputs: bool | list[str] | None) -> Fields:
    """Return the request without the results of some calls.

    Args:
        inputs: whether arguments are removed, too, or the tools for which they are.
    """
    ids = {use.id for use in uses}
    named = inputs if isinstance(inputs, list) else ()
    emptied = {use.id for use in uses if inputs is True or use.name in named}

    def shorter(block: Any) -> Any:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in ids:
            return block.model_copy(update={"content": CLEARED, "is_error": None})
        if isinstance(block, ToolUseBlock) and block.id in emptied:
            return block.model_copy(update={"input": {}})
        return block

    def message(each: Message) -> Message:
        if not isinstance(each.content, list):
            return each
        return each.model_copy(update={"content": [shorter(block) for block in each.content]})

    return fields.model_copy(update={"messages": [message(each) for each in fields.messages]})
