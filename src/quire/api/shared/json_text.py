"""Request bodies as JSON: finite numbers, no half surrogates, errors with positions."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterator

from pydantic_core import from_json

from quire.api.shared.field_names import field_name
from quire.core.errors import RequestError

# A whole pair, half of one, or an escaped backslash, behind which nothing is escaped.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}"
    rb"|(?P<half>u[dD][89a-fA-F][0-9A-Fa-f]{2})|\\)"
)


# A number that is too large for a float has an exponent of three digits, or at least 210 digits if
# its exponent is shorter. Two searches take half the time of one for both.
_LONG_EXPONENT, _MANY_DIGITS = re.compile(rb"[eE]\+?\d{3}"), re.compile(rb"\d{210}")
_MOST = sys.float_info.max
_MAX_DEPTH = 200
"""Deepest nesting of arrays and objects that pydantic's parser accepts."""
# Python and JavaScript write these for values that JSON cannot express.
_NO_NUMBER = re.compile(rb"NaN|Infinity")


class NotFinite(ValueError):
    """Raised if JSON text has a number that is not finite: NaN, infinity, or beyond float's range.

    Attributes:
        loc: keys and indices on the way to the first such number.
    """

    def __init__(self, loc: tuple[int | str, ...]) -> None:
        super().__init__("a number is out of range")
        self.loc = loc


def finite_json(body: bytes) -> object:
    """Return the value of a JSON text. `1e400` is valid JSON, but no number that an answer could
    repeat. A byte order mark, with which Windows' tools begin files, is ignored.

    Raises:
        NotFinite: a number in it is not finite.
        ValueError: it is not JSON.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError:
        if _NO_NUMBER.search(body) and (loc := _not_finite(from_json(body))) is not None:
            raise NotFinite(loc) from None
        raise
    if _LONG_EXPONENT.search(body) or _MANY_DIGITS.search(body):
        loc = _not_finite(value)
        if loc is not None:
            raise NotFinite(loc)
    return value


def _not_finite(value: object) -> tuple[int | str, ...] | None:
    """Return the path of the first number in a decoded JSON value that exceeds a float."""
    path: list[int | str] = []
    nested = [_members(value)]
    while nested:
        for name, node in nested[-1]:
            if isinstance(node, float | int) and not -_MOST <= node <= _MOST:
                return (*path, name)
            if isinstance(node, dict | list):
                path.append(name)
                nested.append(_members(node))
                break
        else:
            nested.pop()
            del path[-1:]
    return None


def _members(value: object) -> Iterator[tuple[int | str, object]]:
    if isinstance(value, dict):
        return iter(value.items())
    return iter(enumerate(value if isinstance(value, list) else ()))


def invalid_json(error: ValueError, said: str | None = None) -> RequestError:
    """Return the refusal of a body that `finite_json` does not read.

    Args:
        said: the error's message, if it is about another text than the client's.
    """
    if isinstance(error, NotFinite):
        name = field_name(error.loc)
        return RequestError(
            f"Invalid value for '{name}': the number is out of range; it must be finite.",
            param=name or None,
            code="invalid_json",
        )
    if "recursion limit" in str(error):
        return RequestError(
            f"The body is nested too deeply: at most {_MAX_DEPTH} arrays and objects may be "
            "nested.",
            code="invalid_json",
        )
    return RequestError(f"The body is not valid JSON: {said or error}.", code="invalid_json")


def check_not_empty(body: bytes) -> None:
    """Raise `RequestError` with code `invalid_json` if a request body is empty."""
    if not body.strip():
        raise RequestError("The body is empty; it must be JSON.", code="invalid_json")


def parse_json(body: bytes) -> object:
    """Parse a request body as JSON. NaN and infinities are not JSON.

    Raises:
        RequestError: with the position or the field at fault, code `invalid_json`.
    """
    check_not_empty(body)
    try:
        return finite_json(body)
    except ValueError:
        body = replace_invalid_utf8(body)
    try:
        return finite_json(body)
    except ValueError as error:
        raise invalid_json(error) from error


def replace_invalid_utf8(body: bytes) -> bytes:
    """Return JSON without half surrogates; every byte keeps its offset.

    A client that cuts a text may leave half of an emoji. JSON can spell it and UTF-8 cannot, so a
    replacement character takes its place.
    """
    return _ESCAPE.sub(lambda found: b"\\ufffd" if found["half"] else found[0], body)
