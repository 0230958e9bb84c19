"""Reads files up to a size, so that an endless one such as `/dev/zero` is an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

SETTINGS_BYTES = 1 << 20
"""Size limit of files of settings, such as keys, hosts and tools."""
TEXT_BYTES = 256 << 20
"""Size limit of texts, and of the text files of a model folder."""
MEDIA_BYTES = 1 << 30
"""Size limit of a picture, a sound or a video."""


def read_limited_text(path: Path, limit: int) -> str:
    """Return a file's text.

    Raises:
        OSError: it cannot be read, or has more than `limit` bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(limit + 1)
    if len(text) > limit:  # so many characters are at least as many bytes
        raise _too_large(path, limit)
    return text


def read_limited_bytes(path: Path, limit: int) -> bytes:
    """Return a file's contents.

    Raises:
        OSError: it cannot be read, or has more than `limit` bytes.
    """
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _too_large(path, limit)
    return data


def limited_lines(path: Path, limit: int) -> Iterator[bytes]:
    """Yield a file's lines with their ends.

    Raises:
        OSError: it cannot be read, or a line has more than `limit` bytes.
    """
    with path.open("rb") as file:
        while line := file.readline(limit + 1):
            if len(line) > limit:
                raise _too_large(path, limit, "a line")
            yield line


def _too_large(path: Path, limit: int, what: str = "the file") -> OSError:
    text = f"{what} is larger than the limit of {limit >> 20} MiB"
    return OSError(errno.EFBIG, text, os.fspath(path))
