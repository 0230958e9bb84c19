"""Reads and writes files that options name. Errors name the option."""

from __future__ import annotations

from pathlib import Path

from quire.cli.settings import said
from quire.core.errors import QuireError


def read(path: Path, option: str) -> str:
    """Return a file's text.

    Raises:
        QuireError: it cannot be read.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuireError(f"{option}: {said(error)}") from error


def check_writable(path: Path | None, option: str) -> None:
    """Create the output file now, so that long work does not end without one.

    Raises:
        QuireError: it cannot be written.
    """
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise QuireError(f"{option}: {said(error)}") from error
