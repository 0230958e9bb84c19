"""The best tokens of a row, and in which order."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from quire.sampling.top import BLOCK, blocks_of, top


@pytest.mark.parametrize("vocab", [3, BLOCK, BLOCK + 1, 40 * BLOCK - 5])
@pytest.mark.parametrize("n", [1, 3, 20, 200])
def test_best_first(vocab: int, n: int) -> None:
    n = min(n, vocab)
    values = np.random.default_rng(n).permutation(5 * vocab).reshape(5, vocab).astype(np.float32)
    ids, best = top(mx.array(values), n)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :n]
    assert ids.tolist() == order.tolist()
    assert best.tolist() == np.take_along_axis(values, order, axis=-1).tolist()


@pytest.mark.parametrize("vocab", [BLOCK, 40 * BLOCK - 5])
@pytest.mark.parametrize("n", [3, 20, BLOCK])
def test_equals_are_in_the_order_of_their_ids(vocab: int, n: int) -> None:
    values = np.random.default_rng(n).integers(-9, 9, (5, vocab)).astype(np.float32)
    found, best = top(mx.array(values), n)
    for row, ids, numbers in zip(values, found.tolist(), best.tolist(), strict=True):
        assert numbers == np.sort(row)[::-1][:n].tolist()
        assert row[ids].tolist() == numbers
        assert len(set(ids)) == n
        assert sorted(ids, key=lambda i: (-row[i], i)) == ids


@pytest.mark.parametrize("vocab", [3 * BLOCK - 7, 9 * BLOCK - 120])
def test_impossible_tokens_fill_up_what_is_missing(vocab: int) -> None:
    for possible in (0, vocab - 1):
        logits = mx.full((1, vocab), -math.inf)
        logits[0, possible] = 1.0
        ids, values = top(logits, 8)
        assert ids[0, 0].item() == possible
        assert values.tolist() == [[1.0, *[-math.inf] * 7]]
        assert all(0 <= token < vocab for token in ids[0].tolist())


def test_blocks_keep_every_value_in_its_place() -> None:
    rows = mx.arange(2 * (BLOCK + 3)).reshape(2, -1)
    blocks = blocks_of(rows, -1)
    assert blocks.shape == (2, 2, BLOCK)
    assert mx.array_equal(blocks.reshape(2, -1)[:, : BLOCK + 3], rows)
    assert mx.all(blocks[:, 1, 3:] == -1).item()
