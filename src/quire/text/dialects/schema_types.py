"""Maps type names in tools' schemas that JSON Schema does not have, such as `list[str]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

JSON_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MEANT = {
    **dict.fromkeys(("int", "int32", "int64", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "decimal", "float32", "float64"), "number"),
    **dict.fromkeys(("list", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map", "dictionary", "mapping"), "object"),
    **dict.fromkeys(("none", "nonetype", "nil"), "null"),
    **dict.fromkeys(("str", "text"), "string"),
    "bool": "boolean",
}
"""JSON types by type names of other languages."""
_PARAMETERS = re.compile(r"[\[<(].*", re.DOTALL)
_MAX_DEPTH = 128
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"enum", "const", "default", "examples", "example"})


def meant_type(name: str) -> str | None:
    """Return the JSON type that a `type` stands for, such as array for `list[str]`; None if
    unknown.
    """
    name = _PARAMETERS.sub("", name).strip().lower()
    return name if name in JSON_TYPES else _MEANT.get(name)


def with_meant_types(schema: Any, depth: int = 0) -> Any:
    """Return a schema with types mapped to JSON Schema's. Unknown types are left out."""
    if isinstance(schema, list):
        return [with_meant_types(each, depth + 1) for each in schema]
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type":
            meant = _meant_types(value)
            found |= {} if meant is None else {key: meant}
        elif key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: with_meant_types(each, depth + 1) for name, each in value.items()}
        else:
            found[key] = value if key in _DATA else with_meant_types(value, depth + 1)
    return found


def _meant_types(said: Any) -> Any:
    """Map the value of `type` to JSON types; None if one is unknown."""
    if isinstance(said, str):
        return meant_type(said)
    if not isinstance(said, list):
        return said
    meant = [meant_type(each) if isinstance(each, str) else None for each in said]
    return None if None in meant else list(dict.fromkeys(meant))
