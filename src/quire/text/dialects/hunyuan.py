"""Hunyuan: an array of JSON calls, reasoning and answer in tags.

Source: the chat templates of tencent/Hunyuan-A13B-Instruct and Hunyuan-7B-Instruct:
`[{"name": ..., "arguments": {...}}]` between `<tool_calls>` and `</tool_calls>`, `<think>`, then
`<answer>`. With tools, the template has other answers start with "助手：" ("assistant:").
"""

from __future__ import annotations

from quire.text.dialects.base import THINK, Dialect, Start
from quire.text.dialects.grammar import array_of_calls
from quire.text.dialects.jamba import BEGIN, END
from quire.text.dialects.marker_parser import Layout, MarkerParser, Mode, enclosing
from quire.text.dialects.readers import json_section

_SPEAKER = "助手："
_LAYOUT = Layout(
    reasoning=enclosing(THINK),
    answer=enclosing(("<answer>", "</answer>")),
    sections={BEGIN: json_section(END)},
    quiet=frozenset({_SPEAKER}),
)


class _HunyuanParser(MarkerParser):
    """Treats the speaker's name as structure only where the template asks for it."""

    def __init__(self, start: Start) -> None:
        super().__init__(_LAYOUT, start)

    def on_marker(self, marker: str) -> None:
        starts = self.mode is Mode.TEXT and bool(self.tools) and not self.writer.wrote
        if marker == _SPEAKER and self.mode is not Mode.SECTION and not starts:
            self.on_text(marker)
        else:
            super().on_marker(marker)


HUNYUAN = Dialect(
    name="hunyuan",
    recognises=lambda template, model_type: (
        "<｜hy_" in template or "<|extra_0|>" in template or model_type.startswith("hunyuan")
    ),
    build=_HunyuanParser,
    reasoning=THINK,
    forced=lambda forced: array_of_calls(forced, BEGIN, END),
    openers=(BEGIN,),
)
