"""Affine codes of single tokens, as mlx-lm and mlx-vlm store them, for comparison and migration."""

from __future__ import annotations

from quire.cache.formats.codecs import AffineCodec, Codec
from quire.cache.formats.tokens import TokenStore
from quire.core.kv_format import KVFormat


class UniformStore(TokenStore):
    """A scale and a bias for each `group_size` elements of each key and value."""

    @classmethod
    def bits(cls, format: KVFormat) -> tuple[int, int]:
        return int(format.key_bits), int(format.value_bits)

    @classmethod
    def codec(cls, dim: int, bits: int, format: KVFormat) -> Codec:
        return AffineCodec(dim, bits, format.group_size, rotate=False, refit=False)
