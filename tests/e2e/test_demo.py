"""The embedded model's skills: the same in company as alone, under every KV format."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.demo.skills import SkillAnswer, SkillItem, judge, load
from tests.e2e.asking import SKILLS, ask, format_fields
from tests.e2e.client import Client, at_once

FILES = sorted(SKILLS.glob("*.jsonl"))
SHORT = [path for path in FILES if not path.stem.startswith("retrieval")]
COMMON = ("plain", "page-4", "turbo-4")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def sample(path: Path, count: int) -> list[SkillItem]:
    """Return `count` items, spread over the file."""
    items = load(path)
    return items[:: max(1, len(items) // count)][:count]


def eight_at_once(client: Client, items: list[SkillItem], **fields: Any) -> list[SkillAnswer]:
    """Ask for all answers, eight at a time."""
    answers: list[SkillAnswer] = []
    for start in range(0, len(items), 8):
        group = items[start : start + 8]
        answers += at_once(partial(ask, client, item, **fields) for item in group)
    return answers


@pytest.mark.slow
def test_skills_are_the_same_in_company(client: Client) -> None:
    items = [item for path in SHORT for item in sample(path, 1)]
    alone = [ask(client, item) for item in items]
    for item, one, many in zip(items, alone, eight_at_once(client, items), strict=True):
        assert many == one, item
    right = [judge(item, answer) for item, answer in zip(items, alone, strict=True)]
    assert sum(right) >= 0.8 * len(items), "answers that are wrong may agree by chance"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accuracy_is_the_same_in_company(client: Client, path: Path) -> None:
    count = {"retrieval_256": 40, "retrieval_1024": 10, "retrieval_4096": 4}.get(path.stem, 1000)
    items = sample(path, count)
    alone = [judge(item, ask(client, item)) for item in items]
    company = [judge(i, a) for i, a in zip(items, eight_at_once(client, items), strict=True)]
    print(f"{path.stem}: {sum(alone)} of {len(items)} alone, {sum(company)} eight at once")
    assert company == alone


def formats(client: Client) -> dict[str, dict[str, Any]]:
    return format_fields(client.http.get("/v1/models").json()["data"][0]["kv_formats"])


def check_format(client: Client, fields: dict[str, Any]) -> None:
    """Ask eight questions at once under one format: calls, forced calls, thoughts, constrained
    answers.

    Each says what it says alone in that format, and what is bound by a grammar keeps to it.
    """
    fields = fields | {"max_tokens": 80}
    calls, thoughts = load(SKILLS / "tool_call.jsonl")[:4], load(SKILLS / "thinking.jsonl")[:2]
    bound = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    # Room for the blanks that a model writes when 2 bits confuse it: bounded, but many.
    described = fields | {"response_format": bound, "max_tokens": 500}
    asked = [
        *(partial(ask, client, item, **fields) for item in calls[:2]),
        *(partial(ask, client, item, tool_choice="required", **fields) for item in calls[2:]),
        *(partial(ask, client, item, **fields) for item in thoughts),
        *(partial(describe, client, name, **described) for name in "AB"),
    ]
    alone = [each() for each in asked]
    together = at_once(asked)
    assert together == alone
    for item, answer in zip(calls[2:], together[2:4], strict=True):
        names = [tool["function"]["name"] for tool in item.tools or ()]
        assert answer.tool_calls
        assert all(call["name"] in names for call in answer.tool_calls)
        assert answer.text == ""
    for answer in together[6:]:
        person = json.loads(answer.text)
        assert {"name", "age"} <= person.keys() <= SCHEMA["properties"].keys()
        assert 0 <= person["age"] <= 120
        assert len(person["name"]) <= 12


def describe(client: Client, name: str, **fields: Any) -> SkillAnswer:
    item = SkillItem("json", [{"role": "user", "content": f"Describe {name} as JSON."}], "", "json")
    return ask(client, item, **fields)


@pytest.mark.parametrize("name", COMMON)
def test_eight_at_once_under_common_formats(client: Client, name: str) -> None:
    check_format(client, formats(client)[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_at_once_under_every_format(client: Client) -> None:
    for name, fields in formats(client).items():
        try:
            check_format(client, fields)
        except AssertionError as error:
            raise AssertionError(f"under {name}") from error
