"""Chooses the sizes of graph that a step may run as."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.attention.paged.tiles import FEW_ROWS
from quire.cache.specs import NO_GROUP, KVLayout
from quire.executor.graphs.graph_cache import MAX_ROWS
from quire.scheduler.plan import ScheduledSequence

_MANY_KEYS = 1 << 19
"""Pairs of prompts' rows and keys in a layer from which on a larger graph takes less time.

A graph of up to `MAX_ROWS` rows reads the keys anew for each row, a larger one once for each tile,
but its products take longer. Beside streams of Llama 8B in 4 bits on an H100, after some 19,000
tokens, a step of 62 rows took 16.4 ms in the former, one of 66 rows 11.2 ms in the latter.
"""


class GraphSizes:
    """The sizes of graph that steps of a model may run as.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, layout: KVLayout, block_size: int) -> None:
        self._block_size = block_size
        layers = Counter(group for group in layout.group if group != NO_GROUP)
        self._specs = [
            (spec, count)
            for group, count in layers.items()
            if (spec := layout.groups[group].spec.attention) is not None
        ]

    def of(self, rows: Sequence[ScheduledSequence], most: int) -> list[int]:
        """Return the row counts of the graphs that hold a step, the best first.

        Args:
            rows: the step's sequences, all of one format.
            most: rows of the largest graph for this format.
        """
        least = 1 << (sum(each.count for each in rows) - 1).bit_length()
        if rows[0].format.has_tail and not all(in_one_block(e, self._block_size) for e in rows):
            least = max(least, 2 * MAX_ROWS)
        sizes = [1 << n for n in range(least.bit_length() - 1, most.bit_length())]
        if least <= MAX_ROWS < most and self._keys(rows) >= _MANY_KEYS:
            sizes.sort(key=lambda size: size <= MAX_ROWS)
        return sizes

    def _keys(self, rows: Sequence[ScheduledSequence]) -> float:
        """Return how many keys the rows of prompts see together, on average over layers."""
        total = sum(
            each.count * count * (each.end - spec.first_visible(each.end - 1))
            for each in rows
            if each.count > FEW_ROWS
            for spec, count in self._specs
        )
        return total / max(1, sum(count for _, count in self._specs))


def in_one_block(rows: ScheduledSequence, block_size: int) -> bool:
    """Whether all rows of each sequence lie in one block."""
    return rows.start % block_size + rows.count <= block_size
