"""The vision encoder of Qwen2-VL (arXiv:2409.12191) and its successors, including GLM-4V's.

It is a transformer over the patches of a picture, or of a few frames of a video at a time. Frames
do not see each other. RoPE rotates half of a head's pairs by a patch's row, the other half by its
column. Squares of patches are merged to rows of the decoder's width. Patches are therefore ordered
by squares, row by row, and row by row within a square.

Most of Qwen2.5-VL's layers (arXiv:2502.13923) see windows of a picture. Qwen3-VL also has a table
of positions, stretched to the picture, and passes the outputs of some layers to the decoder
(DeepStack, arXiv:2406.04334).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelError, RequestError
from quire.core.media import Colours, Pieces
from quire.models.base import CutEncoder, Encoding, MediaEncoder, Module
from quire.models.description import Norm
from quire.models.layers.common import ACTIVATIONS, embed
from quire.models.layers.encoder_attention import Neighbours, Parts, Windows
from quire.models.layers.feed_forward import MLP
from quire.models.layers.rope import Rope, RopeParameters, Rotate, still
from quire.models.vision.place_table import Table

_PATCHES_AT_ONCE = 1024
"""Patches of a video encoded at once: products of fewer rows are slower per row."""

Grid = tuple[int, int, int]
"""Moments, rows and columns of patches."""


class Merging(Protocol):
    """Description of how squares of patches become rows; implementations are frozen dataclasses."""

    def module(self, kind: QwenVision) -> Module:
        """Return the module, which is called with `[N, hidden]`."""
        ...


@dataclass(frozen=True)
class PlainMerging:
    """Merges squares by a norm and two linear layers."""

    def module(self, kind: QwenVision) -> Module:
        return Merger(kind)


@dataclass(frozen=True)
class QwenVision:
    """Description of the encoder.

    Attributes:
        output_size: the decoder's width.
        patch: pixels along each side of a patch.
        frames: number of a video's frames in a patch; a picture is repeated as often.
        merge: patches along each side of a square that becomes one row.
        singles: number of frames of a moment that go through the layers one by one.
        colours: the pixel normalisation.
        merging: how a square becomes a row.
        patch_bias: whether the first projection has a bias.
        patch_norm: whether the first projection's output is normalised.
        planes: whether the colours of a patch are separate planes, instead of the values of each
            pixel.
        kv_heads: number of KV heads; 0 means as many as query heads.
        attention_bias: whether the attention's projections have biases.
        qk_norm: whether queries and keys are normalised per head.
        rotated: whether queries and keys are rotated by row and column.
        theta: base of the rotation.
        taking_turns: whether rows and columns alternate over all speeds, instead of sharing the
            same ones.
        table: table of positions; None for none.
        window: squares along each side of a window; 0 means no windows.
        whole: layers that see whole pictures, if there are windows.
        levels: layers whose outputs are also passed to the decoder.
        times: positions per second of a video; 0 means one per moment.
        between: whether positions of moments may be fractional.
    """

    depth: int
    hidden_size: int
    heads: int
    mlp: MLP
    norm: Norm
    output_size: int
    patch: int
    frames: int
    merge: int
    colours: Colours
    merging: Merging = PlainMerging()
    patch_bias: bool = False
    patch_norm: bool = False
    planes: bool = False
    singles: int = 1
    kv_heads: int = 0
    attention_bias: bool = True
    qk_norm: bool = False
    rotated: bool = True
    theta: float = 1e4
    taking_turns: bool = False
    table: Table | None = None
    window: int = 0
    whole: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    times: int = 0
    between: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.head_dim % 4:
            raise ModelError(
                f"config.json: {self.heads} heads of a vision encoder of width {self.hidden_size}: "
                "a head's size is no multiple of 4"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ModelError(
                f"config.json: {self.heads} heads of a vision encoder cannot share {self.kv_heads} "
                "heads of keys"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def patch_values(self) -> int:
        """Number of values of a patch of one frame."""
        return 3 * self.patch**2

    def places(self, rows: int, columns: int) -> npt.NDArray[np.int64]:
        """Return the row and the column of each patch of a frame, `[2, rows * columns]`."""
        m = self.merge
        squares = np.indices((rows, columns)).reshape(2, rows // m, m, columns // m, m)
        return squares.swapaxes(2, 3).reshape(2, -1)


class PatchEmbed(Module):
    """Embeds patches by projecting their pixels."""

    def __init__(self, kind: QwenVision) -> None:
        super().__init__()
        self._kind = kind
        values = kind.frames * kind.patch_values
        self.proj = nn.Linear(values, kind.hidden_size, bias=kind.patch_bias)
        if kind.patch_norm:
            self.norm = kind.norm.module(kind.hidden_size)

    def __call__(self, patches: mx.array, dtype: mx.Dtype) -> mx.array:
        """Embed uint8 `[N, frames * patch_values]`, ordered by frames: `[N, hidden]`."""
        mean, std = (mx.array(each) for each in (self._kind.colours.mean, self._kind.colours.std))
        colours = patches.reshape(-1, 3).astype(mx.float32) * (1 / (255 * std)) - mean / std
        if self._kind.planes:
            colours = colours.reshape(patches.shape[0], -1, 3).swapaxes(1, 2)
        y: mx.array = self.proj(colours.astype(dtype).reshape(patches.shape))
        return self.norm(y) if self._kind.patch_norm else y


class SelfAttention(Module):
    """Self-attention with a fused projection of queries, keys and values."""

    def __init__(self, kind: QwenVision) -> None:
        super().__init__()
        self._kind = kind
        bias, kv_heads = kind.attention_bias, kind.kv_heads or kind.heads
        self._ends = [kind.heads, kind.heads + kv_heads]
        width = (kind.heads + 2 * kv_heads) * kind.head_dim
        self.qkv = nn.Linear(kind.hidden_size, width, bias=bias)
        self.proj = nn.Linear(kind.hidden_size, kind.hidden_size, bias=bias)
        if kind.qk_norm:
            self.q_norm = kind.norm.module(kind.head_dim)
            self.k_norm = kind.norm.module(kind.head_dim)

    def __call__(self, x: mx.array, rotate: Rotate, seen: Neighbours) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        n, dim = x.shape[0], self._kind.head_dim
        q, k, v = mx.split(self.qkv(x).reshape(n, -1, dim), self._ends, axis=1)
        if self._kind.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = seen.attend(rotate(q), rotate(k), v, scale=dim**-0.5)
        y: mx.array = self.proj(out.reshape(n, -1))
        return y


class Block(Module):
    """A layer: attention, or a family's replacement of it, and feed-forward, each after a norm."""

    def __init__(self, kind: QwenVision, mixer: Module | None = None) -> None:
        super().__init__()
        self.norm1 = kind.norm.module(kind.hidden_size)
        self.attn = SelfAttention(kind) if mixer is None else mixer
        self.norm2 = kind.norm.module(kind.hidden_size)
        self.mlp = kind.mlp.module(kind.hidden_size)

    def __call__(self, x: mx.array, rotate: Rotate, seen: Neighbours) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        x = x + self.attn(self.norm1(x), rotate, seen)
        y: mx.array = x + self.mlp(self.norm2(x))
        return y


