"""Grammars that force tool calls: they compile, let good calls through, and nothing else."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.core.errors import RequestError
from quire.core.request import FinishReason
from quire.text.dialects import DIALECTS, Tool
from tests.support.backend import backend_of
from tests.support.folding import fold
from tests.text.dialects.scripts import STOP_TOKEN, TOOLS, encode, events, tokenizer, vocabulary

FORCING = [name for name, dialect in DIALECTS.items() if dialect.forced is not None]
Q = '<|"|>'
OBJECT = '{"name": "get_weather", "arguments": {"city": "x"}}'
GOOD = {
    "gemma4": f'<|tool_call>call:get_weather{{city:{Q}a "b" {{c}}{Q},days:3,tags:[{Q}x{Q}]}}'
    "<tool_call|>",
    "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nx < y\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "llama3": '{"name": "get_weather", "parameters": {"city": "x"}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "x"}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">x</div>\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "glm4": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>x</arg_value>\n"
    "</tool_call>",
    "lfm2": '<|tool_call_start|>[get_weather(city="x", days=3)]<|tool_call_end|>',
    "olmo3": '<function_calls>get_weather(city="x", tags=["y"])</function_calls>',
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    '"parameters": {"city": "x"}}\n]<|END_ACTION|>',
    "jamba": f"<tool_calls>[{OBJECT}]</tool_calls>",
    "hunyuan": f"<tool_calls>[{OBJECT}]</tool_calls>",
    "apertus": '<|tools_prefix|>[{"get_weather": {"city": "x"}}]<|tools_suffix|>',
    "hy3": "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>\n</tool_calls>",
    "longcat": "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    "<longcat_arg_value>x</longcat_arg_value>\n</longcat_tool_call>",
    "nemotron": f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
    "nemotron_mini": f"<toolcall> {OBJECT} </toolcall>",
    "phi4": f"<|tool_call|>[{OBJECT}]<|/tool_call|>",
    "ernie": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "glm4_9b": 'get_weather\n{"city": "x"}',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "x"}}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "x"}<|call|>',
    "kimi_k3": '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" '
    'index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>x</div>\n'
    '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument'
    "<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "muse": ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">x</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">x'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "seed": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>x</parameter>\n"
    "</function>\n</seed:tool_call>",
}


@cache
def ll_tokenizer(dialect: str, with_ids: bool) -> LLTokenizer:
    known = tokenizer(dialect, with_ids)
    return LLTokenizer(
        backend_of(known).to_str(),
        n_vocab=known.vocab_size,
        eos_token=known.token_id(STOP_TOKEN),
    )


def matcher(dialect: str, source: str, *, with_ids: bool = True) -> LLMatcher:
    lark = LLMatcher.grammar_from_lark(source)
    found = LLMatcher(ll_tokenizer(dialect, with_ids), lark, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def source_of(
    dialect: str,
    tools: list[Tool],
    name: str | None = None,
    *,
    parallel: bool = False,
    with_ids: bool = True,
) -> str:
    return DIALECTS[dialect].tool_grammar(tools, name, parallel, vocabulary(dialect, with_ids))


def accepted(found: LLMatcher, ids: list[int]) -> bool:
    return (
        found.validate_tokens(ids) == len(ids)
        and found.consume_tokens(ids)
        and found.is_accepting()
    )


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("dialect", FORCING)
def test_lets_a_good_call_through_and_no_other(dialect: str, with_ids: bool) -> None:
    good = GOOD[dialect]
    if not with_ids and dialect == "harmony":
        pytest.skip("its messages are told apart by tokens alone")
    if not with_ids and dialect == "granite":
        good = GOOD["qwen3"]
    if not with_ids and dialect == "mistral":
        good = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "x"}}]'
    if not with_ids and dialect == "cohere":
        good = (
            'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
            '{"city": "x"}\n    }\n]\n```'
        )
    source = source_of(dialect, TOOLS, with_ids=with_ids)
    assert accepted(matcher(dialect, source, with_ids=with_ids), encode(dialect, [good], with_ids))
    bad = encode(dialect, [good.replace("get_weather", "get_rain")], with_ids)
    assert not accepted(matcher(dialect, source, with_ids=with_ids), bad)
    prose = encode(dialect, ["Sure."], with_ids)
    assert matcher(dialect, source, with_ids=with_ids).validate_tokens(prose) == 0
    found = fold(events(dialect, encode(dialect, [good], with_ids), with_ids=with_ids))
    assert [call.name for call in found.tool_calls] == ["get_weather"]


@pytest.mark.parametrize("dialect", FORCING)
def test_named_and_parallel(dialect: str) -> None:
    now = encode(dialect, [GOOD[dialect]])
    assert not accepted(matcher(dialect, source_of(dialect, TOOLS, "now")), now)
    one = matcher(dialect, source_of(dialect, TOOLS))
    many = matcher(dialect, source_of(dialect, TOOLS, parallel=True))
    assert one.consume_tokens(now)
    assert many.consume_tokens(now)
    assert one.is_stopped() or one.compute_bitmask() != many.compute_bitmask()


def set_bits(mask: npt.NDArray[np.uint8], count: int) -> list[int]:
    """Return which of the first `count` bits of a mask are set."""
    found: list[int] = np.unpackbits(mask, count=count, bitorder="little").nonzero()[0].tolist()
    return found


@cache
def endings(dialect: str, *texts: bytes) -> frozenset[int]:
    """Return the special tokens, and the tokens of these texts."""
    known = tokenizer(dialect)
    plain = (token for token in range(known.vocab_size) if known.token_bytes(token) in texts)
    return frozenset((*known.special_ids, *plain))


def sample(dialect: str, source: str, seed: int) -> tuple[list[int], bool]:
    """Return tokens drawn from those that the grammar allows, and whether they came to an end."""
    found, draw = matcher(dialect, source), random.Random(seed)
    known = tokenizer(dialect)
    stop, ids = known.token_id(STOP_TOKEN), []
    # Characters that end a string or an object are favoured, or random text never ends.
    ends = endings(dialect, b'"', b"}", b"]", b"<")
    for _ in range(600):
        allowed = set_bits(np.frombuffer(found.compute_bitmask(), np.uint8), known.vocab_size)
        if stop in allowed:
            return ids, True
        ending = [i for i in allowed if i in ends]
        ids.append(draw.choice(ending if ending and draw.random() < 0.5 else allowed))
        assert found.consume_token(ids[-1])
    return ids, False


CHECKED = Tool(
    "check",
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b", 3]},
            "count": {"type": "integer", "minimum": 3},
            "flag": {"type": ["boolean", "null"]},
            "node": {"$ref": "#/$defs/node"},
            "names": {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": 3},
                "minItems": 1,
                "maxItems": 2,
            },
        },
        "required": ["kind", "count"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/node"}},
                "additionalProperties": False,
            },
        },
    },
)


def check(arguments: dict[str, Any]) -> None:
    assert {"kind", "count"} <= arguments.keys() <= CHECKED.parameters["properties"].keys()
    assert arguments["kind"] in ("a", "b", 3)
    assert isinstance(arguments["count"], int)
    assert arguments["count"] >= 3
    assert isinstance(arguments.get("flag"), bool | None)
    assert 1 <= len(arguments.get("names", ["x"])) <= 2
    assert all(1 <= len(name) <= 3 for name in arguments.get("names", []))
    node = arguments.get("node", {})
    while node:
        assert list(node) == ["next"]
        node = node["next"]


@pytest.mark.parametrize(
    "dialect",
    ["gemma4", "qwen3", "qwen3_coder", "llama3", "mistral", "glm4", "harmony", "lfm2", "cohere"],
)
def test_what_the_grammar_lets_through_is_read_as_a_call_of_that_schema(dialect: str) -> None:
    source, ended = source_of(dialect, [CHECKED]), 0
    for seed in range(8):
        ids, complete = sample(dialect, source, seed)
        reason = FinishReason.STOP if complete else FinishReason.LENGTH
        found = fold(events(dialect, ids, tools=[CHECKED], finish=reason))
        assert found.text == ""
        assert len(found.tool_calls) == int(complete)
        ended += complete
        for call in found.tool_calls:
            check(json.loads(call.arguments))
    assert ended >= 2


def test_what_cannot_be_forced_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="none"):
        source_of("none", TOOLS)
    with pytest.raises(RequestError, match="'rain'"):
        source_of("qwen3", TOOLS, "rain")
    with pytest.raises(RequestError, match="any tool"):
        source_of("qwen3", [])
