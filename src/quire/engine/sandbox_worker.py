"""The process that makes grammars: one request a line, one answer a line, until its input ends.

Arguments: the model's folder, the dialect's name, the size of the vocabulary.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from quire.engine.binding import Binder
from quire.engine.bounds import answered, refused, wanted_of
from quire.engine.sandbox import CPU_S
from quire.errors import RequestError

STACK_BYTES = 4 << 20
"""A quarter of what the engine gives the same work, see `engine.preparing`."""
MEMORY_BYTES = 1 << 30
"""Address space beyond what the process has when it is ready."""


def main() -> int:
    """Serves requests."""
    # Only answers go to the pipe, whatever native code prints.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    folder, dialect, vocab_size = sys.argv[1:]
    binder = Binder(Path(folder), dialect, int(vocab_size))
    threading.stack_size(STACK_BYTES)
    _limit_memory()
    out.write(b"ready\n")
    out.flush()
    for line in sys.stdin.buffer:
        out.write(_within_limits(partial(_answer, binder, line)))
        out.flush()
    return 0


def _answer(binder: Binder, line: bytes) -> bytes:
    try:
        return answered(binder.bind(wanted_of(line)))
    except RequestError as error:
        return refused(error)
    except RecursionError:
        return refused(RequestError("A schema is nested too deeply.", code="invalid_schema"))


def _within_limits(work: Callable[[], bytes]) -> bytes:
    """What `work` returns, from a thread whose stack is small; the process dies if it is slow."""
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    if not answers:
        os._exit(1)  # the traceback is in the log
    return answers[0]


def _limit_memory() -> None:
    """On Linux; other systems don't say how much there is, or don't keep to the limit."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
