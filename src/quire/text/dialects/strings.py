"""Lark terminals for strings that a schema constrains and a dialect writes without quotes.

For JSON strings llguidance does this itself. A schema's pattern may match anywhere in a string
(ECMA-262), so it is turned into an expression that matches the whole string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from quire.text.dialects.base import Schema
from quire.text.dialects.values import resolve

ANY = "/(?s:.*)/"
"""The terminal of an unconstrained string."""
_MAX_DEPTH = 8

_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?"
    "([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_SPAN_TIME = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_SPAN_DATE = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _ipv6() -> str:
    """Return a pattern of IPv6 addresses: eight groups, or fewer around one `::` (RFC 4291)."""
    forms = [f"({_GROUP}:){{7}}{_GROUP}", f"::({_GROUP}(:{_GROUP}){{0,6}})?"]
    for left in range(1, 8):
        right = f"({_GROUP}(:{_GROUP}){{0,{6 - left}}})?" if left < 7 else ""
        forms.append(f"{_GROUP}(:{_GROUP}){{{left - 1}}}::{right}")
    return "|".join(forms)


_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P({_SPAN_DATE}({_SPAN_TIME})?|{_SPAN_TIME}|[0-9]+W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
    "ipv6": _ipv6(),
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
"""Patterns by format: RFC 3339 (dates, durations), 5321 (mailboxes without quotes), 1123, 4291,
3986, 9562.
"""


def text_of(schema: Schema, root: Schema, lost: Callable[[str], None], depth: int = 0) -> str:
    """Return a lark expression for the text of strings that satisfy a schema.

    Args:
        lost: called with each keyword that is not enforced.
    """
    schema = resolve(schema, root)
    if "const" in schema:
        return _literals([schema["const"]])
    if "enum" in schema:
        return _literals(schema["enum"])
    terms: list[str] = []
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        whole = anchored_pattern(pattern)
        terms += [_regex(whole)] if whole is not None else []
        if whole is None:
            lost("pattern")
    known = _FORMATS.get(schema.get("format", ""))
    terms += [_regex(known)] if known is not None else []
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    if shortest or longest != "":
        terms.append(f"/(?s:.{{{shortest},{longest}}})/")
    for word, joint in (("anyOf", " | "), ("oneOf", " | "), ("allOf", " & ")):
        options = schema.get(word)
        if options and depth < _MAX_DEPTH:
            texts = [text_of(option, root, lost, depth=depth + 1) for option in options]
            terms.append(f"({joint.join(texts)})")
        elif options:
            lost(word)
    return " & ".join(terms) or ANY


def _literals(choices: list[Any]) -> str:
    return f"({' | '.join(json.dumps(str(each), ensure_ascii=False) for each in choices)})"


def _regex(pattern: str) -> str:
    """Return a regular expression in lark's syntax, with slashes and line ends escaped."""
    slashes = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
    return f"/{slashes}/".replace("\n", r"\n").replace("\r", r"\r")


def anchored_pattern(pattern: str) -> str | None:
    """Return an expression for the whole strings in which `pattern` is found.

    Return None if the pattern has anchors other than at the ends of its outermost alternatives.
    """
    branches: list[str] = []
    for branch in _branches(pattern):
        starts, ends = branch.startswith("^"), _ends(branch)
        inner = branch[starts : len(branch) - ends]
        if any(token in ("^", "$") for token in _tokens(inner)):
            return None
        branches.append(("" if starts else "(?s:.*)") + f"({inner})" + ("" if ends else "(?s:.*)"))
    return "|".join(branches)


_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""An escape, a character class, or one character."""


def _tokens(pattern: str) -> list[str]:
    return _TOKEN.findall(pattern)


def _ends(branch: str) -> bool:
    return bool(branch) and _tokens(branch)[-1] == "$"


def _branches(pattern: str) -> list[str]:
    """Split a pattern into its outermost alternatives."""
    found, depth = [""], 0
    for token in _tokens(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return found
