"""Reads a rank's pieces of tensors from safetensors files, without the rest of the tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from quire.models.shares import Range, joined_pieces

_LEAST = 4096
"""Bytes that must stand together: parts of shorter rows lie in as many pages as whole rows."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in a file.

    Attributes:
        start: offset of its first byte.
        dtype: its type as MLX reads it.
    """

    file: BinaryIO
    start: int
    shape: tuple[int, ...]
    dtype: mx.Dtype

    def read(self, ends: Range, axis: int) -> mx.array:
        """Read a piece along an axis."""
        first, last = ends
        inner = math.prod(self.shape[axis + 1 :]) * self.dtype.size
        row = (last - first) * inner
        shape = (*self.shape[:axis], last - first, *self.shape[axis + 1 :])
        data = np.empty((math.prod(self.shape[:axis]), row), np.uint8)
        for number, each in enumerate(data):
            offset = self.start + (number * self.shape[axis] + first) * inner
            _fill(self.file, offset, each.data)
        if self.dtype == mx.bfloat16:
            return mx.array(data.view(np.uint16).reshape(shape)).view(mx.bfloat16)
        return mx.array(data.view(str(self.dtype).removeprefix("mlx.core.")).reshape(shape))


class Pieces:
    """Pieces of a checkpoint's tensors. Those of arrays that the family's code computed cannot be
    read alone: MLX reads all that they depend on.

    It keeps arrays that were not evaluated, and so must not outlive the loading.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[mx.array, _Place]] = {}
        self._wanted: dict[int, tuple[mx.array, Callable[[], mx.array]]] = {}
        """Pieces that `read` replaces, like `_places` by the identity of arrays, which are kept so
        that no other array gets it.
        """

    def add(self, path: Path, header: bytes, tensors: Mapping[str, mx.array]) -> None:
        """Note where a file's tensors are."""
        file = path.open("rb", buffering=0)
        for name, entry in json.loads(header).items():
            if (array := tensors.get(name)) is not None:
                start = 8 + len(header) + entry["data_offsets"][0]
                place = _Place(file, start, shape=tuple(entry["shape"]), dtype=array.dtype)
                self._places[id(array)] = array, place

    def follow(self, before: Mapping[str, mx.array], after: Mapping[str, mx.array]) -> None:
        """Note that tensors were converted to other types."""
        for name, array in before.items():
            if (known := self._places.get(id(array))) is not None:
                self._places[id(after[name])] = after[name], known[1]

    def take(self, array: mx.array, ranges: Sequence[Range], axis: int) -> mx.array:
        """Return ranges along an axis, joined. Nothing is read yet."""
        piece = joined_pieces(array, ranges, axis)
        if (known := self._places.get(id(array))) is not None:
            place = known[1]
            inner = math.prod(place.shape[axis + 1 :]) * place.dtype.size
            if min(last - first for first, last in ranges) * inner >= _LEAST:

                def read(dtype: mx.Dtype = array.dtype) -> mx.array:
                    parts = [place.read(each, axis).astype(dtype) for each in ranges]
                    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)

                self._wanted[id(piece)] = piece, read
        return piece

    def read(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights with pieces read from the files."""
        ready = {}
        for name, array in weights.items():
            wanted = self._wanted.pop(id(array), None)
            if wanted is not None:
                array = wanted[1]()
                mx.eval(array)
            ready[name] = array
        return ready


def _fill(file: BinaryIO, offset: int, buffer: memoryview) -> None:
    """Read bytes from an offset on until the buffer is full."""
    while buffer:
        count = os.preadv(file.fileno(), [buffer], offset)
        if not count:
            raise EOFError(f"{file.name} was cut short")
        buffer, offset = buffer[count:], offset + count
