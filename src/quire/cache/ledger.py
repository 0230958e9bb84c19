"""Who holds which page. Pure Python: the pools on the device follow what is decided here.

The fate of a page:

    free --allocate--> live (refs > 0) --release--> free, or if the prefix index holds it:
                                                    kept --evict--> free

All pools draw on one budget. A pool claims the bytes of its capacity, used or not, so what the
ledger counts is what the arrays hold. Pools grow while there is unclaimed budget, then evict what
they keep (least recently used first), then take capacity from other pools that can spare it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from quire.cache.disk_page import HostPage
from quire.cache.specs import KVFormat

_FIRST_PAGES = 16


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Names a pool: one group of layers in one format.

    Attributes:
        open: the pool of a packed format's pages that still fill, stored plain.
    """

    group: int
    format: KVFormat
    open: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.group, self.format, self.open)))

    def __hash__(self) -> int:  # asked for whenever a page changes hands
        return self._hash


class Holder(Protocol):
    """Keeps pages beyond the life of the sequences that made them."""

    def name(self, page: Page) -> bytes | None:
        """A name that says what is in the page and outlives the process; None: not complete."""
        ...

    def lost_with(self, page: Page) -> Iterable[Page]:
        """The pages that go when this one is forgotten, itself included."""
        ...

    def forget(self, page: Page) -> None:
        """The page is being evicted; drop every reference to it."""
        ...


class Page:
    """One page of one pool. `id` changes only when the pool shrinks."""

    __slots__ = ("holder", "id", "pool", "refs", "stamp")

    def __init__(self, pool: PoolKey, id: int) -> None:
        self.pool = pool
        self.id = id
        self.refs = 1
        self.holder: Holder | None = None
        self.stamp = 0

    def __repr__(self) -> str:
        return f"Page({self.pool.group}, {self.pool.format.name}, id={self.id}, refs={self.refs})"


@dataclass(frozen=True, slots=True)
class Resize:
    """A pool's arrays get `capacity` pages, after `moves` (from id, to id) within them."""

    pool: PoolKey
    capacity: int
    moves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Spill:
    """A page is about to lose its place `id`; its contents go to the disk tier as `name`."""

    pool: PoolKey
    id: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Restore:
    """A page at `id` gets `contents` that the disk tier read."""

    pool: PoolKey
    id: int
    contents: HostPage


Change = Resize | Spill | Restore


@dataclass(slots=True)
class _Book:
    """One pool's pages: `pages[id]` is the page that has the id, None where it is free."""

    key: PoolKey
    page_bytes: int
    pages: list[Page | None] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    kept: OrderedDict[Page, None] = field(default_factory=OrderedDict)

    @property
    def capacity(self) -> int:
        return len(self.pages)


