"""Settings code that all commands share.

An option is a field of a class, and is defined nowhere else.

The field `max_context` is the flag `--max-context`, the variable `QUIRE_MAX_CONTEXT` and the key
`max-context` of a TOML file. Its type, limits, default and description make the parser, the help,
the completion and `docs/settings.md`.

Flags come before variables, these before the file, and this before defaults. In the file a key at
the top is for every command that has the option, and a table such as `[serve]` for one;
`[[models]]` are `serve`'s:

    port = 9000

    [serve]
    idle-unload = 600

    [[models]]
    name = "small"
    model = "org/some-model"
    kv-bits = "4"
"""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from quire.cli.values import File, Flag
from quire.core.complaints import complaint
from quire.core.errors import QuireError
from quire.core.limited_files import SETTINGS_BYTES, read_limited_text

PREFIX = "QUIRE_"
MODELS = "models"
LAUNCH_KEY = f"{PREFIX}LAUNCH_KEY"
"""Environment variable in which an agent started by `quire launch` finds its key; not an option."""
_BUILD_KERNELS = f"{PREFIX}BUILD_KERNELS"
"""Environment variable of the package's build (`quire.device.cpu.build`); not an option."""
_KEY = "api_key"
_CONFIG = "config"
_NOT_IN_FILE = frozenset({_KEY, _CONFIG})
"""Options that a configuration file cannot set. `_Variables` reads QUIRE_CONFIG, `quire.cli.keys`
QUIRE_API_KEY.
"""


def default_file() -> Path:
    """Return the configuration file that is read if none is named."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "quire" / "config.toml"


@dataclass(frozen=True, slots=True)
class Option:
    """A settings field, as the command line, variables and the file see it.

    Attributes:
        name: the name in Python: `max_context`.
        title: title of its group in the help; "" for none.
    """

    name: str
    title: str
    field: FieldInfo
    flag: Flag

    @property
    def spelling(self) -> str:
        """The flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"{PREFIX}{self.name.upper()}"

    @property
    def configurable(self) -> bool:
        """Whether variables and the file may set it."""
        return not (self.flag.positional or self.flag.after_dashes or self.name in _NOT_IN_FILE)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a `Literal`; empty for other types, and where numbers are possible too."""
        parts = get_args(self.field.annotation)
        for part in (self.field.annotation, *(() if int in parts else parts)):
            if get_origin(part) is Literal:
                return tuple(map(str, get_args(part)))
        return ()

    @property
    def default(self) -> str:
        """The default as help shows it; "" for none."""
        value = self.field.get_default()
        empty = self.field.is_required() or value in (None, False, "", ())
        return "" if empty else self.flag.shown(value)

    @property
    def help(self) -> str:
        """The description, with the default added if the description does not mention one."""
        text = self.field.description or ""
        if not self.default or re.search("(?i)default", text):
            return text
        return f"{text}; default: {self.default}" if text else f"default: {self.default}"


class Options(BaseModel):
    """A group of options.

    Attributes:
        title: title of the group in the help; "" puts the options before all groups.
        alternatives: flags of which only one may be given.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        defer_build=True,  # of validators, which the command that runs needs alone
    )
    title: ClassVar[str] = ""
    alternatives: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def options(cls) -> Iterator[Option]:
        """Return all options: a class's own before those of its bases."""
        seen: set[str] = set()
        for owner in cls.__mro__:
            title = vars(owner).get("title", "")
            for name in inspect.get_annotations(owner):
                field = cls.model_fields.get(name)
                if field is not None and name not in seen:
                    seen.add(name)
                    yield Option(field.alias or name, title, field=field, flag=_flag(field))


class Command(Options, BaseSettings):
    """The options of a command; the docstring is its description in the help.

    Attributes:
        command: name of the command.
        summary: one-line description.
        epilog: text below its help.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_prefix_target="all", enable_decoding=False
    )
    command: ClassVar[str]
    summary: ClassVar[str]
    epilog: ClassVar[str] = ""

    config: File | None = Field(
        None,
        description="TOML with options; default: $QUIRE_CONFIG, or quire/config.toml in "
        "$XDG_CONFIG_HOME or ~/.config; flags come before QUIRE_* variables, and these before the "
        "file",
    )

    def run(self) -> int:
        """Run the command; return the exit status.

        Raises:
            QuireError: the command failed.
        """
        raise NotImplementedError

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Give flags precedence over variables, and these over the file."""
        return init_settings, _Variables(cls), _ConfigFile(cls, {})

    @classmethod
    def settable(cls) -> dict[str, Option]:
        """Return the options that environment variables and the file may set, by name."""
        return {option.name: option for option in cls.options() if option.configurable}


class TableOptions(Options):
    """The options of commands that print a table."""

    as_json: bool = Field(False, alias="json", description="print JSON instead of a table")


class _Variables(EnvSettingsSource):
    """Values of the command's options in the environment."""

    def __call__(self) -> dict[str, Any]:
        names = {_CONFIG, *_command(self).settable()}
        return {name: value for name, value in super().__call__().items() if name in names}


