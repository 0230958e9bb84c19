"""Vectors as codes, by the kernel's source in an emulation."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.cache.formats.codecs import AffineCodec, CodebookCodec, Codec
from quire.device.cuda.encoding import Encoder, encoding_differs
from tests.support.emulated_metal import why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.usefixtures("emulated"),
]
EVERY = [
    *(AffineCodec(64, n, 64, rotate=False, refit=False) for n in (2, 3, 4, 5, 6, 8)),
    *(AffineCodec(64, n, 32, rotate=True, refit=True) for n in (2, 3, 6)),
    AffineCodec(256, 8, 128, rotate=True, refit=True),
    AffineCodec(90, 4, 64, rotate=False, refit=True),
    *(CodebookCodec(128, n) for n in (2, 3, 4)),
]


def assert_coded_alike(vectors: list[mx.array], codecs: list[Codec]) -> None:
    """Assert that the kernel's codes stand for the codecs' numbers; at an edge they may differ."""
    parts = Encoder().encode(vectors, [codec.coding for codec in codecs])
    assert parts is not None
    for x, codec in zip(vectors, codecs, strict=True):
        usual = codec.code(codec.prepare(x))
        own, parts = parts[: len(usual)], parts[len(usual) :]
        assert [(each.shape, each.dtype) for each in own] == [
            (each.shape, each.dtype) for each in usual
        ]
        found, expected = codec.decode(own), codec.decode(usual)
        assert float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected)) < 2e-3
    assert not parts


@pytest.mark.slow
@pytest.mark.parametrize("codec", EVERY, ids=lambda codec: str(codec.coding)[:60])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_codes_are_those_of_the_codec(codec: Codec, dtype: mx.Dtype) -> None:
    assert encoding_differs(codec.coding) is None
    assert_coded_alike([normal((3, 5, codec.dim), dtype)], [codec])


def test_keys_and_values_are_coded_by_one_launch() -> None:
    keys, values = CodebookCodec(64, 3), AffineCodec(96, 5, 32, rotate=False, refit=False)
    shapes = [(3, 2, 64), (3, 2, 96)]
    assert_coded_alike([normal(each, mx.bfloat16) for each in shapes], [keys, values])


def test_vectors_that_a_matrix_rotates_are_left_to_mlx() -> None:
    codec = AffineCodec(96, 4, 32, rotate=True, refit=True)
    assert Encoder().encode([normal((3, 96), mx.float32)], [codec.coding]) is None


def normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(1)) * 2 + 1).astype(dtype)
