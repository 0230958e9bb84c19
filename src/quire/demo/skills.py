"""Skills of the demonstration model, as test items that answers are judged by.

The items live in JSON lines, one file a skill, made by `training.testsets` and never seen in
training. A line has the wire form of a chat request (`messages`, `tools`, `enable_thinking`), the
answer expected, and the name of the rule that compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SkillItem:
    """One question with the answer that counts as right."""

    skill: str
    messages: list[dict[str, Any]]
    """The conversation in OpenAI's wire form, with arguments of calls as JSON strings."""
    expected: Any
    """The expected text; for the rule `tools`, the expected calls in order as `{"name",
    "arguments"}`.
    """
    match: str
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool = False


@dataclass(frozen=True)
class SkillAnswer:
    """An answer, parsed from a server's response."""

    text: str
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """`{"name": str, "arguments": dict}` in the order of the calls."""


def _exact(item: SkillItem, answer: SkillAnswer) -> bool:
    return not answer.tool_calls and answer.text.strip() == item.expected


def _json(item: SkillItem, answer: SkillAnswer) -> bool:
    try:
        return bool(json.loads(answer.text) == json.loads(item.expected))
    except ValueError:
        return False


def _thought(item: SkillItem, answer: SkillAnswer) -> bool:
    return bool(answer.reasoning and answer.reasoning.strip()) and _exact(item, answer)


def _tools(item: SkillItem, answer: SkillAnswer) -> bool:
    return bool(answer.tool_calls == item.expected)


RULES: dict[str, Callable[[SkillItem, SkillAnswer], bool]] = {
    "exact": _exact,
    "json": _json,
    "thought": _thought,
    "tools": _tools,
}
"""Rules of comparison. `exact`: the text, without calls. `json`: equal as JSON. `thought`:
reasoning, then the text. `tools`: the calls with their arguments, in order.
"""


def judge(item: SkillItem, answer: SkillAnswer) -> bool:
    """Return whether the answer is right by the item's own rule. Raises KeyError for an unknown
    rule.
    """
    return RULES[item.match](item, answer)


def load(path: Path) -> list[SkillItem]:
    """Return the items of one JSON-lines file."""
    with path.open(encoding="utf-8") as lines:
        return [SkillItem(**json.loads(line)) for line in lines]
