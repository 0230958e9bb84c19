"""Prints `docs/settings.md`, which is generated from the settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from quire.cli.commands import COMMANDS
from quire.cli.settings import Command, Option

_HEAD = """\
# Settings

An option is a flag, a variable and a key of a TOML file: `--max-context 4096`,
`QUIRE_MAX_CONTEXT=4096`, `max-context = 4096`. Flags come before variables, these before the file,
and this before defaults. A switch such as `--no-page` is `QUIRE_NO_PAGE=1` and `no-page = true`;
an option that may be given again is a list in the file, and separated by commas in a variable.

The file is the one that `--config` or `QUIRE_CONFIG` names, else
`$XDG_CONFIG_HOME/quire/config.toml`, with `~/.config` where that variable is not set. A key at its
top is for every command that has the option, a key in a table such as `[serve]` for that command
alone. A `[[models]]` table is a model of `quire serve`: `model` (a folder or hub id), `name`,
`pinned`, and settings of its own from "each model" to "KV cache". API keys are given by
`--api-key-file` or `QUIRE_API_KEY`, never in this file.

A table with a system message and sampling is a preset with a name:

    [[models]]
    name = "reviewer"
    model = "gemma4:26b"
    system = "Review the change. Name faults only, each with its line."
    temperature = 0.2

Two tables of one model are loaded apart, each with its own weights. `names.toml` beside the file
adds short names of models to those that `quire search` lists: `"my:7b" = "owner/name"`.

Made by `python -m quire.cli.reference > docs/settings.md`.
"""


def reference() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *(line for each in COMMANDS.values() for line in _section(each))])


def _section(command: type[Command]) -> Iterator[str]:
    yield f"## quire {command.command}\n"
    yield " ".join((inspect.getdoc(command) or "").split()) + "\n"
    groups: dict[str, list[Option]] = {}
    for option in command.options():
        if not option.flag.after_dashes and option.name != "config":
            groups.setdefault(option.title, []).append(option)
    for title, group in groups.items():
        yield f"| {title[:1].upper()}{title[1:] or 'Option'} | Meaning |\n| --- | --- |"
        yield from (f"| `{_usage(option)}` | {_escaped(option.help)} |" for option in group)
        yield ""


def _usage(option: Option) -> str:
    choices = ",".join(option.choices)
    value = option.flag.metavar or (f"{{{choices}}}" if choices else option.name.upper())
    value = value.replace("|", r"\|")
    if option.flag.positional:
        return value
    return option.spelling if option.field.annotation is bool else f"{option.spelling} {value}"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


if __name__ == "__main__":
    print(reference(), end="")
