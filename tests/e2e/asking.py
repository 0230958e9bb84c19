"""Skills' items as chat requests, and their answers as `quire.demo.skills` judges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.core.kv_choice import choose_format
from quire.demo.skills import SkillAnswer, SkillItem
from tests.e2e.client import CHAT, Client

SKILLS = Path(__file__).parent.parent / "data" / "skills"


def ask(client: Client, item: SkillItem, **fields: Any) -> SkillAnswer:
    """Return a greedy answer to an item."""
    body: dict[str, Any] = {"messages": item.messages, "temperature": 0, "max_tokens": 512}
    body["enable_thinking"] = item.enable_thinking
    if item.tools:
        body["tools"] = item.tools
    answer = client.post(CHAT, **(body | fields))
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return SkillAnswer(
        message["content"] or "",
        message.get("reasoning_content"),
        [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in calls],
    )


def format_fields(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the fields with which a request asks for a format, by the format's name.

    A group size is the server's choice, so formats that differ by it alone are one.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        scheme, _, rest = name.partition("-")
        bits = rest.split("-")[0]
        fields: dict[str, Any] = {"kv_scheme": scheme}
        if scheme == "plain" and bits:
            fields = {"kv_scheme": bits}
        elif bits:
            fields["kv_bits"] = bits
        chosen = choose_format(names, fields.get("kv_bits"), fields["kv_scheme"])
        if chosen is not None and chosen.name == name:
            found[name] = fields
    return found
