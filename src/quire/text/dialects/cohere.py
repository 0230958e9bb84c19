"""Command R, R7B and A, North Mini Code: JSON calls, announced in prose or between markers.

Source: the chat templates of CohereForAI/c4ai-command-r-v01 ("tool_use"), -r7b-12-2024 and
-a-03-2025, and of CohereLabs/North-Mini-Code-1.0. A call is
`{"tool_name": ..., "parameters": {...}}`, in an array. Command R writes it after "Action:" in a
```json fence. The others write it between `<|START_ACTION|>` and `<|END_ACTION|>`, with an index as
`tool_call_id`; plans and reasoning stand between `<|START_THINKING|>` and `<|END_THINKING|>`,
answers between `<|START_RESPONSE|>` and `<|END_RESPONSE|>`, North's between `<|START_TEXT|>` and
`<|END_TEXT|>`.
"""

from __future__ import annotations

import json
import re
from functools import partial

from quire.text.dialects.base import Dialect, Forced, Tool
from quire.text.dialects.flow import named_call
from quire.text.dialects.grammar import call_rules, literal, section_of_calls
from quire.text.dialects.marker_parser import (
    Body,
    Layout,
    MarkerParser,
    Reading,
    Section,
    Tools,
    enclosing,
)
from quire.text.dialects.readers import array_head, head_of, read_json_calls

ACTION, BEGIN, END = "Action:", "<|START_ACTION|>", "<|END_ACTION|>"
REASONING = ("<|START_THINKING|>", "<|END_THINKING|>")
_FENCE = re.compile(r"\s*```(?:json)?")
_FENCE_END = re.compile(r"\s*```")
_BEGIN = named_call(
    r'\s*(?:```(?:json)?)?\s*\[?\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?'
    r'"tool_name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"parameters"\s*:'
)


def _read_fenced(body: Body, tools: Tools) -> Reading:
    """Read calls of known tools. The template has the model call `directly_answer` if it needs no
    tool.
    """
    fence = _FENCE.match(body.text)
    at = fence.end() if fence is not None else 0
    reading = read_json_calls(Body(body.text[at:], closed=body.closed), tools)
    if not all(call.name in tools for call in reading.calls):
        return Reading(until=reading.until)
    end = at + reading.end
    closing = _FENCE_END.match(body.text, end)
    return Reading(reading.calls, closing.end() if closing else end, reading.until)


_LAYOUT = Layout(
    reasoning=enclosing(REASONING),
    answer=enclosing(
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")
    ),
    sections={
        BEGIN: Section(read_json_calls, array_head, ends=frozenset({END}), start=_BEGIN),
        ACTION: Section(_read_fenced, head_of("```json", "```\n", "[", "{"), start=_BEGIN),
    },
)


def _forced(forced: Forced) -> str:
    if BEGIN in forced.vocabulary.added:
        start, end = BEGIN, END
        index = literal('{"tool_call_id": "') + " /[0-9]+/ "
        name, parameters, closing = '", "tool_name": ', ', "parameters": ', "}"
    else:
        start, end = f"{ACTION} ```json\n", "\n```"
        index = ""
        name, parameters = '{\n        "tool_name": ', ',\n        "parameters": '
        closing = "\n    }"

    def call(tool: Tool, arguments: str) -> str:
        header = literal(f"{name}{json.dumps(tool.name)}{parameters}")
        return f"{index}{header} {arguments} {literal(closing)}"

    calls, within = call_rules(forced.tools, call), (literal("[\n    "), literal("\n]"))
    return section_of_calls(
        forced, start, end, call=calls, within=within, between=literal(",\n    ")
    )


COHERE = Dialect(
    name="cohere",
    recognises=lambda template, model_type: (
        BEGIN in template or "<|CHATBOT_TOKEN|>" in template or model_type.startswith("cohere")
    ),
    build=partial(MarkerParser, _LAYOUT),
    reasoning=REASONING,
    forced=_forced,
    openers=(BEGIN,),
)
