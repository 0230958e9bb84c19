"""Blocks of codes as numbers, by the kernel: emulated here, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.metadata import build_metadata
from quire.attention.paged import cuda, decoding
from quire.attention.paged.decoding import BlockDecoder, Kind, decoding_differs, random_blocks
from quire.cache.formats.base import LayerShape, WrittenBlocks
from quire.cache.formats.registry import make_store
from quire.cache.specs import FullKV
from quire.core.kv_format import KVFormat
from quire.device.cuda.compiled import CompiledKernel
from tests.attention.rows import HandRows
from tests.support.emulated_cuda import emulate
from tests.support.emulated_metal import why_not
from tests.support.nvrtc import assert_compiles

Row = tuple[KVFormat, int]
"""A format and the elements of keys and values."""

EVERY: list[Row] = [
    *((KVFormat("page", keys, values), 64) for keys, values in ((2, 3), (3, 2), (5, 6), (6, 5))),
    *((KVFormat("page", 8, 4), dim) for dim in (64, 128, 256, 512)),
    *((KVFormat("page", 4, 8), dim) for dim in (64, 128, 256, 512)),
    *((KVFormat("uniform", bits, bits), 128) for bits in (2, 3, 4, 5, 6, 8)),
    *((KVFormat("uniform", 4, 4, 32), dim) for dim in (64, 256, 512)),
    *((KVFormat("turbo", bits, bits), 64) for bits in (2, 3, 3.5, 4)),
    *((KVFormat("turbo", 3.5, 3.5), dim) for dim in (128, 256, 512)),
]


def name(row: Row) -> str:
    return f"{row[0].name} {row[1]}"


def shape_of(dim: int, dtype: mx.Dtype = mx.bfloat16) -> LayerShape:
    return LayerShape(2, dim, dim, 64, dtype)


def forget() -> None:
    """Forget kernels, which are made and verified once a process."""
    decoding._kernel.cache_clear()
    decoding._sound.found.clear()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda, "cuda_kernel", emulate)
    forget()
    yield
    forget()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.usefixtures("emulated")
def test_decoded_blocks_and_those_written_are_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(64)
    store = random_blocks(shape, KVFormat("page", 4, 4), 4)
    spec = FullKV(shape.kv_heads, shape.head_dim)
    metadata = build_metadata(0, spec, [HandRows(0, 3, store.format, (range(1),), (0,))], 64)
    own = [mx.random.normal((3, 2, 64, 64), key=mx.random.key(n)) for n in range(2)]
    written = WrittenBlocks(*(each.astype(mx.bfloat16) for each in own), np.array([0, 1, 3]))
    decoder = BlockDecoder(np.array([3, 0, 1], np.int32), metadata)
    found = decoder.blocks(store, written, mx.bfloat16)
    assert list(decoding._sound.found.values()) == [None]
    monkeypatch.setattr(decoding, "_kind_served", lambda *_: None)
    usual = decoder.blocks(store, written, mx.bfloat16)
    for own, other in zip(found, usual, strict=True):
        assert own.shape == (12, 64, 64)
        assert mx.allclose(own, other, rtol=0.01, atol=0.01)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("row", EVERY, ids=name)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_every_format_decodes_as_by_operations(row: Row, dtype: mx.Dtype) -> None:
    format, dim = row
    behind = dtype == mx.bfloat16
    assert decoding_differs(shape_of(dim, dtype), format, dtype, behind=behind) is None


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("row", EVERY, ids=name)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_the_kernel_decodes_as_operations_do(row: Row, dtype: mx.Dtype) -> None:
    format, dim = row
    for behind in (False, True):
        assert decoding_differs(shape_of(dim, dtype), format, dtype, behind=behind) is None


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.usefixtures("emulated")
def test_a_kernel_that_differs_gives_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decoding, "body", lambda kind: "")  # writes nothing
    store = random_blocks(shape_of(64), KVFormat("page", 4, 4), 3)
    assert decoding._kind_served(store, mx.bfloat16, None) is None
    assert "page-4: relative error nan" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("row", EVERY, ids=name)
def test_sources_compile(row: Row, tmp_path: Path) -> None:
    format, dim = row
    store = make_store(shape_of(dim), format).packed
    assert store is not None
    arrays = store.coded()
    kind = Kind.of(store.shape, arrays, mx.bfloat16, behind=True)
    turns = [
        each.map for each in (arrays.layout.key_rotation, arrays.layout.value_rotation) if each
    ]
    types = [each.dtype for each in (*arrays.keys, *arrays.values, *turns)]
    kernel = decoding._kernel(kind)
    assert isinstance(kernel, CompiledKernel)
    types += [mx.bfloat16, mx.bfloat16, mx.int32]
    assert_compiles(kernel.text(types, [mx.bfloat16] * 2, {}, decoding._THREADS), tmp_path)
