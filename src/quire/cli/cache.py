"""`quire cache`: shows or clears the KV blocks in a disk tier's folder."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from rich.console import Console
from rich.filesize import decimal

from quire.cache.disk_store import clear
from quire.cache.disk_usage import ModelUse, usage
from quire.cli.fitting import FittingTable
from quire.cli.settings import Command, TableOptions
from quire.cli.values import Flag, Folder
from quire.core.errors import QuireError
from quire.demo import name_of

_ALL = ""
_SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (0, "s"))


class CacheCommand(TableOptions, Command):
    """Shows what a folder given to `quire serve --kv-disk` keeps, by model, also while a server
    uses it. Clearing needs the folder to be free.
    """

    command: ClassVar[str] = "cache"
    summary: ClassVar[str] = "show or clear the KV blocks on disk"

    kv_disk: Folder = Field(description="the folder of --kv-disk; required")
    clear: Annotated[str | None, Flag("MODEL", bare=_ALL)] = Field(
        None, description="delete the blocks of this model (name or fingerprint), or all blocks"
    )

    def run(self) -> int:
        """Print the disk usage, or clear the folder."""
        folder = self.kv_disk.expanduser()
        if self.clear is not None:
            print(f"{_clear(folder, self.clear):,} blocks deleted from {folder}")
            return 0
        models = _usage(folder)
        if self.as_json:
            print(json.dumps([asdict(model) for model in models], indent=2))
        else:
            Console().print(table(models, time.time()))
        return 0


def _usage(folder: Path) -> list[ModelUse]:
    """Return a folder's usage, with the embedded model under its short name."""
    return [replace(model, name=name_of(model.name)) for model in usage(folder)]


def _clear(folder: Path, which: str) -> int:
    """Clear the folder; return the number of removed blocks.

    Raises:
        QuireError: no model or several models match, or a server uses the folder.
    """
    if which == _ALL:
        return clear(folder)
    models = _usage(folder)
    found = [m for m in models if name_of(which) == m.name or m.fingerprint.startswith(which)]
    if len(found) == 1:
        return clear(folder, found[0].fingerprint)
    names = ", ".join(f"{m.name} ({m.fingerprint[:12]})" for m in models) or "none"
    how_many = "several models are" if found else "no model is"
    raise QuireError(f"--clear {which}: {how_many} called that; the models are: {names}")


def table(models: list[ModelUse], now: float) -> FittingTable:
    """Return disk usage as a table for the terminal."""
    headings = ("model", "fingerprint", "blocks", "bytes", "hits", "oldest", "last used")
    return FittingTable(headings, [_row(each, now) for each in models], texts=2)


def _row(model: ModelUse, now: float) -> tuple[str, ...]:
    empty = model.blocks == 0
    return (
        model.name,
        model.fingerprint[:12],
        f"{model.blocks:,}",
        decimal(model.bytes),
        f"{model.hits:,}",
        "-" if empty else f"{_span(now - model.made)} old",
        "-" if empty else f"{_span(now - model.last)} ago",
    )


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    size, unit = next((size, unit) for size, unit in _SPANS if seconds >= size)
    return f"{int(seconds // size) if size else int(seconds)} {unit}"
