"""Streams the arguments of tool calls: the part of a call's JSON that can no longer change.

A flow follows the text of one call. It may stop anywhere: what it has emitted is a prefix of what
the section's reader makes of the whole text, and the rest follows at the end. Output and running
time depend only on the text, not on how it is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from quire.text.dialects.base import Call, Tool
from quire.text.dialects.values import read_json, write_inner, write_json
from quire.text.dialects.writer import Writer

Tools = Mapping[str, Tool]


class Flow(Protocol):
    """The arguments of one call as they are written."""

    def feed(self, text: str, *, marker: bool = False) -> str:
        """Process the next text, or the spelling of a marker. Return the next piece of JSON."""
        ...


StartedCall = tuple[str, "str | None", Flow, int]
"""A call's name, the id that the model gave it, its flow, and the offset where the flow's text
starts.
"""
StartCall = Callable[[str, Tools], "StartedCall | None"]

_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_NO_LOW = r"(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]|\\u[dD][c-fC-F].?[^0-9a-fA-F])"
# The part of a string before its end, or before an unfinished escape or surrogate pair.
_IN_STRING = re.compile(
    rf'(?:[^"\\]|\\[^u]|{_HIGH}{_LOW}|{_HIGH}{_NO_LOW}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{0,3}(?=[^0-9a-fA-F]))*",
    re.DOTALL,
)
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[^\s{}\[\],:\"]+")
_LONGEST_SCALAR = 4096


WORTH_SENDING = 24
"""Characters of arguments after which a call is started. Shorter arguments are sent with the call's
end, so that most text that turns out not to be a call can still be emitted as text.
"""


class CallInProgress:
    """A call that may be sent before its section ends. Owned by the parser of its answer.

    Attributes:
        started: whether a part of the call was sent.
    """

    def __init__(self, writer: Writer, name: str, call_id: str | None, flow: Flow) -> None:
        self._writer = writer
        self._name, self._call_id, self._flow = name, call_id, flow
        self._pieces: list[str] = []
        self._length = 0
        self._index: int | None = None

    @property
    def started(self) -> bool:
        return self._index is not None

    def feed(self, text: str, *, marker: bool = False) -> None:
        """Send the part of the arguments that can no longer change."""
        piece = self._flow.feed(text, marker=marker)
        if not piece:
            return
        self._pieces.append(piece)
        self._length += len(piece)
        if self._index is not None:
            self._writer.arguments(self._index, piece)
        elif self._length >= WORTH_SENDING:
            self._start()

    def _start(self) -> int:
        index = self._index = self._writer.start_call(self._name, self._call_id)
        self._writer.arguments(index, "".join(self._pieces))
        return index

    def complete(self, call: Call) -> bool:
        """End the started call as `call`. Return False if they differ."""
        assert self._index is not None
        sent = "".join(self._pieces)
        rest = call.arguments[len(sent) :] if call.arguments.startswith(sent) else None
        if rest is None and _says(sent, call.arguments):
            rest = ""  # a repeated key, of which the last value counts
        elif rest is None and _says(sent + "}", call.arguments):
            rest = "}"
        if rest is None or call.name != self._name:
            return False
        self._writer.arguments(self._index, rest)
        self._writer.end_call(self._index)
        return True

    def break_off(self) -> None:
        """End the answer, as the started call turned out not to be one."""
        assert self._index is not None
        self._writer.break_call(self._index)

    def cut_off(self) -> None:
        """Send the part that is there, as the answer ends within the call."""
        if self._index is None:
            self._start()


def _says(text: str, arguments: str) -> bool:
    """Return whether a JSON text equals `arguments`."""
    try:
        return bool(json.loads(text) == json.loads(arguments))
    except ValueError:
        return False


class Commas:
    """Writes commas between items: one that was read is held until the next item starts."""

    def __init__(self) -> None:
        self._held = ""

    def hold(self) -> None:
        """Hold a comma back."""
        self._held = ", "

    def drop(self) -> None:
        """Drop the comma that is held, if there is one: a closer came instead of an item."""
        self._held = ""

    def before(self, piece: str) -> str:
        """Return a piece of text with the comma before it."""
        held, self._held = self._held, ""
        return held + piece


class JsonFlow:
    """Streams arguments that are a JSON object, with `write_json`'s spacing.

    It stops where the text is not JSON any more.
    """

    def __init__(self) -> None:
        self._text = ""
        self._closers: list[str] = []
        self._step: Callable[[int], tuple[str, int]] | None = self._value
        self._after_string: Callable[[int], tuple[str, int]] = self._separator
        self._commas = Commas()

    def feed(self, text: str, *, marker: bool = False) -> str:
        if self._step is None:
            return ""
        self._text += text
        written: list[str] = []
        at = 0
        while self._step is not None:
            if self._step != self._string:
                found = _SPACE.match(self._text, at)
                at = found.end() if found is not None else at
            if at == len(self._text):
                break
            step = self._step
            piece, end = step(at)
            if end == at and self._step == step:
                break
            written.append(piece)
            at = end
        self._text = self._text[at:]
        return "".join(written)

    def _end(self, at: int) -> tuple[str, int]:
        self._step = None
        return "", at

    def _string(self, at: int) -> tuple[str, int]:
        if self._text[at] == '"':
            self._step = self._after_string
            return '"', at + 1
        found = _IN_STRING.match(self._text, at)
        assert found is not None
        value, _ = read_json(f'"{found.group()}"')
        return write_inner(value), found.end()

    def _open_string(self, at: int, then: Callable[[int], tuple[str, int]]) -> tuple[str, int]:
        self._step, self._after_string = self._string, then
        return self._commas.before('"'), at + 1

    def _first_item(self, at: int) -> tuple[str, int]:
        return self._close(at) if self._text[at] == "]" else self._value(at)

    def _first_key(self, at: int) -> tuple[str, int]:
        return self._close(at) if self._text[at] == "}" else self._key(at)

    def _key(self, at: int) -> tuple[str, int]:
        return self._open_string(at, self._colon) if self._text[at] == '"' else self._end(at)

    def _colon(self, at: int) -> tuple[str, int]:
        if self._text[at] != ":":
            return self._end(at)
        self._step = self._value
        return ": ", at + 1

    def _value(self, at: int) -> tuple[str, int]:
        sign = self._text[at]
        if sign == '"':
            return self._open_string(at, self._separator)
        if sign in "{[":
            self._closers.append("}" if sign == "{" else "]")
            self._step = self._first_key if sign == "{" else self._first_item
            return self._commas.before(sign), at + 1
        found = _SCALAR.match(self._text, at)
        if found is None or found.end() - at > _LONGEST_SCALAR:
            return self._end(at)
        if found.end() == len(self._text):
            return "", at
        try:
            value, end = read_json(found.group())
            written = write_json(value)
        except ValueError:
            return self._end(at)
        if end < len(found.group()):
            return self._end(at)
        self._step = self._separator
        return self._commas.before(written), found.end()

    def _separator(self, at: int) -> tuple[str, int]:
        sign = self._text[at]
        if sign == self._closers[-1]:
            return self._close(at)
        if sign != ",":
            return self._end(at)
        self._commas.hold()
        self._step = self._key if self._closers[-1] == "}" else self._value
        return "", at + 1

    def _close(self, at: int) -> tuple[str, int]:
        closer = self._closers.pop()
        self._step = self._separator if self._closers else None
        return closer, at + 1


def json_call(*openings: str) -> StartCall:
    """Return a function that recognises `{"name": ..., "arguments": {...}}` as a section's first
    call.
    """
    key = "|".join(openings or ("arguments", "parameters"))
    head = re.compile(rf'\s*\[?\s*\{{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:{key})"\s*:\s*(?=\{{)')

    def start(text: str, tools: Tools) -> StartedCall | None:
        found = head.match(text)
        if found is None or found.group(1) not in tools:
            return None
        return found.group(1), None, JsonFlow(), found.end()

    return start


def named_call(head: str) -> StartCall:
    """Return a function that recognises calls that match `head`, followed by a JSON object.

    `head` is a regular expression with a group `name` and perhaps one `id`.
    """
    start_of = re.compile(rf"{head}\s*(?=\{{)")

    def start(text: str, tools: Tools) -> StartedCall | None:
        found = start_of.match(text)
        if found is None or found["name"] not in tools:
            return None
        return found["name"], found.groupdict().get("id"), JsonFlow(), found.end()

    return start
