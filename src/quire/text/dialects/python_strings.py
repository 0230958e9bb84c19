"""Finds the end of a string in a Python-style call whose inner quotes are not escaped.

A quote ends a string only if the call continues after it: with another argument, with the call's
end, or, within a list or an object, with its next sign. Inner quotes usually come in pairs
(`print("hi")`). So after an odd number of them a quote surely ends the string only if a parameter
of the tool follows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto

QUOTE = re.compile(r"'''|\"\"\"|'|\"")
_NAME = r"[^\W\d][\w.:/-]*"
KEY = r"[^\s=,()\[\]{}'\"*][^=,()\[\]{}'\"]{0,200}?"
_VALUE = r"(?:['\"\[({+\-0-9]|(?:True|False|None|true|false|null)\b)"
_NEXT_KEY = re.compile(rf"\s*,\s*({KEY})\s*=(?!=)")
_NEXT_CALL = re.compile(
    rf"\s*(?:,\s*)?\)\s*(?:\]\s*[^\s'\",)\]]|(?:[,;]\s*)?{_NAME}\s*\(\s*(?:\)|{_NAME}\s*=))"
    r"|\s*,\s*\*\*\s*\{"
)
_AT_END = re.compile(r"\s*(?:,\s*)?\)\s*(?:[,;]\s*)?(?:\]\s*)?\Z")
_MAY_GO_ON = re.compile(
    rf"\s*(?:,\s*(?:\*{{1,2}}\s*|{KEY}\s*=?)?)?"
    rf"|\s*(?:,\s*)?\)\s*(?:\]\s*|(?:[,;]\s*)?(?:{_NAME}\s*(?:\(\s*(?:{_NAME}\s*)?)?)?)?"
)
_INSIDE_MAY_GO_ON = re.compile(r"\s*(?:,\s*[A-Za-z]{0,5})?")


class Place(Enum):
    """The construct that a string belongs to."""

    ARGUMENTS = auto()
    LIST = auto()
    TUPLE = auto()
    KEY = auto()
    VALUE = auto()


_INSIDE = {
    Place.LIST: re.compile(rf"\s*(?:\]|,\s*(?:{_VALUE}|\]))"),
    Place.TUPLE: re.compile(rf"\s*(?:\)|,\s*(?:{_VALUE}|\)))"),
    Place.KEY: re.compile(r"\s*:"),
    Place.VALUE: re.compile(r"\s*(?:\}|,\s*['\"}])"),
}


class Verdict(Enum):
    """Whether a quote ends its string."""

    ENDS = auto()
    INNER = auto()
    AMBIGUOUS = auto()
    OPEN = auto()  # more text is needed to decide


def judge(
    text: str, at: int, place: Place, *, inner: int, known: Collection[str], whole: bool
) -> Verdict:
    """Decide whether the quote before `at` ends its string.

    Args:
        inner: number of such quotes in the string so far.
        known: names of the tool's parameters.
        whole: whether `text` is complete.
    """
    if place is not Place.ARGUMENTS:
        follows = _INSIDE[place].match(text, at) is not None
        may_go_on = _INSIDE_MAY_GO_ON
        sure = place is Place.KEY
    else:
        key = _NEXT_KEY.match(text, at)
        if key is not None and key.end() == len(text) and not whole:
            return Verdict.OPEN
        sure = key is not None and key.group(1) in known
        follows = key is not None or _NEXT_CALL.match(text, at) is not None
        follows = follows or (whole and _AT_END.match(text, at) is not None)
        may_go_on = _MAY_GO_ON
    if follows:
        return Verdict.ENDS if sure or inner % 2 == 0 else Verdict.AMBIGUOUS
    if not whole and may_go_on.fullmatch(text, at):
        return Verdict.OPEN
    return Verdict.INNER
