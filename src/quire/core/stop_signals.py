"""The signals that ask a server to stop, which reach all of its processes."""

from __future__ import annotations

import signal

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, a service manager's TERM, and HUP where a terminal's end shall end the process.

    Under `nohup` it shall not: HUP is ignored from the start.
    """
    return tuple(each for each in _ALL if signal.getsignal(each) is not signal.SIG_IGN)


def leave_stopping_to_the_parent() -> None:
    """Ignore stop signals in a process that ends when its parent closes a pipe."""
    for each in _ALL:
        signal.signal(each, signal.SIG_IGN)
