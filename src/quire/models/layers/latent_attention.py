"""Multi-head latent attention (DeepSeek V2, arXiv:2405.04434), computed on cached latents.

The cache holds one latent vector and one rotated key per token. Each head expands the latent to its
key and value by matrices. Here these matrices are applied to queries and outputs instead: attention
has one KV head, whose key is latent and rotated part, and whose value is the latent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import AttentionSpec, FullKV
from quire.device.device import current_device
from quire.device.weights import Matrix
from quire.models.base import ForwardContext, Module
from quire.models.description import Rotation
from quire.models.layers.attention import Temperature
from quire.models.layers.indexer import Indexer, KeyIndexer
from quire.models.layers.linear import matrix_of
from quire.models.layers.moe import ExpertLinear, PackedExpertLinear
from quire.models.layers.norm import RMSNorm
from quire.models.layers.rope import RopeParameters, Rotate
from quire.models.shares import Cuts, Split, inputs, rows
from quire.models.weights.names import Weights
from quire.models.weights.quantization import unpacked

_NORM_EPS = 1e-6  # of the latents' norms
_EXPANSION = re.compile(r"(.*\.self_attn(?:\.\d)?)\.kv_b_proj\.weight")


@dataclass(frozen=True)
class LatentAttention:
    """Description of latent attention.

    Attributes:
        plain_dim, rotated_dim: sizes of the unrotated and the rotated part of a head's query and
            key.
        value_dim: size of a head's value.
        latent_dim: size of the cached latent, without the rotated key.
        query_latent_dim: size of the queries' latent; None means that queries are projected
            directly.
        scale: factor of the logits.
        rope: rotary parameters; None means no rotation.
        bias: whether projections from and to the hidden size have biases.
        indexer: selects the keys that each query attends to; it needs a latent of the queries. None
            means all keys, or those that the layer `chosen_by` selected.
        temperature: scaling of queries by position; None means none.
        gate_dim: number of gates of a head's output, 1 or `value_dim`; 0 means none.
        sinks: whether each head has an extra logit in the softmax, without a value
            (arXiv:2309.17453).
        attribute: the module's name within a layer.
    """

    heads: int
    plain_dim: int
    rotated_dim: int
    value_dim: int
    latent_dim: int
    query_latent_dim: int | None
    scale: float
    rope: RopeParameters | None
    bias: bool = False
    indexer: Indexer | None = None
    chosen_by: int | None = None
    temperature: Temperature | None = None
    gate_dim: int = 0
    sinks: bool = False
    attribute: str = "self_attn"

    @property
    def rotation(self) -> Rotation | None:
        return None if self.rope is None else (self.rotated_dim, self.rope)

    @property
    def spec(self) -> AttentionSpec:
        size = self.latent_dim + self.rotated_dim
        index_dim = 0 if self.indexer is None else self.indexer.dim
        return FullKV(1, size, value_dim=self.latent_dim, value_in_key=True, index_dim=index_dim)

    def module(self, hidden_size: int, layer: int) -> Module:
        return LatentSelfAttention(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        """Divide the heads. Each rank has the latents whole, and chooses the same keys."""
        heads = self.heads
        queries = rows((heads, self.plain_dim + self.rotated_dim))
        cuts = {
            "q_proj": queries,
            "q_b_proj": queries,
            "embed_q": rows((heads, 1)),
            "unembed_out": rows((heads, 1)),
            "g_proj": rows((heads, self.gate_dim)),
            "sinks": rows((heads, 1)),
            "o_proj": inputs((heads, self.value_dim)),
        }
        return replace(self, heads=split.heads(heads)), cuts

    def absorbed(self, weights: Weights) -> Weights:
        """Split each head's matrices into `embed_q` for keys (transposed) and `unembed_out` for
        values.

        Newer conversions of mlx-lm have them in this form.
        """
        ready = dict(weights)
        for name in weights:
            if match := _EXPANSION.fullmatch(name):
                path = match[1]
                matrix = unpacked(ready, f"{path}.kv_b_proj", self.latent_dim)
                heads = matrix.reshape(self.heads, self.plain_dim + self.value_dim, -1)
                keys, values = mx.split(heads, [self.plain_dim], axis=1)
                ready[f"{path}.embed_q.weight"] = keys.swapaxes(-1, -2)
                ready[f"{path}.unembed_out.weight"] = values
        return ready


class HeadLinear(ExpertLinear):
    """A linear layer with one matrix per head, `[heads, out, in]`."""

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, heads, in]` -> `[T, heads, out]`."""
        return current_device().operations.by_head(x, self.matrices)

    def to_quantized(self, group_size: int, bits: int, mode: str) -> PackedHeadLinear:
        """Return the packed twin; `nn.quantize` looks for this method."""
        heads, outputs, inputs = self.weight.shape
        return PackedHeadLinear(heads, inputs, outputs, group_size=group_size, bits=bits, mode=mode)


