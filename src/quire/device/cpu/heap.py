"""Settings of the C library's heap."""

from __future__ import annotations

import ctypes
import sys

_MALLOC = {-3: 32 << 20, -1: 64 << 20}
"""Options of mallopt(3): the size from which blocks are mapped apart from the heap
(M_MMAP_THRESHOLD), and the free memory at the heap's end that is returned to the system
(M_TRIM_THRESHOLD).
"""


def keep_large_blocks() -> None:
    """Let the heap reuse the memory of a step's larger arrays.

    They would be mapped and unmapped again and again: each time the system clears their pages,
    which takes a fifth of reading a prompt.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for option, value in _MALLOC.items():
            libc.mallopt(option, value)
