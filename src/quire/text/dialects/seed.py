"""Seed-OSS: XML calls as Qwen3-Coder's, in marks of its own.

Source: the chat template of ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

from __future__ import annotations

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.grammar import Arguments, argument_rules, marker
from quire.text.dialects.machine import Layout, Machine
from quire.text.dialects.readers import XmlNotation

BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"
REASONING = ("<seed:think>", "</seed:think>")
_XML = XmlNotation("function", "=")


def _forced(forced: Forced) -> str:
    begin, end = marker(BEGIN, forced.vocabulary), marker(END, forced.vocabulary)
    notation = Arguments("<parameter={}>", "</parameter>\n")
    more = ' ("\\n" item)*' if forced.parallel else ""
    rules = [f"start: item{more}", f'item: {begin} "\\n" call "\\n" {end}']
    rules += argument_rules(forced, "<function={}>\n", "</function>", notation)
    return "\n".join(rules) + "\n"


_LAYOUT = Layout(
    reasoning=(frozenset({REASONING[0]}), frozenset({REASONING[1]})),
    sections={BEGIN: _XML.section(END)},
)

SEED = Dialect(
    name="seed",
    recognises=lambda template, model_type: BEGIN in template or model_type == "seed_oss",
    build=lambda start: Machine(_LAYOUT, start),
    reasoning=REASONING,
    forced=_forced,
    openers=(BEGIN,),
)
