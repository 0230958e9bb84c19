"""The `quire` command: one module for each subcommand, with a class of its settings that
runs it.
"""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False  # as in `quire`
if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERRUPTED, _UNREAD = 130, 141
"""Exit statuses by which shells know SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit status. Deliberate errors print one line without
    a trace.
    """
    try:
        # Here, because loading them takes a moment in which Ctrl-C is no error either.
        from quire.core.stop_signals import interrupts_wait

        with interrupts_wait():
            import logging

            from quire.cli.commands import run
            from quire.core.errors import QuireError
            from quire.core.logs import announce

        try:
            return run(argv)
        except QuireError as error:
            announce(f"quire: {error}", level=logging.ERROR)
            return error.exit_status
        finally:
            if sys.stdout is not None:  # closed by whoever started this
                sys.stdout.flush()
    except KeyboardInterrupt:
        # Python ends by SIGINT if an interrupt passed through an `exec` of text, as dataclasses run
        # it, and no other `exec` followed.
        exec("")
        return _INTERRUPTED
    except BrokenPipeError:  # who reads the output has gone, as `head` does
        _leave_output()
        return _UNREAD
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _leave_output()  # what is held back cannot be written either
        print(f"quire: {error.strerror}", file=sys.stderr)
        return 1


def _leave_output() -> None:
    """Discard all output that is still to be printed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
