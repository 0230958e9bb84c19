"""What a step's rows of one group and one format may see, as arrays that all its layers share.

Rows are ordered: first those that generate, in batches of similar length, then the chunks of
prompts, one sequence after the other. Key positions are relative to the first key of the pages
listed, so that a window's rows list only the pages that the window touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

_SCORES = 1 << 18
"""Attention scores (rows * keys) of one head that a tile may hold: 1 MB, of which reading a prompt
from codes holds a few copies at a time."""


def head_rows(pages: Ints, kv_heads: int) -> Ints:
    """Page ids `[..., P]` to rows of a pool's arrays, `[..., kv_heads, P]`.

    A pool of plain pages is `[pages * kv_heads, page_tokens, head_dim]`: one head of one page is
    one run of memory.
    """
    heads = np.arange(kv_heads, dtype=np.int32)[:, None]
    return (pages[..., None, :] * kv_heads + heads).astype(np.int32)


def _bias(first: Ints, last: Ints, begin: int, end: int) -> mx.array:
    """Keys `begin` to `end` as rows see them: 0 where visible, else minus infinity; float32.

    Computed on the device: made here, the biases of all tiles of a step would be in memory at once.
    """
    keys = mx.arange(begin, end)
    visible = (keys >= mx.array(first[:, None])) & (keys <= mx.array(last[:, None]))
    return mx.where(visible, 0.0, -mx.inf)


@dataclass
class DecodeBatch:
    """Generating rows, one a sequence, whose page tables have similar lengths.

    Attributes:
        rows: where they are among the format's rows.
        pages: `[B, P]` page ids, padded with page 0.
        first, last: `[B]` the visible keys, inclusive; `last` is the row's own.
        opens: `[B]` the open page that holds the row's own page as written, in formats that seal.
    """

    rows: slice
    pages: Ints
    first: Ints
    last: Ints
    kv_heads: int
    page_tokens: int
    opens: Ints | None = None

    @cached_property
    def heads(self) -> mx.array:
        """`[B, kv_heads, P]` rows of the pool's arrays."""
        return mx.array(head_rows(self.pages, self.kv_heads))

    @cached_property
    def mask(self) -> mx.array:
        """`[B, 1, 1, P * page_tokens]`, true where visible."""
        keys = np.arange(self.pages.shape[1] * self.page_tokens, dtype=np.int32)
        visible = (keys >= self.first[:, None]) & (keys <= self.last[:, None])
        return mx.array(visible[:, None, None, :])

    @cached_property
    def bias(self) -> mx.array:
        """`mask` as what is added to scores: 0 where visible, else minus infinity; float32."""
        return mx.where(self.mask, 0.0, -mx.inf)

    @cached_property
    def open_heads(self) -> mx.array:
        """`[B, kv_heads]` rows of the open pool's arrays."""
        assert self.opens is not None, "the format does not seal"
        return mx.array(head_rows(self.opens[:, None], self.kv_heads)[..., 0])

    @cached_property
    def sealed_heads(self) -> mx.array | None:
        """`[B, kv_heads, P]` rows of the pages before the rows' own; None where there are none."""
        count = int(self.last.max()) // self.page_tokens
        return mx.array(head_rows(self.pages[:, :count], self.kv_heads)) if count else None

    @cached_property
    def own_page_bias(self) -> mx.array:
        """`[B, 1, 1, (P + 1) * page_tokens]`: 0 where visible in `sealed_heads`, then in

        the row's own page; else minus infinity. float32.
        """
        start = self.last // self.page_tokens * self.page_tokens
        sealed = np.arange(int(start.max()), dtype=np.int32)
        before = (sealed >= self.first[:, None]) & (sealed < start[:, None])
        own = start[:, None] + np.arange(self.page_tokens, dtype=np.int32)
        here = (own >= self.first[:, None]) & (own <= self.last[:, None])
        visible = np.concatenate([before, here], axis=1)[:, None, None, :]
        return mx.where(mx.array(visible), 0.0, -mx.inf)


@dataclass(frozen=True, slots=True)
class Block:
    """The pages that a chunk writes to, as written, `[n, kv_heads, page_tokens, head_dim]`."""

    keys: mx.array
    values: mx.array


