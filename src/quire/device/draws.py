"""Operations that choose tokens by their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from quire.device.dtypes import int32

UNRANKED = 0
"""Value of `candidates` that leaves the tokens in order of their ids."""
ALL = 2**31 - 1
"""Value of `candidates` that ranks all tokens."""


class Draw(NamedTuple):
    """One row's draw: min_p, top_k, then top_p of what is left, then an inverse transform.

    Attributes:
        temperature: 0 takes the likeliest token.
        min_p: least weight of a token, relative to the likeliest one's.
        top_k: number of likeliest tokens that stay; 0 for all.
        top_p: a token stays while the likelier ones hold less than this share; 1 for all.
        candidates: the most tokens that are ranked, best first, or `UNRANKED` or `ALL`. More than
            128 are drawn in two levels: a block of 128, and a token in it.
        block, inside: uniform numbers in [0, 1) for the two levels; one level takes `inside`.
    """

    temperature: float
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    candidates: int = UNRANKED
    block: float = 0.0
    inside: float = 0.0


GREEDY = Draw(0.0)
"""Takes the likeliest token."""


class DrawingOperations:
    """Chooses a token of each row of logits `[R, V]`.

    Attributes:
        draws: whether `draw` and `draw_moved` have a kernel. Tokens are drawn by MLX's operations
            elsewhere.
    """

    draws = False

    def best(self, logits: mx.array) -> mx.array:
        """Return the place of each row's largest logit, int32 `[R]`."""
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    def likeliest(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Return the place of each row's largest logit, int32 `[R]`, and its probability, float32
        `[R]`.
        """
        whole = logits.astype(mx.float32)
        chances = mx.exp(whole.max(axis=-1) - mx.logsumexp(whole, axis=-1))
        return self.best(logits), chances

    def likely_only(self, guesses: mx.array, chances: mx.array, least: float) -> mx.array:
        """Return guesses as far as the product of their probabilities is at least `least`, and
        `~guess`, which is negative, from there on: int32 `[N, count]`.

        Args:
            guesses: int32 `[N, count]`, one behind the other.
            chances: float32 `[N, count]`, of each guess if those before it are right.
        """
        return mx.where(mx.cumprod(chances, axis=1) >= least, guesses, ~guesses)

    def first_different(
        self, tokens: mx.array, drafts: mx.array, starts: Sequence[int]
    ) -> mx.array:
        """Return the first row of each sequence whose token is not its draft, int32 `[N]`.

        Args:
            tokens: int32 `[R]`.
            drafts: int32 `[R]`. A sequence's last one equals no token; kernels do not read it.
            starts: the first row of each sequence, and R.
        """
        firsts, ends = np.array(starts[:-1]), np.array(starts[1:])
        places = firsts[:, None] + np.arange(max(ends - firsts))
        different = tokens != drafts
        if places.size > len(drafts):
            different = different[int32(np.minimum(places, ends[:, None] - 1))]
        first = mx.argmax(different.reshape(places.shape), axis=1).astype(mx.int32)
        return first if len(firsts) == 1 else first + int32(firsts)

    def draw(self, logits: mx.array, rows: Sequence[Draw]) -> mx.array:
        """Draw a token from each row of float32 logits, int32 `[R]`, if `draws` is set."""
        raise NotImplementedError

    def draw_moved(
        self, logits: mx.array, rows: Sequence[Sequence[Draw]], moved: mx.array
    ) -> mx.array:
        """Draw a token from each row of float32 logits by one of its draws, int32 `[R]`.

        Args:
            moved: int32 `[R]`, the number of each row's draw.
        """
        raise NotImplementedError

    def wanted_rows(self, x: mx.array, numbers: mx.array) -> mx.array:
        """Return rows `numbers`, int32 `[n]`, of an array `[R, ...]`: `[n, ...]`."""
        return x[numbers]

    def mixed_tokens(
        self, sampled: mx.array, *, known: Sequence[int], places: Sequence[int]
    ) -> mx.array:
        """Return tokens of rows, some of which a running step samples, int32 `[T]`.

        Args:
            sampled: int32 `[R]`, by that step.
            known: each row's token; 0 where it is sampled.
            places: where a row's token is among the R; -1 if it is known.
        """
        rows = [row for row, place in enumerate(places) if place >= 0]
        mixed = int32(known)
        mixed[int32(rows)] = sampled[int32([places[row] for row in rows])]
        return mixed

    def followed_tokens(
        self,
        tokens: mx.array,
        kept: mx.array,
        guesses: mx.array,
        *,
        known: Sequence[int],
        places: Sequence[int],
    ) -> mx.array:
        """Return the tokens of rows that follow a step, int32 `[T]`.

        Args:
            tokens: int32 `[R]`, sampled by that step.
            kept: int32 `[N]`, the sampled row that each of its sequences goes on from.
            guesses: int32 `[N, count]`, what follows that row's token.
            known: each row's token, or where its place is not -1, how far the row is behind the
                first row of its sequence.
            places: each row's sequence among the N; -1 if its token is known.
        """
        raise NotImplementedError

    def rows_rejected(
        self, kept: mx.array, lasts: Sequence[int], *, places: Sequence[int]
    ) -> mx.array:
        """Return how many sampled rows come after the kept one of a sequence, int32 `[T]`.

        Args:
            kept: int32 `[N]`, see `followed_tokens`.
            lasts: the last sampled row of each of the N sequences.
            places: T sequences among the N; -1 yields 0.
        """
        raise NotImplementedError

    def moved_back(self, numbers: mx.array, rejected: mx.array, rows: Sequence[int]) -> mx.array:
        """Return numbers less the rejected rows before them, but at least 0, int32 `[M]`.

        Args:
            numbers: int32 `[M]`.
            rejected: int32 `[T]`, by row.
            rows: the row of each number; -1 for a number that stays.
        """
        back = mx.pad(rejected, [(0, 1)])[int32([row if row >= 0 else -1 for row in rows])]
        return mx.maximum(numbers - back, 0)
