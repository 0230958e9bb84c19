"""Detects changes of a model's small files since its server read them."""

from __future__ import annotations

from pathlib import Path

from quire.core.errors import ModelError

Stamp = frozenset[tuple[str, int, int, int]]
"""Name, size, time of change (ns) and inode of each file."""

_READ = {".json", ".jinja", ".model", ".txt"}
"""Endings of the files that request processing reads; only the engine reads weights."""


def stamp_of(folder: Path) -> Stamp:
    """Return a value that changes when a file of the folder is replaced."""
    found = set()
    for path in folder.iterdir():
        if path.suffix in _READ:
            stat = path.stat()
            found.add((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return frozenset(found)


def check_unchanged(folder: Path, stamp: Stamp | None) -> None:
    """Raise `ModelError` if the model's files were replaced since the server read them.

    Otherwise prompts and grammars would use another tokenizer than the engine's.
    """
    if stamp is None:
        return
    try:
        now = stamp_of(folder)
    except OSError as error:
        raise ModelError(f"{folder}: {error.strerror}") from error
    if changed := sorted({name for name, *_ in now ^ stamp}):
        names = ", ".join(changed)
        raise ModelError(
            f"{folder}: {names} changed since the model was loaded; unload it, so that the "
            "next request loads the new files"
        )
