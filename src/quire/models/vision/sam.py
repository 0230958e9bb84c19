"""Segment Anything's image encoder (arXiv:2304.02643).

Most layers attend within windows, a few over the whole picture, with learned biases by the distance
of two patches. The tables of positions and distances are stretched to pictures of another size.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from quire.core.errors import ModelError
from quire.core.media import Colours
from quire.models.base import Module
from quire.models.description import Norm
from quire.models.layers.convolution import Convolution
from quire.models.layers.feed_forward import MLP
from quire.models.vision.place_table import Table

_SCORE_BYTES = 32 << 20
"""Bytes of attention biases and scores in memory at once."""


@dataclass(frozen=True)
class Sam:
    """Description of the encoder.

    Attributes:
        side: patches along each side of the picture.
        window: patches along each side of a window.
        whole: layers that see the whole picture.
        channels: channels of the neck's output.
    """

    depth: int
    hidden_size: int
    heads: int
    mlp: MLP
    norm: Norm
    side: int
    patch: int
    window: int
    whole: tuple[int, ...]
    channels: int
    colours: Colours
    qkv_bias: bool = True

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.side < 1 or self.window < 1:
            raise ModelError(
                f"config.json: a vision encoder of width {self.hidden_size}, {self.heads} heads, "
                f"{self.side} patches and windows of {self.window} is not possible"
            )

    @property
    def patches(self) -> int:
        """Number of patches of a picture."""
        return self.side**2

    @property
    def tile_bytes(self) -> int:
        """Bytes of a picture's pixels."""
        return self.patches * self.patch**2 * 3

    @property
    def output_size(self) -> int:
        return self.channels

    def module(self) -> Module:
        return SamTower(self)


