"""ERNIE 4.5: Hermes calls like Qwen3's, and answers in their own tag.

Source: the chat template of baidu/ERNIE-4.5-21B-A3B-Thinking: `<think>`, then `<response>` or
`{"name": ..., "arguments": {...}}` between `<tool_call>` and `</tool_call>`.
"""

from __future__ import annotations

from functools import partial

from quire.text.dialects.base import THINK, Dialect
from quire.text.dialects.grammar import json_rules, wrapped
from quire.text.dialects.marker_parser import Layout, MarkerParser, enclosing
from quire.text.dialects.readers import json_section

BEGIN, END = "<tool_call>", "</tool_call>"
_LAYOUT = Layout(
    reasoning=enclosing(THINK),
    answer=enclosing(("<response>", "</response>")),
    sections={BEGIN: json_section(END)},
)

ERNIE = Dialect(
    name="ernie",
    recognises=lambda template, model_type: model_type.startswith("ernie4_5"),
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=lambda forced: wrapped(forced, BEGIN, END, call=json_rules(forced.tools)),
    openers=(BEGIN,),
)
