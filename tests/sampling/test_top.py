"""The best tokens of a row, and in which order."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from quire.sampling.top import BLOCK, blocks_of, top_k


@pytest.mark.parametrize("vocab", [3, BLOCK, BLOCK + 1, 40 * BLOCK - 5])
@pytest.mark.parametrize("k", [1, 3, 20, 200])
@pytest.mark.parametrize("levels", [2, 10, 10**6])
def test_best_first_and_equals_by_id(vocab: int, k: int, levels: int) -> None:
    k = min(k, vocab)
    values = np.random.default_rng(k).integers(-levels, levels, (5, vocab)).astype(np.float32)
    ids, best = top_k(mx.array(values), k)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :k]
    assert ids.tolist() == order.tolist()
    assert best.tolist() == np.take_along_axis(values, order, axis=-1).tolist()


def test_rows_with_fewer_possible_tokens_than_k_name_real_ones() -> None:
    logits = mx.full((1, 3 * BLOCK - 7), -math.inf)
    logits[0, 300] = 1.0
    ids, values = top_k(logits, 150)
    assert ids[0, 0].item() == 300
    assert values[0, 1:].tolist() == [-math.inf] * 149
    assert len(set(ids[0].tolist())) == 150
    assert max(ids[0].tolist()) < 3 * BLOCK - 7


def test_blocks_keep_every_value_in_its_place() -> None:
    rows = mx.arange(2 * (BLOCK + 3)).reshape(2, -1)
    blocks = blocks_of(rows, -1)
    assert blocks.shape == (2, 2, BLOCK)
    assert mx.array_equal(blocks.reshape(2, -1)[:, : BLOCK + 3], rows)
    assert mx.all(blocks[:, 1, 3:] == -1).item()
