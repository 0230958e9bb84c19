"""MiniMax M2: XML calls in a section, and reasoning that the prompt opens.

Source: docs/tool_calling_guide.md of MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from functools import partial

from quire.text.dialects.base import THINK, Dialect, Forced
from quire.text.dialects.grammar import Arguments, argument_rules, section_of_calls
from quire.text.dialects.marker_parser import Layout, MarkerParser, enclosing
from quire.text.dialects.readers import LineEnds, XmlNotation

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
_XML = XmlNotation("invoke", " name=", LineEnds.NONE)


def _forced(forced: Forced) -> str:
    notation = Arguments('<parameter name="{}">', "</parameter>\n")
    calls = argument_rules(forced, '<invoke name="{}">\n', "</invoke>\n", notation=notation)
    return section_of_calls(forced, BEGIN, END, call=calls, within=('"\\n"', ""))


_LAYOUT = Layout(
    reasoning=enclosing(THINK),
    sections={BEGIN: _XML.section(END)},
)

MINIMAX = Dialect(
    name="minimax",
    recognises=lambda template, model_type: BEGIN in template or model_type.startswith("minimax"),
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=_forced,
    openers=(BEGIN,),
)
