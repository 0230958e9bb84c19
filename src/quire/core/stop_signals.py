"""The signals that ask a server to stop, which reach all of its processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals: Ctrl-C, a service manager's TERM, and HUP when a terminal closes.

    Under `nohup` HUP is ignored from the start, and is left out.
    """
    return tuple(each for each in _ALL if signal.getsignal(each) is not signal.SIG_IGN)


def leave_stopping_to_the_parent() -> None:
    """Ignore stop signals in a process that ends when its parent closes a pipe."""
    for each in _ALL:
        signal.signal(each, signal.SIG_IGN)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C take effect at the end of the block, by a KeyboardInterrupt.

    For imports: extension modules print and drop an interrupt that reaches their callbacks.
    """
    if (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    came = list[int]()
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
