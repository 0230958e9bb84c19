"""Python-style calls: `name(key=value, ...)`, with constants as values.

Deviations are accepted: dots and dashes in names, `true`, `false` and `null`, and strings with line
ends or their own quote inside, since templates write the history's strings without escapes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Any

from quire.text.dialects.base import Call, Forced
from quire.text.dialects.grammar import ANY_JSON, alternatives, json_term, literal, separated
from quire.text.dialects.marker_parser import Reading, Tools
from quire.text.dialects.python_strings import KEY, QUOTE, Place, Verdict, judge
from quire.text.dialects.values import (
    Unterminated,
    property_names,
    property_schema,
    skip_space,
    write_json,
)

_MAX_DEPTH = 64
_WORDS: dict[str, bool | None] = {"True": True, "true": True, "False": False, "false": False}
_WORDS |= dict.fromkeys(("None", "null"))
CALL = re.compile(r"\s*([^\W\d][\w.:/-]*)\s*\(")
CALL_BEGUN = re.compile(r"\s*([^\W\d][\w.:/-]*)?\s*(\(?)")
KEY_BEGUN = re.compile(rf"\s*({KEY})\s*=(?!=)\s*")
SCALAR = re.compile(r"[^\s,:=()\[\]{}'\"]+")
_INTEGER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+)")
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(\.[0-9]*)?|(\.[0-9]+))([eE][-+]?[0-9]+)?")
# Of four quotes in a row, the last three end a triple-quoted string.
_TO_QUOTE = {
    quote: re.compile(rf"(?:[^\\]|\\.)*?{quote}" + after, re.DOTALL)
    for quote, after in (("'''", "(?!')"), ('"""', '(?!")'), ("'", ""), ('"', ""))
}
_ESCAPED = re.compile(r"\\.|[\"\n\r\0]", re.DOTALL)
_ESCAPES = {'"': r"\"", "\n": r"\n", "\r": r"\r", "\0": r"\0", r"\/": "/"}
_KNOWN_ESCAPES = frozenset("\n\\'\"abfnrtv01234567xNuU")


def read_python_calls(text: str, tools: Tools, *, bracketed: bool = False) -> Reading:
    """Read calls in sequence or in a list, separated by commas, semicolons or blanks.

    Args:
        bracketed: whether only a whole list is read.
    """
    calls: list[Call] = []
    at = skip_space(text, 0)
    opened = text.startswith("[", at)
    if bracketed and not opened:
        return Reading()
    at += opened
    end = 0
    try:
        while opening := CALL.match(text, at):
            call, at = _read_call(text, opening, tools)
            calls.append(call)
            end = at
            at = skip_space(text, at)
            if text.startswith((",", ";"), at):
                at = skip_space(text, at + 1)
    except Unterminated as error:
        return Reading(() if bracketed else tuple(calls), end, error.until)
    except ValueError:
        return Reading() if bracketed else Reading(tuple(calls), end)
    if opened and text.startswith("]", at):
        return Reading(tuple(calls), at + 1)
    return Reading() if bracketed else Reading(tuple(calls), end)


def _read_call(text: str, opening: re.Match[str], tools: Tools) -> tuple[Call, int]:
    """Return the call at `opening` and the offset after it. Raise like `_Reader.arguments`."""
    name = opening.group(1)
    schema = tools[name].parameters if name in tools else {}
    known = frozenset(property_names(schema, schema))
    try:
        arguments, end = _Reader(text, known, in_pairs=True).arguments(opening.end())
    except ValueError as error:
        try:
            arguments, end = _Reader(text, known, in_pairs=False).arguments(opening.end())
        except ValueError:
            raise error from None
    return Call(name, write_json(arguments)), end


def read_python_value(text: str, known: Collection[str]) -> Any:
    """Return the constant that a text spells.

    Raises:
        ValueError: the text is not a constant.
    """
    value, end = _Reader(text, known, in_pairs=True).value(0, 0, Place.ARGUMENTS)
    if end < len(text):
        raise ValueError("more than a constant")
    return value


