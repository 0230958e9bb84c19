"""The lightning indexer, which selects keys for attention (DeepSeek V3.2, arXiv:2512.02556).

The published code also applies a Hadamard transform to queries and keys and rounds them to FP8.
Only the rounding affects scores, and both are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import ForwardContext, Module
from quire.models.layers.norm import LayerNorm
from quire.models.layers.rope import Rotate


@dataclass(frozen=True)
class Indexer:
    """Description of an indexer: it scores its own keys, one per token, by queries of several
    heads.

    Attributes:
        dim: size of a query and of a key, of which `rotated_dim` elements are rotated.
        halves: whether a rotated pair consists of an element of the first half and one of the
            second, although the rotation takes neighbours.
        limit: number of keys selected for each query.
        last: whether the last elements are rotated, instead of the first.
        eps: epsilon of the keys' norm.
    """

    heads: int
    dim: int
    rotated_dim: int
    halves: bool
    limit: int
    last: bool = False
    eps: float = 1e-6


class KeyIndexer(Module):
    """Computes an `Indexer`.

    Args:
        layer: index of the layer's state in the model's layout.
    """

    def __init__(self, kind: Indexer, hidden_size: int, query_dim: int, layer: int) -> None:
        super().__init__()
        self._kind, self._layer = kind, layer
        self._scale = (kind.heads * kind.dim) ** -0.5
        self.wq_b = nn.Linear(query_dim, kind.heads * kind.dim, bias=False)
        self.wk = nn.Linear(hidden_size, kind.dim, bias=False)
        self.k_norm = LayerNorm((kind.dim,), kind.eps, bias=True)
        self.weights_proj = nn.Linear(hidden_size, kind.heads, bias=False)

    def __call__(self, x: mx.array, latent: mx.array, step: ForwardContext, rotate: Rotate) -> None:
        """Have the step select keys for each row.

        Args:
            x: `[T, hidden]`.
            latent: `[T, query_dim]`, the latent of the attention's queries.
        """
        kind = self._kind
        q = self._rotated(self.wq_b(latent).reshape(-1, kind.heads, kind.dim), rotate)
        k = self._rotated(self.k_norm(self.wk(x))[:, None], rotate)[:, 0]
        weights = self.weights_proj(x).astype(mx.float32) * self._scale
        step.choose(self._layer, q, k, weights=weights, limit=kind.limit)

    def _rotated(self, x: mx.array, rotate: Rotate) -> mx.array:
        """Rotate a part of each head: `[T, heads, dim]`."""
        kind = self._kind
        if kind.last:
            plain, rotated = mx.split(x, [kind.dim - kind.rotated_dim], axis=-1)
        else:
            rotated, plain = mx.split(x, [kind.rotated_dim], axis=-1)
        if kind.halves:
            # Move pairs side by side. They stay so, as the order of elements affects no score.
            rotated = mx.unflatten(rotated, -1, (2, -1)).swapaxes(-1, -2).flatten(-2)
        parts = [rotate(rotated), plain]
        return mx.concatenate(parts[::-1] if kind.last else parts, axis=-1)
