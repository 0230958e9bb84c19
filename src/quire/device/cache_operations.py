"""Writes to KV pools, and coding of the written keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.device.coding import Chunks, CodedChunks, VectorCoding


@dataclass(frozen=True, slots=True)
class RowCopies:
    """Rows to copy within each of several arrays.

    Attributes:
        sources, targets: int32 `[n]`.
    """

    pools: list[mx.array]
    sources: mx.array
    targets: mx.array


class CacheOperations:
    """Pool writes in MLX's operations. A device with kernels of its own overrides them.

    Attributes:
        rows_in_place: whether `write_rows` writes to pools that the same step has read. MLX's own
            assignment copies such a pool: queued readers hold it.
    """

    rows_in_place = False

    def write_vectors(
        self,
        pools: Sequence[mx.array],
        vectors: Sequence[mx.array],
        rows: mx.array,
        offsets: mx.array,
    ) -> None:
        """Set `pool[rows, offsets] = vectors` of each pool, `[R, S, dim]`.

        Args:
            vectors: `[T, heads, dim]`, one a pool.
            rows: `[T, heads]`.
            offsets: `[T, 1]`.
        """
        if len(rows) == 1:  # MLX drops the axis of the only row, and would put it back
            rows, offsets = rows.squeeze(0), offsets.squeeze(0)
        offsets = mx.broadcast_to(offsets, rows.shape)  # once for all pools
        for pool, each in zip(pools, vectors, strict=True):
            pool[rows, offsets] = each.astype(pool.dtype)

    def write_rows(self, pool: mx.array, values: mx.array, rows: mx.array) -> None:
        """Set `pool[rows] = values`, `[n, ...]` into `[R, ...]`; `rows` is `[n]`.

        What still reads the pool as it was must be an input of `values`: the pool may be written in
        place.
        """
        pool[rows] = values.astype(pool.dtype)

    def copy_rows(self, copies: Sequence[RowCopies]) -> None:
        """Make rows `targets` of arrays what their rows `sources` were before the call."""
        contents = [[pool[each.sources] for pool in each.pools] for each in copies]
        # Evaluated here: a pool that a pending gather still reads could not be written in place.
        mx.eval(contents)
        for each, rows in zip(copies, contents, strict=True):
            for pool, content in zip(each.pools, rows, strict=True):
                pool[each.targets] = content

    def encode(
        self, vectors: Sequence[mx.array], codings: Sequence[VectorCoding]
    ) -> list[mx.array] | None:
        """Code vectors `[..., dim]`.

        Returns:
            Of each array uint32 codes `[..., size * bits / 32]`, float16 scales
            `[..., size / group_size]`, or `[..., 1]` with a codebook, and biases where affine, in
            one list; None where there is no kernel that does so.
        """
        return None

    def write_codes(
        self,
        pools: Sequence[mx.array],
        vectors: Sequence[mx.array],
        codings: Sequence[VectorCoding],
        rows: mx.array,
        offsets: mx.array,
    ) -> bool:
        """Code vectors and write the codes as `write_vectors` does.

        Returns:
            Whether there is a kernel that does so; without one, nothing is written.
        """
        codes = self.encode(vectors, codings)
        if codes is None:
            return False
        self.write_vectors(pools, codes, rows, offsets=offsets)
        return True

    def code_blocks(self, chunks: Chunks, codings: Sequence[VectorCoding]) -> CodedChunks | None:
        """Return the blocks that chunks write to, and codes of those that they fill.

        Args:
            codings: of a channel of a block's keys, and of a token's values.

        Returns:
            None if the device has no kernel for it.
        """
        return None
