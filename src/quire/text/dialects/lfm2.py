"""LFM2: calls of Python in a list, or JSON if the prompt asks for it.

Source: the chat templates of LiquidAI/LFM2-* and LFM2.5-*. Calls stand as
`[name(key="value", ...), ...]` or `[{"name": ..., "arguments": {...}}]` between
`<|tool_call_start|>` and `<|tool_call_end|>`; reasoning in `<think>`.
"""

from __future__ import annotations

import re

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.grammar import marker
from quire.text.dialects.machine import Layout, Machine, Section
from quire.text.dialects.pythonic import PYTHON, python_rules
from quire.text.dialects.readers import chosen, json_section

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
REASONING = ("<think>", "</think>")
_JSON = json_section()
_OBJECT = re.compile(r"\s*(\[\s*)?\{")
_UNDECIDED = re.compile(r"\s*(\[\s*)?")


def _by_sign(text: str) -> Section | None:
    if _UNDECIDED.fullmatch(text):
        return None
    return _JSON if _OBJECT.match(text) else PYTHON


_LAYOUT = Layout(
    reasoning=(frozenset({REASONING[0]}), frozenset({REASONING[1]})),
    sections={BEGIN: chosen(_by_sign, END)},
)


def _forced(forced: Forced) -> str:
    begin, end = marker(BEGIN, forced.vocabulary), marker(END, forced.vocabulary)
    more = ' (", " call)*' if forced.parallel else ""
    rules = [f'start: {begin} "[" call{more} "]" {end}', *python_rules(forced)]
    return "\n".join(rules) + "\n"


LFM2 = Dialect(
    name="lfm2",
    recognises=lambda template, model_type: (
        BEGIN in template or "<|tool_list_start|>" in template or model_type.startswith("lfm2")
    ),
    build=lambda start: Machine(_LAYOUT, start),
    reasoning=REASONING,
    forced=_forced,
    openers=(BEGIN,),
)
