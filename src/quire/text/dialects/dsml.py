"""DSML: the notation of tool calls of DeepSeek V3.2 and V4.

Source: encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2, and encoding_dsv4.py of V4. Calls
stand between `<｜DSML｜function_calls>` (V4: `tool_calls`) and its closing tag, each as
`<｜DSML｜invoke name="NAME">` with one `<｜DSML｜parameter name="KEY" string="true|false">VALUE` an
argument. A value is verbatim text where `string` is true, else JSON. `｜DSML｜` is a token.
"""

from __future__ import annotations

import re

from quire.text.dialects.base import Forced
from quire.text.dialects.grammar import Arguments, argument_rules, literal, marker
from quire.text.dialects.typed_tags import TypedTags

MARK = "｜DSML｜"
_BLOCKS = ("function_calls", "tool_calls")
_INVOKE, _PARAMETER = f"<{MARK}invoke ", f"<{MARK}parameter "
_INVOKE_END, _PARAMETER_END = f"</{MARK}invoke>", f"</{MARK}parameter>"
_TAGS = TypedTags(
    head=_INVOKE,
    call=re.compile(rf'\s*{_INVOKE}\s*name="([^"\n]+)"\s*>'),
    call_end=re.compile(rf"\s*{_INVOKE_END}"),
    argument=re.compile(rf'\s*{_PARAMETER}\s*name="([^"\n]+)"(?:\s+string="(true|false)")?\s*>'),
    value_end=re.compile(rf"{_PARAMETER_END}|\n?(?={_PARAMETER}|{_INVOKE_END})"),
    tags=(_PARAMETER, _PARAMETER_END, _INVOKE_END),
    until=MARK,
    text="true",
)
SECTIONS = {f"<{MARK}{block}>": _TAGS.section(f"</{MARK}{block}>") for block in _BLOCKS}
"""Sections by their opening marker."""


def forced_calls(forced: Forced) -> str:
    """Return a grammar of calls, with the empty line before them."""
    mark = marker(MARK, forced.vocabulary)
    return _grammar(forced, f'("\\n\\n")? "<" {mark}')


def strict_calls(forced: Forced) -> str:
    """Return a grammar of calls, starting at the first mark."""
    return _grammar(forced, marker(MARK, forced.vocabulary))


def _grammar(forced: Forced, opening: str) -> str:
    """Return a grammar of one block of calls, in V3.2's or V4's form; `opening` ends with
    the mark.
    """
    mark = marker(MARK, forced.vocabulary)
    before, kind = literal('parameter name="'), literal('" string="{kind}">')
    notation = Arguments(
        opening="",
        closing=f"{_PARAMETER_END}\n",
        opening_term=f'"<" {mark} {before} {{}} {kind}',
        closing_term=f'{mark} "parameter>\\n"' if MARK in forced.vocabulary.added else "",
        ending="</",
        kinds=("true", "false"),
    )
    invoke, named = literal('invoke name="'), literal('">\n')
    calls = argument_rules(
        forced,
        "",
        "",
        notation=notation,
        terms=(f'"<" {mark} {invoke} {{}} {named}', f'"</" {mark} "invoke>\\n"'),
    )
    more = " call*" if forced.parallel else ""
    blocks = " | ".join(f'"{block}>\\n" call{more} "</" {mark} "{block}>"' for block in _BLOCKS)
    return "\n".join([f"start: {opening} block", f"block: {blocks}", *calls]) + "\n"
