"""Forced calls in Gemma 4's notation: a JSON schema becomes lark rules for llguidance.

Types, properties, enumerations, alternatives, references, bounds of numbers and lengths are
enforced. `pattern`, `format`, `allOf` and bounds on free objects are not: the notation has no
counterpart in llguidance's own JSON grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.text.dialects.base import Forced, Schema, Vocabulary
from quire.text.dialects.grammar import alternatives, json_term, literal, marker
from quire.text.dialects.values import resolve

_SHARED = r"""
any: string | NUMBER | "true" | "false" | "null" | free_object | free_array
free_object: "{" (free_pair ("," free_pair)*)? "}"
free_pair: KEY ":" any
free_array: "[" (any ("," any)*)? "]"
KEY: /[A-Za-z_][A-Za-z0-9_.-]*/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""


class _Rules:
    """Collects rules; one a schema, so that schemas that refer to themselves end."""

    def __init__(self, root: Schema, prefix: str, quote: str, lines: list[str]) -> None:
        self._root, self._prefix, self._quote, self._lines = root, prefix, quote, lines
        self._names: list[tuple[Schema, str]] = []

    def of(self, schema: Any) -> str:
        """A lark term for a value of this schema."""
        found = resolve(schema, self._root)
        for known, name in self._names:
            if known is found:
                return name
        if "const" in found:
            return self._constant(found["const"])
        if "enum" in found:
            return "(" + " | ".join(map(self._constant, found["enum"])) + ")"
        kind = found.get("type")
        options = found.get("anyOf") or found.get("oneOf")
        if isinstance(kind, list):
            options = [{**found, "type": entry} for entry in kind]
        if options:
            name = self._name(found)
            self._lines.append(f"{name}: " + " | ".join(map(self.of, options)))
            return name
        if kind in ("number", "integer", "boolean", "null"):
            name = self._name(found)
            self._lines.append(f"{name}: {json_term(found)}")
            return name
        if kind == "string":
            return self._string(found)
        if kind == "array":
            return self._array(found)
        return self.object(found) if kind == "object" or "properties" in found else "any"

    def _string(self, schema: Schema) -> str:
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
        if not shortest and longest == "":
            return "string"
        return f"{self._quote} /(?s:.){{{shortest},{longest}}}/ {self._quote}"

    def _array(self, schema: Schema) -> str:
        name = self._name(schema)
        item = self.of(schema.get("items", {}))
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            self._lines.append(f'{name}: "[]"')
            return name
        more = f'("," {item}){{{max(fewest - 1, 0)},{"" if most is None else most - 1}}}'
        self._lines.append(f'{name}: "[" ({item} {more}){"" if fewest else "?"} "]"')
        return name

    def object(self, schema: Schema) -> str:
        """A lark term for an object: its properties in the order in which Gemma's template writes
        them, sorted by name; optional ones or not."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return "free_object"
        name = self._name(schema)
        required = schema.get("required") or ()
        pairs = [
            (f"{literal(key + ':')} {self.of(value)}", key in required)
            for key, value in sorted(properties.items(), key=lambda pair: pair[0].lower())
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
        name = f"{self._prefix}_{len(self._names)}"
        self._names.append((schema, name))
        return name

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {literal(value)} {self._quote}"
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
