"""Apertus: each call is a JSON object with one key, the tool's name, whose value is the arguments.

Source: docs/format.md of swiss-ai/apertus_format. Calls stand in an array,
`[{"NAME": {...}}, ...]`, between `<|tools_prefix|>` and `<|tools_suffix|>`; reasoning between
`<|inner_prefix|>` and `<|inner_suffix|>`.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from quire.text.dialects.base import Call, Dialect, Forced, Tool
from quire.text.dialects.flow import named_call
from quire.text.dialects.grammar import call_rules, literal, section_of_calls
from quire.text.dialects.marker_parser import Layout, MarkerParser, Section, enclosing
from quire.text.dialects.readers import array_head, read_json_calls
from quire.text.dialects.values import arguments_json

BEGIN, END = "<|tools_prefix|>", "<|tools_suffix|>"
REASONING = ("<|inner_prefix|>", "<|inner_suffix|>")


def _call(value: Any) -> Call:
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("no call")
    ((name, arguments),) = value.items()
    if not name:
        raise ValueError("no name")
    return Call(name, arguments_json(arguments))


_LAYOUT = Layout(
    reasoning=enclosing(REASONING),
    sections={
        BEGIN: Section(
            partial(read_json_calls, of=_call),
            array_head,
            ends=frozenset({END}),
            start=named_call(r'\s*\[?\s*\{\s*"(?P<name>[^"\\]+)"\s*:'),
        )
    },
)


def _forced(forced: Forced) -> str:
    def call(tool: Tool, arguments: str) -> str:
        return f'{literal(f"{{{json.dumps(tool.name)}: ")} {arguments} "}}"'

    calls = call_rules(forced.tools, call)
    return section_of_calls(forced, BEGIN, END, call=calls, within=('"["', '"]"'), between='", "')


APERTUS = Dialect(
    name="apertus",
    recognises=lambda template, model_type: BEGIN in template or model_type == "apertus",
    build=partial(MarkerParser, _LAYOUT),
    reasoning=REASONING,
    forced=_forced,
    openers=(BEGIN,),
)
