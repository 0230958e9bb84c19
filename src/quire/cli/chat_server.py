"""Entry point of a chat's own server: `quire serve` that prints its progress as JSON lines, and
stops when its standard input ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict

from quire.cli.commands import parse
from quire.cli.serve import ServeCommand
from quire.core.errors import QuireError
from quire.core.messages import Progress


def _print_progress(name: str, progress: Progress | None) -> None:
    if progress is not None:
        print(json.dumps(asdict(progress)), flush=True)


def _stop_at_end_of_input() -> None:
    """Send this process a signal to stop once its standard input ends, as when the chat is killed
    or interrupted before it knows of this server.
    """
    while os.read(sys.stdin.fileno(), 1 << 10):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Serve until a signal comes or the standard input ends; return the exit status."""
    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    try:
        command = parse(["serve", *sys.argv[1:]])
        assert isinstance(command, ServeCommand)
        return command.serve(_print_progress)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
