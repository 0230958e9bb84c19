"""Reads and writes files that options name. Errors name the option."""

from __future__ import annotations

from pathlib import Path

from quire.cli.settings import said
from quire.core.errors import QuireError
from quire.core.limited_files import SETTINGS_BYTES, read_limited_text


def read(path: Path, option: str, limit: int = SETTINGS_BYTES) -> str:
    """Return a file's text.

    Raises:
        QuireError: it cannot be read, or has more than `limit` bytes.
    """
    try:
        return read_limited_text(path, limit)
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
