"""The SQLite file of a disk store: tables, transactions, size."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.cache.disk_sql import Damaged, StoreError, StoreFull, connect, translated

FILE = "pages.sqlite"
SQL_PAGE = 16384
"""Bytes of an SQLite page."""
ROWS_A_COMMIT = 24
"""Most rows that one transaction adds, removes or touches, which bounds the journal."""
VERSION = 3
"""Version of the schema and of the encoding of values. A file of another version is emptied."""
_SHRINK_STEP = 64
"""Most SQLite pages that the file is cut by at a time."""
_SCHEMA = """
CREATE TABLE models (id INTEGER PRIMARY KEY, fingerprint TEXT UNIQUE, name TEXT);
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, model INTEGER, key BLOB, bytes INTEGER, used INTEGER,
    hits INTEGER, made REAL, last REAL
);
CREATE TABLE bodies (id INTEGER PRIMARY KEY, digest BLOB, body BLOB);
"""


def file_in(folder: Path) -> Path:
    """Return the store's file in a folder.

    Raises:
        StoreError: it has none, or does not exist.
    """
    path = folder / FILE
    if not path.is_file():
        raise StoreError(
            f"{folder} {'holds no cache of KV blocks' if folder.exists() else 'does not exist'}"
        )
    return path


class DiskFile:
    """The file of one folder. For one thread; `open` comes first.

    Args:
        fingerprint, name: of the model whose values are written.

    Raises:
        Damaged: of any method: the file cannot be trusted.
        StoreError: by any method, if the file cannot be opened, read or written, or was deleted.
    """

    def __init__(self, folder: Path, fingerprint: str, name: str) -> None:
        self._path = folder / FILE
        self._fingerprint, self._name = fingerprint, name
        self._connection: sqlite3.Connection | None = None
        self._model: int | None = None
        self._inode: int | None = None

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None, "`open` comes first"
        return self._connection

    def open(self) -> None:
        """Open the file, creating it if missing. Call `close` even if this raises."""
        self._connection = connect(self._path)
        with translated():
            self._prepare()
        self._inode = self._path.stat().st_ino

    def renew(self, pages: int) -> None:
        """Delete the file and its journal, and open an empty one of at most `pages`."""
        self.close()
        self._inode = self._model = None
        try:
            for path in self._path.parent.glob(f"{FILE}*"):
                path.unlink()
        except OSError as error:
            raise StoreError(f"{self._path.parent}: {error.strerror}") from error
        try:
            self.open()
            self.limit(pages)
        except (StoreFull, Damaged) as error:
            raise StoreError(
                f"{self._path.parent}: the cache file cannot be created: {error}"
            ) from error

    def _prepare(self) -> None:
        # Freed pages need not be overwritten, else each removal would go through the journal.
        for setting in ("secure_delete=OFF", "journal_mode=TRUNCATE", "synchronous=NORMAL"):
            self._db.execute(f"PRAGMA {setting}")
        if _pragma(self._db, "page_count") == 0:
            for setting in (f"page_size={SQL_PAGE}", "auto_vacuum=INCREMENTAL"):
                self._db.execute(f"PRAGMA {setting}")
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={VERSION}")
        if (version := _pragma(self._db, "user_version")) != VERSION:
            raise Damaged(f"format {version}, not {VERSION}")

    def close(self) -> None:
        """Close the file if it is open, without writing."""
        if self._connection is not None:
            self._connection.close()

    # -- pages ---------------------------------------------------------------------------------

    @property
    def pages(self) -> int:
        """Number of SQLite pages of the file, free ones included."""
        with translated():
            return _pragma(self._db, "page_count")

    @property
    def free_pages(self) -> int:
        """Number of unused pages of the file."""
        with translated():
            return _pragma(self._db, "freelist_count")

    def limit(self, pages: int) -> None:
        """Let the file grow to at most `pages` SQLite pages."""
        with translated():
            _pragma(self._db, f"max_page_count={pages}")

    def shrink(self, pages: int) -> None:
        """Cut free pages off the file until it has `pages`, or no free ones."""
        with translated():
            while _pragma(self._db, "freelist_count") and _pragma(self._db, "page_count") > pages:
                step = min(_pragma(self._db, "page_count") - pages, _SHRINK_STEP)
                # Not `execute`: it stops after the first of the steps.
                self._db.executescript(f"PRAGMA incremental_vacuum({step})")

    # -- rows ----------------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[int, bytes, int]]:
        """Return (id, key, use) of every value, least recently used first."""
        with translated():
            for id, key, used in self._db.execute(
                "SELECT id, key, used FROM entries ORDER BY used, id"
            ):
                if not (isinstance(key, bytes) and isinstance(used, int)):
                    raise Damaged("an entry has the wrong type")
                yield id, key, used

    def keys_of(self, fingerprint: str | None) -> list[bytes]:
        """Return the keys of one model's values, or of all."""
        with translated():
            rows = self._db.execute(
                "SELECT key FROM entries JOIN models ON models.id = model "
                "WHERE fingerprint = ?1 OR ?1 IS NULL",
                (fingerprint,),
            ).fetchall()
        return [key for (key,) in rows]

    def body(self, id: int) -> tuple[object, object]:
        """Return the stored digest and value, of whatever type; None if there is no row."""
        self._check_alive()
        with translated():
            row = self._db.execute("SELECT digest, body FROM bodies WHERE id = ?", (id,)).fetchone()
        return row if row is not None else (None, None)

    def insert(self, rows: Sequence[tuple[int, bytes, bytes, bytes]], now: float) -> None:
        """Add (id, key, digest, value) rows in one transaction."""
        with self._transaction():
            model = self._model_row()
            for id, key, digest, value in rows:
                self._db.execute(
                    "INSERT INTO entries VALUES (?, ?, ?, ?, ?, 0, ?, ?)",
                    (id, model, key, len(value), id, now, now),
                )
                self._db.execute("INSERT INTO bodies VALUES (?, ?, ?)", (id, digest, value))
        self._model = model

    def remove(self, ids: Sequence[int]) -> None:
        """Remove values in one transaction."""
        rows = [(id,) for id in ids]
        with self._transaction():
            self._db.executemany("DELETE FROM bodies WHERE id = ?", rows)
            self._db.executemany("DELETE FROM entries WHERE id = ?", rows)

    def write_uses(self, uses: Mapping[int, tuple[int, int]], now: float) -> None:
        """Write (use, further hits) of values by id, in one transaction."""
        with self._transaction():
            self._db.executemany(
                "UPDATE entries SET used = ?, hits = hits + ?, last = ? WHERE id = ?",
                [(used, hits, now, id) for id, (used, hits) in uses.items()],
            )

    def remove_unused_models(self) -> None:
        """Remove the names of models without values."""
        with self._transaction():
            self._db.execute("DELETE FROM models WHERE id NOT IN (SELECT model FROM entries)")
        self._model = None

    def _model_row(self) -> int:
        """Return the id of the model in its table; add it if missing."""
        if self._model is None:
            model = (self._fingerprint, self._name)
            self._db.execute(
                "INSERT OR IGNORE INTO models (fingerprint, name) VALUES (?, ?)", model
            )
            found = self._db.execute("SELECT id FROM models WHERE fingerprint = ?", model[:1])
            return int(found.fetchone()[0])
        return self._model

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run a transaction: all writes within succeed, or none."""
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
        """Raise `StoreError` if the opened file was deleted or its disk unmounted."""
        try:
            if self._inode is None or self._path.stat().st_ino == self._inode:
                return
        except FileNotFoundError:
            pass
        except OSError as error:  # such as permissions that were lost
            raise StoreError(f"{self._path}: {error.strerror}") from error
        raise StoreError(f"{self._path} was deleted while in use")


def _pragma(db: sqlite3.Connection, name: str) -> int:
    value: int = db.execute(f"PRAGMA {name}").fetchone()[0]
    return value
