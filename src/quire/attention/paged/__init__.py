"""Attention straight from the blocks, by kernels of our own, without a gather.

`PagedBackend` uses NVIDIA's tensor cores, for decoding and prompts. `PortableBackend` is one plain
source for Metal and CUDA, for decoding.
"""

from quire.attention.paged.backend import PagedBackend
from quire.attention.paged.portable import PortableBackend

__all__ = ["PagedBackend", "PortableBackend"]
