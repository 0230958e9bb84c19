"""Decoders that read patches directly (Falcon-OCR and Falcon Perception, arXiv:2603.27365).

There is no encoder: one matrix turns a patch into a row. In the decoder's layers the rows of a
picture see each other, and a second rotation encodes each patch's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from quire.cache.specs import FullKV
from quire.core.media import EVEN_COLOURS, LEARNED_ROWS, PlacedMedia
from quire.models.base import ForwardContext, MediaEncoder, Module
from quire.models.layers.attention import Attention, SelfAttention
from quire.models.layers.common import embed
from quire.models.layers.rope import Rotate
from quire.models.shares import Cuts, Split, rows


@dataclass(frozen=True)
class PatchRotaryAttention(Attention):
    """Attention in which half of a head is rotated by time, and half by a patch's place.

    Each head rotates differently by place, so each query head has its own keys.
    """

    @property
    def spec(self) -> FullKV:
        return FullKV(self.heads, self.head_dim, self.bidirectional_media)

    @property
    def plain_heads(self) -> bool:
        return False

    def module(self, hidden_size: int, layer: int) -> Module:
        return PatchRotarySelfAttention(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        own, cuts = super().share(split)
        return own, {**cuts, "places": rows((self.heads, 1))}


class PatchRotarySelfAttention(SelfAttention):
    """Computes a `PatchRotaryAttention`.

    Parameter: `places`, `[heads, head_dim / 4, 2]`, the angles of each pair per unit of place, down
    and across; equal in all layers.
    """

    def __init__(self, kind: PatchRotaryAttention, hidden_size: int, layer: int) -> None:
        super().__init__(kind, hidden_size, layer)
        self.places = mx.zeros((kind.heads, kind.head_dim // 4, 2))

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotate | None) -> mx.array:
        assert rotate is not None
        return super().__call__(x, step, self._turning(rotate, step.positions))

    def _turning(self, rotate: Rotate, positions: mx.array) -> Rotate:
        """Return `rotate` followed by the rotation by place; its result has one KV head per query
        head.
        """
        heads, half = self._kind.heads, self._kind.head_dim // 2
        if positions.ndim == 1:  # there are no patches
            return lambda x: mx.repeat(rotate(x), heads // x.shape[1], axis=1)
        down, across = (each[:, None, None] for each in places(positions))
        angles = down * self.places[..., 0] + across * self.places[..., 1]
        cos, sin = mx.cos(angles), mx.sin(angles)  # [T, heads, head_dim / 4]

        def turned(x: mx.array) -> mx.array:
            y = mx.repeat(rotate(x), heads // x.shape[1], axis=1)
            first, second = y[..., half::2], y[..., half + 1 :: 2]
            pairs = mx.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
            return mx.concatenate([y[..., :half], pairs.flatten(-2).astype(y.dtype)], axis=-1)

        return turned

    def _values(self, v: mx.array) -> mx.array:
        return mx.repeat(super()._values(v), self._kind.heads // self._kind.kv_heads, axis=1)


def places(positions: mx.array) -> tuple[mx.array, mx.array]:
    """Return the row and column of each patch, `[T]` each; 0 for other rows.

    A picture has the area of a square from -1 to 1, stretched to its aspect ratio.

    Args:
        positions: `[5, T]`, see `positions`.
    """
    line, column, lines, columns = -positions[1:]

    def place(number: mx.array, count: mx.array, other: mx.array) -> mx.array:
        side = mx.sqrt(count / other)
        at = 2 * (number - 1) / mx.maximum(count - 1, 1) - 1
        return mx.where(number > 0, side * at, 0)

    return place(line, lines, columns), place(column, columns, lines)


def positions(length: int, media: Sequence[PlacedMedia]) -> npt.NDArray[np.float32]:
    """Return the positions of a prompt's tokens, `[5, length]`.

    The first axis is time; a picture and the token after it share one moment. The others are a
    patch's line and column, counted from one, and the numbers of lines and columns, all negative;
    for other tokens they repeat the time.
    """
    moments = np.ones(length, np.float32)
    for placed in media:
        moments[placed.start + 1 : placed.end + 1] = 0
    found = np.tile(np.cumsum(moments, dtype=np.float32) - 1, (5, 1))
    for placed in media:
        lines, columns = placed.item.shape
        line, column = np.indices((lines, columns)).reshape(2, -1) + 1
        found[1:, placed.start + LEARNED_ROWS : placed.end] = (
            *(-line, -column),
            *(np.full_like(each, -count) for each, count in ((line, lines), (column, columns))),
        )
    return found


class PatchEncoder(MediaEncoder):
    """Computes the learned rows before a picture, and one row per patch.

    Args:
        table: the decoder's embedding table.
        projector: maps a patch's colours to a row.
        patch: pixels on a patch's side.
        around: token ids of the learned rows.
        dtype: type of the activations.
    """

    def __init__(
        self,
        table: nn.Embedding,
        projector: nn.Linear,
        patch: int,
        around: Sequence[int],
        dtype: mx.Dtype,
    ) -> None:
        super().__init__()
        self._table, self._projector = table, projector
        self._patch_bytes = 3 * patch**2
        self._around = mx.array(tuple(around))
        self._dtype = dtype

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        lines, columns = shape
        return lines * columns * self._patch_bytes

    def rows(self, shape: tuple[int, ...]) -> int:
        lines, columns = shape
        return LEARNED_ROWS + lines * columns

    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        (mean, *_), (std, *_) = EVEN_COLOURS.mean, EVEN_COLOURS.std
        colours = features.reshape(-1, self._patch_bytes).astype(mx.float32)
        rows = self._projector((colours * (1 / (255 * std)) - mean / std).astype(self._dtype))
        return (mx.concatenate([embed(self._table, self._around, self._dtype), rows]),)
