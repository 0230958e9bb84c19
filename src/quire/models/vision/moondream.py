"""Layers specific to Moondream 3: a learned temperature, and pictures encoded whole and in tiles.

Sources: the code in the publisher's checkpoints, and Moondream 2's code for pictures
(github.com/vikhyat/moondream).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from quire.device.collectives import summed
from quire.device.device import current_device
from quire.device.ranks import Part
from quire.models.base import Encoding, ForwardContext, Module
from quire.models.layers.attention import Attention, SelfAttention
from quire.models.layers.common import ACTIVATIONS, embed
from quire.models.shares import Cuts, Split, inputs, rows
from quire.models.vision.packing import Shape
from quire.models.vision.projectors import LayersProjector
from quire.models.vision.tiles import TiledVision
from quire.models.vision.vit import VisionTransformer


@dataclass(frozen=True)
class TauAttention(Attention):
    """Attention whose queries and values are scaled by their content and position.

    It has as many KV heads as query heads.
    """

    @property
    def plain_heads(self) -> bool:
        return False

    def module(self, hidden_size: int, layer: int) -> Module:
        return TauSelfAttention(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        own, cuts = super().share(split)
        heads, kv_heads = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        seen = inputs(heads, kv_heads, kv_heads)
        tau = {"tau.wq": seen, "tau.wv": seen, "tau.alpha": rows((self.heads, 1))}
        return own, {**cuts, **tau}


class Tau(Module):
    """Computes the factors of queries and values, one per head.

    Parameters: `wq` and `wv`, `[all heads, width]`, and `alpha`, `[heads]`.

    Args:
        heads, width: those of a rank.
    """

    def __init__(self, heads: int, width: int, part: Part) -> None:
        super().__init__()
        every = heads * part.size
        self.wq, self.wv = mx.zeros((every, width)), mx.zeros((every, width))
        self.alpha = mx.zeros((heads,))
        self._part, self._own = part, slice(part.rank * heads, (part.rank + 1) * heads)

    def __call__(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Map joined queries, keys and values `[T, width]` to the factors of queries and of values,
        `[T, heads]` each.
        """
        slope = self.alpha * mx.log1p(positions.astype(mx.float32))[:, None]
        by_place = (0.5 + mx.sigmoid(slope)).astype(x.dtype)
        y = ACTIVATIONS["gelu"](x)
        return self._factor(y @ self.wq.T, by_place), self._factor(y @ self.wv.T, by_place)

    def _factor(self, products: mx.array, by_place: mx.array) -> mx.array:
        # A head's factors depend on all heads.
        return (
            current_device().operations.tanh(summed(products, self._part)[:, self._own]) + by_place
        )


class TauSelfAttention(SelfAttention):
    """Computes a `TauAttention`."""

    def __init__(self, kind: TauAttention, hidden_size: int, layer: int) -> None:
        super().__init__(kind, hidden_size, layer)
        width = (kind.heads + 2 * kind.kv_heads) * kind.head_dim
        self.tau = Tau(kind.heads, width, kind.part)

    def _projected(self, x: mx.array, step: ForwardContext) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = super()._projected(x, step)
        of_queries, of_values = self.tau(mx.concatenate([q, k, v], axis=-1), step.positions)

        def scaled(y: mx.array, factor: mx.array) -> mx.array:
            return (y.reshape(*factor.shape, -1) * factor[..., None]).reshape(y.shape)

        return scaled(q, of_queries), k, scaled(v, of_values)


class MoondreamVision(TiledVision):
    """A vision transformer, and a projector over the rows of a picture seen whole and in parts.

    Args:
        inner: width between the projector's layers.
        width: the decoder's width.
    """

    def __init__(self, kind: VisionTransformer, inner: int, width: int) -> None:
        projector = LayersProjector("gelu_pytorch_tanh", width=inner)
        super().__init__(kind, projector, width, newline=False)
        self.multi_modal_projector = projector.module(2 * kind.output_size, width)

    def encode(self, pixels: mx.array) -> Encoding:
        """Encode without projection: `[tiles, patches, hidden]`."""
        rows: tuple[mx.array, ...] = yield from self.vision_tower.encode(pixels)
        return rows


class OverlappingTiles:
    """Packs a picture seen as one tile and again as a grid of overlapping tiles, pooled to one
    tile's size.

    An item's shape is the grid's rows and columns. Its first row is the token that starts a text;
    the picture's rows and this one see each other.

    Args:
        margin: patches on each side of a tile that its neighbour shares.
        table: the decoder's embedding table.
        first: id of the token that starts a text.
    """

    newline = False
    example_shape: Shape = (1, 1)

    def __init__(
        self, visual: MoondreamVision, margin: int, table: nn.Embedding, first: int
    ) -> None:
        self._visual, self._margin = visual, margin
        self._table, self._first = table, first

    def tiles(self, shape: Shape) -> int:
        down, across = shape
        return 1 + down * across if min(shape) > 0 else 0

    def rows(self, shape: Shape, side: int) -> int:
        return 1 + side**2

    def __call__(self, tiles: mx.array, shape: Shape, newline: mx.array | None) -> mx.array:
        (down, across), side = shape, self._visual.side
        whole = tiles[0].reshape(side, side, -1)
        grid = tiles[1:].reshape(down, across, side, side, -1).swapaxes(1, 2)
        rows, columns = (pooling_matrix(count, side, self._margin) for count in shape)
        grid = grid.reshape(down * side, across * side, -1).astype(mx.float32)
        parts = mx.einsum("ai,bj,ijc->abc", rows, columns, grid).astype(whole.dtype)
        both = mx.concatenate([whole, parts], axis=-1)[None]
        (made,) = self._visual.multi_modal_projector(both)
        return mx.concatenate([embed(self._table, mx.array([self._first]), made.dtype), made])


def pooling_matrix(tiles: int, side: int, margin: int) -> mx.array:
    """Return the weights that pool a line of overlapping tiles to one tile, `[side, tiles * side]`.

    Where two tiles overlap, each contributes the half nearer to its middle. A pooled patch is the
    mean of all patches that it touches, as in PyTorch's adaptive pooling.
    """
    kept = np.arange(tiles * side).reshape(tiles, side)
    ends = [0] + [margin] * (tiles - 1), [margin] * (tiles - 1) + [0]
    line = np.concatenate([row[a : side - b] for row, a, b in zip(kept, *ends, strict=True)])
    shares = np.zeros((side, tiles * side), np.float32)
    for place in range(side):
        first, last = place * len(line) // side, -(-(place + 1) * len(line) // side)
        shares[place, line[first:last]] = 1 / (last - first)
    return mx.array(shares)
