"""Schemas with names and strings of all kinds: what a grammar lets through is read as it meets
the schema, in every notation."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from quire.core.request import FinishReason
from quire.text.dialects import DIALECTS, Tool
from quire.text.dialects.strings import anchored_pattern
from tests.support.folding import fold
from tests.text.dialects.scripts import answer, encode, events, vocabulary
from tests.text.dialects.test_forced import accepted, matcher, sample, source_of

Q = '<|"|>'
TAGS = ("glm4", "qwen3_coder", "minimax")


def a_key(draw: random.Random) -> str:
    plain = "abcxyz"
    strange = plain + "$@/:[]{}(),=.-_ \"'<>|é"
    characters = strange if draw.random() < 0.7 else plain
    return "".join(draw.choice(characters) for _ in range(draw.randint(0, 5)))


def a_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "boolean", "string", "null", "enum"]
    match draw.choice(kinds + ["object", "array", "map"] * (depth < 2)):
        case "object":
            return an_object(draw, depth + 1)
        case "array":
            return {"type": "array", "items": a_schema(draw, depth + 1), "maxItems": 2}
        case "map":
            return {"type": "object", "additionalProperties": {"type": "integer"}}
        case "enum":
            return {"enum": [a_key(draw), draw.randint(0, 9)]}
        case "string":
            return {"type": "string", "pattern": "^[a-z, :{}]{1,4}$"}
        case kind:
            return {"type": kind}


def an_object(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    keys = list(dict.fromkeys(a_key(draw) for _ in range(draw.randint(1, 4))))
    return {
        "type": "object",
        "properties": {key: a_schema(draw, depth) for key in keys},
        "required": [key for key in keys if draw.random() < 0.6],
        "additionalProperties": False,
    }


def check(value: Any, schema: dict[str, Any]) -> None:
    """Asserts that a value meets a schema of `a_schema`."""
    if "enum" in schema:
        assert value in schema["enum"]
        return
    match schema["type"]:
        case "object" if "properties" in schema:
            assert set(schema["required"]) <= value.keys() <= schema["properties"].keys()
            for key, inner in value.items():
                check(inner, schema["properties"][key])
        case "object":
            assert all(type(inner) is int for inner in value.values())
        case "array":
            assert len(value) <= 2
            for inner in value:
                check(inner, schema["items"])
        case "string":
            assert re.fullmatch("[a-z, :{}]{1,4}", value)
        case kind:
            assert type(value) is {"integer": int, "boolean": bool, "null": type(None)}[kind]


@pytest.mark.parametrize("block", range(8))
def test_216_random_schemas(block: int) -> None:
    ended = 0
    for seed in range(block * 27, block * 27 + 27):
        tool = Tool("f", an_object(random.Random(seed)))
        ids, complete = sample("gemma4", source_of("gemma4", [tool]), seed)
        if complete:
            ended += 1
            found = fold(events("gemma4", ids, tools=[tool]))
            assert (found.text, len(found.tool_calls)) == ("", 1), tool.parameters
            check(json.loads(found.tool_calls[0].arguments), tool.parameters)
    assert ended > 13


NUMBERS = {"a": {"type": "integer"}, "b/c": {"type": "integer"}, "my key": {"type": "integer"}}
ODATA = {"$top": {"type": "integer"}, "$filter": {"type": "string"}}
WRITTEN = [
    (NUMBERS, "{a:9,b/c:8}", {"a": 9, "b/c": 8}),
    (NUMBERS, "{a: 9, my key: 8}", {"a": 9, "my key": 8}),
    (ODATA, "{$top:5,$filter:name eq 'x',y}", {"$top": 5, "$filter": "name eq 'x',y"}),
    (ODATA, f"{{$filter:{Q}a,$top:1{Q},$top:5}}", {"$filter": "a,$top:1", "$top": 5}),
    ({}, "{$top:5,$filter:x}", {"$top": 5, "$filter": "x"}),
    ({" a": {}, "a:": {}}, f"{{{Q} a{Q}:1,a::2}}", {" a": 1, "a:": 2}),
]


@pytest.mark.parametrize(("properties", "written", "read"), WRITTEN)
def test_names_are_read_as_the_schema_has_them(
    properties: dict[str, Any], written: str, read: dict[str, Any]
) -> None:
    tool = Tool("f", {"type": "object", "properties": properties})
    found = answer("gemma4", f"<|tool_call>call:f{written}<tool_call|>", tools=[tool])
    assert [json.loads(call.arguments) for call in found.tool_calls] == [read]


def written(dialect: str, value: str) -> str:
    return {
        "gemma4": f"<|tool_call>call:f{{s:{Q}{value}{Q}}}<tool_call|>",
        "glm4": f"<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>",
        "minimax": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">{value}'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        "qwen3": f'<tool_call>\n{{"name": "f", "arguments": {{"s": "{value}"}}}}\n</tool_call>',
    }[dialect]


STRINGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"pattern": "^[0-9]{3}$"}, ["123"], ["Tokyo", "12", "1234"]),
    ({"pattern": "b"}, ["abc", "b"], ["ac"]),
    ({"pattern": "^a|c/d$"}, ["ab", "xc/d"], ["ba", "c/dx"]),
    ({"minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    ({"pattern": "^[a-z]+$", "maxLength": 2}, ["ab"], ["abc", "A"]),
    ({"enum": ["a", "b c"]}, ["a", "b c"], ["b"]),
    ({"const": "x"}, ["x"], ["y"]),
    ({"format": "date"}, ["2026-11-21"], ["2026-13-21", "today"]),
    ({"format": "time"}, ["23:59:60Z"], ["24:00:00Z", "12:00"]),
    ({"format": "date-time"}, ["2026-11-21T10:00:00.5+01:00"], ["2026-11-21"]),
    ({"format": "duration"}, ["P1Y2M3D", "PT5M", "P3W"], ["P", "1D"]),
    ({"format": "email"}, ["a.b@example.org"], ["a.b", "a@"]),
    ({"format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    ({"format": "ipv6"}, ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1:2", "1::2::3"]),
    ({"format": "uri"}, ["https://a.b/c?d=e"], ["a b", "abc"]),
    ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"format": "password"}, ["anything"], []),
    ({"allOf": [{"pattern": "^a"}, {"maxLength": 2}]}, ["ab"], ["b", "abc"]),
    ({"anyOf": [{"type": "string", "pattern": "^a"}, {"const": "x"}]}, ["ab", "x"], ["b"]),
]


@pytest.mark.parametrize("dialect", ["gemma4", *TAGS])
@pytest.mark.parametrize(("schema", "good", "bad"), STRINGS)
def test_strings_meet_their_schema(
    dialect: str, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    tool = Tool(
        "f",
        {"type": "object", "properties": {"s": {"type": "string", **schema}}, "required": ["s"]},
    )
    source = source_of(dialect, [tool])
    for value in good:
        assert accepted(matcher(dialect, source), encode(dialect, [written(dialect, value)])), value
    for value in bad:
        assert not accepted(matcher(dialect, source), encode(dialect, [written(dialect, value)]))


def test_what_a_string_is_not_held_to_is_said() -> None:
    tool = Tool("f", {"type": "object", "properties": {"s": {"type": "string", "pattern": "(^a)"}}})
    lost: list[str] = []
    for dialect in ("gemma4", *TAGS):
        DIALECTS[dialect].tool_grammar([tool], None, False, vocabulary(dialect), lost.append)
    assert len(lost) == 4
    assert all(each.startswith("f: ") and each.endswith("pattern") for each in lost)


@pytest.mark.parametrize(
    "pattern",
    ["^a$", "a", "^a|b$", "(a|b)$", "[$^|]", r"\^a\$", "a|^b|c$", "", "[]a|]b", r"^(?:a|b)\|$"],
)
def test_a_pattern_for_the_whole_string_finds_the_same(pattern: str) -> None:
    whole = anchored_pattern(pattern)
    assert whole is not None
    for text in ("", "a", "b", "ab", "ba", "a|", "^a$", "$", "xcx", "xc", "]b", "cb"):
        assert bool(re.fullmatch(whole, text)) == bool(re.search(pattern, text)), (text, whole)


def test_cut_off_is_no_call() -> None:
    ids = encode("gemma4", ["<|tool_call>call:f{$top:5,"])
    assert fold(events("gemma4", ids, finish=FinishReason.LENGTH)).tool_calls == []
