"""Requests whose grammars are being compiled: in a thread, so that no step waits for one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from quire.core.request import Request
from quire.scheduler.sequence import TokenConstraint

STACK_BYTES = 16 << 20
"""Four times what the process that checks grammars has, so that what passed there passes here."""

MakeConstraint = Callable[[], TokenConstraint | None]
"""Gives a request's constraint, or raises what making it raised."""


class GrammarQueue:
    """Makes token constraints in the order in which they were asked for.

    One thread makes them, whose stack is large; the compiler releases the interpreter's lock, so
    steps go on meanwhile. All methods are called by the engine's thread.

    Args:
        make: makes the constraint of a request; may raise.
    """

    def __init__(self, make: Callable[[Request], TokenConstraint | None]) -> None:
        self._make = make
        self._thread: ThreadPoolExecutor | None = None
        self._queue: deque[tuple[Request, Future[TokenConstraint | None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, request: Request) -> None:
        """Begins with a request."""
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
            self._queue.append((request, self._thread.submit(self._make, request)))
        finally:
            threading.stack_size(before)

    def drop(self, request_id: str) -> Request | None:
        """Forgets a request; None if it is not here."""
        for entry in self._queue:
            if entry[0].id == request_id:
                entry[1].cancel()
                self._queue.remove(entry)
                return entry[0]
        return None

    def take(self) -> list[tuple[Request, MakeConstraint]]:
        """Requests that are ready, in order, and what gives their constraint or raises."""
        ready: list[tuple[Request, MakeConstraint]] = []
        while self._queue and self._queue[0][1].done():
            request, future = self._queue.popleft()
            ready.append((request, future.result))
        return ready

    def wait(self, seconds: float) -> None:
        """Waits until the first is ready, at most so long."""
        if self._queue:
            wait((self._queue[0][1],), seconds)

    def close(self) -> None:
        """Drops what is queued; the thread ends when it is done with the one that it compiles."""
        self._queue.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
