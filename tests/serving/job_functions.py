"""Functions that the tests run in jobs; the first process imports this module."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat

import psutil

from quire.core.errors import ModelError, RequestError
from quire.serving.job_messages import Asker


@dataclass
class Opened:
    """The object that every job gets."""

    ask: Asker
    words: list[str] = field(default_factory=lambda: ["opened"])


def unopened(ask: Asker) -> None:
    """Fail as if the model's folder were gone."""
    raise ModelError("folder has no tokenizer.json")


async def join(given: Opened, *words: str) -> tuple[int, str]:
    given.words.append("changed")  # in this child alone
    return os.getpid(), " ".join((*given.words, *words))


async def refuse(given: object) -> None:
    raise RequestError("'x' is no good.", param="x", code="bad")


async def break_down(given: object) -> None:
    raise ValueError("a secret path")


async def crash(given: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


async def fill(given: object, size: int) -> int:
    return len(bytearray(size))


async def spin(given: object, started: str) -> None:
    with open(started, "w") as out:  # noqa: PTH123
        out.write(str(os.getpid()))
    while True:
        pass


async def ask_at_once(given: Opened, count: int) -> Sequence[object]:
    """Ask the server from several threads at once."""
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(given.ask, repeat("double"), range(count)))


async def ask_twice(given: Opened) -> Sequence[object]:
    return [given.ask("double", 2), given.ask("double", 21)]


IN_MEMORY = list[str]()
"""What a server has made before it forks. A program that starts anew does not see it."""


async def look_around(given: object) -> tuple[int, dict[str, object]]:
    """Return the first process, and what it has of the server."""
    first = psutil.Process(os.getppid())
    found = {
        "memory": list(IN_MEMORY),
        "files": [each.path for each in first.open_files()],
        "addresses": [each.laddr.port for each in first.net_connections("inet")],
        "input": os.read(0, 100).decode(),
        "leads its group": os.getpgid(first.pid) == first.pid,
        "threads of libraries": os.environ["OPENBLAS_NUM_THREADS"],
    }
    return first.pid, found
