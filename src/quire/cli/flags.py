"""The command line parser, built from settings."""

from __future__ import annotations

import argparse
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from quire import __version__
from quire.cli.settings import Command, Option, Options, did_you_mean


class _Help(argparse.RawDescriptionHelpFormatter):
    """A help formatter that does not break names such as `--api-key`."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Commands(_Help):
    """A help formatter that counts the indentation of commands, so that summaries stay on
    the line.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 14


class _FormerFlag(argparse.Action):
    """The former name of a renamed flag: it works with a warning, and the help hides it."""

    def __init__(self, option_strings: Sequence[str], dest: str, renamed: argparse.Action) -> None:
        super().__init__(
            option_strings,
            dest,
            nargs=renamed.nargs,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        self._renamed = renamed

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = self._renamed.option_strings[0]
        print(f"quire: warning: {option_string} is now called {name}", file=sys.stderr)
        self._renamed(parser, namespace, values, option_string=name)


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, with the nearest known flag or command.

    Flags cannot be abbreviated, because an abbreviation might mean another flag in a later version.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: str, flags: Iterable[str]) -> NoReturn:
        """Exit because of an unknown argument; suggest the nearest of `flags`."""
        if not unknown.startswith("-"):
            self.error(f"unexpected argument {unknown!r}")
        unknown = unknown.partition("=")[0]
        self.error(f"unknown option {unknown}{did_you_mean(unknown, flags)}")


def build_parser(commands: Mapping[str, type[Command]]) -> tuple[Parser, Mapping[str, Parser]]:
    """Return the whole command line, and the commands' parsers by name."""
    parser = Parser(
        prog="quire",
        description="Serve language models, and talk to servers.",
        formatter_class=_Commands,
        epilog="To start: quire run gemma4:e4b, or quire serve and a browser at http://127.0.0.1:8000.",
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for name, command in commands.items():
        width = max(shutil.get_terminal_size()[0] - 2, 1)
        described = textwrap.fill(inspect.getdoc(command) or "", width)
        own = subparsers.add_parser(
            name,
            help=command.summary,
            description=described,
            epilog=command.epilog,
            formatter_class=_Help,
        )
        add_options(own, command)
    return parser, subparsers.choices


def add_options(parser: argparse.ArgumentParser, options: type[Options]) -> None:
    """Add the options, in groups. Options that are not given are absent from the namespace."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    exclusive = parser.add_mutually_exclusive_group() if options.alternatives else parser
    for option in options.options():
        if option.flag.after_dashes:
            continue
        if option.title not in groups:
            groups[option.title] = parser.add_argument_group(option.title)
        name = option.name if option.flag.positional else option.spelling
        place = exclusive if option.name in options.alternatives else groups[option.title]
        action = place.add_argument(name, **_arguments(option))
        if option.flag.former:
            place.add_argument(
                option.flag.former, action=_FormerFlag, dest=option.name, renamed=action
            )


def _arguments(option: Option) -> dict[str, Any]:
    """Return the keywords of `add_argument` for an option."""
    flag, required = option.flag, option.field.is_required()
    keywords: dict[str, Any] = {
        "help": option.help.replace("%", "%%"),
        "default": argparse.SUPPRESS,
    }
    if option.field.annotation is bool:
        return {**keywords, "action": "store_true"}
    keywords |= {"metavar": flag.metavar, "choices": option.choices or None}
    if flag.several:
        keywords["nargs"] = "+" if required or not flag.positional else "*"
    elif flag.positional and not required:
        keywords["nargs"] = "?"
    elif flag.bare is not None:
        keywords |= {"nargs": "?", "const": flag.bare}
    if flag.again:
        keywords["action"] = "append"
    return keywords
