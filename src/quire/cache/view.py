"""What a step's rows of one group and one format may see, as arrays that all its layers share.

Rows are ordered: first those that generate, in batches of similar length, then the chunks of prompts,
one sequence after the other. Key positions are relative to the first key of the pages listed, so
that a window's rows list only the pages that the window touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


def head_rows(pages: Ints, kv_heads: int) -> Ints:
    """Page ids `[..., P]` to rows of a pool's arrays, `[..., kv_heads, P]`.

    A pool of plain pages is `[pages * kv_heads, page_tokens, head_dim]`: one head of one page is one
    run of memory.
    """
    heads = np.arange(kv_heads, dtype=np.int32)[:, None]
    return (pages[..., None, :] * kv_heads + heads).astype(np.int32)


@dataclass
class DecodeBatch:
    """Generating rows, one a sequence, whose page tables have similar lengths.

    Attributes:
        rows: where they are among the format's rows.
        pages: `[B, P]` page ids, padded with page 0.
        first, last: `[B]` the visible keys, inclusive; `last` is the row's own.
        opens: `[B]` the plain page that holds the row's own page of tokens, in formats that seal.
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


@dataclass
class Chunk:
    """Consecutive tokens of one sequence.

    Attributes:
        rows: where they are among the format's rows.
        pages: `[P]` ids of the pages from the first visible key on.
        first, last: `[t]` the visible keys of each row, inclusive; `last` is the row's own.
        opens: plain pages of the pages that the chunk writes to, in formats that seal.
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
        """`[1, kv_heads, P]` rows of the pool's arrays."""
        return mx.array(head_rows(self.pages, self.kv_heads)[None])

    @cached_property
    def causal(self) -> bool:
        """Whether each row sees everything up to itself."""
        return not self.first.any()

    @cached_property
    def mask(self) -> mx.array:
        """`[t, keys]` up to the last row's own key, true where visible."""
        keys = np.arange(int(self.last[-1]) + 1, dtype=np.int32)
        return mx.array((keys >= self.first[:, None]) & (keys <= self.last[:, None]))


@dataclass
class View:
    """All rows of a step in one group and one format.

    Attributes:
        pages, offsets: `[T]` where each row's key and value belong.
        open_pages: `[T]` the plain page of each row, in formats that seal.
        seals: (plain page ids, page ids) of the pages that this step fills.
    """

    pages: Ints
    offsets: Ints
    batches: list[DecodeBatch]
    chunks: list[Chunk]
    kv_heads: int
    page_tokens: int
    open_pages: Ints | None = None
    seals: tuple[Ints, Ints] | None = None

    @cached_property
    def write_rows(self) -> mx.array:
        """`[T, kv_heads]` rows of the pool's arrays."""
        return mx.array(head_rows(self.pages[:, None], self.kv_heads)[..., 0])

    @cached_property
    def open_rows(self) -> mx.array:
        """`[T, kv_heads]` rows of the open pool's arrays."""
        assert self.open_pages is not None, "the format does not seal"
        return mx.array(head_rows(self.open_pages[:, None], self.kv_heads)[..., 0])

    @cached_property
    def write_offsets(self) -> mx.array:
        """`[T, 1]` places within a page."""
        return mx.array(self.offsets[:, None])
