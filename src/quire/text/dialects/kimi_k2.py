"""Kimi K2: calls with ids that the model writes.

Source: docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct. Inside a section each call is
`<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>`. The
text before the arguments is the call's id, which the model expects to see again in the history.
"""

from __future__ import annotations

import re
from functools import partial

from quire.text.dialects.base import THINK, Dialect, Forced, Tool
from quire.text.dialects.flow import named_call
from quire.text.dialects.grammar import (
    call_rules,
    literal,
    marker,
    one_call,
    section_of_calls,
)
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

ALL_BEGIN, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEADER = rf"\s*(?P<id>(?:functions\.)?(?P<name>[^:\s<]+)(?::[0-9]+)?)\s*{re.escape(ARGUMENTS)}"


def _read(body: Body, tools: Tools) -> Reading:
    separator = body.find(ARGUMENTS)
    call_id = body.text[: max(separator, 0)].strip()
    name, colon, index = call_id.rpartition(":")
    if not colon or not index.isdigit():
        name = call_id
    name = name.removeprefix("functions.")
    if not name:
        return Reading()
    return read_named_json(name, body.text, separator + len(ARGUMENTS), call_id=call_id)


def _forced(forced: Forced) -> str:
    return section_of_calls(forced, ALL_BEGIN, ALL_END, call=_calls(forced))


def _strict(forced: Forced) -> str:
    return one_call(_calls(forced))


def _calls(forced: Forced) -> list[str]:
    start, arguments, end = (marker(text, forced.vocabulary) for text in (BEGIN, ARGUMENTS, END))

    def call(tool: Tool, args: str) -> str:
        name = literal(f"functions.{tool.name}:")
        return f"{start} {name} /[0-9]+/ {arguments} {args} {end}"

    return call_rules(forced.tools, call)


_LAYOUT = Layout(
    reasoning=enclosing(THINK, ("◁think▷", "◁/think▷")),
    sections={
        BEGIN: Section(
            _read,
            header_head(ARGUMENTS),
            ends=frozenset({END}),
            inner=frozenset({ARGUMENTS}),
            start=named_call(_HEADER),
        )
    },
    quiet=frozenset({ALL_BEGIN, ALL_END}),
)

KIMI_K2 = Dialect(
    name="kimi_k2",
    recognises=lambda template, model_type: ALL_BEGIN in template or model_type.startswith("kimi"),
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=_forced,
    openers=(BEGIN,),
    strict=_strict,
)
