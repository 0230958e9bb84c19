"""Turns by key: who has used least goes next, and idleness saves nothing up."""

from __future__ import annotations

from quire.core.turns import Shares, Turns


def order(turns: Turns[str, int], cost: float = 1.0) -> str:
    """Takes all, each for `cost`; the keys in the order in which they came."""
    keys = ""
    while (taken := turns.take()) is not None:
        key, _ = taken
        turns.shares.charge(key, cost)
        turns.release(key)
        keys += key
    return keys


def test_keys_alternate_however_much_each_asks() -> None:
    turns: Turns[str, int] = Turns()
    for number in range(6):
        turns.add("b", number)
    for number in range(2):
        turns.add("a", number)
    assert len(turns) == 8
    assert order(turns) == "bababbbb"
    assert turns.take() is None


def test_items_of_a_key_keep_their_order_and_may_go_first() -> None:
    turns: Turns[str, int] = Turns()
    turns.add("a", 1)
    turns.add("a", 2)
    turns.add("a", 0, first=True)
    assert [turns.take(), turns.next(), turns.take()] == [("a", 0), ("a", 1), ("a", 1)]
    assert turns.discard("a", 2)
    assert not turns.discard("a", 2)
    assert not turns


def test_what_is_costly_waits_longer_for_its_next_turn() -> None:
    turns: Turns[str, int] = Turns()
    for number in range(4):
        turns.add("a", number)
        turns.add("b", number)
    keys = ""
    for _ in range(6):
        taken = turns.take()
        assert taken is not None
        turns.shares.charge(taken[0], 3.0 if taken[0] == "b" else 1.0)
        turns.release(taken[0])
        keys += taken[0]
    assert keys == "abaaab"


def test_a_key_that_comes_back_has_saved_nothing_up_and_owes_nothing_twice() -> None:
    shares: Shares[str] = Shares()
    shares.activate("a")
    shares.charge("a", 100.0)
    shares.activate("b")
    assert shares.used("b") == 100.0  # as much as the least used of those who are there
    shares.charge("b", 5.0)
    shares.deactivate("b")
    shares.charge("a", 50.0)
    shares.activate("b")
    assert shares.used("b") == 150.0
    assert shares.ordered(["a", "b", "c"]) == ["a", "b", "c"]
    shares.charge("a", 1.0)
    assert shares.ordered(["a", "c"]) == ["c", "a"]


def test_a_key_that_used_much_yields_to_a_newcomer_but_not_for_ever() -> None:
    turns: Turns[str, int] = Turns()
    turns.add("b", 0)
    assert turns.take() == ("b", 0)
    turns.add("a", 1)  # as long as b's item is out, both are active
    turns.add("b", 2)
    turns.shares.charge("b", 2.0)
    assert turns.next() == ("a", 1)
    turns.shares.charge("a", 3.0)
    assert turns.next() == ("b", 2)
