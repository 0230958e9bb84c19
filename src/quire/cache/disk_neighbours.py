"""KV blocks that other engines of this machine have on disk: read, never written.

Each engine writes to a folder of its own, so a block has one writer. It reads the files of the
folders beside its own as well, and so starts with what they hold.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from quire.cache.disk_file import FILE, VERSION
from quire.cache.disk_sql import Damaged, StoreError, translated
from quire.cache.disk_store import checksum

_WAIT_S = 0.2
"""Seconds that a read waits for a neighbour's transaction."""


@dataclass(slots=True)
class _Neighbour:
    """A file of a neighbouring replica, as last read.

    Attributes:
        inode: of the file that was read; another one starts anew.
        last: the highest id that was seen; ids only grow.
    """

    inode: int = 0
    last: int = 0
    ids: dict[bytes, int] = field(default_factory=dict)


class Neighbours:
    """Blocks of one model in the folders beside an engine's own. For the thread of the disk tier;
    `in` may be asked by any thread.

    Args:
        folder: the engine's own, whose siblings are read.
        fingerprint: of the model.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self._known: dict[Path, _Neighbour] = {}

    def __contains__(self, key: bytes) -> bool:
        """Return whether a neighbour had the block when its file was last read."""
        return any(key in each.ids for each in list(self._known.values()))

    def refresh(self) -> None:
        """Read which blocks have been written since the last time. A file that cannot be read now
        is left as it was.
        """
        paths = set(self._folder.parent.glob(f"*/{FILE}")) - {self._folder / FILE}
        self._known = {path: self._known.get(path) or _Neighbour() for path in sorted(paths)}
        for path, known in self._known.items():
            try:
                self._read_new(path, known)
            except (Damaged, StoreError, OSError):
                continue  # its owner repairs it

    def get(self, key: bytes) -> bytes | None:
        """Return a value, verified; None if no neighbour has it any more."""
        for path, known in self._known.items():
            id = known.ids.get(key)
            if id is None:
                continue
            try:
                with closing(_opened(path)) as db, translated():
                    found = db.execute("SELECT digest, body FROM bodies WHERE id = ?", (id,))
                    digest, value = found.fetchone() or (None, None)
            except (Damaged, StoreError):
                digest = value = None
            if isinstance(value, bytes) and digest == checksum(self._fingerprint, key, value):
                return value
            known.ids.pop(key, None)
        return None

    def _read_new(self, path: Path, known: _Neighbour) -> None:
        inode = path.stat().st_ino
        if inode != known.inode:
            known.inode, known.last, known.ids = inode, 0, {}
        with closing(_opened(path)) as db, translated():
            if db.execute("PRAGMA user_version").fetchone() != (VERSION,):
                return
            rows = db.execute(
                "SELECT entries.id, key FROM entries JOIN models ON models.id = model "
                "WHERE fingerprint = ? AND entries.id > ? ORDER BY entries.id",
                (self._fingerprint, known.last),
            ).fetchall()
        for id, key in rows:
            known.ids[bytes(key)] = id
            known.last = id


def _opened(path: Path) -> sqlite3.Connection:
    """Return a connection that only reads."""
    with translated():
        return sqlite3.connect(f"{path.as_uri()}?mode=ro", timeout=_WAIT_S, uri=True)
