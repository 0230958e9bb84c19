"""OLMo 3: calls of Python, one a line.

Source: the chat templates of allenai/Olmo-3-*: `name(key="value", ...)` on lines between
`<function_calls>` and `</function_calls>`, reasoning in `<think>`.
"""

from __future__ import annotations

from dataclasses import replace

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.grammar import marker
from quire.text.dialects.machine import Layout, Machine
from quire.text.dialects.pythonic import PYTHON, python_rules

BEGIN, END = "<function_calls>", "</function_calls>"
REASONING = ("<think>", "</think>")
_LAYOUT = Layout(
    reasoning=(frozenset({REASONING[0]}), frozenset({REASONING[1]})),
    sections={BEGIN: replace(PYTHON, ends=frozenset({END}))},
)


def _forced(forced: Forced) -> str:
    begin, end = marker(BEGIN, forced.vocabulary), marker(END, forced.vocabulary)
    more = ' ("\\n" call)*' if forced.parallel else ""
    return "\n".join([f"start: {begin} call{more} {end}", *python_rules(forced)]) + "\n"


OLMO3 = Dialect(
    name="olmo3",
    recognises=lambda template, model_type: BEGIN in template or model_type == "olmo3",
    build=lambda start: Machine(_LAYOUT, start),
    reasoning=REASONING,
    forced=_forced,
    openers=(BEGIN,),
)
