"""DeepSeek: R1 and V3 with fenced JSON calls, V3.1 with plain ones, V3.2 and V4 with DSML.

Source: the chat templates of deepseek-ai/DeepSeek-R1, -V3 and -V3.1. A call is, in V3,
`<｜tool▁call▁start｜>function<｜tool▁sep｜>NAME`, a line break and a ```json fence, in V3.1
`<｜tool▁call▁start｜>NAME<｜tool▁sep｜>{...}`, both up to `<｜tool▁call▁end｜>`.
Both dialects read all notations; they differ in the notation that they force.
"""

from __future__ import annotations

import re
from functools import partial

from quire.text.dialects.base import THINK, Dialect, Forced
from quire.text.dialects.dsml import MARK, SECTIONS, forced_calls, strict_calls
from quire.text.dialects.flow import StartedCall, named_call
from quire.text.dialects.grammar import marker, named_rules, one_call, section_of_calls
from quire.text.dialects.marker_parser import (
    Body,
    Layout,
    MarkerParser,
    Reading,
    Section,
    Tools,
    enclosing,
)
from quire.text.dialects.readers import header_head, read_named_json

BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_FENCED = re.compile(r"\s*([^\s`{}<]+)\s*```(?:json)?\s*")
_PLAIN = named_call(rf"\s*(?P<name>[^\s`{{}}<]+)\s*{SEPARATOR}")
_IN_FENCE = named_call(rf"[^`{{}}<]*{SEPARATOR}\s*(?P<name>[^\s`{{}}<]+)\s*```(?:json)?")
_FENCE_END = re.compile(r"\s*```")


def _read(body: Body, tools: Tools) -> Reading:
    separator = body.find(SEPARATOR)
    if separator < 0:
        return Reading()
    name, at = body.text[:separator].strip(), separator + len(SEPARATOR)
    fenced = _FENCED.match(body.text, at)
    if fenced is not None:
        name, at = fenced.group(1), fenced.end()
    if not name:
        return Reading()
    reading = read_named_json(name, body.text, at)
    fence = _FENCE_END.match(body.text, reading.end) if fenced is not None else None
    return Reading(reading.calls, fence.end() if fence else reading.end, reading.until)


def _forced(forced: Forced) -> str:
    return section_of_calls(forced, ALL_BEGIN, ALL_END, call=_calls(forced))


def _strict(forced: Forced) -> str:
    return one_call(_calls(forced))


def _calls(forced: Forced) -> list[str]:
    start, separator, end = (marker(text, forced.vocabulary) for text in (BEGIN, SEPARATOR, END))
    return named_rules(forced.tools, start, separator, after=end)


def _start(text: str, tools: Tools) -> StartedCall | None:
    return _PLAIN(text, tools) or _IN_FENCE(text, tools)


_LAYOUT = Layout(
    reasoning=enclosing(THINK),
    sections={
        BEGIN: Section(
            _read,
            header_head(SEPARATOR),
            ends=frozenset({END}),
            inner=frozenset({SEPARATOR}),
            start=_start,
        ),
        **SECTIONS,
    },
    parts=frozenset({MARK}),
    quiet=frozenset({ALL_BEGIN, ALL_END}),
)

_NO_CALLS = ("deepseek_vl", "deepseek_ocr", "deepseekocr")
"""Beginnings of the `model_type` of models that were not trained to call tools."""

DEEPSEEK = Dialect(
    name="deepseek",
    recognises=lambda template, model_type: (
        ALL_BEGIN in template
        or "<｜Assistant｜>" in template
        or (model_type.startswith("deepseek") and not model_type.startswith(_NO_CALLS))
    ),
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=_forced,
    openers=(BEGIN,),
    strict=_strict,
)

DSML = Dialect(
    name="dsml",
    recognises=lambda template, model_type: (
        MARK in template
        or (not template and model_type.startswith(("deepseek_v32", "deepseek_v4")))
    ),
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=forced_calls,
    openers=(MARK,),
    strict=strict_calls,
)
