"""Tokens drawn by the kernels, whatever the instruction set and the number of threads.

`tests/sampling` holds the draws themselves against float64.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.device.device import current_device
from quire.device.draws import ALL, GREEDY, Draw, DrawingOperations


@pytest.mark.parametrize("vocab", [1, 7, 128, 1000, 4097])
def test_greedy_draws_are_the_first_of_the_largest(ops: Any, vocab: int) -> None:
    logits = np.round(np.random.default_rng(vocab).normal(0, 1, (5, vocab)), 1).astype(np.float32)
    found = ops.draw(mx.array(logits), [GREEDY] * 5)
    assert found.tolist() == logits.argmax(axis=-1).tolist()


def test_logits_that_are_no_numbers_hide_no_other(ops: Any) -> None:
    logits = np.zeros((1, 300), np.float32)
    logits[0, 17], logits[0, 18:30] = 5, np.nan
    assert ops.draw(mx.array(logits), [GREEDY]).tolist() == [17]


@pytest.mark.parametrize("vocab", [97, 3001])
def test_threads_draw_the_same_tokens(ops: Any, vocab: int) -> None:
    logits = mx.random.normal((64, vocab), key=mx.random.key(0)) * 3
    ways = [
        Draw(0.8),
        Draw(1.2, min_p=0.05),
        Draw(0.7, top_p=0.9, candidates=ALL),
        Draw(1.0, top_k=40, top_p=0.95, candidates=64),
    ]
    rows = [each._replace(block=(i + 0.5) / 64, inside=0.3) for i in range(16) for each in ways]
    alone = ops.draw(logits, rows).tolist()
    ops.set_threads(4)
    try:
        assert ops.draw(logits, rows).tolist() == alone
    finally:
        ops.set_threads(1)
    assert len(set(alone)) > 10


@pytest.mark.parametrize("starts", [[0, 1], [0, 5], [0, 3, 6, 9], [0, 1, 5, 7, 8]], ids=str)
def test_the_first_token_that_is_not_its_draft_is_found(ops: Any, starts: list[int]) -> None:
    generator = np.random.default_rng(len(starts))
    for _ in range(20):
        tokens = generator.integers(0, 2, starts[-1])
        drafts = generator.integers(0, 2, starts[-1])
        drafts[np.array(starts[1:]) - 1] = -1
        expected = [
            next(row for row in range(first, end) if tokens[row] != drafts[row])
            for first, end in pairwise(starts)
        ]
        given = mx.array(tokens.astype(np.int32)), mx.array(drafts.astype(np.int32)), starts
        assert ops.first_different(*given).tolist() == expected
        assert DrawingOperations().first_different(*given).tolist() == expected


def test_rows_that_follow_a_step_get_its_tokens_and_guesses(ops: Any) -> None:
    tokens, kept = mx.array([5, 6, 7, 8], dtype=mx.int32), mx.array([1, 3], dtype=mx.int32)
    guesses = mx.array([[60, 61], [80, 81]], dtype=mx.int32)
    found = ops.followed_tokens(tokens, kept, guesses, [0, 1, 9, 0, 1, 2], [0, 0, -1, 1, 1, 1])
    assert found.tolist() == [6, 60, 9, 8, 80, 81]
    with pytest.raises(ValueError, match="follows"):
        ops.followed_tokens(tokens, kept, guesses, [3], [1])


def test_tokens_that_a_step_samples_stand_among_known_ones() -> None:
    sampled = mx.array([50, 60, 70], dtype=mx.int32)
    rows = {"known": [3, 0, 4, 0], "places": [-1, 2, -1, 0]}
    for operations in (current_device().operations, DrawingOperations()):
        assert operations.mixed_tokens(sampled, **rows).tolist() == [3, 70, 4, 50]


def test_rows_move_back_by_the_rows_that_were_rejected(ops: Any) -> None:
    kept = mx.array([1, 6], dtype=mx.int32)
    rejected = ops.rows_rejected(kept, [2, 9], [0, 0, -1, 1])
    assert rejected.tolist() == [1, 1, 0, 3]
    numbers = mx.array([10, 10, 10, 10, 2], dtype=mx.int32)
    assert ops.moved_back(numbers, rejected, [0, 2, -1, 3, 3]).tolist() == [9, 10, 10, 7, 0]


def test_moved_rows_are_drawn_by_the_draw_of_their_place(ops: Any) -> None:
    logits = mx.random.normal((12, 500), key=mx.random.key(2))
    draws = [
        [Draw(1.0, inside=0.1 + 0.2 * n, block=0.9 - 0.2 * n) for n in range(1 + row % 4)]
        for row in range(12)
    ]
    moved = [row % (1 + row % 4) for row in range(12)]
    found = ops.draw_moved(logits, draws, mx.array(moved, dtype=mx.int32))
    chosen = [each[number] for each, number in zip(draws, moved, strict=True)]
    assert found.tolist() == ops.draw(logits, chosen).tolist()
