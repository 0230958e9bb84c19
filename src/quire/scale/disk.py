"""Folders of the disk tier for replicas on one machine: each writes to one, and reads all."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from itertools import count
from pathlib import Path

from quire.core.config import DiskConfig


class OwnFolder:
    """A folder within the disk tier that no other replica of this machine writes to.

    A restarted replica takes a free folder, and so finds the blocks of one that ended. The
    process's end or `close` frees the folder.

    Args:
        replicas: the number of replicas that share the tier's bytes.
    """

    def __init__(self, disk: DiskConfig, replicas: int) -> None:
        whole = Path(disk.path)
        whole.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in count():
            lock = os.open(whole / f"replica-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(lock)
        self._lock = lock
        path = str(whole / f"replica-{number}")
        share = disk.max_bytes // max(1, replicas)
        self.disk = replace(disk, path=path, max_bytes=share, neighbours=True)

    def close(self) -> None:
        """Free the folder for another replica."""
        os.close(self._lock)
