"""The process of a follower, which holds a part of a split model and of its KV cache; see
`ranks`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread

from quire.cache.disk_tier import DiskTier
from quire.core.config import DiskConfig
from quire.core.errors import QuireError
from quire.core.frames import Frames, encode
from quire.core.hosts import Hosts
from quire.core.logs import write_logs
from quire.core.stop_signals import leave_stopping_to_the_parent
from quire.device.device import open_device
from quire.device.loading import load_mlx
from quire.device.private import use_private_cache
from quire.device.ranks import join
from quire.engine.follower_process import Probed, Ready
from quire.engine.ranks import PROBE, START, Call, Follow, SplitExecutor, pipeline_of
from quire.engine.split_disk import OPEN, FollowingDisk, Report, rank_disk
from quire.models.weights.loader import LoadedModel, open_model

log = logging.getLogger("quire.ranks")

_FIRST_SAY_S = 5.0
"""Seconds that a follower waits before it reports a failure, so that the leading process can report
its own first.
"""


class _Output:
    """Standard output, reserved for messages: other output is redirected to standard error."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        self._lock = Lock()
        os.dup2(2, 1)

    def send(self, message: Ready | Probed | Report) -> None:
        """Send a message, from any thread."""
        frame = encode(message)
        with self._lock:
            while frame:
                frame = frame[os.write(self._descriptor, frame) :]


class _Input:
    """Standard input, read like a socket."""

    def recv(self, count: int) -> bytes:
        return os.read(0, count)


def main() -> int:
    """Carry out calls until the leading process ends."""
    leave_stopping_to_the_parent()
    output, frames = _Output(), Frames(_Input())
    opening = frames.next()
    assert isinstance(opening, Follow)
    write_logs("warning", "text")
    calls: SimpleQueue[Call] = SimpleQueue()
    Thread(target=_listen, args=(frames, calls), daemon=True).start()
    use_private_cache()
    part = opening.part
    try:
        loaded = _opened(opening, output)
    except QuireError as error:
        time.sleep(_FIRST_SAY_S)  # the leading process fails alike, and says why to the server
        log.error("process %d of the split model: %s", part.rank, error)
        return 1
    executor: SplitExecutor | None = None
    disk: FollowingDisk | None = None
    while True:
        call = calls.get()
        try:
            if call.method == OPEN:
                disk = _opened_disk(opening, loaded, *call.arguments, report=output.send)
                continue
            if call.method == START:
                (config,) = call.arguments
                executor = SplitExecutor(loaded, config, part, disk=disk)
                continue
            assert executor is not None, "the leading process starts"
            if call.method == PROBE:
                output.send(Probed(executor.probe()))
            else:
                call.of(executor)
        except Exception:  # whatever it was, this rank can no longer follow
            log.exception("process %d of the split model failed", part.rank)
            return 1


def _opened(opening: Follow, output: _Output) -> LoadedModel:
    """Join the other ranks and return this rank's part of the model."""
    load_mlx()
    config, hosts = opening.config, opening.config.hosts or Hosts.local(opening.part.size)
    open_device(config.blas, config.kernels, config.threads, activation_bits=config.activation_bits)
    output.send(Ready())
    join(
        opening.part,
        opening.addresses,
        backend=hosts.backend,
        rdma=[each.rdma for each in hosts.hosts],
    )
    return open_model(
        config.model,
        dtype=config.dtype,
        adapter=config.adapter,
        max_context=config.max_context,
        part=opening.part,
        pipeline=pipeline_of(config, opening.part),
    )


def _opened_disk(
    opening: Follow,
    loaded: LoadedModel,
    config: DiskConfig,
    fingerprint: str,
    *,
    report: Callable[[Report], None],
) -> FollowingDisk:
    """Open this rank's disk tier."""
    part = opening.part
    hosts = opening.config.hosts or Hosts.local(part.size)
    found = rank_disk(config, loaded, fingerprint, part=part, beside=hosts.local_size(part.rank))
    return FollowingDisk(DiskTier(*found), report)


def _listen(frames: Frames, calls: SimpleQueue[Call]) -> None:
    """Queue the leading process's calls. End this process with it, whatever this one waits for."""
    with suppress(EOFError, OSError):
        while True:
            calls.put(frames.next())
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
