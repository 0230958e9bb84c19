"""Arguments as they are written: the part of a call's JSON that can no longer change.

A flow follows the text of one call. It may stop short anywhere: what it has given is the beginning
of what the section's reader makes of the whole, and the rest comes with the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from quire.text.dialects.base import Tool
from quire.text.dialects.values import read_json

Tools = Mapping[str, Tool]


class Flow(Protocol):
    """One call's arguments in the making."""

    def feed(self, text: str, *, marker: bool = False) -> str:
        """Takes the next text, or the spelling of a marker, and gives the next piece of JSON."""
        ...


Begun = tuple[str, "str | None", Flow, int]
"""A call's name, the id that the model gave it, its flow, and where in the text that begins."""
Begin = Callable[[str, Tools], "Begun | None"]

# What a string holds up to its end or to what is not whole yet: an escape, half of a pair of them.
_IN_STRING = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*"
)
_SCALAR = re.compile(r"[^\s{}\[\],:\"]+")
_SIGNS = {",": ", ", ":": ": "}


class JsonFlow:
    """Of calls whose arguments are a JSON object: the same, spaced as `write_json` does."""

    def __init__(self) -> None:
        self._text = ""
        self._depth = 0
        self._in_string = False
        self._over = False

    def feed(self, text: str, *, marker: bool = False) -> str:
        """See `Flow`."""
        if self._over:
            return ""
        self._text += text
        written: list[str] = []
        at = 0
        try:
            while at < len(self._text) and not self._over:
                piece, end = self._string(at) if self._in_string else self._part(at)
                if end == at:
                    break
                written.append(piece)
                at = end
        except ValueError:
            self._over = True
        self._text = self._text[at:]
        return "".join(written)

    def _string(self, at: int) -> tuple[str, int]:
        if self._text[at] == '"':
            self._in_string = False
            return '"', at + 1
        found = _IN_STRING.match(self._text, at)
        assert found is not None
        value, _ = read_json(f'"{found.group()}"')
        return json.dumps(value, ensure_ascii=False)[1:-1], found.end()

    def _part(self, at: int) -> tuple[str, int]:
        sign = self._text[at]
        if sign.isspace():
            return "", at + 1
        if sign == '"':
            self._in_string = True
            return sign, at + 1
        if sign in "{}[],:":
            self._depth += (sign in "{[") - (sign in "}]")
            self._over = self._depth == 0
            return _SIGNS.get(sign, sign), at + 1
        found = _SCALAR.match(self._text, at)
        if found is None or found.end() == len(self._text):
            return "", at
        value, end = read_json(found.group())
        if end != len(found.group()):
            raise ValueError("no value")
        return json.dumps(value, allow_nan=False), found.end()


def json_call(*openings: str) -> Begin:
    """Of `{"name": ..., "arguments": {...}}`, the first of its section."""
    key = "|".join(openings or ("arguments", "parameters"))
    head = re.compile(rf'\s*\[?\s*\{{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:{key})"\s*:\s*(?=\{{)')

    def begin(text: str, tools: Tools) -> Begun | None:
        found = head.match(text)
        if found is None or found.group(1) not in tools:
            return None
        return found.group(1), None, JsonFlow(), found.end()

    return begin


def named_call(head: str) -> Begin:
    """Of calls that begin as the regular expression `head`, whose groups are the name and perhaps
    an `id`, and go on with a JSON object."""
    beginning = re.compile(rf"{head}\s*(?=\{{)")

    def begin(text: str, tools: Tools) -> Begun | None:
        found = beginning.match(text)
        if found is None or found["name"] not in tools:
            return None
        return found["name"], found.groupdict().get("id"), JsonFlow(), found.end()

    return begin
