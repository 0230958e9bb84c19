"""Attention straight from the blocks, by kernels of our own, without a gather.

`PagedBackend` and `TokensBackend` use NVIDIA's tensor cores, for decoding and prompts: over plain
blocks and page codes, and over codes of single tokens. `PortableBackend` is one plain source for
Metal and CUDA, for decoding.
"""

from quire.attention.paged.backend import PagedBackend
from quire.attention.paged.portable import PortableBackend
from quire.attention.paged.tokens import TokensBackend

__all__ = ["PagedBackend", "PortableBackend", "TokensBackend"]
