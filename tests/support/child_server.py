"""`quire serve` as a child process: the whole product, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread, Timer

_READY = re.compile(r"quire serves (?P<name>\S+) at (?P<url>http://\S+)/v1")


@dataclass(frozen=True)
class Child:
    """A running server."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def quire_serve(*arguments: str, within_s: float = 60.0) -> Iterator[Child]:
    """Starts the server on a free port and stops it at the end.

    Raises:
        RuntimeError: it did not start in time; the message holds the last lines that it said.
    """
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *arguments]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    patience = Timer(within_s, child.kill)
    patience.start()
    said: deque[str] = deque(maxlen=40)
    assert child.stderr is not None
    try:
        for line in child.stderr:
            said.append(line)
            if ready := _READY.search(line):
                break
        else:
            raise RuntimeError("quire serve did not start:\n" + "".join(said))
        patience.cancel()
        reader = Thread(target=said.extend, args=(child.stderr,), daemon=True)
        reader.start()
        yield Child(ready["url"], child)
    finally:
        patience.cancel()
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise
