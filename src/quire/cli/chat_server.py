"""Entry point of a chat's own server: `quire serve` that prints its progress as JSON lines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from quire.cli.commands import parse
from quire.cli.serve import ServeCommand
from quire.core.errors import QuireError
from quire.core.messages import Progress


def _print_progress(name: str, progress: Progress | None) -> None:
    if progress is not None:
        print(json.dumps(asdict(progress)), flush=True)


def main() -> int:
    """Serve until a signal comes; return the exit status."""
    try:
        command = parse(["serve", *sys.argv[1:]])
        assert isinstance(command, ServeCommand)
        return command.serve(_print_progress)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
