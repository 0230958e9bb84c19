"""The disk tier of a split model: each process keeps its part of every block in its own folder.

The leading process decides which blocks are written and read. A block has been read when every
process has read its part. If one lost its part, for example because its disk was full, the leading
process removes its own, so that the block is computed and written again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from weakref import ReferenceType, ref

from quire.cache.disk_tier import DiskTier, PendingRead, log_disabled
from quire.cache.host_block import HostBlock, block_bytes_of
from quire.core.config import DiskConfig
from quire.device.ranks import Part
from quire.models.weights.loader import LoadedModel

OPEN, READ, FORGET, CLOSE = "open_disk", "disk.read", "disk.forget", "disk.close"
"""Calls of the leading process to followers, see `ranks.Call`."""
_CLOSE_S = 3.0
_OPEN_S = 5.0
"""Most seconds that a follower waits for its folder when it starts."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A follower's report of a read.

    Attributes:
        number: of the read.
        absent: keys of blocks that it could not read.
        lost: those of them that its folder does not have.
    """

    number: int
    absent: frozenset[bytes]
    lost: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Closed:
    """A follower's report that its queued blocks are written."""


Report = Fetched | Closed
Tell = Callable[..., None]
"""Makes followers repeat a call, see `ranks.Followers.tell`."""


def rank_disk(
    disk: DiskConfig, loaded: LoadedModel, fingerprint: str, *, part: Part, beside: int
) -> tuple[DiskConfig, str, str]:
    """Return the first arguments of the disk tier of one process.

    Args:
        disk: folder and size for all processes of a machine.
        fingerprint: of the whole model. Only the leading process knows it.
        beside: number of processes on this machine, which share the size.
    """
    folder = Path(disk.path) / f"rank-{part.rank}-of-{part.size}"
    own = replace(disk, path=str(folder), max_bytes=disk.max_bytes // beside, neighbours=False)
    of_part = f"{fingerprint} {part} {loaded.layers_by_rank}".encode()
    return own, blake2b(of_part, digest_size=20).hexdigest(), str(loaded.path)


@dataclass(slots=True)
class _SplitRead(PendingRead):
    """A read by all processes.

    Attributes:
        awaited: number of processes that have not answered.
        absent: keys of blocks of which some process has no part.
    """

    awaited: int = 1
    absent: set[bytes] = field(default_factory=set)


class SplitDisk(DiskTier):
    """Disk tier of the leading process.

    Args:
        followers: their number.
        tell: makes all of them repeat a call.
    """

    def __init__(
        self, config: DiskConfig, fingerprint: str, name: str, *, followers: int, tell: Tell
    ) -> None:
        self._followers, self._tell = followers, tell
        self._numbers = count()
        self._asked: dict[int, _SplitRead] = {}
        """Reads that some process has yet to answer."""
        self._held: dict[int, ReferenceType[_SplitRead]] = {}
        """Reads whose blocks followers keep."""
        self._closed = 0
        super().__init__(config, fingerprint, name)

    def read(
        self, keys: tuple[bytes, ...], on_done: Callable[[PendingRead], None] | None = None
    ) -> PendingRead:
        number = next(self._numbers)
        read = _SplitRead(keys, on_done=on_done, awaited=1 + self._followers)
        with self._changed:
            self._asked[number] = read
        self._held[number] = ref(read)
        self.forget_unused()
        self._tell(READ, number, keys)
        super().read(keys, partial(self._own_done, number))
        return read

    def forget_unused(self) -> None:
        """Let followers drop blocks of reads that nobody waits for any more. To be called by the
        engine's thread.
        """
        for number in [number for number, read in self._held.items() if read() is None]:
            del self._held[number]
            self._tell(FORGET, number)

    def wait(self, seconds: float) -> None:
        with self._changed:
            if self._asked:
                self._changed.wait(seconds)

    def close(self, seconds: float = _CLOSE_S) -> None:
        deadline = time.monotonic() + seconds
        self._tell(CLOSE)
        super().close(seconds)
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._closed == self._followers, left)

    def heard(self, report: Report) -> None:
        """Take in a follower's report. Called by the thread that listens to it."""
        match report:
            case Fetched(number, absent, lost):
                self.remove(lost)
                self._answered(number, absent)
            case Closed():
                with self._changed:
                    self._closed += 1
                    self._changed.notify_all()

    def _own_done(self, number: int, own: PendingRead) -> None:
        self._asked[number].blocks = own.blocks
        self._answered(number, frozenset())

    def _answered(self, number: int, absent: frozenset[bytes]) -> None:
        """Note that a process has answered; end the read with the last one."""
        with self._changed:
            read = self._asked[number]
            read.absent |= absent
            read.awaited -= 1
            if read.awaited:
                return
            del self._asked[number]
            for key in read.absent:
                read.blocks.pop(key, None)
            read.end()
            self._changed.notify_all()


class FollowingDisk:
    """Disk tier of a follower, for its main thread.

    Args:
        tier: of its own folder.
        report: sends a message to the leading process.
    """

    def __init__(self, tier: DiskTier, report: Callable[[Report], None]) -> None:
        tier.wait_open(_OPEN_S)
        if tier.failure is not None:
            log_disabled(tier.failure)
        self._tier, self._report = tier, report
        self._reads: dict[int, PendingRead] = {}

    def spill(self, key: bytes, block: HostBlock) -> None:
        """Queue this process's part of a block for writing, unless it is stored."""
        if self._tier.accepts(key, block_bytes_of(block)):
            self._tier.spill(key, block)

    def read(self, number: int, keys: tuple[bytes, ...]) -> None:
        """Start to read this process's parts of blocks. Report when they are read, and keep them
        until `forget`.
        """
        self._reads[number] = self._tier.read(keys, partial(self._reported, number))

    def block(self, key: bytes) -> HostBlock:
        """Return this process's part of a block that was read."""
        return next(read.blocks[key] for read in self._reads.values() if key in read.blocks)

    def forget(self, number: int) -> None:
        """Drop the blocks of a read."""
        self._reads.pop(number).cancelled = True

    def close(self) -> None:
        """Write queued blocks as time allows, and report it."""
        self._tier.close(_CLOSE_S)
        self._report(Closed())

    def _reported(self, number: int, read: PendingRead) -> None:
        absent = frozenset(read.keys) - read.blocks.keys()
        self._report(Fetched(number, absent, frozenset(read.lost)))
