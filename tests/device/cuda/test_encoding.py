"""Vectors as codes, by the kernel's source in an emulation."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.cache.formats.codecs import AffineCodec
from quire.device.cuda import encoding
from quire.device.cuda.encoding import Encoder, encoding_differs
from tests.support.emulated_cuda import emulate
from tests.support.emulated_metal import why_not


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(("dim", "bits", "group"), [(64, 4, 64), (256, 8, 128), (96, 4, 64)])
@pytest.mark.parametrize("rotate", [False, True], ids=["", "rotated"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_codes_are_those_of_the_codec(
    dim: int, bits: int, group: int, rotate: bool, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "cuda_kernel", emulate)
    encoding._kernel.cache_clear()
    codec = AffineCodec(dim, bits, group, rotate=rotate, refit=True)
    x = (mx.random.normal((3, 5, dim), key=mx.random.key(1)) * 2 + 1).astype(dtype)
    parts = Encoder().encode(x, codec.coding)
    if rotate and dim == 96:
        assert parts is None  # rotated by a matrix
        return
    assert parts is not None
    assert encoding_differs(codec.coding) is None
    for own, usual in zip(parts, codec.code(codec.prepare(x)), strict=True):
        assert own.shape == usual.shape
        assert own.dtype == usual.dtype
    own, usual = codec.decode(parts), codec.decode(codec.code(codec.prepare(x)))
    assert float(mx.linalg.norm(own - usual) / mx.linalg.norm(usual)) < 2e-3
    encoding._kernel.cache_clear()
