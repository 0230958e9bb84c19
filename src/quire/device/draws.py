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
        draws: whether `draw` has a kernel. Tokens are drawn by MLX's operations elsewhere.
    """

    draws = False

    def best(self, logits: mx.array) -> mx.array:
        """Return the place of each row's largest logit, int32 `[R]`."""
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    def first_different(
        self, tokens: mx.array, drafts: Sequence[int], starts: Sequence[int]
    ) -> mx.array:
        """Return the first row of each sequence whose token is not its draft, int32 `[N]`.

        Args:
            tokens: int32 `[R]`.
            drafts: R of them. A sequence's last one equals no token.
            starts: the first row of each sequence, and R.
        """
        firsts, ends = np.array(starts[:-1]), np.array(starts[1:])
        places = firsts[:, None] + np.arange(max(ends - firsts))
        different = tokens != int32(drafts)
        if places.size > len(drafts):
            different = different[int32(np.minimum(places, ends[:, None] - 1))]
        first = mx.argmax(different.reshape(places.shape), axis=1).astype(mx.int32)
        return first if len(firsts) == 1 else first + int32(firsts)

    def draw(self, logits: mx.array, rows: Sequence[Draw]) -> mx.array:
        """Draw a token from each row of float32 logits, int32 `[R]`, if `draws` is set."""
        raise NotImplementedError