class Ledger:
    """Hands out pages within a budget.

    Args:
        budget: bytes that all pools together may claim.
        page_bytes: bytes of a page of a pool.
    """

    def __init__(self, budget: int, page_bytes: Callable[[PoolKey], int]) -> None:
        self.budget = budget
        self.claimed = 0
        self.epoch = 0
        """Counts the times that page ids changed; caches of ids compare it."""
        self.wants: Callable[[bytes, int], bool] | None = None
        """Whether the disk tier takes a page of that name, so many bytes with those promised
        before; None: there is no disk tier."""
        self.page_bytes = page_bytes
        self.returned = 0
        """Counts the pages that lost their last user; only then is there more room than before."""
        self._books: dict[PoolKey, _Book] = {}
        self._changes: list[Change] = []
        self._spilled = 0
        self._clock = 0

    # -- what a sequence does ------------------------------------------------------------------

    def allocate(self, key: PoolKey, count: int) -> list[Page] | None:
        """`count` pages with one reference each, or None when there is no room for all of them."""
        book = self._book(key)
        if len(book.free) < count and not self._make_room(book, count):
            return None
        pages = []
        for _ in range(count):
            page = Page(book.key, book.free.pop())
            book.pages[page.id] = page
            pages.append(page)
        return pages

    def can_allocate(self, wanted: dict[PoolKey, int]) -> bool:
        """Whether all of `wanted` would fit if everything kept were evicted."""
        spare = self.budget - self.claimed
        need = 0
        for key, count in wanted.items():
            book = self._book(key)
            need += max(0, count - len(book.free)) * book.page_bytes
        for key, book in self._books.items():
            surplus = max(0, len(book.free) - wanted.get(key, 0))
            spare += (surplus + len(book.kept)) * book.page_bytes
        return need <= spare

    def retain(self, page: Page) -> None:
        """One more user of the page."""
        if page.refs == 0:
            del self._books[page.pool].kept[page]
        page.refs += 1

    def release(self, page: Page) -> None:
        """One user less. The last one leaves it kept if the index holds it, else free."""
        assert page.refs > 0, f"{page} released more often than retained"
        page.refs -= 1
        if page.refs == 0:
            self.returned += 1
            if page.holder is None:
                self._free(page)
            else:
                self._stamp(page)
                self._books[page.pool].kept[page] = None

    def release_all(self, pages: Iterable[Page | None]) -> None:
        """Releases the last pages first, so that leaves are evicted before what they hang on."""
        for page in reversed(list(pages)):
            if page is not None:
                self.release(page)

    # -- what the index does -------------------------------------------------------------------

    def keep(self, page: Page, holder: Holder) -> None:
        """From now on the page outlives its users."""
        page.holder = holder

    def drop(self, page: Page) -> None:
        """The index lets go of the page; it is free as soon as nobody uses it."""
        page.holder = None
        if page.refs == 0:
            del self._books[page.pool].kept[page]
            self._free(page)

    def restore(self, page: Page, contents: HostPage) -> None:
        """The page gets what the disk tier kept of it, before the next step."""
        self._changes.append(Restore(page.pool, page.id, contents))

    def spill_kept(self) -> None:
        """Offers what is kept to the disk tier as if evicted: what was used last, if not all."""
        kept = [page for book in self._books.values() for page in book.kept]
        kept.sort(key=lambda page: page.stamp)
        first = len(self._changes)
        for page in reversed(kept):
            self._spill(page)
        self._changes[first:] = reversed(self._changes[first:])
        for page in kept:  # what the disk has already is told again, in the order of use
            name = page.holder.name(page) if page.holder is not None else None
            if name is not None and self.wants is not None:
                self.wants(name, 0)

    def touch(self, page: Page) -> None:
        """The page was wanted; it is now the most recently used."""
        if page.refs == 0:
            self._stamp(page)
            self._books[page.pool].kept.move_to_end(page)

    # -- what the engine reads -----------------------------------------------------------------

    def reset(self) -> None:
        """Forgets every page; the pools do the same. Nobody may hold one any more."""
        self._books.clear()
        self._changes.clear()
        self._spilled = 0
        self.claimed = 0
        self.epoch += 1

    def take_changes(self) -> tuple[Change, ...]:
        """What the arrays must do before the next step, in order. Taken once."""
        changes, self._changes = tuple(self._changes), []
        self._spilled = 0
        return changes

    def usage(self) -> dict[PoolKey, tuple[int, int, int]]:
        """For each pool: bytes that sequences hold, bytes kept for reuse, bytes claimed."""
        table = {}
        for key, book in self._books.items():
            kept = len(book.kept)
            live = book.capacity - len(book.free) - kept
            size = book.page_bytes
            table[key] = (live * size, kept * size, book.capacity * size)
        return table

    def kept_pages(self) -> int:
        """How many pages are kept for reuse and used by nobody."""
        return sum(len(book.kept) for book in self._books.values())

    def live_pages(self) -> int:
        """How many pages somebody uses."""
        return sum(b.capacity - len(b.free) - len(b.kept) for b in self._books.values())

    # -- how room is made ----------------------------------------------------------------------

    def _book(self, key: PoolKey) -> _Book:
        book = self._books.get(key)
        if book is None:
            book = self._books[key] = _Book(key, max(1, self.page_bytes(key)))
        return book

    def _stamp(self, page: Page) -> None:
        self._clock += 1
        page.stamp = self._clock

    def _free(self, page: Page) -> None:
        book = self._books[page.pool]
        book.pages[page.id] = None
        book.free.append(page.id)

    def _make_room(self, book: _Book, wanted: int) -> bool:
        """Brings a pool's free pages to `wanted`, or changes nothing and says no."""
        if not self.can_allocate({book.key: wanted}):
            return False
        first = 1 if book.key.open else _FIRST_PAGES  # a sequence has one open page, many others
        self._grow(book, max(wanted - len(book.free), book.capacity, first))
        while len(book.free) < wanted and book.kept:
            self._evict(next(iter(book.kept)))
        if len(book.free) < wanted:
            self._take_from_others(book, (wanted - len(book.free)) * book.page_bytes)
            self._grow(book, wanted - len(book.free))
        return len(book.free) >= wanted

    def _grow(self, book: _Book, wish: int) -> None:
        room = (self.budget - self.claimed) // book.page_bytes
        extra = min(wish, room)
        if extra > 0:
            book.free.extend(range(book.capacity + extra - 1, book.capacity - 1, -1))
            book.pages.extend([None] * extra)
            self.claimed += extra * book.page_bytes
            self._changes.append(Resize(book.key, book.capacity))

    def _evict(self, page: Page) -> None:
        assert page.holder is not None, "what nobody holds is free, not kept"
        for lost in page.holder.lost_with(page) if self.wants is not None else ():
            self._spill(lost)
        page.holder.forget(page)
        self.drop(page)

    def _spill(self, page: Page) -> None:
        name = page.holder.name(page) if page.holder is not None and page.refs == 0 else None
        if name is None or self.wants is None:
            return
        size = self._spilled + self._books[page.pool].page_bytes
        if self.wants(name, size):
            self._spilled = size
            self._changes.append(Spill(page.pool, page.id, name))

    def _take_from_others(self, book: _Book, need: int) -> None:
        """Makes `need` unclaimed bytes: others evict what was used least recently, and shrink."""
        others = [other for other in self._books.values() if other is not book]
        spare = self.budget - self.claimed
        while spare + sum(len(b.free) * b.page_bytes for b in others) < need:
            oldest = [next(iter(other.kept)) for other in others if other.kept]
            if not oldest:
                return
            self._evict(min(oldest, key=lambda page: page.stamp))
        for other in sorted(others, key=lambda b: len(b.free) * b.page_bytes, reverse=True):
            if spare < need and other.free:
                count = min(len(other.free), -(-(need - spare) // other.page_bytes))
                # Half of what is free at least: a shrink copies the whole pool, so few big ones.
                spare += self._shrink(other, max(count, len(other.free) // 2))

    def _shrink(self, book: _Book, count: int) -> int:
        """Takes `count` free pages off a pool's end, moving pages down. Returns the bytes freed."""
        capacity = book.capacity - count
        book.free.sort(reverse=True)
        low = [id for id in book.free if id < capacity]
        moves = []
        for page in book.pages[capacity:]:
            if page is not None:
                target = low.pop()
                moves.append((page.id, target))
                page.id = target
                book.pages[target] = page
        del book.pages[capacity:]
        book.free = low
        self.claimed -= count * book.page_bytes
        self.epoch += 1
        self._changes.append(Resize(book.key, capacity, tuple(moves)))
        return count * book.page_bytes
