"""Removes the parts of Claude Code's prompts that change with each request.

Two parts differ from request to request in an unchanged conversation: a billing header at the start
of the system prompt, and a countdown of tokens after user messages and tool results. Nothing after
a changed part can come from the prefix cache. Their forms, as observed (anthropics/claude-code
issues 68900 and 90342):

    x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;
    <total_tokens>14999841 tokens left</total_tokens>

The header is a separate system block, or the first line of a system prompt that is one text. The
countdown is a separate block or message, the last paragraph of a text, or a paragraph of the system
prompt; it may be wrapped in `<system-reminder>`. Text that merely mentions them is not changed, nor
are assistant messages.

Handles messages of OpenAI's protocols, and Anthropic's with its separate `system`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_PAIR = r" [A-Za-z_]+=[^\s;]*"
_HEADER = rf"x-anthropic-billing-header:(?:{_PAIR};)*{_PAIR};?"
_MARKER = r"<total_tokens>[0-9]+ tokens left</total_tokens>"
_COUNTDOWN = rf"(?:<system-reminder>\n{_MARKER}\n</system-reminder>|{_MARKER})"

_HEADER_LINE = re.compile(rf"{_HEADER}[ ]*(?:\n+|\Z)")
_ONLY_COUNTDOWN = re.compile(rf"\s*{_COUNTDOWN}\s*")
_LAST_PARAGRAPH = re.compile(rf"\n\n{_COUNTDOWN}\n?")
_PARAGRAPH = re.compile(rf"\A{_COUNTDOWN}\n\n|\n\n{_COUNTDOWN}(?=\n\n|\n?\Z)")

Block = Mapping[str, Any]
Content = str | Sequence[Block]


def drop_from_system(system: Content) -> str | list[Block]:
    """Return a system prompt, as one text or as blocks, without header and countdown.

    Blocks that become empty are removed.
    """
    if isinstance(system, str):
        return _clean_system_text(system, first=True)
    kept: list[Block] = []
    for index, block in enumerate(system):
        text = _text_of(block)
        if text is None:
            kept.append(block)
            continue
        cleaned = _clean_system_text(text, first=index == 0)
        if cleaned or not text:
            kept.append(block if cleaned == text else {**block, "text": cleaned})
    return kept


def drop_from_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages without header and countdown. Unchanged messages are the same objects.

    A message that consists of a countdown is removed, unless it is the first, which then is the
    user's question.
    """
    kept: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if not content or not isinstance(content, str | list):
            kept.append(message)
            continue
        cleaned = _clean_content(content, role=message.get("role"), first=index == 0)
        if cleaned == content:
            kept.append(message)
        elif (
            cleaned or message.get("role") == "tool"
        ):  # each call needs its result, even an empty one
            kept.append({**message, "content": cleaned or ""})
        elif index == 0 and message.get("role") not in _SYSTEM_ROLES:
            kept.append(message)
    return kept


_SYSTEM_ROLES = ("system", "developer")


def _clean_content(content: Content, *, role: object, first: bool) -> str | list[Block]:
    if role in _SYSTEM_ROLES:
        if first:
            return drop_from_system(content)
        if isinstance(content, str):
            return _clean_system_text(content, first=False)
    if role == "assistant":
        return content if isinstance(content, str) else list(content)
    if isinstance(content, str):
        return _clean_tail(content)
    return _clean_blocks(content)


def _clean_blocks(blocks: Sequence[Block]) -> list[Block]:
    kept: list[Block] = []
    for block in blocks:
        if block.get("type") == "tool_result" and block.get("content"):
            inner = block["content"]
            cleaned = _clean_tail(inner) if isinstance(inner, str) else _clean_blocks(inner)
            kept.append(block if cleaned == inner else {**block, "content": cleaned})
            continue
        text = _text_of(block)
        if text is None:
            kept.append(block)
        elif rest := _clean_tail(text):
            kept.append(block if rest == text else {**block, "text": rest})
        elif not text:
            kept.append(block)
    return kept


def _text_of(block: Block) -> str | None:
    """Return the text of a text block; None for blocks of other kinds."""
    text = block.get("text")
    return text if block.get("type") == "text" and isinstance(text, str) else None


def _clean_system_text(text: str, *, first: bool) -> str:
    if first and (header := _HEADER_LINE.match(text)):
        text = text[header.end() :]
    if _ONLY_COUNTDOWN.fullmatch(text):
        return ""
    return _PARAGRAPH.sub("", text)


def _clean_tail(text: str) -> str:
    if _ONLY_COUNTDOWN.fullmatch(text):
        return ""
    end = len(text)
    while (start := text.rfind("\n\n", 0, end)) >= 0:
        if not _LAST_PARAGRAPH.fullmatch(text, start, end):
            break
        end = start
    return text[:end]
