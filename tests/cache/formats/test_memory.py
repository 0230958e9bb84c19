"""Bytes, measured from the arrays; speed is `benchmarks/kv_formats.py`'s to measure."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.attention.backend import Scoring
from quire.attention.metadata import build_metadata
from quire.attention.reference import ReferenceBackend
from quire.cache.blocks import PoolKey
from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.registry import make_store, store_type
from quire.cache.formats.table import layer_costs
from quire.cache.pools import Pools
from quire.cache.specs import FullKV, KVGroup, WindowKV, group_layers
from quire.core.kv_choice import offered
from quire.core.kv_format import KVFormat
from tests.attention.rows import HandRows

BLOCK = 64


def array_bytes(store: LayerStore) -> int:
    return sum(array.nbytes for array in store.arrays())


def filled(format: KVFormat, shape: LayerShape, blocks: int, tails: int) -> LayerStore:
    """Return a store with room for so many blocks."""
    store = make_store(shape, format)
    store.resize(blocks, ())
    if store.has_tail:
        store.resize_tails(tails, ())
    return store


def model_bytes(layout: tuple[FullKV | WindowKV, ...], format: KVFormat, tokens: int) -> int:
    """Return the bytes of one sequence's arrays, the blocks that a window holds at most
    counted.
    """
    total = 0
    for spec in layout:
        shape = LayerShape.of(spec, BLOCK, mx.bfloat16)
        blocks = spec.blocks_between_steps(tokens, BLOCK)
        total += array_bytes(filled(format, shape, blocks, 1))
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
    """The table of the seed: B=4, H=32, S=512, D=128; 512 tokens are full blocks."""
    shape = LayerShape(32, 128, 128, BLOCK, mx.float32)
    blocks = 4 * 512 // BLOCK
    plain = array_bytes(filled(KVFormat(), shape, blocks, 0))
    assert plain / array_bytes(filled(KVFormat(scheme, bits, bits), shape, blocks, 0)) >= bar


def test_latents_are_held_once() -> None:
    """DeepSeek V3's: 576 elements a token, the values among them."""
    spec = FullKV(1, 576, value_dim=512, value_in_key=True)
    shape = LayerShape.of(spec, BLOCK, mx.bfloat16)
    plain = array_bytes(filled(KVFormat(), shape, 3, 0))
    assert plain == 3 * BLOCK * 576 * 2
    for scheme in ("page", "uniform", "turbo"):
        # 4 bits a number, and 2 x 16 for each 64 of them.
        packed = array_bytes(filled(KVFormat(scheme, 4, 4), shape, 3, 0))
        assert packed <= plain * 4.5 / 16
    tails = array_bytes(filled(KVFormat("page", 4, 4), shape, 0, 2))
    assert tails == 2 * BLOCK * 576 * 2


@pytest.mark.parametrize("format", offered(BLOCK), ids=lambda format: format.name)
@pytest.mark.parametrize("value_in_key", [False, True])
def test_declared_bytes_are_those_of_the_arrays(format: KVFormat, value_in_key: bool) -> None:
    """The budget counts what stores declare."""
    shape = LayerShape(2, 80, 48, BLOCK, mx.bfloat16, value_in_key)
    kind = store_type(format)
    declared = 3 * kind.block_bytes(shape, format) + 2 * kind.tail_bytes(shape, format)
    assert array_bytes(filled(format, shape, 3, 2)) == declared


def test_table_counts_what_pools_hold() -> None:
    groups = group_layers(DEMO)
    format = KVFormat("page", 4, 4, skip_layers=(5,))
    pools = Pools(groups, BLOCK, mx.bfloat16)
    costs = layer_costs(groups, format, BLOCK, mx.bfloat16)
    for group in groups:
        mine = [cost for cost in costs if set(cost.layers) <= set(group.layers)]
        page = sum(len(cost.layers) * cost.token_bytes for cost in mine) * BLOCK
        assert page == pools.block_bytes(PoolKey(group.index, format))
        opened = sum(len(cost.layers) * cost.tail_bytes for cost in mine)
        assert opened == pools.block_bytes(PoolKey(group.index, format, tail=True))
    assert _skipped(groups) == (5,)


def _skipped(groups: tuple[KVGroup, ...]) -> tuple[int, ...]:
    format = KVFormat("page", 4, 4, skip_layers=(5,))
    costs = layer_costs(groups, format, BLOCK, mx.bfloat16)
    return tuple(layer for cost in costs if cost.name == "plain" for layer in cost.layers)


def prefill_peak(format: KVFormat, tokens: int, rows: int) -> int:
    """Return peak bytes of writing a long prompt and reading it with its last chunk.

    The last chunk sees the most keys, so the peak of the whole prefill is its peak.
    """
    spec = FullKV(2, 64)
    blocks = -(-tokens // BLOCK)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    store = filled(format, LayerShape.of(spec, BLOCK, mx.float32), blocks, 1)
    k = mx.random.normal((rows, 2, 64))
    for start in range(0, tokens, rows):
        count = min(rows, tokens - start)
        hand = HandRows(start, count, format, (range(blocks),), (0,))
        metadata = build_metadata(0, spec, [hand], BLOCK)
        written = store.write(k[:count], k[:count], metadata.slots)
        mx.eval(store.arrays())
    q = mx.random.normal((count, 4, 64))
    mx.eval(ReferenceBackend().prepare(metadata).forward(q, store, written, Scoring(0.1)))
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
