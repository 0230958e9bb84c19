"""Durations of requests, as Ollama's clients write them."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(value: object) -> object:
    """Return the seconds of Ollama's `keep_alive`, a number or a duration in Go's notation.

    A negative number means for ever.

    Raises:
        ValueError: a string that is not a duration.
    """
    if isinstance(value, bool) or not isinstance(value, str):
        seconds = value
    else:
        parts = _DURATION.findall(value)
        whole = "".join(number + unit for number, unit in parts)
        if value.lstrip("+-") not in (whole, "0") or not value.lstrip("+-"):
            raise ValueError('a number of seconds or a duration such as "10m" is expected')
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        seconds = -seconds if value.startswith("-") else seconds
    return math.inf if isinstance(seconds, int | float) and seconds < 0 else seconds


KeepAlive = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_seconds)]
