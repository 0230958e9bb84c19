"""Scheduled sequences without a scheduler, whose block tables a test writes down."""

from __future__ import annotations

from array import array

from quire.core.kv_format import KVFormat
from quire.core.media import PlacedMedia
from quire.core.request import SamplingParams
from quire.sampling.rows import RowSampling
from quire.scheduler.plan import BlockIds, KVPlacement, Positions, ScheduledSequence

SIZE = 4


def scheduled(
    name: str,
    start: int,
    count: int,
    tables: list[list[int]],
    format: KVFormat,
    *,
    unread: bool = False,
    sampled: int = 1,
    images: tuple[PlacedMedia, ...] = (),
    positions: Positions | None = None,
    snapshots: tuple[tuple[int, int], ...] = (),
    drafted_states: tuple[tuple[int, int], ...] = (),
) -> ScheduledSequence:
    """Return tokens `[start, start + count)` of a sequence.

    Args:
        tables: by group, block ids; the sequence's tail blocks are numbered 900 and on.
        unread: whether the last row's token is still on the device.
    """
    end = start + count
    base = 100 * (1 + ord(name) % 7)
    return ScheduledSequence(
        id=name,
        number=ord(name),
        format=format,
        start=start,
        count=count,
        tokens=array("i", range(base + start, base + end - unread)),
        positions=range(start, end) if positions is None else positions,
        placement=KVPlacement(
            tuple(BlockIds(array("i", ids), len(ids)) for ids in tables),
            {group: 900 + ids[0] for group, ids in enumerate(tables)} if format.has_tail else {},
        ),
        sampling=(RowSampling(SamplingParams(temperature=0), end),) * sampled,
        media=tuple(placed for placed in images if placed.start < end and placed.end > start),
        snapshots=snapshots,
        drafted_states=drafted_states,
    )
