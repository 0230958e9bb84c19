"""Planned work without a scheduler: sequences whose page tables a test writes down."""

from __future__ import annotations

from quire.cache.block_manager import Block, PoolKey
from quire.core.kv_format import KVFormat
from quire.request import PlacedImage, Request
from quire.scheduler.plan import Work
from quire.scheduler.sequence import Sequence

SIZE = 4


def planned(
    name: str,
    start: int,
    count: int,
    tables: list[list[int]],
    format: KVFormat,
    *,
    known: int | None = None,
    sample: bool = True,
    images: tuple[PlacedImage, ...] = (),
) -> Work:
    """Tokens `[start, start + count)` of a sequence.

    Args:
        tables: by group, page ids; the sequence's open pages are numbered 900 and on.
        known: tokens that the host has; the rest is still on the device.
    """
    end = start + count
    tokens = tuple(100 * (1 + ord(name) % 7) + i for i in range(end if known is None else known))
    sequence = Sequence(Request(name, tokens, images=images), format, b"", 0)
    sequence.pending = end - len(tokens)
    sequence.computed = end
    for group, ids in enumerate(tables):
        key = PoolKey(group, format)
        sequence.tables.append([Block(key, id) if id >= 0 else None for id in ids])
        if format.has_tail:
            sequence.opens[group] = Block(PoolKey(group, format, open=True), 900 + ids[0])
    return Work(sequence, start, count, sample)
