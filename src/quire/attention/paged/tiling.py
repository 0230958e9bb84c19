"""Divides the rows of prompts into tiles, and the keys of tiles into pieces where there are too few
tiles for the card.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.attention.paged.tiles import FEW_ROWS
from quire.core.arrays import Ints

_PASS = 128
"""Keys to a multiple of which pieces begin, so that no pass of a kernel has keys of two pieces."""
_MOST_PIECES = 8
"""The most pieces of a tile."""
_BLOCKS_EACH, _MOST_SHARED = 4, 256
"""The most thread blocks for each that runs at a time, and the most tiles, if any are shared."""
_WHOLE_COST, _PIECE_COST = 1, 3
"""Time of a thread block beside its passes, in passes, for a whole tile and for a piece, whose sums
it stores.
"""
_MANY_KEYS = 2048
"""Fewest keys for which a tile of a sequence with few rows may be worth its thread blocks."""
_SINGLE_COST = 0.4
"""Time of a pass in which one row is read outside of tiles, in passes of a tile.

One thread block reads all keys of such a row and KV head, while most of the card waits. Beside two
streams of Llama 8B after 20,000 tokens, a step of 512 rows takes 15.6 ms on an H100 with tiles of
these, 17.7 without, one of 256 rows 11.9 and 15.0.
"""
_KEYS, _PIECE = 2, 5
"""Fields of a tile. The lowest key, which one past the highest follows. And in place of the
sequence 0 for a whole tile, or for a piece: 65,536 times the number of its tile's first piece among
all tiles, 256 times its own number in its tile, and the number of its tile's pieces."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How thread blocks share the attention of prompts in a KV group.

    Attributes:
        rows: rows of one sequence in a tile.
        heads: thread blocks of a tile, each of which has other heads.
        at_once: thread blocks that the card runs at a time; 0 if no keys are shared.
    """

    rows: int
    heads: int = 1
    at_once: int = 0

    def most_tiles(self, max_rows: int) -> int:
        """Return the most tiles of a graph of `max_rows` rows, if none is shared."""
        return min(max_rows, max_rows // (FEW_ROWS + 1) + max_rows // self.rows + 1)

    @property
    def most_shared(self) -> int:
        """The most tiles of a step in which some are shared, pieces counted as tiles."""
        return min(_MOST_SHARED, _BLOCKS_EACH * self.at_once // self.heads)

    def room(self, max_rows: int) -> int:
        """Return the most tiles of a graph of `max_rows` rows, pieces counted as tiles."""
        return max(self.most_tiles(max_rows), self.most_shared)

    def few_rows(self, counts: Ints, keys: Ints, max_rows: int) -> Ints:
        """Return for each sequence the most rows that are read one by one, not in tiles: 0 for
        those with few rows and many keys, if the step's attention ends sooner with tiles of them.

        Args:
            counts, keys: rows of each sequence, and keys that they see.
            max_rows: rows of the graph.
        """
        few = np.full_like(counts, FEW_ROWS)
        long = (counts <= FEW_ROWS) & (keys >= _MANY_KEYS)
        if not self.at_once or not long.any():
            return few
        passes, tiles = -(-keys // _PASS), -(-counts // self.rows)
        prompts, longest = counts > FEW_ROWS, int(passes[long].max())
        alone = self._pieces(np.repeat(passes[prompts], tiles[prompts]))[1]
        together = np.repeat(passes[prompts | long], tiles[prompts | long])
        worth = self._pieces(together)[1] < alone + _SINGLE_COST * longest
        if worth and len(together) <= self.room(max_rows):
            few[long] = 0
        return few

    def shared(self, tiles: Ints) -> Ints:
        """Return tiles `[n, TILE_FIELDS]` in pieces that the card finishes soonest, those with the
        most keys first.
        """
        if not self.at_once:
            whole = tiles.copy()
            whole[:, _PIECE] = 0
            return whole
        begin, end = tiles[:, _KEYS] // _PASS, -(-tiles[:, _KEYS + 1] // _PASS)
        order = np.argsort(begin - end, kind="stable")
        tiles, passes = tiles[order], (end - begin)[order]
        each, _ = self._pieces(passes)
        count = -(-passes // each)
        owner = np.repeat(np.arange(len(tiles)), count)
        own = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        pieces = tiles[owner]
        start = (begin[order][owner] + own * each) * _PASS
        pieces[:, _KEYS] = np.maximum(start, pieces[:, _KEYS])
        pieces[:, _KEYS + 1] = np.minimum(start + each * _PASS, pieces[:, _KEYS + 1])
        first = np.arange(len(owner)) - own
        is_shared = count[owner] > 1
        pieces[:, _PIECE] = np.where(is_shared, (first << 16) + (own << 8) + count[owner], 0)
        return pieces

    def _pieces(self, passes: Ints) -> tuple[int, int]:
        """Return the most passes of a piece with which the last thread block ends soonest, and the
        time until then, in passes.
        """
        longest = int(passes.max(initial=1))
        found, least = longest, self._turns(len(passes)) * (longest + _WHOLE_COST)
        for pieces in range(2, _MOST_PIECES + 1):
            each = -(-longest // pieces)
            count = int((-(-passes // each)).sum())
            cost = self._turns(count) * (each + _PIECE_COST)
            if count <= self.most_shared and cost < least:
                found, least = each, cost
        return found, least

    def _turns(self, tiles: int) -> int:
        """Return how many thread blocks run one after the other."""
        return -(-tiles * self.heads // self.at_once)
