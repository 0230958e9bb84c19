"""Codes are read alike however they are read: MLX's own operations on their layout say what."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.metadata import build_metadata
from quire.cache.formats.base import LayerShape
from quire.cache.formats.codecs import CodebookCodec, codebook
from quire.cache.formats.packing import Affine, pack
from quire.cache.formats.registry import make_store
from quire.cache.specs import FullKV
from quire.core.kv_choice import parse_format
from tests.attention.rows import HandRows

BITS = (2, 3, 4, 5, 6, 8)


def codes_of(bits: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 2**bits, shape)


@pytest.mark.parametrize("bits", BITS)
def test_affine_codes_read_as_mlx_reads_them(bits: int) -> None:
    matrix = mx.random.normal((3, 96, 128), key=mx.random.key(bits))
    codes, scales, biases = mx.quantize(matrix, group_size=64, bits=bits)
    parts = [codes, scales, biases]
    expected = np.array(mx.dequantize(codes, scales, biases, group_size=64, bits=bits))
    layout = Affine(64, bits)
    np.testing.assert_allclose(np.array(layout.decode(parts)), expected, atol=1e-6)
    across, along = mx.random.normal((3, 4, 128)), mx.random.normal((3, 4, 96))
    scores = layout.product(across, parts, transpose=True)
    mixed = layout.product(along, parts, transpose=False)
    np.testing.assert_allclose(
        np.array(scores), np.array(across) @ expected.swapaxes(-1, -2), atol=1e-4
    )
    np.testing.assert_allclose(np.array(mixed), np.array(along) @ expected, atol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_packed_codes_have_the_layout_of_mlx(bits: int) -> None:
    codes = codes_of(bits, (3, 128))
    ones, zeros = mx.ones((3, 2)), mx.zeros((3, 2))
    read = mx.dequantize(pack(mx.array(codes), bits), ones, zeros, group_size=64, bits=bits)
    np.testing.assert_array_equal(np.array(read), codes)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebook_codes_read_as_their_levels(bits: int) -> None:
    codes, norms = codes_of(bits, (40, 128)), mx.full((40, 1), 3.0, dtype=mx.float16)
    codec, levels = CodebookCodec(128, bits), np.array(codebook(128, bits))
    parts = [pack(mx.array(codes), bits), norms]
    read = np.array(codec.decode(parts))
    step = levels[-1] / 127
    np.testing.assert_allclose(read * step, levels[codes] * 3, atol=0.51 * step * 3)
    for rows in (4, 40):
        q, weights = mx.random.normal((rows, 128)), mx.random.uniform(shape=(rows, 40))
        scores, mixed = codec.scores(q, parts), codec.weighted_sum(weights, parts)
        np.testing.assert_allclose(np.array(scores), np.array(q) @ read.T, rtol=1e-4, atol=0.02)
        np.testing.assert_allclose(np.array(mixed), np.array(weights) @ read, rtol=1e-4, atol=0.02)


@pytest.mark.parametrize(("bits", "error"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_turbo_errs_as_its_paper_says(bits: int, error: float) -> None:
    """Mean squared error of a normal variable under the best codebook (Max, 1960)."""
    vectors = np.random.default_rng(bits).standard_normal((400, 256)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    codec = CodebookCodec(256, bits)
    read = np.array(codec.inverse_transform(codec.decode(codec.encode(mx.array(vectors)))))
    assert ((read - vectors) ** 2).sum(axis=-1).mean() == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize("name", ["page-4", "page-8/4", "turbo-4", "uniform-4-g32"])
def test_decoded_blocks_are_what_is_multiplied(name: str) -> None:
    format = parse_format(name)
    shape = LayerShape(2, 64, 64, 64, mx.float32)
    store = make_store(shape, format)
    store.resize(3, ())
    if store.has_tail:
        store.resize_tails(1, ())
    rows = HandRows(0, 128, format, ((2, 0),), (0,) if store.has_tail else ())
    slots = build_metadata(0, FullKV(2, 64), [rows], 64).slots
    k, v = (mx.random.normal((128, 2, 64), key=mx.random.key(n)) for n in range(2))
    q, weights = (mx.random.normal((2, 3, 64), key=mx.random.key(n)) for n in (2, 3))
    store.write(k, v, slots)
    assert store.packed is not None
    reader = store.packed.read(mx.array([4, 0])[:, None])  # head 0 of both
    keys, values = reader.decoded()
    for own, usual in (
        (q @ keys.swapaxes(-1, -2), reader.scores(store.packed.transform(q))),
        (weights @ values, reader.weighted_sum(weights)),
    ):
        assert own.shape == usual.shape == (2, 3, 64)
        assert float(mx.linalg.norm(own - usual) / mx.linalg.norm(usual)) < 1e-4


@pytest.mark.parametrize("rows", [1, 64])
def test_long_vectors_are_added_up(rows: int) -> None:
    """128 times their length is more than float16 holds."""
    codec = CodebookCodec(64, 4)
    parts = codec.encode(1000 * mx.random.normal((1, 5, 64), key=mx.random.key(0)))
    weights = mx.ones((1, rows, 5))
    wanted = weights @ codec.decode(parts)
    error = mx.linalg.norm(codec.weighted_sum(weights, parts) - wanted)
    assert error <= 1e-5 * mx.linalg.norm(wanted)
