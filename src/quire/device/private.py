"""A private folder for kernels that MLX compiles.

MLX 0.32.4 stores compiled kernels in a folder with a predictable name, `mx/VERSION` below the
temporary directory, and loads whatever it finds there. On a machine with other users that would run
their code in this process.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

log = logging.getLogger("quire.device")

CACHE = "MLX_PTX_CACHE_DIR"
"""Variable with the folder where MLX keeps compiled kernels."""


def use_private_cache(folder: Path | None = None) -> Path:
    """Make MLX compile into a folder that nobody else can write to. Call it before MLX compiles.

    Args:
        folder: made if missing; by default `quire/compiled` in the user's cache directory. If it is
            not private, or cannot be made, a temporary folder is used.
    """
    if folder is None:
        folder = user_cache() / "quire" / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = unsafe(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        why = str(error)
    if why:
        log.warning(
            "the cache of compiled kernels is not used, kernels are compiled again: %s", why
        )
        folder = Path(tempfile.mkdtemp(prefix="quire-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TMPDIR"] = str(folder)
    os.environ.setdefault(CACHE, str(folder / "ptx"))
    return folder


def kernel_folder() -> Path | None:
    """Return the folder of compiled kernels; None if `use_private_cache` was not called."""
    folder = os.environ.get(CACHE)
    return None if folder is None else Path(folder)


def unsafe(folder: Path) -> str:
    """Return why other users may have written to a folder; empty if they cannot."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a directory"
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"{folder} is accessible to other users (run chmod 700 on it)"
    return ""


def user_cache() -> Path:
    """Return the user's cache directory.

    Raises:
        RuntimeError: the user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
