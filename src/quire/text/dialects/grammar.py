"""Lark grammars for llguidance under which an answer consists of tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.core.request import JSON_BLANKS
from quire.text.dialects.base import Forced, Schema, Tool, Vocabulary
from quire.text.dialects.strings import ANY, text_of
from quire.text.dialects.values import kinds, property_schema

_OPTIONS = {"whitespace_pattern": JSON_BLANKS, "lenient": False}


def literal(text: str) -> str:
    """Return a lark string for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, vocabulary: Vocabulary) -> str:
    """Return a lark term for a marker: its token by id if it has one, else its spelling."""
    token_id = vocabulary.added.get(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def schema_of(tool: Tool) -> str:
    """Return the schema of a tool's arguments as a lark term. It is an object's by default."""
    return json_term({"type": "object", **tool.parameters})


def json_term(schema: Schema) -> str:
    """Return a lark term for JSON of this schema. llguidance refuses keywords that it cannot
    enforce.
    """
    return "%json " + json.dumps({**schema, "x-guidance": _OPTIONS}, ensure_ascii=False)


ANY_JSON = json_term({})
"""A lark term for any JSON."""


def call_rules(tools: Sequence[Tool], call: Callable[[Tool, str], str]) -> list[str]:
    """Return rules `call_0`, `call_1`... for calls with JSON arguments, one per tool, and `call`
    for any.

    Args:
        call: returns the lark terms of a tool's call, from the tool and the name of its arguments'
            rule.
    """
    rules = [alternatives("call", len(tools))]
    for index, tool in enumerate(tools):
        arguments = f"args_{index}"
        rules.append(f"call_{index}: {call(tool, arguments)}")
        rules.append(f"{arguments}: {schema_of(tool)}")
    return rules


def json_rules(tools: Sequence[Tool], key: str = "arguments") -> list[str]:
    """Return the `call_rules` of calls `{"name": ..., key: ...}`."""

    def call(tool: Tool, arguments: str) -> str:
        opening = literal(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        return f'{opening} {arguments} "}}"'

    return call_rules(tools, call)


def named_rules(tools: Sequence[Tool], before: str, between: str, after: str = "") -> list[str]:
    """Return the `call_rules` of calls `before NAME between ARGUMENTS after`; all parts are lark
    terms.
    """
    return call_rules(
        tools, lambda tool, args: f"{before} {literal(tool.name)} {between} {args} {after}"
    )


@dataclass(frozen=True, slots=True)
class Arguments:
    """Notation of one argument in tags: `opening`, with {} for the name, the value, and `closing`.

    Attributes:
        opening_term, closing_term: lark terms for the two, if they contain tokens; "" if they are
            text.
        ending: text of the closing before the first token of `closing_term`.
        kinds: replacements of {kind} in the opening, for values that are text and that are JSON.
    """

    opening: str
    closing: str
    opening_term: str = ""
    closing_term: str = ""
    ending: str = ""
    kinds: tuple[str, str] = ("", "")


def argument_rules(
    forced: Forced,
    opening: str,
    closing: str,
    notation: Arguments,
    *,
    terms: tuple[str, str] | None = None,
) -> list[str]:
    """Return the rules `call_0`... and `call` for calls with a tag for each argument.

    Arguments follow the schema's order; optional ones may be left out. Strings are text up to the
    closing tag, other values are JSON. A schema without properties leaves names and values free.

    Args:
        opening, closing: texts around a call, with {} for its name.
        terms: lark terms for the two, if they contain tokens.
    """
    before, after = terms or (None, literal(closing))
    rules = [alternatives("call", len(forced.tools))]
    for index, tool in enumerate(forced.tools):
        found = [
            before.replace("{}", literal(tool.name))
            if before
            else literal(opening.format(tool.name))
        ]
        required = tool.parameters.get("required") or ()
        if "properties" not in tool.parameters:
            found.append(f"call_{index}_any*")
            rules += _any_argument(f"call_{index}_any", notation)
        for number, key in enumerate(tool.parameters.get("properties") or {}):
            rule = f"call_{index}_{number}"
            found.append(rule if key in required else f"{rule}?")
            rules += _argument(rule, forced, tool, key=key, notation=notation)
        rules.append(f"call_{index}: {' '.join(found)} {after}")
    return rules


def _argument(rule: str, forced: Forced, tool: Tool, key: str, notation: Arguments) -> list[str]:
    schema = property_schema(tool.parameters, key, tool.parameters)
    if kinds(schema, tool.parameters) == {"string"}:
        text = text_of(
            schema,
            tool.parameters,
            lambda word: forced.on_unenforced(f"{tool.name}: {key}: {word}"),
        )
        return _text_argument(rule, literal(key), text, notation=notation)
    shared = {
        name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters
    }
    return _json_argument(rule, literal(key), {**shared, **schema}, notation=notation)


def _any_argument(rule: str, notation: Arguments) -> list[str]:
    """Return rules for an argument of any name, whose value is text or, if so marked, JSON."""
    key = '/[^\\s<>"]+/'
    if not notation.kinds[1]:
        return _text_argument(rule, key, ANY, notation=notation)
    text, value = f"{rule}_text", f"{rule}_json"
    return [
        f"{rule}: {text} | {value}",
        *_text_argument(text, key, ANY, notation=notation),
        *_json_argument(value, key, {}, notation=notation),
    ]


def _json_argument(rule: str, key: str, schema: Schema, notation: Arguments) -> list[str]:
    """Return rules for an argument with a JSON value; `key` is a lark term."""
    opening = _opening(key, notation, notation.kinds[1])
    closing = literal(notation.closing)
    if notation.closing_term:
        before = f"{literal(notation.ending)} " if notation.ending else ""
        closing = f"{before}{notation.closing_term}"
    return [f"{rule}: {opening} {rule}_value {closing}", f"{rule}_value: {json_term(schema)}"]


def _text_argument(rule: str, key: str, text: str, notation: Arguments) -> list[str]:
    """Return rules for an argument with a text value; `key` is a lark term, `text` a terminal's
    pattern.
    """
    opening = _opening(key, notation, notation.kinds[0])
    if not notation.closing_term:
        closing = literal(notation.closing)
        return [f"{rule}: {opening} {rule}_text", f"{rule}_text[suffix={closing}]: {text}"]
    terminal = f"{rule}_TEXT".upper()
    if notation.ending:
        text = f"({text}) {literal(notation.ending)}"
    return [f"{rule}: {opening} {terminal} {notation.closing_term}", f"{terminal}: {text}"]


def _opening(key: str, notation: Arguments, kind: str) -> str:
    """Return the lark terms before a value; `key` is a lark term, `kind` replaces {kind}."""
    if notation.opening_term:
        return notation.opening_term.replace("{}", key).replace("{kind}", kind)
    before, after = notation.opening.split("{}")
    return f"{literal(before)} {key} {literal(after)}"


def alternatives(name: str, count: int) -> str:
    """Return a rule that matches any of `name_0`, `name_1`..."""
    return f"{name}: " + " | ".join(f"{name}_{index}" for index in range(count))


def separated(name: str, pairs: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """Return rules for ordered terms separated by `comma`; the first rule is `name_first_0`.

    Args:
        pairs: the terms, each with whether it is required.
    """
    rules: list[str] = []
    # Both cover the terms from i on: `first_i` after no term, `more_i` after at least one.
    for index, (pair, needed) in enumerate(pairs):
        first, more = f"{name}_first_{index}", f"{name}_more_{index}"
        skip = "" if needed else f" | {name}_first_{index + 1}"
        optional = "" if needed else "?"
        rules.append(f"{first}: {pair} {name}_more_{index + 1}{skip}")
        rules.append(f"{more}: ({literal(comma)} {pair}){optional} {name}_more_{index + 1}")
    return [*rules, f'{name}_first_{len(pairs)}: ""', f'{name}_more_{len(pairs)}: ""']


def array_of_calls(forced: Forced, before: str, after: str = "") -> str:
    """Return a grammar of JSON calls in one array; of a single call unless `parallel`."""
    calls = json_rules(forced.tools)
    return section_of_calls(
        forced, before, after, call=calls, within=('"["', '"]"'), between='", "'
    )


def wrapped(
    forced: Forced,
    before: str,
    after: str,
    call: Sequence[str],
    *,
    within: str = '"\\n"',
    between: str = '"\\n"',
) -> str:
    """Return a grammar of calls, each between two markers; of a single call unless `parallel`.

    Args:
        call: rules for `call`.
        within: the lark term on both sides of a call, inside the markers.
        between: the lark term between one call's markers and the next's.
    """
    opening, closing = marker(before, forced.vocabulary), marker(after, forced.vocabulary)
    more = f" ({between} item)*" if forced.parallel else ""
    rules = [f"start: item{more}", f"item: {opening} {within} call {within} {closing}"]
    return "\n".join([*rules, *call]) + "\n"


def section_of_calls(
    forced: Forced,
    before: str,
    after: str,
    call: Sequence[str],
    *,
    within: tuple[str, str] = ("", ""),
    between: str = "",
) -> str:
    """Return a grammar of calls between one pair of markers around all of them.

    Args:
        after: the closing marker; "" if there is none.
        call: rules for `call`.
        within: lark terms before the first call and after the last.
        between: the lark term between two calls.
    """
    opening = marker(before, forced.vocabulary)
    closing = marker(after, forced.vocabulary) if after else ""
    more = f" ({between} call)*" if forced.parallel else ""
    start = f"start: {opening} {within[0]} call{more} {within[1]} {closing}"
    return "\n".join([start, *call]) + "\n"


def one_call(call: Sequence[str]) -> str:
    """Return a grammar of exactly one call, from the rules for `call`."""
    return "\n".join(["start: call", *call]) + "\n"
