"""Calls of MCP tools as a model reads them: the names of their functions, and their messages."""

from __future__ import annotations

import hashlib
import re

from quire.api.shared.content import function_call
from quire.serving.messages import JsonObject, TemplateMessage

NOT_MADE = "This call was not made."
_LONGEST = 64
_DIGEST = 8


def function_name(server: str, tool: str) -> str:
    """Return the name of a tool's function. Names that clients refuse get a digest of the tool."""
    name = f"{server}__{tool}"
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    if plain == name and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: _LONGEST - _DIGEST - 1]}_{digest}"


def call_and_result(
    call_id: str, function: str, arguments: JsonObject, output: str
) -> list[TemplateMessage]:
    """Return a call and its result as the two messages that a template renders."""
    call = function_call(call_id, function, arguments)
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": output, "tool_call_id": call_id, "name": function},
    ]
