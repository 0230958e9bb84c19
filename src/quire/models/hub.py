"""From a folder's path or a hub id to a folder on this disk."""

from __future__ import annotations

import re
from pathlib import Path

from quire.core.errors import ModelError

_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_GGUF = "GGUF is not read; safetensors of the model, or an MLX conversion, are"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(path_or_hub_id: str) -> Path:
    """The folder itself, or a snapshot from the hub, downloaded if this disk lacks it.

    `huggingface_hub` shows the progress, resumes what was broken off, and uses the files on this
    disk when the hub cannot be reached.

    Raises:
        ModelError: neither a folder nor a hub id, weights in GGUF alone, or the download failed.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
            raise ModelError(f"{folder}: {_GGUF}")
        return folder
    if folder.is_file() and folder.suffix == ".gguf":
        raise ModelError(f"{folder}: {_GGUF}")
    if not _HUB_ID.fullmatch(path_or_hub_id):
        raise ModelError(f"{path_or_hub_id!r} is neither a folder nor a hub id (owner/name)")
    # Imported late: most starts open a folder, and the import takes a third of a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path_or_hub_id, allow_patterns=list(_FILES)))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{path_or_hub_id!r} is not on this disk and the hub cannot be reached"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{path_or_hub_id!r} could not be downloaded: {error}") from error
