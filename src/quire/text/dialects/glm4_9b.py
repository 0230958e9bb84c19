"""GLM-4 9B, GLM-4 0414 and GLM-Z1: a tool's name on a line, and JSON on the next.

Source: the chat templates of zai-org/glm-4-9b-chat-hf and GLM-4-9B-0414. A message that calls is
`<|assistant|>NAME`, a line break and the arguments; `<|observation|>` ends the turn. No marker
starts a call, so a message is a call only if its first line names a known tool. GLM-Z1 and GLM-4.1V
reason in `<think>`; GLM-4.1V answers in `<answer>`.
"""

from __future__ import annotations

import re

from quire.text.dialects.base import THINK, Call, Dialect, Forced, Start
from quire.text.dialects.flow import named_call
from quire.text.dialects.grammar import call_rules, literal
from quire.text.dialects.marker_parser import (
    NO_SECTION,
    Body,
    Layout,
    MarkerParser,
    Mode,
    Reading,
    Section,
    Tools,
    enclosing,
)
from quire.text.dialects.readers import read_named_json

ASSISTANT = "<|assistant|>"
_HEADER = re.compile(r"\s*([\w.:/-]+)[ \t]*\n\s*(?=\{)")
_BEGIN = named_call(r"\s*(?P<name>[\w.:/-]+)[ \t]*\n")


def _head(text: str, tools: Tools) -> bool | None:
    name, line_end, rest = text.lstrip().partition("\n")
    if not line_end:
        return None if any(tool.startswith(name.rstrip()) for tool in tools) else False
    if name.strip() not in tools:
        return False
    return rest.lstrip().startswith("{") if rest.strip() else None


def _read(body: Body, tools: Tools) -> Reading:
    calls: list[Call] = []
    end = 0
    while (header := _HEADER.match(body.text, end)) and header.group(1) in tools:
        reading = read_named_json(header.group(1), body.text, header.end())
        if not reading.calls:
            return Reading(tuple(calls), end, reading.until)
        calls.extend(reading.calls)
        end = reading.end
    return Reading(tuple(calls), end)


_LAYOUT = Layout(
    reasoning=enclosing(THINK),
    answer=enclosing(("<answer>", "</answer>")),
    sections={NO_SECTION: Section(_read, _head, start=_BEGIN)},
    quiet=frozenset({ASSISTANT}),
)


class _Parser(MarkerParser):
    """Handles further messages of a turn, each of which may be a call."""

    def __init__(self, start: Start) -> None:
        super().__init__(_LAYOUT, start)

    def on_marker(self, marker: str) -> None:
        super().on_marker(marker)
        if marker == ASSISTANT and self.mode is Mode.TEXT and self.tools:
            self.mode = Mode.START


def _calls(forced: Forced) -> list[str]:
    """Return rules for `call`. A header is one terminal, since in `_strict` other text may start
    alike.
    """
    return call_rules(forced.tools, lambda tool, args: f"{literal(tool.name + chr(10))} {args}")


def _forced(forced: Forced) -> str:
    more = ' ("\\n" call)*' if forced.parallel else ""
    return "\n".join([f"start: call{more}", *_calls(forced)]) + "\n"


def _strict(forced: Forced) -> str:
    """Return a grammar in which an answer that starts like a call must be one, as no marker starts
    a call.
    """
    names = "|".join(re.escape(tool.name).replace("/", r"\/") for tool in forced.tools)
    rules = [
        "start: calls | OTHER",
        'calls: call ("\\n" call)*',
        rf"OTHER: /(?s:.*)/ & ~/\s*({names})[ \t]*\n\s*\{{(?s:.*)/",
    ]
    return "\n".join(rules + _calls(forced)) + "\n"


GLM4_9B = Dialect(
    name="glm4_9b",
    recognises=lambda template, model_type: (
        "<|observation|>" in template or model_type in ("glm", "glm4", "glm4v")
    ),
    build=_Parser,
    reasoning=THINK,
    forced=_forced,
    strict=_strict,
)
