"""Phi-4-mini: JSON calls between markers, or after "functools".

Source: the chat template and model card of microsoft/Phi-4-mini-instruct, which offer tools between
`<|tool|>` and `<|/tool|>`. Calls come as `<|tool_call|>[{"name": ..., "arguments": {...}}]` up to
`<|/tool_call|>`, or as `functools[...]`.
"""

from __future__ import annotations

from functools import partial

from quire.text.dialects.base import THINK, Dialect
from quire.text.dialects.grammar import array_of_calls
from quire.text.dialects.marker_parser import Layout, MarkerParser, enclosing
from quire.text.dialects.readers import json_section

BEGIN, END = "<|tool_call|>", "<|/tool_call|>"
_LAYOUT = Layout(
    reasoning=enclosing(THINK),
    sections={BEGIN: json_section(END), "functools": json_section()},
)

PHI4 = Dialect(
    name="phi4",
    recognises=lambda template, model_type: "<|tool|>" in template or END in template,
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=lambda forced: array_of_calls(forced, BEGIN, END),
    openers=(BEGIN,),
)
