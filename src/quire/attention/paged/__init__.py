"""Attention straight from the blocks, by kernels of our own: decoding and prompts, no gather."""

from quire.attention.paged.backend import PagedBackend

__all__ = ["PagedBackend"]
