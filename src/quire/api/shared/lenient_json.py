"""Reads JSON as some agents write it: invalid escapes, raw line ends inside strings.

Tool schemas contain regular expressions and Windows paths, and some clients do not double their
backslashes or escape tabs in texts. The meaning is clear: a backslash that starts no escape is a
backslash, and a control character stands for itself. All other invalid JSON stays an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.api.shared.json_text import (
    check_not_empty,
    finite_json,
    invalid_json,
    replace_invalid_utf8,
)

# Python 3.11.0 to 3.11.4 continue after a possessive group that failed halfway: here such a group
# holds only patterns that always match to their end. Other groups cost memory by the repetition,
# and have a bound.
# Text that needs no repair: all between strings, and strings without escapes or control characters.
_CLEAN = re.compile(rb'(?:[^"]++|"[^"\\\x00-\x1f]*+"){1,4096}')
_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+"', re.DOTALL)
# An escape that JSON has, a backslash that starts none, or a raw control character.
_SUSPECT = re.compile(rb'\\(?:u[0-9A-Fa-f]{4}|["\\/bfnrt])|\\|[\x00-\x1f]')
_POSITION = re.compile(r"line (\d+) column (\d+)")
_BACKSLASH = b"\\\\"
# Backspace and form feed do not come up in texts; beside `\d`, `\b` is a word's border.
_DOUBTFUL = (b"\\b", b"\\f")


@dataclass(frozen=True, slots=True)
class _Edit:
    """A replacement: its position in the repaired body, and the text that it replaced."""

    repaired: int
    original: int
    grown: int


def parse_lenient(body: bytes) -> object:
    """Parse a request body as JSON, repairing it if needed.

    Raises:
        RequestError: it cannot be repaired; the message has the position, code `invalid_json`.
    """
    check_not_empty(body)
    try:
        return finite_json(body)
    except ValueError:
        body = replace_invalid_utf8(body)
        repaired, edits = _repair(body)
    try:
        return finite_json(repaired)
    except ValueError as error:
        message = _POSITION.sub(lambda at: _position(at, repaired, body, edits=edits), str(error))
        raise invalid_json(error, message) from None


def _repair(body: bytes) -> tuple[bytes, list[_Edit]]:
    """Return the body with its strings made valid, and the changes in order."""
    pieces: list[bytes] = []
    edits: list[_Edit] = []
    done = size = 0
    for start, end in _strings(body):
        found = list(_SUSPECT.finditer(body, start, end))
        loose = any(match.group() == b"\\" for match in found)
        for match in found:
            old = match.group()
            new = _meant(old, loose=loose)
            if new == old:
                continue
            size += match.start() - done
            edits.append(_Edit(size, match.start(), len(new) - len(old)))
            pieces += (body[done : match.start()], new)
            size += len(new)
            done = match.end()
    pieces.append(body[done:])
    return b"".join(pieces), edits


def _strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield the spans of strings that may need repair, up to one that never ends."""
    position = 0
    while position < len(body):
        if clean := _CLEAN.match(body, position):
            position = clean.end()
            continue
        string = _STRING.match(body, position)
        if string is None:
            return
        yield string.span()
        position = string.end()


def _meant(old: bytes, *, loose: bool) -> bytes:
    """Return a piece of a string as valid JSON. `loose` strings have an invalid escape."""
    if old == b"\\":
        return _BACKSLASH
    if loose and old in _DOUBTFUL:
        return b"\\" + old
    return b"\\u%04x" % old[0] if len(old) == 1 else old


def _position(at: re.Match[str], repaired: bytes, body: bytes, edits: list[_Edit]) -> str:
    """Return the position in the sent body of a position in the repaired one."""
    line, column = int(at[1]), int(at[2])
    offset = len(repaired) - len(repaired.split(b"\n", line - 1)[-1]) + column
    for edit in reversed(edits):
        if edit.repaired < offset:
            shift = sum(each.grown for each in edits if each.repaired < offset)
            offset = max(offset - shift, edit.original)
            break
    newlines = body.count(b"\n", 0, offset)
    last = body.rfind(b"\n", 0, offset)
    return f"line {newlines + 1} column {offset - last - 1}"
