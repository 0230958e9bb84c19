"""Files that options name, read and written with errors that name the option."""

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
    """Makes a file that is written when the work is done, so that the work is not for nothing.

    Raises:
        QuireError: it cannot be written.
    """
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise QuireError(f"{option}: {said(error)}") from error
