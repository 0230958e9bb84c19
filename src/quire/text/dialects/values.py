"""Values of arguments: parsed leniently, as models write them, and written as strict JSON."""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from quire.text.dialects.base import Call, Schema, Tool
from quire.text.dialects.schema_types import meant_type

_MAX_REFERENCES = 8
_MAX_PYTHON = 1 << 16


class Unterminated(ValueError):
    """Raised if the text ends inside a string. `until` is the text that would end the string."""

    def __init__(self, until: str) -> None:
        super().__init__(f"a string without {until!r}")
        self.until = until


_SURROGATE = re.compile("[\ud800-\udfff]")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the JSON value at `start`. Return it with the offset after it.

    Raw control characters in strings are accepted, since models write them, and backslashes that
    start no escape stand for themselves. NaN and Infinity are refused.

    Raises:
        Unterminated: the text ends inside a string.
        ValueError: anything else is wrong.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise Unterminated('"') from None
        if not error.msg.startswith("Invalid \\"):
            raise
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _read_with_backslashes(text, start)


# A backslash with its escape, with a possible escape at the text's end, or alone.
_BACKSLASH = re.compile(
    r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|u?[0-9a-fA-F]{0,3}\Z|(?=(.)))', re.DOTALL
)


def _read_with_backslashes(text: str, start: int) -> tuple[Any, int]:
    """Parse JSON like `read_json`, taking backslashes that start no escape literally."""
    doubled: list[int] = []  # offsets in the changed text

    def escape(found: re.Match[str]) -> str:
        if found.group(1) is None:
            return found.group()
        doubled.append(found.start() - start + len(doubled))
        return "\\\\"

    try:
        value, end = _DECODER.raw_decode(_BACKSLASH.sub(escape, text[start:]))
    except json.JSONDecodeError as error:
        # An escape at the very end is what the decoder complains of first.
        if error.msg.startswith(("Unterminated string", "Invalid \\")):
            raise Unterminated('"') from None
        raise
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, start + end - bisect_left(doubled, end)


def skip_space(text: str, at: int) -> int:
    """Return the offset of the first character at or after `at` that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def write_json(value: Any) -> str:
    """Return a value as strict JSON that can always be encoded as UTF-8.

    Raises:
        ValueError: a number is infinite, or the value is nested too deeply.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _SURROGATE.sub(lambda half: f"\\u{ord(half.group()):04x}", text)


def write_inner(text: str) -> str:
    """Return a text as it stands in a JSON string, without the quotes."""
    return write_json(text)[1:-1]


def arguments_json(value: Any) -> str:
    """Return the JSON text of an arguments object, given as the object or as a string of it.

    Raises:
        ValueError: the value is not an object.
    """
    if value is None:
        value = {}
    if isinstance(value, str):
        value = _whole_json(value.strip()) if value.strip() else {}
    if not isinstance(value, dict):
        raise ValueError("arguments are not an object")
    return write_json(value)


def call_from_object(value: Any) -> Call:
    """Return the call of a `{"name": ..., "arguments": ...}` object.

    "parameters" for the arguments, "function" or "tool_name" for the name, and an enclosing
    "function" object are accepted too.

    Raises:
        ValueError: the object is not a call.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    names = ("name", "function", "tool_name")
    name = next((value[k] for k in names if k in value), None) if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("no call")
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    call_id = value.get("id")
    return Call(
        name,
        arguments_json(arguments),
        call_id if isinstance(call_id, str) and call_id else None,
    )


def property_schema(schema: Schema, key: str, root: Schema) -> Schema:
    """Return the schema of property `key`, with references followed; `{}` if there is none."""
    objects = _alternatives(schema, root)
    for each in objects:
        properties = each.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return resolve(properties[key], root)
    return resolve(objects[0].get("additionalProperties"), root)


def property_names(schema: Schema, root: Schema) -> list[str]:
    """Return all properties that an object's schema names in any of its alternatives."""
    found = [each.get("properties") for each in _alternatives(schema, root)]
    return [key for properties in found if isinstance(properties, Mapping) for key in properties]


def _alternatives(schema: Schema, root: Schema) -> list[Schema]:
    """Return a schema and all schemas that it is composed of, with references followed."""
    found: list[Schema] = []
    waiting, seen = [resolve(schema, root)], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        found.append(each)
        for word in ("anyOf", "oneOf", "allOf"):
            options = each.get(word)
            if isinstance(options, list):
                waiting += [resolve(option, root) for option in reversed(options)]
    return found


