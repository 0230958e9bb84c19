"""Muse: messages whose headers name a recipient, and XML calls.

Source: the chat template and parser "muse_spark" of mlx-lm 0.32.2. An answer is a sequence of
messages `<|start|>assistant to=NAME<|message|>...`, of which the prompt has the first opening. One
to `self` is reasoning and ends with `<|eom|>`, one to `user` is the answer and ends with `<|eot|>`.
Calls are tags with the prefix `atem:` within `<atem:function_calls>`.
"""

from __future__ import annotations

import re

from quire.text.dialects.base import Dialect, Forced, Frame, Start, Vocabulary
from quire.text.dialects.grammar import Arguments, argument_rules, literal, marker
from quire.text.dialects.headers import MESSAGE, START, HeaderParser
from quire.text.dialects.marker_parser import Layout
from quire.text.dialects.readers import LineEnds, XmlNotation

BEGIN, END = "<atem:function_calls>", "</atem:function_calls>"
_NEXT, _LAST = "<|eom|>", "<|eot|>"
_XML = XmlNotation("atem:invoke", " name=", LineEnds.NONE, argument="atem:parameter")
_LAYOUT = Layout(
    sections={BEGIN: _XML.section(END)}, quiet=frozenset({START, MESSAGE, _NEXT, _LAST})
)
_TO_SELF = re.compile(r"\bto=self\b")


class _MuseParser(HeaderParser):
    """Interprets the headers of Muse's messages."""

    ends = frozenset({_NEXT, _LAST})

    def __init__(self, start: Start) -> None:
        super().__init__(_LAYOUT, start)

    def begin(self, given: str, written: str) -> None:
        if _TO_SELF.search(given + written):
            self.reason()
        else:
            self.answer()

    def on_marker(self, marker: str) -> None:
        if marker in (BEGIN, END):
            self.end_gap()
            if self.in_header:
                self.start_body()
            super(HeaderParser, self).on_marker(marker)
        else:
            super().on_marker(marker)


def _before(vocabulary: Vocabulary, recipient: str) -> str:
    """Return a grammar of the optional reasoning, and of the header of a message behind it."""
    message, following, start = (marker(text, vocabulary) for text in (MESSAGE, _NEXT, START))
    thought = f'(" "? "to=self" {message} /(?s:.*)/ {following} {start} "assistant")?'
    return f'{thought} " "? {recipient} {message}'


def _before_answer(vocabulary: Vocabulary) -> str:
    return _before(vocabulary, literal("to=user"))


def _section(forced: Forced, before: str) -> str:
    opening, closing = (marker(text, forced.vocabulary) for text in (BEGIN, END))
    notation = Arguments('<atem:parameter name="{}">', "</atem:parameter>\n")
    calls = argument_rules(
        forced, '<atem:invoke name="{}">\n', "</atem:invoke>\n", notation=notation
    )
    more = " call*" if forced.parallel else ""
    start = f'start: {before} {opening} "\\n" call{more} {closing}'
    return "\n".join([start, *calls]) + "\n"


MUSE = Dialect(
    name="muse",
    recognises=lambda template, model_type: (
        BEGIN in template or (not template and model_type.startswith("muse_"))
    ),
    build=_MuseParser,
    reasoning=(f"to=self{MESSAGE}", f"{_NEXT}{START}assistant to=user{MESSAGE}"),
    forced=lambda forced: _section(forced, _before(forced.vocabulary, r"/to=[^\s<]+/")),
    openers=(BEGIN,),
    strict=lambda forced: _section(forced, ""),
    frame=Frame(_before_answer, _NEXT),
)