class Attention(Module):
    """Attention within squares of patches, with biases by distance."""

    def __init__(self, kind: Sam, side: int) -> None:
        super().__init__()
        width = kind.hidden_size
        self._heads, self._side = kind.heads, side
        self.qkv = nn.Linear(width, 3 * width, bias=kind.qkv_bias)
        self.proj = nn.Linear(width, width)
        self.rel_pos_h = mx.zeros((2 * side - 1, width // kind.heads))
        self.rel_pos_w = mx.zeros((2 * side - 1, width // kind.heads))

    def __call__(self, x: mx.array) -> mx.array:
        """Attend over `[squares, side, side, hidden]`."""
        squares, side = x.shape[:2]
        qkv = self.qkv(x).reshape(squares, side * side, 3, self._heads, -1)
        q, k, v = (qkv[:, :, part].swapaxes(1, 2) for part in range(3))
        far_down, far_across = (
            self._apart(each, side) for each in (self.rel_pos_h, self.rel_pos_w)
        )
        lines = max(1, _SCORE_BYTES // (4 * squares * self._heads * side**3))
        outs: list[mx.array] = []
        for first in range(0, side, lines):
            last = min(first + lines, side)
            # Each waits for the one before, so that one's biases are in memory at a time.
            rows = mx.depends([q[:, :, first * side : last * side]], outs[-1:])[0]
            grid = rows.reshape(squares, self._heads, last - first, side, -1)
            down = mx.einsum("bhtsd,tkd->bhtsk", grid, far_down[first:last])
            across = mx.einsum("bhtsd,skd->bhtsk", grid, far_across)
            bias = (down[..., None] + across[..., None, :]).reshape(*rows.shape[:3], side * side)
            scale = rows.shape[-1] ** -0.5
            outs.append(mx.fast.scaled_dot_product_attention(rows, k, v, scale=scale, mask=bias))
        out = mx.concatenate(outs, axis=2).swapaxes(1, 2)
        y: mx.array = self.proj(out.reshape(x.shape))
        return y

    def _apart(self, table: mx.array, side: int) -> mx.array:
        """Return the table's row for each two places of a side, `[side, side, head_dim]`."""
        if side != self._side:
            stretch = mx.array(Table(2 * self._side - 1, ends=False).matrix(2 * side - 1))
            table = (stretch @ table.astype(mx.float32)).astype(table.dtype)
        places = np.arange(side)
        return table[mx.array(places[:, None] - places[None, :] + side - 1)]


class SamLayer(Module):
    """A layer: attention and feed-forward, each after a norm.

    Args:
        window: patches along each side of a window; 0 means the whole picture.
    """

    def __init__(self, kind: Sam, window: int) -> None:
        super().__init__()
        self._window = window
        self.layer_norm1 = kind.norm.module(kind.hidden_size)
        self.attn = Attention(kind, window or kind.side)
        self.layer_norm2 = kind.norm.module(kind.hidden_size)
        self.mlp = kind.mlp.module(kind.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        """`[pictures, side, side, hidden]` -> the same."""
        y = self.layer_norm1(x)
        x = x + (self._in_windows(y) if self._window else self.attn(y))
        fed: mx.array = self.mlp(self.layer_norm2(x))
        return x + fed

    def _in_windows(self, x: mx.array) -> mx.array:
        """Attend within windows. Windows at the picture's edge are padded with zeros, which are
        seen.
        """
        pictures, side, _, hidden = x.shape
        size = self._window
        count = -(-side // size)
        more = count * size - side
        padded = mx.pad(x, [(0, 0), (0, more), (0, more), (0, 0)])
        squares = padded.reshape(pictures, count, size, count, size, hidden).swapaxes(2, 3)
        y = self.attn(squares.reshape(-1, size, size, hidden))
        whole = y.reshape(pictures, count, count, size, size, hidden).swapaxes(2, 3)
        return whole.reshape(pictures, count * size, count * size, hidden)[:, :side, :side]


class Neck(Module):
    """Reduces hidden states to fewer channels, by convolutions over neighbouring patches."""

    def __init__(self, kind: Sam) -> None:
        super().__init__()
        norm = Norm(1e-6, centred=True, bias=True)
        self.conv1 = Convolution(kind.hidden_size, kind.channels, 1)
        self.layer_norm1 = norm.module(kind.channels)
        self.conv2 = Convolution(kind.channels, kind.channels, 3)
        self.layer_norm2 = norm.module(kind.channels)

    def __call__(self, x: mx.array) -> mx.array:
        """`[pictures, side, side, hidden]` -> `[pictures, side, side, channels]`."""
        y: mx.array = self.layer_norm2(self.conv2(self.layer_norm1(self.conv1(x))))
        return y


class SamTower(Module):
    """The encoder of patches to a map of channels."""

    def __init__(self, kind: Sam) -> None:
        super().__init__()
        self.kind = kind
        self.patch_embed = nn.Linear(3 * kind.patch**2, kind.hidden_size)
        self.pos_embed = mx.zeros((1, kind.side, kind.side, kind.hidden_size))
        self.layers = [
            SamLayer(kind, 0 if index in kind.whole else kind.window) for index in range(kind.depth)
        ]
        self.neck = Neck(kind)

    def encode(
        self, pixels: mx.array
    ) -> Generator[tuple[mx.array, ...], None, tuple[mx.array, mx.array]]:
        """Encode square pictures of one size, each apart. Each layer is a piece.

        Args:
            pixels: uint8 `[pictures, side * side, patch * patch * 3]`.

        Returns:
            The neck's map `[pictures, side, side, channels]`, and the output of the first layer
                that sees the whole picture, `[pictures, side, side, hidden]`.
        """
        kind, dtype = self.kind, self.pos_embed.dtype
        mean, std = (mx.array(each) for each in (kind.colours.mean, kind.colours.std))
        colours = pixels.reshape(-1, 3).astype(mx.float32) * (1 / (255 * std)) - mean / std
        x = self.patch_embed(colours.astype(dtype).reshape(pixels.shape))
        pictures, side = len(pixels), math.isqrt(pixels.shape[1])
        x = x.reshape(pictures, side, side, -1) + self._places(side)
        first: tuple[mx.array, ...] = ()
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == min(kind.whole):
                first = (x,)
            yield x, *first
        return self.neck(x), first[0]

    def _places(self, side: int) -> mx.array:
        """Return the table of positions for a picture of `side` patches on each side."""
        table, known = self.pos_embed, self.kind.side
        if side == known:
            return table
        stretch = mx.array(Table(known, cubic=True, ends=False, averaged=True).matrix(side))
        wide = mx.einsum("ai,bj,nijc->nabc", stretch, stretch, table.astype(mx.float32))
        return wide.astype(table.dtype)
