"""Blocks of a step's chunks as codes by one launch: emulated, against the format's own way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.attention.metadata import build_metadata
from quire.cache.formats.base import LayerShape, PackedStore, WrittenBlocks
from quire.cache.formats.page import PageStore
from quire.cache.formats.registry import make_store
from quire.cache.specs import FullKV
from quire.core.kv_format import KVFormat
from quire.device.coding import Chunks, CodedChunks, VectorCoding
from quire.device.cuda import blocks
from quire.device.cuda.blocks import BlockEncoder, BlockKind
from quire.device.cuda.compiled import CompiledKernel
from quire.device.cuda.encoding import Encoder, Kind
from quire.device.device import current_device
from quire.device.gpu_kernels import Kernel
from quire.device.operations import Operations
from tests.attention.rows import HandRows
from tests.support.emulated_metal import why_not
from tests.support.nvrtc import assert_compiles

emulates = pytest.mark.skipif(bool(why_not()), reason=why_not())
EVERY = [
    *(((bits, bits), 64, 64) for bits in (2, 3, 5, 6)),
    *((bits, dim, dim) for bits in ((4, 4), (8, 8), (8, 4)) for dim in (64, 128, 256, 512)),
    ((4, 8), 192, 128),
]
SPANS = [(0, 64), (40, 90), (5, 1), (100, 28), (70, 20), (63, 2), (0, 17), (10, 200)]
"""First tokens and numbers of tokens, each of a sequence of its own.

