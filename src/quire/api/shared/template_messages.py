"""Checks and joins messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from quire.core.errors import RequestError
from quire.serving.messages import Part, TemplateMessage, text_part


def merge(messages: Iterable[TemplateMessage]) -> list[TemplateMessage]:
    """Join adjacent messages of the same role, which many templates refuse. Tool results stay
    separate.
    """
    merged: list[TemplateMessage] = []
    for role, neighbours in groupby(messages, key=lambda message: message["role"]):
        alike = list(neighbours)
        if role == "tool" or len(alike) == 1:
            merged += alike
        else:
            merged.append(_joined(role, alike))
    return merged


def check_answered(messages: Sequence[TemplateMessage], param: str) -> None:
    """Raise `RequestError` if a conversation ends with unanswered tool calls."""
    calls = messages[-1].get("tool_calls") if messages else None
    if calls:
        raise RequestError(
            f"'{param}' ends with the call '{calls[0]['id']}', but the call's result is "
            "missing: append it.",
            param=param,
            code="missing_tool_result",
        )


def summary(text: str) -> TemplateMessage:
    """Return the message of the user that stands for an earlier conversation."""
    return {"role": "user", "content": f"[Summary of our conversation so far]\n{text}"}


def _joined(role: str, messages: Sequence[TemplateMessage]) -> TemplateMessage:
    """Merge several messages of one role, in linear time."""
    joined: TemplateMessage = {
        "role": role,
        "content": [part for message in messages for part in _parts(message)],
    }
    reasoning = [
        message["reasoning_content"] for message in messages if "reasoning_content" in message
    ]
    if reasoning:
        joined["reasoning_content"] = "\n".join(reasoning)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    return joined


def _parts(message: TemplateMessage) -> list[Part]:
    content = message["content"]
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return list(content)
