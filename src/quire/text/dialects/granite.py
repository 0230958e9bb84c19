"""Granite 3 and 4: JSON calls, reasoning in tags or announced in prose.

Source: the chat templates of ibm-granite/granite-3.0 to 4.0. Calls are an array after
`<|tool_call|>` (3.x) or Hermes objects in `<tool_call>` (4.0). Granite 3.2 thinks between the
sentences "Here is my thought process:" and "Here is my response:", 3.3 in `<think>`, with the
answer in `<response>`.
"""

from __future__ import annotations

from quire.text.dialects.base import THINK, Dialect, Forced, Start
from quire.text.dialects.grammar import array_of_calls, json_rules, wrapped
from quire.text.dialects.marker_parser import Layout, MarkerParser, Mode, enclosing
from quire.text.dialects.readers import json_section

_PROSE_OPENS = frozenset({"Here is my thought process:", "Here's my thought process:"})
_PROSE_CLOSES = frozenset({"Here is my response:", "Here's my response:"})
_LAYOUT = Layout(
    reasoning=(_PROSE_OPENS | {THINK[0]}, _PROSE_CLOSES | {THINK[1]}),
    answer=enclosing(("<response>", "</response>")),
    sections={
        "<|tool_call|>": json_section(),
        "<tool_call>": json_section("</tool_call>"),
    },
)


class _GraniteParser(MarkerParser):
    """Treats the prose sentences as markers only where they can be markers."""

    def __init__(self, start: Start) -> None:
        super().__init__(_LAYOUT, start)

    def on_marker(self, marker: str) -> None:
        fresh = self.mode is Mode.TEXT and not self.writer.wrote and not self.writer.calls
        prose = (marker in _PROSE_OPENS and not fresh) or (
            marker in _PROSE_CLOSES and self.mode is not Mode.REASONING
        )
        if prose:
            self.on_text(marker)
        else:
            super().on_marker(marker)


def _forced(forced: Forced) -> str:
    if "<|tool_call|>" not in forced.vocabulary.added:
        return wrapped(forced, "<tool_call>", "</tool_call>", call=json_rules(forced.tools))
    return array_of_calls(forced, "<|tool_call|>")


GRANITE = Dialect(
    name="granite",
    recognises=lambda template, model_type: (
        "<|start_of_role|>" in template or model_type.startswith("granite")
    ),
    build=_GraniteParser,
    reasoning=THINK,
    forced=_forced,
    openers=("<|tool_call|>", "<tool_call>"),
)
