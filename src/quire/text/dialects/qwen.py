"""Qwen: `<think>` reasoning; Hermes JSON calls (Qwen2.5, Qwen3) and XML calls (Coder, Qwen3.5).

Source: the chat templates and model cards of Qwen/Qwen3-* and Qwen/Qwen3-Coder-*. Both kinds of
call stand between `<tool_call>` and `</tool_call>` and begin differently, so one parser reads
both. The coder models often leave out `<tool_call>`; `qwen3_coder` therefore also takes a bare
`<function=`.
"""

from __future__ import annotations

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.flow import Begun
from quire.text.dialects.grammar import Arguments, argument_rules, marker, wrapped
from quire.text.dialects.machine import Body, Layout, Machine, Reading, Section, Tools
from quire.text.dialects.readers import XmlNotation, chosen, json_section

REASONING = ("<think>", "</think>")
_XML = XmlNotation("function", "=")
_IN_TAGS, _IN_JSON = _XML.section(), json_section()
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


def _begin_bare(text: str, tools: Tools) -> Begun | None:
    begun = _XML.begin(OPENER + text, tools)
    return None if begun is None else (*begun[:3], begun[3] - len(OPENER))


_WRAPPED = chosen(_by_sign, "</tool_call>", inner=frozenset({OPENER, CLOSER}))
_REASONING = (frozenset({REASONING[0]}), frozenset({REASONING[1]}))
_HERMES = Layout(
    reasoning=_REASONING,
    sections={"<tool_call>": chosen(_by_sign, "</tool_call>")},
)
_CODER = Layout(
    reasoning=_REASONING,
    sections={
        "<tool_call>": _WRAPPED,
        OPENER: Section(_read_bare, _bare_head, ends=frozenset({CLOSER}), begin=_begin_bare),
    },
)


def _forced(forced: Forced) -> str:
    return wrapped(forced, "<tool_call>", "</tool_call>")


def _is_coder(template: str, model_type: str) -> bool:
    return "<function=" in template and "<parameter=" in template


def _is_qwen3(template: str, model_type: str) -> bool:
    return "<tool_call>" in template or "<think>" in template or model_type.startswith("qwen")


def _forced_xml(forced: Forced) -> str:
    before, after = (
        marker("<tool_call>", forced.vocabulary),
        marker("</tool_call>", forced.vocabulary),
    )
    notation = Arguments("<parameter={}>\n", "\n</parameter>\n")
    more = ' ("\\n" item)*' if forced.parallel else ""
    rules = [f"start: item{more}", f'item: {before} "\\n" call "\\n" {after}']
    rules += argument_rules(forced, "<function={}>\n", "</function>", notation)
    return "\n".join(rules) + "\n"


QWEN3 = Dialect(
    name="qwen3",
    recognises=_is_qwen3,
    build=lambda start: Machine(_HERMES, start),
    reasoning=REASONING,
    forced=_forced,
    openers=("<tool_call>",),
)
QWEN3_CODER = Dialect(
    name="qwen3_coder",
    recognises=_is_coder,
    build=lambda start: Machine(_CODER, start),
    reasoning=REASONING,
    forced=_forced_xml,
    openers=("<tool_call>",),
)
