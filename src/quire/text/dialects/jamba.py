"""Jamba: an array of JSON calls.

Source: the chat template of ai21labs/AI21-Jamba-1.5-Mini: `[{"name": ..., "arguments": {...}}]`
between `<tool_calls>` and `</tool_calls>`. Jamba Reasoning speaks Hermes, as Qwen 3 does.
"""

from __future__ import annotations

from functools import partial

from quire.text.dialects.base import Dialect
from quire.text.dialects.grammar import array_of_calls
from quire.text.dialects.marker_parser import Layout, MarkerParser
from quire.text.dialects.readers import json_section

BEGIN, END = "<tool_calls>", "</tool_calls>"
_LAYOUT = Layout(sections={BEGIN: json_section(END)})

JAMBA = Dialect(
    name="jamba",
    recognises=lambda template, model_type: (
        (BEGIN in template and "<|bom|>" in template)
        or (model_type == "jamba" and "<think>" not in template and "<tool_call>" not in template)
    ),
    build=partial(MarkerParser, _LAYOUT),
    forced=lambda forced: array_of_calls(forced, BEGIN, END),
    openers=(BEGIN,),
)
