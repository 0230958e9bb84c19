"""Attention over blocks: right, and with the same bits however rows are cut and kept company."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

BLOCK = 32


@dataclass
class Blocks:
    """Sequences whose keys and values lie in shuffled blocks of one pool."""

    keys: mx.array
    values: mx.array
    tables: list[list[int]]
    kv_heads: int

    @staticmethod
    def drawn(
        lengths: list[int], kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype
    ) -> Blocks:
        rng = np.random.default_rng(0)
        counts = [-(-length // BLOCK) for length in lengths]
        ids = iter(rng.permutation(sum(counts)).tolist())
        tables = [[next(ids) for _ in range(count)] for count in counts]

        def pool(dim: int) -> mx.array:
            values = rng.standard_normal((sum(counts) * kv_heads, BLOCK, dim)).astype(np.float32)
            return mx.array(values).astype(dtype)

        return Blocks(pool(key_dim), pool(value_dim), tables, kv_heads)

    def rows_of(self, pool: mx.array, sequence: int, head: int) -> np.ndarray:
        """Return `[tokens, dim]` in float64."""
        wide = np.array(pool.astype(mx.float32)).astype(np.float64)
        return np.concatenate([wide[b * self.kv_heads + head] for b in self.tables[sequence]])


def ints(values: list[int]) -> mx.array:
    return mx.array(np.array(values, np.int32))


Part = tuple[int, mx.array, list[int], list[int]]
"""A sequence, q `[t, heads, dim]`, and the first and last visible key of each row."""


def tables_of(ops: Any, blocks: Blocks, parts: list[Part]) -> Any:
    """Return tables as `AttentionMetadata` has them, without blocks that no row sees."""
    starts, tables, table_starts, firsts = [0], list[int](), [0], []
    for sequence, q, first, _ in parts:
        starts.append(starts[-1] + q.shape[0])
        firsts.append(min(first) // BLOCK)
        tables += blocks.tables[sequence][firsts[-1] :]
        table_starts.append(len(tables))
    first_visible = [key for _, _, first, _ in parts for key in first]
    last_visible = [key for _, _, _, last in parts for key in last]
    listed = (tables, table_starts, firsts, starts, first_visible, last_visible)
    return ops.Tables(
        mx.concatenate([ints(each) for each in listed]), [len(each) for each in listed]
    )


def attend(
    ops: Any,
    blocks: Blocks,
    parts: list[Part],
    *,
    softcap: float = 0.0,
    sinks: mx.array | None = None,
) -> mx.array:
    return ops.attend(
        mx.concatenate([q for _, q, _, _ in parts]),
        blocks.keys,
        blocks.values,
        tables_of(ops, blocks, parts),
        kv_heads=blocks.kv_heads,
        scale=0.25,
        softcap=softcap,
        sinks=sinks,
    )


def expected(
    blocks: Blocks,
    part: Part,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Return attention spelled out in float64."""
    sequence, q, first, last = part
    rows, heads, _ = q.shape
    out = np.zeros((rows, heads, blocks.values.shape[2]))
    group = heads // blocks.kv_heads
    for head in range(heads):
        keys = blocks.rows_of(blocks.keys, sequence, head // group)
        values = blocks.rows_of(blocks.values, sequence, head // group)
        for row in range(rows):
            seen = slice(first[row], last[row] + 1)
            scores = keys[seen] @ np.array(q)[row, head].astype(np.float64) * 0.25
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            extra = [] if sinks is None else [sinks[head]]
            weights = np.exp(np.concatenate([scores, extra]) - max([scores.max(), *extra]))
            out[row, head] = (weights / weights.sum())[: len(scores)] @ values[seen]
    return out


def causal(
    sequence: int, start: int, count: int, heads: int, dim: int, window: int = 10**6
) -> Part:
    rng = np.random.default_rng(sequence + 10)
    q = rng.standard_normal((400, heads, dim)).astype(np.float32)[start : start + count]
    last = list(range(start, start + count))
    return sequence, mx.array(q), [max(0, key - window + 1) for key in last], last


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"),
    [(4, 4, 64, 64), (4, 2, 16, 48), (6, 1, 80, 64), (5, 1, 128, 256)],
)
def test_it_is_attention(
    ops: Any, dtype: mx.Dtype, heads: int, kv_heads: int, key_dim: int, value_dim: int
) -> None:
    blocks = Blocks.drawn([100, 33, 1, 200], kv_heads, key_dim, value_dim, dtype)
    parts = [
        causal(0, 99, 1, heads, key_dim),
        causal(1, 0, 33, heads, key_dim),
        causal(2, 0, 1, heads, key_dim),
        causal(3, 150, 50, heads, key_dim, window=70),
    ]
    out = np.array(attend(ops, blocks, parts))
    exact = np.concatenate([expected(blocks, part) for part in parts])
    assert np.abs(out - exact).max() < 5e-6


def test_softcap_and_sinks(ops: Any) -> None:
    blocks = Blocks.drawn([100], 2, 64, 64, mx.float32)
    sinks = np.array([-1.0, 0.0, 2.0, 30.0])
    part = causal(0, 60, 40, 4, 64)
    out = attend(ops, blocks, [part], softcap=2.0, sinks=mx.array(sinks.astype(np.float32)))
    assert np.abs(np.array(out) - expected(blocks, part, 2.0, sinks)).max() < 5e-6


def test_rows_that_see_each_other(ops: Any) -> None:
    blocks = Blocks.drawn([100], 1, 64, 64, mx.float32)
    sequence, q, first, _ = causal(0, 40, 40, 2, 64)
    last = [max(key, 69) if key >= 50 else key for key in range(40, 80)]
    part = sequence, q, first, last
    assert np.abs(np.array(attend(ops, blocks, [part])) - expected(blocks, part)).max() < 5e-6


@pytest.mark.parametrize("window", [10**6, 45])
def test_bits_do_not_depend_on_company_or_cuts(ops: Any, window: int) -> None:
    blocks = Blocks.drawn([300, 77], 2, 32, 32, mx.float32)
    whole = attend(ops, blocks, [causal(0, 0, 300, 4, 32, window)])
    for cuts in ([0, 300], [0, 1, 2, 40, 41, 299, 300], [0, 17, 64, 128, 131, 300]):
        for start, end in pairwise(cuts):
            company = causal(1, 70, 7, 4, 32, window)
            both = [company, causal(0, start, end - start, 4, 32, window)]
            out = attend(ops, blocks, both)
            assert mx.array_equal(out[7:], whole[start:end]), (start, end)


def test_threads_change_no_bit(compiled: Any) -> None:
    blocks = Blocks.drawn([200, 77], 2, 64, 64, mx.float32)
    parts = [causal(0, 100, 100, 4, 64), causal(1, 76, 1, 4, 64)]
    alone = attend(compiled, blocks, parts)
    mx.eval(alone)
    compiled.set_threads(3)
    try:
        assert mx.array_equal(attend(compiled, blocks, parts), alone)
    finally:
        compiled.set_threads(1)


def test_threads_share_the_rows_of_one_sequence_and_kv_head(compiled: Any) -> None:
    blocks = Blocks.drawn([400], 1, 64, 64, mx.float32)
    part = causal(0, 380, 16, 6, 64)
    compiled.set_threads(2)
    try:
        time.sleep(0.05)  # until the other thread sleeps
        before = compiled.wakings()
        mx.eval(attend(compiled, blocks, [part]))
        assert compiled.wakings() > before
    finally:
        compiled.set_threads(1)
