"""The subcommands of `quire`, and how its command line is read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from quire import __version__
from quire.cli import bench, cache, chat, doctor, eval_kv, models, serve

COMMANDS = {
    "serve": serve,
    "chat": chat,
    "bench": bench,
    "models": models,
    "doctor": doctor,
    "cache": cache,
    "eval-kv": eval_kv,
}


class Parser(argparse.ArgumentParser):
    """Argparse's, which says in one line what is wrong, and what may have been meant."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends the process because of arguments that nobody declared; names the nearest flag."""
        flags = [part.partition("=")[0] for part in unknown if part.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {unknown[0]!r}")
        near = get_close_matches(flags[0], self.flags(), n=1, cutoff=0.6)
        meant = f", did you mean {near[0]}?" if near else ""
        self.error(f"unknown option {flags[0]}{meant}")

    def flags(self) -> list[str]:
        """The options, as the help names them."""
        words = self.format_help().replace(",", " ").replace("[", " ").replace("]", " ").split()
        return sorted({word for word in words if word.startswith("--")})


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that a command line names; its exit status.

    Raises:
        QuireError: what it was asked for cannot be.
    """
    parser = Parser(prog="quire", description="Serves language models, and talks to servers.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        subparsers.choices[args.command].refuse(unknown)
    status: int = COMMANDS[args.command].run(args)
    return status
