"""A layer's rows over codes of single tokens as recorded steps compute them, emulated."""

from __future__ import annotations

import ctypes

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.backend import AttentionBackend, AttentionCase, PreparedAttention, Scoring
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.paged import check
from quire.attention.paged import cuda as paged
from quire.attention.paged.check import differs
from quire.attention.paged.portable_kernels import Codes
from quire.attention.paged.tiles import score_numbers
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerShape, LayerStore, WrittenBlocks
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from quire.executor.graphs.attention import token_kernels
from quire.executor.graphs.graph_cache import MAX_ROWS
from quire.executor.graphs.input_numbers import write_group
from quire.executor.graphs.layout import InputLayout, group_of
from quire.executor.graphs.recorder import Kernel
from tests.attention.rows import HandRows
from tests.device.cuda.cards import H200
from tests.executor.graphs.layers import attended, empty_step
from tests.support.emulated_metal import why_not
from tests.support.emulated_steps import EmulatedRunner


class _Recorded(AttentionBackend):
    """The kernels of a step of 8 rows, on its inputs."""

    name = "recorded"

    def serves(self, case: AttentionCase) -> bool:
        return True

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _Prepared(metadata)


class _Prepared(PreparedAttention):
    def __init__(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        assert store.packed is not None
        metadata, coded, runner = self._metadata, store.packed.coded(), EmulatedRunner()
        (count, heads, dim), kv_heads = q.shape, store.shape.kv_heads
        group, tokens = heads // kv_heads, store.shape.block_size
        shape = paged.Shape(mx.bfloat16, dim, dim, kv_heads, group, tokens, False, False)
        splits = shape.splits(8, H200)

        memory = InputLayout(1, MAX_ROWS, len(metadata.block_table), runner.address)
        inputs, tiles, table = memory.rows, memory.group(0).tiles, memory.table
        step = empty_step()
        step["rows"][0, 0] = count
        write_group(group_of(step, 0), metadata, 0)
        whole = np.concatenate([step.view(np.int32), metadata.block_table])
        ctypes.memmove(inputs, whole.ctypes.data, whole.nbytes)

        turned = store.packed.transform(q.astype(mx.float32)).astype(q.dtype)
        partial = mx.full((count, heads, splits, dim), mx.nan)
        stats = mx.full((count, heads, splits, 2), mx.nan)
        result = mx.zeros(q.shape, q.dtype)
        found = runner.address(partial), runner.address(stats)
        parts = map(runner.address, (*coded.keys, *coded.values))
        scale = runner.address(score_numbers(scoring.scale, None))
        kernel = token_kernels.attend(shape, Codes.of(coded))
        arguments = (runner.address(turned), *parts, tiles, table, scale, *found)
        grid = 8, shape.blocks, splits
        runner.run(Kernel(kernel.text, grid, paged.LANES, kernel.shared, arguments, ()))

        turn = coded.layout.value_rotation
        signs = 0 if turn is None else runner.address(turn.map * turn.scale)
        text = token_kernels.combine(shape, splits, dim, turned=turn is not None)
        arguments = (inputs, *found, signs, runner.address(result))
        runner.run(Kernel(text, (8 * heads, 1, 1), paged.LANES, 0, arguments, ()))
        return result


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "format",
    [
        KVFormat("uniform", 4, 4),
        KVFormat("uniform", 8, 8),
        KVFormat("turbo", 4, 4),
        KVFormat("turbo", 3.5, 3.5),
    ],
    ids=lambda each: each.name,
)
@pytest.mark.parametrize(
    ("spec", "group"),
    [(FullKV(2, 64), 4), (WindowKV(2, 128, 100), 2), (FullKV(1, 256), 16), (FullKV(1, 512), 8)],
)
def test_kernels_agree_with_the_reference(
    format: KVFormat, spec: AttentionSpec, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check._TOLERANCE, mx.bfloat16, 5e-3)
    case = AttentionCase(
        format, spec, 64, group * spec.kv_heads, 1, mx.bfloat16, softcap=False, sinks=False
    )
    assert differs(_Recorded(), case, check.SINGLE_ROWS) is None


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("format", [KVFormat("uniform", 8, 4), KVFormat("turbo", 3.5, 3.5)])
def test_rows_are_coded_and_attend(format: KVFormat) -> None:
    """Kernels from a layer's products on are compared with the reference over the format's own
    codes.
    """
    heads, kv_heads, dim = 4, 2, 64
    spec = FullKV(kv_heads, dim)
    rows = [HandRows(start, 1, format, ((2 * n, 2 * n + 1),)) for n, start in enumerate((0, 70, 5))]
    metadata = build_metadata(0, spec, rows, 64)
    projected = {
        name: mx.random.normal((3, count, dim), key=mx.random.key(seed)).astype(mx.bfloat16)
        for seed, (name, count) in enumerate((("q", heads), ("k", kv_heads), ("v", kv_heads)))
    }
    coded, expected = (make_store(LayerShape.of(spec, 64, mx.bfloat16), format) for _ in range(2))
    for store in (coded, expected):
        store.resize(6, ())
    expected.write(projected["k"], projected["v"], metadata.slots)
    scoring = Scoring(0.125, None, None)
    reference = ReferenceBackend().prepare(metadata)
    wanted = reference.forward(projected["q"], expected, [], scoring)
    got = attended(coded, metadata, projected, scoring.scale)
    error = mx.linalg.norm((got - wanted).astype(mx.float32)) / mx.linalg.norm(
        wanted.astype(mx.float32)
    )
    assert error.item() < 5e-3
