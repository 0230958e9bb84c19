"""What the jobs of the tests do; the first process imports it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from quire.core.errors import ModelError, RequestError
from quire.serving.job_process import ask


def opened() -> list[str]:
    """What every job is given."""
    return ["opened"]


def unopened() -> None:
    """What is raised where a model's folder is gone."""
    raise ModelError("folder has no tokenizer.json")


async def join(given: list[str], *words: str) -> tuple[int, str]:
    given.append("changed")  # in this child alone
    return os.getpid(), " ".join((*given, *words))


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


async def ask_twice(given: object) -> Sequence[object]:
    return [ask("double", 2), ask("double", 21)]
