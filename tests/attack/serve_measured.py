"""`quire serve` on an event loop that writes down its long turns: `FILE ARGUMENTS...`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from quire.api import server
from quire.cli import main

LONG_S = 0.025
"""Processor time from which a turn of the loop is written down."""


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Appends the processor seconds of each long turn to `file`.

    Processor time of the loop's own thread: a busy machine does not lengthen it. What another
    thread holds up does not show in it, but in what a neighbour waits for.
    """

    file: Path

    def _run_once(self) -> None:
        before = time.thread_time()
        super()._run_once()  # type: ignore[misc]  # asyncio's own name of a turn
        seconds = time.thread_time() - before
        if seconds >= LONG_S:
            with self.file.open("a") as out:
                out.write(f"{seconds:.3f}\n")


if __name__ == "__main__":
    MeasuredLoop.file = Path(sys.argv[1])
    server._loop_factory = lambda: MeasuredLoop
    sys.exit(main(sys.argv[2:]))
