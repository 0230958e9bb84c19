"""Calls that are malformed or cut off: text if nothing of them was sent, else the end of the
answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.core.request import FinishReason
from quire.text.dialects import Tool
from quire.text.events import (
    Finished,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from tests.support.folding import fold
from tests.text.dialects.scripts import answer, encode, events

LONG = "a value that is long enough to be sent before it ends"
ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}})
SHORT = [
    ("gemma4", "pre <|tool_call>call:add{a:1,b<tool_call|> post"),
    ("qwen3", 'pre <tool_call>{"name": "add", "arguments": {"a": 1, "b"</tool_call> post'),
    ("qwen3_coder", "pre <tool_call><function=add><parameter=a>1</parameter><b</tool_call> post"),
    ("lfm2", "pre <|tool_call_start|>[add(a=1, b)]<|tool_call_end|> post"),
    ("lfm2", "pre <|tool_call_start|>[add(a=1, a=2)]<|tool_call_end|> post"),
    ("lfm2", 'pre <|tool_call_start|>[add(b="x", b="y")]<|tool_call_end|> post'),
    ("olmo3", 'pre <function_calls>add(b="x", **{"b": "y"})</function_calls> post'),
    ("glm4", "pre <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>b</tool_call> post"),
]


@pytest.mark.parametrize(("dialect", "text"), SHORT)
def test_a_short_call_that_breaks_off_is_text(dialect: str, text: str) -> None:
    found = events(dialect, encode(dialect, [text]), tools=[ADD])
    assert not any(isinstance(event, ToolCallStarted) for event in found)
    whole = fold(found)
    assert (whole.text, whole.tool_calls, whole.unfinished) == (text, [], None)


BROKEN = [
    ("gemma4", f'<|tool_call>call:get_weather{{city:<|"|>{LONG}<|"|>,days<tool_call|>'),
    (
        "qwen3",
        f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{LONG}", 3}}</tool_call>',
    ),
    (
        "qwen3_coder",
        f"<tool_call><function=get_weather><parameter=city>{LONG}</parameter>\n"
        "<parameter=days>3</tool_call>",
    ),
    ("lfm2", f'<|tool_call_start|>[get_weather(city="{LONG}", days=oops)]<|tool_call_end|>'),
    ("lfm2", f'<|tool_call_start|>[get_weather(city="{LONG}", city="Bern")]<|tool_call_end|>'),
    (
        "glm4",
        f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{LONG}</arg_value>b</tool_call>",
    ),
    ("mistral", f'[TOOL_CALLS]get_weather[ARGS]{{"city": "{LONG}", 3}}'),
]


@pytest.mark.parametrize(("dialect", "text"), BROKEN)
def test_an_answer_ends_at_a_call_that_breaks_off_once_started(dialect: str, text: str) -> None:
    found = events(dialect, encode(dialect, ["pre " + text + " post"]))
    assert not any(isinstance(event, ToolCallEnded) for event in found)
    last = found[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.tool_calls) == (FinishReason.MALFORMED_CALL, 0)
    whole = fold(found)
    assert (whole.text, whole.tool_calls) == ("pre", [])
    assert whole.unfinished is not None
    pieces = [event.json for event in found if isinstance(event, ToolCallArguments)]
    assert whole.unfinished.arguments == "".join(pieces)
    assert whole.unfinished.arguments.startswith(f'{{"city": "{LONG}')


CUT_OFF = [
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>To', '{"city": "To'),
    ("qwen3", '<tool_call>{"name": "get_weather", "arguments": {"city": "To', '{"city": "To'),
    ("qwen3_coder", "<tool_call><function=get_weather>\n<parameter=city>\nTo", '{"city": "To'),
    ("lfm2", '<|tool_call_start|>[get_weather(city="To', '{"city": "To'),
    ("glm4", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>To", '{"city": "To'),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "To', '{"city": "To'),
]


@pytest.mark.parametrize(("dialect", "text", "started"), CUT_OFF)
def test_the_part_of_a_call_that_is_there_is_given(dialect: str, text: str, started: str) -> None:
    found = fold(events(dialect, encode(dialect, [text]), finish=FinishReason.LENGTH))
    assert found.unfinished is not None
    assert (found.unfinished.name, found.unfinished.arguments) == ("get_weather", started)
    assert (found.text, found.tool_calls) == ("", [])


def test_a_name_that_comes_twice_does_not_break_a_call() -> None:
    text = (
        f'<tool_call>{{"name": "now", "arguments": {{"a": "{LONG}", "a": 2}}}}</tool_call>',
        f"<tool_call><function=now><parameter=a>{LONG}</parameter><parameter=a>2</parameter>"
        "</function></tool_call>",
    )
    for dialect, call in zip(("qwen3", "qwen3_coder"), text, strict=True):
        (read,) = answer(dialect, call).tool_calls
        assert json.loads(read.arguments) == {"a": 2}


def said(tool: str, **properties: Any) -> Tool:
    return Tool(tool, {"type": "object", "properties": properties})


TEXT = {"type": "string"}
BASH, GREP = said("bash", command=TEXT), said("grep", pattern=TEXT)
SAVE = said("save", text=TEXT, city=TEXT, state=TEXT)
TUNE = said(
    "tune",
    ratio={"type": "float"},
    on={"type": "bool"},
    opts={"type": "dict"},
    n={"type": "int"},
    steps={"type": "list"},
    other={"type": "tensor"},
)
READ: list[tuple[str, Tool, str, dict[str, Any]]] = [
    *[
        (dialect, BASH, opening + call + closing, {"command": command})
        for dialect, opening, closing in (
            ("lfm2", "<|tool_call_start|>[", "]<|tool_call_end|>"),
            ("olmo3", "<function_calls>\n", "\n</function_calls>"),
        )
        for call, command in (
            ('bash(command="print("hi")")', 'print("hi")'),
            ("bash(command='log('x')')", "log('x')"),
            ('bash(command="echo ")" end")', 'echo ")" end'),
            ('bash(command="f("a", b="c")")', 'f("a", b="c")'),
            ("bash(command='it's')", "it's"),
            ('bash(command="""say "hi"""")', 'say "hi"'),
            (r'bash(command="say \"hi\"")', 'say "hi"'),
        )
    ],
    (
        "minimax",
        SAVE,
        '<minimax:tool_call>\n<invoke name="save">\n<parameter name="text">\ntop\nend\n'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        {"text": "\ntop\nend\n"},
    ),
    *[
        (
            "seed",
            SAVE,
            f"<seed:tool_call>\n<function=save>\n<parameter=text>{written}</parameter>\n"
            "</function>\n</seed:tool_call>",
            {"text": value},
        )
        for written, value in (("a\n", "a\n"), ("\na\n", "a"), ("\n\na\n\n", "\na\n"))
    ],
    *[
        (
            "qwen3_coder",
            TUNE,
            f"<tool_call>\n<function=tune>\n<parameter={key}>\n{json.dumps(value)}\n"
            "</parameter>\n</function>\n</tool_call>",
            {key: value},
        )
        for key, value in (
            ("ratio", 0.5),
            ("on", True),
            ("opts", {"a": 1}),
            ("steps", [1, "a"]),
            ("n", 7),
            ("other", 7),
        )
    ],
    (
        "qwen3_coder",
        SAVE,
        "<tool_call>\n<function=save>\n<parameter=city>\nOslo\n<parameter=state>\nNO\n"
        "</parameter>\n</function>\n</tool_call>",
        {"city": "Oslo", "state": "NO"},
    ),
    (
        "qwen3",
        GREP,
        '<tool_call>\n{"name": "grep", "arguments": {"pattern": "\\d+\\u12"}}\n</tool_call>',
        {"pattern": "\\d+\\u12"},
    ),
    (
        "mistral",
        GREP,
        '[TOOL_CALLS] [TOOL_CALLS] [{"name": "grep", "arguments": {"pattern": "x"}}]',
        {"pattern": "x"},
    ),
]


@pytest.mark.parametrize(("dialect", "tool", "text", "wanted"), READ)
def test_calls_are_read_as_they_are_meant(
    dialect: str, tool: Tool, text: str, wanted: dict[str, Any]
) -> None:
    found = answer(dialect, text, tools=[tool])
    assert (found.text, found.unfinished) == ("", None)
    assert [json.loads(call.arguments) for call in found.tool_calls] == [wanted]


def test_numbers_are_read_as_python_writes_them() -> None:
    text = "<|tool_call_start|>[tune(ratio=-.5e1, n=0x1F, on=1_000)]<|tool_call_end|>"
    (call,) = answer("lfm2", text, tools=[TUNE]).tool_calls
    assert json.loads(call.arguments) == {"ratio": -5.0, "n": 31, "on": 1000}


def test_a_string_whose_end_cannot_be_told_makes_no_call() -> None:
    text = '<|tool_call_start|>[bash(command="a" b "c)]<|tool_call_end|>'
    assert answer("lfm2", text, tools=[BASH]).tool_calls == []


ASIDE = "<|channel|>commentary to=python <|constrain|>code<|message|>2**8<|call|>"
MESSAGES = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + ASIDE, "Hm.", ""),
    ("<|channel|>analysis to=python code<|message|>print(3)<|call|>", "print(3)", ""),
    ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", "", ""),
    (ASIDE + "<|start|>assistant<|channel|>final<|message|>256", "", "256"),
    (  # an output that the model makes up
        ASIDE + "<|start|>python to=assistant<|channel|>commentary<|message|>256<|end|>"
        "<|start|>functions.bash<|channel|>commentary<|message|>{}<|end|>"
        "<|start|>assistant<|channel|>final<|message|>256.",
        "",
        "256.",
    ),
    (
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.",
        "Hm.",
        "Yes.",
    ),
]


@pytest.mark.parametrize("tools", [[], [BASH]])
@pytest.mark.parametrize(("text", "reasoning", "content"), MESSAGES)
def test_messages_to_others_are_no_content(
    text: str, reasoning: str, content: str, tools: list[Tool]
) -> None:
    found = answer("harmony", text, tools=tools)
    assert (found.reasoning, found.text, found.tool_calls) == (reasoning, content, [])


def test_what_follows_a_call_in_open_reasoning_is_reasoning_if_that_is_closed() -> None:
    text = (
        'Maybe <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> no, wait.\n</think>\n\n'
        "Done."
    )
    found = answer("qwen3", text, prompt="<|im_start|>assistant\n<think>\n")
    assert (found.reasoning, found.text) == ("Maybe no, wait.", "Done.")
    assert len(found.tool_calls) == 1
