"""How the rows of an item's tiles are packed into the item's rows."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np

from quire.core.errors import RequestError

Shape = tuple[int, ...]


class Packing(Protocol):
    """A way of packing. A tile has `side * side` rows."""

    @property
    def newline(self) -> bool:
        """Whether a learned row ends lines."""
        ...

    @property
    def example_shape(self) -> Shape:
        """The shape of an item of one tile."""
        ...

    def tiles(self, shape: Shape) -> int:
        """Return the number of tiles of an item of this shape; 0 if the shape is invalid."""
        ...

    def rows(self, shape: Shape, side: int) -> int:
        """Return the number of rows of an item of this shape.

        Raises:
            RequestError: the shape is invalid.
        """
        ...

    def __call__(self, tiles: mx.array, shape: Shape, newline: mx.array | None) -> mx.array:
        """Pack `[tiles, side * side, hidden]` to `[rows, hidden]`; `newline` is `[hidden]`."""
        ...


class InOrder:
    """Concatenates the tiles' rows. An item's shape is its number of tiles."""

    newline = False
    example_shape: Shape = (1,)

    def tiles(self, shape: Shape) -> int:
        (tiles,) = shape
        return tiles

    def rows(self, shape: Shape, side: int) -> int:
        return self.tiles(shape) * side**2

    def __call__(self, tiles: mx.array, shape: Shape, newline: mx.array | None) -> mx.array:
        return tiles.flatten(0, 1)


class AnyResolution:
    """Packs a picture seen as one tile and again as a grid of tiles (LLaVA-NeXT; arXiv:2408.03326).

    An item's shape has three pairs of rows and columns: of the grid's tiles; of the grid's patches
    without its padding, which is equal on both sides; and of the patches after shrinking. The
    learned row ends each line. A strip thinner than a patch has lines of only that row. For a
    picture that is a single tile, all numbers are 0.
    """

    newline = True
    example_shape: Shape = 6 * (0,)

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
    """Halves the sides of a video's frames, and appends the learned row.

    An item's shape is its number of frames (LLaVA-OneVision, arXiv:2408.03326).
    """

    newline = True
    example_shape: Shape = (1,)

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
    """Resize `[..., height, width, hidden]` to `[..., rows, columns, hidden]` by linear
    interpolation.

    As in PyTorch without antialiasing, each place mixes two neighbours along each axis.
    """
    height, width = x.shape[-3:-1]
    if (height, width) == (rows, columns):
        return x
    y = _shares(width, columns) @ x.astype(mx.float32)
    y = (_shares(height, rows) @ y.swapaxes(-3, -2)).swapaxes(-3, -2)
    return y.astype(x.dtype)


def _shares(size: int, wanted: int) -> mx.array:
    """Return the weight of each place in each resized one, `[wanted, size]`."""
    at = np.maximum((np.arange(wanted) + 0.5) * size / wanted - 0.5, 0)
    first = at.astype(int)
    shares = np.zeros((wanted, size), np.float32)
    np.add.at(shares, (np.arange(wanted), first), 1 - (at - first))
    np.add.at(shares, (np.arange(wanted), np.minimum(first + 1, size - 1)), at - first)
    return mx.array(shares)
