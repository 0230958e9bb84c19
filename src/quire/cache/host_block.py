"""A block's contents on the host, as arrays and as bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

HostBlock = tuple[tuple[str, npt.NDArray[Any]], ...]
"""Arrays of a block on the host: (MLX's dtype name, bits as unsigned integers or plain floats)."""


def block_bytes_of(block: HostBlock) -> int:
    """Return the bytes of the arrays."""
    return sum(array.nbytes for _, array in block)


def pack(block: HostBlock) -> bytes:
    """Return a block as bytes: the layout's length, the layout as JSON, then the arrays."""
    layout = json.dumps([[dtype, array.dtype.str, array.shape] for dtype, array in block]).encode()
    parts = [np.ascontiguousarray(array).data.cast("B") for _, array in block if array.size]
    return b"".join([len(layout).to_bytes(4, "little"), layout, *parts])


def unpack(value: bytes) -> HostBlock:
    """Return the block that `pack` packed. Its arrays are views of `value`."""
    at = 4 + int.from_bytes(value[:4], "little")
    block = []
    for dtype, kind, shape in json.loads(value[4:at]):
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(value, np.dtype(kind), count, at).reshape(shape)
        block.append((dtype, array))
        at += array.nbytes
    return tuple(block)
