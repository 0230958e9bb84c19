"""SQLite for the disk tier: error translation, and the lock of a folder."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.core.errors import QuireError

_LOCK = "lock"
WAIT_S = 2.0
"""Seconds that a connection waits for a lock of the file."""


class StoreError(QuireError):
    """Raised if the store cannot be used: locked by another process, read-only, vanished,
    failing.
    """


class StoreFull(StoreError):
    """Raised if values were not written because the disk is full. Stored values are unchanged."""


class StoreBusy(StoreError):
    """Raised if values were not written because another process reads the file for long."""


class Damaged(Exception):
    """Raised if SQLite found the file malformed. The store handles it."""


_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_BAD = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}


@contextmanager
def translated() -> Iterator[None]:
    """Translate SQLite's errors to those of the store."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise StoreFull(str(error)) from error
        if code in _BUSY:
            raise StoreBusy(str(error)) from error
        if code in _BAD:
            raise Damaged(str(error)) from error
        raise StoreError(str(error)) from error


def lock_folder(folder: Path) -> int:
    """Lock the folder until the descriptor is closed; the lock of a killed process ends with it.

    Raises:
        StoreError: another process holds the lock, the folder cannot be written, or other users can
            write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the blocks hold what people wrote
        found = folder.stat()
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreError(
                f"{folder} is writable by other users, who could replace its KV blocks; name "
                "a folder in it that does not exist yet, or make it private (chmod 700)"
            )
        lock = _open_private(folder / _LOCK)
    except OSError as error:
        raise StoreError(f"{folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(lock, 20, 0).decode(errors="replace")
        os.close(lock)
        raise StoreError(f"{folder} is in use by process {owner}") from error
    except OSError as error:
        os.close(lock)
        raise StoreError(f"{folder}: {error.strerror}") from error
    return lock


def _open_private(path: Path) -> int:
    """Open a file for its owner alone, made if missing. A file open to others is closed to them."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def connect(path: Path, *, own: bool = True) -> sqlite3.Connection:
    """Return a connection that waits a little for others, and starts no transactions by itself.

    Args:
        own: make the file if it is missing, for its owner alone; SQLite gives its journal the
            same permissions.

    Raises:
        StoreError: the file cannot be opened.
    """
    if own:
        try:
            os.close(_open_private(path))
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
    with translated():
        return sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
