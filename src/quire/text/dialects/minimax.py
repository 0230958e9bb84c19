"""MiniMax M2: XML calls in a section, reasoning that the prompt opens.

Source: docs/tool_calling_guide.md of MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.grammar import Arguments, argument_rules, marker
from quire.text.dialects.machine import Layout, Machine
from quire.text.dialects.readers import XmlNotation

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
REASONING = ("<think>", "</think>")
_XML = XmlNotation("invoke", " name=")


def _forced(forced: Forced) -> str:
    begin, end = marker(BEGIN, forced.vocabulary), marker(END, forced.vocabulary)
    notation = Arguments('<parameter name="{}">', "</parameter>\n")
    more = "+" if forced.parallel else ""
    rules = [f'start: {begin} "\\n" call{more} {end}']
    rules += argument_rules(forced, '<invoke name="{}">\n', "</invoke>\n", notation)
    return "\n".join(rules) + "\n"


_LAYOUT = Layout(
    reasoning=(frozenset({REASONING[0]}), frozenset({REASONING[1]})),
    sections={BEGIN: _XML.section(END)},
)

MINIMAX = Dialect(
    name="minimax",
    recognises=lambda template, model_type: BEGIN in template or model_type.startswith("minimax"),
    build=lambda start: Machine(_LAYOUT, start),
    reasoning=REASONING,
    forced=_forced,
    openers=(BEGIN,),
)