class PackedHeadLinear(PackedExpertLinear):
    """A quantised `HeadLinear`."""

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, heads, in]` -> `[T, heads, out]`."""
        return current_device().operations.by_head(x, self.matrices)


def _unrotated(x: mx.array) -> mx.array:
    return x


class LatentSelfAttention(Module):
    """Computes a `LatentAttention`."""

    same_rows = (("q_a_proj", "kv_a_proj_with_mqa"), ("q_proj", "kv_a_proj_with_mqa"))

    def __init__(self, kind: LatentAttention, hidden_size: int, layer: int) -> None:
        super().__init__()
        self._kind, self._layer = kind, layer
        self._chosen_by = kind.chosen_by if kind.indexer is None else layer
        width = kind.heads * (kind.plain_dim + kind.rotated_dim)
        rank, latent = kind.query_latent_dim, kind.latent_dim
        if rank is None:
            self.q_proj = nn.Linear(hidden_size, width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, rank, bias=kind.bias)
            self.q_a_layernorm = RMSNorm(rank, eps=_NORM_EPS)
            self.q_b_proj = nn.Linear(rank, width, bias=False)
            if kind.indexer is not None:
                self.indexer = KeyIndexer(kind.indexer, hidden_size, rank, layer=layer)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, latent + kind.rotated_dim, bias=kind.bias)
        self.kv_a_layernorm = RMSNorm(latent, eps=_NORM_EPS)
        self.embed_q = HeadLinear(kind.heads, kind.plain_dim, latent)
        self.unembed_out = HeadLinear(kind.heads, latent, kind.value_dim)
        if kind.gate_dim:
            self.g_proj = nn.Linear(hidden_size, kind.heads * kind.gate_dim, bias=False)
        if kind.sinks:
            self.sinks = mx.zeros(kind.heads)
        self.o_proj = nn.Linear(kind.heads * kind.value_dim, hidden_size, bias=kind.bias)
        self._matrices: tuple[Matrix, ...] = ()
        """The projection matrices of queries, or of their latents, and of key latents. Filled in at
        the first step.
        """

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotate | None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        kind, rows = self._kind, x.shape[0]
        if rotate is None:
            rotate = _unrotated
        if not self._matrices:
            first = self.q_proj if kind.query_latent_dim is None else self.q_a_proj
            self._matrices = matrix_of(first), matrix_of(self.kv_a_proj_with_mqa)
        operations = current_device().operations
        projected, written = operations.products(x, self._matrices)
        q = self._queries(x, projected, step, rotate=rotate).reshape(rows, kind.heads, -1)
        plain, rotated = mx.split(q, [kind.plain_dim], axis=-1)
        q = mx.concatenate([self.embed_q(plain), rotate(rotated)], axis=-1)
        if kind.temperature is not None:
            q = (q * kind.temperature.of(step.positions)).astype(x.dtype)
        latent, key = mx.split(written, [kind.latent_dim], axis=-1)
        latent = self.kv_a_layernorm(latent)[:, None]  # [T, 1, latent_dim]
        k = mx.concatenate([latent, rotate(key[:, None])], axis=-1)
        out = step.attend(  # [T, heads, latent_dim]
            self._layer,
            q,
            k,
            latent,
            scale=kind.scale,
            sinks=self.get("sinks"),
            chosen_by=self._chosen_by,
        )
        out = self.unembed_out(out)
        if kind.gate_dim:
            gate = mx.sigmoid(self.g_proj(x).astype(mx.float32)).astype(x.dtype)
            out = out * gate.reshape(rows, kind.heads, kind.gate_dim)
        y: mx.array = self.o_proj(out.reshape(rows, -1))
        return y

    def _queries(
        self, x: mx.array, projected: mx.array, step: ForwardContext, rotate: Rotate
    ) -> mx.array:
        """Return queries `[T, heads * (plain_dim + rotated_dim)]`. An indexer selects their keys on
        the way.

        Args:
            projected: the queries, or their latents before the norm if the kind has them.
        """
        if self._kind.query_latent_dim is None:
            return projected
        latent = self.q_a_layernorm(projected)
        if "indexer" in self:
            self.indexer(x, latent, step, rotate=rotate)
        return self.q_b_proj(latent)
