"""The disk tier: a thread that owns the store, and its interface for the engine's thread.

Nothing here waits for the disk. Blocks to write go into a bounded queue, and are dropped when it is
full; blocks to read arrive later. A problem with the folder is logged once, and the engine
continues without it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread

from quire.cache.disk_file import ROWS_A_COMMIT
from quire.cache.disk_neighbours import Neighbours
from quire.cache.disk_sql import StoreBusy, StoreError, StoreFull
from quire.cache.disk_store import DiskStore
from quire.cache.host_block import HostBlock, block_bytes_of, pack, unpack
from quire.core.config import DiskConfig

log = logging.getLogger("quire.disk")

_COMMIT_BYTES = 16 << 20
"""Most bytes of the blocks of one commit, but for a single larger block."""
_PAUSE_S = 30.0
"""Seconds without writes after the disk or the size limit was full, or the file locked."""
_BUSY_S = 5.0
"""Seconds without reads after the file was found locked, because each read would wait for
the lock.
"""
_IDLE_FLUSH_S = 5.0
"""Seconds without work after which the order of use is written, and neighbours' keys are read."""
_FIRST_RATE = 500e6
"""Bytes per second of reads, assumed before any was measured."""
_SMOOTHING = 0.2
"""Weight of the newest read in the measured rate."""


def log_disabled(reason: str) -> None:
    """Log that the engine goes on without its disk tier."""
    log.warning("the disk tier is disabled: %s", reason)


@dataclass(slots=True, weakref_slot=True)
class PendingRead:
    """Blocks being read.

    Attributes:
        blocks: blocks that were found undamaged, by key; complete when `done`.
        lost: keys of blocks that are not on disk; complete when `done`.
        cancelled: set by the requester when it no longer needs them.
    """

    keys: tuple[bytes, ...]
    blocks: dict[bytes, HostBlock] = field(default_factory=dict)
    done: bool = False
    lost: set[bytes] = field(default_factory=set)
    cancelled: bool = False
    on_done: Callable[[PendingRead], None] | None = None

    def end(self) -> None:
        """Note that nothing more is read."""
        self.done = True
        if self.on_done is not None:
            self.on_done(self)


@dataclass(slots=True)
class DiskCounters:
    """Totals since start; `bytes` is the file's present size.

    Attributes:
        dropped: blocks not written because the queue was full or the disk was.
        misses: requested blocks that were missing or damaged.
    """

    bytes: int = 0
    written: int = 0
    dropped: int = 0
    hits: int = 0
    misses: int = 0


