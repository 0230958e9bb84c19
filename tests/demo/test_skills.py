"""The held-out items and their judge."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quire.demo.skills import RULES, SkillAnswer, SkillItem, judge, load

FOLDER = Path(__file__).parents[1] / "data" / "skills"
SKILLS = sorted(FOLDER.glob("*.jsonl"))


def perfect(item: SkillItem) -> SkillAnswer:
    if item.match == "tools":
        return SkillAnswer("", tool_calls=item.expected)
    return SkillAnswer(item.expected, reasoning="Because." if item.match == "thought" else None)


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.stem)
def test_the_expected_answer_is_right_and_another_wrong(path: Path) -> None:
    items = load(path)
    assert len(items) >= 60
    for item in items:
        assert item.skill == path.stem
        assert item.match in RULES
        assert judge(item, perfect(item))
        assert not judge(item, SkillAnswer("something else", reasoning="Because."))


def test_fifteen_skills_in_text_seven_with_pictures_and_four_with_sounds_ship() -> None:
    assert len(SKILLS) == 26
    assert sum(path.stem.startswith("picture_") for path in SKILLS) == 7
    assert sum(path.stem.startswith("sound_") for path in SKILLS) == 4


def ask(expected: Any, match: str) -> SkillItem:
    return SkillItem("any", [{"role": "user", "content": "?"}], expected, match)


def test_a_text_with_a_call_beside_it_is_not_that_text() -> None:
    call = {"name": "f", "arguments": {}}
    assert judge(ask("42", "exact"), SkillAnswer(" 42\n"))
    assert not judge(ask("42", "exact"), SkillAnswer("42", tool_calls=[call]))


def test_json_is_compared_as_json() -> None:
    item = ask('{"a": 1, "b": [true]}', "json")
    assert judge(item, SkillAnswer('{"b":[true],"a":1}'))
    assert not judge(item, SkillAnswer('{"a": 1'))


def test_calls_must_agree_in_order_and_arguments() -> None:
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    item = ask(calls, "tools")
    assert judge(item, SkillAnswer("", tool_calls=calls))
    assert not judge(item, SkillAnswer("", tool_calls=calls[::-1]))


def test_a_thought_is_needed_where_one_was_asked_for() -> None:
    item = dataclasses.replace(ask("7", "thought"), enable_thinking=True)
    assert judge(item, SkillAnswer("7", reasoning="3 + 4"))
    assert not judge(item, SkillAnswer("7", reasoning=" "))
    assert not judge(item, SkillAnswer("7"))
