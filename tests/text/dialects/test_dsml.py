"""DSML, which DeepSeek V3.2 and V4 write, in both dialects that read it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.core.request import FinishReason
from quire.text.dialects import DIALECTS
from quire.text.dialects.dsml import MARK
from tests.support.folding import fold
from tests.text.dialects.scripts import answer, encode, events, spelled, vocabulary

Calls = list[tuple[str, Any]]


def block(*calls: str, name: str = "function_calls") -> str:
    return f"<{MARK}{name}>\n" + "".join(calls) + f"</{MARK}{name}>"


def invoke(name: str, *parameters: str) -> str:
    return f'<{MARK}invoke name="{name}">\n' + "".join(parameters) + f"</{MARK}invoke>\n"


def parameter(key: str, value: str, string: str = ' string="true"') -> str:
    return f'<{MARK}parameter name="{key}"{string}>{value}</{MARK}parameter>\n'


JSON = ' string="false"'
CITY = parameter("city", "Rome")
CASES: list[tuple[str, str, Calls]] = [
    (block(invoke("get_weather", CITY, parameter("days", "3", JSON))), "",
     [("get_weather", {"city": "Rome", "days": 3})]),
    ("Both.\n\n" + block(invoke("get_weather", CITY), invoke("now")), "Both.",
     [("get_weather", {"city": "Rome"}), ("now", {})]),
    (block(invoke("get_weather", CITY), name="tool_calls"), "",
     [("get_weather", {"city": "Rome"})]),
    (block(f'<{MARK}invoke name="now">\n\n</{MARK}invoke>\n'), "", [("now", {})]),
    # Text is verbatim, whatever the schema says.
    (block(invoke("get_weather", parameter("city", "echo 1\n"), parameter("days", "3"))), "",
     [("get_weather", {"city": "echo 1\n", "days": "3"})]),
    (block(invoke("get_weather", parameter("city", "</b> <think> </｜x <｜DSML｜y"))), "",
     [("get_weather", {"city": "</b> <think> </｜x <｜DSML｜y"})]),
    # What is no text is JSON; what is none after all, and what is not marked, goes by the schema.
    (block(invoke("get_weather", parameter("tags", ' ["a", {}] ', JSON),
                  parameter("exact", "True", JSON), parameter("city", "a: b", JSON))), "",
     [("get_weather", {"tags": ["a", {}], "exact": True, "city": "a: b"})]),
    (block(invoke("get_weather", parameter("days", "3", ""), parameter("city", "3", ""))), "",
     [("get_weather", {"days": 3, "city": "3"})]),
    # A closing tag is missing.
    (block(invoke("get_weather", f'<{MARK}parameter name="city" string="true">Rome\n',
                  parameter("days", "1", JSON))), "",
     [("get_weather", {"city": "Rome", "days": 1})]),
]  # fmt: skip


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("dialect", ["deepseek", "dsml"])
@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_calls(text: str, said: str, calls: Calls, dialect: str, with_ids: bool) -> None:
    found = answer(dialect, text, with_ids=with_ids)
    assert [(c.name, json.loads(c.arguments)) for c in found.tool_calls] == calls
    assert (found.text, found.reasoning) == (said, "")


@pytest.mark.parametrize(
    "text",
    [
        block("no call"),
        block(invoke("get_weather", CITY, CITY)),
        f"<{MARK}function_calls> {MARK} <{MARK}other>",
        f"{MARK} alone",
    ],
)
def test_what_is_no_call_is_text_with_its_marks(text: str) -> None:
    for dialect in ("deepseek", "dsml"):
        found = answer(dialect, text)
        assert (found.text, found.tool_calls) == (text, [])
    found = answer("dsml", block(invoke("now")), tools=[])
    assert (found.text, found.tool_calls) == (block(invoke("now")), [])


def test_a_call_that_is_cut_off_is_none() -> None:
    text = block(invoke("get_weather", CITY))
    cut = text[: text.index("</｜DSML｜invoke>")]
    assert answer("dsml", cut, finish=FinishReason.LENGTH).tool_calls == []


def test_the_mark_starts_strict_calls() -> None:
    assert DIALECTS["dsml"].opener(vocabulary("dsml")) == encode("dsml", [MARK])[0]
    found = fold(events("dsml", spelled("dsml", block(invoke("now")))))
    assert [call.name for call in found.tool_calls] == ["now"]
