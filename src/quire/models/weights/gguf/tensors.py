"""Lazy MLX arrays of GGUF's tensors, which are read when evaluated."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, cast

import mlx.core as mx

from quire.models.weights.gguf.codes import FLOATS
from quire.models.weights.gguf.file import GGUF, TensorInfo


def lazy_rows(gguf: GGUF) -> dict[str, mx.array]:
    """Return each tensor: floats `[..., columns]`, or the bytes of its rows.

    MLX reads safetensors lazily. So each part is presented to it as a safetensors file, by a header
    that gives the tensors' places in the file.
    """
    arrays: dict[str, mx.array] = {}
    for file in gguf.files:
        here = {name: info for name, info in gguf.tensors.items() if info.file == file}
        if here:
            reader = cast(BinaryIO, _AsSafetensors(file, here))
            loaded = mx.load(reader, format="safetensors")
            assert isinstance(loaded, dict)
            arrays |= loaded
    return arrays


class _AsSafetensors(io.RawIOBase):
    """A GGUF file presented with a safetensors header, followed by the data from the first tensor
    on.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        super().__init__()
        self._first = min(info.start for info in tensors.values())
        lines = {name: _line(info, self._first) for name, info in tensors.items()}
        header = json.dumps(lines).encode()
        self._header = len(header).to_bytes(8, "little") + header
        self._file = path.open("rb", buffering=0)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            offset += self._at
        elif whence == io.SEEK_END:
            length = self._file.seek(0, io.SEEK_END) - self._first
            offset += len(self._header) + length
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # MLX's is writable
        if self._at < len(self._header):
            piece = self._header[self._at : self._at + len(buffer)]
            buffer[: len(piece)] = piece
            count = len(piece)
        else:
            self._file.seek(self._first + self._at - len(self._header))
            count = 0
            while count < len(buffer):  # the system reads 2 GiB at most at once
                read = self._file.readinto(buffer[count:])
                if not read:
                    break
                count += read
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _line(info: TensorInfo, first: int) -> dict[str, object]:
    columns = info.shape[-1] if info.kind in FLOATS else info.row_bytes
    start = info.start - first
    return {
        "dtype": FLOATS.get(info.kind, "U8"),
        "shape": [*info.shape[:-1], columns],
        "data_offsets": [start, start + info.nbytes],
    }
