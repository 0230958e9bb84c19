"""Seed-OSS: XML calls like Qwen3-Coder's, with other markers.

Source: the chat template of ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

from __future__ import annotations

from functools import partial

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.grammar import Arguments, argument_rules, wrapped
from quire.text.dialects.marker_parser import Layout, MarkerParser, enclosing
from quire.text.dialects.readers import LineEnds, XmlNotation

BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"
REASONING = ("<seed:think>", "</seed:think>")
_XML = XmlNotation("function", "=", LineEnds.PAIRED)


def _forced(forced: Forced) -> str:
    notation = Arguments("<parameter={}>", "</parameter>\n")
    calls = argument_rules(forced, "<function={}>\n", "</function>", notation=notation)
    return wrapped(forced, BEGIN, END, call=calls)


_LAYOUT = Layout(
    reasoning=enclosing(REASONING),
    sections={BEGIN: _XML.section(END)},
)

SEED = Dialect(
    name="seed",
    recognises=lambda template, model_type: BEGIN in template or model_type == "seed_oss",
    build=partial(MarkerParser, _LAYOUT),
    reasoning=REASONING,
    forced=_forced,
    openers=(BEGIN,),
)
