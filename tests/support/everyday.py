"""Chooses the cases of a matrix that run every day; the slow run has all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def everyday(cases: Iterable[Any], daily: Callable[..., bool]) -> list[Any]:
    """Return the cases as parameters; those that are not `daily` are marked slow.

    A case that is a tuple is the values of several parameters, as `itertools.product` gives them.
    """
    taken = [each if isinstance(each, tuple) else (each,) for each in cases]
    return [
        pytest.param(*values, marks=() if daily(*values) else pytest.mark.slow) for values in taken
    ]
