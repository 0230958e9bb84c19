"""Requests whose grammars are being compiled: in a thread, so that no step waits for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from quire.core.request import Request
from quire.core.turns import Turns
from quire.scheduler.sequence import TokenConstraint

STACK_BYTES = 16 << 20
"""Four times what the process that checks grammars has, so that what passed there passes here."""

MakeConstraint = Callable[[], TokenConstraint | None]
"""Gives a request's constraint, or raises what making it raised."""


class _Entry:
    """A request, and its constraint once that is made. Equal to itself alone."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.made: Future[TokenConstraint | None] = Future()


class GrammarQueue:
    """Makes token constraints. API keys take turns; a key's own requests keep their order.

    One thread makes them, whose stack is large; the compiler releases the interpreter's lock, so
    steps go on meanwhile. All methods are called by the engine's thread.

    Args:
        make: makes the constraint of a request; may raise.
    """

    def __init__(self, make: Callable[[Request], TokenConstraint | None]) -> None:
        self._make = make
        self._thread: ThreadPoolExecutor | None = None
        self._entries: dict[str, _Entry] = {}
        """By request: what was asked for, and neither taken nor dropped."""
        self._turns: Turns[str, _Entry] = Turns()
        """Grammars that the thread has not started. Both threads use it, under `_lock`."""
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, request: Request) -> None:
        """Begins with a request, or lets it wait for its turn."""
        entry = self._entries[request.id] = _Entry(request)
        with self._lock:
            self._turns.add(request.caller, entry)
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
            self._thread.submit(self._make_next)
        finally:
            threading.stack_size(before)

    def drop(self, request_id: str) -> Request | None:
        """Forgets a request; None if it is not here. What is being compiled is not interrupted."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        with self._lock:
            self._turns.discard(entry.request.caller, entry)
        return entry.request

    def take(self) -> list[tuple[Request, MakeConstraint]]:
        """Return the requests that are ready, and what gives their constraint or raises."""
        ready = [entry for entry in self._entries.values() if entry.made.done()]
        for entry in ready:
            del self._entries[entry.request.id]
        return [(entry.request, entry.made.result) for entry in ready]

    def wait(self, seconds: float) -> None:
        """Waits until one is ready, at most so long."""
        made = [entry.made for entry in self._entries.values()]
        if made:
            wait(made, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Drops what is queued; the thread ends when it is done with the one that it compiles."""
        self._entries.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def _make_next(self) -> None:
        """Runs in the thread, once for each request that was added: some may be dropped since."""
        with self._lock:
            taken = self._turns.take()
        if taken is None:
            return
        caller, entry = taken
        began = time.monotonic()
        try:
            entry.made.set_result(self._make(entry.request))
        except Exception as error:
            entry.made.set_exception(error)
        finally:
            with self._lock:
                self._turns.shares.charge(caller, time.monotonic() - began)
                self._turns.release(caller)
