"""Streams Gemma 4's arguments as they are written; see `flow`.

It follows the template's own notation and stops at anything else: quoted keys, keys with other
characters, and bare values that do not fit the schema. The reader then has the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.text.dialects.base import Schema, Tool
from quire.text.dialects.flow import Commas
from quire.text.dialects.gemma4_grammar import QUOTE
from quire.text.dialects.values import kinds, property_schema, resolve, typed, write_json

_KEY = re.compile(r"\s*([^\s:=,{}()\[\]\"'<]+):")
_SCALAR = r"(-?[0-9][0-9.eE+-]*|true|false|null)"
# A bare value may hold commas; in an object it ends where a key follows the comma.
_SCALARS = {
    "]": re.compile(rf"{_SCALAR}(?=\s*[,\]])"),
    "}": re.compile(rf"{_SCALAR}(?=\s*(?:\}}|,\s*[\w.$@/-]+\s*:))"),
}
_SIGN = re.compile(r"\s*([,{}\[\]])")
_LONGEST = 256
"""Characters of a key or a bare value after which the flow gives up."""


class GemmaFlow:
    """Streams the arguments of one call of `tool`, from its opening brace on."""

    def __init__(self, tool: Tool) -> None:
        self._root = tool.parameters
        self._text = ""
        self._schemas: list[tuple[str, Schema]] = []  # of open objects and arrays, and their closer
        self._wanted: Schema = self._root
        self._step: Callable[[], str | None] | None = self._value
        self._in_string = False
        self._commas = Commas()

    def feed(self, text: str, *, marker: bool = False) -> str:
        if self._step is None:
            return ""
        if marker and text == QUOTE:
            return self._quote()
        if self._in_string:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._text += text
        return self._steps()

    def _steps(self) -> str:
        written: list[str] = []
        while self._step is not None and self._text:
            piece = self._step()
            if piece is None:
                if len(self._text) > _LONGEST:
                    self._step = None
                break
            written.append(piece)
        return "".join(written)

    def _quote(self) -> str:
        if self._in_string:
            self._in_string = False
            self._step = self._after
            return '"'
        allowed = kinds(self._wanted, self._root)
        if self._step != self._value or self._text.strip() or (allowed and "string" not in allowed):
            self._step = None
            return ""
        self._text, self._in_string = "", True
        return self._commas.before('"')

    def _key(self) -> str | None:
        if found := re.match(r"\s*\}", self._text):
            return self._close(found.end())
        key = _KEY.match(self._text)
        if key is None:
            return None
        self._wanted = property_schema(self._schemas[-1][1], key.group(1), self._root)
        self._text = self._text[key.end() :]
        self._step = self._value
        return self._commas.before(write_json(key.group(1)) + ": ")

    def _value(self) -> str | None:
        sign = _SIGN.match(self._text)
        if sign is None:
            return self._scalar()
        match sign.group(1):
            case "{":
                self._schemas.append(("}", self._wanted))
                self._step = self._key
            case "[":
                items = resolve(resolve(self._wanted, self._root).get("items"), self._root)
                self._schemas.append(("]", items))
                self._wanted, self._step = items, self._value
            case "]" if self._schemas and self._schemas[-1][0] == "]":
                return self._close(sign.end())
            case _:
                self._step = None
                return ""
        self._text = self._text[sign.end() :]
        return self._commas.before(sign.group(1))

    def _scalar(self) -> str | None:
        self._text = self._text.lstrip()
        found = _SCALARS[self._schemas[-1][0]].match(self._text) if self._schemas else None
        if found is None:
            return None
        value = typed(found.group(1), self._wanted, self._root)
        if isinstance(value, str):
            self._step = None
            return ""
        self._text = self._text[found.end() :]
        self._step = self._after
        return self._commas.before(write_json(value))

    def _after(self) -> str | None:
        sign = _SIGN.match(self._text)
        if sign is None:
            return None
        closer, schema = self._schemas[-1]
        if sign.group(1) == closer:
            return self._close(sign.end())
        if sign.group(1) != ",":
            self._step = None
            return ""
        self._text = self._text[sign.end() :]
        self._commas.hold()
        self._wanted, self._step = schema, self._key if closer == "}" else self._value
        return ""

    def _close(self, end: int) -> str:
        closer, _ = self._schemas.pop()
        self._text = self._text[end:]
        self._commas.drop()
        self._step = self._after if self._schemas else None
        return closer
