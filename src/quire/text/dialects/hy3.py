"""Hunyuan 3: calls of keys and values in tags, like GLM's, within one pair of tags around all
calls.

Source: the parser "hy_v3" of vLLM, and its tests, for tencent/Hy3-preview:
`<tool_calls>`, on lines of their own `<tool_call>NAME<tool_sep>`, `<arg_key>K</arg_key>`,
`<arg_value>V</arg_value>` and `</tool_call>`, then `</tool_calls>`; reasoning in `<think>`.
"""

from __future__ import annotations

from functools import partial

from quire.text.dialects.base import THINK, Dialect, Forced
from quire.text.dialects.glm4 import GLM, in_tags, keyed
from quire.text.dialects.grammar import argument_rules, marker, one_call, section_of_calls
from quire.text.dialects.marker_parser import Layout, MarkerParser, enclosing

ALL_BEGIN, ALL_END, SEPARATOR = "<tool_calls>", "</tool_calls>", "<tool_sep>"


def _calls(forced: Forced) -> list[str]:
    start, end, separator = (
        marker(text, forced.vocabulary) for text in (GLM.begin, GLM.end, SEPARATOR)
    )
    notation = in_tags(forced.vocabulary)
    return argument_rules(
        forced,
        f"{GLM.begin}{{}}{SEPARATOR}\n",
        GLM.end,
        notation=notation,
        terms=(f'{start} {{}} {separator} "\\n"', end),
    )


def _forced(forced: Forced) -> str:
    lines = '"\\n"'
    calls = _calls(forced)
    return section_of_calls(
        forced, ALL_BEGIN, ALL_END, call=calls, within=(lines, lines), between=lines
    )


HY3 = Dialect(
    name="hy3",
    recognises=lambda template, model_type: (
        SEPARATOR in template or (not template and model_type == "hy_v3")
    ),
    build=partial(
        MarkerParser,
        Layout(
            reasoning=enclosing(THINK),
            sections={GLM.begin: keyed(SEPARATOR)},
            quiet=frozenset({ALL_BEGIN, ALL_END}),
        ),
    ),
    reasoning=THINK,
    forced=_forced,
    openers=(GLM.begin,),
    strict=lambda forced: one_call(_calls(forced)),
)
