"""Qwen: `<think>` reasoning; Hermes JSON calls (Qwen2.5, Qwen3) and XML calls (Coder, Qwen3.5).

Source: the chat templates and model cards of Qwen/Qwen3-* and Qwen/Qwen3-Coder-*. Both kinds of
call stand between `<tool_call>` and `</tool_call>` and start differently, so one parser reads
both. The coder models often leave out `<tool_call>`; `qwen3_coder` therefore also takes a bare
`<function=`.
"""

from __future__ import annotations

from functools import partial

from quire.text.dialects.base import THINK, Dialect, Forced
from quire.text.dialects.flow import StartedCall
from quire.text.dialects.grammar import Arguments, argument_rules, json_rules, wrapped
from quire.text.dialects.marker_parser import (
    Body,
    Layout,
    MarkerParser,
    Reading,
    Section,
    Tools,
    enclosing,
)
from quire.text.dialects.readers import XmlNotation, chosen, json_section

_XML = XmlNotation("function", "=")
_IN_TAGS, _IN_JSON = _XML.section(), json_section()
BEGIN, END = "<tool_call>", "</tool_call>"
OPENER, CLOSER = "<function=", "</function>"


def _by_sign(text: str) -> Section | None:
    bare = text.lstrip()
    return (_IN_TAGS if bare.startswith("<") else _IN_JSON) if bare else None


def _read_bare(body: Body, tools: Tools) -> Reading:
    text = OPENER + body.text + (CLOSER if body.closed else "")
    reading = _XML.read(text, tools, lenient=not body.closed)
    end = min(max(0, reading.end - len(OPENER)), len(body.text))
    return Reading(reading.calls, end, reading.until)


def _bare_head(text: str, tools: Tools) -> bool | None:
    name, closed, _ = text.partition(">")
    if closed:
        return bool(name.strip()) and "\n" not in name
    return False if "\n" in name else None


def _start_bare(text: str, tools: Tools) -> StartedCall | None:
    started = _XML.start(OPENER + text, tools)
    return None if started is None else (*started[:3], started[3] - len(OPENER))


_WRAPPED = chosen(_by_sign, END, inner=frozenset({OPENER, CLOSER}))
_HERMES = Layout(
    reasoning=enclosing(THINK),
    sections={BEGIN: chosen(_by_sign, END)},
)
_CODER = Layout(
    reasoning=enclosing(THINK),
    sections={
        BEGIN: _WRAPPED,
        OPENER: Section(_read_bare, _bare_head, ends=frozenset({CLOSER}), start=_start_bare),
    },
)


def _forced(forced: Forced) -> str:
    return wrapped(forced, BEGIN, END, call=json_rules(forced.tools))


def _is_coder(template: str, model_type: str) -> bool:
    return OPENER in template and "<parameter=" in template


def _is_qwen3(template: str, model_type: str) -> bool:
    return BEGIN in template or "<think>" in template or model_type.startswith("qwen")


def _forced_xml(forced: Forced) -> str:
    notation = Arguments("<parameter={}>\n", "\n</parameter>\n")
    calls = argument_rules(forced, "<function={}>\n", "</function>", notation=notation)
    return wrapped(forced, BEGIN, END, call=calls)


QWEN3 = Dialect(
    name="qwen3",
    recognises=_is_qwen3,
    build=partial(MarkerParser, _HERMES),
    reasoning=THINK,
    forced=_forced,
    openers=(BEGIN,),
)
QWEN3_CODER = Dialect(
    name="qwen3_coder",
    recognises=_is_coder,
    build=partial(MarkerParser, _CODER),
    reasoning=THINK,
    forced=_forced_xml,
    openers=(BEGIN,),
)
