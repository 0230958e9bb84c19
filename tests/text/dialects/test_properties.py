"""Whatever a model writes and however it is cut: stream and whole agree, and nothing is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.request import FinishReason
from quire.text.dialects import DIALECTS, Tool
from quire.text.dialects.deepseek import END
from quire.text.dialects.marker_parser import MarkerParser
from quire.text.events import Event, Reasoning, Text
from quire.text.output import Answer
from tests.support.folding import fold
from tests.text.dialects.scripts import MARKERS, TOOLS, cut, encode, events, vocabulary

TOOL = Tool(
    "make",
    {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "b": {"type": "boolean"},
            "a": {"type": "array", "items": {"type": "string"}},
            "o": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    },
)
PROSE = st.text("abc .,\n'é東🙂", max_size=20)
VALUE = st.text("abc{}[]:,;\"'\\/ \nńé東🙂", max_size=12)
KEY = st.text("abcdef_", min_size=1, max_size=4)
CLOSERS = {
    "gemma4": "<tool_call|>",
    "mistral": "[TOOL_CALLS]",
    "deepseek": END,
    "dsml": "｜DSML｜",
    "kimi_k2": "<|tool_call_end|>",
    "kimi_k3": "<|close|>tools<|sep|>",
    "muse": "</atem:function_calls>",
    "minimax": "</minimax:tool_call>",
    "harmony": "<|call|>",
    "seed": "</seed:tool_call>",
    "lfm2": "<|tool_call_end|>",
    "olmo3": "</function_calls>",
    "cohere": "<|END_ACTION|>",
    "jamba": "</tool_calls>",
    "hunyuan": "</tool_calls>",
    "apertus": "<|tools_suffix|>",
    "hy3": "</tool_call>",
    "longcat": "</longcat_tool_call>",
    "nemotron": "</TOOLCALL>",
    "nemotron_mini": "</toolcall>",
    "phi4": "<|/tool_call|>",
    "glm4_9b": "<|assistant|>",
    **dict.fromkeys(("qwen3", "qwen3_coder", "glm4", "granite", "llama3", "ernie"), "</tool_call>"),
}


def arguments(dialect: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return arguments of TOOL, some with the marker that closes a call in a string."""
    value = st.one_of(VALUE, VALUE.map(lambda text: text + CLOSERS[dialect] + text))
    return st.fixed_dictionaries(
        {},
        optional={
            "s": value,
            "i": st.integers(-(10**9), 10**9),
            "b": st.booleans(),
            "a": st.lists(value, max_size=3),
            "o": st.dictionaries(KEY, value, max_size=3),
        },
    )


def in_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_gemma, value)) + "]"
    return json.dumps(value)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tags(opening: str, closing: str) -> Callable[[dict[str, Any]], str]:
    return lambda arguments: "".join(
        opening.format(key) + bare(value) + closing for key, value in arguments.items()
    )


def in_python(arguments: dict[str, Any]) -> str:
    return f"make({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def in_dsml(arguments: dict[str, Any]) -> str:
    return "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )


def in_xtml(arguments: dict[str, Any]) -> str:
    return "".join(
        f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "object"}"'
        f"<|sep|>{value if isinstance(value, str) else json.dumps(value)}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )


def in_object(arguments: dict[str, Any]) -> str:
    return f'{{"name": "make", "arguments": {json.dumps(arguments)}}}'


