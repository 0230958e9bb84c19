"""MiniMax M2: XML calls in a section, reasoning that the prompt opens.

Source: docs/tool_calling_guide.md of MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.grammar import Arguments, argument_rules, marker
from quire.text.dialects.machine import Body, Layout, Machine, Reading, Section, Tools
from quire.text.dialects.readers import XmlNotation, head_of

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
REASONING = ("<think>", "</think>")
_XML = XmlNotation("invoke", " name=")


def _read(body: Body, tools: Tools) -> Reading:
    return _XML.read(body.text, tools, lenient=True)


def _forced(forced: Forced) -> str:
    begin, end = marker(BEGIN, forced.vocabulary), marker(END, forced.vocabulary)
    notation = Arguments('<parameter name="{}">', "</parameter>\n")
    more = "+" if forced.parallel else ""
    rules = [f'start: {begin} "\\n" call{more} {end}']
    rules += argument_rules(forced, '<invoke name="{}">\n', "</invoke>\n", notation)
    return "\n".join(rules) + "\n"


_LAYOUT = Layout(
    reasoning=(frozenset({REASONING[0]}), frozenset({REASONING[1]})),
    sections={
        BEGIN: Section(_read, head_of("<invoke name="), ends=frozenset({END}), begin=_XML.begin)
    },
)

MINIMAX = Dialect(
    name="minimax",
    recognises=lambda template, model_type: BEGIN in template or model_type.startswith("minimax"),
    build=lambda start: Machine(_LAYOUT, start),
    reasoning=REASONING,
    forced=_forced,
    openers=(BEGIN,),
)
