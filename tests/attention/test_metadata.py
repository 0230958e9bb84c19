"""Each row sees its sequence's own keys, where they were written, and no others."""

from __future__ import annotations

import random
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attention.cpu import paged_tables, plain_tables
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.reference.cuts import cut
from quire.attention.rows import MOST_LISTED, RowLists
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from tests.attention.rows import HandRows

SIZE = 4
PLAIN, PAGE = KVFormat(), KVFormat("page", 4, 4)
SPECS = {
    "full": FullKV(2, 8),
    "window": WindowKV(2, 8, 10),
    "short window": WindowKV(2, 8, 3),
    "images": WindowKV(2, 8, 10, bidirectional_media=True),
}

Key = tuple[int, int]


def seen(metadata: AttentionMetadata) -> list[list[Key]]:
    """Return for each row the (block, offset) of each key that it sees, by the flat arrays."""
    rows: list[list[Key]] = []
    for number in range(metadata.sequences):
        table = metadata.block_table[slice(*metadata.table_starts[number : number + 2])]
        first = metadata.first_blocks[number]
        for row in range(*metadata.query_starts[number : number + 2]):
            keys = range(metadata.first_visible[row], metadata.last_visible[row] + 1)
            rows.append([(int(table[key // SIZE - first]), key % SIZE) for key in keys])
    return rows


def seen_by_cuts(metadata: AttentionMetadata) -> list[list[Key]]:
    """Return the keys that rows see, by the batches and chunks that the reference cuts."""
    batches, chunks = cut(metadata)
    rows: dict[int, list[Key]] = {}
    for batch in batches:
        singles = zip(batch.blocks, batch.first, batch.last, strict=True)
        for row, (blocks, first, last) in enumerate(singles, batch.rows.start):
            rows[row] = [(int(blocks[k // SIZE]), k % SIZE) for k in range(first, last + 1)]
    for chunk in chunks:
        for row, (first, last) in enumerate(zip(chunk.first, chunk.last, strict=True)):
            keys = range(first, last + 1)
            found = [(int(chunk.blocks[k // SIZE]), k % SIZE) for k in keys]
            rows[chunk.rows.start + row] = found
    return [rows[row] for row in range(metadata.rows)]


def expected(rows: list[HandRows], spec: AttentionSpec) -> list[list[Key]]:
    seen: list[list[Key]] = []
    for each in rows:
        for position in range(each.start, each.end):
            keys = range(spec.first_visible(position), last_visible(spec, each, position) + 1)
            seen.append([(each.tables[0][k // SIZE], k % SIZE) for k in keys])
            assert all(block >= 0 for block, _ in seen[-1]), "the test let go of a visible block"
    return seen


def last_visible(spec: AttentionSpec, rows: HandRows, position: int) -> int:
    """Return the row's own key, or the last of its image."""
    if spec.bidirectional_media:
        for start, end in rows.bidirectional:
            if start <= position < end:
                return end - 1
    return position


def table_of(rng: random.Random, spec: AttentionSpec, start: int, end: int) -> list[int]:
    """Return random block ids; -1 for blocks that have left the window."""
    ids = [rng.randrange(1000) for _ in range((end - 1) // SIZE + 1)]
    passed = spec.first_visible(start) // SIZE
    return [-1] * passed + ids[passed:]


def images_in(rng: random.Random, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return up to two images, the first of which may have started before `start`."""
    cuts = sorted(rng.sample(range(start, end + 1), min(4, end - start + 1)))
    starts, ends = cuts[::2], cuts[1::2]
    if rng.random() < 0.5:
        starts[0] = max(0, start - rng.randrange(9))
    return tuple(span for span in zip(starts, ends, strict=False) if span[0] < span[1])


@pytest.mark.parametrize("format", [PLAIN, PAGE], ids=["plain", "page"])
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
    rows = [
        HandRows(
            start,
            count,
            format,
            (table_of(rng, spec, start, start + count),),
            (900 + number,) if format.has_tail else (),
            images_in(rng, start, start + count) if count > 1 else (),
        )
        for number, (start, count) in enumerate(spans)
    ]
    metadata = build_metadata(0, spec, rows, SIZE)
    assert seen(metadata) == expected(rows, spec)
    assert seen_by_cuts(metadata) == expected(rows, spec)
    assert metadata.lengths.tolist() == [each.end for each in rows]
    assert metadata.counts.tolist() == [each.count for each in rows]
    assert (metadata.tails is not None) == format.has_tail
    if metadata.tails is not None:
        assert metadata.tails.tolist() == [900 + number for number in range(len(rows))]
    slots = metadata.slots
    written = list(zip(slots.blocks.tolist(), slots.offsets.tolist(), strict=True))
    own = [(each.tables[0][p // SIZE], p) for each in rows for p in range(each.start, each.end)]
    assert written == [(block, p % SIZE) for block, p in own]


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), min_size=1, max_size=8),
    data=st.data(),
)
def test_a_part_is_as_if_its_sequences_were_alone(
    spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    spec, rng = WindowKV(2, 8, 10), random.Random(len(spans))
    rows = [
        HandRows(start, count, PAGE, (table_of(rng, spec, start, start + count),), (start,))
        for start, count in spans
    ]
    begin = data.draw(st.integers(0, len(rows) - 1))
    end = data.draw(st.integers(begin + 1, len(rows)))
    part = build_metadata(0, spec, rows, SIZE).part(begin, end)
    alone = build_metadata(0, spec, rows[begin:end], SIZE)
    for name in ("query_starts", "lengths", "keys", "first_visible", "last_visible"):
        np.testing.assert_array_equal(getattr(part, name), getattr(alone, name))
    for name in ("table_starts", "block_table", "first_blocks", "blocks", "tails"):
        np.testing.assert_array_equal(getattr(part, name), getattr(alone, name))


def test_each_group_has_its_own_table() -> None:
    rows = [HandRows(5, 1, PAGE, ([7, 8], [3, 4]), (90, 91))]
    metadata = build_metadata(1, FullKV(1, 1), rows, SIZE)
    assert metadata.block_table.tolist() == [3, 4]
    assert metadata.tails is not None
    assert metadata.tails.tolist() == [91]


def test_a_tail_that_fills_is_named_with_its_block() -> None:
    rows = [
        HandRows(7, 1, PAGE, ([10, 11],), (90,)),
        HandRows(6, 1, PAGE, ([12, 13],), (91,)),
        HandRows(2, 9, PAGE, ([20, 21, 22],), (92,)),
    ]
    slots = build_metadata(0, FullKV(1, 1), rows, SIZE).slots
    assert slots.singles is not None
    assert slots.singles.of(mx.arange(11)).tolist() == [0, 1]
    assert slots.singles.filled is not None
    assert [each.tolist() for each in slots.singles.filled] == [[90], [11]]


def test_blocks_of_chunks_are_described_side_by_side() -> None:
    rows = [
        HandRows(2, 9, PAGE, ([20, 21, 22],), (92,)),  # 2 tokens in the tail; fills two blocks
        HandRows(7, 1, PAGE, ([10, 11],), (90,)),
        HandRows(0, 2, PAGE, ([30],), (93,)),  # fills none
        HandRows(5, 3, PAGE, ([40, 41],), (94,)),  # 1 in the tail; ends with the block
    ]
    chunks = build_metadata(0, FullKV(2, 1), rows, SIZE).slots.chunks
    assert chunks is not None
    assert chunks.blocks.starts.tolist() == [0, 3, 4, 5]
    assert chunks.blocks.described.tolist() == [
        [92, 2, 4, -2, 0],
        [92, 0, 4, 2, 1],
        [92, 0, 3, 6, -1],
        [93, 0, 2, 10, -1],
        [94, 1, 4, 11, 2],
    ]
    assert chunks.full_rows.tolist() == [40, 41, 42, 43, 82, 83]
    assert chunks.tail_rows.tolist() == [184, 185, 186, 187, 188, 189]
    blocks = mx.arange(5)
    assert blocks[chunks.full].tolist() == [0, 1, 4]
    assert blocks[chunks.last].tolist() == [2, 3, 4]


def test_rows_that_all_generate_need_not_be_taken_apart() -> None:
    generating = [HandRows(each, 1, PAGE, ([10, 11],), (90 + each,)) for each in (6, 7)]
    prompt = HandRows(2, 9, PAGE, ([20, 21, 22],), (92,))
    for rows, every in ((generating, True), ([*generating, prompt], False)):
        singles = build_metadata(0, FullKV(1, 1), rows, SIZE).slots.singles
        assert singles is not None
        assert singles.every == every
        assert singles.head_offsets.tolist() == [[6 % SIZE], [7 % SIZE]]


def test_long_block_tables_do_not_share_a_batch_with_short_ones() -> None:
    rows = [HandRows(length, 1, PLAIN, (range(length // SIZE + 1),)) for length in (3, 5, 200, 210)]
    batches, _ = cut(build_metadata(0, FullKV(1, 1), rows, SIZE))
    assert [batch.rows for batch in batches] == [slice(0, 2), slice(2, 4)]
    assert batches[0].blocks.shape == (2, 2)


@pytest.mark.parametrize("name", ["full", "window", "short window"])
@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 6)), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_plain_tables_are_those_of_metadata(
    name: str, spans: list[tuple[int, int]], seed: int
) -> None:
    spec, rng = SPECS[name], random.Random(seed)
    rows = [
        HandRows(start, count, PLAIN, (table_of(rng, spec, start, start + count),), (), ())
        for start, count in spans
    ]
    ops = SimpleNamespace(Tables=lambda numbers, sizes: (numbers.tolist(), sizes))
    lists = RowLists(rows)
    found = plain_tables(ops, lists, lists.of_group(0, spec, SIZE))
    assert found == paged_tables(ops, build_metadata(0, spec, rows, SIZE))


@pytest.mark.parametrize("name", ["full", "window", "short window"])
def test_many_rows_have_the_lists_of_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rng = SPECS[name], random.Random(1)
    spans = [(rng.randrange(150), rng.randrange(1, 40)) for _ in range(9)]
    rows = [
        HandRows(start, count, PLAIN, (table_of(rng, spec, start, start + count),), (), ())
        for start, count in spans
    ]
    lists = RowLists(rows)
    assert len(lists.keys) > MOST_LISTED
    many = lists.of_group(0, spec, SIZE)
    blocks = lists.blocks(many, SIZE)
    monkeypatch.setattr("quire.attention.rows.MOST_LISTED", len(lists.keys))
    assert lists.of_group(0, spec, SIZE) == many
    assert lists.blocks(many, SIZE) == blocks
