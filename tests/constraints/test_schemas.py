"""Schemas before they are compiled."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.constraints.grammar import check_grammar, compiles_as_pattern
from quire.constraints.schemas import closed, prepare
from quire.core.errors import RequestError
from quire.core.request import GrammarSpec

NUMBER = {"type": "integer"}
NAMED: dict[str, Any] = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}
SHUT = NAMED | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (NAMED, SHUT),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": SHUT}),
        ({"anyOf": [NAMED, NUMBER]}, {"anyOf": [SHUT, NUMBER]}),
        (
            {"$defs": {"x": NAMED}, "properties": {"properties": {"$ref": "#/$defs/x"}}},
            {
                "$defs": {"x": SHUT},
                "properties": {"properties": {"$ref": "#/$defs/x"}},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_objects_that_name_their_properties_get_no_others(
    schema: dict[str, Any], made: dict[str, Any]
) -> None:
    assert closed(schema) == made
    assert "additionalProperties" not in NAMED


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        NAMED | {"additionalProperties": True},
        NAMED | {"additionalProperties": NUMBER},
        NAMED | {"required": ["a", "b"]},
        NAMED | {"minProperties": 2},
        NAMED | {"patternProperties": {"^x": NUMBER}},
        NAMED | {"anyOf": [{"required": ["b"]}, {"properties": {"c": NUMBER}}]},
        {"$defs": {"x": NAMED}, "allOf": [{"$ref": "#/$defs/x"}, {"required": ["b"]}]},
        NAMED | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        NAMED | {"required": [["a"]]},
        NAMED | {"properties": [NUMBER]},
        [NAMED],
        {"enum": [{"properties": {"a": 1}}]},
    ],
)
def test_objects_stay_open_where_more_is_meant(schema: Any) -> None:
    assert closed(schema) == schema


def test_references_from_the_root_are_meant_within_the_schema() -> None:
    """LiteLLM writes them so for Anthropic's protocol."""
    schema = {"$defs": {"x": {"$ref": "/$defs/y"}, "y": NUMBER}, "items": {"$ref": "/$defs/x"}}
    made = prepare(schema, "x", lambda _: True, lambda _: True)
    assert made.schema["items"] == {"$ref": "#/$defs/x"}
    assert made.schema["$defs"] == {"x": {"$ref": "#/$defs/y"}, "y": NUMBER}
    links: dict[str, Any] = {f"a{n}": {"$ref": f"/$defs/a{n + 1}"} for n in range(1200)}
    with pytest.raises(RequestError, match="chain"):
        prepare({"$defs": links, "$ref": "/$defs/a0"}, "x", lambda _: True, lambda _: True)


@pytest.mark.parametrize(
    ("schema", "loop"),
    [
        ({"$ref": "#"}, "'#' to '#'"),
        (
            {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "$ref": "#/$defs/a",
            },
            "'#/$defs/a' to '#/$defs/b' to '#/$defs/a'",
        ),
    ],
)
def test_a_loop_of_references_is_told(schema: Any, loop: str) -> None:
    said = f"it has no finite value: '$ref' leads from {loop}."
    with pytest.raises(RequestError, match=re.escape(said)):
        prepare(schema, "x", lambda _: True, lambda _: True)
    tree = {"properties": {"next": {"$ref": "#"}}, "required": []}
    assert prepare(tree, "x", lambda _: True, lambda _: True).schema == tree


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("https://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-07/schema"),
        ("http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-04/schema"),
        (
            "http://json-schema.org/draft/2020-12/schema#",
            "https://json-schema.org/draft/2020-12/schema",
        ),
        ("http://json-schema.org/schema#", None),
        ("https://spec.openapis.org/oas/3.1/dialect/base", None),
        (7, None),
    ],
)
def test_a_dialect_is_one_that_the_compiler_reads(given: object, read: str | None) -> None:
    wanted = {"type": "integer"} if read is None else {"$schema": read, "type": "integer"}
    inner = {"properties": {"a": {"$schema": given, "type": "integer"}}}
    for schema, made in (
        ({"$schema": given, "type": "integer"}, wanted),
        (inner, {"properties": {"a": wanted}}),
    ):
        assert prepare(schema, "x", compiles_as_pattern, compiles).schema == made
        assert compiles(made)


def test_patterns_of_whole_names_are_properties() -> None:
    """With all of its names used, a pattern would ask the compiler for one more."""
    patterns = {"^a$": NUMBER, "^(b|c-1)$": NUMBER, "^(?:d)$": NUMBER, "^x_": NUMBER}
    made = prepare(NAMED | {"patternProperties": patterns}, "x", compiles_as_pattern, compiles)
    named = {"a": {"allOf": [NUMBER, NUMBER]}} | dict.fromkeys(("b", "c-1", "d"), NUMBER)
    assert made.schema == NAMED | {"properties": named, "patternProperties": {"^x_": NUMBER}}
    assert made.unenforced == ()
    alone = {"type": "object", "patternProperties": {"^b$": NUMBER}}
    made = prepare(alone, "x", compiles_as_pattern, compiles, close=True)
    shut = {"properties": {"b": NUMBER}, "additionalProperties": False}
    assert made.schema == {"type": "object", **shut}


def compiles(schema: dict[str, Any]) -> bool:
    try:
        check_grammar(GrammarSpec("json_schema", json.dumps(schema)))
    except RequestError:
        return False
    return True


def test_keywords_that_are_null_ask_for_nothing() -> None:
    """Go's clients write them for lists and maps that they never made."""
    constant = {"const": None, "default": None}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": None, "enum": None},
            "b": constant,
            "c": {"anyOf": [NAMED | {"required": None}]},
        },
        "required": None,
        "$defs": None,
    }
    made = prepare(schema, "x", lambda _: True, lambda _: True, close=True)
    assert made.unenforced == ()
    anything = {"type": "object", "properties": {"a": NUMBER}, "additionalProperties": False}
    assert made.schema == {
        "type": "object",
        "properties": {"a": {"type": "array"}, "b": constant, "c": {"anyOf": [anything]}},
        "additionalProperties": False,
    }
    assert prepare({"properties": None}, "x", lambda _: True, lambda _: True).schema == {}
