"""Llama 3 and 4: an answer, or a line of it, that starts as a JSON or Python call is a call.

Source: Meta's prompt formats for Llama 3.1, 3.2 and 4. JSON calls are `{"name": ..., "parameters":
{...}}`, several in a list or with `;` between, with or without `<|python_tag|>`; pythonic ones
`[name(key=value, ...), ...]`. No marker starts them. Text at the start of an answer or a line is a
call only if it names a known tool; other JSON is part of the answer.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.flow import StartedCall, json_call
from quire.text.dialects.grammar import json_rules
from quire.text.dialects.marker_parser import (
    NO_SECTION,
    Body,
    Layout,
    MarkerParser,
    Reading,
    Section,
    Tools,
)
from quire.text.dialects.python_flow import start_python
from quire.text.dialects.pythonic import read_python_calls
from quire.text.dialects.readers import read_json_calls

_KEYS = ("name", "type", "function", "parameters", "arguments", "id")
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)("?)')
_CALLED = re.compile(r'"(?:name|function)"\s*:\s*"((?:[^"\\]|\\.)*)"')

_IN_JSON = json_call()
_PYTHONIC = re.compile(r"\s*\[(?!\s*\{)")


def _head(text: str, tools: Tools) -> bool | None:
    text = text.lstrip()
    if text.startswith("["):
        return _pythonic_head(text, tools)
    if not text.startswith("{"):
        return False if text else None
    key = _FIRST_KEY.match(text)
    if key is None:
        return None if not text[1:].strip() else False
    if not (
        key.group(1) in _KEYS if key.group(2) else any(k.startswith(key.group(1)) for k in _KEYS)
    ):
        return False
    name = _CALLED.search(text)
    return None if name is None else name.group(1) in tools


def _pythonic_head(text: str, tools: Tools) -> bool | None:
    compact = text[1:].lstrip()
    if compact.startswith("{"):
        return _head(compact, tools)
    name, opened, _ = compact.partition("(")
    if opened:
        return name.strip() in tools
    return None if any(tool.startswith(compact.rstrip()) for tool in tools) else False


def _read(body: Body, tools: Tools) -> Reading:
    if _PYTHONIC.match(body.text):
        reading = read_python_calls(body.text, tools, bracketed=True)
    else:
        reading = read_json_calls(body, tools)
    known = all(call.name in tools for call in reading.calls)
    return reading if known else Reading(until=reading.until)


def _start(text: str, tools: Tools) -> StartedCall | None:
    return start_python(text, tools) if _PYTHONIC.match(text) else _IN_JSON(text, tools)


def _forced(forced: Forced) -> str:
    more = ' ("; " call)*' if forced.parallel else ""
    return "\n".join([f"start: call{more}", *json_rules(forced.tools, "parameters")]) + "\n"


def _strict(forced: Forced) -> str:
    """Return a grammar in which an answer that starts like a call must be one, as no marker starts
    a call.
    """
    rules = ["start: calls | other", 'calls: call ("; " call)*', r"other: /\s*([^\s{\[](?s:.*))?/"]
    return "\n".join(rules + json_rules(forced.tools, "parameters")) + "\n"


_LINES = ("\n{", "\n[")
"""Line starts that may start a call."""


def _on_a_line(opener: str) -> Section:
    """Return the section of a call that starts a line; `opener` includes its first character."""
    first = opener[-1]

    def head(text: str, tools: Tools) -> bool | None:
        return _head(first + text, tools)

    def read(body: Body, tools: Tools) -> Reading:
        reading = _read(Body(first + body.text, closed=body.closed), tools)
        return replace(reading, end=max(0, reading.end - 1))

    return Section(read, head, inner=frozenset(_LINES))


_SECTION = Section(_read, _head, inner=frozenset(_LINES), start=_start)
_LAYOUT = Layout(
    sections={
        NO_SECTION: _SECTION,
        "<|python_tag|>": _SECTION,
        **{opener: _on_a_line(opener) for opener in _LINES},
    },
    quiet=frozenset({"<|eom_id|>"}),
)


LLAMA3 = Dialect(
    name="llama3",
    recognises=lambda template, model_type: (
        "<|python_tag|>" in template
        or ("<|start_header_id|>" in template and "<think>" not in template)
        or "<|header_start|>" in template
        or model_type in ("llama4", "mllama")
    ),
    build=partial(MarkerParser, _LAYOUT),
    forced=_forced,
    strict=_strict,
)
