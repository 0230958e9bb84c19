"""Pages on disk: an SQLite file under a byte limit, least recently used out first.

Why not LMDB: it reads through a memory map and trusts its own pages. Measured with lmdb 3.0.0: a
truncated file ends the process with SIGBUS, and flipped bits in the tree abort it now and then.
SQLite reads with read(2), checks what it reads and says "malformed", so that a bad file costs the
pages in it and nothing else. Values carry a checksum on top, over all that they claim to be.

The file's size is the sum of SQLite pages of 16 KiB: values, keys, trees and free space, everything
counted. `max_bytes` bounds that, the rollback journal and the lock file together.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from quire.cache.disk_sql import (
    Damaged,
    StoreBusy,
    StoreError,
    StoreFull,
    connect,
    lock_folder,
    translated,
)

SQL_PAGE = 16384
ROWS_A_COMMIT = 24
"""Rows that one transaction adds, removes or touches: bounds the journal."""
_JOURNAL_PAGES = 96
_SHRINK_STEP = 64
_DIGEST = 16
_VERSION = 1
"""Of the schema and of what the bytes of a value mean. Another one's file is emptied."""
MIN_BYTES = 4 << 20

FILE = "pages.sqlite"
_SCHEMA = """
CREATE TABLE models (id INTEGER PRIMARY KEY, fingerprint TEXT UNIQUE, name TEXT);
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, model INTEGER, key BLOB, bytes INTEGER, used INTEGER,
    hits INTEGER, made REAL, last REAL
);
CREATE TABLE bodies (id INTEGER PRIMARY KEY, digest BLOB, body BLOB);
"""


