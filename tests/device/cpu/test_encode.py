"""Vectors become the codes that MLX's operations make of them, each vector by itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.cache.formats.codecs import AffineCodec, CodebookCodec, Codec
from quire.device.cpu.kernels import CPUKernels
from quire.device.cpu.operations import KernelOperations

CODECS: list[Codec] = [
    *(AffineCodec(128, bits, 64, rotate=False, refit=False) for bits in (4, 5, 8)),
    *(AffineCodec(80, bits, 64, rotate=True, refit=True) for bits in (2, 3, 4, 6)),
    *(CodebookCodec(dim, bits) for dim, bits in ((64, 2), (128, 3), (80, 4))),
]


def drawn(codec: Codec) -> mx.array:
    """Return vectors of many lengths, one of them zero, one too long for float16."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 2, codec.dim)) * 10.0 ** rng.uniform(-6, 3, (40, 2, 1))
    x[0, 0] = 0
    x[1, 0] = 1e6
    return mx.array(x.astype(np.float32))


def encoded(ops: Any, x: mx.array, codec: Codec) -> list[mx.array]:
    return KernelOperations(CPUKernels(ops, "", 1)).encode([x], [codec.coding])


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{type(c).__name__}{c.bits}")
def test_codes_are_those_of_the_reference(ops: Any, codec: Codec) -> None:
    x = drawn(codec)
    codes = encoded(ops, x, codec)
    reference = codec.code(codec.prepare(x))
    assert [(c.dtype, c.shape) for c in codes] == [(r.dtype, r.shape) for r in reference]
    differing = [np.mean(np.array(c) != np.array(r)) for c, r in zip(codes, reference, strict=True)]
    assert max(differing) < 0.02  # elements that lie on an edge, but for rounding
    parts = encoded(ops, x[3:5], codec)
    assert all(mx.array_equal(part, c[3:5]) for part, c in zip(parts, codes, strict=True))


def test_several_arrays_together(compiled: Any) -> None:
    keys, values = CODECS[0], CODECS[-1]
    x, y = drawn(keys), drawn(values)
    both = KernelOperations(CPUKernels(compiled, "", 1)).encode(
        [x.astype(mx.bfloat16), y], [keys.coding, values.coding]
    )
    apart = encoded(compiled, x.astype(mx.bfloat16).astype(mx.float32), keys)
    apart += encoded(compiled, y, values)
    assert len(both) == 5
    assert all(mx.array_equal(a, b) for a, b in zip(both, apart, strict=True))


def test_threads_change_no_bit(compiled: Any) -> None:
    codec = AffineCodec(128, 4, 64, rotate=True, refit=True)
    x = mx.random.normal((3000, 2, 128), key=mx.random.key(0))
    alone = encoded(compiled, x, codec)
    mx.eval(alone)
    compiled.set_threads(3)
    try:
        together = encoded(compiled, x, codec)
        assert all(mx.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    finally:
        compiled.set_threads(1)
