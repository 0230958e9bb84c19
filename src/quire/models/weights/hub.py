"""Finds a model's folder on this disk by its path or hub id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.core.errors import ModelError
from quire.core.model_place import parse_hub_id

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")


def find_folder(path_or_hub_id: str) -> Path:
    """Return the folder itself, or a snapshot from the hub, downloaded if it is not on this disk.

    A GGUF file, or a folder that holds one, is converted to a model folder. `owner/name:file.gguf`
    is a file of a repository, `owner/name:Q4_K_M` the file with that word in its name. A repository
    without safetensors may hold one GGUF model.

    `huggingface_hub` shows progress, resumes interrupted downloads, and uses local files if the hub
    cannot be reached.

    Raises:
        ModelError: the text is neither a folder nor a hub id, a GGUF file is missing or not
            supported, several GGUF models match, or the download failed.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.exists() and (gguf := _find_gguf(folder)):
        from quire.models.weights.gguf.folder import as_folder

        return as_folder(gguf)
    if folder.is_dir():
        return folder
    repository, wanted = parse_hub_id(path_or_hub_id)
    if wanted is None:
        folder = _snapshot(repository, _FILES)
        if any(folder.glob("*.safetensors")):
            return folder
    return _gguf_of(repository, wanted) or folder


def _gguf_of(repository: str, wanted: str | None) -> Path | None:
    """Return the folder of a repository's GGUF model; None if it holds none.

    Raises:
        ModelError: as for `find_folder`.
    """
    from quire.models.weights.gguf.folder import as_folder, choose, parts_of

    names = _listed(repository)
    if wanted is None and not any(name.endswith(".gguf") for name in names):
        return None
    name = choose(names, wanted, repository)
    return as_folder(_snapshot(repository, (parts_of(name),)) / name)


def _listed(repository: str) -> list[str]:
    """Return the files of a repository, or its local ones if the hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return [file.rfilename for file in HfApi().model_info(repository).siblings or ()]
    except HfHubHTTPError as error:
        raise _not_downloaded(repository, error) from error
    except Exception:  # no connection: huggingface_hub raises errors of requests or of httpx
        return _listed_here(repository)


def _listed_here(repository: str) -> list[str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        known = [each for each in scan_cache_dir().repos if each.repo_id == repository]
    except CacheNotFound as error:
        raise _not_reached(repository) from error
    newest = max(
        (revision for each in known for revision in each.revisions),
        key=lambda revision: revision.last_modified,
        default=None,
    )
    if newest is None:
        raise _not_reached(repository)
    return [str(file.file_path.relative_to(newest.snapshot_path)) for file in newest.files]


def _snapshot(repository: str, patterns: Sequence[str]) -> Path:
    # Imported late, since most starts open a folder, and this import takes 0.3 s.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        raise _not_reached(repository) from error
    except (HfHubHTTPError, OSError) as error:
        raise _not_downloaded(repository, error) from error


def _not_reached(repository: str) -> ModelError:
    return ModelError(f"{repository!r} is not on this disk and the hub cannot be reached")


def _not_downloaded(repository: str, error: Exception) -> ModelError:
    return ModelError(f"{repository!r} could not be downloaded: {error}")


def _find_gguf(path: Path) -> Path | None:
    # Imported late: most starts read no such file.
    if path.suffix != ".gguf" and not any(path.glob("*.gguf")):
        return None
    from quire.models.weights.gguf.folder import find_gguf

    return find_gguf(path)