Chunks end with a block or within one, or fill none; one row is a generating one between them.
"""


class _ByBlocks(Operations):
    """A CPU's operations, with the GPU's coding of blocks."""

    def __init__(self) -> None:
        self.blocks = BlockEncoder(Encoder())
        self.served: list[bool] = []

    def code_blocks(self, chunks: Chunks, codings: Sequence[VectorCoding]) -> CodedChunks | None:
        found = self.blocks.code(chunks, codings)
        self.served.append(found is not None)
        return found


class _Counted(_ByBlocks):
    """Operations with or without the kernel, which count what is encoded without it."""

    def __init__(self, by_kernel: bool) -> None:
        super().__init__()
        self._by_kernel = by_kernel
        self.encoded = 0

    def code_blocks(self, chunks: Chunks, codings: Sequence[VectorCoding]) -> CodedChunks | None:
        if self._by_kernel:
            return super().code_blocks(chunks, codings)
        self.served.append(False)
        return None

    def encode(
        self, vectors: Sequence[mx.array], codings: Sequence[VectorCoding]
    ) -> list[mx.array] | None:
        self.encoded += 1
        return super().encode(vectors, codings)


def store_of(shape: LayerShape, format: KVFormat) -> PackedStore:
    store = make_store(shape, format).packed
    assert store is not None
    store.resize(4 * len(SPANS), ())
    store.resize_tails(len(SPANS), ())
    return store


def written(store: PackedStore, spans: list[tuple[int, int]]) -> WrittenBlocks | None:
    """Return rows of all sequences, random ones."""
    shape = store.shape
    spec = FullKV(shape.kv_heads, shape.head_dim, value_dim=shape.value_dim)
    rows = [
        HandRows(start, count, store.format, (range(4 * n, 4 * n + 4),), (n,))
        for n, (start, count) in enumerate(spans)
        if count
    ]
    metadata = build_metadata(0, spec, rows, shape.block_size)
    k, v = (
        (mx.random.normal((metadata.rows, shape.kv_heads, dim), key=mx.random.key(dim)) * 2 + 1)
        for dim in (shape.head_dim, shape.value_dim)
    )
    return store.write(k.astype(shape.dtype), v.astype(shape.dtype), metadata.slots)


def assert_coded_alike(
    shape: LayerShape, format: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks behind tails, by both ways."""
    store, expected = store_of(shape, format), store_of(shape, format)
    for each in (store, expected):
        written(each, [(0, start) for start, _ in SPANS])
    usual = written(expected, SPANS)
    operations = _ByBlocks()
    with monkeypatch.context() as patch:
        patch.setattr(current_device(), "operations", operations)
        found = written(store, SPANS)
    assert operations.served == [True]
    assert found is not None
    assert usual is not None
    assert mx.array_equal(found.keys, usual.keys)
    assert mx.array_equal(found.values, usual.values)
    assert found.starts.tolist() == usual.starts.tolist()
    for own, other in zip(store.tail_arrays(), expected.tail_arrays(), strict=True):
        assert mx.array_equal(own, other)
    full = [
        (4 * n + block) * shape.kv_heads + head
        for n, (start, count) in enumerate(SPANS)
        for block in range((start + count) // 64)
        for head in range(shape.kv_heads)
    ]
    rows = mx.array(full)[:, None]
    for own, other in zip(store.read(rows).decoded(), expected.read(rows).decoded(), strict=True):
        assert mx.linalg.norm(own - other).item() < 3e-3 * mx.linalg.norm(other).item()


@emulates
@pytest.mark.usefixtures("emulated")
def test_chunks_are_coded_as_the_format_codes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LayerShape(2, 64, 64, 64, mx.bfloat16)
    assert_coded_alike(shape, KVFormat("page", 4, 8), monkeypatch)


@emulates
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("spans", [[(40, 90)], [(40, 90), (100, 28), (0, 17)], SPANS[3:]])
def test_more_chunks_take_no_more_launches_and_stores(
    spans: list[tuple[int, int]], by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(LayerShape(2, 64, 64, 64, mx.bfloat16), KVFormat("page", 4, 8))
    written(store, [(0, start) for start, _ in spans])
    operations = _Counted(by_kernel)
    stored: list[mx.array] = []
    set_item = mx.array.__setitem__

    def noted(self: mx.array, *arguments: Any) -> None:
        stored.append(self)
        set_item(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(current_device(), "operations", operations)
        patch.setattr(mx.array, "__setitem__", noted)
        written(store, spans)
    assert operations.served == [by_kernel]
    assert operations.encoded == (0 if by_kernel else 2)  # keys, and values
    assert list(map(id, stored)) == list(map(id, store.arrays()))


@emulates
@pytest.mark.usefixtures("emulated")
def test_tails_are_read_where_they_hold_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that a kernel reads is copied by MLX when it is written to in the same step."""
    store = store_of(LayerShape(2, 64, 64, 64, mx.bfloat16), KVFormat("page", 4, 8))
    operations, made = _ByBlocks(), blocks._kernel
    given: list[list[mx.array]] = []

    def noted(kind: BlockKind) -> Kernel:
        def launch(*, inputs: list[mx.array], **more: Any) -> list[mx.array]:
            given.append(inputs)
            return made(kind)(inputs=inputs, **more)

        return launch

    with monkeypatch.context() as patch:
        patch.setattr(current_device(), "operations", operations)
        patch.setattr(blocks, "_kernel", noted)
        for start in (0, 40):
            written(store, [(start, 90)])
            pools = set(map(id, store.tail_arrays()))
            assert bool(pools & set(map(id, given[-1]))) == bool(start)
    assert operations.served == [True, True]


@pytest.mark.slow
@emulates
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize(("bits", "head_dim", "value_dim"), EVERY)
def test_every_kind_is_coded_as_the_format_codes_it(
    bits: tuple[int, int],
    head_dim: int,
    value_dim: int,
    dtype: mx.Dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = LayerShape(2, head_dim, value_dim, 64, dtype)
    assert_coded_alike(shape, KVFormat("page", *bits), monkeypatch)


@pytest.mark.parametrize(
    ("shape", "bits"),
    [
        (LayerShape(2, 64, 64, 32, mx.bfloat16), 4),  # other blocks
        (LayerShape(2, 64, 96, 64, mx.bfloat16), 4),  # values that a matrix rotates
        (LayerShape(1, 128, 64, 64, mx.bfloat16, value_in_key=True), 4),
    ],
)
def test_what_the_kernel_is_not_made_for_is_left_to_operations(
    shape: LayerShape, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = _ByBlocks()
    monkeypatch.setattr(current_device(), "operations", operations)
    written(store_of(shape, KVFormat("page", bits, bits)), [(0, 70)])
    assert operations.served == [False]


@emulates
@pytest.mark.usefixtures("emulated")
def test_a_kernel_that_differs_gives_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coded = blocks._coded

    def half(*arguments: Any) -> CodedChunks:
        found = coded(*arguments)
        return CodedChunks(found.written, [*found.codes[:4], *(n / 2 for n in found.codes[4:])])

    monkeypatch.setattr(blocks, "_coded", half)
    shape = LayerShape(2, 64, 64, 64, mx.bfloat16)
    operations = _ByBlocks()
    monkeypatch.setattr(current_device(), "operations", operations)
    written(store_of(shape, KVFormat("page", 4, 8)), [(0, 70)])
    assert operations.served == [False]
    assert "codes of values: relative error 0.5" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "head_dim", "value_dim"), EVERY)
def test_sources_compile(
    bits: tuple[int, int], head_dim: int, value_dim: int, tmp_path: Path
) -> None:
    store = make_store(LayerShape(2, head_dim, value_dim, 64, mx.bfloat16), KVFormat("page", *bits))
    assert isinstance(store, PageStore)
    keys, values = store._codings
    kind = BlockKind(mx.bfloat16, head_dim, Kind.of(64, keys), Kind.of(value_dim, values))
    kernel = blocks._kernel(kind)
    assert isinstance(kernel, CompiledKernel)
    given = [*[mx.bfloat16] * 4, mx.float32, mx.int32]
    made = [*[mx.bfloat16] * 2, *[mx.uint32, mx.float16, mx.float16] * 2]
    assert_compiles(kernel.text(given, made, {}, blocks._THREADS), tmp_path)
