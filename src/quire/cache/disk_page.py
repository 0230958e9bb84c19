"""A page's contents on the host, and as bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

HostPage = tuple[tuple[str, npt.NDArray[Any]], ...]
"""A page's arrays: (dtype as MLX names it, bits as unsigned integers or plain floats)."""


def page_size(page: HostPage) -> int:
    """Bytes of the arrays."""
    return sum(array.nbytes for _, array in page)


def pack(page: HostPage) -> bytes:
    """A page as bytes: how long the layout is, the layout as JSON, then the arrays."""
    layout = json.dumps([[dtype, array.dtype.str, array.shape] for dtype, array in page]).encode()
    parts = [np.ascontiguousarray(array).data.cast("B") for _, array in page if array.size]
    return b"".join([len(layout).to_bytes(4, "little"), layout, *parts])


def unpack(value: bytes) -> HostPage:
    """What `pack` was given; the arrays look into `value`."""
    at = 4 + int.from_bytes(value[:4], "little")
    page = []
    for dtype, kind, shape in json.loads(value[4:at]):
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(value, np.dtype(kind), count, at).reshape(shape)
        page.append((dtype, array))
        at += array.nbytes
    return tuple(page)
