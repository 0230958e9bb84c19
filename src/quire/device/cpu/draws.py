"""Tokens drawn by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from quire.device.draws import GREEDY, Draw, DrawingOperations
from quire.device.dtypes import int32


class KernelDraws(DrawingOperations):
    """Draws with the extension, which shares rows among threads. A row's token does not depend on
    other rows.
    """

    draws = True
    _ops: Any

    def best(self, logits: mx.array) -> mx.array:
        rows = logits.astype(mx.float32).reshape(-1, logits.shape[-1])
        found: mx.array = self._ops.draw(rows, [GREEDY] * len(rows))
        return found.reshape(logits.shape[:-1])

    def first_different(
        self, tokens: mx.array, drafts: mx.array, starts: Sequence[int]
    ) -> mx.array:
        rows: mx.array = self._ops.first_different(tokens, drafts, starts)
        return rows

    def likely_only(self, guesses: mx.array, chances: mx.array, least: float) -> mx.array:
        kept: mx.array = self._ops.likely_only(guesses, chances, least)
        return kept

    def draw(self, logits: mx.array, rows: Sequence[Draw]) -> mx.array:
        tokens: mx.array = self._ops.draw(logits.astype(mx.float32), list(rows))
        return tokens

    def draw_moved(
        self, logits: mx.array, rows: Sequence[Sequence[Draw]], moved: mx.array
    ) -> mx.array:
        tokens: mx.array = self._ops.draw_moved(logits.astype(mx.float32), rows, moved)
        return tokens

    def wanted_rows(self, x: mx.array, numbers: mx.array) -> mx.array:
        found: mx.array = self._ops.rows_of(x, numbers)
        return found

    def mixed_tokens(
        self, sampled: mx.array, *, known: Sequence[int], places: Sequence[int]
    ) -> mx.array:
        rows = np.arange(len(sampled), dtype=np.int32)
        kept, no_guesses = int32(rows), int32(rows[:, None])
        return self.followed_tokens(sampled, kept, no_guesses, known=known, places=places)

    def followed_tokens(
        self,
        tokens: mx.array,
        kept: mx.array,
        guesses: mx.array,
        *,
        known: Sequence[int],
        places: Sequence[int],
    ) -> mx.array:
        own: mx.array = self._ops.followed_tokens(tokens, kept, guesses, known, places)
        return own

    def rows_rejected(
        self, kept: mx.array, lasts: Sequence[int], *, places: Sequence[int]
    ) -> mx.array:
        rows: mx.array = self._ops.rows_rejected(kept, lasts, places)
        return rows

    def moved_back(self, numbers: mx.array, rejected: mx.array, rows: Sequence[int]) -> mx.array:
        moved: mx.array = self._ops.moved_back(numbers, rejected, rows)
        return moved
