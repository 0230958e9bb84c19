"""Forced calls in Gemma 4's notation: a JSON schema becomes lark rules for llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.text.dialects.base import Forced, Schema, Vocabulary
from quire.text.dialects.grammar import alternatives, literal, marker
from quire.text.dialects.values import resolve

_SHARED = r"""
any: string | NUMBER | "true" | "false" | "null" | free_object | free_array
free_object: "{" (free_pair ("," free_pair)*)? "}"
free_pair: KEY ":" any
free_array: "[" (any ("," any)*)? "]"
KEY: /[A-Za-z_][A-Za-z0-9_.-]*/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
INTEGER: /-?(0|[1-9][0-9]*)/
"""


class _Rules:
    """Collects rules; one a schema, so that schemas that refer to themselves end."""

    def __init__(self, root: Schema, prefix: str, quote: str, lines: list[str]) -> None:
        self._root, self._prefix, self._quote, self._lines = root, prefix, quote, lines
        self._names: dict[int, str] = {}
        self._count = 0

    def of(self, schema: Any) -> str:
        """A lark term for a value of this schema."""
        found = resolve(schema, self._root)
        if id(found) in self._names:
            return self._names[id(found)]
        for word in ("const", "enum"):
            if word in found:
                choices = found[word] if word == "enum" else [found[word]]
                return "(" + " | ".join(self._constant(choice) for choice in choices) + ")"
        kind = found.get("type")
        options = found.get("anyOf") or found.get("oneOf")
        if isinstance(kind, list):
            options = [{**found, "type": entry} for entry in kind]
        if options:
            name = self._name(found)
            self._lines.append(f"{name}: " + " | ".join(self.of(option) for option in options))
            return name
        simple = {
            "string": "string",
            "number": "NUMBER",
            "integer": "INTEGER",
            "boolean": '("true" | "false")',
            "null": '"null"',
        }
        if kind in simple:
            return simple[kind]
        if kind == "array":
            name = self._name(found)
            item = self.of(found.get("items", {}))
            self._lines.append(f'{name}: "[" ({item} ("," {item})*)? "]"')
            return name
        return self.object(found) if kind == "object" or "properties" in found else "any"

    def object(self, schema: Schema) -> str:
        """A lark term for an object: its properties in the schema's order, optional ones or not."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return "free_object"
        name = self._name(schema)
        required = schema.get("required") or ()
        pairs = [
            (f"{literal(key + ':')} {self.of(value)}", key in required)
            for key, value in properties.items()
        ]
        # `first_i` has seen no pair yet and `more_i` has; each knows the pairs from i on.
        self._lines.append(f'{name}: "{{" {name}_first_0 "}}"')
        for index, (pair, needed) in enumerate(pairs):
            first, more = f"{name}_first_{index}", f"{name}_more_{index}"
            skip = "" if needed else f" | {name}_first_{index + 1}"
            optional = "" if needed else "?"
            self._lines.append(f"{first}: {pair} {name}_more_{index + 1}{skip}")
            self._lines.append(f'{more}: ("," {pair}){optional} {name}_more_{index + 1}')
        self._lines += [f'{name}_first_{len(pairs)}: ""', f'{name}_more_{len(pairs)}: ""']
        return name

    def _name(self, schema: Schema) -> str:
        name = f"{self._prefix}_{self._count}"
        self._count += 1
        self._names[id(schema)] = name
        return name

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return (
                f"{self._quote} {literal(value)} {self._quote}"
                if value
                else f"{self._quote} {self._quote}"
            )
        return literal(json.dumps(value))


def _string_rule(quote: str, vocabulary: Vocabulary) -> str:
    if '<|"|>' in vocabulary.added:
        return f"string: {quote} TEXT {quote}\nTEXT: /(?s:.)*/"
    return f"string: {quote} /[^<]*/ {quote}"


def forced_calls(forced: Forced) -> str:
    """A grammar of one call, or of several if they are parallel, and nothing else."""
    vocabulary = forced.vocabulary
    opening, closing = marker("<|tool_call>", vocabulary), marker("<tool_call|>", vocabulary)
    quote = marker('<|"|>', vocabulary)
    lines = [
        f"start: item{'+' if forced.parallel else ''}",
        f'item: {opening} "call:" call {closing}',
        alternatives("call", len(forced.tools)),
    ]
    for index, tool in enumerate(forced.tools):
        rules = _Rules(tool.parameters, f"tool_{index}", quote, lines)
        body = rules.object(resolve(tool.parameters, tool.parameters))
        lines.append(f"call_{index}: {literal(tool.name)} {body}")
    return "\n".join(lines) + _SHARED + _string_rule(quote, vocabulary) + "\n"
