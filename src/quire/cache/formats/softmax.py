"""Attention over keys that are read a part at a time: parts are joined by their log-sum-exp.

Rows are grouped by the key head that they read: `[kv_heads, G, t, ...]`, G query heads a key head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.cache.view import Ints

_ROWS = 256
_PAGES = 8
"""Rows and pages that are scored at once. 8 query heads and pages of 64 tokens make 4 MB of scores,
which is what a prefill adds to its peak memory."""

_NOTHING = -1e30
"""Below every score, and still finite: the difference of two of it is no NaN."""


@dataclass(frozen=True, slots=True)
class Part:
    """What rows saw of some keys, float32.

    Attributes:
        top: `[..., 1]` the largest score; very low where no key was visible.
        total: `[..., 1]` the sum of `exp(score - top)`.
        out: `[..., size]` the sum of `exp(score - top) * value`.
    """

    top: mx.array
    total: mx.array
    out: mx.array


Tile = tuple[mx.array, Callable[[mx.array], mx.array]]
"""Scores `[kv_heads, M, S]` of M query vectors, and what turns weights into sums of values."""


def see(scores: mx.array, visible: mx.array | None, mix: Callable[[mx.array], mx.array]) -> Part:
    """The part of the keys that `scores` `[..., S]` are of; `visible` broadcasts against them."""
    scores = scores.astype(mx.float32)
    if visible is not None:
        scores = mx.where(visible, scores, _NOTHING)
    top = scores.max(axis=-1, keepdims=True)
    weights = mx.exp(scores - top)
    if visible is not None:
        weights = mx.where(visible, weights, 0.0)
    return Part(top, weights.sum(axis=-1, keepdims=True), mix(weights).astype(mx.float32))


def weigh(scores: mx.array, bias: mx.array, sinks: mx.array | None) -> mx.array:
    """The weights of all keys of a row, float32: what `see` and `finish` do, in fewer operations.

    Args:
        scores: `[..., S]`.
        bias: 0 where visible, else minus infinity; broadcasts against them.
        sinks: `[..., 1]`, logits that take weight and give nothing; broadcasts likewise.
    """
    scores = scores + bias
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    extra = mx.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, extra], axis=-1), axis=-1, precise=True)[..., :-1]


def join(a: Part, b: Part) -> Part:
    """Both parts' keys together."""
    top = mx.maximum(a.top, b.top)
    left, right = mx.exp(a.top - top), mx.exp(b.top - top)
    return Part(top, a.total * left + b.total * right, a.out * left + b.out * right)


def finish(part: Part, sinks: mx.array | None) -> mx.array:
    """The attention output.

    Args:
        sinks: logits that take weight and give nothing; broadcasts against `part.top`.
    """
    if sinks is None:
        return part.out / part.total
    nothing = mx.zeros_like(part.out)
    extra = mx.broadcast_to(sinks.astype(mx.float32), part.top.shape)
    whole = join(part, Part(extra, mx.ones_like(extra), nothing))
    return whole.out / whole.total


def see_pages(
    q: mx.array,
    first: Ints,
    last: Ints,
    page_tokens: int,
    size: int,
    read: Callable[[mx.array, slice, list[mx.array]], Tile],
) -> Part:
    """Each row's keys from `first` to `last`, a few rows and pages at a time.

    Args:
        q: `[kv_heads, G, t, head_dim]`, scaled.
        size: elements of a value, as `mix` gives them.
        first, last: `[t]`, inclusive; a row with `last < first` sees nothing here.
        read: scores `[kv_heads, M, head_dim]` query vectors against a slice of the pages, once the
            arrays that it is handed are computed: so that one tile is in memory at a time.
    """
    kv_heads, grouped, count, dim = q.shape
    parts: list[Part] = []
    after: list[mx.array] = []
    for start in range(0, count, _ROWS):
        rows = slice(start, min(start + _ROWS, count))
        some = q[:, :, rows].reshape(kv_heads, -1, dim)
        low = int(first[rows].min()) // page_tokens
        high = int(last[rows].max()) // page_tokens + 1
        part: Part | None = None
        for page in range(low, high, _PAGES):
            pages = slice(page, min(page + _PAGES, high))
            scores, mix = read(some, pages, after)
            visible = _visible(first[rows], last[rows], pages, page_tokens)
            seen = see(*_grouped(scores, grouped, visible), mix)
            part = seen if part is None else join(part, seen)
            after = [part.out]
        if part is None:
            part = _unseen(some, size)
        parts.append(_ungrouped(part, kv_heads, grouped))
    if len(parts) == 1:
        return parts[0]
    return Part(
        mx.concatenate([p.top for p in parts], axis=2),
        mx.concatenate([p.total for p in parts], axis=2),
        mx.concatenate([p.out for p in parts], axis=2),
    )


def _visible(first: Ints, last: Ints, pages: slice, page_tokens: int) -> mx.array | None:
    """`[t, S]`, or None when every row sees every key of these pages."""
    begin, end = pages.start * page_tokens, pages.stop * page_tokens
    if first.max() <= begin and last.min() >= end - 1:
        return None
    keys = np.arange(begin, end, dtype=np.int32)
    return mx.array((keys >= first[:, None]) & (keys <= last[:, None]))


def _grouped(
    scores: mx.array, grouped: int, visible: mx.array | None
) -> tuple[mx.array, mx.array | None]:
    """The mask repeated for the G query heads of a key head."""
    if visible is None:
        return scores, None
    return scores, mx.concatenate([visible] * grouped)


def _unseen(q: mx.array, size: int) -> Part:
    zeros = mx.zeros((*q.shape[:-1], 1), dtype=mx.float32)
    return Part(zeros + _NOTHING, zeros, mx.zeros((*q.shape[:-1], size), dtype=mx.float32))


def _ungrouped(part: Part, kv_heads: int, grouped: int) -> Part:
    def split(x: mx.array) -> mx.array:
        return x.reshape(kv_heads, grouped, -1, x.shape[-1])

    return Part(split(part.top), split(part.total), split(part.out))
