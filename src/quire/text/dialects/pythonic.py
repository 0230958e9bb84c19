"""Calls as Python writes them: `name(key=value, ...)`, with constants for values.

Read as meant: names of tools and arguments hold dots and dashes too, `true`, `false` and `null`
stand for Python's words, and a string may hold line ends, and its own quote where no separator
follows it, since templates write strings of the history without escapes.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from quire.text.dialects.base import Call, Forced
from quire.text.dialects.flow import Begun
from quire.text.dialects.grammar import ANY_JSON, alternatives, json_term, literal, separated
from quire.text.dialects.machine import Body, Reading, Section, Tools
from quire.text.dialects.values import Unterminated, property_schema, skip_space, write_json

_MAX_DEPTH = 64
_MAX_HELD = 2048
"""Characters of a value that a flow reads again and again until it is whole."""

_WORDS: dict[str, bool | None] = {"True": True, "true": True, "False": False, "false": False}
_WORDS |= dict.fromkeys(("None", "null"))
_CALL = re.compile(r"\s*([^\W\d][\w.:/-]*)\s*\(")
_CALL_BEGUN = re.compile(r"\s*([^\W\d][\w.:/-]*)?\s*(\(?)")
_KEY = re.compile(r"\s*([^\s=,()\[\]{}'\"*][^=,()\[\]{}'\"]*?)\s*=(?!=)\s*")
_SCALAR = re.compile(r"[^\s,:=()\[\]{}'\"]+")
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_QUOTE = re.compile(r"'''|\"\"\"|'|\"")
_FOLLOWS = r"(?=\s*(?:[,:)\]}]|\Z))"
_ENDINGS = {
    quote: re.compile(rf"((?:[^\\]|\\.)*?){quote}{_FOLLOWS}", re.DOTALL)
    for quote in ("'''", '"""', "'", '"')
}
_ESCAPED = re.compile(r"\\.|[\"\n\r\0]", re.DOTALL)
_ESCAPES = {'"': r"\"", "\n": r"\n", "\r": r"\r", "\0": r"\0", r"\/": "/"}
_KNOWN_ESCAPES = frozenset("\n\\'\"abfnrtv01234567xNuU")


def read_python_calls(text: str, *, bracketed: bool = False) -> Reading:
    """Calls one after the other or in a list, with commas, semicolons or blanks between them.

    Args:
        bracketed: nothing is read but a whole list.
    """
    calls: list[Call] = []
    at = skip_space(text, 0)
    opened = text.startswith("[", at)
    if bracketed and not opened:
        return Reading()
    at += opened
    end = 0
    try:
        while _CALL.match(text, at):
            call, at = _read_call(text, at)
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


def _read_call(text: str, at: int) -> tuple[Call, int]:
    """The call at `at` and the offset after it.

    Raises:
        Unterminated: the text ends inside a string.
        ValueError: it is no call with constants as keyword arguments.
    """
    opening = _CALL.match(text, at)
    if opening is None:
        raise ValueError("no call")
    arguments: dict[str, Any] = {}
    at = skip_space(text, opening.end())
    while not text.startswith(")", at):
        if text.startswith("**", at):
            given, at = _value(text, at + 2, 0)
            if not isinstance(given, dict):
                raise ValueError("** without an object")
            arguments |= given
        else:
            key = _KEY.match(text, at)
            if key is None:
                raise ValueError("no keyword argument")
            arguments[key.group(1)], at = _value(text, key.end(), 0)
        at = _separator(text, at, ")")
    return Call(opening.group(1), write_json(arguments)), at + 1


def _separator(text: str, at: int, closer: str) -> int:
    """Offset of what follows a value: after a comma, or the closer itself."""
    at = skip_space(text, at)
    if text.startswith(",", at):
        return skip_space(text, at + 1)
    if text.startswith(closer, at):
        return at
    raise ValueError(f"neither a comma nor {closer}")


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The constant at `at` and the offset after it. Raises as `_read_call`."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    at = skip_space(text, at)
    match text[at : at + 1]:
        case "'" | '"':
            return _string(text, at)
        case "[":
            return _items(text, at + 1, "]", depth)
        case "(":
            return _items(text, at + 1, ")", depth)
        case "{":
            return _pairs(text, at + 1, depth)
    scalar = _SCALAR.match(text, at)
    word = scalar.group() if scalar is not None else ""
    if word in _WORDS:
        return _WORDS[word], at + len(word)
    number = _NUMBER.fullmatch(word)
    if number is None:
        raise ValueError("no constant")
    is_float = number.group(1) is not None or number.group(2) is not None
    return (float(word) if is_float else int(word)), at + len(word)


def _string(text: str, at: int) -> tuple[str, int]:
    opening = _QUOTE.match(text, at)
    assert opening is not None
    found = _ENDINGS[opening.group()].match(text, opening.end())
    if found is None:
        raise Unterminated(opening.group())
    return _unescaped(found.group(1)), found.end()


