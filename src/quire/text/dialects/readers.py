"""Section readers that several dialects share: JSON calls, and calls in XML tags."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from quire.text.dialects.base import Call, Tool
from quire.text.dialects.flow import StartedCall, json_call
from quire.text.dialects.marker_parser import Body, Reading, Section, Tools
from quire.text.dialects.tag_flow import TagFlow, Tags
from quire.text.dialects.values import (
    Unterminated,
    arguments_json,
    call_from_object,
    is_left_out,
    property_names,
    read_json,
    skip_space,
    typed_argument,
    write_json,
)


def head_of(*openings: str) -> Callable[[str, Tools], bool | None]:
    """Return a head check: after white space, a section must start with one of `openings`."""

    def head(text: str, tools: Tools) -> bool | None:
        text = text.lstrip()
        if any(text.startswith(opening) for opening in openings):
            return True
        return None if any(opening.startswith(text) for opening in openings) else False

    return head


def header_head(separator: str) -> Callable[[str, Tools], bool | None]:
    """Return a head check: a section must start with one line, then `separator`."""

    def head(text: str, tools: Tools) -> bool | None:
        header, found, _ = text.partition(separator)
        if "\n" in header.strip():
            return False
        return True if found else None

    return head


array_head = head_of("[", "{")
_STRAY = re.compile(r"[\s}\]]*")


def read_json_calls(
    body: Body, tools: Tools, *, of: Callable[[Any], Call] = call_from_object
) -> Reading:
    """Read calls that are JSON objects, in sequence or in an array, separated by `;` or `,`.

    Surplus closing brackets at the end, which small models write, count as part of the last call.

    Args:
        of: converts an object to a call; raises ValueError if it is not one.
    """
    text = body.text
    calls: list[Call] = []
    end = 0
    at = skip_space(text, 0)
    while at < len(text):
        try:
            value, at = read_json(text, at)
            found = [of(v) for v in (value if isinstance(value, list) else [value])]
        except Unterminated as error:
            return Reading(tuple(calls), end, error.until)
        except ValueError:
            break
        calls.extend(found)
        end = at
        at = skip_space(text, at)
        if text[at : at + 1] in (";", ","):
            at = skip_space(text, at + 1)
            end = at if at == len(text) else end
    if calls and _STRAY.fullmatch(text, end):
        end = len(text)
    return Reading(tuple(calls), end)


def json_section(*ends: str) -> Section:
    """Return a section of one `{"name": ..., "arguments": {...}}`, or of an array of them."""
    return Section(read_json_calls, array_head, ends=frozenset(ends), start=json_call())


def chosen(
    choose: Callable[[str], Section | None], *ends: str, inner: frozenset[str] = frozenset()
) -> Section:
    """Return a section that behaves as one of several, chosen by how its text starts. `choose`
    returns None while that is undecided.
    """

    def read(body: Body, tools: Tools) -> Reading:
        section = choose(body.text)
        return Reading() if section is None else section.read(body, tools)

    def head(text: str, tools: Tools) -> bool | None:
        section = choose(text)
        return None if section is None else section.head(text, tools)

    def start(text: str, tools: Tools) -> StartedCall | None:
        section = choose(text)
        return None if section is None or section.start is None else section.start(text, tools)

    return Section(read, head, ends=frozenset(ends), inner=inner, start=start)


def read_named_json(name: str, text: str, at: int, call_id: str | None = None) -> Reading:
    """Return a call with this name, whose arguments are the JSON object at `at`."""
    try:
        value, end = read_json(text, skip_space(text, at))
        return Reading((Call(name, arguments_json(value), call_id),), end)
    except Unterminated as error:
        return Reading(until=error.until)
    except ValueError:
        return Reading()


class LineEnds(Enum):
    """Line ends around a value that belong to the notation, not to the value."""

    BOTH = auto()  # one on each side
    PAIRED = auto()  # one after the opening tag; if present, one before the closing tag too
    NONE = auto()


class XmlNotation:
    """Calls in two levels of tags: a call, and within it one tag for each argument.

    Qwen3-Coder writes `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`, MiniMax
    `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>`. Values are not
    escaped, so an argument's closing tag counts only if another argument or the call's end follows.
    Qwen3.5 and its successors sometimes write a closing tag twice, see `whole`, or omit one, see
    `values`.

    Args:
        call: the tag of a call.
        names: the text between a tag and the name, e.g. "=" or " name=".
        argument: the tag of an argument.
    """

    def __init__(
        self,
        call: str,
        names: str,
        line_ends: LineEnds = LineEnds.BOTH,
        argument: str = "parameter",
    ) -> None:
        self._line_ends, self._closed = line_ends, f"</{argument}>"
        self._opening = f"<{call}{names}"
        closing = self._closing = f"</{call}>"
        opening = f"<{argument}{names}"
        following = f"(?:{opening}[^>\\n]+>|{closing})"
        line_end = "" if line_ends is LineEnds.NONE else r"\n?"
        opened = rf"{opening}([^>\n]+)>({line_end})"
        self._opened = re.compile(opened)
        self._on_a_line = re.compile(rf"\n{opened}")
        self._call = re.compile(rf"\s*<{call}{names}([^>\n]+)>")
        self._call_end = re.compile(rf"\s*{closing}")
        self._argument = re.compile(rf"\s*{opened}")
        self._argument_end = re.compile(rf"{self._closed}(?=\s*(?:{following}|$))")
        self._next = re.compile(rf"(?={following})")
        self._tags = Tags(
            opening, self._opened, self._closed, call_closing=closing, values=self.values
        )

    def section(self, *ends: str) -> Section:
        """Return a section of calls in this notation."""

        def read(body: Body, tools: Tools) -> Reading:
            return self.read(body.text, tools, lenient=True)

        return Section(read, head_of(self._opening), ends=frozenset(ends), start=self.start)

    def start(self, text: str, tools: Tools) -> StartedCall | None:
        """Return the flow of the call at the start of `text`; None if there is none."""
        opening = self._call.match(text)
        tool = tools.get(_unquoted(opening.group(1))) if opening is not None else None
        if opening is None or tool is None:
            return None
        return tool.name, None, TagFlow(tool, self._tags), opening.end()

    def values(self, tool: Tool, key: str, led: bool, raw: str) -> list[tuple[str, str]]:
        """Return the arguments in the text between two tags: `key`, and further ones after omitted
        closing tags.

        The tag of a further argument must be at the start of a line and name a parameter of the
        tool.

        Args:
            led: whether a line end that belongs to the notation preceded `raw`.
        """
        found: list[tuple[str, str]] = []
        at = 0
        if self._tags.opening in raw and self._closed not in raw:
            known = property_names(tool.parameters, tool.parameters)
            for opening in self._on_a_line.finditer(raw):
                name = _unquoted(opening.group(1))
                if name in known and name != key:
                    found.append((key, raw[at : opening.start()]))
                    key, led, at = name, bool(opening.group(2)), opening.end()
        value = self.whole(raw[at:])
        if self._line_ends is LineEnds.BOTH or led:
            value = value.removesuffix("\n")
        return [*found, (key, value)]

    def whole(self, value: str) -> str:
        """Return a value without surplus closing tags at its end. Closing tags of calls that the
        value quotes are kept.
        """
        extra = value.count(self._closed) - len(self._opened.findall(value))
        end = at = len(value)
        while extra > 0:
            while at and value[at - 1].isspace():
                at -= 1
            if not value.endswith(self._closed, 0, at):
                break
            end = at = at - len(self._closed)
            extra -= 1
        return value[:end]

    def read(self, text: str, tools: Tools, *, lenient: bool) -> Reading:
        """Return the calls at the start of `text`, typed by the tools' schemas.

        Args:
            lenient: whether the next tag ends a value without a closing tag.
        """
        calls: list[Call] = []
        at = 0
        while opening := self._call.match(text, at):
            name = _unquoted(opening.group(1))
            tool = tools.get(name, Tool(name))
            try:
                arguments, end = self._arguments(text, opening.end(), tool, lenient=lenient)
                calls.append(Call(name, write_json(arguments)))
            except Unterminated as error:
                return Reading(tuple(calls), at, error.until)
            except ValueError:
                break
            at = end
        return Reading(tuple(calls), at)

    def _arguments(
        self, text: str, at: int, tool: Tool, lenient: bool
    ) -> tuple[dict[str, Any], int]:
        arguments = {}
        closed = True  # closing tags are searched for only while there are any
        while not (closing := self._call_end.match(text, at)):
            opening = self._argument.match(text, at)
            if opening is None:
                raise ValueError("neither an argument nor the call's end")
            ending = self._argument_end.search(text, opening.end()) if closed else None
            closed = ending is not None
            if ending is None and lenient:
                ending = self._next.search(text, opening.end())
            if ending is None:
                raise Unterminated(self._closing if lenient else self._closed)
            key, led = _unquoted(opening.group(1)), bool(opening.group(2))
            for name, value in self.values(
                tool, key, led, raw=text[opening.end() : ending.start()]
            ):
                if not is_left_out(tool, name, value):
                    arguments[name] = typed_argument(tool, name, value)
            at = ending.end()
        return arguments, closing.end()


def _unquoted(name: str) -> str:
    return name.strip().strip("\"'")
