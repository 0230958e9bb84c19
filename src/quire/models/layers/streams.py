"""Hyper-connections: several residual streams, read and written by learned weights
(arXiv:2409.19606). Each stream passes a block unchanged, as in Hunyuan 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Module
from quire.models.layers.norm import UnweightedNorm


@dataclass(frozen=True)
class Streams:
    """Description of residual streams, which rows hold side by side: `[T, streams * hidden]`.

    Attributes:
        streams: number of streams.
        magnitude: the largest weight with which a block's output is added to a stream.
        eps: added to all weights.
        norm_eps: epsilon of the norm of a row, over all its streams.
    """

    streams: int
    magnitude: float
    eps: float
    norm_eps: float

    def count(self, layers: int) -> int:
        """Return the number of streams, which is the same behind any layer."""
        return self.streams

    def head(self, hidden_size: int) -> StreamHead:
        """Return the module that sums the streams behind the last layer."""
        return StreamHead(self, hidden_size)


class StreamWeights(Module):
    """Computes sigmoids from all streams of a row.

    Parameters: the matrix `mixing`, `[outputs, streams * hidden]`, and `scale` and `base`,
    `[outputs]` each.
    """

    def __init__(self, kind: Streams, hidden_size: int, outputs: int) -> None:
        super().__init__()
        self._kind = kind
        self._norm = UnweightedNorm(kind.norm_eps)
        self.mixing = nn.Linear(kind.streams * hidden_size, outputs, bias=False)
        self.scale, self.base = mx.ones(outputs), mx.zeros(outputs)

    def _sigmoids(self, x: mx.array) -> mx.array:
        """Return float32 `[T, outputs]`."""
        mixed = self.mixing(self._norm(x)).astype(mx.float32)
        return mx.sigmoid(mixed * self.scale + self.base)


def weighted_sum(x: mx.array, weights: mx.array) -> mx.array:
    """Return the sum of the parts of rows, `[T, parts * hidden]`, by weights `[T, parts]`."""
    first, *others = mx.split(x, weights.shape[-1], axis=-1)
    y = first * weights[:, :1]
    for number, part in enumerate(others, start=1):
        y = y + part * weights[:, number : number + 1]
    return y.astype(x.dtype)


class StreamHead(StreamWeights):
    """Sums the streams behind the last layer."""

    def __init__(self, kind: Streams, hidden_size: int) -> None:
        super().__init__(kind, hidden_size, outputs=kind.streams)

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, streams * hidden]` -> `[T, hidden]`."""
        return weighted_sum(x, self._sigmoids(x) + self._kind.eps)


class HyperConnection(StreamWeights):
    """Sums the streams for a block, and adds its output to each."""

    def __init__(self, kind: Streams, hidden_size: int) -> None:
        super().__init__(kind, hidden_size, outputs=2 * kind.streams)

    def read(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the block's input `[T, hidden]`, and the weights of its output `[T, streams]`."""
        kind = self._kind
        reading, writing = mx.split(self._sigmoids(x), 2, axis=-1)
        return weighted_sum(x, reading + kind.eps), writing * kind.magnitude + kind.eps

    def written(self, x: mx.array, y: mx.array, weights: mx.array) -> mx.array:
        """Return the streams `x` with a block's output `y` added: `[T, streams * hidden]`."""
        streams = mx.split(x, self._kind.streams, axis=-1)
        added = (
            stream + y * weights[:, number : number + 1] for number, stream in enumerate(streams)
        )
        return mx.concatenate([each.astype(x.dtype) for each in added], axis=-1)
