"""Streams arguments of Python-style calls; see `flow`. Strings are streamed, other values are sent
whole.
"""

from __future__ import annotations

import re

from quire.text.dialects.base import Tool
from quire.text.dialects.flow import StartedCall
from quire.text.dialects.marker_parser import Body, Reading, Section, Tools
from quire.text.dialects.python_strings import Place, Verdict, judge
from quire.text.dialects.pythonic import (
    CALL,
    KEY_BEGUN,
    SCALAR,
    python_head,
    read_python_calls,
    read_python_value,
    unescaped,
)
from quire.text.dialects.values import property_names, write_inner, write_json

_LONGEST_KEY = 256
_LONGEST_SCALAR = 4096

# A string up to a quote or an unfinished escape, with escapes that mean the same in JSON.
_PLAIN = {
    quote: re.compile(
        rf"(?:[^\\{quote}]|\\[^xuUN0-7]|\\x[0-9a-fA-F]{{2}}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}})*",
        re.DOTALL,
    )
    for quote in "'\""
}
_LONGEST_ESCAPE = len(r"\U00000000")
_OPENED = {"[": Place.LIST, "(": Place.TUPLE, "{": Place.KEY}
_CLOSED = {"[": "]", "(": ")", "{": "}"}


class PythonFlow:
    """Streams the arguments of one call of `tool`, from the first argument on.

    It stops where it is uncertain which quote ends a string.
    """

    def __init__(self, tool: Tool) -> None:
        self._known = frozenset(property_names(tool.parameters, tool.parameters))
        self._text = ""
        self._step = self._argument
        self._keys: set[str] = set()
        self._opening = ""  # of the argument whose value comes
        self._before = "{"  # the next argument
        self._over = False
        self._quote = ""  # of the string that is open
        self._inner = 0
        self._signs: list[str] = []  # brackets that are open in a value
        self._place = Place.ARGUMENTS
        self._kept: list[str] = []  # of a value that comes whole

    def feed(self, text: str, *, marker: bool = False) -> str:
        if self._over:
            return ""
        self._text += text
        written: list[str] = []
        while not self._over and self._text and (piece := self._step()) is not None:
            written.append(piece)
        return "".join(written)

    def _take(self, end: int) -> str:
        taken, self._text = self._text[:end], self._text[end:]
        return taken

    def _argument(self) -> str | None:
        """Read a key up to the start of its value."""
        self._text = self._text.lstrip()
        key = KEY_BEGUN.match(self._text)
        if key is None or key.end() == len(self._text):
            self._over = self._text[:1] in (")", "*") or len(self._text) > _LONGEST_KEY
            return None
        if key.group(1) in self._keys:
            self._over = True  # a keyword is repeated: this is no call
            return None
        self._keys.add(key.group(1))
        self._opening = f"{self._before}{write_json(key.group(1))}: "
        self._take(key.end())
        self._step = self._value
        return ""

    def _separator(self) -> str | None:
        self._text = self._text.lstrip()
        if not self._text:
            return None
        self._over = self._take(1) != ","
        self._before, self._step = ", ", self._argument
        return ""

    def _value(self) -> str | None:
        sign = self._text[0]
        if sign in "'\"":
            return self._open_string(sign)
        if sign in _OPENED:
            self._signs, self._place, self._kept = [sign], _OPENED[sign], [self._take(1)]
            self._step = self._nested
            return ""
        found = SCALAR.match(self._text)
        if found is None or found.end() > _LONGEST_SCALAR:
            self._over = True
        elif found.end() < len(self._text):
            return self._whole_value(self._take(found.end()))
        return None

    def _whole_value(self, text: str) -> str | None:
        try:
            value = write_json(read_python_value(text, self._known))
        except ValueError:
            self._over = True
            return None
        self._step, self._place = self._separator, Place.ARGUMENTS
        return self._opening + value

    def _open_string(self, sign: str) -> str | None:
        """Open a string with one quote or three."""
        if len(self._text) < 3 and self._text in (sign, sign * 2):
            return None
        self._quote = sign * 3 if self._text.startswith(sign * 3) else sign
        self._inner, self._step = 0, self._string
        taken = self._take(len(self._quote))
        if self._signs:
            self._kept.append(taken)
            return ""
        return self._opening + '"'

    def _in_value(self, text: str) -> str:
        """Return the part of a string to send now; "" within a list or object, which is
        sent whole.
        """
        if self._signs:
            self._kept.append(text)
            return ""
        return write_inner(unescaped(text))

    def _string(self) -> str | None:
        plain = _PLAIN[self._quote[0]].match(self._text)
        assert plain is not None
        if plain.end():
            return self._in_value(self._take(plain.end()))
        if not self._text.startswith(self._quote[0]):
            self._over = len(self._text) > _LONGEST_ESCAPE
            return None
        if not self._text.startswith(self._quote) or self._goes_on_in_quotes():
            if self._quote.startswith(self._text):
                return None
            return self._in_value(self._take(1))
        verdict = judge(
            self._text,
            len(self._quote),
            self._place,
            inner=self._inner,
            known=self._known,
            whole=False,
        )
        if verdict is Verdict.INNER:
            self._inner += 1
            return self._in_value(self._take(len(self._quote)))
        if verdict is Verdict.ENDS:
            return self._close_string()
        self._over = verdict is Verdict.AMBIGUOUS
        return None

    def _goes_on_in_quotes(self) -> bool:
        """Return whether four quotes follow each other; then the first belongs to the string."""
        return len(self._quote) == 3 and self._text.startswith(self._quote[0] * 4)

    def _close_string(self) -> str:
        taken = self._take(len(self._quote))
        if self._signs:
            self._kept.append(taken)
            self._step = self._nested
            return ""
        self._step = self._separator
        return '"'

    def _nested(self) -> str | None:
        """Read on in a list or an object, up to a quote or a bracket."""
        sign = self._text[0]
        if sign in "'\"":
            return self._open_string(sign)
        self._kept.append(self._take(1))
        if sign in _OPENED:
            self._signs.append(sign)
            self._place = _OPENED[sign]
        elif sign in "])}":
            if sign != _CLOSED[self._signs.pop()]:
                self._over = True
                return None
            if not self._signs:
                return self._whole_value("".join(self._kept))
            self._place = _OPENED[self._signs[-1]]
            self._place = Place.VALUE if self._place is Place.KEY else self._place
        elif self._signs[-1] == "{" and sign in ":,":
            self._place = Place.VALUE if sign == ":" else Place.KEY
        return ""


def start_python(text: str, tools: Tools) -> StartedCall | None:
    """Return the flow of the call at the start of `text`; None if there is none."""
    bare = text.lstrip().removeprefix("[")
    opening = CALL.match(bare)
    if opening is None or opening.group(1) not in tools:
        return None
    name = opening.group(1)
    return name, None, PythonFlow(tools[name]), len(text) - len(bare) + opening.end()


def _read(body: Body, tools: Tools) -> Reading:
    return read_python_calls(body.text, tools)


PYTHON = Section(_read, python_head, start=start_python)
"""A section of Python-style calls without closing markers."""
