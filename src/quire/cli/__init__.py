"""The `quire` command. One module a subcommand: `add_parser` declares it, `run` does it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from quire import __version__
from quire.cli import bench, cache, chat, eval_kv, models, serve
from quire.errors import QuireError

COMMANDS = {
    "serve": serve,
    "chat": chat,
    "bench": bench,
    "models": models,
    "cache": cache,
    "eval-kv": eval_kv,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; its exit status. Errors made on purpose print one line, not a trace."""
    parser = argparse.ArgumentParser(prog="quire", description=__doc__)
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status: int = COMMANDS[args.command].run(args)
        return status
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
