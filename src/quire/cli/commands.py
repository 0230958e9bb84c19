"""The subcommands of `quire`, and how its command line is read."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, cast

from quire import __version__
from quire.cli import (
    bench,
    cache,
    chat,
    completion,
    doctor,
    eval_kv,
    hub_cache,
    launch,
    models,
    ps,
    serve,
)
from quire.cli.settings import apply, model_tables, options_of, read_file, usual_place

COMMANDS: dict[str, Any] = {
    "serve": serve,
    "chat": chat,
    "bench": bench,
    "launch": launch,
    "ps": ps,
    "models": models,
    "pull": hub_cache.PULL,
    "rm": hub_cache.RM,
    "doctor": doctor,
    "cache": cache,
    "eval-kv": eval_kv,
    "completion": completion,
}
_SAID = re.compile(r"(?i)default")


class _Defaults(argparse.HelpFormatter):
    """Shows a default where the help does not speak of it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        plain = action.default not in (None, False, "", argparse.SUPPRESS) and action.default != []
        if not action.option_strings or not plain or _SAID.search(text):
            return text
        return f"{text}; default: %(default)s"


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


def build_parser() -> tuple[Parser, Mapping[str, argparse.ArgumentParser]]:
    """The whole command line, and the subcommands' parsers by name."""
    parser = Parser(prog="quire", description="Serves language models, and talks to servers.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    for each in subparsers.choices.values():
        if each.formatter_class is argparse.HelpFormatter:
            each.formatter_class = _Defaults
        each.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    return parser, subparsers.choices


_CONFIG_HELP = (
    f"TOML with options; default: $QUIRE_CONFIG or {usual_place()}; "
    "flags come before QUIRE_* variables, and these before the file"
).replace("%", "%%")


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that a command line names; its exit status.

    Raises:
        QuireError: what it was asked for cannot be.
    """
    argv, others = _cut(sys.argv[1:] if argv is None else argv)
    parser, parsers = build_parser()
    command = next((part for part in argv if part in parsers), None)
    document: dict[str, Any] = {}
    if command is not None and not {"-h", "--help"} & set(argv):
        document = read_file(_config_file(argv))
        apply(command, parsers, document)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        cast("Parser", parsers[args.command]).refuse(unknown)
    if args.command == "serve":
        args.tables, args.options = model_tables(document), options_of(parsers["serve"])
    if args.command == "completion":
        args.parser = parser
    if args.command == "launch":
        args.arguments = others
    elif others:
        cast("Parser", parsers[args.command]).error(f"unexpected argument {others[0]!r}")
    status: int = COMMANDS[args.command].run(args)
    return status


def _cut(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What is ours, and what follows `--`, which is another program's."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _config_file(argv: Sequence[str]) -> Path | None:
    """What `--config` or its variable names."""
    early = Parser(prog="quire", add_help=False, allow_abbrev=False)
    early.add_argument("--config", default=os.environ.get("QUIRE_CONFIG"))
    named = early.parse_known_args(argv)[0].config
    return Path(named).expanduser() if named else None
