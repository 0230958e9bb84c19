"""Reads the headers of safetensors files, without their data.

Format: 8 bytes little-endian header length, a JSON header, the data
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.folder import read_object, refuse_pointer

log = logging.getLogger("quire.models")

_MAX_HEADER = 100 << 20
_START = 128
_NUMBERED = re.compile(r"model-\d+-of-(\d+)\.safetensors")


def find_shards(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, sorted.

    These are the files in its index; without an index, `model.safetensors`, or the numbered files,
    or all. Other files, such as adapters, are named in the log.

    Raises:
        ModelError: there are no files, one that the index or the numbers in the names ask for is
            missing, or the index is damaged.
    """
    found = sorted(folder.glob("*.safetensors"))
    shards = _shards(folder, found)
    if ignored := [path.name for path in found if path not in shards]:
        log.warning(
            "%s: ignoring files that are not the model's weights: %s", folder, ", ".join(ignored)
        )
    return shards


def _shards(folder: Path, found: list[Path]) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _listed(index)
        for name in names:
            if not (folder / name).is_file():
                raise ModelError(f"{folder}: weight file {name!r}, listed in the index, is missing")
        return [folder / name for name in names]
    if not found:
        raise ModelError(f"{folder}: no .safetensors files")
    if folder / "model.safetensors" in found:
        return [folder / "model.safetensors"]
    numbered = {path: match[1] for path in found if (match := _NUMBERED.fullmatch(path.name))}
    for total in set(numbered.values()):
        if (there := [*numbered.values()].count(total)) < int(total):
            raise ModelError(
                f"{folder}: {there} of the {int(total)} files 'model-N-of-{total}.safetensors' "
                "are there. Download the others."
            )
    return [*numbered] or found


def _listed(index: Path) -> list[str]:
    """Return the files that an index names."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ModelError(f"{index}: 'weight_map' does not map tensors to files")
    return sorted(set(files.values()))


def read_header(path: Path) -> bytes:
    """Return the JSON header of one file, checked against the file's size.

    Raises:
        ModelError: the file is not a safetensors file, cannot be read, or is truncated.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_START)
            length = int.from_bytes(start[:8], "little")
            header = (start[8:] + file.read(min(length, _MAX_HEADER)))[:length]
    except OSError as error:  # such as a link of the hub's cache to a file that is gone
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    refuse_pointer(path, start)
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise ModelError(f"{path}: not a safetensors file, or cut short at {size} bytes")
    expected = 8 + length + max((_end(path, *each) for each in _entries(path, header)), default=0)
    if size != expected:
        raise ModelError(f"{path}: {size} bytes, but its header promises {expected}")
    return header


def tensor_types(header: bytes) -> dict[str, str]:
    """Return the type of each tensor, such as "F8_E8M0", from a header checked by `read_header`."""
    entries = json.loads(header)
    return {name: entry["dtype"] for name, entry in entries.items() if name != "__metadata__"}


def _entries(path: Path, header: bytes) -> list[tuple[str, Any]]:
    """Return the tensors of a header with their names."""
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the safetensors header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{path}: the safetensors header is not a map of tensors")
    return [(name, entry) for name, entry in entries.items() if name != "__metadata__"]


def _end(path: Path, name: str, entry: Any) -> int:
    """Return the end of a tensor's data, counted from the end of the header.

    Raises:
        ModelError: the entry is incomplete.
    """
    match entry:
        case {"dtype": str(), "shape": [*shape], "data_offsets": [int(), int(end)]} if all(
            isinstance(size, int) and size >= 0 for size in shape
        ):
            return end
    raise ModelError(f"{path}: tensor {name!r} lacks its type, shape or offsets in the header")