class Merger(Module):
    """Merges squares of patches to rows of the decoder's width.

    Args:
        together: whether a square is normalised as a whole, instead of per patch.
    """

    def __init__(self, kind: QwenVision, together: bool = False) -> None:
        super().__init__()
        self._width = kind.hidden_size * kind.merge**2
        self._together = together
        self.norm = kind.norm.module(self._width if together else kind.hidden_size)
        self.linear_fc1 = nn.Linear(self._width, self._width)
        self.linear_fc2 = nn.Linear(self._width, kind.output_size)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N / merge ** 2, output_size]`."""
        if self._together:
            x = self.norm(x.reshape(-1, self._width))
        else:
            x = self.norm(x).reshape(-1, self._width)
        y: mx.array = self.linear_fc2(ACTIVATIONS["gelu"](self.linear_fc1(x)))
        return y


class VisionTower(Module):
    """The encoder of patches, `visual.` in checkpoints."""

    def __init__(self, kind: QwenVision) -> None:
        super().__init__()
        self.kind = kind
        self.patch_embed = PatchEmbed(kind)
        if kind.table is not None:
            self.pos_embed = nn.Embedding(kind.table.side**2, kind.hidden_size)
        self.blocks = [self._block(index) for index in range(kind.depth)]
        self.merger = kind.merging.module(kind)
        if kind.levels:
            self.deepstack_merger_list = [Merger(kind, together=True) for _ in kind.levels]
        axes = "axial_turns" if kind.taking_turns else "axial"
        self._rope = Rope(kind.head_dim, RopeParameters(kind.theta, rope_type=axes))

    def _block(self, index: int) -> Block:
        """Return the layer with this index, without weights."""
        return Block(self.kind)

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        """Encoders, by media kind."""
        return {"image": QwenPictureEncoder(self), "video": QwenVideoEncoder(self)}

    def encode(self, patches: mx.array, grid: Grid) -> Encoding:
        """Encode uint8 `[N, frames * patch_values]`: `[N / merge ** 2, output_size]` per level."""
        kind, (moments, rows, columns) = self.kind, grid
        dtype = self.blocks[0].norm1.weight.dtype  # never quantised
        x = self.patch_embed(patches, dtype)
        places = kind.places(rows, columns)
        if kind.table is not None:
            looked_up = self._looked_up(kind.table, places, rows, columns=columns)
            x = x + mx.tile(looked_up.astype(dtype), (moments, 1))
        rotate = self._rope(mx.tile(mx.array(places), (1, moments))) if kind.rotated else still
        everywhere, nearby = self._neighbours(places, grid)
        deeper: list[mx.array] = []
        for index, block in enumerate(self.blocks):
            x = block(x, rotate, everywhere if index in kind.whole else nearby)
            if index in kind.levels:
                deeper.append(self.deepstack_merger_list[kind.levels.index(index)](x))
            yield x, *deeper
        return self._merged(x, grid), *deeper

    def encode_pictures(self, patches: mx.array, grid: Grid) -> Encoding:
        """Encode pictures of one size, each as a moment: as `encode`."""
        return (yield from self.encode(patches, grid))

    def _merged(self, x: mx.array, grid: Grid) -> mx.array:
        """Merge patches to rows: `[N, hidden]` -> `[rows, output_size]`."""
        y: mx.array = self.merger(x)
        return y

    def _neighbours(
        self, places: npt.NDArray[np.int64], grid: Grid
    ) -> tuple[Neighbours, Neighbours]:
        """Return the groups of patches that see each other: with whole frames, with windows."""
        moments, _, columns = grid
        frame = Parts(moments)
        if not self.kind.window:
            return frame, frame
        side = self.kind.window * self.kind.merge
        across = -(-columns // side)
        window = places[0] // side * across + places[1] // side
        return frame, Windows.of(window, moments)

    def _looked_up(
        self, table: Table, places: npt.NDArray[np.int64], rows: int, columns: int
    ) -> mx.array:
        """Return each patch's position in the stretched table: float32 `[N, hidden]`."""
        total = mx.zeros(())
        for row, down in table.taps(places[0], rows):
            for column, along in table.taps(places[1], columns):
                found = embed(self.pos_embed, mx.array(row * table.side + column), mx.float32)
                total = total + found * mx.array((down * along).astype(np.float32))[:, None]
        return total


class QwenPictureEncoder(CutEncoder):
    """The encoder of pictures. An item's shape is its rows and columns of patches.

    Each layer is a piece, and so is the merging.
    """

    def __init__(self, visual: VisionTower) -> None:
        super().__init__()
        self.visual = visual

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        rows, columns = shape
        return rows * columns * self.visual.kind.patch_values

    def rows(self, shape: tuple[int, ...]) -> int:
        rows, columns = shape
        m = self.visual.kind.merge
        if min(rows, columns) < m or rows % m or columns % m:
            raise RequestError(
                f"An image of {rows} rows and {columns} columns of patches cannot be cut into "
                f"squares of {m} by {m}."
            )
        return rows * columns // m**2

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        rows, columns = shape
        return Pieces(self.visual.kind.depth + 1, rows * columns)

    @property
    def levels(self) -> int:
        return 1 + len(self.visual.kind.levels)

    @property
    def takes_several(self) -> bool:
        return True

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        rows, columns = shape
        patches = features.reshape(-1, self.visual.kind.patch_values)
        items = len(patches) // (rows * columns)  # apart from each other, as moments are
        patches = mx.tile(patches, (1, self.visual.kind.frames))
        return (yield from self.visual.encode_pictures(patches, (items, rows, columns)))


class QwenVideoEncoder(QwenPictureEncoder):
    """The encoder of videos, which takes one at a time.

    An item's shape is its moments, its rows and columns of patches, and the microseconds between
    moments. A moment has as many frames as a patch. Moments are independent, so a piece is one
    layer of a few moments.
    """

    @property
    def takes_several(self) -> bool:
        return False

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 2, 24, 24, 500_000

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        moments, rows, columns, _ = shape
        kind = self.visual.kind
        return moments * kind.singles * kind.frames * super().feature_bytes((rows, columns))

    def rows(self, shape: tuple[int, ...]) -> int:
        moments, rows, columns, _ = shape
        return moments * super().rows((rows, columns))

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        moments, rows, columns, _ = shape
        patches = self.visual.kind.singles * rows * columns
        together = min(moments, _together(patches))
        parts = -(-moments // together)
        return Pieces(parts * (self.visual.kind.depth + 1), together * patches)

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        moments, rows, columns, _ = shape
        singles = self.visual.kind.singles
        patches = features.reshape(moments, singles * rows * columns, -1)
        together = _together(singles * rows * columns)
        made: list[tuple[mx.array, ...]] = []
        for first in range(0, moments, together):
            if made:
                yield made[-1]
            part = patches[first : first + together]
            grid = (singles * len(part), rows, columns)
            made.append((yield from self.visual.encode(part.flatten(0, 1), grid)))
        return tuple(mx.concatenate(list(level)) for level in zip(*made, strict=True))


def _together(patches: int) -> int:
    """Return the number of moments, of this many patches each, that are encoded together."""
    return max(1, _PATCHES_AT_ONCE // patches)
