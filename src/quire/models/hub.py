"""From a folder's path or a hub id to a folder on this disk."""

from __future__ import annotations

import re
from pathlib import Path

from quire.core.errors import ModelError

_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(path_or_hub_id: str) -> Path:
    """The folder itself, or a snapshot from the hub, downloaded if this disk lacks it.

    A GGUF file, or a folder that holds one, is given as a folder with the files that it stands for.

    `huggingface_hub` shows the progress, resumes what was broken off, and uses the files on this
    disk when the hub cannot be reached.

    Raises:
        ModelError: neither a folder nor a hub id, a GGUF file that cannot be served, or the
            download failed.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.exists() and (gguf := _find_gguf(folder)):
        from quire.models.gguf.folder import as_folder

        return as_folder(gguf)
    if folder.is_dir():
        return folder
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


def _find_gguf(path: Path) -> Path | None:
    # Imported late: most starts read no such file.
    if path.suffix != ".gguf" and not any(path.glob("*.gguf")):
        return None
    from quire.models.gguf.folder import find_gguf

    return find_gguf(path)