def resolve(schema: Any, root: Schema) -> Schema:
    """Follow `$ref`s of `schema` into `root`. Return `{}` if there is no schema."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        rooted = reference.startswith(("#", "/"))
        for part in reference.lstrip("#/").split("/") if rooted else [""]:
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return {}


def merged(schema: Schema, root: Schema) -> Schema:
    """Return `schema` with the parts of its `allOf` merged into it.

    Properties and required names are joined; of other repeated keywords the last one counts.
    """
    parts = schema.get("allOf")
    if not isinstance(parts, list):
        return schema
    whole: dict[str, Any] = {}
    for part in (*parts, {key: value for key, value in schema.items() if key != "allOf"}):
        part = resolve(part, root)
        joined = {
            "properties": {**whole.get("properties", {}), **part.get("properties", {})},
            "required": [*whole.get("required", ()), *part.get("required", ())],
        }
        whole = {**whole, **part, **{key: value for key, value in joined.items() if value}}
    return whole


def kinds(schema: Schema, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it names none, or an unknown one."""
    said = _said_kinds(schema, root)
    found = {kind for kind in map(meant_type, said) if kind is not None}
    return frozenset(found if all(map(meant_type, said)) else ())


def _said_kinds(schema: Schema, root: Schema) -> set[str]:
    found: set[str] = set()
    for each in _alternatives(schema, root):
        kind = each.get("type")
        choices = each.get("enum")
        if isinstance(kind, str):
            found.add(kind)
        elif isinstance(kind, list):
            found.update(entry for entry in kind if isinstance(entry, str))
        elif isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
            found.add("string")
    return found


def kind_of(value: Any) -> str:
    """Return the JSON type of a Python value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def typed(text: str, schema: Schema, root: Schema) -> Any:
    """Return the value of an untyped text, as far as the schema determines its type.

    If the schema allows only strings, the text is the value. Else the text is parsed as JSON, and
    kept as a string if it is not JSON of an allowed type: the tool may refuse it, but it is not
    dropped. No text is null where null is allowed and a string is not.
    """
    allowed = kinds(schema, root)
    if allowed == {"string"}:
        return text
    stripped = text.strip()
    if not stripped and "null" in allowed and "string" not in allowed:
        return None
    words = {"True": True, "False": False, "None": None}
    lowered = stripped.lower()
    if allowed and lowered in ("true", "false", "null", "none"):
        value: Any = {"true": True, "false": False}.get(lowered)
    elif stripped in words:
        value = words[stripped]
    else:
        try:
            value = _json_or_python(stripped)
            write_json(value)
        except ValueError:
            return text
    if not is_of_kinds(value, allowed):
        return text
    return int(value) if isinstance(value, float) and "number" not in allowed and allowed else value


def _whole_json(text: str) -> Any:
    value, end = read_json(text)
    if end < len(text):
        raise ValueError("more than one value")
    return value


def _json_or_python(text: str) -> Any:
    """Parse a whole text as JSON; lists and objects may be in Python's notation.

    Raises:
        ValueError: the text is neither.
    """
    try:
        return _whole_json(text)
    except ValueError:
        pass
    if not text.startswith(("[", "{")) or len(text) > _MAX_PYTHON:
        raise ValueError("no JSON")
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError("no constant of Python either") from None
    if not isinstance(value, list | dict) or not _is_json(value):
        raise ValueError("a value that JSON does not have")
    return value


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def typed_argument(tool: Tool, key: str, text: str) -> Any:
    """Return the typed value of argument `key` of `tool`; see `typed`."""
    return typed(text, property_schema(tool.parameters, key, tool.parameters), tool.parameters)


def is_left_out(tool: Tool, key: str, text: str) -> bool:
    """Return whether argument `key` has no text, and no value of its types is written so.

    Models leave a tag empty for an argument that they do not give; its default applies.
    """
    allowed = kinds(property_schema(tool.parameters, key, tool.parameters), tool.parameters)
    return not text.strip() and bool(allowed) and allowed.isdisjoint({"string", "null"})


def is_of_kinds(value: Any, allowed: frozenset[str]) -> bool:
    """Return whether a value has one of the JSON types `allowed`; True if none are given."""
    kind = kind_of(value)
    if not allowed or kind in allowed or (kind == "integer" and "number" in allowed):
        return True
    return kind == "number" and "integer" in allowed and float(value).is_integer()
