"""Reads the headers of GGUF files, without their tensors.

Format: magic, version, counts, typed metadata, an entry per tensor, aligned data. The `gguf`
package's own reader makes an array of every string: it takes 17 s for a vocabulary of 150,000, this
one 0.3 s.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire.core.errors import ModelError
from quire.core.folder import refuse_pointer
from quire.core.values import LARGEST
from quire.models.weights.gguf.metadata import POSITIVE, check, kind_of

_VERSIONS = (2, 3)
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place and type of a tensor in a file.

    Attributes:
        kind: the type of its numbers.
        shape: number of elements per axis, outermost first (reversed in the file).
        start: offset of its first byte in `file`.
    """

    file: Path
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is a whole number of blocks."""
        numbers, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // numbers * size

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GGUF:
    """A GGUF model, of one file or several parts.

    Attributes:
        files: the parts, in order.
        metadata: values by key, of the first part.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's key, such as `attention.head_count`.

        Raises:
            ModelError: the value has the wrong type.
        """
        name = f"{self.architecture}.{key}"
        if name not in self.metadata:
            return default
        check(self.files[0], name, self.metadata[name], kind=kind_of(key))
        return self.metadata[name]

    def tensor(self, name: str) -> TensorInfo:
        """Return a tensor's entry.

        Raises:
            ModelError: there is no such tensor.
        """
        if name not in self.tensors:
            raise ModelError(f"{self.files[0]}: no tensor {name!r}")
        return self.tensors[name]

    def need(self, key: str) -> Any:
        """Return the value of a required key, as `get`.

        Raises:
            ModelError: there is no such key.
        """
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.files[0]}: no '{self.architecture}.{key}' in the metadata")
        return value


def read_gguf(path: Path) -> GGUF:
    """Read the headers of a file, and of the other parts if it is one of several.

    Raises:
        ModelError: the file is not GGUF, of an unknown version or truncated, or a part is missing.
    """
    files = _parts(path)
    parts = [_Header(file) for file in files]
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        tensors |= part.tensors
    return GGUF(files, parts[0].metadata, tensors)


def is_first(path: Path) -> bool:
    """Return whether a file is a whole model or its first part."""
    match = _PART.fullmatch(path.name)
    return match is None or int(match[2]) == 1


def _parts(path: Path) -> tuple[Path, ...]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match[3])
    files = [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{path}: part {file.name!r} is missing")
    return tuple(files)


class _Header:
    """One file's header, read from front to back."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        try:
            with path.open("rb") as file:
                self._size = path.stat().st_size
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        with self._data:
            try:
                self.metadata, self.tensors = self._read()
            except (struct.error, ValueError, KeyError, RecursionError) as error:
                raise ModelError(
                    f"{path}: damaged GGUF header, or cut short at {self._size} bytes: {error}"
                ) from error

    def _read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        refuse_pointer(self._path, self._data[:128])
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self._path}: not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            known = ", ".join(map(str, _VERSIONS))
            raise ModelError(
                f"{self._path}: GGUF version {version} in this byte order is not supported "
                f"(known: {known})"
            )
        tensors, keys = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        lines = [self._line() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        check(self._path, "general.alignment", alignment, kind=POSITIVE)
        first = -(-self._at // alignment) * alignment
        return metadata, dict(self._placed(lines, first))

    def _placed(
        self, lines: list[tuple[str, tuple[int, ...], int, int]], first: int
    ) -> Iterator[tuple[str, TensorInfo]]:
        for name, shape, kind, offset in lines:
            try:
                known = GGMLQuantizationType(kind)
            except ValueError as error:
                raise ModelError(
                    f"{self._path}: tensor {name!r} has the unknown type {kind}"
                ) from error
            block, _ = GGML_QUANT_SIZES[known]
            if not shape or not all(0 < size <= LARGEST for size in shape) or shape[-1] % block:
                raise ModelError(
                    f"{self._path}: tensor {name!r} of type {known.name} cannot have shape {shape}"
                )
            info = TensorInfo(self._path, known, shape, start=first + offset)
            if info.start + info.nbytes > self._size:
                raise ModelError(
                    f"{self._path}: tensor {name!r} ends at byte {info.start + info.nbytes}, "
                    f"the file at {self._size}"
                )
            yield name, info

    def _line(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        if self._at + length > self._size:
            raise ValueError(f"a string of {length} bytes")
        text = self._data[self._at : self._at + length].decode()
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        value = self._scalar(_SCALARS[kind])
        # float32's shortest digits: 1e-06, not 9.999999974752427e-07.
        return float(str(np.float32(value))) if _SCALARS[kind] == "f" else value

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(count)]
        dtype = np.dtype(
            "<" + {"?": "b1", "b": "i1", "B": "u1"}.get(_SCALARS[kind], _SCALARS[kind])
        )
        values = np.frombuffer(self._data[self._at : self._at + count * dtype.itemsize], dtype)
        if len(values) != count:
            raise ValueError(f"an array of {count}")
        self._at += count * dtype.itemsize
        listed: list[Any] = values.tolist()
        return listed