class DiskTier:
    """Interface of the disk tier. Only the engine's thread calls it.

    Args:
        config: folder and size limit.
        fingerprint: fingerprint of the model. Blocks of different models are never mixed.
        name: the model's name, for people.
        queue_bytes: the most bytes of blocks waiting to be written.
        clock: returns seconds, for pauses and rates.

    The folder is opened in the background. Until that is done, and after any failure, there is
    simply nothing on disk.

    Two threads: the engine's, and one that owns the store. Only the latter sets `_store`, and calls
    what changes it; the engine's asks it for keys, by a reference that it takes once a call. All
    else that both touch is read and written under `_changed`, which nobody holds during I/O.
    """

    def __init__(
        self,
        config: DiskConfig,
        fingerprint: str,
        name: str,
        *,
        queue_bytes: int = 512 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = DiskCounters()
        self.failure: str | None = None
        """Reason why the disk tier is off; None while it works."""
        self._config, self._fingerprint, self._name = config, fingerprint, name
        self._queue_bytes, self._clock = queue_bytes, clock
        self._store: DiskStore | None = None
        self._neighbours: Neighbours | None = None
        self._refreshed_at = 0.0
        self._changed = Condition()
        self._writes: deque[tuple[bytes, HostBlock, int]] = deque()
        self._queued: set[bytes] = set()
        """Keys of blocks that wait to be written, or are being written."""
        self._waiting_bytes = 0
        self._reads: deque[PendingRead] = deque()
        self._touched: list[bytes] = []
        self._removed: list[bytes] = []
        self._said: set[str] = set()
        self._rate = _FIRST_RATE
        self._paused_until = self._busy_until = -_PAUSE_S
        self._opened = self._closing = False
        self._logs_failure = False
        """Whether `wait_open` has returned; until then its caller reports a failure."""
        self._thread = Thread(target=self._run, name="quire-disk", daemon=True)
        self._thread.start()

    # -- what the engine's thread asks ---------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        """Return whether the block can be read. It may be outdated for a moment; a read then finds
        out.
        """
        store, neighbours = self._store, self._neighbours
        if store is None:
            return False
        return key in store or (neighbours is not None and key in neighbours)

    def accepts(self, key: bytes, size: int) -> bool:
        """Return whether a block is worth exporting: it is not stored yet, and would be accepted.

        Args:
            size: its bytes, plus those of earlier blocks not handed over yet.
        """
        store = self._store
        with self._changed:
            if store is None or key in self._queued:
                return False
            if key in store:
                self._touched.append(key)
                return False
            if self._neighbours is not None and key in self._neighbours:
                return False  # a block has one writer
            room = self._waiting_bytes + size <= self._queue_bytes
            if room and self._clock() >= self._paused_until:
                return True
            self.counters.dropped += 1
            return False

    def spill(self, key: bytes, block: HostBlock) -> None:
        """Queue a block for writing."""
        size = block_bytes_of(block)
        with self._changed:
            if self._store is None or key in self._queued:
                return
            if self._waiting_bytes + size > self._queue_bytes:
                self.counters.dropped += 1
                return
            self._queued.add(key)
            self._waiting_bytes += size
            self._writes.append((key, block, size))
            self._changed.notify_all()

    def read(
        self, keys: tuple[bytes, ...], on_done: Callable[[PendingRead], None] | None = None
    ) -> PendingRead:
        """Start reading blocks. Always ends, unless the disk hangs.

        Args:
            on_done: called when it has ended, by this thread or the one that owns the store.
        """
        read = PendingRead(keys, on_done=on_done)
        with self._changed:
            if self._store is not None and not self._closing:
                if self._clock() >= self._busy_until:
                    self._reads.append(read)
                    self._changed.notify_all()
                    return read
                self.counters.misses += len(keys)
        read.end()
        return read

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks that are of no use, so that they are written again."""
        with self._changed:
            self._removed.extend(keys)
            self._changed.notify_all()

    def seconds(self, size: int) -> float:
        """Return the expected seconds for reading so many bytes."""
        with self._changed:
            return 1e-3 + size / self._rate

    def decline(self) -> None:
        """Record that a read was not worth its time.

        The measured rate drifts back to its first value. Otherwise a disk that became fast again
        would never be tried.
        """
        with self._changed:
            self._rate += 0.02 * (_FIRST_RATE - self._rate)

    def wait(self, seconds: float) -> None:
        """Sleep until a read ends, at most for some seconds."""
        with self._changed:
            if self._reads:
                self._changed.wait(seconds)

    def wait_open(self, seconds: float) -> None:
        """Wait until the folder is open or has failed to open, at most for some seconds.

        The caller looks at `failure` and reports it. A later failure is logged here.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._opened, seconds)
            self._logs_failure = True

    def drain(self, seconds: float) -> bool:
        """Wait until the folder is open and the queues are empty. Return False if not in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._opened and not (self._queued or self._reads), seconds
            )

    def close(self, seconds: float = 3.0) -> None:
        """Write queued blocks as time allows, and unlock the folder."""
        deadline = time.monotonic() + seconds
        self.drain(seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(1.0, deadline - time.monotonic()))

    # -- the thread that owns the store --------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._open():
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, _BUSY_S):
                        return
            while self._serve():
                pass
        except StoreError as error:
            self._fail(str(error))
        except Exception as error:  # whatever it was, a request must not wait for this thread
            log.exception("the disk tier failed; serving continues without it")
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _open(self) -> bool:
        """Open the folder. Return False if its file is locked; until it is open, nothing is
        stored.
        """
        store: DiskStore | None = None
        with suppress(StoreBusy):
            store = DiskStore(
                Path(self._config.path),
                self._config.max_bytes,
                fingerprint=self._fingerprint,
                name=self._name,
                say=self._say,
            )
        if store is None:
            self._say("the file is locked by another process; opening it is retried")
        if store is not None and self._config.neighbours:
            neighbours = Neighbours(Path(self._config.path), self._fingerprint)
            neighbours.refresh()
            self._neighbours = neighbours
        with self._changed:
            self._store, self._opened = store, True
            self._changed.notify_all()
        if store is None:
            return False
        self._measure(store)
        log.info("%s: %d KV blocks on disk", self._config.path, len(store))
        return True

    def _measure(self, store: DiskStore) -> None:
        """Update the file's size. While the file is locked the size stays as last known."""
        with suppress(StoreBusy):
            file_bytes = store.file_bytes
            with self._changed:
                self.counters.bytes = file_bytes

    def _fail(self, reason: str) -> None:
        store, self._store = self._store, None
        with self._changed:
            if self._logs_failure:
                log_disabled(reason)
            self.failure = reason
            self._opened = True
            self.counters.dropped += len(self._queued)
            self._writes.clear()
            self._queued.clear()
            self._waiting_bytes = 0
            reads, self._reads = self._reads, deque()
            self._changed.notify_all()
        for read in reads:
            read.end()
        if store is not None:
            store.close()

    def _say(self, message: str) -> None:
        """Log each kind of problem once. `quire cache` and the counters tell the rest."""
        kind = message.split("(")[0].split(";")[0]
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s: %s", self._config.path, message)

    def _serve(self) -> bool:
        """Serve one read or one commit. Return False when it is time to end."""
        with self._changed:
            if not (self._reads or self._writes or self._removed or self._closing):
                self._changed.wait(_IDLE_FLUSH_S)
            read = self._reads[0] if self._reads else None
            batch = [] if read is not None else _next_batch(self._writes)
            touched, self._touched = self._touched, []
            removed, self._removed = self._removed, []
            if self._closing and not (read or batch):
                return False
        assert self._store is not None
        neighbours = self._neighbours
        if neighbours is not None and self._clock() - self._refreshed_at > _IDLE_FLUSH_S:
            neighbours.refresh()
            self._refreshed_at = self._clock()
        for key in touched:
            self._store.touch(key)
        if removed:
            with suppress(StoreFull, StoreBusy):  # they are found out again
                self._store.delete(removed)
        if read is not None:
            self._serve_read(self._store, read)
        elif batch:
            self._serve_writes(self._store, batch)
        else:
            with suppress(StoreFull, StoreBusy):  # the order of use is no loss
                self._store.flush()
        return True

    def _serve_read(self, store: DiskStore, read: PendingRead) -> None:
        for key in read.keys:
            if read.cancelled:
                break
            before = self._clock()
            try:
                value = store.get(key)
                if value is None and self._neighbours is not None:
                    value = self._neighbours.get(key)
            except StoreBusy as error:
                self._say(f"reading KV blocks from disk is paused: {error}")
                with self._changed:
                    self._busy_until = self._clock() + _BUSY_S
                    self.counters.misses += len(read.keys) - len(read.blocks)
                break
            if value is None:
                read.lost.add(key)
                with self._changed:
                    self.counters.misses += 1
                continue
            read.blocks[key] = unpack(value)
            rate = len(value) / max(self._clock() - before, 1e-6)
            with self._changed:
                self.counters.hits += 1
                self._rate += _SMOOTHING * (rate - self._rate)
        with self._changed:
            self._reads.remove(read)
        read.end()
        with self._changed:
            self._changed.notify_all()

    def _serve_writes(self, store: DiskStore, batch: list[tuple[bytes, HostBlock, int]]) -> None:
        paused_until: float | None = None
        try:
            store.put([(key, pack(block)) for key, block, _ in batch])
        except (StoreFull, StoreBusy) as error:
            self._say(f"writing KV blocks to disk is paused: {error}")
            paused_until = self._clock() + _PAUSE_S
        self._measure(store)
        with self._changed:
            if paused_until is None:
                self.counters.written += len(batch)
            else:
                self._paused_until = paused_until
                self.counters.dropped += len(batch)
            for key, _, size in batch:
                self._queued.discard(key)
                self._waiting_bytes -= size
            self._changed.notify_all()


def _next_batch(
    writes: deque[tuple[bytes, HostBlock, int]],
) -> list[tuple[bytes, HostBlock, int]]:
    """Take the blocks of one commit from the queue."""
    batch: list[tuple[bytes, HostBlock, int]] = []
    size = 0
    while writes and len(batch) < ROWS_A_COMMIT and size < _COMMIT_BYTES:
        batch.append(writes.popleft())
        size += batch[-1][2]
    return batch
