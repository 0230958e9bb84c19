"""Turns of a conversation in the shape that chat templates read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.errors import RequestError

Turn = dict[str, Any]


def merge(turns: Iterable[Turn]) -> list[Turn]:
    """Joins neighbours of the same role, which many templates refuse; tools' answers stay apart."""
    merged: list[Turn] = []
    for turn in turns:
        if merged and turn["role"] == merged[-1]["role"] != "tool":
            merged[-1] = _joined(merged[-1], turn)
        else:
            merged.append(turn)
    return merged


def check_answered(turns: Sequence[Turn], param: str) -> None:
    """Raises `RequestError` if a conversation ends with calls whose results are not in it."""
    calls = turns[-1].get("tool_calls") if turns else None
    if calls:
        raise RequestError(
            f"'{param}' ends with the call '{calls[0]['id']}', whose result is missing.",
            param=param,
            code="missing_tool_result",
        )


def _joined(first: Turn, second: Turn) -> Turn:
    joined: Turn = {"role": first["role"], "content": [*_parts(first), *_parts(second)]}
    thoughts = [
        turn["reasoning_content"] for turn in (first, second) if "reasoning_content" in turn
    ]
    if thoughts:
        joined["reasoning_content"] = "\n".join(thoughts)
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    return joined


def _parts(turn: Turn) -> list[dict[str, Any]]:
    content = turn["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
