"""Cross-attention of a decoder's rows to an encoder's (arXiv:1706.03762, section 3.2.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import CrossKV
from quire.models.base import ForwardContext, Module
from quire.models.description import Norm, Rotation
from quire.models.layers.rope import Rotate
from quire.models.shares import Cuts, Split, inputs, rows


@dataclass(frozen=True)
class CrossAttention:
    """Cross-attention: rows see all of the media that they attend to, without rotation.

    Attributes:
        norm: norm of queries and keys, per head; None means no norm.
        bias: whether the projections have biases.
    """

    heads: int
    kv_heads: int
    head_dim: int
    norm: Norm | None
    bias: bool = False

    @property
    def attribute(self) -> str:
        return "cross_attn"

    @property
    def rotation(self) -> Rotation | None:
        return None

    @property
    def spec(self) -> CrossKV:
        return CrossKV(self.kv_heads, self.head_dim)

    def module(self, hidden_size: int, layer: int) -> Module:
        return CrossAttentionBlock(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        cuts = {
            "q_proj": rows((heads, dim)),
            "k_proj": rows((kv_heads, dim)),
            "v_proj": rows((kv_heads, dim)),
            "o_proj": inputs((heads, dim)),
        }
        few = split.few(kv_heads, "heads of keys and values")
        return replace(self, heads=split.heads(heads), kv_heads=few), cuts


class CrossAttentionBlock(Module):
    """Computes a `CrossAttention`."""

    def __init__(self, kind: CrossAttention, hidden_size: int, layer: int) -> None:
        super().__init__()
        self._kind, self._layer = kind, layer
        width, kv_width = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=kind.bias)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=kind.bias)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=kind.bias)
        self.o_proj = nn.Linear(width, hidden_size, bias=kind.bias)
        if kind.norm is not None:
            self.q_norm = kind.norm.module(kind.head_dim)
            self.k_norm = kind.norm.module(kind.head_dim)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotate | None) -> mx.array:
        """Map `[T, hidden]` to the same shape; rows that attend to no media get the bias alone."""
        kind, rows = self._kind, x.shape[0]
        if step.cross is None:  # no row looks at anything
            return self._projected(mx.zeros((rows, kind.heads * kind.head_dim), x.dtype))
        q = self._normed("q_norm", self.q_proj(x).reshape(rows, kind.heads, kind.head_dim))
        k = v = None
        if step.cross.states is not None:
            states = step.cross.states.astype(x.dtype)
            shape = states.shape[0], kind.kv_heads, kind.head_dim
            k = self._normed("k_norm", self.k_proj(states).reshape(shape))
            v = self.v_proj(states).reshape(shape)
        out = step.attend(self._layer, q, k, v, scale=kind.head_dim**-0.5)
        return self._projected(out.reshape(rows, -1))

    def _normed(self, name: str, x: mx.array) -> mx.array:
        y: mx.array = self[name](x) if name in self else x
        return y

    def _projected(self, x: mx.array) -> mx.array:
        y: mx.array = self.o_proj(x)
        return y
