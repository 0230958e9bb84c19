"""The paged kernels: how rows are cut, and on a GPU what they compute."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.backend import AttentionCase, PreparedAttention, Scoring
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.paged import PagedBackend, check, cuda, decoding, packed, tiling
from quire.attention.paged.backend import kernels_serve
from quire.attention.paged.check import differs
from quire.attention.paged.portable_kernels import Codes
from quire.attention.paged.prompts import side_by_side
from quire.attention.paged.tiles import cut, score_numbers
from quire.attention.paged.tiling import Tiling
from quire.attention.paged.warpgroups import PromptTiles
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerStore, WrittenBlocks
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from quire.device.gpu_kernels import Kernel as DeviceKernel
from quire.executor.graphs.attention import attention_kernels as decode
from quire.executor.graphs.recorder import Kernel
from tests.attention.rows import HandRows
from tests.device.cuda.cards import H200, RTX_3060
from tests.executor.graphs.emulated import bits_of
from tests.support.emulated_cuda import emulate
from tests.support.emulated_metal import guarded, why_not
from tests.support.emulated_steps import launch
from tests.support.everyday import everyday
from tests.support.nvrtc import assert_compiles
from tests.support.packings import page_codes

PLAIN = KVFormat()
SHAPES = [
    cuda.Shape(mx.bfloat16, 128, 128, 8, 4, 64, capped=False, sinks=False),
    cuda.Shape(mx.float16, 64, 64, 8, 8, 64, capped=False, sinks=True),
    cuda.Shape(mx.bfloat16, 256, 256, 8, 2, 64, capped=True, sinks=False),
    cuda.Shape(mx.bfloat16, 512, 512, 2, 8, 64, capped=False, sinks=False),
    cuda.Shape(mx.bfloat16, 192, 128, 1, 20, 64, capped=False, sinks=False),
    cuda.Shape(mx.bfloat16, 80, 80, 8, 4, 64, capped=False, sinks=False),
    cuda.Shape(mx.bfloat16, 96, 96, 8, 4, 64, capped=False, sinks=True),
]


@pytest.mark.parametrize("spec", [FullKV(2, 64), WindowKV(2, 64, 100)])
def test_tiles_hold_every_row_once_and_see_all_that_their_rows_see(spec: AttentionSpec) -> None:
    spans = [(0, 1), (700, 1), (63, 2), (0, 40), (300, 9), (64, 1)]
    rows = [
        HandRows(start, count, PLAIN, (range(100 * n, 100 * n + 12),))
        for n, (start, count) in enumerate(spans)
    ]
    metadata = build_metadata(0, spec, rows, 64)
    parts = list(cut(metadata, 8, 4, 16))
    assert [(part.rows, part.few) for part in parts] == [
        (slice(0, 4), True),
        (slice(4, 53), False),
        (slice(53, 54), True),
    ]
    seen = []
    for part in parts:
        for row, count, low, high, place, owner in part.tiles.tolist():
            own = slice(part.rows.start + row, part.rows.start + row + count)
            assert count <= (4 if part.few else 16)
            assert low == metadata.first_visible[own].min()
            assert high == metadata.last_visible[own].max() + 1
            # Any key's block, looked up as a kernel does.
            for key in range(low, high):
                assert metadata.block_table[place + key // 64] == 100 * owner + key // 64
            seen += range(own.start, own.stop)
            visible = part.visible[row : row + count]
            np.testing.assert_array_equal(visible[:, 0], metadata.first_visible[own])
            np.testing.assert_array_equal(visible[:, 1], metadata.last_visible[own])
    assert seen == list(range(metadata.rows))


@pytest.mark.parametrize("spec", [FullKV(2, 64), WindowKV(2, 64, 100)])
def test_rows_find_codes_before_their_own_block_and_what_was_written_from_there_on(
    spec: AttentionSpec,
) -> None:
    spans = [(40, 90), (0, 17), (300, 3), (190, 3)]
    rows = [
        HandRows(start, count, KVFormat("page", 8, 4), (range(100 * n, 100 * n + 12),), (n,))
        for n, (start, count) in enumerate(spans)
    ]
    metadata = build_metadata(0, spec, rows, 64)
    ids, by_block = side_by_side(metadata)
    # Each block as a pair: whether it is decoded, and its id.
    blocks = [(True, block) for block in ids.tolist()]
    for n, (start, count) in enumerate(spans):
        blocks += [(False, 100 * n + b) for b in range(start // 64, (start + count - 1) // 64 + 1)]
    owners = np.repeat(np.arange(len(spans)), metadata.counts)
    (part,) = cut(by_block, 0, 4, 16)
    seen = 0
    for first, count, low, high, place, _ in part.tiles.tolist():
        for row in range(first, first + count):
            own, owner = metadata.keys[row] // 64, owners[row]
            for key in range(low, high):
                found = blocks[by_block.block_table[place + key // 64]]
                assert found == (key // 64 < own, 100 * owner + key // 64)
            seen += 1
    assert seen == metadata.rows


def test_launches_depend_on_rows_and_not_on_lengths() -> None:
    shape = SHAPES[0]
    assert [shape.splits(tiles, H200) for tiles in (1, 8, 32, 200)] == [64, 8, 2, 1]
    assert [shape.splits(tiles, RTX_3060) for tiles in (1, 8, 32)] == [16, 2, 1]
    long = SHAPES[2]
    assert [long.splits(tiles, H200) for tiles in (1, 2, 8, 24, 32)] == [48, 24, 6, 2, 1]


def test_a_card_runs_at_least_one_split_of_a_row_at_a_time() -> None:
    eight, many = SHAPES[0], cuda.Shape(mx.bfloat16, 128, 128, 96, 1, 64, False, False)
    found = [[each.splits_at_once(card) for card in (H200, RTX_3060)] for each in (eight, many)]
    assert found == [[49, 10], [4, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_sources_compile(shape: cuda.Shape, few: bool, tmp_path: Path) -> None:
    tiles = 1 if few else shape.many_tiles
    text = (
        cuda.header(shape.dtype, shape.defines(tiles, split=few))
        + cuda.source("tensor")
        + cuda.source("splits")
        + 'extern "C" __global__ void attend(const T* q, const T* keys, const T* values,'
        "const int* tiles, const int* table, const int* visible, const float* numbers,"
        "const float* sinks, T* result, float* partial, float* stats) {"
        "const int split = blockIdx.z, splits = gridDim.z;\n"
        + cuda.source("attend")
        + '}\nextern "C" __global__ void combine(const float* partial, const float* stats,'
        "const int* stats_shape, const float* sinks, T* result) {"
        "const int splits = stats_shape[2], count = splits;\n" + cuda.source("combine") + "}\n"
    )
    assert_compiles(text, tmp_path)


PACKED = [
    (
        cuda.Shape(mx.bfloat16, 128, 128, 8, 4, 64, capped=False, sinks=False),
        page_codes(4, 4, 64),
    ),
    (cuda.Shape(mx.bfloat16, 256, 256, 8, 2, 64, capped=True, sinks=True), page_codes(8, 4, 64)),
    (
        cuda.Shape(mx.bfloat16, 512, 512, 2, 8, 64, capped=False, sinks=False),
        page_codes(4, 4, 64),
    ),
    (
        cuda.Shape(mx.bfloat16, 128, 128, 8, 4, 64, capped=False, sinks=False),
        page_codes(8, 8, 128),
    ),
    (cuda.Shape(mx.bfloat16, 64, 64, 8, 4, 64, capped=False, sinks=False), page_codes(2, 5, 64)),
    (
        cuda.Shape(mx.bfloat16, 128, 128, 8, 4, 64, capped=False, sinks=False),
        page_codes(3, 3, 64),
    ),
    (
        cuda.Shape(mx.bfloat16, 256, 256, 8, 2, 64, capped=False, sinks=False),
        page_codes(5, 2, 64),
    ),
    (
        cuda.Shape(mx.bfloat16, 512, 512, 2, 8, 64, capped=False, sinks=False),
        page_codes(6, 6, 128),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "codes"), PACKED)
def test_sources_for_codes_compile(shape: cuda.Shape, codes: Codes, tmp_path: Path) -> None:
    text = (
        cuda.header(shape.dtype, packed.defines(shape, codes) | {"TURNED": 1})
        + packed.head()
        + cuda.joining(turned=True)
        + 'extern "C" __global__ void packed(const T* q, const unsigned* k_codes,'
        "const __half* k_scales, const __half* k_biases, const unsigned* v_codes,"
        "const __half* v_scales, const __half* v_biases, const T* tail_keys, const T* tail_values,"
        "const int* tiles, const int* own_tiles, const int* table, const int* tails,"
        "const int* visible, const float* numbers, float* partial, float* stats,"
        "float* own_partial, float* own_stats) {"
        + packed.body()
        + '}\nextern "C" __global__ void join(const float* partial, const float* stats,'
        "const int* stats_shape, const float* own_partial, const float* own_stats,"
        "const float* signs, const float* sinks, T* result) {"
        "const int splits = stats_shape[2];\n" + cuda.source("join") + "}\n"
    )
    assert_compiles(text, tmp_path)


EMULATED = [
    (FullKV(2, 64), 4, (4, 4), False),
    (FullKV(2, 128), 4, (4, 4), False),
    (FullKV(1, 128), 16, (8, 8), True),
    (WindowKV(1, 256, 100), 2, (8, 4), True),
    (FullKV(1, 512), 8, (4, 4), False),
    (FullKV(1, 512), 8, (8, 8), False),
    (FullKV(1, 96, value_dim=64), 5, (4, 8), True),
    (FullKV(2, 64), 4, (2, 3), False),
    (FullKV(1, 128), 16, (3, 2), False),
    (WindowKV(1, 256, 100), 2, (5, 6), True),
    (FullKV(1, 512), 8, (6, 5), False),
    (FullKV(1, 96, value_dim=64), 5, (3, 5), True),
    (FullKV(1, 128), 4, (2, 6), False),
]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(("spec", "group", "bits", "extras"), EMULATED)
def test_sources_for_codes_agree_with_the_reference(
    spec: AttentionSpec,
    group: int,
    bits: tuple[int, int],
    extras: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "cuda_kernel", emulate)
    monkeypatch.setattr(decoding, "_ELEMENTS", 1 << 15)
    monkeypatch.setitem(check._TOLERANCE, mx.bfloat16, 5e-3)
    _forget()
    format, heads = KVFormat("page", *bits), group * spec.kv_heads
    case = AttentionCase(format, spec, 64, heads, 1, mx.bfloat16, extras, extras)
    assert differs(PagedBackend(), case, check.SPANS) is None
    _forget()


class _Single(ReferenceBackend):
    """The kernels of recorded steps."""

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _SinglePrepared(metadata)


class _SinglePrepared(PreparedAttention):
    def __init__(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        told, (rows, heads, dim) = self._metadata, q.shape
        kv_heads, block = told.spec.kv_heads, told.block_size
        shape = cuda.Shape(q.dtype, dim, dim, kv_heads, heads // kv_heads, block, False, False)
        cuts = next(cut(told, 8, 1, 1)).tiles
        cuts[:, 5] = told.keys
        tiles = mx.array(cuts)
        splits = 4
        found = (rows, heads, splits)
        texts = decode.attend(shape), decode.combine(shape, splits)
        names = ["q", "keys", "values", "tiles", "table", "numbers"]
        numbers, table = score_numbers(scoring.scale, None), mx.array(told.block_table)
        made, shared = ["partial", "stats", "result"], cuda.single_memory(shape)
        partial, stats, done = _emulated(texts[0], names, made, shared)(
            inputs=[q, *store.arrays(), tiles, table, numbers],
            grid=(rows * cuda.LANES, shape.blocks, splits),
            threadgroup=(cuda.LANES, 1, 1),
            output_shapes=[(*found, dim), (*found, 2), q.shape],
            output_dtypes=[mx.float32, mx.float32, q.dtype],
        )
        (joined,) = _emulated(texts[1], ["rows", "partial", "stats", "tiles"], ["result"])(
            inputs=[mx.array([rows]), partial, stats, tiles],
            grid=(rows * heads * cuda.LANES, 1, 1),
            threadgroup=(cuda.LANES, 1, 1),
            output_shapes=[q.shape],
            output_dtypes=[q.dtype],
        )
        # The first kernel is done with a row that one thread block sees whole, or leaves NaN.
        return mx.where(mx.isnan(done), joined, done)


def _emulated(source: str, inputs: list[str], outputs: list[str], shared: int = 0) -> DeviceKernel:
    header, _, rest = source.partition('extern "C"')
    body = rest[rest.index("{") + 1 : rest.rindex("}")]
    return emulate("single", inputs, outputs, body, header, shared)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("spec", "group"),
    [
        (FullKV(2, 64), 8),
        (FullKV(2, 128), 4),
        (WindowKV(1, 256, 100), 2),
        (FullKV(1, 256), 16),
        (FullKV(1, 512), 8),
    ],
)
def test_sources_for_single_rows_agree_with_the_reference(
    spec: AttentionSpec, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check._TOLERANCE, mx.bfloat16, 5e-3)
    case = AttentionCase(PLAIN, spec, 64, group * spec.kv_heads, 1, mx.bfloat16, False, False)
    assert differs(_Single(), case, check.SINGLE_ROWS) is None


class _Prompts(ReferenceBackend):
    """Attention by warpgroups, as recorded steps read prompts.

    Args:
        at_once: see `Tiling`.

    Attributes:
        most: for each launch, into how many pieces a tile was cut.
    """

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self._at_once, self.most = at_once, list[int]()

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _PromptsPrepared(metadata, self._at_once, self.most)


class _PromptsPrepared(PreparedAttention):
    def __init__(self, metadata: AttentionMetadata, at_once: int, most: list[int]) -> None:
        self._metadata, self._at_once, self._most = metadata, at_once, most

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        told, (_, heads, dim) = self._metadata, q.shape
        kv_heads, capped, sinks = told.spec.kv_heads, scoring.softcap is not None, scoring.sinks
        group, block = heads // kv_heads, told.block_size
        shape = cuda.Shape(q.dtype, dim, dim, kv_heads, group, block, capped, sinks is not None)
        tiles = PromptTiles(shape)
        (part,) = cut(told, 0, 1, tiles.rows)
        cut_tiles = Tiling(tiles.rows, shape.blocks, at_once=self._at_once).shared(part.tiles)
        self._most.append(int((cut_tiles[:, 5] & 255).max()))
        given = [q, *store.arrays(), mx.array(cut_tiles), mx.array(told.block_table)]
        given += [mx.array(part.visible), score_numbers(scoring.scale, scoring.softcap)]
        given += [mx.full(q.shape, 7, q.dtype)]
        given += [] if sinks is None else [sinks.astype(q.dtype)]
        given += [mx.zeros((len(cut_tiles) * shape.blocks * tiles.piece,), mx.uint8)]
        given += [mx.zeros((len(cut_tiles) * shape.blocks,), mx.int32)]
        given += 2 * [mx.zeros((1,))]  # no maps: the emulation of `copy_box` reads none
        memory = [guarded(bits_of(each)) for each in given]
        addresses = tuple(int(each.ctypes.data) for each in memory)
        source, grid = decode.attend_prompts(tiles), (len(cut_tiles), shape.blocks, 1)
        launch(Kernel(source, grid, tiles.threads, shared=tiles.shared, arguments=addresses))
        assert not memory[-3].any(), "the next launch begins with zeros"
        return mx.array(memory[7]).view(q.dtype).reshape(q.shape)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("spec", "group", "extras"),
    everyday(
        [
            (FullKV(1, 64), 8, True),
            (FullKV(2, 128), 4, False),
            (FullKV(1, 128), 5, True),
            (WindowKV(1, 256, 100), 2, False),
            (FullKV(1, 512), 8, True),
            (WindowKV(1, 512, 40), 4, False),
        ],
        lambda spec, group, extras: spec.head_dim == 64,
    ),
    ids=str,
)
@pytest.mark.parametrize("at_once", [0, 40], ids=["whole", "pieces"])
def test_warpgroups_attend_as_the_reference(
    spec: AttentionSpec, group: int, extras: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "_PIECE_COST", 1)  # so that few keys are cut, too
    monkeypatch.setitem(check._TOLERANCE, mx.bfloat16, 8e-3)  # sinks are rounded
    heads = group * spec.kv_heads
    case = AttentionCase(PLAIN, spec, 64, heads, 1, mx.bfloat16, extras, extras)
    backend = _Prompts(at_once)
    assert differs(backend, case, check.SPANS) is None
    assert (max(backend.most) > 1) == bool(at_once)


def _forget() -> None:
    """Kernels are made once a process."""
    for made in (packed._kernel, packed._join_kernel, cuda._attend_kernel, decoding._kernel):
        made.cache_clear()
    decoding._sound.found.clear()


@pytest.mark.parametrize(
    ("format", "spec", "rows", "dtype", "serves"),
    [
        (PLAIN, FullKV(2, 128), 1, mx.bfloat16, True),
        (PLAIN, FullKV(2, 128), 100, mx.bfloat16, False),  # MLX's fused attention is faster
        (PLAIN, WindowKV(2, 128, 64), 100, mx.bfloat16, True),
        (PLAIN, FullKV(2, 512), 100, mx.float16, True),
        (PLAIN, FullKV(2, 128), 1, mx.float32, False),
        (PLAIN, FullKV(2, 80), 1, mx.bfloat16, True),
        (PLAIN, FullKV(2, 72), 1, mx.bfloat16, False),
        (KVFormat("page", 8, 4), FullKV(2, 96), 1, mx.bfloat16, False),
        (KVFormat(dtype="float16"), FullKV(2, 128), 1, mx.bfloat16, False),
        (KVFormat("page", 8, 4), FullKV(2, 128), 1, mx.bfloat16, True),
        (KVFormat("page", 8, 4), FullKV(2, 128), 2, mx.bfloat16, True),
        (KVFormat("page", 8, 4), FullKV(2, 128), 2, mx.float16, False),
        (KVFormat("page", 6, 3), FullKV(2, 128), 1, mx.bfloat16, True),
        (KVFormat("turbo", 4, 4), FullKV(2, 128), 1, mx.bfloat16, False),
    ],
)
def test_what_the_kernels_are_made_for(
    format: KVFormat, spec: AttentionSpec, rows: int, dtype: mx.Dtype, serves: bool
) -> None:
    case = AttentionCase(format, spec, 64, 8, rows, dtype, False, False)
    assert kernels_serve(case) == serves


class _Off(ReferenceBackend):
    """Computes twice what it should."""

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _OffPrepared(super().prepare(metadata))


class _OffPrepared(PreparedAttention):
    def __init__(self, right: PreparedAttention) -> None:
        self._right = right

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        return 2 * self._right.forward(q, store, written, scoring)


def test_the_check_sees_a_difference() -> None:
    case = AttentionCase(KVFormat("page", 8, 8), FullKV(2, 64), 64, 4, 1, mx.float32, True, True)
    assert differs(ReferenceBackend(), case, check.SPANS) is None
    assert "relative error 1," in (differs(_Off(), case, check.SPANS) or "")


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("spec", [FullKV(8, 128), WindowKV(2, 64, 100), FullKV(2, 512)], ids=str)
@pytest.mark.parametrize("group", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("extras", [False, True], ids=["", "capped, sinks"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_kernels_agree_with_the_reference(
    spec: AttentionSpec, group: int, extras: bool, dtype: mx.Dtype
) -> None:
    case = AttentionCase(PLAIN, spec, 64, group * spec.kv_heads, 1, dtype, extras, extras)
    assert differs(PagedBackend(), case, check.SPANS) is None


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("spec", [FullKV(8, 128), WindowKV(2, 64, 100), FullKV(2, 512)], ids=str)
@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (8, 8), (2, 3), (5, 6)])
@pytest.mark.parametrize("extras", [False, True], ids=["", "capped, sinks"])
def test_kernels_for_codes_agree_with_the_reference(
    spec: AttentionSpec, bits: tuple[int, int], extras: bool
) -> None:
    format = KVFormat("page", *bits)
    case = AttentionCase(format, spec, 64, 4 * spec.kv_heads, 1, mx.bfloat16, extras, extras)
    assert differs(PagedBackend(), case, check.SPANS) is None
