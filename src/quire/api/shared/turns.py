"""Turns of a conversation in the shape that chat templates read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from quire.core.errors import RequestError

Turn = dict[str, Any]


def merge(turns: Iterable[Turn]) -> list[Turn]:
    """Joins neighbours of the same role, which many templates refuse; tools' answers stay apart."""
    merged: list[Turn] = []
    for role, neighbours in groupby(turns, key=lambda turn: turn["role"]):
        alike = list(neighbours)
        if role == "tool" or len(alike) == 1:
            merged += alike
        else:
            merged.append(_joined(role, alike))
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


def _joined(role: str, turns: Sequence[Turn]) -> Turn:
    """Several turns of one role as one, in time linear in their parts."""
    joined: Turn = {"role": role, "content": [part for turn in turns for part in _parts(turn)]}
    thoughts = [turn["reasoning_content"] for turn in turns if "reasoning_content" in turn]
    if thoughts:
        joined["reasoning_content"] = "\n".join(thoughts)
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    return joined


def _parts(turn: Turn) -> list[dict[str, Any]]:
    content = turn["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
