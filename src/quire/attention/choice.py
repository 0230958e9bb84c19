"""Selection of the top keys of each row by an indexer (DeepSeek V3.2, arXiv:2512.02556)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from quire.attention.metadata import AttentionMetadata
from quire.attention.reference.cuts import Chunk, DecodeBatch, cut
from quire.cache.formats.base import LayerStore
from quire.core.arrays import Ints
from quire.device.device import current_device
from quire.device.dtypes import from_host

_ELEMENTS = 32 << 20
"""Most scores (heads * rows * keys), or elements of gathered keys, in memory at a time."""


class IndexerTopK:
    """Chooses keys for some sequences of a step; shared by the layers of a KV group.

    Args:
        limit: the most keys that a row sees.
    """

    def __init__(self, metadata: AttentionMetadata, limit: int) -> None:
        self._limit = limit
        self._rows = metadata.rows
        batches, chunks = cut(metadata)
        self._batches = [each for each in batches if int(each.last.max()) >= limit]
        self._chunks = [each for each in chunks if int(each.last.max()) >= limit]

    def choose(self, q: mx.array, weights: mx.array, store: LayerStore) -> mx.array:
        """Return the keys with the highest scores, for each row.

        Args:
            q: `[T, heads, dim]`.
            weights: `[T, heads]`.
            store: the store of the keys.

        Returns:
            `[T, limit]`, see `Scoring.chosen`; rows of sequences none of which has more keys than
            that may choose nothing.
        """
        (keys,) = store.arrays()
        q, weights = q.astype(mx.float32), weights.astype(mx.float32)[:, None]
        outs: list[tuple[slice, mx.array]] = []
        for batch in self._batches:
            outs += self._of_batch(q[batch.rows], weights[batch.rows], keys, batch=batch)
        for chunk in self._chunks:
            outs += self._of_chunk(q[chunk.rows], weights[chunk.rows], keys, chunk=chunk)
        outs.sort(key=lambda out: out[0].start)
        return self._joined(outs)

    def _of_batch(
        self, q: mx.array, weights: mx.array, keys: mx.array, batch: DecodeBatch
    ) -> list[tuple[slice, mx.array]]:
        def gathered(rows: slice, before: list[mx.array]) -> mx.array:
            blocks = mx.depends([batch.heads[rows, 0]], before)[0]
            return keys[blocks].reshape(blocks.shape[0], -1, keys.shape[-1]).astype(mx.float32)

        seen = batch.blocks.shape[1] * batch.block_size
        return self._in_tiles(
            q,
            weights,
            gathered,
            seen=seen,
            start=batch.rows.start,
            first=batch.first,
            last=batch.last,
        )

    def _of_chunk(
        self, q: mx.array, weights: mx.array, keys: mx.array, chunk: Chunk
    ) -> list[tuple[slice, mx.array]]:
        own = keys[chunk.heads[0, 0]].reshape(1, -1, keys.shape[-1]).astype(mx.float32)

        def gathered(rows: slice, before: list[mx.array]) -> mx.array:
            keys: mx.array = mx.depends([own], before)[0]
            return keys

        return self._in_tiles(
            q,
            weights,
            gathered,
            seen=own.shape[1],
            start=chunk.rows.start,
            first=chunk.first,
            last=chunk.last,
        )

    def _in_tiles(
        self,
        q: mx.array,
        weights: mx.array,
        gathered: Callable[[slice, list[mx.array]], mx.array],
        seen: int,
        start: int,
        first: Ints,
        last: Ints,
    ) -> list[tuple[slice, mx.array]]:
        """Score and choose tile by tile, so that intermediate arrays are bounded.

        Args:
            gathered: the keys of some rows, `[rows or 1, seen, dim]`, once other arrays are there.
            start: of the rows among the metadata's.
            first, last: the keys in their range.
        """
        count, heads, dim = q.shape
        tile = max(1, _ELEMENTS // (seen * max(heads, dim)))
        places = mx.arange(seen)
        outs: list[tuple[slice, mx.array]] = []
        for begin in range(0, count, tile):
            rows = slice(begin, min(begin + tile, count))
            keys = gathered(rows, [outs[-1][1]] if outs else [])
            some = q[rows].reshape(keys.shape[0], -1, dim)
            dots = current_device().times_transposed(some, keys).reshape(-1, heads, seen)
            scores = (weights[rows] @ mx.maximum(dots, 0))[:, 0]
            low, high = from_host(first[rows, None]), from_host(last[rows, None])
            scores = mx.where((places >= low) & (places <= high), scores, -mx.inf)
            outs.append((slice(start + rows.start, start + rows.stop), self._highest(scores)))
        return outs

    def _highest(self, scores: mx.array) -> mx.array:
        """Return the indices of the chosen keys, `[t, seen]` to `[t, limit]`, ascending.

        Of equal scores the first ones are chosen, whatever else is in the step, because scores are
        compared and not sorted together with their positions.
        """
        limit = self._limit
        least = -mx.partition(-scores, limit - 1, axis=-1)[:, limit - 1 : limit]
        above, equal = scores > least, scores == least
        room = limit - above.sum(axis=-1, keepdims=True)
        chosen = (above | (equal & (mx.cumsum(equal, axis=-1) <= room))) & (scores > -mx.inf)
        # Keys that are not chosen are written to an extra column, which is then dropped.
        columns = mx.where(chosen, mx.cumsum(chosen, axis=-1) - 1, limit)
        places = mx.broadcast_to(mx.arange(scores.shape[1]), scores.shape)
        blank = mx.full((scores.shape[0], limit + 1), -1, dtype=mx.int32)
        return mx.put_along_axis(blank, columns, places, axis=-1)[:, :limit]

    def _joined(self, outs: list[tuple[slice, mx.array]]) -> mx.array:
        """Concatenate all rows, including those that need no choice."""
        parts: list[mx.array] = []
        at = 0
        for rows, chosen in [*outs, (slice(self._rows, self._rows), None)]:
            if rows.start > at:
                parts.append(mx.full((rows.start - at, self._limit), -1, dtype=mx.int32))
            if chosen is not None:
                parts.append(chosen)
            at = rows.stop
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def choice_needed(metadata: AttentionMetadata, limit: int) -> bool:
    """Return whether any sequence has more keys than a row may see."""
    return bool(np.any(metadata.lengths > limit))
