"""The vision encoders of DeepSeek-OCR (arXiv:2510.18234) and DeepSeek-OCR 2 (arXiv:2601.20552).

SAM's encoder and two convolutions turn a view of a picture into a small map, which a second
transformer reads: CLIP's, or one whose learned queries see the map. A picture is its tiles, if it
is large, and the whole of it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from quire.core.errors import RequestError
from quire.core.media import Pieces
from quire.models.base import CutEncoder, Encoding, Module
from quire.models.description import Norm
from quire.models.layers.common import embed
from quire.models.layers.convolution import Convolution
from quire.models.layers.encoder_attention import Parts
from quire.models.layers.feed_forward import MLP
from quire.models.layers.rope import Rope, RopeParameters, Rotate
from quire.models.vision.place_table import Table
from quire.models.vision.sam import Sam, SamTower
from quire.models.vision.vit import EncoderLayer, VisionTransformer

_NARROWING = 4
"""Patches of SAM along each side of a cell of the map."""


class Reader(Protocol):
    """Description of the second transformer; implementations are frozen dataclasses."""

    @property
    def depth(self) -> int:
        """Number of layers."""
        ...

    @property
    def width(self) -> int:
        """Width of the module's rows."""
        ...

    def module(self, kind: OcrVision) -> Module:
        """Return the module. Its `encode` yields after each layer, and turns maps
        `[views, side, side, channels]` into rows `[views, side * side, width]`.
        """
        ...


