"""Conversations as clients send them, and the templates that they are rendered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATES = {path.stem: path.read_text() for path in Path(__file__).parent.glob("templates/*")}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in <a city> & its 'surroundings'; Größe \"now\"",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "abcdef123", "type": "function", "function": function}


USER = {"role": "user", "content": "  What is the weather in Köln? <b>&</b> 🙂 "}
CALL = {"role": "assistant", "content": None, "tool_calls": [_call({"city": "Köln", "days": 2})]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": "rain"}
ANSWER = {"role": "assistant", "content": "It rains.", "tool_calls": None}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [USER],
    "a system turn": [{"role": "system", "content": "You are a pirate.\n"}, USER],
    "several turns": [USER, ANSWER, {"role": "user", "content": "And tomorrow?"}],
    "a call": [USER, CALL],
    "a call answered": [USER, CALL, RESULT],
    "a thought sent back": [USER, {**ANSWER, "reasoning": "Rain means\nan umbrella."}, USER],
    "a thought by its old name": [USER, {**ANSWER, "thinking": "Hm."}],
    "a thought in the text": [USER, {**ANSWER, "content": "<think>\nHm.\n</think>\n\nRain."}],
}
