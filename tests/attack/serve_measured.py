"""`quire serve` on an event loop that writes down its long turns: `FILE ARGUMENTS...`.

A turn's length is counted in pieces of a known work, done right behind it on the same thread: what
slows the machine down slows both.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from quire.api import server
from quire.cli import main

LONG_S = 0.025
"""Processor time from which a turn of the loop is written down."""
_WORK = json.dumps([{"role": "user", "content": "word " * 50, "n": n} for n in range(500)])


def piece_s() -> float:
    """Return processor seconds of one piece of work: 0.6 ms where nothing else runs."""
    spent = []
    for _ in range(3):
        before = time.thread_time()
        json.loads(_WORK)
        spent.append(time.thread_time() - before)
    return min(spent)


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Appends the pieces of work that each long turn is worth to `file`.

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
                out.write(f"{seconds / piece_s():.1f}\n")


if __name__ == "__main__":
    MeasuredLoop.file = Path(sys.argv[1])
    server._loop_factory = lambda: MeasuredLoop
    sys.exit(main(sys.argv[2:]))