IN_QWEN = tags("<parameter={}>\n", "\n</parameter>\n")
IN_MINIMAX = tags('<parameter name="{}">', "</parameter>\n")
IN_ATEM = tags('<atem:parameter name="{}">', "</atem:parameter>\n")
IN_GLM = tags("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
IN_LONGCAT = tags(
    "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"
)
WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "gemma4": lambda a: f"<|tool_call>call:make{in_gemma(a)}<tool_call|>",
    "qwen3": lambda a: (
        f'<tool_call>\n{{"name": "make", "arguments": {json.dumps(a)}}}\n</tool_call>'
    ),
    "qwen3_coder": lambda a: f"<tool_call>\n<function=make>\n{IN_QWEN(a)}</function>\n</tool_call>",
    "seed": lambda a: (
        f"<seed:tool_call>\n<function=make>\n{IN_QWEN(a)}</function>\n</seed:tool_call>"
    ),
    "mistral": lambda a: f"[TOOL_CALLS]make[ARGS]{json.dumps(a, ensure_ascii=False)}",
    "deepseek": lambda a: (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>make\n```json\n"
        f"{json.dumps(a)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "dsml": lambda a: (
        f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="make">\n{in_dsml(a)}</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>"
    ),
    "glm4": lambda a: f"<tool_call>make\n{IN_GLM(a)}</tool_call>",
    "longcat": lambda a: f"<longcat_tool_call>make\n{IN_LONGCAT(a)}</longcat_tool_call>",
    "hy3": lambda a: (
        f"<tool_calls>\n<tool_call>make<tool_sep>\n{IN_GLM(a)}</tool_call>\n</tool_calls>"
    ),
    "apertus": lambda a: f'<|tools_prefix|>[{{"make": {json.dumps(a)}}}]<|tools_suffix|>',
    "kimi_k2": lambda a: (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.make:0"
        f"<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "muse": lambda a: (
        "<|eom|><|start|>assistant to=make<|message|><atem:function_calls>\n"
        f'<atem:invoke name="make">\n{IN_ATEM(a)}</atem:invoke>\n</atem:function_calls>'
    ),
    "kimi_k3": lambda a: (
        f'<|open|>tools<|sep|><|open|>call tool="make" index="1"<|sep|>{in_xtml(a)}'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "minimax": lambda a: (
        f'<minimax:tool_call>\n<invoke name="make">\n{IN_MINIMAX(a)}</invoke>\n</minimax:tool_call>'
    ),
    "lfm2": lambda a: f"<|tool_call_start|>[{in_python(a)}]<|tool_call_end|>",
    "olmo3": lambda a: f"<function_calls>\n{in_python(a)}\n</function_calls>",
    "cohere": lambda a: (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "make", '
        f'"parameters": {json.dumps(a)}}}\n]<|END_ACTION|>'
    ),
    "jamba": lambda a: f"<tool_calls>[{in_object(a)}]</tool_calls>",
    "hunyuan": lambda a: f"<tool_calls>[{in_object(a)}]</tool_calls>",
    "nemotron": lambda a: f"<TOOLCALL>[{in_object(a)}]</TOOLCALL>",
    "nemotron_mini": lambda a: f"<toolcall> {in_object(a)} </toolcall>",
    "phi4": lambda a: f"<|tool_call|>[{in_object(a)}]<|/tool_call|>",
    "ernie": lambda a: f"<tool_call>\n{in_object(a)}\n</tool_call>",
    "glm4_9b": lambda a: f"<|assistant|>make\n{json.dumps(a)}",
    "granite": lambda a: f'<tool_call>{{"name": "make", "arguments": {json.dumps(a)}}}</tool_call>',
    "harmony": lambda a: (
        "<|end|><|start|>assistant<|channel|>commentary to=functions.make <|constrain|>json"
        f"<|message|>{json.dumps(a)}<|call|>"
    ),
    "llama3": lambda a: f'<|python_tag|>{{"name": "make", "parameters": {json.dumps(a)}}}',
}
THOUGHTS = {
    "gemma4": "<|channel>thought\n{}<channel|>",
    "mistral": "[THINK]{}[/THINK]",
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    "<|channel|>final<|message|>",
    **dict.fromkeys(("llama3", "jamba", "nemotron_mini"), ""),
    "apertus": "<|inner_prefix|>{}<|inner_suffix|>",
    "cohere": "<|START_THINKING|>{}<|END_THINKING|>",
    "seed": "<seed:think>{}</seed:think>",
    **dict.fromkeys(
        (
            "qwen3",
            "qwen3_coder",
            "deepseek",
            "dsml",
            "glm4",
            "glm4_9b",
            "kimi_k2",
            "minimax",
            "granite",
        ),
        "<think>\n{}\n</think>\n\n",
    ),
    "muse": "<|start|>assistant to=self<|message|>{}<|eom|><|start|>assistant to=user<|message|>",
    "kimi_k3": "<|open|>think<|sep|>{}<|close|>think<|sep|>",
    "longcat": "<longcat_think>\n{}\n</longcat_think>\n\n",
    **dict.fromkeys(
        ("lfm2", "hunyuan", "hy3", "nemotron", "olmo3", "phi4", "ernie"),
        "<think>\n{}\n</think>\n\n",
    ),
}


def squeezed(text: str) -> str:
    return "".join(text.split())


def summary(found: Answer) -> tuple[str, str, list[tuple[str, str]]]:
    return found.text, found.reasoning, [(c.name, c.arguments) for c in found.tool_calls]


@pytest.mark.parametrize("dialect", WRITERS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_what_was_written_is_read_however_it_is_cut(dialect: str, data: st.DataObject) -> None:
    thought, prose = data.draw(PROSE, "thought"), data.draw(PROSE, "prose")
    calls = data.draw(st.lists(arguments(dialect), max_size=3), "calls")
    opening = THOUGHTS[dialect].format(thought)
    text = opening + prose + "".join(map(WRITERS[dialect], calls))
    with_ids = data.draw(st.booleans(), "with ids")
    pieces = cut(
        text,
        data.draw(st.lists(st.integers(0, 10**6), max_size=20), "cuts"),
        MARKERS[dialect] if with_ids else [],
    )
    read = fold(
        events(
            dialect,
            encode(dialect, pieces, with_ids),
            tools=[TOOL],
            with_ids=with_ids,
            group=data.draw(st.integers(1, 7), "group"),
        )
    )
    assert squeezed(read.text) == squeezed(prose)
    assert squeezed(read.reasoning) == (squeezed(thought) if opening else "")
    assert [json.loads(call.arguments) for call in read.tool_calls] == calls
    assert {call.name for call in read.tool_calls} <= {"make"}


FRAGMENTS = [
    *[
        "{",
        "}",
        '"',
        "[",
        "]",
        "(",
        ")",
        ":",
        ",",
        "\n",
        " ",
        "<",
        "</",
        "<|",
        "|>",
        "\\",
        "=",
        ">",
    ],
    *['{"name": "now", "arguments": {}}', '{"name": "', "call:now{}", "call:", "now", "now()"],
    *["thought\n", "response\n", "functions.now:0", "assistant", "to=functions.now", "```json\n"],
    *["<function=now>", "</function>", "<parameter=a>", "</parameter>", '<invoke name="now">'],
    *[
        "</invoke>",
        "Here is my thought process:",
        "Here is my response:",
        "<response>",
        "1.5",
        "NaN",
    ],
]


def garbage(dialect: str) -> st.SearchStrategy[list[str]]:
    fragment = st.sampled_from([*FRAGMENTS, *MARKERS[dialect] * 3])
    return st.lists(st.one_of(fragment, st.just("word")), max_size=25).map(
        lambda parts: [f"w{i}w" if part == "word" else part for i, part in enumerate(parts)]
    )


def written(found: list[Event]) -> str:
    return "".join(event.text for event in found if isinstance(event, Text | Reasoning))


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_garbage_is_read_the_same_however_it_is_cut(
    dialect: str, with_ids: bool, data: st.DataObject
) -> None:
    parts = data.draw(garbage(dialect), "parts")
    text = "".join(parts)
    reason = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), "reason")
    prompt = data.draw(st.sampled_from(["", *MARKERS[dialect]]), "prompt")
    places = data.draw(st.lists(st.integers(0, 10**6), max_size=20), "cuts")
    pieces = cut(text, places, MARKERS[dialect] if with_ids else [])

    def play(pieces: list[str], group: int) -> list[Event]:
        return events(
            dialect,
            encode(dialect, pieces, with_ids),
            tools=TOOLS,
            prompt=prompt,
            finish=reason,
            with_ids=with_ids,
            group=group,
        )

    streamed, whole = play(pieces, data.draw(st.integers(1, 7))), play([text], 10**6)
    assert summary(fold(streamed)) == summary(fold(whole))
    assert all(isinstance(json.loads(c.arguments), dict) for c in fold(whole).tool_calls)
    if reason is FinishReason.STOP and not fold(whole).tool_calls:
        if dialect not in ("harmony", "muse"):
            assert re.findall(r"w\d+w", written(whole)) == re.findall(r"w\d+w", text)
        if not headers(dialect):
            assert bare_of(dialect, written(whole)) == bare_of(dialect, text)


def headers(dialect: str) -> bool:
    """Return whether text between markers may be structure too."""
    return dialect in ("harmony", "muse", "gemma4")


def bare_of(dialect: str, text: str) -> str:
    """Return the text without white space, and without the markers that are never text."""
    parser = DIALECTS[dialect].parser([], TOOLS, vocabulary(dialect))
    assert isinstance(parser, MarkerParser)
    layout = parser.layout
    turns = set(MARKERS[dialect]) - layout.markers()  # special tokens are not shown
    structure = frozenset(turns).union(*layout.reasoning, *layout.answer, layout.quiet)
    pattern = "|".join(map(re.escape, structure)) or r"(?!)"
    return squeezed(re.sub(pattern, "", text))
