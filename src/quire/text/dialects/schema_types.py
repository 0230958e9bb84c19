"""Types that tools' schemas name although JSON Schema has no such type."""

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
"""Types that other languages have, by the JSON types that they mean."""
_PARAMETERS = re.compile(r"[\[<(].*", re.DOTALL)
_DATA = frozenset({"enum", "const", "default", "examples", "example"})


def meant_type(name: str) -> str | None:
    """The JSON type that a schema's `type` means, `list[str]` an array; None if none is known."""
    name = _PARAMETERS.sub("", name).strip().lower()
    return name if name in JSON_TYPES else _MEANT.get(name)


def with_meant_types(schema: Any) -> Any:
    """A schema whose types are JSON Schema's; an unknown type is left unsaid."""
    if isinstance(schema, list):
        return [with_meant_types(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str | list):
            names = [value] if isinstance(value, str) else value
            meant = [meant_type(name) if isinstance(name, str) else None for name in names]
            if None not in meant:
                found[key] = meant[0] if isinstance(value, str) else meant
        else:
            found[key] = value if key in _DATA else with_meant_types(value)
    return found
