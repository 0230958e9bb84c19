"""Mistral: `[TOOL_CALLS]` in its old and new form, and `[THINK]` of Magistral.

Source: mistral-common's tokenizers. Up to v7 `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`;
from v11 on `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}` for each call, ids and `[ARGS]` not always.
Call ids are nine letters and digits: the templates refuse others.
"""

from __future__ import annotations

import re
import secrets
import string
from functools import partial

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.flow import StartedCall, json_call, named_call
from quire.text.dialects.grammar import array_of_calls, marker, named_rules
from quire.text.dialects.marker_parser import (
    Body,
    Layout,
    MarkerParser,
    Reading,
    Section,
    Tools,
    enclosing,
)
from quire.text.dialects.readers import read_json_calls, read_named_json

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
REASONING = ("[THINK]", "[/THINK]")
_NAME = re.compile(r"\s*([\w.-]+)\s*")
_ARRAY = re.compile(r"\s*(?:\[\s*(?:\{|$)|\{)")
_IN_ARRAY = json_call()
_NAMED = named_call(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?")
_ID = re.compile(r"\s*(\w+)\s*")


def new_call_id() -> str:
    """Return an id that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _head(text: str, tools: Tools) -> bool | None:
    if not text.strip():
        return None
    if _ARRAY.match(text):
        return "{" in text or None
    name = _NAME.match(text)
    if name is None:
        return False
    rest = text[name.end() :]
    if not rest:
        return None
    return rest.startswith(("{", ARGS, CALL_ID))


def _read(body: Body, tools: Tools) -> Reading:
    if _ARRAY.match(body.text):
        return read_json_calls(body, tools)
    name = _NAME.match(body.text)
    if name is None:
        return Reading()
    at, call_id = name.end(), None
    if body.find(CALL_ID) == at:
        found = _ID.match(body.text, at + len(CALL_ID))
        if found is None:
            return Reading()
        at, call_id = found.end(), found.group(1)
    if body.find(ARGS) == at:
        at += len(ARGS)
    return read_named_json(name.group(1), body.text, at, call_id=call_id)


def _forced(forced: Forced) -> str:
    if ARGS not in forced.vocabulary.added:
        return array_of_calls(forced, CALLS)
    opening, between = marker(CALLS, forced.vocabulary), marker(ARGS, forced.vocabulary)
    rules = [f"start: call{'+' if forced.parallel else ''}"]
    rules += named_rules(forced.tools, opening, between)
    return "\n".join(rules) + "\n"


def _start(text: str, tools: Tools) -> StartedCall | None:
    return _IN_ARRAY(text, tools) if _ARRAY.match(text) else _NAMED(text, tools)


_LAYOUT = Layout(
    reasoning=enclosing(REASONING),
    sections={CALLS: Section(_read, _head, inner=frozenset({ARGS, CALL_ID}), start=_start)},
    new_id=new_call_id,
)

MISTRAL = Dialect(
    name="mistral",
    recognises=lambda template, model_type: (
        CALLS in template
        or "[INST]" in template
        or model_type.startswith(("mistral", "ministral", "mixtral", "pixtral"))
    ),
    build=partial(MarkerParser, _LAYOUT),
    reasoning=REASONING,
    forced=_forced,
    openers=(CALLS,),
)
