"""Messages between the server, the first job process and its children."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.core.errors import RequestError

Asker = Callable[..., Any]
"""Asks the server a question from within a job, and returns its answer; see `Jobs.run`."""
Opener = Callable[[Asker], object]
"""Makes the first argument of every job, before there is one. Has to be picklable."""

ORDER = struct.Struct("<BQ")
"""Struct of a record to the job parent: START or a signal number, and the job's number."""
START = 0
ENDED = struct.Struct("<Qq")
"""Struct of a record from the job parent: the number of a reaped job, and its exit code."""
NOT_STARTED = 1 << 32
"""Exit code of a child that the system did not start."""

TOO_COSTLY = "request_too_costly"
"""Error code of a request that is refused because its job took too much, or crashed."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Resource limits of jobs.

    Attributes:
        at_once: jobs that run at the same time; others wait, or are paused.
        cpu_s: the most processor seconds of a job.
        wall_s: the most seconds of a job, without pauses.
        memory: the most bytes of a job beyond what all share. Enforced on Linux only.
    """

    at_once: int = max(2, min(8, (os.cpu_count() or 2) // 2))
    cpu_s: int = 60
    wall_s: float = 300.0
    memory: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message to the first job process."""

    opener: Opener
    limits: JobLimits
    log_level: str
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class Ask:
    """A job's question to the server."""

    question: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Done:
    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception


def too_costly(limits: JobLimits) -> RequestError:
    """Return the refusal of a request whose job exceeded a limit or crashed."""
    return RequestError(
        f"The request could not be read: doing so took more than {limits.cpu_s} s of processor "
        f"time or {limits.memory >> 20} MiB of memory, or crashed a decoder. "
        "Send less text, or fewer or smaller files.",
        code=TOO_COSTLY,
    )
