"""Checks the places of a model and its adapters before an engine starts: folders, GGUF files or
hub ids.
"""

from __future__ import annotations

import re
from pathlib import Path

from quire.core.config import EngineConfig
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


def check_places(config: EngineConfig) -> None:
    """Check what can be known of an engine's models and adapters without reading them or asking
    the hub.

    Raises:
        ModelError: a place is neither a folder or GGUF file nor a hub id, or the folder holds no
            such thing.
    """
    for model in filter(None, (config.model, config.draft_model)):
        _check(model, "config.json")
    for adapter in filter(None, (config.adapter, *(place for _, place in config.adapters))):
        _check(adapter, "adapter_config.json")


def _check(text: str, needed: str) -> None:
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / needed).is_file() and not any(path.glob("*.gguf")):
            raise ModelError(f"{path}: no {needed}")
    elif not (path.exists() and path.suffix == ".gguf"):
        parse_hub_id(text)
