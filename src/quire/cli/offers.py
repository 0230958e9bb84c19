"""From options and a configuration file to the models that a server has."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.cli.kv_flags import format_of
from quire.cli.settings import Given, value_of
from quire.core.config import DiskConfig, EngineConfig, Offer, ServerConfig
from quire.core.errors import QuireError, RequestError
from quire.core.request import SamplingParams
from quire.demo import MODEL_DIR
from quire.serving.sampling_defaults import NAMES, overridden

OF_A_MODEL = frozenset(
    {
        *("also_named", "adapter", "dialect", "max_tokens", "sampling_defaults", *NAMES),
        *("dtype", "blas", "max_context", "max_sequences", "step_ms", "stop_on_loop"),
        *("kv_memory", "kv_bits", "kv_scheme", "kv_group_size", "kv_skip_layers"),
        *("no_prefix_cache", "kv_disk", "kv_disk_size", "idle_unload"),
        *("keep_volatile", "allow_special_tokens"),
    }
)
"""Options that a `[[models]]` table may set for its model alone."""
_ONE_MODEL = ("served_name", "also_named", "adapter")


def offers(args: argparse.Namespace, server: ServerConfig) -> tuple[Offer, ...]:
    """The models, from the command line, or else from the configuration file.

    Args:
        args: with `tables`, those of the file, and `options`, the actions by name.

    Raises:
        QuireError: two have one name, a setting is wrong, or an option is for one model only.
    """
    tables = [] if args.models else args.tables
    if tables:
        found = [_of_table(args, server, table) for table in tables]
    else:
        given = [_named(each) for each in args.models] or [("quire-demo", str(MODEL_DIR))]
        found = [_offer(args, server, args.served_name or name, model) for name, model in given]
    if len(found) > 1:
        for option in _ONE_MODEL:
            if getattr(args, option):
                raise QuireError(f"--{option.replace('_', '-')} is for one model")
    names = [name for each in found for name in each.names]
    if twice := [name for name in names if names.count(name) > 1]:
        raise QuireError(f"two models are called {twice[0]!r}; say NAME=MODEL")
    if strangers := [name for name in args.pin if name not in names]:
        raise QuireError(f"--pin {strangers[0]}: no model is called so")
    return tuple(found)


def _named(given: str) -> tuple[str, str]:
    """What clients call a model of the command line, and its folder or hub id."""
    name, equals, model = given.partition("=")
    if equals and not Path(given).exists():
        return name, model
    path = Path(given)
    if path.is_file():  # GGUF
        return path.stem, given
    return (path.resolve().name if path.is_dir() else given), given


def _of_table(args: argparse.Namespace, server: ServerConfig, table: dict[str, Any]) -> Offer:
    """The model of a `[[models]]` table, whose settings come before those for all."""
    entries = {key.replace("-", "_"): value for key, value in table.items()}
    model = str(entries.pop("model", MODEL_DIR))
    name = str(entries.pop("name", _named(model)[0]))
    pinned = entries.pop("pinned", False)
    own = argparse.Namespace(**vars(args))
    for key, value in entries.items():
        if key not in OF_A_MODEL:
            raise QuireError(f"[[models]] {name}: {key.replace('_', '-')!r} is not a model's own")
        given = Given(value, f"[[models]] {name}: {key.replace('_', '-')}")
        setattr(own, key, value_of(args.options[key], given))
    if pinned is True:
        own.pin = [*args.pin, name]
    return _offer(own, server, name, model)


def _offer(args: argparse.Namespace, server: ServerConfig, name: str, model: str) -> Offer:
    serving = replace(
        server,
        served_name=name,
        also_named=tuple(args.also_named),
        dialect=args.dialect,
        default_max_tokens=args.max_tokens,
        drop_volatile_headers=not args.keep_volatile,
        allow_special_tokens=args.allow_special_tokens,
        sampling_defaults=args.sampling_defaults,
        sampling_overrides=_sampling_overrides(args),
    )
    pinned = name in args.pin
    return Offer(engine_config(args, model), serving, pinned, idle_unload_s=args.idle_unload)


def engine_config(args: argparse.Namespace, model: str) -> EngineConfig:
    """The engine's settings for a model."""
    return EngineConfig(
        model=model,
        dtype=args.dtype,
        adapter=args.adapter,
        blas=args.blas,
        kv_memory=args.kv_memory,
        kv_format=format_of(args),
        kv_skip_layers=args.kv_skip_layers,
        max_sequences=args.max_sequences,
        max_context=args.max_context,
        step_ms=args.step_ms,
        prefix_cache=not args.no_prefix_cache,
        disk=DiskConfig(args.kv_disk, args.kv_disk_size) if args.kv_disk else None,
        stop_on_loop=args.stop_on_loop,
    )


def _sampling_overrides(args: argparse.Namespace) -> dict[str, float]:
    """The operator's defaults for sampling, by the parameter's name.

    Raises:
        QuireError: one is not what the parameter may be.
    """
    named = {name: getattr(args, name) for name in NAMES}
    given = {name: value for name, value in named.items() if value is not None}
    try:
        overridden(SamplingParams(), given)
    except RequestError as error:
        raise QuireError(f"--{(error.param or '').replace('_', '-')}: {error.message}") from error
    return given
