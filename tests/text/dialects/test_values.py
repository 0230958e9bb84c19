"""Untyped texts become what a tool's schema says they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.text.dialects.base import Schema
from quire.text.dialects.scanner import MarkerScanner, SpelledMarkers
from quire.text.dialects.schema_types import with_meant_types
from quire.text.dialects.values import kinds, property_schema, typed, write_json

NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"),
        (" a ", {"type": "string"}, " a "),
        ("null", {"type": "string"}, "null"),
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.0", {"type": ["integer", "number"]}, 3.0),
        ("", {"type": "integer"}, ""),
        (" ", NULLABLE, None),
        ("", {"type": ["string", "null"]}, ""),
        ("3.5", {"type": "integer"}, "3.5"),
        ("3", {"type": "number"}, 3),
        ("1e3", {"type": "number"}, 1000.0),
        ("many", {"type": "integer"}, "many"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("TRUE", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("None", {"type": ["string", "null"]}, None),
        ("none", NULLABLE, None),
        ("7", NULLABLE, 7),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ('{"a": 1}', {"type": "array"}, '{"a": 1}'),
        ("{a", {"type": "object"}, "{a"),
        ("3", {}, 3),
        ("True", {}, True),
        ("a b", {}, "a b"),
        ("3 4", {}, "3 4"),
        ("3", {"enum": ["3", "4"]}, "3"),
        ("[" * 10**5, {}, "[" * 10**5),
    ],
)
def test_typed(text: str, schema: Schema, value: Any) -> None:
    found = typed(text, schema, schema)
    assert (found, type(found)) == (value, type(value))


def test_types_that_are_no_json_schema_are_taken_as_meant() -> None:
    schema = {
        "type": "dict",
        "properties": {
            "type": {"type": "float", "default": {"type": "float"}},
            "default": {"type": ["str", "None"]},
            "a": {"type": "list[int]", "items": {"type": "INTEGER"}},
            "b": {"type": "tensor", "title": "B"},
        },
    }
    assert with_meant_types(schema) == {
        "type": "object",
        "properties": {
            "type": {"type": "number", "default": {"type": "float"}},
            "default": {"type": ["string", "null"]},
            "a": {"type": "array", "items": {"type": "integer"}},
            "b": {"title": "B"},
        },
    }


def test_references_are_followed_and_loops_end() -> None:
    root: Schema = {
        "$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
        "properties": {"n": {"$ref": "#/$defs/n"}, "loop": {"$ref": "#/$defs/loop"}, "bad": 3},
        "additionalProperties": {"type": "string"},
    }
    assert property_schema(root, "n", root) == {"type": "integer"}
    assert property_schema(root, "loop", root) == {}
    assert property_schema(root, "bad", root) == {}
    assert property_schema(root, "other", root) == {"type": "string"}
    rooted: Schema = {**root, "properties": {"n": {"$ref": "/$defs/n"}}}
    assert property_schema(rooted, "n", rooted) == {"type": "integer"}


def test_each_alternative_is_looked_at_once() -> None:
    """Two references to the next in each of 60: 2^60 ways to the last."""
    links = {f"a{index}": {"anyOf": [{"$ref": f"#/$defs/a{index + 1}"}] * 2} for index in range(60)}
    root: Schema = {"$defs": {**links, "a60": {"type": "integer"}}, "$ref": "#/$defs/a0"}
    assert kinds(root, root) == {"integer"}


def test_json_can_always_be_sent() -> None:
    text = write_json({"a": "é\ud83d"})
    assert json.loads(text.encode()) == {"a": "é\ud83d"}
    with pytest.raises(ValueError, match="JSON"):
        write_json(float("inf"))


def test_markers_in_text_are_found_however_it_is_cut() -> None:
    text = "<a<ab>x<ab<ab><"
    for cut in range(len(text)):
        scanner = MarkerScanner(SpelledMarkers(["<ab>"]))
        parts = scanner.feed(text[:cut]) + scanner.feed(text[cut:])
        joined = "".join(part if not found else "|" for part, found in parts)
        assert joined + scanner.flush() == "<a|x<ab|<"
