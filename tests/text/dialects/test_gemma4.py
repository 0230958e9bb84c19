"""Gemma 4: channels and calls, case by case."""

from __future__ import annotations

import json

import pytest

from quire.core.request import FinishReason
from tests.support.folding import fold
from tests.text.dialects.scripts import answer, encode, events, spelled

Q = '<|"|>'
CALL_IN_STRING = "<|tool_call>call:f{}<tool_call|>"


def call(arguments: str, name: str = "get_weather") -> str:
    return f"<|tool_call>call:{name}{arguments}<tool_call|>"


CHANNELS: list[tuple[str, str, str]] = [
    ("Plain answer.", "", "Plain answer."),
    ("<|channel>thought\nLet me see.\n<channel|>It is 4.", "Let me see.", "It is 4."),
    ("<|channel>thought\n<channel|>It is 4.", "", "It is 4."),
    ("<|channel>response\nHello<channel|>", "", "Hello"),
    ("<|channel>content\nHello", "", "Hello"),
    ("<|channel>final\nHello", "", "Hello"),
    ("<|channel>responseHello", "", "Hello"),
    ("<|channel>thought\nhm<|channel>response\nHello", "hm", "Hello"),
    ("<|channel>thought\none<channel|>A <|channel>thought\ntwo<channel|>B", "one\ntwo", "A B"),
    ("response is what I say", "", "response is what I say"),
    ("<|channel>thought\nhm<channel|>response is a word", "hm", "response is a word"),
    ("<|channel>thought\nhm<channel|>\n\nthought\nso", "hm", "thought\nso"),
    ("<|channel>thoughtful people<channel|>x", "thoughtful people", "x"),
    ("<|channel>plain talk<channel|>x", "plain talk", "x"),
    ("the word call:f(x=1) is prose", "", "the word call:f(x=1) is prose"),
    ("call:get_weather{city:x}", "", "call:get_weather{city:x}"),
    ("  indented", "", "  indented"),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), CHANNELS)
def test_channels(text: str, reasoning: str, content: str) -> None:
    found = answer("gemma4", text)
    assert (found.reasoning, found.text, found.tool_calls) == (reasoning, content, [])


def test_cut_off_inside_a_thought_is_reasoning_only() -> None:
    for text in ("<|channel>thought\nI was thinking", "<|channel>thought\nI was <|chan"):
        found = answer("gemma4", text, finish=FinishReason.LENGTH)
        assert found.text == ""
        assert found.reasoning.startswith("I was")
    assert answer("gemma4", "<|channel>thou", finish=FinishReason.LENGTH).reasoning == ""


def test_markers_spelled_by_ordinary_tokens_are_text() -> None:
    text = '<|channel>thought\nno<channel|><|tool_call>call:now{}<tool_call|><|"|>'
    found = fold(events("gemma4", spelled("gemma4", text)))
    assert (found.text, found.reasoning, found.tool_calls) == (text, "", [])


PROMPTS: list[tuple[str, str, str]] = [
    ("<|turn>user\nhi<turn|>\n<|turn>model\n", "", "x"),
    ("<|turn>model\n<|channel>thought\n", "x", ""),
    ("<|turn>model\n<|channel>thought\nso far ", "x", ""),
    ("<|turn>model\n<|channel>thought\n<channel|>", "", "x"),
    ("<|turn>user\n<|channel>thought\nhi<turn|>\n<|turn>model\n", "", "x"),
    ("<|turn>user\n<|channel>thought\nhi", "x", ""),
]


@pytest.mark.parametrize(("prompt", "reasoning", "content"), PROMPTS)
def test_starts_as_the_prompt_ends(prompt: str, reasoning: str, content: str) -> None:
    found = answer("gemma4", "x", prompt=prompt)
    assert (found.reasoning, found.text) == (reasoning, content)


