"""Lark source for llguidance: grammars under which an answer is nothing but tool calls."""

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
    """Return the arguments' schema as a lark term. Without a type, it is an object's."""
    return json_term({"type": "object", **tool.parameters})


def json_term(schema: Schema) -> str:
    """Return a lark term for JSON of this schema. Keywords that can't be enforced are refused."""
    return "%json " + json.dumps({**schema, "x-guidance": _OPTIONS}, ensure_ascii=False)


ANY_JSON = json_term({})
"""A lark term for any JSON."""


def call_rules(tools: Sequence[Tool], call: Callable[[Tool, str], str]) -> list[str]:
    """Rules `call_0`, `call_1`... for calls with arguments in JSON, one a tool, and `call` for any.

    Args:
        call: the lark terms of a tool's call, from the tool and the name of its arguments' rule.
    """
    rules = [alternatives("call", len(tools))]
    for index, tool in enumerate(tools):
        arguments = f"args_{index}"
        rules.append(f"call_{index}: {call(tool, arguments)}")
        rules.append(f"{arguments}: {schema_of(tool)}")
    return rules


def json_rules(tools: Sequence[Tool], key: str = "arguments") -> list[str]:
    """Return the `call_rules` of `{"name": ..., key: ...}`."""

    def call(tool: Tool, arguments: str) -> str:
        opening = literal(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        return f'{opening} {arguments} "}}"'

    return call_rules(tools, call)


def named_rules(tools: Sequence[Tool], before: str, between: str, after: str = "") -> list[str]:
    """Return the `call_rules` of `before NAME between ARGUMENTS after`, all lark terms."""
    return call_rules(
        tools, lambda tool, args: f"{before} {literal(tool.name)} {between} {args} {after}"
    )


@dataclass(frozen=True, slots=True)
class Arguments:
    """How one argument is written in grammars of tags: `opening` with the name for {}, `closing`.

    Attributes:
        opening_term, closing_term: lark terms for the two where they hold tokens and not just text.
        ending: text with which the closing starts, before the first token of `closing_term`.
        kinds: what stands for {kind} in the opening where the value is text, and where it is JSON.
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

    Arguments come in the schema's order. Those that are not required may be left out; strings are
    text up to the closing tag, everything else is JSON. A schema without properties leaves names
    and values free.

    Args:
        opening, closing: of a call, with its name for {}.
        terms: lark terms for the two where they hold tokens and not just text.
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
    """Return rules for an argument of any name; its value is text or, if marked, JSON."""
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
    """Return rules for an argument with a text value; `key` is a lark term, `text` a terminal's."""
    opening = _opening(key, notation, notation.kinds[0])
    if not notation.closing_term:
        closing = literal(notation.closing)
        return [f"{rule}: {opening} {rule}_text", f"{rule}_text[suffix={closing}]: {text}"]
    terminal = f"{rule}_TEXT".upper()
    if notation.ending:
        text = f"({text}) {literal(notation.ending)}"
    return [f"{rule}: {opening} {terminal} {notation.closing_term}", f"{terminal}: {text}"]


def _opening(key: str, notation: Arguments, kind: str) -> str:
    """Lark terms for what stands before a value; `key` is one, `kind` stands for {kind}."""
    if notation.opening_term:
        return notation.opening_term.replace("{}", key).replace("{kind}", kind)
    before, after = notation.opening.split("{}")
    return f"{literal(before)} {key} {literal(after)}"


def alternatives(name: str, count: int) -> str:
    """Return a rule that is any of `name_0`, `name_1`..."""
    return f"{name}: " + " | ".join(f"{name}_{index}" for index in range(count))


def separated(name: str, pairs: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """Return rules for terms in order, separated by `comma`; the first rule is `name_first_0`.

    Args:
        pairs: terms, and whether each is needed; others may be left out.
    """
    rules: list[str] = []
    # `first_i` has seen no term yet and `more_i` has; each knows the terms from i on.
    for index, (pair, needed) in enumerate(pairs):
        first, more = f"{name}_first_{index}", f"{name}_more_{index}"
        skip = "" if needed else f" | {name}_first_{index + 1}"
        optional = "" if needed else "?"
        rules.append(f"{first}: {pair} {name}_more_{index + 1}{skip}")
        rules.append(f"{more}: ({literal(comma)} {pair}){optional} {name}_more_{index + 1}")
    return [*rules, f'{name}_first_{len(pairs)}: ""', f'{name}_more_{len(pairs)}: ""']


def array_of_calls(forced: Forced, before: str, after: str = "") -> str:
    """Return a grammar of JSON calls in one array; of one, unless calls are parallel."""
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
    """Return a grammar of calls, each between two markers; more of them if calls are parallel.

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
    """Return a grammar of calls between two markers that stand once around all of them.

    Args:
        after: empty where nothing closes the section.
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
    """Return a grammar of one call and nothing around it, from the rules for `call`."""
    return "\n".join(["start: call", *call]) + "\n"
