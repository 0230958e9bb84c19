"""KV blocks on disk: an SQLite file under a byte limit, with least recently used eviction.

Why not LMDB: it reads through a memory map and trusts its own pages. Measured with lmdb 3.0.0: a
truncated file ends the process with SIGBUS, and flipped bits in the tree abort it now and then.
SQLite reads with read(2), checks what it reads and says "malformed", so that a bad file costs the
pages in it and nothing else. Values carry a checksum on top, over all that they claim to be.

The file's size is the sum of SQLite pages of 16 KiB: values, keys, trees and free space, everything
counted. `max_bytes` bounds that, the rollback journal and the lock file together.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path

from quire.cache.disk_file import (
    ROWS_A_COMMIT,
    SQL_PAGE,
    VERSION,
    DiskFile,
    file_in,
)
from quire.cache.disk_sql import Damaged, StoreBusy, StoreError, StoreFull, lock_folder
from quire.core.figures import size

_JOURNAL_PAGES = 96
"""SQLite pages that are reserved for the journal."""
_DIGEST = 16
"""Bytes of the checksum of a value."""
MIN_BYTES = 4 << 20
"""Smallest size limit of a folder."""


class DiskStore:
    """Values by key, of several models, in one folder. For one thread; holds the folder's lock.

    Args:
        folder: the folder, created if missing.
        max_bytes: the most that the folder's files may take together.
        fingerprint: fingerprint of the model whose values are read and written.
        name: the model's name, for people.
        say: called with messages for the user: damage found, blocks deleted to fit a lower limit.
        clock: returns seconds since the epoch.

    Raises:
        StoreError: another process has the folder, or it cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        fingerprint: str,
        name: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise StoreError(
                f"kv-disk-size is {max_bytes:,} bytes, but must be at least {MIN_BYTES:,}"
            )
        self.folder = folder
        self._fingerprint = fingerprint
        self._say, self._clock = say, clock
        reserve = _JOURNAL_PAGES + max_bytes // SQL_PAGE // 512 + 1  # journal; lock file
        self._max_pages = max_bytes // SQL_PAGE - reserve
        self._order: OrderedDict[bytes, int] = OrderedDict()
        self._touched: dict[bytes, tuple[int, int]] = {}
        """Uses not yet written to the file: (when, hits)."""
        self._next = 1
        """Counter of uses and values, by which they are ordered."""
        self._file = DiskFile(folder, fingerprint, name)
        self._lock = lock_folder(folder)
        try:
            self._open()
        except BaseException:
            self._file.close()
            os.close(self._lock)
            raise

    # -- what is there -------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    @property
    def file_bytes(self) -> int:
        """Size of the file, including free space in it."""
        return self._file.pages * SQL_PAGE

    # -- values --------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        """Return the value, verified; None if it is missing. A damaged one is removed."""
        id = self._order.get(key)
        if id is None:
            return None
        try:
            digest, value = self._file.body(id)
        except Damaged as damage:
            self._rebuild(str(damage))
            return None
        if isinstance(value, bytes) and digest == checksum(self._fingerprint, key, value):
            self.touch(key, hits=1)
            return value
        self._say("a cached KV block failed its checksum and was removed")
        try:
            self.delete([key])
        except (StoreFull, StoreBusy):
            del self._order[key]  # in the file it stays until the next start
            self._touched.pop(key, None)
        return None

    def put(self, values: Sequence[tuple[bytes, bytes]]) -> None:
        """Write values, evicting older ones. Keys that exist are skipped.

        Raises:
            StoreFull: the disk has no room.
        """
        for start in range(0, len(values), ROWS_A_COMMIT):
            batch = [(k, v) for k, v in values[start : start + ROWS_A_COMMIT] if k not in self]
            try:
                self._put(dict(batch))
            except Damaged as damage:
                self._rebuild(str(damage))

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove values, if they exist."""
        try:
            self._delete([key for key in keys if key in self._order])
        except Damaged as damage:
            self._rebuild(str(damage))

    def touch(self, key: bytes, hits: int = 0) -> None:
        """Mark the value as the most recently used. This is written with the next values."""
        if key in self._order:
            self._order.move_to_end(key)
            _, before = self._touched.pop(key, (0, 0))
            self._touched[key] = (self._next, before + hits)
            self._next += 1

    def flush(self) -> None:
        """Write the pending uses, so that a restart knows the order."""
        try:
            while self._touched:
                self._write_touched()
        except Damaged as damage:
            self._rebuild(str(damage))

    def close(self) -> None:
        """Flush and unlock the folder. Errors are ignored."""
        with suppress(StoreError):
            self.flush()
        self._file.close()
        os.close(self._lock)

    def clear(self, fingerprint: str | None = None) -> int:
        """Remove one model's values, or all; shrink the file. Return how many there were."""
        try:
            keys = self._file.keys_of(fingerprint)
            self._delete(keys)
            self._file.remove_unused_models()
            self._file.shrink(0)
            return len(keys)
        except Damaged as damage:
            count = len(self)
            self._rebuild(str(damage))
            return count

    # -- inside --------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self._file.open()
            for id, key, used in self._file.entries():
                self._order[key] = id
                self._next = max(self._next, id + 1, used + 1)
        except Damaged as damage:
            self._rebuild(str(damage))
        self._fit()

    def _rebuild(self, why: str) -> None:
        """Replace a file that cannot be trusted by an empty one: it was only a cache."""
        self._say(f"the cache file is damaged ({why}) and was emptied")
        self._order.clear()
        self._touched.clear()
        self._file.renew(self._max_pages)

    def _fit(self) -> None:
        """Shrink a file from a higher limit to this one."""
        try:
            before, pages = len(self._order), self._file.pages
            if pages > self._max_pages:
                self._evict(0)
                self._file.shrink(self._max_pages)
                self._say(
                    f"the size limit was lowered: {before - len(self._order)} blocks, least "
                    f"recently used, were deleted; the file went from {size(pages * SQL_PAGE)} to "
                    f"{size(self.file_bytes)}"
                )
            self._file.limit(self._max_pages)
        except Damaged as damage:
            self._rebuild(str(damage))

    def _put(self, batch: dict[bytes, bytes]) -> None:
        need = sum(-(-len(value) // (SQL_PAGE - 64)) + 2 for value in batch.values())
        if need > self._max_pages - 8:
            for key, value in batch.items() if len(batch) > 1 else ():
                self._put({key: value})
            return
        try:
            self._evict(need)
            self._insert(batch)
        except StoreFull:
            # The disk is full, not the store: from here it lives within what it has.
            self._max_pages = max(self._file.pages, _JOURNAL_PAGES)
            self._file.limit(self._max_pages)
            self._say(f"the disk is full; the cache file stays at {size(self.file_bytes)}")
            if need > self._max_pages - 8:
                raise
            self._evict(need)
            self._insert(batch)

    def _insert(self, batch: dict[bytes, bytes]) -> None:
        first = self._next
        rows = [
            (id, key, checksum(self._fingerprint, key, value), value)
            for id, (key, value) in enumerate(batch.items(), first)
        ]
        self._file.insert(rows, self._clock())
        self._next = first + len(batch)
        for id, key, _, _ in rows:
            self._order[key] = id
        if self._touched:
            self._write_touched()

    def _evict(self, need: int) -> None:
        """Remove the least recently used values until `need` SQLite pages are free within the
        limit.
        """
        file = self._file
        while self._max_pages - file.pages + file.free_pages < need:
            if not self._order:
                raise Damaged("space is lost")
            self._delete(list(islice(self._order, 4)))

    def _delete(self, keys: list[bytes]) -> None:
        for start in range(0, len(keys), ROWS_A_COMMIT):
            batch = keys[start : start + ROWS_A_COMMIT]
            self._file.remove([self._order[key] for key in batch])
            for key in batch:
                del self._order[key]
                self._touched.pop(key, None)

    def _write_touched(self) -> None:
        """Write the pending uses of some values, earliest first."""
        keys = list(islice(self._touched, ROWS_A_COMMIT))
        uses = {self._order[key]: self._touched.pop(key) for key in keys}
        self._file.write_uses(uses, self._clock())


def checksum(fingerprint: str, key: bytes, value: bytes) -> bytes:
    """Compute the checksum of a value, its model, its key and the format version."""
    digest = sha256(f"{VERSION}\x00{fingerprint}\x00".encode())
    digest.update(len(key).to_bytes(2, "little") + key)
    digest.update(value)
    return digest.digest()[:_DIGEST]


def clear(folder: Path, fingerprint: str | None = None) -> int:
    """Remove the values of one model, or of all, from a folder that no server uses.

    Raises:
        StoreError: there is no store, or a server uses it.
    """
    file_in(folder)
    store = DiskStore(folder, 1 << 44, fingerprint="", name="", say=lambda message: None)
    try:
        return store.clear(fingerprint)
    finally:
        store.close()
