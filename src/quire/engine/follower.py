"""The process of a follower, which holds a part of a split model and of its KV cache; see
`ranks`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

from quire.core.errors import QuireError
from quire.core.frames import Frames, encode
from quire.core.logs import write_logs
from quire.core.stop_signals import leave_stopping_to_the_parent
from quire.device.device import open_device
from quire.device.loading import load_mlx
from quire.device.private import use_private_cache
from quire.device.ranks import join
from quire.engine.ranks import HERE, Call, Follow, SplitExecutor
from quire.models.weights.loader import open_model

log = logging.getLogger("quire.ranks")

_FIRST_SAY_S = 5.0
"""Seconds that a follower waits before it reports a failure, so that the leading process can report
its own first.
"""


def main() -> int:
    """Carry out calls until the leading process ends. Argument 1 is the pipe's file descriptor."""
    leave_stopping_to_the_parent()
    pipe = socket.socket(fileno=int(sys.argv[1]))
    frames = Frames(pipe)
    opening = frames.next()
    assert isinstance(opening, Follow)
    write_logs("warning", "text")
    calls: SimpleQueue[Call] = SimpleQueue()
    Thread(target=_listen, args=(frames, calls), daemon=True).start()
    use_private_cache()
    try:
        load_mlx()
        config = opening.config
        open_device(config.blas, config.kernels, config.threads)
        pipe.sendall(encode(HERE))
        join(opening.part, opening.addresses)
        loaded = open_model(
            config.model,
            dtype=config.dtype,
            adapter=config.adapter,
            max_context=config.max_context,
            part=opening.part,
        )
    except QuireError as error:
        time.sleep(_FIRST_SAY_S)  # the leading process fails alike, and says why to the server
        log.error("process %d of the split model: %s", opening.part.rank, error)
        return 1
    executor = SplitExecutor(loaded, config)
    while True:
        call = calls.get()
        try:
            call.of(executor)
        except Exception:  # whatever it was, this rank can no longer follow
            log.exception("process %d of the split model failed", opening.part.rank)
            return 1


def _listen(frames: Frames, calls: SimpleQueue[Call]) -> None:
    """Queue the leading process's calls. End this process with it, whatever this one waits for."""
    with suppress(EOFError, OSError):
        while True:
            calls.put(frames.next())
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
