"""How the rows of an item's tiles become the item's rows."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np

from quire.core.errors import RequestError

Shape = tuple[int, ...]


class Packing(Protocol):
    """One way. `side * side` are the rows of a tile."""

    @property
    def newline(self) -> bool:
        """Whether there is a learned row that ends lines."""
        ...

    def tiles(self, shape: Shape) -> int:
        """Tiles of an item of this shape; 0 if no item has such a shape."""
        ...

    def rows(self, shape: Shape, side: int) -> int:
        """Return the rows of an item of this shape.

        Raises:
            RequestError: no item has such a shape.
        """
        ...

    def __call__(self, tiles: mx.array, shape: Shape, newline: mx.array | None) -> mx.array:
        """`[tiles, side * side, hidden]` -> `[rows, hidden]`. `newline` is `[hidden]`."""
        ...


class InOrder:
    """All rows of a tile after those of the one before. An item's shape is its number of tiles."""

    newline = False

    def tiles(self, shape: Shape) -> int:
        (tiles,) = shape
        return tiles

    def rows(self, shape: Shape, side: int) -> int:
        return self.tiles(shape) * side**2

    def __call__(self, tiles: mx.array, shape: Shape, newline: mx.array | None) -> mx.array:
        return tiles.flatten(0, 1)


class AnyResolution:
    """A picture as one tile, and again in a grid of them (LLaVA-NeXT; arXiv:2408.03326).

    An item's shape is rows and columns of the grid's tiles; the grid's rows and columns of patches
    that are no padding, which is as wide on both sides; and those that these are shrunk to. A line
    of them ends with the learned row. A strip thinner than a patch has lines of nothing else. All
    are 0 for a picture as one tile alone.
    """

    newline = True

    def tiles(self, shape: Shape) -> int:
        down, across, *_ = shape
        return 1 + down * across

    def rows(self, shape: Shape, side: int) -> int:
        down, across, rows, columns, lines, line = shape
        if not any(shape):
            return side**2 + 1
        for tiles, seen, kept in ((down, rows, lines), (across, columns, line)):
            if not 0 <= kept <= seen <= tiles * side or (tiles * side - seen) % 2:
                raise RequestError(
                    f"An image of {tiles} tiles of {side} patches cannot have {seen} patches, or "
                    f"{kept} of them."
                )
        return side**2 + lines * (line + 1)

    def __call__(self, tiles: mx.array, shape: Shape, newline: mx.array | None) -> mx.array:
        assert newline is not None
        down, across, rows, columns, lines, line = shape
        end = newline.astype(tiles.dtype)
        _, patches, hidden = tiles.shape
        if not any(shape):
            return mx.concatenate([tiles[0], end[None]])
        side = int(patches**0.5)
        grid = tiles[1:].reshape(down, across, side, side, hidden).swapaxes(1, 2)
        top, left = (down * side - rows) // 2, (across * side - columns) // 2
        seen = grid.reshape(down * side, across * side, hidden)[top : top + rows]
        seen = shrunk(seen[:, left : left + columns], lines, line)
        ends = mx.broadcast_to(end, (lines, 1, hidden))
        grid = mx.concatenate([seen, ends], axis=1).reshape(lines * (line + 1), hidden)
        return mx.concatenate([tiles[0], grid])


class HalvedFrames:
    """Frames of a video, each of half as many rows along its sides, and the learned row.

    An item's shape is its number of frames (LLaVA-OneVision, arXiv:2408.03326).
    """

    newline = True

    def tiles(self, shape: Shape) -> int:
        (frames,) = shape
        return frames

    def rows(self, shape: Shape, side: int) -> int:
        half = -(-side // 2)
        return self.tiles(shape) * half**2 + 1

    def __call__(self, tiles: mx.array, shape: Shape, newline: mx.array | None) -> mx.array:
        assert newline is not None
        frames, patches, hidden = tiles.shape
        side = int(patches**0.5)
        half = -(-side // 2)
        seen = shrunk(tiles.reshape(frames, side, side, hidden), half, half)
        return mx.concatenate([seen.reshape(-1, hidden), newline.astype(seen.dtype)[None]])


def shrunk(x: mx.array, rows: int, columns: int) -> mx.array:
    """`[..., height, width, hidden]` -> `[..., rows, columns, hidden]`, linearly, from the middles.

    As PyTorch does it without antialiasing: each place is a mixture of two neighbours a side.
    """
    height, width = x.shape[-3:-1]
    if (height, width) == (rows, columns):
        return x
    y = _shares(width, columns) @ x.astype(mx.float32)
    y = (_shares(height, rows) @ y.swapaxes(-3, -2)).swapaxes(-3, -2)
    return y.astype(x.dtype)


def _shares(size: int, wanted: int) -> mx.array:
    """`[wanted, size]`: the share of each place in each wanted one."""
    at = np.maximum((np.arange(wanted) + 0.5) * size / wanted - 0.5, 0)
    first = at.astype(int)
    shares = np.zeros((wanted, size), np.float32)
    np.add.at(shares, (np.arange(wanted), first), 1 - (at - first))
    np.add.at(shares, (np.arange(wanted), np.minimum(first + 1, size - 1)), at - first)
    return mx.array(shares)
