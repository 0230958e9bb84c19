"""Model folders in the user's cache, for models that do not lie as one."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError


def made_folder(
    kind: str, name: str, source: Path, files: Mapping[str, Any], links: Mapping[str, Path]
) -> Path:
    """Make a folder of own files and of links, at a path that follows from the source.

    Written anew at each call: a server reads it as long as it runs.

    Args:
        kind: of source, a folder below the cache.
        name: for people.
        files: contents, as JSON, by name.
        links: targets by name.

    Raises:
        ModelError: the cache cannot be written.
    """
    place = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
    folder = Path.home() / ".cache" / "quire" / kind / f"{name}-{place}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for own, content in files.items():
            _write(folder / own, json.dumps(content, ensure_ascii=False))
        for own, target in links.items():
            _link(folder / own, target.resolve())
        for each in folder.iterdir():
            passing = each.name.startswith(".")  # another server's, which is writing it
            if each.is_symlink() and each.name not in links and not passing:
                each.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(
            f"{folder}: what is in {source} cannot be written here: {error}"
        ) from error
    return folder


def _write(path: Path, text: str) -> None:
    """Replaces a file in one step: another server may be reading it."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=".", delete=False
    ) as file:
        file.write(text)
    Path(file.name).replace(path)


def _link(path: Path, target: Path) -> None:
    if path.is_symlink() and path.readlink() == target:
        return
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(path)
