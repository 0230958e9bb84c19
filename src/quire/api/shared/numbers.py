"""Numbers as clients of lenient servers write them: `"0.7"`, or `5.0` for an integer."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_DECIMAL = re.compile(r"-?\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?")
_EXACT = 2.0**53


def _number(value: object) -> object:
    """Return the number that a string spells, or `value` itself. `"NaN"` stays a string."""
    if not isinstance(value, str) or not _DECIMAL.fullmatch(text := value.strip()):
        return value
    return float(text) if any(each in ".eE" for each in text) else int(text)


def _integer(value: object) -> object:
    """Return the integer that a string or a float stands for, or `value` itself.

    A float from 2^53 on stays one, since it may not be the integer that the client wrote.
    """
    value = _number(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


Number = Annotated[float, BeforeValidator(_number)]
"""A number; a string that spells one is taken, as vLLM takes it. A boolean is none."""

Integer = Annotated[int, BeforeValidator(_integer)]
"""An integer; `5.0` and strings that spell one are taken, as vLLM takes them."""