ARGUMENTS: list[tuple[str, dict[str, object]]] = [
    ("{}", {}),
    (f"{{city:{Q}Tokyo{Q}}}", {"city": "Tokyo"}),
    (f"{{city:{Q}{Q}}}", {"city": ""}),
    (f"{{city:{Q}a{{b}}[c], d:e {Q}}}", {"city": "a{b}[c], d:e "}),
    (f'{{city:{Q}say "hi"\nand \\n{Q}}}', {"city": 'say "hi"\nand \\n'}),
    (f"{{city:{Q}<tool_call|>{Q}}}", {"city": "<tool_call|>"}),
    (f"{{city:{Q}<|tool_call>call:f{{}}<tool_call|>{Q}}}", {"city": CALL_IN_STRING}),
    ("{days:3,exact:true,limit:null}", {"days": 3, "exact": True, "limit": None}),
    ("{days: 3 , exact : false}", {"days": 3, "exact": False}),
    ("{limit:-2.5e3}", {"limit": -2500.0}),
    ("{exact:True,limit:None}", {"exact": True, "limit": None}),
    ("{city:Tokyo}", {"city": "Tokyo"}),
    ("{city:New York, NY,days:2}", {"city": "New York, NY", "days": 2}),
    ("{city:007}", {"city": "007"}),
    (f"{{days:{Q}3{Q}}}", {"days": 3}),
    (f"{{days:{Q}many{Q}}}", {"days": "many"}),
    (f"{{unknown:{Q}3{Q},other:3}}", {"unknown": "3", "other": 3}),
    ("{unknown:https://a.b/c?d=e}", {"unknown": "https://a.b/c?d=e"}),
    (f"{{tags:[{Q}a{Q},{Q}b,c{Q}]}}", {"tags": ["a", "b,c"]}),
    ("{tags:[a, b]}", {"tags": ["a", "b"]}),
    ("{tags:[]}", {"tags": []}),
    (f"{{where:{{zip:{Q}01234{Q}}}}}", {"where": {"zip": "01234"}}),
    ("{where:{zip:01234}}", {"where": {"zip": "01234"}}),
    ('{"city":"Tokyo \\"x\\""}', {"city": 'Tokyo "x"'}),
    (f"{{{Q}city{Q}:{Q}Tokyo{Q}}}", {"city": "Tokyo"}),
    (f"{{deep:[{{a:[1,{{b:{Q}c{Q}}}]}}]}}", {"deep": [{"a": [1, {"b": "c"}]}]}),
    (f"{{city:{Q}Tokyo{Q},}}", {"city": "Tokyo"}),
    (f"{{city:New York, NY{Q}}}", {"city": "New York, NY"}),
    (f"{{city:Paris, France{Q},days:5}}", {"city": "Paris, France", "days": 5}),
    (f"{{days:5,city:{Q}, x{Q}}}", {"days": 5, "city": ", x"}),
    (f"{{city:{Q}look{Q}days:90}}", {"city": "look", "days": 90}),
    (f"(city={Q}ls -a (x){Q}, days=2)", {"city": "ls -a (x)", "days": 2}),
    ("(city=New York, NY, days=2)", {"city": "New York, NY", "days": 2}),
    ("{city='it, is',days=2}", {"city": "it, is", "days": 2}),
    ("()", {}),
    (f"{{city:{Q}Zürich 東京 🙂{Q}}}", {"city": "Zürich 東京 🙂"}),
]


@pytest.mark.parametrize(("arguments", "wanted"), ARGUMENTS)
def test_arguments(arguments: str, wanted: dict[str, object]) -> None:
    found = answer("gemma4", call(arguments))
    assert found.text == ""
    calls = [(c.name, json.loads(c.arguments)) for c in found.tool_calls]
    assert calls == [("get_weather", wanted)]


def test_several_calls_with_text_and_thought() -> None:
    text = (
        "<|channel>thought\nTwo.<channel|>I'll look.\n"
        + call("{days:1}")
        + "\n"
        + call(f"{{q:{Q}x{Q}}}", "db.find-all")
        + "<|tool_response>"
    )
    found = answer("gemma4", text)
    assert (found.reasoning, found.text) == ("Two.", "I'll look.")
    assert [(c.name, c.arguments) for c in found.tool_calls] == [
        ("get_weather", '{"days": 1}'),
        ("db.find-all", '{"q": "x"}'),
    ]
    assert len({c.id for c in found.tool_calls}) == 2


def test_spaces_where_a_model_puts_them() -> None:
    found = answer("gemma4", f"<|tool_call> call: get_weather {'{'} city : {Q}x{Q} }} <tool_call|>")
    assert [c.arguments for c in found.tool_calls] == ['{"city": "x"}']


def test_call_left_out() -> None:
    found = answer("gemma4", "<|tool_call>:get_weather{days:1}<tool_call|>")
    assert [(c.name, c.arguments) for c in found.tool_calls] == [("get_weather", '{"days": 1}')]


@pytest.mark.parametrize("at", range(1, 60, 3))
def test_a_call_cut_off_leaves_no_half_call(at: int) -> None:
    ids = encode("gemma4", ["So:" + call(f"{{city:{Q}A long name of a place{Q},days:3}}")])
    found = fold(events("gemma4", ids[: min(at, len(ids) - 2)], finish=FinishReason.LENGTH))
    assert found.tool_calls == []
    assert "So:".startswith(found.text)
    assert found.finish is not None
    assert found.finish.reason is FinishReason.LENGTH


MALFORMED: list[str] = [
    "<|tool_call>get_weather(city=1)<tool_call|>",
    "<|tool_call>call:get_weather(city=1}<tool_call|>",
    "<|tool_call>call:get_weather city=1<tool_call|>",
    "<|tool_call>call:get_weather{city 1}<tool_call|>",
    "<|tool_call>call:get_weather{city:[1}<tool_call|>",
    "<|tool_call>call:get_weather{city:1<tool_call|>",
    "<|tool_call>call:{a:1}<tool_call|>",
    "<|tool_call><tool_call|>",
    "<|tool_call>call:f" + "{a:" * 200,
]


@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_calls_are_text(body: str) -> None:
    found = answer("gemma4", "A" + body + "B" + call("{}"))
    assert found.text == "A" + body + "B"
    assert [c.name for c in found.tool_calls] == ["get_weather"]


def test_a_call_inside_a_thought_ends_it() -> None:
    found = answer("gemma4", "<|channel>thought\nhm" + call("{}") + "done")
    assert (found.reasoning, found.text, len(found.tool_calls)) == ("hm", "done", 1)


def test_without_tools_a_call_is_text() -> None:
    found = answer("gemma4", call("{}"), tools=[])
    assert (found.text, found.tool_calls) == (call("{}"), [])
