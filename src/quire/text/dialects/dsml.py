"""DSML: the notation of tool calls of DeepSeek V3.2 and V4.

Source: encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2, and encoding_dsv4.py of V4. Calls
stand between `<｜DSML｜function_calls>` (V4: `tool_calls`) and its closing tag, each as
`<｜DSML｜invoke name="NAME">` with one `<｜DSML｜parameter name="KEY" string="true|false">VALUE` an
argument. A value is verbatim text where `string` is true, else JSON. `｜DSML｜` is a token.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.text.dialects.base import Call, Forced, Tool
from quire.text.dialects.flow import StartedCall
from quire.text.dialects.grammar import Arguments, argument_rules, literal, marker
from quire.text.dialects.marker_parser import Body, Reading, Section, Tools
from quire.text.dialects.readers import head_of
from quire.text.dialects.values import Unterminated, read_json, typed_argument, write_json

MARK = "｜DSML｜"
_BLOCKS = ("function_calls", "tool_calls")
_INVOKE, _PARAMETER = f"<{MARK}invoke ", f"<{MARK}parameter "
_INVOKE_END, _PARAMETER_END = f"</{MARK}invoke>", f"</{MARK}parameter>"
_INVOKED = re.compile(rf'\s*{_INVOKE}\s*name="([^"\n]+)"\s*>')
_OVER = re.compile(rf"\s*{_INVOKE_END}")
_OPENED = re.compile(rf'\s*{_PARAMETER}\s*name="([^"\n]+)"(?:\s+string="(true|false)")?\s*>')
# A value whose closing tag is missing ends where the next tag starts.
_ENDED = re.compile(rf"{_PARAMETER_END}|\n?(?={_PARAMETER}|{_INVOKE_END})")


def _value(tool: Tool, key: str, is_text: str | None, text: str) -> Any:
    """Parse the value of an argument. Without a `string` attribute the tool's schema gives the
    type.
    """
    if is_text == "true":
        return text
    if is_text == "false":
        try:
            value, end = read_json(text.strip())
            if end == len(text.strip()):
                return value
        except ValueError:
            pass
    return typed_argument(tool, key, text)


def _arguments(text: str, at: int, tool: Tool) -> tuple[str, int]:
    """Return the JSON of a call's arguments, and the offset after the call.

    Raises:
        Unterminated: a value has no end.
        ValueError: the text is not a call.
    """
    found: dict[str, Any] = {}
    while (over := _OVER.match(text, at)) is None:
        opened = _OPENED.match(text, at)
        if opened is None or opened[1] in found:
            raise ValueError("neither a new argument nor the call's end")
        ended = _ENDED.search(text, opened.end())
        if ended is None:
            raise Unterminated(MARK)
        found[opened[1]] = _value(
            tool, opened[1], opened[2], text=text[opened.end() : ended.start()]
        )
        at = ended.end()
    return write_json(found), over.end()


def _read(body: Body, tools: Tools) -> Reading:
    calls: list[Call] = []
    at = 0
    while invoked := _INVOKED.match(body.text, at):
        name = invoked[1]
        try:
            arguments, end = _arguments(body.text, invoked.end(), tools.get(name, Tool(name)))
        except Unterminated as error:
            return Reading(tuple(calls), at, error.until)
        except ValueError:
            break
        calls.append(Call(name, arguments))
        at = end
    return Reading(tuple(calls), at)


def _start(text: str, tools: Tools) -> StartedCall | None:
    invoked = _INVOKED.match(text)
    tool = tools.get(invoked[1]) if invoked is not None else None
    if invoked is None or tool is None:
        return None
    return tool.name, None, _DsmlFlow(tool), invoked.end()


class _DsmlFlow:
    """Streams the arguments of one call, as a `flow.Flow`. Verbatim text is streamed, JSON is sent
    whole.
    """

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._text = ""
        self._keys: list[str] = []
        self._is_text: str | None = None
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
        opened = _OPENED.match(self._text)
        if opened is None:
            return None
        key, self._is_text = opened.groups()
        self._over = key in self._keys
        if self._over:
            return None
        before = ", " if self._keys else "{"
        self._keys.append(key)
        self._value, self._text = [], self._text[opened.end() :]
        return f"{before}{write_json(key)}: " + ('"' if self._is_text == "true" else "")

    def _inside(self, value: list[str]) -> str | None:
        ended = _ENDED.search(self._text)
        end = _certain(self._text) if ended is None else ended.start()
        piece, self._text = self._text[:end], self._text[end if ended is None else ended.end() :]
        if self._is_text == "true":
            written = json.dumps(piece, ensure_ascii=False)[1:-1]
        else:
            value.append(piece)
            written = ""
        if ended is None:
            return written or None
        self._value = None
        if self._is_text == "true":
            return written + '"'
        return write_json(_value(self._tool, self._keys[-1], self._is_text, text="".join(value)))


def _certain(text: str) -> int:
    """Return how many characters of an unfinished value cannot belong to the tag that ends it."""
    at = text.rfind("<")
    tags = (_PARAMETER, _PARAMETER_END, _INVOKE_END)
    if at < 0 or not any(tag.startswith(text[at:]) for tag in tags):
        at = len(text)
    return at - text.endswith("\n", 0, at)


SECTIONS = {
    f"<{MARK}{block}>": Section(
        _read, head_of(_INVOKE), ends=frozenset({f"</{MARK}{block}>"}), start=_start
    )
    for block in _BLOCKS
}
"""Sections by their opening marker."""


def forced_calls(forced: Forced) -> str:
    """Return a grammar of calls, with the empty line before them."""
    mark = marker(MARK, forced.vocabulary)
    return _grammar(forced, f'("\\n\\n")? "<" {mark}')


def strict_calls(forced: Forced) -> str:
    """Return a grammar of calls, starting at the first mark."""
    return _grammar(forced, marker(MARK, forced.vocabulary))


def _grammar(forced: Forced, opening: str) -> str:
    """Return a grammar of one block of calls, in V3.2's or V4's form; `opening` ends with
    the mark.
    """
    mark = marker(MARK, forced.vocabulary)
    before, kind = literal('parameter name="'), literal('" string="{kind}">')
    notation = Arguments(
        opening="",
        closing=f"{_PARAMETER_END}\n",
        opening_term=f'"<" {mark} {before} {{}} {kind}',
        closing_term=f'{mark} "parameter>\\n"' if MARK in forced.vocabulary.added else "",
        ending="</",
        kinds=("true", "false"),
    )
    invoke, named = literal('invoke name="'), literal('">\n')
    calls = argument_rules(
        forced,
        "",
        "",
        notation=notation,
        terms=(f'"<" {mark} {invoke} {{}} {named}', f'"</" {mark} "invoke>\\n"'),
    )
    more = " call*" if forced.parallel else ""
    blocks = " | ".join(f'"{block}>\\n" call{more} "</" {mark} "{block}>"' for block in _BLOCKS)
    return "\n".join([f"start: {opening} block", f"block: {blocks}", *calls]) + "\n"
