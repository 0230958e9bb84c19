"""Builds the configurations of a server's models from settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quire.cli.model_options import ModelOptions
from quire.cli.server_options import ServerOptions
from quire.cli.settings import describe, wrong_key
from quire.cli.short_names import resolve
from quire.cli.values import Model
from quire.core.config import DiskConfig, ModelConfig, ServerConfig
from quire.core.errors import QuireError
from quire.demo import NAME

_ONE_MODEL = ("served_name", "also_named", "adapter")


class TableError(QuireError):
    """Raised if a `[[models]]` table of the configuration file is wrong."""


class ModelTable(ModelOptions):
    """A `[[models]]` table: a model and its settings."""

    name: str | None = None
    model: Model = NAME
    pinned: bool = False


def model_configs(options: ServerOptions, server: ServerConfig) -> tuple[ModelConfig, ...]:
    """Return the models of the command line, else of the configuration file, else the embedded one.

    Raises:
        QuireError: two models have the same name, a setting is wrong, or an option allows one model
            only.
    """
    found = [_config_of(each, options, server) for each in options.models or (NAME,)]
    if len(found) > 1:
        for option in _ONE_MODEL:
            if getattr(options, option):
                raise QuireError(
                    f"--{option.replace('_', '-')} works with one model only; set it in the "
                    "model's [[models]] table"
                )
    names = [name for each in found for name in each.names]
    for name in names:
        if not _in_utf8(name):
            raise QuireError(f"{name!r} cannot be a model's name")
    if twice := [name for name in names if names.count(name) > 1]:
        raise QuireError(f"two models are called {twice[0]!r}; name them with NAME=MODEL")
    if unknown := [name for name in options.pin if name not in names]:
        raise QuireError(f"--pin {unknown[0]}: no model has this name")
    return _with_own_folders(found)


def _in_utf8(name: str) -> bool:
    """Return whether a text is valid UTF-8; a command line may contain other bytes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _with_own_folders(found: list[ModelConfig]) -> tuple[ModelConfig, ...]:
    """Return the models, with a subfolder each if they name the same disk tier folder.

    One engine owns a folder, so the other models would have no disk tier.
    """
    paths = Counter(each.engine.disk.path for each in found if each.engine.disk is not None)
    return tuple(
        each
        if (disk := each.engine.disk) is None or paths[disk.path] == 1
        else replace(each, engine=replace(each.engine, disk=_own(disk, each.name)))
        for each in found
    )


def _own(disk: DiskConfig, name: str) -> DiskConfig:
    return replace(disk, path=str(Path(disk.path) / name.replace("/", "--")))


def _config_of(
    given: str | Mapping[str, Any], options: ServerOptions, server: ServerConfig
) -> ModelConfig:
    """Return the configuration of a model or of a table, whose settings override the common
    ones.
    """
    if isinstance(given, str):
        name, model = _named(given)
        return _model_config(options.served_name or name, model, options=options, server=server)
    entries = {key.replace("-", "_"): value for key, value in given.items()}
    name = str(entries.get("name", _named(str(entries.get("model", NAME)))[0]))
    try:
        table = ModelTable(**entries)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = str(problem["loc"][0]).replace("_", "-")
        unknown = problem["type"] == "extra_forbidden"
        text = _not_its_own(key) if unknown else f"{key}: {describe(problem)}"
        raise TableError(f"[[models]] {name}: {text}") from error
    own = table.model_fields_set & ModelOptions.model_fields.keys()
    merged = options.model_copy(update={key: getattr(table, key) for key in own})
    config = _model_config(name, table.model, options=merged, server=server)
    return replace(config, pinned=config.pinned or table.pinned)


def _named(given: str) -> tuple[str, str]:
    """Return a command-line model's served name, and its folder or hub id."""
    name, equals, model = given.partition("=")
    if equals and not Path(given).exists():
        return name, model
    path = Path(given)
    if path.is_file():  # GGUF
        return path.stem, given
    return (path.resolve().name if path.is_dir() else given), given


def _not_its_own(key: str) -> str:
    """Return why a model's table cannot have a key."""
    if key.replace("-", "_") in ServerOptions.model_fields:
        return f"{key!r} applies to all models: move it to [serve]"
    return wrong_key(key, ModelTable.model_fields)


def _model_config(
    name: str, model: str, options: ServerOptions, server: ServerConfig
) -> ModelConfig:
    serving = replace(
        server,
        served_name=name,
        also_named=options.also_named,
        adapters=tuple(name for name, _ in options.named_adapters()),
        dialect=options.dialect,
        default_system=options.system,
        default_max_tokens=options.max_tokens,
        drop_volatile_headers=not options.keep_volatile,
        allow_special_tokens=options.allow_special_tokens,
        sampling_defaults=options.sampling_defaults,
        sampling_overrides=options.sampling_overrides(),
    )
    engine, pinned = options.engine_config(resolve(model)), name in options.pin
    return ModelConfig(engine, serving, pinned, idle_unload_s=options.idle_unload)
