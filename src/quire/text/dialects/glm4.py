"""GLM 4.5 and later: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`.

LongCat has the same under longer names of marks, and JSON between the outer ones.

Source: the chat template of zai-org/GLM-4.5; of Laguna, the parser "poolside_v1" of vLLM; of
LongCat, the parser "longcat" of mlx-lm. Values carry no type: strings come as they are, everything
else as JSON, so the tool's schema decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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
from quire.text.dialects.readers import chosen, json_section
from quire.text.dialects.tag_flow import KeyedFlow
from quire.text.dialects.values import is_left_out, skip_space, typed_argument, write_json


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of calls.

    Attributes:
        key, value: with their ends, those around an argument's name and value.
    """

    begin: str
    end: str
    key: str
    key_end: str
    value: str
    value_end: str


def marks(prefix: str = "") -> Marks:
    """Return marks whose names begin with `prefix`."""
    names = (prefix + name for name in ("tool_call", "arg_key", "arg_value"))
    return Marks(*(mark for name in names for mark in (f"<{name}>", f"</{name}>")))


GLM, _LONGCAT = marks(), marks("longcat_")


def keyed(separator: str = "", marks: Marks = GLM) -> Section:
    """Return a section of one call: its name, then pairs of a key and a value in marks.

    Args:
        separator: a marker that may follow the name; "" for none.
    """
    name = re.compile(rf"\s*([\w.:/-]+)\s*(?:{separator}\s*)?")
    inner = {marks.key, marks.key_end, marks.value, marks.value_end, separator} - {""}
    return Section(
        partial(_read, name_of=name, marks=marks),
        partial(_head, name_of=name, marks=marks),
        ends=frozenset({marks.end}),
        inner=frozenset(inner),
        start=partial(_start, name_of=name, marks=marks),
    )


def in_tags(vocabulary: Vocabulary, marks: Marks = GLM) -> Arguments:
    """Return the notation of one argument."""
    opening, closing = (marks.key, marks.key_end, marks.value), marks.value_end
    key, key_end, value = (marker(text, vocabulary) for text in opening)
    return Arguments(
        opening=f"{marks.key}{{}}{marks.key_end}\n{marks.value}",
        closing=f"{closing}\n",
        opening_term=f'{key} {{}} {key_end} "\\n" {value}',
        closing_term=(
            f'{marker(closing, vocabulary)} "\\n"' if closing in vocabulary.added else ""
        ),
    )


def _head(text: str, tools: Tools, *, name_of: re.Pattern[str], marks: Marks) -> bool | None:
    name = name_of.match(text)
    if name is None:
        return False if text.strip() else None
    rest = text[name.end() :]
    return rest.startswith(marks.key) if rest else None


def _read(body: Body, tools: Tools, *, name_of: re.Pattern[str], marks: Marks) -> Reading:
    name = name_of.match(body.text)
    if name is None:
        return Reading()
    tool = tools.get(name.group(1), Tool(name.group(1)))
    arguments: dict[str, Any] = {}
    at = name.end()
    while at < len(body.text):
        key_end = body.find(marks.key_end, at)
        value = body.find(marks.value, key_end + 1)
        if body.find(marks.key, at) != at or key_end < 0 or value < 0:
            return Reading()
        value_end = body.find(marks.value_end, value)
        if value_end < 0:
            return Reading(until=marks.value_end)
        key = body.text[at + len(marks.key) : key_end].strip()
        text = body.text[value + len(marks.value) : value_end]
        if not is_left_out(tool, key, text):
            arguments[key] = typed_argument(tool, key, text)
        at = skip_space(body.text, value_end + len(marks.value_end))
    if not body.closed:
        return Reading()  # more arguments may have been on their way
    return Reading((Call(tool.name, write_json(arguments)),), at)


def _start(
    text: str, tools: Tools, *, name_of: re.Pattern[str], marks: Marks
) -> StartedCall | None:
    name = name_of.match(text)
    tool = tools.get(name.group(1)) if name is not None else None
    if name is None or tool is None or not text.startswith(marks.key, name.end()):
        return None
    flow = KeyedFlow(
        tool,
        key=marks.key,
        key_end=marks.key_end,
        value=marks.value,
        value_end=marks.value_end,
    )
    return tool.name, None, flow, name.end() + len(marks.key)


def _forced(forced: Forced, marks: Marks) -> str:
    notation = in_tags(forced.vocabulary, marks)
    calls = argument_rules(forced, "{}\n", "", notation=notation)
    return wrapped(forced, marks.begin, marks.end, call=calls, within="")


def _by_sign(text: str) -> Section | None:
    bare = text.lstrip()
    return (_IN_JSON if bare.startswith("{") else _IN_MARKS) if bare else None


_IN_JSON, _IN_MARKS = json_section(), keyed(marks=_LONGCAT)
_LONGCAT_THINK = ("<longcat_think>", "</longcat_think>")

GLM4 = Dialect(
    name="glm4",
    recognises=lambda template, model_type: (
        GLM.key in template or model_type.startswith(("glm4_moe", "glm_moe", "laguna"))
    ),
    build=partial(MarkerParser, Layout(reasoning=enclosing(THINK), sections={GLM.begin: keyed()})),
    reasoning=THINK,
    forced=partial(_forced, marks=GLM),
    openers=(GLM.begin,),
)
LONGCAT = Dialect(
    name="longcat",
    recognises=lambda template, model_type: (
        _LONGCAT.begin in template or (not template and model_type == "longcat_flash")
    ),
    build=partial(
        MarkerParser,
        Layout(
            reasoning=enclosing(_LONGCAT_THINK),
            sections={_LONGCAT.begin: chosen(_by_sign, _LONGCAT.end, inner=_IN_MARKS.inner)},
        ),
    ),
    reasoning=_LONGCAT_THINK,
    forced=partial(_forced, marks=_LONGCAT),
    openers=(_LONGCAT.begin,),
)
