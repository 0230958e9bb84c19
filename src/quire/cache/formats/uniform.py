"""Affine codes a token, as mlx-lm and mlx-vlm store them: to compare with, and to migrate from."""

from __future__ import annotations

from quire.cache.formats.codecs import AffineCodec, Codec
from quire.cache.formats.tokens import TokenStore
from quire.core.kv_format import KVFormat


class UniformStore(TokenStore):
    """A scale and a bias for each `group_size` elements of each key and value."""

    @classmethod
    def codecs(cls, head_dim: int, format: KVFormat) -> tuple[Codec, Codec]:
        def codec(bits: float) -> Codec:
            return AffineCodec(head_dim, int(bits), format.group_size, rotate=False, refit=False)

        keys = codec(format.key_bits)
        return keys, keys if format.value_bits == format.key_bits else codec(format.value_bits)