def _unescaped(content: str) -> str:
    """What stands between two quotes, its escapes read; as it is where one of them is none."""

    def escaped(found: re.Match[str]) -> str:
        sign = found.group()
        if len(sign) == 2 and sign not in _ESCAPES and sign[1] not in _KNOWN_ESCAPES:
            return "\\" + sign
        return _ESCAPES.get(sign, sign)

    try:
        return str(ast.literal_eval(f'"{_ESCAPED.sub(escaped, content)}"'))
    except (SyntaxError, ValueError):
        return content


def _items(text: str, at: int, closer: str, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = skip_space(text, at)
    while not text.startswith(closer, at):
        value, at = _value(text, at, depth + 1)
        found.append(value)
        at = _separator(text, at, closer)
    return found, at + 1


def _pairs(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = skip_space(text, at)
    while not text.startswith("}", at):
        key, at = _value(text, at, depth + 1)
        at = skip_space(text, at)
        if not isinstance(key, str) or not text.startswith(":", at):
            raise ValueError("a key that is no string, or without a value")
        found[key], at = _value(text, at + 1, depth + 1)
        at = _separator(text, at, "}")
    return found, at + 1


def python_head(text: str, tools: Tools) -> bool | None:
    """A head check: a name and a parenthesis, perhaps after a bracket."""
    found = _CALL_BEGUN.fullmatch(text.lstrip().removeprefix("["))
    if found is not None and not found.group(2):
        return None
    return _CALL.match(text.lstrip().removeprefix("[")) is not None


def begin_python(text: str, tools: Tools) -> Begun | None:
    """The flow of the call that `text` begins with, see `flow.Begin`."""
    bare = text.lstrip().removeprefix("[")
    opening = _CALL.match(bare)
    if opening is None or opening.group(1) not in tools:
        return None
    return opening.group(1), None, PythonFlow(), len(text) - len(bare) + opening.end()


# A string up to its end or to an escape that is not whole: escapes that Python and JSON agree on.
_PLAIN = {
    quote: re.compile(
        rf"(?:[^\\{quote}]|\\[^xuUN0-7]|\\x[0-9a-fA-F]{{2}}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}})*",
        re.DOTALL,
    )
    for quote in "'\""
}
_AFTER_QUOTE = re.compile(r"\s*([,:)\]}])")


class PythonFlow:
    """Arguments as they are written, see `flow`: strings flow, other values come whole."""

    def __init__(self) -> None:
        self._text = ""
        self._quote = ""  # of the string that is open
        self._begun = False
        self._over = False

    def feed(self, text: str, *, marker: bool = False) -> str:
        """See `Flow`."""
        if self._over:
            return ""
        self._text += text
        written: list[str] = []
        while not self._over and (piece := self._step()) is not None:
            written.append(piece)
        return "".join(written)

    def _step(self) -> str | None:
        return self._in_string() if self._quote else self._argument()

    def _take(self, end: int) -> None:
        self._text = self._text[end:]

    def _argument(self) -> str | None:
        """A key with its value, or with the opening of its string."""
        start = _after_comma(self._text)
        key = _KEY.match(self._text, start)
        if key is None or key.end() == len(self._text):
            bare = self._text[start:].lstrip()
            self._over = bare.startswith((")", "*")) or len(self._text) > _MAX_HELD
            return None
        opening = ("{" if not self._begun else ", ") + f"{write_json(key.group(1))}: "
        sign = self._text[key.end()]
        if sign in "'\"":
            if len(self._text) < key.end() + 3:
                return None  # one quote, or three
            if self._text.startswith((sign * 3,), key.end()):
                self._over = True
                return None
            self._quote, self._begun = sign, True
            self._take(key.end() + 1)
            return opening + '"'
        try:
            value, end = _value(self._text, key.end(), 0)
            if not _AFTER_QUOTE.match(self._text, end):
                raise ValueError("may go on")
            piece = opening + write_json(value)
        except ValueError:
            self._over = len(self._text) > _MAX_HELD
            return None
        self._begun = True
        self._take(end)
        return piece

    def _in_string(self) -> str | None:
        plain = _PLAIN[self._quote].match(self._text)
        assert plain is not None
        if plain.end():
            piece = json.dumps(_unescaped(plain.group()), ensure_ascii=False)[1:-1]
            self._take(plain.end())
            return piece
        if self._text.startswith(self._quote):
            rest = self._text[1:].lstrip()
            if not rest:
                return None
            ends = _AFTER_QUOTE.match(rest) is not None
            piece = '"' if ends else json.dumps(self._quote)[1:-1]
            self._quote = "" if ends else self._quote
            self._take(1)
            return piece
        self._over = len(self._text) > len(r"\U00000000")
        return None


def _after_comma(text: str) -> int:
    at = skip_space(text, 0)
    return at + 1 if text.startswith(",", at) else at


def python_rules(forced: Forced) -> list[str]:
    """Rules `call_0`... and `call` for calls whose values are written as JSON.

    Arguments come in the schema's order. Those that are not required may be left out. A schema
    without properties leaves names and values free; one with names that no keyword can be is
    written as one object behind `**`.
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
        if not all(_KEY.fullmatch(f"{key}=") and key == key.strip() for key in keys):
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


def _read(body: Body, tools: Tools) -> Reading:
    return read_python_calls(body.text)


PYTHON = Section(_read, python_head, begin=begin_python)
"""A section of such calls, without what closes it."""
