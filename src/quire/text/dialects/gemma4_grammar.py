"""Grammars of forced calls in Gemma 4's notation: a JSON schema becomes lark rules for llguidance.

Types, properties, enumerations, alternatives, references, bounds, patterns and formats are
enforced. Other keywords, such as bounds on the number of properties, are reported; see `Forced`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.text.dialects.base import Forced, Schema, Tool, Vocabulary
from quire.text.dialects.grammar import alternatives, json_term, literal, marker, separated
from quire.text.dialects.strings import ANY, text_of
from quire.text.dialects.values import kinds, merged, resolve

QUOTE = '<|"|>'

_SHARED = r"""
any: string | NUMBER | "true" | "false" | "null" | free_object | free_array
free_object: "{" (free_pair ("," free_pair)*)? "}"
free_pair: key ":" any
free_array: "[" (any ("," any)*)? "]"
key: KEY | string
KEY: /[A-Za-z_$@][A-Za-z0-9_.\/$@-]*/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""
_IGNORED = frozenset({"patternProperties", "minProperties", "maxProperties"})
"""Keywords that this notation does not enforce, unlike JSON's grammar."""
_QUOTED_KEY = re.compile(r"[\s'\")}]|.*\s$|$", re.DOTALL)
"""Keys that must be quoted: empty ones, keys that end in a blank, and keys that start like a string
or like the object's end.
"""


class _Rules:
    """Collects lark rules, one for each schema, so that recursive schemas terminate."""

    def __init__(
        self, tool: Tool, prefix: str, vocabulary: Vocabulary, on_unenforced: Callable[[str], None]
    ) -> None:
        self._root = tool.parameters
        self._prefix = prefix
        self._quote = marker(QUOTE, vocabulary)
        self._within = "" if QUOTE in vocabulary.added else " & /[^<]*/"
        self._on_unenforced = on_unenforced
        self._tool = tool.name
        self._names: dict[int, tuple[Any, str]] = {}
        self.lines: list[str] = []

    def _unenforced(self, word: str) -> None:
        self._on_unenforced(f"{self._tool}: {word}")

    def of(self, schema: Any) -> str:
        """Return a lark term for a value of this schema."""
        schema = resolve(schema, self._root)
        known = self._names.get(id(schema))
        if known is not None:
            return known[1]
        found = merged(schema, self._root)
        if "const" in found:
            return self._constant(found["const"])
        if "enum" in found:
            return "(" + " | ".join(map(self._constant, found["enum"])) + ")"
        if kinds(found, self._root) == {"string"}:
            return self._string(found)
        kind = found.get("type")
        options = found.get("anyOf") or found.get("oneOf")
        if isinstance(kind, list):
            options = [{**found, "type": entry} for entry in kind]
        if options:
            name = self._name(schema)
            self.lines.append(f"{name}: " + " | ".join(map(self.of, options)))
            return name
        if kind in ("number", "integer", "boolean", "null"):
            name = self._name(schema)
            self.lines.append(f"{name}: {json_term(found)}")
            return name
        if kind == "array":
            return self._array(schema, found)
        return self.object(schema) if kind == "object" or "properties" in found else "any"

    def _string(self, schema: Schema) -> str:
        text = text_of(schema, self._root, self._unenforced)
        if text == ANY:
            return "string"
        name = f"{self._prefix}_TEXT_{len(self.lines)}".upper()
        self.lines.append(f"{name}: ({text}){self._within}")
        return f"{self._quote} {name} {self._quote}"

    def _array(self, schema: Schema, found: Schema) -> str:
        name = self._name(schema)
        if "prefixItems" in found:
            self._unenforced("prefixItems")
        item = self.of(found.get("items", {}))
        fewest, most = found.get("minItems", 0), found.get("maxItems")
        if most == 0:
            self.lines.append(f'{name}: "[]"')
            return name
        more = f'("," {item}){{{max(fewest - 1, 0)},{"" if most is None else most - 1}}}'
        self.lines.append(f'{name}: "[" ({item} {more}){"" if fewest else "?"} "]"')
        return name

    def object(self, schema: Schema) -> str:
        """Return a lark term for an object.

        Properties are in the order of Gemma's template, sorted by name. Those that are not required
        may be left out.
        """
        found = merged(schema, self._root)
        for word in _IGNORED & found.keys():
            self._unenforced(word)
        properties = found.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return self._map(schema, found)
        name = self._name(schema)
        required = found.get("required") or ()
        pairs = [
            (f'{self._key(key)} ":" {self.of(value)}', key in required)
            for key, value in sorted(properties.items(), key=lambda pair: pair[0].lower())
        ]
        self.lines.append(f'{name}: "{{" {name}_first_0 "}}"')
        self.lines += separated(name, pairs, ",")
        return name

    def _map(self, schema: Schema, found: Schema) -> str:
        """Return the grammar of an object whose schema names no keys."""
        values = found.get("additionalProperties")
        if values is False:
            return '"{}"'
        if not isinstance(values, Mapping) or not values:
            return "free_object"
        name = self._name(schema)
        pair = f'key ":" {self.of(values)}'
        self.lines.append(f'{name}: "{{" ({pair} ("," {pair})*)? "}}"')
        return name

    def _key(self, key: str) -> str:
        """Return a key as the template writes it, or quoted if it could not be read otherwise."""
        if _QUOTED_KEY.match(key):
            return f"{self._quote} {literal(key)} {self._quote}" if key else f"{self._quote * 2}"
        return literal(key)

    def _name(self, schema: Schema) -> str:
        name = f"{self._prefix}_{len(self._names)}"
        self._names[id(schema)] = (
            schema,
            name,
        )  # the schema is kept, so that its id() is not reused
        return name

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {literal(value)} {self._quote}"
        return literal(json.dumps(value))


def _string_rule(vocabulary: Vocabulary) -> str:
    quote = marker(QUOTE, vocabulary)
    if QUOTE in vocabulary.added:
        return f"string: {quote} TEXT {quote}\nTEXT: {ANY}"
    return f"string: {quote} /[^<]*/ {quote}"


def forced_calls(forced: Forced) -> str:
    """Return a grammar of one call, or of several if `parallel`, and nothing else."""
    vocabulary = forced.vocabulary
    opening, closing = marker("<|tool_call>", vocabulary), marker("<tool_call|>", vocabulary)
    lines = [
        f"start: item{'+' if forced.parallel else ''}",
        f'item: {opening} "call:" call {closing}',
        alternatives("call", len(forced.tools)),
    ]
    for index, tool in enumerate(forced.tools):
        rules = _Rules(tool, f"tool_{index}", vocabulary, on_unenforced=forced.on_unenforced)
        body = rules.object(resolve(tool.parameters, tool.parameters))
        lines += [*rules.lines, f"call_{index}: {literal(tool.name)} {body}"]
    return "\n".join(lines) + _SHARED + _string_rule(vocabulary) + "\n"
