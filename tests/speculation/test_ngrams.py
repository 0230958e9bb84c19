"""Repeated tokens are found, the longest likeness first, in texts that stay and that grow."""

from __future__ import annotations

import random
from array import array

from quire.speculation.ngrams import FixedText, GrowingText, Place, continuation


def text(*tokens: int) -> array[int]:
    return array("i", tokens)


def test_the_longest_likeness_is_found_and_of_equal_ones_the_last() -> None:
    fixed = FixedText([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3, 6])
    assert fixed.find(text(8, 1, 2, 3)) == Place(9, 4)
    assert fixed.find(text(0, 1, 2, 3)) == Place(14, 3)
    assert fixed.find(text(2, 3, 6)) is None, "nothing follows there"
    assert fixed.find(text(1, 2)) is None
    assert FixedText([5]).find(text(1, 2, 3)) is None


def test_a_growing_text_finds_what_a_search_finds() -> None:
    dice = random.Random(1)
    growing, tokens = GrowingText(0), array("i")
    for _ in range(400):
        tokens.append(dice.randrange(3))
        found = growing.find(tokens)
        last = tokens[-3:]
        ends = [
            end for end in range(3, len(tokens)) if len(last) == 3 and tokens[end - 3 : end] == last
        ]
        assert (found is not None) is bool(ends)
        if found is not None:
            assert found.end in ends
            agreed = found.agreed
            assert tokens[found.end - agreed : found.end] == tokens[len(tokens) - agreed :]
    del tokens[50:]
    found = growing.find(tokens)
    assert found is None or found.end < 50


def test_a_cycle_goes_on_for_as_long_as_it_is_wanted() -> None:
    tokens = text(1, 2, 3, 1, 2, 3)
    assert continuation(tokens, 3, 8, repeats=True) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert continuation(tokens, 3, 8, repeats=False) == (1, 2, 3)
