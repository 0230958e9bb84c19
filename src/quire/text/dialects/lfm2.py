"""LFM2: a list of Python-style calls, or JSON if the prompt asks for it.

Source: the chat templates of LiquidAI/LFM2-* and LFM2.5-*. Calls stand as
`[name(key="value", ...), ...]` or `[{"name": ..., "arguments": {...}}]` between
`<|tool_call_start|>` and `<|tool_call_end|>`; reasoning in `<think>`.
"""

from __future__ import annotations

import re
from functools import partial

from quire.text.dialects.base import THINK, Dialect, Forced
from quire.text.dialects.grammar import section_of_calls
from quire.text.dialects.marker_parser import Layout, MarkerParser, Section, enclosing
from quire.text.dialects.python_flow import PYTHON
from quire.text.dialects.pythonic import python_rules
from quire.text.dialects.readers import chosen, json_section

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
_JSON = json_section()
_OBJECT = re.compile(r"\s*(\[\s*)?\{")
_UNDECIDED = re.compile(r"\s*(\[\s*)?")


def _by_sign(text: str) -> Section | None:
    if _UNDECIDED.fullmatch(text):
        return None
    return _JSON if _OBJECT.match(text) else PYTHON


_LAYOUT = Layout(
    reasoning=enclosing(THINK),
    sections={BEGIN: chosen(_by_sign, END)},
)


def _forced(forced: Forced) -> str:
    calls = python_rules(forced)
    return section_of_calls(forced, BEGIN, END, call=calls, within=('"["', '"]"'), between='", "')


LFM2 = Dialect(
    name="lfm2",
    recognises=lambda template, model_type: (
        BEGIN in template or "<|tool_list_start|>" in template or model_type.startswith("lfm2")
    ),
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=_forced,
    openers=(BEGIN,),
)
