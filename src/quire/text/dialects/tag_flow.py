"""Streams arguments in tags; see `flow`. Strings are streamed, other values are sent whole.

The closing brace is sent with the end of the call, which only the reader knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from quire.text.dialects.base import Tool
from quire.text.dialects.values import (
    is_left_out,
    kinds,
    property_schema,
    skip_space,
    typed_argument,
    write_inner,
    write_json,
)

_LONGEST_NAME = 256


class Arguments:
    """Writes arguments as JSON, in order. A string value may arrive in pieces."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._written = False
        self._key = ""
        self.is_text = False

    def start(self, key: str) -> str:
        """Start an argument. `is_text` then says whether its value is text that can be streamed."""
        parameters = self._tool.parameters
        allowed = kinds(property_schema(parameters, key, parameters), parameters)
        self._key, self.is_text = key, allowed == {"string"}
        return self._opening() + '"' if self.is_text else ""

    def end(self, value: str) -> str:
        """End the argument with its whole value, or, for text, with the rest of it."""
        if self.is_text:
            return write_inner(value) + '"'
        if is_left_out(self._tool, self._key, value):
            return ""
        return self._opening() + write_json(typed_argument(self._tool, self._key, value))

    def _opening(self) -> str:
        before = ", " if self._written else "{"
        self._written = True
        return f"{before}{write_json(self._key)}: "


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a call's arguments. They are not escaped in values.

    Attributes:
        opening: start of the tag that opens an argument, up to its name.
        opened: pattern of an opening tag; its groups are the name, and the line end that belongs to
            the tag.
        closing: the tag that closes a value if another argument or the call's end follows.
        call_closing: the tag that ends the call.
        values: splits a raw value into arguments, see `XmlNotation.values`. Takes the tool, the
            first argument's name, whether a line end preceded the value, and the value.
    """

    opening: str
    opened: re.Pattern[str]
    closing: str
    call_closing: str
    values: Callable[[Tool, str, bool, str], Sequence[tuple[str, str]]]


class _Tag(Enum):
    """The role of a `<` within a value."""

    NONE = auto()
    QUOTED = auto()  # a tag within the value, or one that ends an unclosed value
    END = auto()


class TagFlow:
    """Streams the arguments of one call of `tool`. Each character is examined once.

    A value is streamed up to the first tag in it; the rest follows when the value is complete.
    """

    def __init__(self, tool: Tool, tags: Tags) -> None:
        self._tool, self._tags = tool, tags
        self._arguments = Arguments(tool)
        self._text = ""
        self._at = 0  # offset in `_text` before which no value ends
        self._spaces = 0  # offset in `_text` up to which white space follows a closing tag
        self._key: str | None = None
        self._led = False
        self._quoted = False  # whether the value contains a tag
        self._kept: list[str] = []  # of the value, not sent
        self._over = False

    def feed(self, text: str, *, marker: bool = False) -> str:
        if self._over:
            return ""
        self._text += text
        written: list[str] = []
        while not self._over and self._step(written):
            pass
        return "".join(written)

    def _step(self, written: list[str]) -> bool:
        """Process text up to the next tag. Return False if more text is needed."""
        return self._open(written) if self._key is None else self._value(written)

    def _open(self, written: list[str]) -> bool:
        self._text = text = self._text.lstrip()
        found = self._tags.opened.match(text)
        if found is None:
            starts = self._tags.opening.startswith(text[: len(self._tags.opening)])
            self._over = bool(text) and (not starts or len(text) > _LONGEST_NAME)
            return False
        if found.end() == len(text):
            return False  # a line end that follows may belong to the tag
        self._key, self._led = found.group(1).strip().strip("\"'"), bool(found.group(2))
        self._text, self._at, self._quoted, self._kept = text[found.end() :], 0, False, []
        written.append(self._arguments.start(self._key))
        return True

    def _value(self, written: list[str]) -> bool:
        found = self._text.find("<", self._at)
        if found < 0:
            self._keep(len(self._text), written)
            return False
        tag = self._tag(found)
        if tag is _Tag.END:
            self._close(found, written)
            return True
        if tag is _Tag.NONE:
            self._at = found + 1
            return True
        self._keep(found, written)
        if tag is _Tag.QUOTED:
            self._quoted = True
            self._at = self._text.find("<", self._at) + 1
            return True
        return False

    def _keep(self, end: int, written: list[str]) -> None:
        """Send or keep the value up to `end`, but hold a line end, which may belong to the closing
        tag.
        """
        if end and self._text[end - 1] == "\n":
            end -= 1
        part, self._text = self._text[:end], self._text[end:]
        self._at = 0
        self._spaces = max(0, self._spaces - end)
        if self._arguments.is_text and not self._quoted:
            written.append(write_inner(part))
        elif part:
            self._kept.append(part)

    def _tag(self, at: int) -> _Tag | None:
        """Return the role of the `<` at `at`; None if more text is needed."""
        text, tags = self._text, self._tags
        if text.startswith(tags.closing, at):
            follows = self._follows(at + len(tags.closing))
            return None if follows is None else _Tag.END if follows else _Tag.QUOTED
        known = (tags.closing, tags.opening, tags.call_closing)
        if any(text.startswith(tag, at) for tag in known):
            return _Tag.QUOTED
        rest = text[at : at + max(map(len, known))]
        return None if any(tag.startswith(rest) for tag in known) else _Tag.NONE

    def _follows(self, at: int) -> bool | None:
        """Return whether another argument or the call's end follows after white space; None if
        undecided.
        """
        text, tags = self._text, self._tags
        at = self._spaces = skip_space(text, max(at, self._spaces))
        known = (tags.opening, tags.call_closing)
        rest = text[at : at + max(map(len, known))]
        if len(rest) < max(map(len, known)) and any(tag.startswith(rest) for tag in known):
            return None
        if text.startswith(tags.call_closing, at):
            return True
        if not text.startswith(tags.opening, at):
            return False
        if tags.opened.match(text, at):
            return True
        if "\n" in text[at:] or ">" in text[at:]:
            return False
        self._over = len(text) - at > _LONGEST_NAME
        return None

    def _close(self, at: int, written: list[str]) -> None:
        """End the value before the tag at `at`."""
        assert self._key is not None
        raw = "".join(self._kept) + self._text[:at]
        (_, value), *more = self._tags.values(self._tool, self._key, self._led, raw)
        written.append(self._arguments.end(value))
        for key, value in more:
            written += [self._arguments.start(key), self._arguments.end(value)]
        self._text, self._key = self._text[at + len(self._tags.closing) :], None
        self._spaces = 0


class KeyedFlow:
    """Streams the arguments of one call of `tool` whose names and values are enclosed in markers.

    Args:
        key_end: the marker after a name. The flow starts after the marker before the first name.
        key, value, value_end: the other markers.
    """

    def __init__(self, tool: Tool, *, key: str, key_end: str, value: str, value_end: str) -> None:
        self._arguments = Arguments(tool)
        self._key, self._key_end, self._value, self._value_end = key, key_end, value, value_end
        self._wanted: str | None = key_end
        self._kept: list[str] = []
        self._name = ""

    def feed(self, text: str, *, marker: bool = False) -> str:
        if self._wanted is None:
            return ""
        if marker and text == self._wanted:
            return self._border("".join(self._kept))
        if self._wanted == self._value_end:
            if self._arguments.is_text:
                return write_inner(text)
            self._kept.append(text)
        elif self._wanted == self._key_end and not marker:
            self._kept.append(text)
        elif text.strip():
            self._wanted = None
        return ""

    def _border(self, kept: str) -> str:
        """Process the expected marker."""
        self._kept = []
        following = {
            self._key: self._key_end,
            self._key_end: self._value,
            self._value: self._value_end,
            self._value_end: self._key,
        }
        passed, self._wanted = self._wanted, following[self._wanted or ""]
        if passed == self._key_end:
            self._name = kept.strip()
        elif passed == self._value:
            return self._arguments.start(self._name)
        elif passed == self._value_end:
            return self._arguments.end(kept)
        return ""
