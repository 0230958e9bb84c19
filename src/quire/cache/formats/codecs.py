"""How one vector a token becomes codes, and how attention reads vectors from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from itertools import pairwise

import mlx.core as mx
import numpy as np

from quire.cache.formats.packing import SCALE, Affine, affine, affine_parts, fours_of, pack
from quire.cache.formats.rotation import rotation

_FEW = 8
"""Rows up to which multiplying by codes beats decoding them first (CPU, head_dim 64 to 256)."""

_F16_MAX = 65504.0


def padded(dim: int) -> int:
    """Elements that a coded vector takes: packed words hold 32 codes."""
    return -(-dim // 32) * 32


class Codec(ABC):
    """Codes vectors of `dim` elements. Stateless; attention works in the codec's own coordinates.

    Attributes:
        size: elements of a vector in those coordinates.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.size = padded(dim)

    @abstractmethod
    def parts(self) -> list[tuple[int, mx.Dtype]]:
        """(elements a vector, type) of each array that holds codes."""

    @abstractmethod
    def encode(self, x: mx.array) -> list[mx.array]:
        """`[..., dim]` to arrays `[..., elements]`, one a part."""

    @abstractmethod
    def decode(self, parts: list[mx.array]) -> mx.array:
        """`[..., S, size]`, float32, in the codec's coordinates."""

    @abstractmethod
    def scores(self, q: mx.array, parts: list[mx.array]) -> mx.array:
        """`[..., M, size]` times the coded `[..., S, size]`: `[..., M, S]`."""

    @abstractmethod
    def mix(self, weights: mx.array, parts: list[mx.array]) -> mx.array:
        """`[..., M, S]` times the coded `[..., S, size]`: `[..., M, size]`."""

    def turn(self, x: mx.array) -> mx.array:
        """`[..., dim]` to the codec's coordinates, `[..., size]`."""
        if self.size == self.dim:
            return x
        return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.size - self.dim)])

    def turn_back(self, x: mx.array) -> mx.array:
        """Undoes `turn`."""
        return x if self.size == self.dim else x[..., : self.dim]

    @property
    def vector_bytes(self) -> int:
        """Bytes of one coded vector."""
        return sum(width * dtype.size for width, dtype in self.parts())


class AffineCodec(Codec):
    """A scale and a bias for each group of elements of a vector.

    Args:
        group_size: halved to 32 where 64 does not divide the vector.
        rotate: apply a random rotation first.
        refit: see `packing.affine`.
    """

    def __init__(self, dim: int, bits: int, group_size: int, *, rotate: bool, refit: bool) -> None:
        super().__init__(dim)
        self._layout = Affine(group_size if self.size % group_size == 0 else 32, bits)
        self._rotation = rotation(self.size) if rotate else None
        self._refit = refit

    def parts(self) -> list[tuple[int, mx.Dtype]]:
        return affine_parts(self.size, self._layout)

    def turn(self, x: mx.array) -> mx.array:
        x = super().turn(x)
        return x if self._rotation is None else self._rotation.forward(x)

    def turn_back(self, x: mx.array) -> mx.array:
        return super().turn_back(x if self._rotation is None else self._rotation.back(x))

    def encode(self, x: mx.array) -> list[mx.array]:
        turned = self.turn(x.astype(mx.float32))
        return list(affine(turned, self._layout, refit=self._refit))

    def decode(self, parts: list[mx.array]) -> mx.array:
        return self._layout.decode(parts)

    def scores(self, q: mx.array, parts: list[mx.array]) -> mx.array:
        if q.shape[-2] > _FEW:
            return q @ self.decode(parts).swapaxes(-1, -2)
        return self._layout.product(q, parts, transpose=True)

    def mix(self, weights: mx.array, parts: list[mx.array]) -> mx.array:
        if weights.shape[-2] > _FEW:
            return weights @ self.decode(parts)
        return self._layout.product(weights, parts, transpose=False)


