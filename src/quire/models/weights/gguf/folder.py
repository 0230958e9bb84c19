"""A GGUF file as a model folder, with the files that other code reads."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.models.weights.gguf.architectures import REFUSED, config_of
from quire.models.weights.gguf.file import GGUF, is_first, read_gguf
from quire.models.weights.gguf.sentences import sentence_files, sentence_tensors
from quire.models.weights.gguf.tokenizer import end_ids, tokenizer_files
from quire.models.weights.made_folder import made_folder

log = logging.getLogger("quire.models")

GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Recommended sampling parameters, by their keys after `general.sampling.`."""


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF model at a path: a file, or the only one in a folder without safetensors.

    Raises:
        ModelError: the folder holds several models, or only an encoder.
    """
    if path.is_file():
        if path.suffix == ".gguf" and _is_encoder(path):
            raise ModelError(f"{path}: {REFUSED['clip']}")
        return path if path.suffix == ".gguf" else None
    if any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    models = [file for file in files if is_model(file)]
    if encoders := ", ".join(file.name for file in files if _is_encoder(file)):
        if not models:
            raise ModelError(f"{path}: {encoders}: {REFUSED['clip']}")
        log.warning(
            "%s: GGUF encoders are not supported, the model serves text only: %s", path, encoders
        )
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ModelError(f"{path}: holds several GGUF models; name one of {names}")
    return models[0] if models else None


def is_model(file: Path) -> bool:
    """Return whether a GGUF file is a text model, or the first part of one."""
    return is_first(file) and not _is_encoder(file)


def _is_encoder(file: Path) -> bool:
    """Return whether a file is an encoder of images or sound, which has `mmproj` in its name."""
    return "mmproj" in file.name


def choose(names: Sequence[str], wanted: str | None, repository: str) -> str:
    """Return the GGUF model of a repository that a name or word selects.

    Args:
        names: names of all files.
        wanted: a file name, or a word of it such as `Q4_K_M`.

    Raises:
        ModelError: no file or several match, or the file is an encoder.
    """
    models = sorted(name for name in names if name.endswith(".gguf") and is_model(Path(name)))
    word = re.compile(rf"(?:^|[-._/]){re.escape(wanted or '')}(?:[-._/]|$)", re.IGNORECASE)
    exact = [name for name in names if name == wanted and name.endswith(".gguf")]
    if exact and _is_encoder(Path(exact[0])):
        known = ", ".join(f"{repository}:{name}" for name in models) or "none"
        raise ModelError(f"{repository}:{wanted}: {REFUSED['clip']}; there are {known}")
    found = exact or [name for name in models if wanted is None or word.search(name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{repository}:{name}" for name in found or models) or "none"
    if found:
        raise ModelError(f"{repository}: holds several GGUF models; name one of {known}")
    raise ModelError(f"{repository}: no GGUF model {wanted!r}; there are {known}")


def parts_of(name: str) -> str:
    """Return a glob pattern that matches the file, and its other parts if it has several."""
    return re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-*\1", glob.escape(name))


def as_folder(path: Path) -> Path:
    """Return a folder with `config.json`, tokenizer files, and links to the file and its parts.

    The folder is in the user's cache, at a path derived from the file's, and is rewritten at each
    call. A server reads it while it runs.

    Raises:
        ModelError: the file is damaged or cannot be served, or the cache cannot be written.
    """
    gguf = read_gguf(path)
    files: dict[str, Any] = {
        "config.json": config_of(gguf) | _ends(gguf),
        "generation_config.json": _generation(gguf),
        **tokenizer_files(gguf),
        **sentence_files(gguf),
    }
    # The hub's cache names the file itself by its content.
    name, links = gguf.files[0].stem, {file.name: file for file in gguf.files}
    tensors = sentence_tensors(gguf)
    return made_folder("gguf", name, gguf.files[0], files=files, links=links, tensors=tensors)


def _ends(gguf: GGUF) -> dict[str, Any]:
    ids = {"bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id")}
    return ids | {"eos_token_id": end_ids(gguf)}


def _generation(gguf: GGUF) -> dict[str, Any]:
    """Return the sampling settings that the file recommends."""
    given = {
        name: gguf.metadata.get(f"general.sampling.{key}") for key, name in GGUF_SAMPLING.items()
    }
    known = {name: value for name, value in given.items() if value is not None}
    return known | {"eos_token_id": end_ids(gguf)}
