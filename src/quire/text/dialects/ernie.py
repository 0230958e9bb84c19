"""ERNIE 4.5: Hermes calls as Qwen3's, answers in a tag of their own.

Source: the chat template of baidu/ERNIE-4.5-21B-A3B-Thinking: `<think>`, then `<response>` or
`{"name": ..., "arguments": {...}}` between `<tool_call>` and `</tool_call>`.
"""

from __future__ import annotations

from quire.text.dialects.base import Dialect
from quire.text.dialects.grammar import wrapped
from quire.text.dialects.machine import Layout, Machine
from quire.text.dialects.readers import json_section

BEGIN, END = "<tool_call>", "</tool_call>"
REASONING = ("<think>", "</think>")
_LAYOUT = Layout(
    reasoning=(frozenset({REASONING[0]}), frozenset({REASONING[1]})),
    answer=(frozenset({"<response>"}), frozenset({"</response>"})),
    sections={BEGIN: json_section(END)},
)

ERNIE = Dialect(
    name="ernie",
    recognises=lambda template, model_type: model_type.startswith("ernie4_5"),
    build=lambda start: Machine(_LAYOUT, start),
    reasoning=REASONING,
    forced=lambda forced: wrapped(forced, BEGIN, END),
    openers=(BEGIN,),
)
