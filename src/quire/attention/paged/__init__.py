"""Attention directly over blocks, by own kernels, without gathering.

`PagedBackend` and `TokensBackend` use NVIDIA's tensor cores, for generating rows and prompts: over
plain blocks and page codes, and over codes of single tokens. `PortableBackend` is one source for
Metal and CUDA, for generating rows.
"""

from quire.attention.paged.backend import PagedBackend
from quire.attention.paged.portable import PortableBackend
from quire.attention.paged.tokens import TokensBackend

__all__ = ["PagedBackend", "PortableBackend", "TokensBackend"]
