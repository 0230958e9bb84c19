"""Attention in both directions within groups of rows, such as those of a picture or a text."""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx

_LEAST_TILE = 32


class BidirectionalOperations:
    """Attends without a cache, in MLX.

    Attributes:
        score_bytes: bytes of attention scores in memory at once, on devices where MLX materialises
            them; None elsewhere.
    """

    score_bytes: ClassVar[int | None] = None

    def attend_groups(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        scale: float,
        *,
        reach: int | None = None,
        lengths: mx.array | None = None,
    ) -> mx.array:
        """Attend within groups of rows, in tiles of queries where this bounds memory.

        Args:
            q: `[groups, rows, heads, head_dim]`.
            k, v: the same shape, or with other numbers of rows and heads; as many rows if `reach`
                is given.
            scale: factor of the logits.
            reach: the most rows between a query and a key that it sees; None means all keys.
            lengths: `[groups]`, number of rows of each group that are keys; None means all.

        Returns:
            An array of the shape of `q`.
        """
        (groups, n, heads, _), count = q.shape, k.shape[1]
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        tile = n if self.score_bytes is None else self.score_bytes // (groups * heads * count * 4)
        tile = max(1, tile)
        if reach is not None:
            assert count == n, "rows have neighbours among the keys"
            tile = min(tile, max(_LEAST_TILE, 2 * reach))
        parts: list[mx.array] = []
        for start in range(0, n, tile):
            end = min(n, start + tile)
            seen = slice(0, count)
            if reach is not None:
                seen = slice(max(0, start - reach), min(n, end + reach))
            # Each tile depends on the one before, so that only one tile's scores are in memory.
            rows = mx.depends([q[:, :, start:end]], parts[-1:])[0]
            mask = _mask(start, end, seen, reach=reach, lengths=lengths)
            keys, values = k[:, :, seen], v[:, :, seen]
            parts.append(
                mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=mask)
            )
        return mx.concatenate(parts, axis=2).swapaxes(1, 2)


def _mask(
    start: int, end: int, seen: slice, reach: int | None, lengths: mx.array | None
) -> mx.array | None:
    """Return which keys of `seen` rows `[start, end)` see, bool; None if each sees all."""
    keys = mx.arange(seen.start, seen.stop)
    mask = None
    if reach is not None and seen.stop - seen.start > reach + 1:
        mask = mx.abs(keys - mx.arange(start, end)[:, None]) <= reach  # [rows, keys]
    if lengths is None:
        return mask
    own = (keys < lengths[:, None])[:, None, None]  # [groups, 1, 1, keys]
    return own if mask is None else mx.logical_and(own, mask)