@dataclass(frozen=True)
class OcrVision:
    """Description of the encoder.

    Attributes:
        channels: channels of the two convolutions' outputs.
        tile: patches of SAM along each side of a tile.
        lines: whether a learned row ends each line, and tiles are joined to one picture; else the
            rows of tiles follow one another.
        output_size: the decoder's width.
    """

    sam: Sam
    channels: tuple[int, int]
    reader: Reader
    tile: int
    lines: bool
    output_size: int

    @property
    def tile_side(self) -> int:
        """Cells along each side of a tile's map."""
        return -(-self.tile // _NARROWING)

    @property
    def whole_side(self) -> int:
        """Cells along each side of the map of a whole picture."""
        return -(-self.sam.side // _NARROWING)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile's pixels."""
        return (self.tile * self.sam.patch) ** 2 * 3


@dataclass(frozen=True)
class ClipReader:
    """CLIP's transformer over the map instead of patches. Its rows are followed by the map's.

    Attributes:
        clip: the transformer, whose table of positions is stretched to the map.
    """

    clip: VisionTransformer

    @property
    def depth(self) -> int:
        return self.clip.depth

    @property
    def width(self) -> int:
        return 2 * self.clip.hidden_size

    def module(self, kind: OcrVision) -> Module:
        return ClipOverMap(self.clip)


class ClipOverMap(Module):
    """Computes a `ClipReader`."""

    def __init__(self, kind: VisionTransformer) -> None:
        super().__init__()
        self._kind = kind
        self.class_embedding = mx.zeros((kind.hidden_size,))
        self.position_embedding = nn.Embedding(1 + kind.patches, kind.hidden_size)
        self.first_norm = kind.norm.module(kind.hidden_size)
        self.layers = [EncoderLayer(kind) for _ in range(kind.depth)]

    def encode(self, maps: mx.array) -> Encoding:
        """Turn maps `[views, side, side, channels]` into rows; yields after each layer."""
        views, side, _, width = maps.shape
        cells = maps.reshape(views, side * side, width)
        first = mx.broadcast_to(self.class_embedding.astype(maps.dtype), (views, 1, width))
        x = mx.concatenate([first, cells], axis=1) + self._places(side).astype(maps.dtype)
        x = self.first_norm(x).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, Parts(views))
            yield x, cells
        rows = x.reshape(views, -1, width)[:, 1:]
        return (mx.concatenate([rows, cells], axis=-1),)

    def _places(self, side: int) -> mx.array:
        """Return the positions of the class row and the map's cells, `[1 + side * side, width]`."""
        known = self._kind.side
        table = embed(self.position_embedding, mx.arange(1 + known**2), mx.float32)
        if side == known:
            return table
        first, rest = mx.split(table, [1])
        stretch = mx.array(Table(known, cubic=True, ends=False, averaged=True).matrix(side))
        rest = mx.einsum("ai,bj,ijc->abc", stretch, stretch, rest.reshape(known, known, -1))
        return mx.concatenate([first, rest.flatten(0, 1)])


@dataclass(frozen=True)
class QueryReader:
    """A decoder's layers over the map and as many learned queries, whose rows are the result.

    Cells see each other, a query sees all cells and the queries up to itself.
    """

    depth: int
    width: int
    heads: int
    kv_heads: int
    mlp: MLP
    norm: Norm
    rope: RopeParameters

    def module(self, kind: OcrVision) -> Module:
        return Queries(self, kind)


class QueryAttention(Module):
    """Attention of cells and queries."""

    def __init__(self, kind: QueryReader) -> None:
        super().__init__()
        self._head_dim = kind.width // kind.heads
        kv_width = kind.kv_heads * self._head_dim
        self.q_proj = nn.Linear(kind.width, kind.width)
        self.k_proj = nn.Linear(kind.width, kv_width)
        self.v_proj = nn.Linear(kind.width, kv_width)
        self.o_proj = nn.Linear(kind.width, kind.width, bias=False)

    def __call__(self, x: mx.array, rotate: Rotate, visible: mx.array) -> mx.array:
        """Attend over `[views * rows, width]`, with `visible` `[rows, rows]`."""
        q, k, v = (
            project(x).reshape(len(x), -1, self._head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (
            each.reshape(-1, len(visible), *each.shape[1:]).swapaxes(1, 2)
            for each in (rotate(q), rotate(k), v)
        )
        scale = self._head_dim**-0.5
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=visible)
        y: mx.array = self.o_proj(out.swapaxes(1, 2).reshape(x.shape))
        return y


class QueryLayer(Module):
    """A layer: attention and feed-forward, each after a norm."""

    def __init__(self, kind: QueryReader) -> None:
        super().__init__()
        self.input_layernorm = kind.norm.module(kind.width)
        self.self_attn = QueryAttention(kind)
        self.post_attention_layernorm = kind.norm.module(kind.width)
        self.mlp = kind.mlp.module(kind.width)

    def __call__(self, x: mx.array, rotate: Rotate, visible: mx.array) -> mx.array:
        """`[views * rows, width]` -> the same."""
        x = x + self.self_attn(self.input_layernorm(x), rotate, visible)
        y: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Queries(Module):
    """Computes a `QueryReader`."""

    def __init__(self, kind: QueryReader, whole: OcrVision) -> None:
        super().__init__()
        self._kind = kind
        self.tile_queries = nn.Embedding(whole.tile_side**2, kind.width)
        self.whole_queries = nn.Embedding(whole.whole_side**2, kind.width)
        self.layers = [QueryLayer(kind) for _ in range(kind.depth)]
        self.norm = kind.norm.module(kind.width)
        self._rope = Rope(kind.width // kind.heads, kind.rope)

    def encode(self, maps: mx.array) -> Encoding:
        """Turn maps `[views, side, side, channels]` into rows; yields after each layer."""
        views, side, _, width = maps.shape
        cells = side * side
        tiles = len(self.tile_queries.weight) == cells
        table = self.tile_queries if tiles else self.whole_queries
        queries = embed(table, mx.arange(cells), maps.dtype)
        queries = mx.broadcast_to(queries, (views, cells, width))
        x = mx.concatenate([maps.reshape(views, cells, width), queries], axis=1).flatten(0, 1)
        rotate = self._rope(mx.tile(mx.arange(2 * cells), (views,)))
        places = np.arange(2 * cells)
        visible = mx.array(places[None, :] <= np.maximum(places, cells - 1)[:, None])
        for layer in self.layers:
            x = layer(x, rotate, visible)
            yield (x,)
        return (self.norm(x.reshape(views, 2 * cells, width)[:, cells:]),)


class OcrTower(Module):
    """Both transformers and the layers between and behind them."""

    def __init__(self, kind: OcrVision) -> None:
        super().__init__()
        self.kind = kind
        first, second = kind.channels
        self.sam = SamTower(kind.sam)
        self.conv1 = Convolution(kind.sam.channels, first, 3, stride=2, padding=1)
        self.conv2 = Convolution(first, second, 3, stride=2, padding=1)
        self.reader = kind.reader.module(kind)
        self.projector = nn.Linear(kind.reader.width, kind.output_size)
        self.view_separator = mx.zeros((kind.output_size,))
        if kind.lines:
            self.image_newline = mx.zeros((kind.output_size,))

    def encode(self, pixels: mx.array) -> Generator[tuple[mx.array, ...], None, mx.array]:
        """Encode views uint8 `[views, patches, patch * patch * 3]` to `[views, cells, width]`."""
        last, _ = yield from self.sam.encode(pixels)
        (rows,) = yield from self.reader.encode(self.conv2(self.conv1(last)))
        y: mx.array = self.projector(rows)
        return y

    def joined(self, views: mx.array, down: int, across: int) -> mx.array:
        """Return the rows of `down * across` tiles' cells `[tiles, cells, width]`."""
        width = views.shape[-1]
        if not self.kind.lines:
            return views.reshape(-1, width)
        side = round(views.shape[1] ** 0.5)
        grid = views.reshape(down, across, side, side, width).swapaxes(1, 2)
        lines = grid.reshape(down * side, across * side, width)
        ends = mx.broadcast_to(self.image_newline.astype(views.dtype), (len(lines), 1, width))
        return mx.concatenate([lines, ends], axis=1).flatten(0, 1)


class OcrEncoder(CutEncoder):
    """The encoder of pictures. An item's shape is its rows and columns of tiles, both 0 for none.

    The pixels of tiles come before those of the whole picture. Views are independent, so a piece is
    one layer of a few views.
    """

    example_shape: tuple[int, ...] = (0, 0)

    def __init__(self, visual: OcrTower) -> None:
        super().__init__()
        self.visual = visual

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        down, across = shape
        kind = self.visual.kind
        return down * across * kind.tile_bytes + kind.sam.tile_bytes

    def rows(self, shape: tuple[int, ...]) -> int:
        if len(shape) != 2 or (shape != (0, 0) and min(shape) < 1):
            raise RequestError(f"An image of shape {shape} has no grid of tiles.")
        kind = self.visual.kind
        down, across = (tiles * kind.tile_side for tiles in shape)
        ends = int(kind.lines)
        return down * (across + ends) + kind.whole_side * (kind.whole_side + ends) + 1

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        kind = self.visual.kind
        groups = 1 + -(-shape[0] * shape[1] // self._together)
        return Pieces(groups * (kind.sam.depth + kind.reader.depth + 1), kind.sam.side**2)

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        visual, (down, across) = self.visual, shape
        kind = visual.kind
        tiles, whole = mx.split(features, [down * across * kind.tile_bytes])
        tiles = tiles.reshape(down * across, kind.tile**2, 3 * kind.sam.patch**2)
        made: list[mx.array] = []
        for first in range(0, down * across, self._together):
            made.append((yield from visual.encode(tiles[first : first + self._together])))
            yield (made[-1],)
        seen = yield from visual.encode(whole.reshape(1, kind.sam.side**2, -1))
        parts = [visual.joined(mx.concatenate(made), down, across)] if made else []
        separator = visual.view_separator.astype(seen.dtype)[None]
        return (mx.concatenate([*parts, visual.joined(seen, 1, 1), separator]),)

    @property
    def _together(self) -> int:
        """Number of tiles that are encoded together: with about as many patches as the whole."""
        kind = self.visual.kind
        return max(1, kind.sam.side**2 // kind.tile**2)
