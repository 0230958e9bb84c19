"""Runs of digits and blanks in JSON come to an end."""

from __future__ import annotations

import numpy as np
import pytest

from quire.constraints.masks import mask_of
from quire.constraints.runs import MAX_BLANKS, MAX_DIGITS, LeadingTokens, RunLimit

PIECES = [b"1", b"23", b",", b'"', b" ", b"\\n", b"\\", b"n", b"a", b".", b"", b'\\"']
ALL = mask_of(range(len(PIECES)), len(PIECES))


def told(text: bytes, mask: np.ndarray = ALL) -> set[bytes]:
    """Return the characters that the run limits allow after a text."""
    runs = RunLimit(LeadingTokens(PIECES.__getitem__, len(PIECES)))
    while text:
        number = max((n for n, p in enumerate(PIECES) if p and text.startswith(p)), key=len_of)
        runs.accept(number)
        text = text[len(PIECES[number]) :]
    left = runs.limited(mask)
    size = len(PIECES)
    return {PIECES[n] for n in range(size) if (left & mask_of((n,), size)).any()}


def len_of(number: int) -> int:
    return len(PIECES[number])


EVERYTHING = set(PIECES)


@pytest.mark.parametrize("before", [b"", b"1.", b'"a",', b'"\\"",'])
def test_digits_end_outside_of_strings(before: bytes) -> None:
    assert told(before + b"1" * (MAX_DIGITS - 1)) == EVERYTHING
    assert told(before + b"1" * MAX_DIGITS) == EVERYTHING - {b"1", b"23"}


def test_digits_go_on_within_strings_and_where_nothing_else_may_come() -> None:
    assert told(b'"' + b"1" * 200) == EVERYTHING
    only = mask_of((0, 1), len(PIECES))
    assert told(b"1" * 200, only) == {b"1", b"23"}


@pytest.mark.parametrize("blank", [b" ", b"\\n"])
def test_blanks_end_within_strings(blank: bytes) -> None:
    assert told(b'"' + blank * (MAX_BLANKS - 1)) == EVERYTHING
    assert told(b'"a' + blank * MAX_BLANKS) == EVERYTHING - {b" ", b"\\n"}
    assert told(b'"' + blank * MAX_BLANKS + b"a") == EVERYTHING
    assert told(blank * 2) == EVERYTHING
