"""Reads the text files of a model folder, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.limited_files import TEXT_BYTES, read_limited_bytes, read_limited_text

_POINTER = b"version https://git-lfs.github.com/"


def refuse_pointer(path: Path, start: bytes) -> None:
    """Refuse a Git LFS pointer, which a clone without Git LFS has in place of a large file.

    Args:
        start: first bytes of the file.

    Raises:
        ModelError: the file is a pointer.
    """
    if start.startswith(_POINTER):
        raise ModelError(
            f"{path} is a Git LFS pointer instead of the file; run `git lfs pull` in its folder"
        )


def read_text(path: Path) -> str | None:
    """Return the file's text, or None where there is no such file.

    Raises:
        ModelError: the file is there but cannot be read as UTF-8.
    """
    try:
        return read_limited_text(path, TEXT_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def read_bytes(path: Path) -> bytes:
    """Return the contents of a tokenizer's file.

    Raises:
        ModelError: the file cannot be read, is too large, or is a Git LFS pointer.
    """
    try:
        data = read_limited_bytes(path, TEXT_BYTES)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    refuse_pointer(path, data[: len(_POINTER)])
    return data


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where there is no such file.

    Raises:
        ModelError: the file holds something else.
    """
    text = read_text(path)
    if text is None:
        return {}
    refuse_pointer(path, text[: len(_POINTER)].encode())
    try:
        value = json.loads(text.removeprefix("\ufeff"))  # editors on Windows write this mark
    except (ValueError, RecursionError) as error:  # also for a number of too many digits
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value
