"""Errors of the server's folders, as what clients are told."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.errors import StorageFailed


@contextmanager
def storage(folder: str) -> Iterator[None]:
    """Raise `StorageFailed` for an error of a folder. A full disk has an answer of its own.

    Args:
        folder: what the message calls the folder; it names no path.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = os.strerror(error.errno) if error.errno else "unknown error"
        raise StorageFailed(
            f"The server's {folder} cannot be used ({reason}): ask its operator."
        ) from error
