"""Compiles requests' grammars in a thread, so that no step waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from quire.core.request import Request
from quire.core.turns import Turns
from quire.scheduler.sequence import TokenConstraint

STACK_BYTES = 16 << 20
"""Thread stack size: four times that of the checking process, so that checked grammars pass."""

MakeConstraint = Callable[[], TokenConstraint | None]
"""A function that returns a request's constraint, or raises the error that making it raised."""


class _Entry:
    """A request and its constraint, once compiled. Compared by identity."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.made: Future[TokenConstraint | None] = Future()


class GrammarQueue:
    """Compiles token constraints. API keys take turns; requests of one key keep their order.

    One thread with a large stack compiles. The compiler releases the interpreter's lock, so steps
    continue meanwhile. Only the engine's thread calls the methods.

    Args:
        make: compiles the constraint of a request; may raise.
    """

    def __init__(self, make: Callable[[Request], TokenConstraint | None]) -> None:
        self._make = make
        self._thread: ThreadPoolExecutor | None = None
        self._entries: dict[str, _Entry] = {}
        """Pending and finished entries, by request."""
        self._turns: Turns[str, _Entry] = Turns()
        """Grammars that the thread has not started. Both threads use it, under `_lock`."""
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in self._entries.values())

    def add(self, request: Request) -> None:
        """Start compiling for a request, or queue it."""
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
        """Remove a request; return None if it is unknown. A running compilation continues."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        with self._lock:
            self._turns.discard(entry.request.caller, entry)
        return entry.request

    def take(self) -> list[tuple[Request, MakeConstraint]]:
        """Return the requests that are ready, each with a function that returns its constraint or
        raises.
        """
        ready = [entry for entry in self._entries.values() if entry.made.done()]
        for entry in ready:
            del self._entries[entry.request.id]
        return [(entry.request, entry.made.result) for entry in ready]

    def wait(self, seconds: float) -> None:
        """Wait until one is ready, at most `seconds`."""
        made = [entry.made for entry in self._entries.values()]
        if made:
            wait(made, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Drop the queue. The thread ends after its current grammar."""
        self._entries.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def _make_next(self) -> None:
        """Compile one grammar in the thread. Called once per added request, dropped or not."""
        with self._lock:
            taken = self._turns.take()
        if taken is None:
            return
        caller, entry = taken
        started = time.monotonic()
        try:
            entry.made.set_result(self._make(entry.request))
        except Exception as error:  # whatever the compiler raises goes to the waiting caller
            entry.made.set_exception(error)
        finally:
            with self._lock:
                self._turns.shares.charge(caller, time.monotonic() - started)
                self._turns.release(caller)