class DiskStore:
    """Values by key, of several models, in one folder. For one thread; holds the folder's lock.

    Args:
        folder: made if missing.
        max_bytes: the most that the folder's files may take together.
        fingerprint: of the model whose values are read and written.
        name: of the model, for people.
        say: told what a user should know: damage found, pages deleted to fit a lower limit.
        clock: seconds since the epoch.

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
                f"kv-disk-size: {max_bytes:,} bytes; at least {MIN_BYTES:,} are needed"
            )
        self.folder = folder
        self.damaged = 0
        """Values that failed their checksum and were removed."""
        self._fingerprint, self._name = fingerprint, name
        self._say, self._clock = say, clock
        reserve = _JOURNAL_PAGES + max_bytes // SQL_PAGE // 512 + 1  # journal; lock file
        self._max_pages = max_bytes // SQL_PAGE - reserve
        self._order: OrderedDict[bytes, int] = OrderedDict()
        self._touched: dict[bytes, tuple[int, int]] = {}
        """Uses not yet written down: (when, hits)."""
        self._next = 1
        """Counts uses and values; it orders them."""
        self._model: int | None = None
        self._inode: int | None = None
        self._lock = lock_folder(folder)
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    # -- what is there -------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    @property
    def keys(self) -> list[bytes]:
        """Least recently used first."""
        return list(self._order)

    @property
    def file_bytes(self) -> int:
        """Size of the file, free space in it included."""
        with translated():
            return self._pragma("page_count") * SQL_PAGE

    # -- values --------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        """The value, verified. None if it is not there, or was bad: then it is removed."""
        id = self._order.get(key)
        if id is None:
            return None
        self._check_alive()
        try:
            with translated():
                row = self._db.execute(
                    "SELECT digest, body FROM bodies WHERE id = ?", (id,)
                ).fetchone()
        except Damaged as damage:
            self._rebuild(str(damage))
            return None
        digest, value = row if row is not None else (None, None)
        if isinstance(value, bytes) and digest == self._checksum(key, value):
            self.touch(key, hits=1)
            return value
        self.damaged += 1
        self._say("a cached page failed its checksum and was removed")
        try:
            self.delete([key])
        except (StoreFull, StoreBusy):
            del self._order[key]  # in the file it stays until the next start
            self._touched.pop(key, None)
        return None

    def put(self, values: Sequence[tuple[bytes, bytes]]) -> None:
        """Writes values; older ones go to make room. Keys that are there already are left out.

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
        """Removes values, if they are there."""
        try:
            self._delete([key for key in keys if key in self._order])
        except Damaged as damage:
            self._rebuild(str(damage))

    def touch(self, key: bytes, hits: int = 0) -> None:
        """The value was wanted: it is now the most recently used. Written with the next values."""
        if key in self._order:
            self._order.move_to_end(key)
            _, before = self._touched.pop(key, (0, 0))
            self._touched[key] = (self._next, before + hits)
            self._next += 1

    def flush(self) -> None:
        """Writes down what was touched, so that a restart knows the order."""
        try:
            while self._touched:
                with self._transaction():
                    self._write_touched()
        except Damaged as damage:
            self._rebuild(str(damage))

    def close(self) -> None:
        """Flushes and gives the folder back. Errors no longer matter."""
        with suppress(StoreError):
            self.flush()
        self._db.close()
        os.close(self._lock)

    # -- for people ----------------------------------------------------------------------------

    def clear(self, fingerprint: str | None = None) -> int:
        """Removes one model's values, or all; the file shrinks. Returns how many there were."""
        try:
            return self._clear(fingerprint)
        except Damaged as damage:
            count = len(self)
            self._rebuild(str(damage))
            return count

    # -- inside --------------------------------------------------------------------------------

    def _clear(self, fingerprint: str | None) -> int:
        with translated():
            rows = self._db.execute(
                "SELECT key FROM entries JOIN models ON models.id = model "
                "WHERE fingerprint = ?1 OR ?1 IS NULL",
                (fingerprint,),
            ).fetchall()
        self._delete([key for (key,) in rows])
        with self._transaction():
            self._db.execute("DELETE FROM models WHERE id NOT IN (SELECT model FROM entries)")
        self._model = None
        self._shrink(0)
        return len(rows)

    def _open(self) -> None:
        try:
            self._connect()
        except Damaged as damage:
            self._rebuild(str(damage))
        self._fit()

    def _connect(self) -> None:
        path = self.folder / FILE
        self._db = connect(path)
        with translated():
            # Freed pages need not be overwritten, else each removal would go through the journal.
            for setting in ("secure_delete=OFF", "journal_mode=TRUNCATE", "synchronous=NORMAL"):
                self._db.execute(f"PRAGMA {setting}")
            if self._pragma("page_count") == 0:
                self._create()
            if (version := self._pragma("user_version")) != _VERSION:
                raise Damaged(f"format {version}, not {_VERSION}")
            self._load()
        self._inode = path.stat().st_ino

    def _create(self) -> None:
        for setting in (f"page_size={SQL_PAGE}", "auto_vacuum=INCREMENTAL"):
            self._db.execute(f"PRAGMA {setting}")
        with self._transaction():
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={_VERSION}")

    def _load(self) -> None:
        self._order.clear()
        self._touched.clear()
        self._model = None
        for id, key, used in self._db.execute(
            "SELECT id, key, used FROM entries ORDER BY used, id"
        ):
            if not (isinstance(key, bytes) and isinstance(used, int)):
                raise Damaged("an entry of the wrong type")
            self._order[key] = id
            self._next = max(self._next, id + 1, used + 1)

    def _rebuild(self, why: str) -> None:
        """A file that cannot be trusted is thrown away: it was only a cache."""
        self._say(f"the cache file is damaged ({why}); it is emptied")
        self.damaged += len(self._order)
        self._order.clear()
        self._touched.clear()
        self._db.close()
        self._inode = None
        try:
            for path in self.folder.glob(f"{FILE}*"):
                path.unlink()
            self._connect()
            with translated():
                self._pragma(f"max_page_count={self._max_pages}")
        except OSError as error:
            raise StoreError(f"{self.folder}: {error.strerror}") from error
        except (StoreFull, Damaged) as error:
            raise StoreError(f"{self.folder}: no new file can be made: {error}") from error

    def _fit(self) -> None:
        """Brings a file from a higher limit under this one."""
        try:
            with translated():
                before, size = len(self._order), self._pragma("page_count")
                if size > self._max_pages:
                    self._evict(0)
                    self._shrink(self._max_pages)
                    self._say(
                        f"the limit is lower than before: {before - len(self._order)} pages, least "
                        f"recently used, were deleted; the file went from {size * SQL_PAGE:,} to "
                        f"{self.file_bytes:,} bytes"
                    )
                self._pragma(f"max_page_count={self._max_pages}")
        except Damaged as damage:
            self._rebuild(str(damage))

    def _shrink(self, pages: int) -> None:
        """Cuts free space off the file until it has `pages`, or no free space."""
        with translated():
            while self._pragma("freelist_count") and self._pragma("page_count") > pages:
                surplus = self._pragma("page_count") - pages
                step = min(surplus, _SHRINK_STEP)
                # Not `execute`: it stops after the first of the steps.
                self._db.executescript(f"PRAGMA incremental_vacuum({step})")

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
            with translated():
                self._max_pages = max(self._pragma("page_count"), _JOURNAL_PAGES)
                self._pragma(f"max_page_count={self._max_pages}")
            self._say(f"the disk is full; the file stays at {self.file_bytes:,} bytes")
            if need > self._max_pages - 8:
                raise
            self._evict(need)
            self._insert(batch)

    def _insert(self, batch: dict[bytes, bytes]) -> None:
        now, first = self._clock(), self._next
        with self._transaction():
            model = self._model_row()
            for number, (key, value) in enumerate(batch.items()):
                id = first + number
                self._db.execute(
                    "INSERT INTO entries VALUES (?, ?, ?, ?, ?, 0, ?, ?)",
                    (id, model, key, len(value), id, now, now),
                )
                body = (id, self._checksum(key, value), value)
                self._db.execute("INSERT INTO bodies VALUES (?, ?, ?)", body)
        self._model = model
        self._next = first + len(batch)
        for number, key in enumerate(batch):
            self._order[key] = first + number
        if self._touched:
            with self._transaction():
                self._write_touched()

    def _model_row(self) -> int:
        if self._model is None:
            model = (self._fingerprint, self._name)
            self._db.execute(
                "INSERT OR IGNORE INTO models (fingerprint, name) VALUES (?, ?)", model
            )
            found = self._db.execute("SELECT id FROM models WHERE fingerprint = ?", model[:1])
            return int(found.fetchone()[0])
        return self._model

    def _evict(self, need: int) -> None:
        """Removes the least recently used until `need` SQLite pages are free within the limit."""
        with translated():
            while self._room() < need:
                if not self._order:
                    raise Damaged("space is lost")
                self._delete([key for key, _ in zip(self._order, range(4), strict=False)])

    def _room(self) -> int:
        return self._max_pages - self._pragma("page_count") + self._pragma("freelist_count")

    def _delete(self, keys: list[bytes]) -> None:
        for start in range(0, len(keys), ROWS_A_COMMIT):
            batch = keys[start : start + ROWS_A_COMMIT]
            ids = [(self._order[key],) for key in batch]
            with self._transaction():
                self._db.executemany("DELETE FROM bodies WHERE id = ?", ids)
                self._db.executemany("DELETE FROM entries WHERE id = ?", ids)
            for key in batch:
                del self._order[key]
                self._touched.pop(key, None)

    def _write_touched(self) -> None:
        now = self._clock()
        for _ in range(min(len(self._touched), ROWS_A_COMMIT)):
            key = next(iter(self._touched))
            used, hits = self._touched.pop(key)
            self._db.execute(
                "UPDATE entries SET used = ?, hits = hits + ?, last = ? WHERE id = ?",
                (used, hits, now, self._order[key]),
            )

    def _checksum(self, key: bytes, value: bytes) -> bytes:
        """Of the value and all that it claims to be: model, place in the chain, format version."""
        digest = sha256(f"{_VERSION}\x00{self._fingerprint}\x00".encode())
        digest.update(len(key).to_bytes(2, "little") + key)
        digest.update(value)
        return digest.digest()[:_DIGEST]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._check_alive()
        with translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    def _check_alive(self) -> None:
        """The file is still the one that was opened: a folder may be deleted or unmounted."""
        path = self.folder / FILE
        with suppress(OSError):
            if self._inode is None or path.stat().st_ino == self._inode:
                return
        raise StoreError(f"{path} has vanished")

    def _pragma(self, name: str) -> int:
        value: int = self._db.execute(f"PRAGMA {name}").fetchone()[0]
        return value


def clear(folder: Path, fingerprint: str | None = None) -> int:
    """Removes the values of one model, or of all, from a folder that no server uses.

    Raises:
        StoreError: there is no store, or a server has it.
    """
    if not (folder / FILE).is_file():
        raise StoreError(f"{folder} holds no KV pages")
    store = DiskStore(folder, 1 << 44, "", "", lambda message: None)
    try:
        return store.clear(fingerprint)
    finally:
        store.close()
