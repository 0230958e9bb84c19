"""Who gets which page, what is evicted for it, and that the budget holds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from quire.cache.ledger import Change, Ledger, Page, PoolKey, Resize, Spill
from quire.cache.specs import KVFormat

KEY = PoolKey(0, KVFormat())
OTHER = PoolKey(1, KVFormat())
PACKED = PoolKey(0, KVFormat("page", 4, 4))
BYTES = {KEY: 10, OTHER: 25, PACKED: 3}


class Keeper:
    """Holds pages, each by itself, and remembers in which order they were evicted."""

    def __init__(self) -> None:
        self.evicted: list[Page] = []

    def name(self, page: Page) -> bytes | None:
        return b"page %d" % page.id

    def lost_with(self, page: Page) -> Iterable[Page]:
        return [page]

    def forget(self, page: Page) -> None:
        self.evicted.append(page)


def make(pages: int) -> Ledger:
    """A ledger with room for so many pages of `KEY`."""
    return Ledger(pages * BYTES[KEY], BYTES.__getitem__)


def take(ledger: Ledger, count: int, key: PoolKey = KEY) -> list[Page]:
    pages = ledger.allocate(key, count)
    assert pages is not None
    return pages


def keep(ledger: Ledger, pages: list[Page]) -> Keeper:
    """Gives pages to a holder, then lets go of them, first to last."""
    keeper = Keeper()
    for page in pages:
        ledger.keep(page, keeper)
        ledger.release(page)
    return keeper


def capacities(changes: Iterable[Change]) -> dict[PoolKey, int]:
    """What the arrays end up with."""
    return {change.pool: change.capacity for change in changes if isinstance(change, Resize)}


def test_pages_of_a_pool_have_ids_of_their_own_within_its_capacity() -> None:
    ledger = make(40)
    ids = [page.id for page in take(ledger, 3) + take(ledger, 30)]
    assert sorted(ids) == list(range(33))
    assert capacities(ledger.take_changes())[KEY] >= 33
    assert ledger.take_changes() == ()


def test_no_room_changes_nothing() -> None:
    ledger = make(4)
    take(ledger, 3)
    before = ledger.usage(), ledger.take_changes()
    assert ledger.allocate(KEY, 2) is None
    assert not ledger.can_allocate({KEY: 2})
    assert (ledger.usage(), ledger.take_changes()) == (before[0], ())


def test_a_page_is_free_when_its_last_user_lets_go() -> None:
    ledger = make(2)
    pages = take(ledger, 2)
    ledger.retain(pages[0])
    ledger.release_all(pages)
    assert ledger.live_pages() == 1
    assert ledger.allocate(KEY, 2) is None
    ledger.release(pages[0])
    assert len(take(ledger, 2)) == 2


def test_what_is_kept_goes_least_recently_used_first() -> None:
    ledger = make(3)
    first, second, third = pages = take(ledger, 3)
    keeper = keep(ledger, pages)
    assert ledger.kept_pages() == 3
    ledger.touch(first)
    take(ledger, 2)
    assert keeper.evicted == [second, third]
    ledger.retain(first)
    assert ledger.allocate(KEY, 1) is None


def test_a_page_in_use_outlives_its_holder() -> None:
    ledger = make(1)
    (page,) = take(ledger, 1)
    ledger.keep(page, Keeper())
    ledger.drop(page)
    assert ledger.live_pages() == 1
    ledger.release(page)
    assert (ledger.live_pages(), ledger.kept_pages()) == (0, 0)


def test_capacity_moves_to_the_pool_that_needs_it() -> None:
    ledger = make(10)
    keeper = keep(ledger, take(ledger, 10))
    ledger.take_changes()
    take(ledger, 2, OTHER)
    assert len(keeper.evicted) == 5
    changes = ledger.take_changes()
    assert capacities(changes) == {KEY: 5, OTHER: 2}
    assert ledger.claimed == 100


def test_shrinking_moves_pages_that_are_in_use_and_tells_from_where() -> None:
    ledger = make(6)
    pages = take(ledger, 6)
    contents = {page.id: page for page in pages}
    ledger.release_all(pages[:5])
    ledger.take_changes()
    epoch = ledger.epoch
    take(ledger, 10, PACKED)
    (shrunk,) = [c for c in ledger.take_changes() if isinstance(c, Resize) and c.pool == KEY]
    for source, target in shrunk.moves:
        contents[target] = contents.pop(source)
    assert contents[pages[5].id] is pages[5]
    assert pages[5].id < shrunk.capacity
    assert ledger.epoch > epoch


def test_several_pools_fit_together_or_not_at_all() -> None:
    ledger = make(10)
    take(ledger, 2)
    assert ledger.can_allocate({KEY: 3, OTHER: 2})
    assert not ledger.can_allocate({KEY: 4, OTHER: 2})
    assert len(take(ledger, 3)) + len(take(ledger, 2, OTHER)) == 5


def test_an_evicted_page_is_offered_to_the_disk_before_its_place_is_used_again() -> None:
    ledger = make(2)
    offered: list[tuple[bytes, int]] = []

    def wants(name: bytes, size: int) -> bool:
        offered.append((name, size))
        return name != b"page 1"

    ledger.wants = wants
    keep(ledger, take(ledger, 2))
    ledger.take_changes()
    take(ledger, 2)
    assert ledger.take_changes() == (Spill(KEY, 0, b"page 0"),)
    assert offered == [(b"page 0", 10), (b"page 1", 20)]


@pytest.mark.parametrize("count", [1, 7])
def test_pools_that_nobody_uses_give_all_they_have(count: int) -> None:
    ledger = Ledger(75, BYTES.__getitem__)
    keep(ledger, take(ledger, count))
    take(ledger, 3, OTHER)
    assert ledger.usage()[KEY] == (0, 0, 0)


def test_after_a_reset_everything_is_there_again() -> None:
    ledger = make(3)
    take(ledger, 3)
    ledger.reset()
    assert (ledger.claimed, ledger.take_changes()) == (0, ())
    assert len(take(ledger, 3)) == 3
