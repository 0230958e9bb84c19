"""The identity of weights: a hash of every byte of their files, computed while they are loaded.

Threads hash files while MLX reads them, so the system reads each file once. Hashes of large files
are cached with the file's size, inode and times, to detect later writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from quire.core.errors import ModelError
from quire.device.private import user_cache

_PIECE_BYTES = 16 << 20
_MAX_THREADS = 8
_KEPT_FROM_BYTES = 64 << 20
"""Smaller files are hashed again at each start, which takes less than 0.1 s."""
_SETTLED_NS = 2_000_000_000
"""A file written this recently may be written again with the same time stamp: file systems' clocks
tick every few milliseconds, FAT's every two seconds.
"""


class WeightIdentity:
    """Computes hashes of files in the background. A context manager whose end stops the hashing.

    Args:
        files: the files to hash, in this order.
        folder: folder of cached hashes; by default `quire` in the user's cache.
    """

    def __init__(self, files: Sequence[Path], folder: Path | None = None) -> None:
        self._known = _KnownHashes(folder)
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "hash")
        self._files = [self._start(path) for path in files]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def digest(self, extra: bytes) -> str:
        """Wait for the hashing. Return a hash of every byte of the files and of `extra`.

        Raises:
            ModelError: a file was written to or removed since the hashing started.
        """
        whole = hashlib.sha256(extra)
        for file in self._files:
            whole.update(file.digest())
        self._known.add([file for file in self._files if file.is_worth_keeping])
        return whole.hexdigest()[:32]

    def _start(self, path: Path) -> _Hashing:
        state = _state(path)
        known = self._known.find(path, state)
        if known is not None:
            return _Hashing(path, state, known=known)
        starts = range(0, state["size"], _PIECE_BYTES)
        pieces = [self._pool.submit(self._hash_piece, path, start) for start in starts]
        return _Hashing(path, state, pieces)

    def _hash_piece(self, path: Path, start: int) -> bytes:
        """Return the hash of a piece; that of nothing after hashing was stopped."""
        piece = hashlib.sha256()
        with path.open("rb") as file:
            file.seek(start)
            if not self._stopped.is_set():
                piece.update(file.read(_PIECE_BYTES))
        return piece.digest()


class _Hashing:
    """A file that is being hashed, or whose hash is cached from an earlier start.

    Attributes:
        state: the file's state when the hashing started, see `_state`.
    """

    def __init__(
        self,
        path: Path,
        state: dict[str, int],
        pieces: Sequence[Future[bytes]] = (),
        known: bytes | None = None,
    ) -> None:
        self.path, self.state = path, state
        self._pieces, self._known = pieces, known
        self._started_ns = time.time_ns()

    @property
    def is_worth_keeping(self) -> bool:
        """Whether the hash is new and slow to compute, and later writes to the file can be
        detected.
        """
        latest = max(self.state["modified_ns"], self.state["changed_ns"])
        settled = self._started_ns - latest > _SETTLED_NS
        return self._known is None and self.state["size"] >= _KEPT_FROM_BYTES and settled

    def digest(self) -> bytes:
        """Return the hash of the file's size and bytes.

        Raises:
            ModelError: the file was written to or removed since the hashing started.
        """
        digest = self._known
        if digest is None:
            whole = hashlib.sha256(self.state["size"].to_bytes(8, "little"))
            for piece in self._pieces:
                try:
                    whole.update(piece.result())
                except OSError as error:
                    raise _unreadable(self.path, error) from error
            digest = whole.digest()
        if _state(self.path) != self.state:
            raise ModelError(f"{self.path}: the file changed while it was read; load it again")
        return digest


class _KnownHashes:
    """Cached hashes of large files by path, in one JSON file.

    If the cache cannot be read or written, hashes are computed again.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._entries: dict[str, dict[str, object]] | None = None

    def find(self, path: Path, state: dict[str, int]) -> bytes | None:
        """Return the cached hash of a file whose state has not changed; None if there is none."""
        if state["size"] < _KEPT_FROM_BYTES:
            return None
        if self._entries is None:
            self._entries = self._read()
        entry = self._entries.get(_key(path), {})
        digest = entry.get("sha256")
        if entry != state | {"sha256": digest} or not isinstance(digest, str):
            return None
        with contextlib.suppress(ValueError):
            return bytes.fromhex(digest)
        return None

    def add(self, files: Sequence[_Hashing]) -> None:
        """Cache new hashes, and drop those of removed files."""
        if not files:
            return
        entries = self._read()
        entries |= {_key(f.path): f.state | {"sha256": f.digest().hex()} for f in files}
        with contextlib.suppress(OSError, RuntimeError):
            place = self._place()
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as file:
                json.dump({p: e for p, e in entries.items() if Path(p).exists()}, file)
            Path(file.name).replace(place)

    def _read(self) -> dict[str, dict[str, object]]:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            found = json.loads(self._place().read_text())
            if isinstance(found, dict) and all(isinstance(e, dict) for e in found.values()):
                return found
        return {}

    def _place(self) -> Path:
        """Return the path of the cache.

        Raises:
            RuntimeError: the user has no home.
        """
        return (self._folder or user_cache() / "quire") / "weight-hashes.json"


def _key(path: Path) -> str:
    return str(path.resolve())


def _state(path: Path) -> dict[str, int]:
    """Return properties of a file that change if it is written to or replaced.

    Raises:
        ModelError: the file cannot be found.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return {
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "modified_ns": found.st_mtime_ns,
        "changed_ns": found.st_ctime_ns,
    }


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path}: cannot be read: {error.strerror}")