class _ConfigFile(InitSettingsSource):
    """Values of the command's options in the file that `--config` names, or the default file."""

    def __call__(self) -> dict[str, Any]:
        command = _command(self)
        document = read_file(self.current_state.get(_CONFIG))
        own = document.get(command.command)
        given = {**document, **own} if isinstance(own, dict) else document
        settable = command.settable()
        values = {key.replace("-", "_"): value for key, value in given.items()}
        values = {name: value for name, value in values.items() if name in settable}
        if MODELS in command.model_fields and MODELS in document:
            values[MODELS] = model_tables(document, config_file(self.current_state.get(_CONFIG)))
        return values


def _command(source: PydanticBaseSettingsSource) -> type[Command]:
    assert issubclass(source.settings_cls, Command)
    return source.settings_cls


def _flag(field: FieldInfo) -> Flag:
    """Return the flag settings of a field, or those of its type."""
    parts = (*reversed(field.metadata), *_parts(field.annotation))
    return next((part for part in parts if isinstance(part, Flag)), Flag())


def _parts(annotation: object) -> Iterator[object]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


def config_file(path: Path | str | None) -> Path:
    """Return the configuration file that `path` names, or the default one."""
    return Path(path).expanduser() if path else default_file()


def read_file(path: Path | str | None) -> dict[str, Any]:
    """Return the configuration file at `path`, or the default one; empty if it does not exist.

    Raises:
        QuireError: it cannot be read, or is not TOML.
    """
    file = config_file(path)
    try:
        return tomllib.loads(read_limited_text(file, SETTINGS_BYTES))
    except FileNotFoundError as error:
        if not path:
            return {}
        raise QuireError(f"--config: {said(error)}") from error
    except (OSError, ValueError, RecursionError) as error:  # of many kinds, in what is no TOML
        reason = error.strerror if isinstance(error, OSError) else error
        raise QuireError(f"{file}: {reason}") from error


def model_tables(document: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """Return the entries of `[[models]]`.

    Raises:
        QuireError: it is not a list of tables.
    """
    entries = document[MODELS]
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise QuireError(f"{file}: models must be [[models]] tables")
    return entries


def check_names(
    commands: Mapping[str, type[Command]], name: str, file: Path, document: Mapping[str, Any]
) -> list[str]:
    """Refuse unknown keys of the file in the parts that a command reads.

    Args:
        name: name of the command.
        document: parsed contents of the file.

    Returns:
        Warnings about tables of other commands, and about variables.

    Raises:
        QuireError: a key is unknown; the message suggests the nearest one.
    """
    known = {each for command in commands.values() for each in command.settable()}
    warnings = unknown_variables({f"{PREFIX}{each.upper()}" for each in (*known, *_NOT_IN_FILE)})
    for key, value in document.items():
        if not isinstance(value, dict):
            if key != MODELS and (problem := wrong_key(key, known)):
                raise QuireError(f"{file}: {problem}")
        elif key not in commands:
            problem = f"{file}: no command is called [{key}]{did_you_mean(key, commands)}"
            if name in get_close_matches(key, commands):
                raise QuireError(problem)
            warnings.append(problem)
        else:
            problems = filter(None, (wrong_key(own, commands[key].settable()) for own in value))
            found = [f"{file}: [{key}] {problem}" for problem in problems]
            if found and key == name:
                raise QuireError(found[0])
            warnings += found
    return warnings


def wrong_key(key: str, known: Iterable[str]) -> str:
    """Return the message for an unknown key of the file; empty if the key is known."""
    name = key.replace("-", "_")
    if name in known:
        return ""
    if name == _KEY:
        return "API keys belong in a separate file: use api-key-file"
    return f"unknown key {key!r}{did_you_mean(key, (each.replace('_', '-') for each in known))}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to a message; empty if no known name is near."""
    bare = {each.lstrip("-"): each for each in sorted(known)}
    word = name.lstrip("-")
    near = get_close_matches(word, bare, n=1, cutoff=0.7)
    near = near or [each for each in bare if sorted(each) == sorted(word)]  # letters in other order
    return f", did you mean {bare[near[0]]}?" if near else ""


def unknown_variables(names: Collection[str]) -> list[str]:
    """Return a warning if a QUIRE_ variable belongs to no option.

    It is not an error, because scripts and other versions may use variables of their own.
    """
    ours = {name for name in os.environ if name.startswith(PREFIX)}
    unknown = sorted(ours - {*names, LAUNCH_KEY, _BUILD_KERNELS})
    told = ", ".join(f"{name}{_meant(name, names)}" for name in unknown)
    return [f"unknown variables, which have no effect: {told}"] if told else []


def _meant(variable: str, names: Iterable[str]) -> str:
    own = {name.removeprefix(PREFIX): name for name in sorted(names)}
    near = get_close_matches(variable.removeprefix(PREFIX), own, n=1, cutoff=0.75)
    return f" (did you mean {own[near[0]]}?)" if near else ""


def describe(error: ErrorDetails) -> str:
    """Return what must hold of a value that pydantic refused, in one line."""
    cause = error.get("ctx", {}).get("error")
    return str(cause) if isinstance(cause, Exception) else complaint([error])


def said(error: Exception) -> str:
    """Return an error's message; for file errors without the number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
