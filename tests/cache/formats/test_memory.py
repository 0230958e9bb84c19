"""Bytes, measured from the arrays; speed is `benchmarks/kv_formats.py`'s to measure."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from quire.cache.block_manager import PoolKey
from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.choose import offered
from quire.cache.formats.registry import store_type
from quire.cache.formats.table import layer_costs
from quire.cache.pools import Pools
from quire.cache.specs import FullKV, KVGroup, WindowKV, group_layers
from quire.cache.view import Chunk, View
from quire.core.kv_format import KVFormat

PAGE = 64


def array_bytes(store: LayerStore) -> int:
    return sum(array.nbytes for array in store.arrays())


def filled(format: KVFormat, shape: LayerShape, pages: int, opens: int) -> LayerStore:
    """A store with room for so many pages."""
    store = store_type(format, 0)(shape, format)
    store.resize(pages, ())
    if store.seals:
        store.resize_open(opens, ())
    return store


def model_bytes(layout: tuple[FullKV | WindowKV, ...], format: KVFormat, tokens: int) -> int:
    """Bytes of the arrays of one sequence, the pages that a window holds at most counted."""
    total = 0
    for spec in layout:
        pages = -(-tokens // PAGE)
        if isinstance(spec, WindowKV):
            pages = min(pages, -(-spec.window // PAGE) + 1)
        shape = LayerShape(spec.kv_heads, spec.head_dim, PAGE, mx.bfloat16)
        total += array_bytes(filled(format, shape, pages, 1))
    return total


DEMO = (
    WindowKV(2, 64, 96),
    WindowKV(2, 64, 96),
    FullKV(1, 128),
    WindowKV(2, 64, 96),
    WindowKV(2, 64, 96),
    FullKV(1, 128),
)
"""The embedded model's layers that own keys and values."""
E2B = (*[WindowKV(1, 256, 512)] * 12, *[FullKV(1, 512)] * 3)
QWEN3 = (FullKV(8, 128),)


@pytest.mark.parametrize("layout", [DEMO, E2B, QWEN3], ids=["demo", "e2b", "qwen3"])
@pytest.mark.parametrize(("bits", "bar"), [(8, 1.85), (4, 3.4)])
def test_long_context_against_bfloat16(
    layout: tuple[FullKV | WindowKV, ...], bits: int, bar: float
) -> None:
    plain = model_bytes(layout, KVFormat(), 20_000)
    assert plain / model_bytes(layout, KVFormat("page", bits, bits), 20_000) >= bar


@pytest.mark.parametrize("scheme", ["page", "uniform"])
@pytest.mark.parametrize(("bits", "bar"), [(8, 3.5), (4, 6.3)])
def test_batch_against_float32(scheme: str, bits: int, bar: float) -> None:
    """The table of the seed: B=4, H=32, S=512, D=128; 512 tokens are full pages."""
    shape = LayerShape(32, 128, PAGE, mx.float32)
    pages = 4 * 512 // PAGE
    plain = array_bytes(filled(KVFormat(), shape, pages, 0))
    assert plain / array_bytes(filled(KVFormat(scheme, bits, bits), shape, pages, 0)) >= bar


@pytest.mark.parametrize("format", offered(PAGE), ids=lambda format: format.name)
def test_declared_bytes_are_those_of_the_arrays(format: KVFormat) -> None:
    """The budget counts what stores declare."""
    shape = LayerShape(2, 80, PAGE, mx.bfloat16)
    kind = store_type(format, 0)
    declared = 3 * kind.page_bytes(shape, format) + 2 * kind.open_page_bytes(shape, format)
    assert array_bytes(filled(format, shape, 3, 2)) == declared


def test_table_counts_what_pools_hold() -> None:
    groups = group_layers(DEMO)
    format = KVFormat("page", 4, 4, skip_layers=(5,))
    pools = Pools(groups, PAGE, mx.bfloat16)
    costs = layer_costs(groups, format, PAGE, mx.bfloat16)
    for group in groups:
        mine = [cost for cost in costs if set(cost.layers) <= set(group.layers)]
        page = sum(len(cost.layers) * cost.token_bytes for cost in mine) * PAGE
        assert page == pools.page_bytes(PoolKey(group.index, format))
        opened = sum(len(cost.layers) * cost.open_bytes for cost in mine)
        assert opened == pools.page_bytes(PoolKey(group.index, format, open=True))
    assert _skipped(groups) == (5,)


def _skipped(groups: tuple[KVGroup, ...]) -> tuple[int, ...]:
    format = KVFormat("page", 4, 4, skip_layers=(5,))
    costs = layer_costs(groups, format, PAGE, mx.bfloat16)
    return tuple(layer for cost in costs if cost.name == "plain" for layer in cost.layers)


def prefill_peak(format: KVFormat, tokens: int, rows: int) -> int:
    """Peak bytes of writing a long prompt and reading it with its last chunk.

    The last chunk sees the most keys, so the peak of the whole prefill is its peak.
    """
    shape = LayerShape(2, 64, PAGE, mx.float32)
    pages = -(-tokens // PAGE)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    store = filled(format, shape, pages, 1)
    table = np.arange(pages, dtype=np.int32)
    k = mx.random.normal((rows, 2, 64))
    for start in range(0, tokens, rows):
        positions = np.arange(start, min(start + rows, tokens), dtype=np.int32)
        some = k[: len(positions)]
        chunk = Chunk(
            slice(0, len(positions)),
            table[: positions[-1] // PAGE + 1],
            positions,
            positions * 0,
            positions,
            2,
            PAGE,
            0 if store.seals else None,
        )
        view = View(table[positions // PAGE], positions % PAGE, [], [chunk], 2, PAGE)
        store.write(some, some, view)
        mx.eval(store.arrays())
    q = mx.random.normal((len(positions), 4, 64))
    mx.eval(store.attend(q, view, scale=0.1))
    return int(mx.get_peak_memory()) - int(before)


def test_peak_of_a_long_prefill_is_below_plain() -> None:
    plain = prefill_peak(KVFormat(), 20_000, 512)
    for format in (
        KVFormat("page", 8, 8),
        KVFormat("page", 4, 4),
        KVFormat("uniform", 4, 4),
        KVFormat("turbo", 4, 4),
    ):
        assert prefill_peak(format, 20_000, 512) < plain, format.name