@dataclass
class Chunk:
    """Consecutive tokens of one sequence.

    Attributes:
        rows: where they are among the format's rows.
        pages: `[P]` ids of the pages from the first visible key on.
        own: `[t]` each row's own key.
        first, last: `[t]` the visible keys of each row, inclusive; `last` is the row's own, or the
            end of the image that it belongs to, which is part of the chunk.
        open: the open page of the sequence, in formats that seal.
    """

    rows: slice
    pages: Ints
    own: Ints
    first: Ints
    last: Ints
    kv_heads: int
    page_tokens: int
    open: int | None = None

    @property
    def offset(self) -> int:
        """Tokens before the chunk in its first own page."""
        return int(self.own[0]) % self.page_tokens

    @property
    def own_pages(self) -> int:
        """Pages that the chunk writes to; they are the last of `pages`."""
        return -(-(self.offset + len(self.own)) // self.page_tokens)

    @property
    def full_pages(self) -> int:
        """Own pages that the chunk fills."""
        return (self.offset + len(self.own)) // self.page_tokens

    @cached_property
    def open_rows(self) -> mx.array:
        """`[kv_heads]` rows of the open pool's arrays."""
        assert self.open is not None, "the format does not seal"
        return mx.array(head_rows(np.array([self.open], dtype=np.int32), self.kv_heads)[:, 0])

    @cached_property
    def heads(self) -> mx.array:
        """`[1, kv_heads, P]` rows of the pool's arrays."""
        return mx.array(head_rows(self.pages, self.kv_heads)[None])

    @cached_property
    def causal(self) -> bool:
        """Whether each row sees everything up to itself, and nothing else."""
        return not self.first.any() and bool((self.last == self.own).all())

    @cached_property
    def mask(self) -> mx.array:
        """`[t, keys]` up to the last row's own key, true where visible."""
        keys = np.arange(int(self.last[-1]) + 1, dtype=np.int32)
        return mx.array((keys >= self.first[:, None]) & (keys <= self.last[:, None]))

    def bias(self, rows: slice, keys: int) -> mx.array:
        """`[t, keys]`: 0 where some rows see the first keys, else minus infinity; float32."""
        return _bias(self.first[rows], self.last[rows], 0, keys)

    def tiles(self) -> Iterator[Tile]:
        """The rows, a few at a time. No tile crosses the end of a page."""
        size, start = self.page_tokens, 0
        while start < len(self.own):
            page = int(self.own[start]) // size
            rows = slice(start, start + size - int(self.own[start]) % size)
            low = int(self.first[rows].min()) // size
            high = int(self.last[rows].max()) // size + 1
            most = max(1, _SCORES // ((high - low) * size))
            rows = slice(start, min(rows.stop, start + most, len(self.own)))
            first, last = self.first[rows], self.last[rows]
            yield Tile(rows, slice(low, high), page, first, last, size)
            start = rows.stop


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a chunk that are scored at once; they all lie in one page.

    Attributes:
        rows: where they are in the chunk.
        pages: those that any of them sees, as places in the chunk's.
        own: the rows' own page among the chunk's: the last of `pages`, unless they belong to an
            image that goes on.
        first, last: the rows' visible keys, as in the chunk.
    """

    rows: slice
    pages: slice
    own: int
    first: Ints
    last: Ints
    page_tokens: int

    @property
    def bias(self) -> mx.array:
        """`[t, P * page_tokens]`: 0 where visible, else minus infinity; float32."""
        begin, end = self.pages.start * self.page_tokens, self.pages.stop * self.page_tokens
        return _bias(self.first, self.last, begin, end)


@dataclass
class View:
    """All rows of a step in one group and one format.

    Attributes:
        pages, offsets: `[T]` where each row's key and value belong.
        blocks: by the store that wrote them, the chunks' own pages as written: layers that share
            another's keys read them later in the step. Formats that seal put them here.
    """

    pages: Ints
    offsets: Ints
    batches: list[DecodeBatch]
    chunks: list[Chunk]
    kv_heads: int
    page_tokens: int
    blocks: dict[object, list[Block]] = field(default_factory=dict)

    @cached_property
    def write_rows(self) -> mx.array:
        """`[T, kv_heads]` rows of the pool's arrays."""
        return mx.array(head_rows(self.pages[:, None], self.kv_heads)[..., 0])

    @cached_property
    def decode_rows(self) -> int:
        """Rows that generate; they come first."""
        return self.batches[-1].rows.stop if self.batches else 0

    @cached_property
    def _opens(self) -> Ints:
        parts = [batch.opens for batch in self.batches if batch.opens is not None]
        return np.concatenate(parts)

    @cached_property
    def open_rows(self) -> mx.array:
        """`[decode_rows, kv_heads]` rows of the open pool's arrays."""
        return mx.array(head_rows(self._opens[:, None], self.kv_heads)[..., 0])

    @cached_property
    def filled(self) -> tuple[mx.array, mx.array] | None:
        """Rows of the open pool and of the pool, `[n * kv_heads]` each, of the pages that

        generating rows fill in this step; None when there are none.
        """
        full = np.flatnonzero(self.offsets[: self.decode_rows] == self.page_tokens - 1)
        if not len(full):
            return None
        opens = head_rows(self._opens[full, None], self.kv_heads).reshape(-1)
        pages = head_rows(self.pages[full, None], self.kv_heads).reshape(-1)
        return mx.array(opens), mx.array(pages)

    @cached_property
    def write_offsets(self) -> mx.array:
        """`[T, 1]` places within a page."""
        return mx.array(self.offsets[:, None])
