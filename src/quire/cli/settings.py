"""Where options get their values: flags, then the environment, then a TOML file, then defaults.

`QUIRE_PORT` is `--port`, in every command that has it. In the file a key at the top is for every
command that has the option, and a table such as `[serve]` for one; `[[models]]` are `serve`'s:

    port = 9000

    [serve]
    idle-unload = 600

    [[models]]
    name = "small"
    model = "org/some-model"
    kv-bits = "4"
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from pydantic import create_model
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from quire.core.errors import QuireError

PREFIX = "QUIRE_"
MODELS = "models"
_ELSEWHERE = frozenset({"help", "version", "config", "api_key"})
"""Options that are not read here; keys have a variable and files of their own."""
_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False}


def usual_place() -> Path:
    """The file that is read if none is named."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "quire" / "config.toml"


@dataclass(frozen=True, slots=True)
class Given:
    """One value before it is parsed, and where it stands."""

    value: Any
    origin: str


class _Variables(EnvSettingsSource):
    """The environment's; each value knows its variable."""

    def __call__(self) -> dict[str, Any]:
        return {name: Given(value, name.upper()) for name, value in super().__call__().items()}


class Settings(BaseSettings):
    """The options of one command, as the environment and a file give them; see `of_command`.

    A field is called as its variable is.
    """

    model_config = SettingsConfigDict(extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment comes before the file, which is handed to the constructor."""
        return _Variables(settings_cls), cast("InitSettingsSource", init_settings)

    @classmethod
    def of_command(
        cls, options: Mapping[str, argparse.Action], file: Mapping[str, Given]
    ) -> dict[str, Given]:
        """The values that are given somewhere, by the option's name."""
        fields = {name: f"{PREFIX}{name}".lower() for name in options}
        types: dict[str, Any] = dict.fromkeys(fields.values(), (Any, None))
        given = {fields[name]: value for name, value in file.items()}
        made = create_model("CommandSettings", __base__=cls, **types)(**given)
        found = {name: getattr(made, field) for name, field in fields.items()}
        return {name: value for name, value in found.items() if value is not None}


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """A command's options by the name of what they set."""
    return {
        action.dest: action
        for action in parser._actions
        if action.option_strings and action.dest not in _ELSEWHERE
    }


def read_file(path: Path | None) -> dict[str, Any]:
    """The file named, or that in the usual place; empty if there is none there.

    Raises:
        QuireError: it cannot be read, or is no TOML.
    """
    place = usual_place() if path is None else path
    try:
        return tomllib.loads(place.read_text("utf-8"))
    except FileNotFoundError as error:
        if path is None:
            return {}
        raise QuireError(f"--config: {error}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise QuireError(f"{place}: {error}") from error


def apply(
    command: str, parsers: Mapping[str, argparse.ArgumentParser], document: Mapping[str, Any]
) -> None:
    """Makes what the environment and the file say a command's defaults, which its flags override.

    Raises:
        QuireError: a key or variable that no command knows, or a value that its option refuses.
    """
    known = {name for parser in parsers.values() for name in options_of(parser)}
    _check_variables(known)
    parser = parsers[command]
    options = options_of(parser)
    file: dict[str, Given] = {}
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    for key, value in document.items():
        if key in tables or key == MODELS:
            continue
        name = _known_name(key, known, "the configuration file")
        if name in options:
            file[name] = Given(value, key)
    for table, entries in tables.items():
        if table not in parsers:
            raise QuireError(f"configuration file: no command is called [{table}]")
        own = options_of(parsers[table])
        for key, value in entries.items():
            name = _known_name(key, own, f"[{table}]")
            if table == command:
                file[name] = Given(value, f"[{table}] {key}")
    for name, given in Settings.of_command(options, file).items():
        parser.set_defaults(**{name: value_of(options[name], given)})
        options[name].required = False


def value_of(action: argparse.Action, given: Given) -> Any:
    """The value, as the option's flag would read it.

    Raises:
        QuireError: it would refuse it; names where the value stands.
    """
    try:
        if action.nargs == 0:
            return _switch(given.value)
        if isinstance(action, argparse._AppendAction):
            values = given.value if isinstance(given.value, list) else str(given.value).split(",")
            return [_one(action, str(value).strip()) for value in values]
        return _one(action, str(given.value))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise QuireError(f"{given.origin}: {error}") from error


def _switch(value: object) -> bool:
    word = _WORDS.get(str(value).strip().lower())
    if word is None:
        raise ValueError(f"{value!r} is neither true nor false")
    return word


def _one(action: argparse.Action, text: str) -> Any:
    value = action.type(text) if callable(action.type) else text
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"{text!r} is none of {', '.join(map(str, action.choices))}")
    return value


def _known_name(key: str, known: Iterable[str], where: str) -> str:
    """The option's name for a key of the file."""
    name, names = key.replace("-", "_"), sorted(known)
    if name in names:
        return name
    if name == "api_key":
        raise QuireError(f"{where}: an API key stands in a file of its own: api-key-file")
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    meant = f", did you mean {near[0].replace('_', '-')}?" if near else ""
    raise QuireError(f"{where} has the unknown key {key!r}{meant}")


def _check_variables(known: Iterable[str]) -> None:
    """Refuses a variable whose name is nearly that of an option: it was meant to have an effect."""
    names = {f"{PREFIX}{name.upper()}" for name in (*known, "api_key", "config")}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in names:
            near = get_close_matches(variable, sorted(names), n=1, cutoff=0.85)
            if near:
                raise QuireError(f"unknown variable {variable}, did you mean {near[0]}?")


def model_tables(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of `[[models]]`.

    Raises:
        QuireError: it is no list of tables.
    """
    entries = document.get(MODELS, [])
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise QuireError("configuration file: models are written as [[models]] tables")
    return entries
