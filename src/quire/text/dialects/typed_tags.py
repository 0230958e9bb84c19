"""Calls in tags, one for each argument, that say whether its value is text or JSON.

DeepSeek's DSML and Kimi K3's XTML are notations of this kind. Values of text are verbatim.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.text.dialects.base import Call, Tool
from quire.text.dialects.flow import StartedCall
from quire.text.dialects.marker_parser import Body, Reading, Section, Tools
from quire.text.dialects.readers import head_of
from quire.text.dialects.values import Unterminated, read_json, typed_argument, write_json


@dataclass(frozen=True, slots=True)
class TypedTags:
    """One notation.

    Attributes:
        head: the text with which a section of calls starts.
        call: pattern of the tag that opens a call; its group is the name.
        call_end: pattern of the tag that closes a call.
        argument: pattern of the tag that opens an argument; its groups are the name, and the kind
            of the value, if the tag has one.
        value_end: pattern of the tag that closes a value, or of the place before another tag, where
            the closing one is missing.
        tags: tags before which a value can end, up to what differs.
        until: text that ends a value.
        text: the kind of values that are text.
        unescaped: converts a name from a tag.
        whole: pattern of a tag in front of the JSON of all arguments; None if there is no such tag.
    """

    head: str
    call: re.Pattern[str]
    call_end: re.Pattern[str]
    argument: re.Pattern[str]
    value_end: re.Pattern[str]
    tags: tuple[str, ...]
    until: str
    text: str
    unescaped: Callable[[str], str] = str
    whole: re.Pattern[str] | None = None

    def section(self, *ends: str) -> Section:
        """Return a section of calls that these markers close."""
        return Section(
            partial(_read, tags=self),
            head_of(self.head),
            ends=frozenset(ends),
            start=partial(_start, tags=self),
        )

    def value(self, tool: Tool, key: str, kind: str | None, text: str) -> Any:
        """Parse the value of an argument. Without a kind the tool's schema gives the type."""
        if kind == self.text:
            return text
        if kind is not None:
            try:
                value, end = read_json(text.strip())
                if end == len(text.strip()):
                    return value
            except ValueError:
                pass
        return typed_argument(tool, key, text)

    def arguments(self, text: str, at: int, tool: Tool) -> tuple[str, int]:
        """Return the JSON of a call's arguments, and the offset after the call.

        Raises:
            Unterminated: a value has no end.
            ValueError: the text is not a call.
        """
        found: dict[str, Any] = {}
        if self.whole is not None and (whole := self.whole.match(text, at)) is not None:
            found, length = read_json(text[whole.end() :])
            ended = self.value_end.match(text, whole.end() + length)
            if ended is None or not isinstance(found, dict):
                raise ValueError("not one object")
            at = ended.end()
        while (over := self.call_end.match(text, at)) is None:
            opened = self.argument.match(text, at)
            key = self.unescaped(opened[1]) if opened is not None else ""
            if opened is None or key in found:
                raise ValueError("neither a new argument nor the call's end")
            ended = self.value_end.search(text, opened.end())
            if ended is None:
                raise Unterminated(self.until)
            value = text[opened.end() : ended.start()]
            found[key] = self.value(tool, key, opened[2], text=value)
            at = ended.end()
        return write_json(found), over.end()

    def certain(self, text: str) -> int:
        """Return how many characters of an unfinished value cannot belong to the tag that ends
        it.
        """
        begun = (
            size for tag in self.tags for size in range(1, len(tag)) if text.endswith(tag[:size])
        )
        at = len(text) - max(begun, default=0)
        return at - text.endswith("\n", 0, at)


def _read(body: Body, tools: Tools, *, tags: TypedTags) -> Reading:
    calls: list[Call] = []
    at = 0
    while invoked := tags.call.match(body.text, at):
        name = tags.unescaped(invoked[1])
        tool = tools.get(name, Tool(name))
        try:
            arguments, end = tags.arguments(body.text, invoked.end(), tool)
        except Unterminated as error:
            return Reading(tuple(calls), at, error.until)
        except ValueError:
            break
        calls.append(Call(name, arguments))
        at = end
    return Reading(tuple(calls), at)


def _start(text: str, tools: Tools, *, tags: TypedTags) -> StartedCall | None:
    invoked = tags.call.match(text)
    tool = tools.get(tags.unescaped(invoked[1])) if invoked is not None else None
    if invoked is None or tool is None:
        return None
    return tool.name, None, TypedFlow(tool, tags), invoked.end()


class TypedFlow:
    """Streams the arguments of one call, as a `flow.Flow`. Verbatim text is streamed, JSON is sent
    whole.
    """

    def __init__(self, tool: Tool, tags: TypedTags) -> None:
        self._tool, self._tags = tool, tags
        self._text = ""
        self._keys: list[str] = []
        self._kind: str | None = None
        self._value: list[str] | None = None  # the part of the open value that was not streamed
        self._over = False

    def feed(self, text: str, *, marker: bool = False) -> str:
        self._text += text
        written: list[str] = []
        try:
            while not self._over and (piece := self._step()) is not None:
                written.append(piece)
        except ValueError:
            self._over = True
        return "".join(written)

    def _step(self) -> str | None:
        return self._opening() if self._value is None else self._inside(self._value)

    def _opening(self) -> str | None:
        self._text = self._text.lstrip()
        opened = self._tags.argument.match(self._text)
        if opened is None:
            return None
        key, self._kind = self._tags.unescaped(opened[1]), opened[2]
        self._over = key in self._keys
        if self._over:
            return None
        before = ", " if self._keys else "{"
        self._keys.append(key)
        self._value, self._text = [], self._text[opened.end() :]
        return f"{before}{write_json(key)}: " + ('"' if self._is_text else "")

    @property
    def _is_text(self) -> bool:
        return self._kind == self._tags.text

    def _inside(self, value: list[str]) -> str | None:
        ended = self._tags.value_end.search(self._text)
        end = self._tags.certain(self._text) if ended is None else ended.start()
        piece, self._text = self._text[:end], self._text[end if ended is None else ended.end() :]
        if self._is_text:
            written = json.dumps(piece, ensure_ascii=False)[1:-1]
        else:
            value.append(piece)
            written = ""
        if ended is None:
            return written or None
        self._value = None
        if self._is_text:
            return written + '"'
        whole = "".join(value)
        return write_json(self._tags.value(self._tool, self._keys[-1], self._kind, text=whole))
