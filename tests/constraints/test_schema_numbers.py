"""Numbers of schemas come out as they are, or the schema is refused."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from quire.constraints.grammar import GrammarCompiler
from quire.constraints.schema_numbers import holdable
from quire.core.errors import RequestError
from quire.core.request import GrammarSpec
from quire.demo import MODEL_DIR
from quire.text.tokenizer import Tokenizer

N = 2**53 + 1
"""The least positive integer that no float holds."""
LARGEST = 2**63 - 1024


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MODEL_DIR)


@cache
def compiler() -> GrammarCompiler:
    made = tokenizer()
    return GrammarCompiler(MODEL_DIR / "tokenizer.json", made.vocab_size, frozenset(made.eos_ids))


def meets(schema: Any, text: str) -> bool:
    """Return whether a whole answer bound to the schema may be this text."""
    made = json.dumps(holdable(schema, "x"))
    state = compiler().compile(GrammarSpec("json_schema", made))
    for token in (*tokenizer().encode(text, add_special_tokens=False), min(tokenizer().eos_ids)):
        mask = state.mask()
        if mask is None or not mask[token // 32] >> token % 32 & 1:
            return False
        state.accept(token)
    return True


@pytest.mark.parametrize("value", [N, -N, 2**63, -(2**63), 2**64 + 1, {"a": [N]}, [1, N], 10**400])
@pytest.mark.parametrize("key", ["const", "enum"])
def test_values_that_would_come_out_changed_are_refused(key: str, value: Any) -> None:
    schema = {key: value if key == "const" else [1, value]}
    for within in (schema, {"properties": {"a": schema}}, {"anyOf": [{"items": schema}]}):
        with pytest.raises(RequestError, match=r"'x' cannot be compiled: the integer -?\d+ in"):
            holdable(within, "x")


@pytest.mark.parametrize("value", [2**53, 2**53 + 2, -(2**60), 7, {"a": [2**60]}])
def test_values_that_floats_hold_come_out_as_they_are(value: Any) -> None:
    assert meets({"const": value}, json.dumps(value))
    assert meets({"enum": [value, "b"]}, json.dumps(value))


@pytest.mark.parametrize("bound", [N, 2**60 + 1, 2**63 - 1, 2**64 - 1, 10**30, 10**400])
def test_no_answer_passes_a_bound_that_is_not_held_exactly(bound: int) -> None:
    most = {"type": "integer", "minimum": 0, "maximum": bound}
    assert meets(most, "12")
    assert not meets(most, str(bound + 1))
    least = {"type": "integer", "minimum": -bound, "maximum": 0}
    assert meets(least, "-12")
    assert not meets(least, str(-bound - 1))
    number = {"type": "number", "minimum": 0, "maximum": bound}
    assert meets(number, "12.5")


def test_bounds_that_floats_hold_are_exact() -> None:
    schema = {"type": "integer", "minimum": 2**60}
    assert meets(schema, str(2**60))
    assert meets(schema, str(LARGEST))
    assert not meets(schema, str(2**60 - 1))
    assert meets({"type": "integer", "minimum": 2**60, "maximum": 2**60}, str(2**60))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bound", [2**53, 2**53 + 2, float(2**60)])
def test_exclusive_bounds_exclude_what_they_name(sign: int, bound: float) -> None:
    key, other = ("exclusiveMinimum", "maximum") if sign > 0 else ("exclusiveMaximum", "minimum")
    schema = {"type": "integer", key: sign * bound, other: sign * 2**62}
    assert not meets(schema, str(sign * int(bound)))
    assert meets(schema, str(sign * (int(bound) + 1024)))
    inclusive = {1: "minimum", -1: "maximum"}[sign]
    assert not meets(schema | {inclusive: sign * 2**61}, str(sign * (2**61 - 1024)))


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": N, "maximum": N},
        {"exclusiveMinimum": 2**63},
        {"exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 2},
        {"exclusiveMinimum": -(2**53) - 2, "exclusiveMaximum": -(2**53)},
    ],
)
def test_bounds_that_leave_nothing_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(
        RequestError, match="no integer within its bounds can be represented"
    ) as refused:
        holdable({"type": "integer", **bounds}, "x")
    assert refused.value.code == "invalid_schema"


def test_an_integer_without_bounds_has_few_digits() -> None:
    integer = {"type": "integer"}
    for schema in (integer, {"type": ["integer", "null"]}, {"type": "integer", "minimum": 5}):
        assert meets(schema, "9" * 18)
        assert not meets(schema, "1" * 19)
    assert meets(integer, "-" + "9" * 18)
    assert meets({"type": "number"}, "1" * 40)
    longer = {"type": "number", "multipleOf": 1}
    assert meets(longer, "1" * 40)
    assert not meets(longer, "1.5")
    joined = {"type": "integer", "allOf": [{"minimum": 10**18}]}
    assert holdable(joined, "x") == joined


def test_large_bounds_of_numbers_compile() -> None:
    for bounds in ({"minimum": -1e300, "maximum": 1e300}, {"maximum": 1e30}, {"minimum": 1e17}):
        schema = {"type": "number", **bounds}
        assert meets(schema, "100000000000000001")


@pytest.mark.parametrize("key", ["minimum", "exclusiveMinimum", "maximum"])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_that_are_no_numbers_are_refused(key: str, kind: str) -> None:
    with pytest.raises(RequestError, match=f"'{key}' must be a number, not '3'"):
        holdable({"type": "array", "items": {"type": kind, key: "3"}}, "x")


def test_draft_4_says_by_a_flag_that_a_bound_is_excluded() -> None:
    schema = {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5}
    assert [text for text in "23456" if meets(schema, text)] == ["4", "5"]
    assert [text for text in "23456" if meets(schema | {"exclusiveMinimum": False}, text)] == [
        "3",
        "4",
        "5",
    ]


def test_a_least_value_above_the_largest_is_named() -> None:
    with pytest.raises(RequestError, match="'minimum', 1, is above 'exclusiveMaximum', 0"):
        holdable({"type": "number", "minimum": 1, "exclusiveMaximum": 0}, "x")