class _Reader:
    """Reads the arguments of one call.

    Args:
        known: names of the tool's parameters.
        in_pairs: whether quotes inside strings are assumed to come in pairs, see `python_strings`.
    """

    def __init__(self, text: str, known: Collection[str], *, in_pairs: bool) -> None:
        self._text, self._known, self._in_pairs = text, known, in_pairs

    def arguments(self, at: int) -> tuple[dict[str, Any], int]:
        """Return the arguments at `at` and the offset after the call.

        Raises:
            Unterminated: the text ends inside a string.
            ValueError: the text is not a list of keyword arguments with constants.
        """
        text = self._text
        arguments: dict[str, Any] = {}
        at = skip_space(text, at)
        while not text.startswith(")", at):
            if text.startswith("**", at):
                given, at = self.value(at + 2, 0, Place.ARGUMENTS)
                if not isinstance(given, dict):
                    raise ValueError("** without an object")
            else:
                key = KEY_BEGUN.match(text, at)
                if key is None:
                    raise ValueError("no keyword argument")
                value, at = self.value(key.end(), 0, Place.ARGUMENTS)
                given = {key.group(1): value}
            if given.keys() & arguments.keys():
                raise ValueError("a keyword is repeated")  # in Python, too
            arguments |= given
            at = self._separator(at, ")")
        return arguments, at + 1

    def _separator(self, at: int, closer: str) -> int:
        """Return the offset after a value's comma, or of the closer."""
        at = skip_space(self._text, at)
        if self._text.startswith(",", at):
            return skip_space(self._text, at + 1)
        if self._text.startswith(closer, at):
            return at
        raise ValueError(f"neither a comma nor {closer}")

    def value(self, at: int, depth: int, place: Place) -> tuple[Any, int]:
        """Return the constant at `at` and the offset after it. Raise like `arguments`."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        at = skip_space(self._text, at)
        match self._text[at : at + 1]:
            case "'" | '"':
                return self._string(at, place)
            case "[":
                return self._items(at + 1, "]", depth, place=Place.LIST)
            case "(":
                return self._items(at + 1, ")", depth, place=Place.TUPLE)
            case "{":
                return self._pairs(at + 1, depth)
        scalar = SCALAR.match(self._text, at)
        word = scalar.group() if scalar is not None else ""
        if word in _WORDS:
            return _WORDS[word], at + len(word)
        if _INTEGER.fullmatch(word):
            return int(word, 0), at + len(word)
        number = _NUMBER.fullmatch(word)
        if number is None:
            raise ValueError("no constant")
        is_float = any(part is not None for part in number.groups())
        return (float(word) if is_float else int(word)), at + len(word)

    def _string(self, at: int, place: Place) -> tuple[str, int]:
        opening = QUOTE.match(self._text, at)
        assert opening is not None
        quote, end, inner = opening.group(), opening.end(), 0
        while found := _TO_QUOTE[quote].match(self._text, end):
            end = found.end()
            verdict = judge(self._text, end, place, inner=inner, known=self._known, whole=True)
            if verdict is Verdict.ENDS or (verdict is Verdict.AMBIGUOUS and not self._in_pairs):
                return unescaped(self._text[opening.end() : end - len(quote)]), end
            inner += 1
        raise Unterminated(quote)

    def _items(self, at: int, closer: str, depth: int, place: Place) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = skip_space(self._text, at)
        while not self._text.startswith(closer, at):
            value, at = self.value(at, depth + 1, place)
            found.append(value)
            at = self._separator(at, closer)
        return found, at + 1

    def _pairs(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = skip_space(self._text, at)
        while not self._text.startswith("}", at):
            key, at = self.value(at, depth + 1, Place.KEY)
            at = skip_space(self._text, at)
            if not isinstance(key, str) or not self._text.startswith(":", at):
                raise ValueError("a key that is no string, or without a value")
            found[key], at = self.value(at + 1, depth + 1, Place.VALUE)
            at = self._separator(at, "}")
        return found, at + 1


def unescaped(content: str) -> str:
    """Return the text between two quotes with escapes decoded; unchanged if one is invalid."""

    def escaped(found: re.Match[str]) -> str:
        sign = found.group()
        if len(sign) == 2 and sign not in _ESCAPES and sign[1] not in _KNOWN_ESCAPES:
            return "\\" + sign
        return _ESCAPES.get(sign, sign)

    try:
        return str(ast.literal_eval(f'"{_ESCAPED.sub(escaped, content)}"'))
    except (SyntaxError, ValueError):
        return content


def python_head(text: str, tools: Tools) -> bool | None:
    """Return whether a section starts like a call: a name and a parenthesis, perhaps after a
    bracket.
    """
    found = CALL_BEGUN.fullmatch(text.lstrip().removeprefix("["))
    if found is not None and not found.group(2):
        return None
    return CALL.match(text.lstrip().removeprefix("[")) is not None


def python_rules(forced: Forced) -> list[str]:
    """Return the rules `call_0`... and `call` for Python-style calls with JSON values.

    Arguments follow the schema's order; optional ones may be left out. A schema without properties
    leaves names and values free. If a property's name cannot be a keyword, the arguments are one
    object after `**`.
    """
    rules = [alternatives("call", len(forced.tools))]
    for index, tool in enumerate(forced.tools):
        name, opening = f"call_{index}", literal(f"{tool.name}(")
        root = tool.parameters
        keys = list(root.get("properties") or {})
        if "properties" not in root:
            rules.append(f'{name}: {opening} ({name}_any (", " {name}_any)*)? ")"')
            rules += [f'{name}_any: /[A-Za-z_][A-Za-z0-9_]*/ "=" {name}_value']
            rules.append(f"{name}_value: {ANY_JSON}")
            continue
        if not all(KEY_BEGUN.fullmatch(f"{key}=") and key == key.strip() for key in keys):
            rules.append(f'{name}: {opening} "**" {name}_all ")"')
            rules.append(f"{name}_all: {json_term({'type': 'object', **root})}")
            continue
        shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
        pairs = []
        for number, key in enumerate(keys):
            rules.append(
                f"{name}_{number}: {json_term({**shared, **property_schema(root, key, root)})}"
            )
            pairs.append((f"{literal(f'{key}=')} {name}_{number}", key in root.get("required", ())))
        rules.append(f'{name}: {opening} {name}_first_0 ")"')
        rules += separated(name, pairs, ", ")
    return rules
