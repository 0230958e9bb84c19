"""Llama 3.2 Vision's encoder (arXiv:2407.21783, section 7.1; its model card).

A picture is cut into a small grid of tiles. A transformer processes all tiles together, then a
second, gated one does. The decoder attends to the second one's output, concatenated with those of
some layers of the first.

The encoder was trained with the maximal number of tiles, each padded with a few empty rows. The
picture's rows see the rows of missing tiles and the empty rows, so these are computed too; they do
not see each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from quire.core.errors import ModelError, RequestError
from quire.core.media import CLIP_COLOURS, Pieces
from quire.device.device import current_device
from quire.models.base import CutEncoder, Encoding, Module
from quire.models.description import Norm
from quire.models.layers.common import embed
from quire.models.layers.feed_forward import MLP

_MULTIPLE = 8
"""The rows of a tile are padded to a multiple of this."""


@dataclass(frozen=True)
class LlamaVision:
    """Sizes of the encoder.

    Attributes:
        depth, gated_depth: numbers of layers of the two transformers.
        levels: layers of the first transformer whose outputs the decoder also sees.
        output_size: the decoder's width.
        side: patches along each side of a tile.
        patch: pixels along each side of a patch.
        tiles: the most tiles of a picture.
        shapes: grids of tiles that a picture may have, as (rows, columns), in the order of their
            tables.
    """

    depth: int
    gated_depth: int
    levels: tuple[int, ...]
    hidden_size: int
    heads: int
    mlp: MLP
    norm: Norm
    output_size: int
    side: int
    patch: int
    tiles: int
    shapes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ModelError(
                f"config.json: {self.heads} heads of a vision encoder of width {self.hidden_size}"
            )

    @property
    def rows(self) -> int:
        """Rows of a tile: its patches, and one for the whole tile."""
        return self.side**2 + 1

    @property
    def padded(self) -> int:
        """Rows of a tile, including empty ones."""
        return -(-self.rows // _MULTIPLE) * _MULTIPLE

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return 3 * self.patch**2


class SelfAttention(Module):
    """Self-attention in which the picture's rows see all rows, and other rows see only the
    picture's.
    """

    def __init__(self, kind: LlamaVision) -> None:
        super().__init__()
        self._heads, size = kind.heads, kind.hidden_size
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def __call__(self, x: mx.array, real: int) -> mx.array:
        """Attend over `[N, hidden]`, whose first `real` rows are the picture's."""
        shape = 1, x.shape[0], self._heads, x.shape[1] // self._heads
        q, k, v = (each(x).reshape(shape) for each in (self.q_proj, self.k_proj, self.v_proj))
        scale, attend = shape[-1] ** -0.5, current_device().operations.attend_groups
        outs = [attend(q[:, :real], k, v, scale=scale)]
        if real < shape[1]:
            outs.append(attend(q[:, real:], k[:, :real], v[:, :real], scale=scale))
        y: mx.array = self.o_proj(mx.concatenate(outs, axis=1).reshape(x.shape))
        return y


class EncoderLayer(Module):
    """A layer: attention and feed-forward, each after a norm."""

    def __init__(self, kind: LlamaVision, gated: bool) -> None:
        super().__init__()
        self.self_attn = SelfAttention(kind)
        self.mlp = kind.mlp.module(kind.hidden_size)
        self.input_layernorm = kind.norm.module(kind.hidden_size)
        self.post_attention_layernorm = kind.norm.module(kind.hidden_size)
        if gated:
            self.gate_attn = mx.zeros(1)
            self.gate_ffn = mx.zeros(1)

    def __call__(self, x: mx.array, real: int) -> mx.array:
        """`[N, hidden]` -> the same."""
        y = self.self_attn(self.input_layernorm(x), real)
        x = x + (current_device().operations.tanh(self.gate_attn) * y if "gate_attn" in self else y)
        y = self.mlp(self.post_attention_layernorm(x))
        fed: mx.array = (
            current_device().operations.tanh(self.gate_ffn) * y if "gate_ffn" in self else y
        )
        return x + fed


class Transformer(Module):
    """A stack of layers."""

    def __init__(self, kind: LlamaVision, depth: int, gated: bool) -> None:
        super().__init__()
        self.layers = [EncoderLayer(kind, gated) for _ in range(depth)]


class TileEmbedding(Module):
    """Embeddings added to all rows of a tile, by the picture's grid and the tile's place in it."""

    def __init__(self, kind: LlamaVision) -> None:
        super().__init__()
        self._kind = kind
        self.embedding = nn.Embedding(len(kind.shapes) + 1, kind.tiles * kind.hidden_size)
        self.gate = mx.zeros(1)

    def __call__(self, shape: int) -> mx.array:
        """Return the embeddings for a grid: `[tiles, 1, hidden]`."""
        rows = embed(self.embedding, mx.array([shape]), self.gate.dtype)
        return current_device().operations.tanh(self.gate) * rows.reshape(self._kind.tiles, 1, -1)


