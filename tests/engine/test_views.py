"""Each row of a view sees its sequence's own keys, where they were written, and no others."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.cache.view import View
from quire.core.kv_format import KVFormat
from quire.engine.views import build_view
from quire.request import Image, PlacedImage
from quire.scheduler.plan import ScheduledSequence
from tests.engine.rows import SIZE, scheduled

PLAIN, SEALED = KVFormat(), KVFormat("page", 4, 4)
SPECS = {
    "full": FullKV(2, 8),
    "window": WindowKV(2, 8, 10),
    "short window": WindowKV(2, 8, 3),
    "images": WindowKV(2, 8, 10, sees_whole_images=True),
}

Key = tuple[int, int]


def seen(view: View) -> list[list[Key]]:
    """For each row, the (page, offset) of each key that it sees."""
    rows: list[list[Key]] = []
    for batch in view.batches:
        for pages, first, last in zip(batch.pages, batch.first, batch.last, strict=True):
            keys = range(first, last + 1)
            rows.append([(int(pages[k // SIZE]), k % SIZE) for k in keys])
    for chunk in view.chunks:
        for first, last in zip(chunk.first, chunk.last, strict=True):
            keys = range(first, last + 1)
            rows.append([(int(chunk.pages[k // SIZE]), k % SIZE) for k in keys])
    return rows


def expected(work: list[ScheduledSequence], spec: AttentionSpec) -> list[list[Key]]:
    rows: list[list[Key]] = []
    for item in work:
        table = item.block_ids(0)
        for position in range(item.start, item.end):
            keys = range(spec.first_visible(position), last_visible(spec, item, position) + 1)
            pages = [(table[k // SIZE], k % SIZE) for k in keys]
            rows.append([(page, offset) for page, offset in pages if page >= 0])
            assert len(rows[-1]) == len(keys), "the test let go of a visible block"
    return rows


def last_visible(spec: AttentionSpec, item: ScheduledSequence, position: int) -> int:
    """The row's own key, or the last of its image."""
    if spec.sees_whole_images:
        for placed in item.media:
            if placed.start <= position < placed.end:
                return placed.end - 1
    return position


def table_of(rng: random.Random, spec: AttentionSpec, start: int, end: int) -> list[int]:
    """Random page ids; -1 for pages that have left the window."""
    ids = [rng.randrange(1000) for _ in range((end - 1) // SIZE + 1)]
    passed = spec.first_visible(start) // SIZE
    return [-1] * passed + ids[passed:]


def images_in(rng: random.Random, start: int, end: int) -> tuple[PlacedImage, ...]:
    """Up to two images, the first of which may have begun before `start`."""
    cuts = sorted(rng.sample(range(start, end + 1), min(4, end - start + 1)))
    begins, ends = cuts[::2], cuts[1::2]
    if rng.random() < 0.5:
        begins[0] = max(0, start - rng.randrange(9))
    return tuple(
        PlacedImage(begin, Image(b"", 1, stop - begin, stop - begin, b"%d" % begin))
        for begin, stop in zip(begins, ends, strict=False)
        if begin < stop
    )


@pytest.mark.parametrize("format", [PLAIN, SEALED], ids=["plain", "sealed"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_rows_see_their_own_past(
    spec: AttentionSpec, format: KVFormat, spans: list[tuple[int, int]], seed: int
) -> None:
    rng = random.Random(seed)
    spans = sorted(spans, key=lambda span: span[1] > 1)  # single tokens come first
    work = [
        scheduled(
            "a",
            start,
            count,
            [table_of(rng, spec, start, start + count)],
            format,
            images=images_in(rng, start, start + count) if count > 1 else (),
        )
        for start, count in spans
    ]
    view = build_view(0, spec, work, SIZE)
    assert seen(view) == expected(work, spec)
    written = list(zip(view.pages.tolist(), view.offsets.tolist(), strict=True))
    places = [(w.block_ids(0)[p // SIZE], p) for w in work for p in range(w.start, w.end)]
    assert written == [(page, p % SIZE) for page, p in places if page >= 0]
    assert view.decode_rows == sum(item.count == 1 for item in work)
    if format.has_tail:
        singles = [int(id) for b in view.batches if b.opens is not None for id in b.opens]
        assert singles + [c.open for c in view.chunks] == [w.tail_block(0) for w in work]


def test_long_page_tables_do_not_share_a_batch_with_short_ones() -> None:
    lengths = (3, 5, 200, 210)
    work = [
        scheduled("a", length, 1, [list(range(length // SIZE + 1))], PLAIN) for length in lengths
    ]
    view = build_view(0, FullKV(1, 1), work, SIZE)
    assert [batch.rows for batch in view.batches] == [slice(0, 2), slice(2, 4)]
    assert view.batches[0].pages.shape == (2, 2)
