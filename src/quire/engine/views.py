"""Which rows of a step see which pages: from planned work to the arrays of `cache.view`.

Most steps are one token for each of many sequences, so that path is plain integers and few arrays.
"""

from __future__ import annotations

from array import array

import numpy as np

from quire.cache.specs import AttentionSpec
from quire.cache.view import Chunk, DecodeBatch, Ints, View
from quire.scheduler.plan import ScheduledSequence

_SHORT_PAGES = 15
"""Page tables up to this long share one batch; longer ones share with those of like length."""


def build_view(group: int, spec: AttentionSpec, work: list[ScheduledSequence], size: int) -> View:
    """The view of one group's rows of one format.

    Args:
        work: single tokens first.
        size: tokens a page.
    """
    tables = [w.block_ids(group) for w in work]
    single = sum(1 for w in work if w.count == 1)
    starts = np.array([w.start for w in work[:single]], dtype=np.int32)
    pages = [np.array([t[w.start // size] for t, w in zip(tables, work[:single], strict=False)])]
    offsets = [starts % size]
    chunks = []
    at = single
    for w, table in zip(work[single:], tables[single:], strict=True):
        positions = np.arange(w.start, w.end, dtype=np.int32)
        ids = np.array(table, dtype=np.int32)
        pages.append(ids[positions // size])
        offsets.append(positions % size)
        chunks.append(_chunk(group, spec, w, ids, positions, at, size))
        at += w.count
    return View(
        pages=np.concatenate(pages).astype(np.int32) if chunks else pages[0].astype(np.int32),
        offsets=np.concatenate(offsets) if chunks else offsets[0],
        batches=_batches(group, spec, work[:single], tables, starts, size),
        chunks=chunks,
        kv_heads=spec.kv_heads,
        page_tokens=size,
    )


def length_class(pages: int) -> int:
    """Generating rows whose page tables have the same class are attended together."""
    return max(pages, _SHORT_PAGES).bit_length()


def _batches(
    group: int,
    spec: AttentionSpec,
    work: list[ScheduledSequence],
    tables: list[array[int]],
    starts: Ints,
    size: int,
) -> list[DecodeBatch]:
    """Generating rows, cut where the page tables' lengths differ much."""
    first = spec.first_visible_each(starts)
    lows = (first // size).tolist()
    highs = (starts // size + 1).tolist()
    classes = [length_class(high - low) for low, high in zip(lows, highs, strict=True)]
    batches = []
    at = 0
    while at < len(work):
        end = at + 1
        while end < len(work) and classes[end] == classes[at]:
            end += 1
        width = max(highs[i] - lows[i] for i in range(at, end))
        flat = array("i")
        for i in range(at, end):
            flat.extend(tables[i][lows[i] : highs[i]])
            flat.extend([0] * (width - highs[i] + lows[i]))
        pages = np.array(flat, dtype=np.int32).reshape(end - at, width)
        opens = None
        if work[at].format.has_tail:
            opens = np.array([w.tail_block(group) for w in work[at:end]], dtype=np.int32)
        base = first[at:end] // size * size
        batches.append(
            DecodeBatch(
                slice(at, end),
                pages,
                first[at:end] - base,
                starts[at:end] - base,
                spec.kv_heads,
                size,
                opens,
            )
        )
        at = end
    return batches


def _chunk(
    group: int,
    spec: AttentionSpec,
    work: ScheduledSequence,
    ids: Ints,
    positions: Ints,
    at: int,
    size: int,
) -> Chunk:
    low = spec.first_visible(work.start) // size
    high = (work.end - 1) // size + 1
    last = _to_image_ends(work, positions) if spec.sees_whole_images else positions
    opens = work.tail_block(group)
    rows = slice(at, at + work.count)
    # Rows that see everything see from the first page on, which is then also the first listed.
    base = low * size
    return Chunk(
        rows,
        ids[low:high],
        positions - base,
        spec.first_visible_each(positions) - base,
        last - base,
        spec.kv_heads,
        size,
        opens,
    )


def _to_image_ends(work: ScheduledSequence, positions: Ints) -> Ints:
    """The last key that each row sees: its own, or the last of the image that it belongs to."""
    last = positions.copy()
    for begin, end in work.bidirectional:
        assert end <= work.end, "a chunk ends within an image"
        last[max(begin - work.start, 0) : end - work.start] = end - 1
    return last