class PositionEmbedding(Module):
    """Embeddings added to each row, by its place in the tile and in the picture."""

    def __init__(self, kind: LlamaVision) -> None:
        super().__init__()
        self._kind = kind
        self.embedding = mx.zeros((kind.rows, kind.hidden_size))
        values = kind.tiles * kind.rows * kind.hidden_size
        self.tile_embedding = nn.Embedding(len(kind.shapes) + 1, values)
        self.gate = mx.zeros(1)

    def __call__(self, shape: int) -> mx.array:
        """Return the embeddings for a grid: `[tiles, rows, hidden]`."""
        gate = current_device().operations.tanh(self.gate)
        rows = embed(self.tile_embedding, mx.array([shape]), self.gate.dtype)
        placed = gate * rows.reshape(self._kind.tiles, self._kind.rows, -1)
        return (1 - gate) * self.embedding + placed


class VisionTower(Module):
    """The encoder of tiles before the projector, `vision_model.` in checkpoints."""

    def __init__(self, kind: LlamaVision) -> None:
        super().__init__()
        self.kind = kind
        self.patch_embedding = nn.Linear(kind.patch_values, kind.hidden_size, bias=False)
        self.class_embedding = mx.zeros(kind.hidden_size)
        self.gated_positional_embedding = PositionEmbedding(kind)
        self.pre_tile_positional_embedding = TileEmbedding(kind)
        self.post_tile_positional_embedding = TileEmbedding(kind)
        first = Norm(1e-5, centred=True, bias=True)  # whatever that of the layers is
        self.layernorm_pre = first.module(kind.hidden_size)
        self.layernorm_post = first.module(kind.hidden_size)
        self.transformer = Transformer(kind, kind.depth, gated=False)
        self.global_transformer = Transformer(kind, kind.gated_depth, gated=True)

    def encode(self, patches: mx.array, rows: int, columns: int) -> Encoding:
        """Encode uint8 `[tiles, patches, patch_values]` to `[tiles * rows of a tile, hidden *
        levels]`.
        """
        kind = self.kind
        shape = kind.shapes.index((rows, columns)) + 1
        x = self._embedded(patches, shape)
        real, order, tile_of = self._order(len(patches))
        x = x.reshape(-1, kind.hidden_size)[order]
        outputs: list[mx.array] = []
        for index, layer in enumerate(self.transformer.layers):
            x = layer(x, real)
            if index in kind.levels:
                outputs.append(x[:real])
            yield x, *outputs
        x = self.layernorm_post(x)
        x = x + self.post_tile_positional_embedding(shape)[tile_of, 0]
        for layer in self.global_transformer.layers:
            x = layer(x, real)
            yield x, *outputs
        # Published as one array whose last axis goes through the levels first.
        levels = mx.stack(outputs, axis=-1).reshape(real, -1)
        return (mx.concatenate([x[:real], levels], axis=-1),)

    def _embedded(self, patches: mx.array, shape: int) -> mx.array:
        """Return the rows of all tiles, `[tiles, padded, hidden]`. Missing tiles are grey."""
        kind, dtype = self.kind, self.class_embedding.dtype
        mean, std = (mx.array(each) for each in (CLIP_COLOURS.mean, CLIP_COLOURS.std))
        pixels = patches.reshape(-1, 3).astype(mx.float32) * (1 / (255 * std)) - mean / std
        x = self.patch_embedding(pixels.astype(dtype).reshape(patches.shape))
        x = mx.pad(x, [(0, kind.tiles - len(x)), (0, 0), (0, 0)])
        x = x + self.pre_tile_positional_embedding(shape)
        whole = mx.broadcast_to(self.class_embedding, (kind.tiles, 1, kind.hidden_size))
        x = mx.concatenate([whole, x], axis=1) + self.gated_positional_embedding(shape)
        return mx.pad(self.layernorm_pre(x), [(0, 0), (0, kind.padded - kind.rows), (0, 0)])

    def _order(self, tiles: int) -> tuple[int, mx.array, mx.array]:
        """Return the number of the picture's rows, an order of all rows that starts with them, and
        each row's tile.
        """
        kind = self.kind
        tile, row = np.indices((kind.tiles, kind.padded)).reshape(2, -1)
        real = (tile < tiles) & (row < kind.rows)
        order = np.argsort(~real, kind="stable")
        return int(real.sum()), mx.array(order), mx.array(tile[order])


class LlamaPictureEncoder(CutEncoder):
    """The tower and the projector as a `MediaEncoder`. An item's shape is its grid of tiles.

    Each layer is a piece, and so is the projection.
    """

    def __init__(self, vision_model: VisionTower, projector: nn.Linear) -> None:
        super().__init__()
        self.vision_model = vision_model
        self.multi_modal_projector = projector

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 1, 1

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        rows, columns = shape
        kind = self.vision_model.kind
        return rows * columns * kind.side**2 * kind.patch_values

    def rows(self, shape: tuple[int, ...]) -> int:
        if shape not in self.vision_model.kind.shapes:
            rows, columns = shape
            most = self.vision_model.kind.tiles
            raise RequestError(
                f"An image of {rows} rows and {columns} columns of tiles is too large: the model "
                f"takes at most {most} tiles."
            )
        return 1

    def cross_keys(self, shape: tuple[int, ...]) -> int:
        rows, columns = shape
        return rows * columns * self.vision_model.kind.rows

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        kind = self.vision_model.kind
        return Pieces(kind.depth + kind.gated_depth + 1, kind.tiles * kind.padded)

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        rows, columns = shape
        kind = self.vision_model.kind
        patches = features.reshape(rows * columns, kind.side**2, kind.patch_values)
        (x,) = yield from self.vision_model.encode(patches, rows, columns)
        return (self.multi_modal_projector(x),)
