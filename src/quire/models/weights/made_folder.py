"""Model folders that are generated in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError


def made_folder(
    kind: str,
    name: str,
    source: Path,
    files: Mapping[str, Any],
    links: Mapping[str, Path],
    tensors: Mapping[str, Mapping[str, mx.array]] | None = None,
) -> Path:
    """Create a folder of generated files and links, at a path derived from the source.

    It is rewritten at each call; a server reads it while it runs.

    Args:
        kind: kind of source, the name of a folder in the cache.
        name: readable part of the folder's name.
        files: JSON contents by file name, which may name a folder within.
        links: link targets by name.
        tensors: contents of safetensors by file name.

    Raises:
        ModelError: the cache cannot be written.
    """
    place = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
    folder = Path.home() / ".cache" / "quire" / kind / f"{name}-{place}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for own, content in files.items():
            _write(folder / own, json.dumps(content, ensure_ascii=False))
        for own, arrays in (tensors or {}).items():
            _save(folder / own, arrays)
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
    """Replace a file atomically, since another server may be reading it."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=".", delete=False
    ) as file:
        file.write(text)
    Path(file.name).replace(path)


def _save(path: Path, arrays: Mapping[str, mx.array]) -> None:
    """Replace a file of tensors atomically."""
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_name(f".{os.getpid()}-{path.name}")
    mx.save_safetensors(str(fresh), dict(arrays))
    fresh.replace(path)


def _link(path: Path, target: Path) -> None:
    if path.is_symlink() and path.readlink() == target:
        return
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(path)
