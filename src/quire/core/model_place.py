"""Checks the text that names a model: a folder, a GGUF file or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from quire.core.errors import ModelError

_PART = r"(?![.-])(?:(?!--|\.\.)[\w.-])+(?<![.-])"
_HUB_ID = re.compile(rf"({_PART}/{_PART})(?::([^\s:]+))?", re.ASCII)


def parse_hub_id(text: str) -> tuple[str, str | None]:
    """Return a hub id's repository, and the GGUF file or word behind the colon, if any.

    Raises:
        ModelError: the text is no hub id.
    """
    hub_id = _HUB_ID.fullmatch(text)
    if hub_id is None:
        raise ModelError(
            f"{text!r} is neither a folder nor a hub id (owner/name, or owner/name:file.gguf)"
        )
    repository, wanted = hub_id.groups()
    return repository, wanted


def check_place(text: str) -> None:
    """Check what can be known of a model's place without reading the model or asking the hub.

    Raises:
        ModelError: the text is neither the path of a folder or GGUF file nor a hub id, or the
            folder holds no model.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            raise ModelError(f"{path}: no config.json")
    elif not (path.exists() and path.suffix == ".gguf"):
        parse_hub_id(text)
