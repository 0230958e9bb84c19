"""Arguments come as they are written; joined, they are what the reader makes of the whole call."""

from __future__ import annotations

import json

import pytest

from quire.core.request import FinishReason
from quire.text.events import ToolCallArguments, ToolCallEnded, ToolCallStarted
from tests.support.folding import fold
from tests.text.dialects.scripts import encode, events

Q = '<|"|>'
LONG = 'one\n\t"two" \\ three {[,:]} é東🙂 ' * 8
ARGUMENTS = {"city": LONG, "days": 3, "tags": ["a", ""], "where": {"zip": "1"}, "limit": -1.5}
JSON = json.dumps(ARGUMENTS)


def in_tags(opening: str) -> str:
    """Return ARGUMENTS as the XML of calls has them."""
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in ARGUMENTS.items()}
    return "".join(f"{opening.format(k)}{v}\n</parameter>\n" for k, v in values.items())


def in_dsml() -> str:
    """Return ARGUMENTS as DSML has them."""
    return "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in ARGUMENTS.items()
    )


def in_xtml() -> str:
    """Return ARGUMENTS as XTML has them."""
    return "".join(
        f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "array"}"'
        f"<|sep|>{value if isinstance(value, str) else json.dumps(value)}<|close|>argument<|sep|>"
        for key, value in ARGUMENTS.items()
    )


def in_python(quote: str) -> str:
    """Return ARGUMENTS as keywords, strings in one kind of quotes."""
    city = LONG.replace("\\", "\\\\").replace("\n", "\\n").replace(quote, f"\\{quote}")
    city = f"{quote}{city}{quote}"
    return f"get_weather(city={city}, days=3, tags=['a', ''], where={{'zip': '1'}}, limit=-1.5)"


CALLS = {
    "lfm2": f"<|tool_call_start|>[{in_python(chr(34))}]<|tool_call_end|>",
    "olmo3": f"<function_calls>{in_python(chr(39))}</function_calls>",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    f"{JSON}}}]<|END_ACTION|>",
    "apertus": f'<|tools_prefix|>[{{"get_weather": {JSON}}}]<|tools_suffix|>',
    "hy3": "<tool_calls>\n<tool_call>get_weather<tool_sep>\n"
    + in_tags("<arg_key>{}</arg_key>\n<arg_value>").replace("\n</parameter>", "</arg_value>")
    + "</tool_call>\n</tool_calls>",
    "longcat": "<longcat_tool_call>get_weather\n"
    + in_tags("<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>").replace(
        "\n</parameter>", "</longcat_arg_value>"
    )
    + "</longcat_tool_call>",
    "nemotron": f'<TOOLCALL>[{{"name": "get_weather", "arguments": {JSON}}}]</TOOLCALL>',
    "glm4_9b": f"get_weather\n{JSON}",
    "gemma4": f"<|tool_call>call:get_weather{{city:{Q}{LONG}{Q},days:3,tags:[{Q}a{Q},{Q}{Q}],"
    f"where:{{zip:{Q}1{Q}}},limit:-1.5}}<tool_call|>",
    "qwen3": f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
    "llama3": f'{{"name": "get_weather", "parameters": {JSON}}}',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
    "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    + in_dsml()
    + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    + in_xtml()
    + "<|close|>call<|sep|><|close|>tools<|sep|>",
    "muse": '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
    + in_tags('<atem:parameter name="{}">').replace("\n</parameter>", "</atem:parameter>")
    + "</atem:invoke>\n</atem:function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON}}}]',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{JSON}<|call|>",
    "glm4": "<tool_call>get_weather\n"
    + in_tags("<arg_key>{}</arg_key>\n<arg_value>").replace("\n</parameter>", "</arg_value>")
    + "</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n"
    + in_tags("<parameter={}>\n")
    + "</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=get_weather>\n"
    + in_tags("<parameter={}>\n")
    + "</function>\n</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n'
    + in_tags('<parameter name="{}">').replace("\n</parameter>", "</parameter>")
    + "</invoke>\n</minimax:tool_call>",
}


@pytest.mark.parametrize("dialect", CALLS)
def test_arguments_come_as_they_are_written(dialect: str) -> None:
    ids = encode(dialect, [CALLS[dialect]])
    found = events(dialect, ids)
    pieces = [event.json for event in found if isinstance(event, ToolCallArguments)]
    assert json.loads("".join(pieces)) == ARGUMENTS
    assert len(pieces) > len(ids) / 4
    assert max(map(len, pieces)) < 40
    (call,) = fold(found).tool_calls
    assert call.arguments == "".join(pieces) == json.dumps(ARGUMENTS, ensure_ascii=False)


@pytest.mark.parametrize("dialect", CALLS)
def test_a_call_that_is_cut_off_starts_and_never_ends(dialect: str) -> None:
    ids = encode(dialect, [CALLS[dialect]])
    found = events(dialect, ids[: len(ids) // 2], finish=FinishReason.LENGTH)
    assert sum(isinstance(event, ToolCallStarted) for event in found) == 1
    assert not any(isinstance(event, ToolCallEnded) for event in found)
    assert fold(found).tool_calls == []
    assert fold(found).text == ""


REPEATED = [
    ("qwen3", '<tool_call>{"name": "now", "arguments": {"a": 1, "a": 2}}</tool_call>', '{"a": 2}'),
    ("gemma4", "<|tool_call>call:now{a:1,a:2}<tool_call|>", '{"a": 2}'),
    ("gemma4", "<|tool_call>call:now{a:9, NY,b:2}<tool_call|>", '{"a": "9, NY", "b": 2}'),
]


@pytest.mark.parametrize(("dialect", "text", "arguments"), REPEATED)
def test_what_turns_out_otherwise_is_a_call_of_its_own(
    dialect: str, text: str, arguments: str
) -> None:
    found = events(dialect, encode(dialect, [text]))
    assert [call.arguments for call in fold(found).tool_calls] == [arguments]
    assert sum(isinstance(event, ToolCallEnded) for event in found) == 1


def test_a_name_that_is_no_tools_waits_for_the_whole() -> None:
    text = '<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>'
    found = events("qwen3", encode("qwen3", [text]))
    assert [e.json for e in found if isinstance(e, ToolCallArguments)] == ['{"a": 1}']


def test_a_closing_tag_that_is_written_twice_closes_the_flow_once() -> None:
    call = CALLS["qwen3_coder"]
    again = call.replace("</parameter>\n", "</parameter>\n\n</parameter>\n")
    for text in (call, again):
        found = events("qwen3_coder", encode("qwen3_coder", [text]))
        pieces = [event.json for event in found if isinstance(event, ToolCallArguments)]
        assert json.loads("".join(pieces)) == ARGUMENTS
        assert sum(isinstance(event, ToolCallStarted) for event in found) == 1
