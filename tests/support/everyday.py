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


def leave_out_slow(function: Any) -> bool:
    """Take slow cases out of a test function. Return whether none is left.

    pytest would make an object of each of these cases, some 14,000, and then deselect it.
    """
    marks: list[pytest.Mark] = getattr(function, "pytestmark", [])
    if any(mark.name == "slow" for mark in marks):
        return True
    for number, mark in enumerate(marks):
        if mark.name == "parametrize" and not isinstance(mark.kwargs.get("ids"), list | tuple):
            names, values, *others = mark.args
            cases = list(values)
            daily = [each for each in cases if not _is_slow(each)]
            if cases and not daily:
                return True
            marks[number] = pytest.mark.parametrize(names, daily, *others, **mark.kwargs).mark
    return False


def _is_slow(case: object) -> bool:
    return any(mark.name == "slow" for mark in getattr(case, "marks", ()))
