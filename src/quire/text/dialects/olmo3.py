"""OLMo 3: Python-style calls, one a line.

Source: the chat templates of allenai/Olmo-3-*: `name(key="value", ...)` on lines between
`<function_calls>` and `</function_calls>`, reasoning in `<think>`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.text.dialects.base import THINK, Dialect, Forced
from quire.text.dialects.grammar import section_of_calls
from quire.text.dialects.marker_parser import Layout, MarkerParser, enclosing
from quire.text.dialects.python_flow import PYTHON
from quire.text.dialects.pythonic import python_rules

BEGIN, END = "<function_calls>", "</function_calls>"
_LAYOUT = Layout(
    reasoning=enclosing(THINK),
    sections={BEGIN: replace(PYTHON, ends=frozenset({END}))},
)


def _forced(forced: Forced) -> str:
    return section_of_calls(forced, BEGIN, END, call=python_rules(forced), between='"\\n"')


OLMO3 = Dialect(
    name="olmo3",
    recognises=lambda template, model_type: BEGIN in template or model_type == "olmo3",
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=_forced,
    openers=(BEGIN,),
)
