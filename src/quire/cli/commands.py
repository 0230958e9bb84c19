"""The subcommands of `quire`, and the parser of its command line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import Field, ValidationError

from quire.cli.batch import BatchCommand
from quire.cli.bench import BenchCommand
from quire.cli.cache import CacheCommand
from quire.cli.chat import ChatCommand
from quire.cli.convert import ConvertCommand
from quire.cli.doctor import DoctorCommand
from quire.cli.eval_kv import EvalKVCommand
from quire.cli.flags import Parser, build_parser
from quire.cli.hub_cache import PullCommand, RmCommand
from quire.cli.launch import LaunchCommand
from quire.cli.media_options import with_media_limits
from quire.cli.models import ModelsCommand
from quire.cli.ps import PsCommand
from quire.cli.run import RunCommand
from quire.cli.search import SearchCommand
from quire.cli.serve import ServeCommand
from quire.cli.server_options import ServerOptions
from quire.cli.settings import (
    Command,
    Option,
    check_names,
    config_file,
    describe,
    did_you_mean,
    read_file,
)
from quire.cli.values import Flag
from quire.core.errors import ModelError, QuireError
from quire.core.logs import announce


class CompletionCommand(Command):
    """Prints a script that completes commands and options. bash: eval it in ~/.bashrc; zsh: write
    it to _quire in a folder of $fpath; fish: write it to ~/.config/fish/completions/quire.fish.
    """

    command: ClassVar[str] = "completion"
    summary: ClassVar[str] = "print a shell's completion script"

    shell: Annotated[Literal["bash", "zsh", "fish"], Flag(positional=True)] = Field(
        description="the shell that reads the script"
    )

    def run(self) -> int:
        import shtab  # no other command needs it

        print(shtab.complete(build_parser(COMMANDS)[0], shell=self.shell))
        return 0


_ALL: tuple[type[Command], ...] = (
    *(RunCommand, with_media_limits(ServeCommand), ChatCommand, BenchCommand, LaunchCommand),
    *(
        BatchCommand,
        PsCommand,
        SearchCommand,
        ModelsCommand,
        PullCommand,
        RmCommand,
        DoctorCommand,
        CacheCommand,
        EvalKVCommand,
        ConvertCommand,
    ),
    CompletionCommand,
)
COMMANDS: Mapping[str, type[Command]] = {each.command: each for each in _ALL}


def parse(argv: Sequence[str] | None = None) -> Command:
    """Parse a command line into the settings of its subcommand.

    Raises:
        QuireError: a variable or the configuration file is wrong. A wrong command line ends the
            process.
    """
    return _parsed(argv)[0]


def _parsed(argv: Sequence[str] | None) -> tuple[Command, Mapping[str, Any]]:
    """Return the settings of a command line as `parse` does, and those that flags set."""
    ours, others = _cut(sys.argv[1:] if argv is None else argv)
    parser, parsers = build_parser(COMMANDS)
    if not (ours or others):
        parser.print_help()
        parser.exit(0)
    if not ours or ours[0].startswith("-"):
        parser.parse_args(ours)  # --help and --version; all else lacks a command
    name = ours[0]
    if name not in COMMANDS:
        parser.error(f"no command is called {name!r}{did_you_mean(name, COMMANDS)}")
    # Flags may stand among arguments, as in `quire run MODEL --temperature 0 PROMPT`.
    given, unknown = parsers[name].parse_known_intermixed_args(ours[1:])
    flags = vars(given)
    options = {option.name: option for option in COMMANDS[name].options()}
    if unknown:
        flag = next((part for part in unknown if part.startswith("-")), unknown[0])
        parsers[name].refuse(flag, (option.spelling for option in options.values()))
    if others:
        after = next((each.name for each in options.values() if each.flag.after_dashes), None)
        if after is None:
            parsers[name].refuse(others[0], ())
        flags[after] = others
    try:
        settings = COMMANDS[name](**flags)
    except ValidationError as error:
        _refuse(error, options, flags=flags, parser=parsers[name])
    warnings = check_names(
        COMMANDS, name, file=config_file(settings.config), document=read_file(settings.config)
    )
    form = settings.log_format if isinstance(settings, ServerOptions) else "text"
    for warning in warnings:
        announce(f"quire: warning: {warning}", form, level=logging.WARNING)
    return settings, flags


def run(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand of a command line; return its exit status.

    Raises:
        QuireError: the command failed; the message says why.
    """
    settings, flags = _parsed(argv)
    try:
        return settings.run()
    except ModelError as error:
        options = {option.name: option for option in settings.options()}
        if error.setting not in options:
            raise
        place = _place(options[error.setting], settings, flags)
        raise QuireError(f"{place}: {error.message}") from error


def _place(option: Option, settings: Command, flags: Mapping[str, Any]) -> str:
    """Return where an option was set: the flag, the variable, or the key of the file. The flag
    stands for a default, too.
    """
    key = option.name.replace("_", "-")
    models = settings.models if isinstance(settings, ServerOptions) else ()
    in_table = any(key in each for each in models if isinstance(each, Mapping))
    if option.name in flags or (option.name not in settings.model_fields_set and not in_table):
        return option.spelling
    if option.variable in os.environ and not in_table:
        return option.variable
    return f"{config_file(settings.config)}: {key}"


def _refuse(
    error: ValidationError, options: Mapping[str, Option], flags: Mapping[str, Any], parser: Parser
) -> NoReturn:
    """Report the first invalid value, and the flag, variable or file that it comes from."""
    problem = error.errors(include_url=False)[0]
    option = options[str(problem["loc"][0])]
    if problem["type"] == "missing":
        parser.error(f"the following arguments are required: {option.spelling}")
    if option.name in flags:
        parser.error(f"argument {option.spelling}: {describe(problem)}")
    file = config_file(flags.get("config") or os.environ.get("QUIRE_CONFIG"))
    in_file = f"{file}: {option.name.replace('_', '-')}"
    origin = option.variable if option.variable in os.environ else in_file
    raise QuireError(f"{origin}: {describe(problem)}") from error


def _cut(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the arguments at `--`. The second part belongs to another program."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]
