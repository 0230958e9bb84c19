"""GLM 4.5 and later: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`.

Source: the chat template of zai-org/GLM-4.5; of Laguna, the parser "poolside_v1" of vLLM. Values
carry no type: strings come as they are, everything else as JSON, so the tool's schema decides.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from quire.text.dialects.base import THINK, Call, Dialect, Forced, Tool, Vocabulary
from quire.text.dialects.flow import StartedCall
from quire.text.dialects.grammar import Arguments, argument_rules, marker, wrapped
from quire.text.dialects.marker_parser import (
    Body,
    Layout,
    MarkerParser,
    Reading,
    Section,
    Tools,
    enclosing,
)
from quire.text.dialects.tag_flow import KeyedFlow
from quire.text.dialects.values import skip_space, typed_argument, write_json

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def keyed(separator: str = "") -> Section:
    """Return a section of one call: its name, then pairs of a key and a value in marks.

    Args:
        separator: a marker that may follow the name; "" for none.
    """
    name = re.compile(rf"\s*([\w.:/-]+)\s*(?:{separator}\s*)?")
    inner = {KEY, KEY_END, VALUE, VALUE_END, separator} - {""}
    return Section(
        partial(_read, name_of=name),
        partial(_head, name_of=name),
        ends=frozenset({END}),
        inner=frozenset(inner),
        start=partial(_start, name_of=name),
    )


def in_tags(vocabulary: Vocabulary) -> Arguments:
    """Return the notation of one argument."""
    key, key_end, value, value_end = (
        marker(text, vocabulary) for text in (KEY, KEY_END, VALUE, VALUE_END)
    )
    return Arguments(
        opening=f"{KEY}{{}}{KEY_END}\n{VALUE}",
        closing=f"{VALUE_END}\n",
        opening_term=f'{key} {{}} {key_end} "\\n" {value}',
        closing_term=f'{value_end} "\\n"' if VALUE_END in vocabulary.added else "",
    )


def _head(text: str, tools: Tools, *, name_of: re.Pattern[str]) -> bool | None:
    name = name_of.match(text)
    if name is None:
        return False if text.strip() else None
    rest = text[name.end() :]
    return rest.startswith(KEY) if rest else None


def _read(body: Body, tools: Tools, *, name_of: re.Pattern[str]) -> Reading:
    name = name_of.match(body.text)
    if name is None:
        return Reading()
    tool = tools.get(name.group(1), Tool(name.group(1)))
    arguments: dict[str, Any] = {}
    at = name.end()
    while at < len(body.text):
        key_end = body.find(KEY_END, at)
        value = body.find(VALUE, key_end + 1)
        if body.find(KEY, at) != at or key_end < 0 or value < 0:
            return Reading()
        value_end = body.find(VALUE_END, value)
        if value_end < 0:
            return Reading(until=VALUE_END)
        key = body.text[at + len(KEY) : key_end].strip()
        text = body.text[value + len(VALUE) : value_end]
        arguments[key] = typed_argument(tool, key, text)
        at = skip_space(body.text, value_end + len(VALUE_END))
    if not body.closed:
        return Reading()  # more arguments may have been on their way
    return Reading((Call(tool.name, write_json(arguments)),), at)


def _start(text: str, tools: Tools, *, name_of: re.Pattern[str]) -> StartedCall | None:
    name = name_of.match(text)
    tool = tools.get(name.group(1)) if name is not None else None
    if name is None or tool is None or not text.startswith(KEY, name.end()):
        return None
    flow = KeyedFlow(tool, key=KEY, key_end=KEY_END, value=VALUE, value_end=VALUE_END)
    return tool.name, None, flow, name.end() + len(KEY)


def _forced(forced: Forced) -> str:
    calls = argument_rules(forced, "{}\n", "", notation=in_tags(forced.vocabulary))
    return wrapped(forced, BEGIN, END, call=calls, within="")


_LAYOUT = Layout(reasoning=enclosing(THINK), sections={BEGIN: keyed()})

GLM4 = Dialect(
    name="glm4",
    recognises=lambda template, model_type: (
        KEY in template or model_type.startswith(("glm4_moe", "glm_moe", "laguna"))
    ),
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=_forced,
    openers=(BEGIN,),
)
