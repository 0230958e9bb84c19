"""Numbers of JSON schemas as the compiler of grammars can hold them: it reads them as floats.

A bound that no float holds is moved inwards, to the next one that a float holds, so that every
answer still meets the schema. Values that would come out changed are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from quire.constraints.schemas import change_within, refused_schema

MAX_DIGITS = 18
"""Most digits of an integer whose schema sets no bounds: a degenerate model would write digits
until its tokens run out.
"""

_LARGEST = {"integer": 2**63 - 1024, "number": 10**18}
"""Largest bound for which the compiler makes a grammar, by type."""
_JOINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
"""Keywords of schemas that may add bounds."""
_LEAST = ("minimum", "exclusiveMinimum")
_MOST = ("maximum", "exclusiveMaximum")


def holdable(schema: Any, param: str) -> Any:
    """Return the schema with bounds that the compiler holds exactly, and integers of few digits.

    Raises:
        RequestError: `param` has a value in `enum` or `const`, or bounds, that a float would change
            (code `invalid_schema`).
    """
    if not isinstance(schema, Mapping):
        return schema
    within = partial(holdable, param=param)
    made = {key: change_within(within, key, value) for key, value in schema.items()}
    for key in ("const", "enum"):
        for value in _integers(made.get(key)):
            if not _is_exact(value) or abs(value) > _LARGEST["integer"]:
                raise refused_schema(
                    param,
                    f"the integer {value} in '{key}' cannot be represented exactly, since "
                    "integers from 2^53 on are read as floats: use a string, or bounds",
                )
    kinds = _kinds(made)
    if kinds & {"integer", "number"} and "enum" not in made and "const" not in made:
        made = _bounded(made, "number" if "number" in kinds else "integer", param)
    return made


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {each for each in listed if isinstance(each, str)}


def _integers(value: Any) -> Iterator[int]:
    """Yield the integers within a JSON value."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _integers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _integers(inner)


def _is_exact(value: int) -> bool:
    return abs(value) <= 2**53 or (abs(value) < 2**1000 and int(float(value)) == value)


def _is_bound(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bounded(schema: dict[str, Any], kind: str, param: str) -> dict[str, Any]:
    """Return a schema of numbers with bounds that the compiler holds."""
    largest = _LARGEST[kind]
    schema = _with_numbers(schema, param)
    made = _inclusive(schema) if kind == "integer" else dict(schema)
    least = [(key, made[key]) for key in _LEAST if _is_bound(made.get(key))]
    most = [(key, made[key]) for key in _MOST if _is_bound(made.get(key))]
    for lower, least_value in least:
        for upper, most_value in most:
            if least_value > most_value:
                raise refused_schema(
                    param, f"'{lower}', {least_value}, is above '{upper}', {most_value}"
                )
    for key, value in least:
        made[key] = max(-_inwards(-value), -largest)
    for key, value in most:
        made[key] = min(_inwards(value), largest)
    low = max((made[key] for key, _ in least), default=-math.inf)
    high = min((made[key] for key, _ in most), default=math.inf)
    if low > high or low > largest or high < -largest:
        raise refused_schema(
            param,
            f"no {kind} within its bounds can be represented: floats range from {-largest} to "
            f"{largest}, and are exact integers only below 2^53",
        )
    if kind == "integer" and _JOINING.isdisjoint(schema):
        few = 10**MAX_DIGITS - 1
        if not least:
            made["minimum"] = -few if high > -few else -largest
        if not most:
            made["maximum"] = few if low < few else largest
    elif abs(low) >= 10**15 and math.isfinite(low) and not most:
        made["maximum"] = largest
    elif abs(high) >= 10**15 and math.isfinite(high) and not least:
        made["minimum"] = -largest
    return made


def _with_numbers(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """Return a schema whose bounds are numbers.

    `exclusiveMinimum` and `exclusiveMaximum` may be true, as in JSON Schema's draft 4 and OpenAPI
    3.0, where they say that the bound beside them is excluded.

    Raises:
        RequestError: a bound is something else (code `invalid_schema`).
    """
    made = dict(schema)
    for inclusive, exclusive in (_LEAST, _MOST):
        if isinstance(excludes := made.get(exclusive), bool):
            del made[exclusive]
            if excludes and inclusive in made:
                made[exclusive] = made.pop(inclusive)
        for key in (inclusive, exclusive):
            if made.get(key) is not None and not _is_bound(made[key]):
                raise refused_schema(param, f"'{key}' must be a number, not {made[key]!r}")
    return made


def _inclusive(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of integers with inclusive bounds in place of large exclusive ones.

    The compiler adds one to an exclusive bound as a float, which changes nothing from 2^53 on.
    """
    made: dict[str, Any] = dict(schema)
    for (inclusive, exclusive), sign in ((_LEAST, 1), (_MOST, -1)):
        bound = made.get(exclusive, 0)
        if not _is_bound(bound) or abs(bound) < 2**53 or not math.isfinite(bound):
            continue
        del made[exclusive]
        bounds: list[Any] = [int(bound) + sign, made.get(inclusive)]
        made[inclusive] = sign * max(sign * each for each in bounds if _is_bound(each))
    return made


def _inwards(value: float) -> float:
    """Return the largest number up to `value` that a float can hold; of the same type."""
    if isinstance(value, float) or abs(value) <= 2**53:
        return value
    if abs(value) >= 2**1000:
        return 2**1000 if value > 0 else -(2**1000)
    near = float(value)
    if int(near) > value:
        near = math.nextafter(near, -math.inf)
    return int(near)