class CodebookCodec(Codec):
    """TurboQuant's MSE variant (arXiv:2504.19874): the norm apart, the direction rotated at random,

    each of its elements rounded to the codebook that is best for a random direction.
    """

    def __init__(self, dim: int, bits: int) -> None:
        super().__init__(dim)
        self.bits = bits
        self._rotation = rotation(self.size)
        self._read = Affine(next(g for g in (128, 64, 32) if self.size % g == 0), 8)
        self._low, self._step, levels = _grid(self.size, bits)
        read = [self._low + self._step * level for level in levels]
        self._edges = mx.array([(a + b) / 2 for a, b in pairwise(read)])

    def parts(self) -> list[tuple[int, mx.Dtype]]:
        return [(self.size * self.bits // 32, mx.uint32), (1, SCALE)]

    def turn(self, x: mx.array) -> mx.array:
        return self._rotation.forward(super().turn(x))

    def turn_back(self, x: mx.array) -> mx.array:
        return super().turn_back(self._rotation.back(x))

    def encode(self, x: mx.array) -> list[mx.array]:
        x = x.astype(mx.float32)
        norm = mx.linalg.norm(x, axis=-1, keepdims=True)
        turned = self.turn(x / mx.maximum(norm, 1e-30))
        codes = (turned[..., None] > self._edges).sum(axis=-1)
        return [pack(codes, self.bits), mx.minimum(norm, _F16_MAX).astype(SCALE)]

    def decode(self, parts: list[mx.array]) -> mx.array:
        return self._read.decode(self._as_bytes(parts))

    def scores(self, q: mx.array, parts: list[mx.array]) -> mx.array:
        if q.shape[-2] > _FEW:
            return q @ self.decode(parts).swapaxes(-1, -2)
        return self._read.product(q, self._as_bytes(parts), transpose=True)

    def mix(self, weights: mx.array, parts: list[mx.array]) -> mx.array:
        if weights.shape[-2] > _FEW:
            return weights @ self.decode(parts)
        return self._read.product(weights, self._as_bytes(parts), transpose=False)

    def _as_bytes(self, parts: list[mx.array]) -> list[mx.array]:
        """The same vectors in affine codes of 8 bits, which libraries multiply by."""
        codes, norms = parts
        words = _fours(self.size, self.bits)[fours_of(codes, self.bits)]
        shape = (*norms.shape[:-1], self.size // self._read.group_size)
        norms = mx.broadcast_to(norms.astype(mx.float32), shape)
        return [words, norms * self._step, norms * self._low]


@cache
def codebook(dim: int, bits: int) -> tuple[float, ...]:
    """The levels with the least mean squared error for one element of a random unit vector.

    The density is proportional to (1 - x^2)^((dim - 3) / 2); Lloyd's iteration on a fine grid.
    """
    x = np.linspace(-1, 1, 200_001)[1:-1]
    density = np.exp((dim - 3) / 2 * np.log1p(-(x**2)))
    mass = np.concatenate([[0.0], np.cumsum(density)])
    moment = np.concatenate([[0.0], np.cumsum(density * x)])
    shares = (np.arange(2**bits) + 0.5) / 2**bits
    levels = np.interp(shares * mass[-1], mass[1:], x)
    for _ in range(500):
        edges = np.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        cuts = np.concatenate([[0], edges, [len(x)]])
        levels = np.diff(moment[cuts]) / np.maximum(np.diff(mass[cuts]), 1e-300)
    return tuple(((levels - levels[::-1]) / 2).astype(np.float32).tolist())


@cache
def _grid(dim: int, bits: int) -> tuple[float, float, tuple[int, ...]]:
    """The codebook on 256 even steps: the lowest level, the step, and each level's number of steps.

    Rounding to a step adds less than 1% to the squared error of 4 bits, and less below.
    """
    levels = codebook(dim, bits)
    step = (levels[-1] - levels[0]) / 255
    return levels[0], step, tuple(round((level - levels[0]) / step) for level in levels)


@cache
def _fours(dim: int, bits: int) -> mx.array:
    """`[2**(4 * bits)]`: four neighbouring codes as the bytes of one word; one look-up reads four.

    Four bytes a row keep the table of 4 bits in the processor's cache.
    """
    codes = np.arange(1 << 4 * bits)[:, None] >> np.arange(4) * bits
    levels = np.array(_grid(dim, bits)[2], dtype=np.uint8)[codes & (1 << bits) - 1]
    return mx.array(np.ascontiguousarray(levels).view(np.uint32)[:, 0])
