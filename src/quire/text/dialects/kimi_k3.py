"""XTML, which Kimi K3 writes: a message is a sequence of parts in tags of three tokens.

Source: encoding_k3.py of moonshotai/Kimi-K3, as mlx-vlm has it. `<|open|>NAME<|sep|>` opens a part
and `<|close|>NAME<|sep|>` closes it: `think`, `response` and `tools`. Each call in the latter is a
`call tool="NAME" index="1"` of one `argument key="KEY" type="TYPE"` each. A value is verbatim text
where the type is `string`, else JSON. Quotes and ampersands in attributes are escaped as in XML.
"""

from __future__ import annotations

import re
from functools import partial

from quire.text.dialects.base import Dialect, Forced
from quire.text.dialects.grammar import Arguments, argument_rules, marker
from quire.text.dialects.marker_parser import Layout, MarkerParser, enclosing
from quire.text.dialects.typed_tags import TypedTags

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
_OPEN, _CLOSE, _SEPARATOR = map(re.escape, (OPEN, CLOSE, SEPARATOR))


def _opening(part: str) -> str:
    return f"{OPEN}{part}{SEPARATOR}"


def _closing(part: str) -> str:
    return f"{CLOSE}{part}{SEPARATOR}"


_TAGS = TypedTags(
    head=f"{OPEN}call ",
    call=re.compile(rf'\s*{_OPEN}call tool="([^"\n]+)"[^<]*{_SEPARATOR}'),
    call_end=re.compile(rf"\s*{_CLOSE}call{_SEPARATOR}"),
    argument=re.compile(rf'\s*{_OPEN}argument key="([^"\n]+)"(?: type="(\w+)")?\s*{_SEPARATOR}'),
    value_end=re.compile(
        rf"{_CLOSE}(?:argument|json){_SEPARATOR}|(?={_OPEN}argument |{_CLOSE}call{_SEPARATOR})"
    ),
    tags=(f"{OPEN}argument ", _closing("argument"), _closing("call")),
    until=_closing("argument"),
    text="string",
    unescaped=lambda name: name.replace("&quot;", '"').replace("&amp;", "&"),
    whole=re.compile(rf'\s*{_OPEN}json type="object"{_SEPARATOR}'),
)


def _terms(forced: Forced, part: str) -> tuple[str, str]:
    """Return lark terms that open and close a part."""
    first, second, last = (marker(text, forced.vocabulary) for text in (OPEN, CLOSE, SEPARATOR))
    return f'{first} "{part}" {last}', f'{second} "{part}" {last}'


def _tools(forced: Forced) -> list[str]:
    """Return the rule `tools` of all calls, with the end of the text before them."""
    opening, closing = _terms(forced, "tools")
    start, separator = marker(OPEN, forced.vocabulary), marker(SEPARATOR, forced.vocabulary)
    _, end = _terms(forced, "argument")
    notation = Arguments(
        opening="",
        closing=_closing("argument"),
        opening_term=rf'{start} "argument key=\"" {{}} "\" type=\"" {{kind}} "\"" {separator}',
        closing_term=end if CLOSE in forced.vocabulary.added else "",
        kinds=('"string"', '("number" | "boolean" | "null" | "object" | "array")'),
    )
    _, call_end = _terms(forced, "call")
    call = rf'{start} "call tool=\"" {{}} "\" index=\"" /[0-9]+/ "\"" {separator}'
    calls = argument_rules(forced, "", "", notation=notation, terms=(call, call_end))
    more = " call*" if forced.parallel else ""
    _, said = _terms(forced, "response")
    return [f"tools: {said} {opening} call{more} {closing}", *calls]


def _forced(forced: Forced) -> str:
    return "\n".join(["start: tools", *_tools(forced)]) + "\n"


def _strict(forced: Forced) -> str:
    """Return a grammar of an answer behind its reasoning."""
    _, said = _terms(forced, "response")
    _, message = _terms(forced, "message")
    start = f"start: /(?s:.*)/ ((tools | {said}) ({message})?)?"
    return "\n".join([start, *_tools(forced)]) + "\n"


KIMI_K3 = Dialect(
    name="kimi_k3",
    recognises=lambda template, model_type: (
        f"{OPEN}message" in template or (not template and model_type == "kimi_k3")
    ),
    build=partial(
        MarkerParser,
        Layout(
            reasoning=enclosing((_opening("think"), _closing("think"))),
            answer=enclosing((_opening("response"), _closing("response"))),
            sections={_opening("tools"): _TAGS.section(_closing("tools"))},
            parts=frozenset({OPEN, CLOSE, SEPARATOR}),
            quiet=frozenset({_closing("message")}),
        ),
    ),
    reasoning=(_opening("think"), _closing("think") + _opening("response")),
    forced=_forced,
    strict=_strict,
)
