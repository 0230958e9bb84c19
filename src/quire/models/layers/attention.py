"""Softmax attention of decoders: description and module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import Bidirectional, ChunkedKV, FullKV, LayerSpec, WindowKV
from quire.core.errors import ModelError
from quire.device.activations import Activation
from quire.device.device import current_device, fused
from quire.device.ranks import WHOLE, Part
from quire.device.weights import HeadPart, Matrix
from quire.models.base import ForwardContext, Module
from quire.models.description import Norm, Rotation
from quire.models.layers.linear import matrix_of
from quire.models.layers.rope import RopeParameters, Rotate
from quire.models.shares import Cut, Cuts, Split, inputs, rows

_QK_NORMS = ("q_norm", "k_norm")


class Over(Enum):
    """The elements that a norm of queries and keys spans, and the shape of its weights."""

    HEAD = "a head, with one weight for all heads"
    EACH_HEAD = "a head, with a weight for each head"
    ALL_HEADS = "all heads at once"


@dataclass(frozen=True)
class QKNorm:
    """Normalisation of queries and keys, before or after their rotation."""

    norm: Norm
    over: Over = Over.HEAD
    after_rotation: bool = False

    def module(self, heads: int, head_dim: int, part: Part = WHOLE) -> Module:
        """Return the norm for a rank's heads."""
        if self.over is Over.ALL_HEADS:
            return self.norm.module_of(part, heads * head_dim)
        shapes = {
            Over.HEAD: (head_dim,),
            Over.EACH_HEAD: (heads, head_dim),
        }
        return self.norm.module(*shapes[self.over])

    def cut(self, heads: int, head_dim: int) -> Cut | None:
        """Return the cut of the norm's weights by heads; None where all heads have the same."""
        if self.over is Over.HEAD:
            return None
        return rows((heads, 1 if self.over is Over.EACH_HEAD else head_dim))


@dataclass(frozen=True)
class Temperature:
    """Queries are scaled by their position, in steps (arXiv:2501.19399).

    Attributes:
        slope: growth of the factor with the logarithm of the step's number, counted from one.
        step: number of positions of a step.
        shift: number added to positions.
    """

    slope: float
    step: int
    shift: int = 0

    def of(self, positions: mx.array) -> mx.array:
        """Return the factors of queries at positions `[T]`, as `[T, 1, 1]`."""
        steps = ((positions + self.shift) // self.step).astype(mx.float32)
        return (1.0 + self.slope * mx.log1p(steps))[:, None, None]


@dataclass(frozen=True)
class OutputGate:
    """A gate of the attention's output, with its own projection (arXiv:2505.06708).

    Attributes:
        by_head: whether the gate has one weight per head, instead of one per value.
        softplus: whether weights are a softplus of the projection, instead of a sigmoid.
    """

    by_head: bool = False
    softplus: bool = False

    def module(self, hidden_size: int, heads: int, value_dim: int) -> nn.Linear:
        """Return the gate's projection, which reads the same rows as attention."""
        return nn.Linear(hidden_size, heads * (1 if self.by_head else value_dim), bias=False)

    def of(self, projected: mx.array, heads: int) -> mx.array:
        """Return the weights for the projection's output: `[T, heads, 1 or value_dim]`."""
        split = projected.reshape(len(projected), heads, -1)
        if not self.softplus:
            return mx.sigmoid(split)
        return mx.logaddexp(split.astype(mx.float32), 0.0).astype(split.dtype)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (arXiv:2305.13245).

    Attributes:
        scale: factor of the logits.
        rope: rotary parameters; None means no rotation.
        window: number of tokens that a query sees, including itself; None means all.
        chunk: size of chunks of tokens; a query sees only its chunk. None means all.
        output_gate: whether the query projection also computes a gate of each head's output.
        own_gate: a gate of the output with its own projection.
        out_norm: the norm of all heads' outputs before their projection; None means none.
        value_dim: size of a head's value, if it differs from the key's; else 0.
        value_scale: factor of the values.
        softcap: softcap of the logits, by a hyperbolic tangent.
        sinks: whether each head has an extra logit in the softmax, without a value
            (arXiv:2309.17453).
        clip: bound of the absolute values of queries, keys and values, after norms over all heads.
        temperature: scaling of queries by position; None means none.
        bidirectional_media: whether rows of one image see each other.
        bidirectional: whether a query sees keys on both sides, and nothing is kept; `window` is
            then the most tokens between them.
        part: the rank whose heads these are.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeParameters | None
    window: int | None = None
    chunk: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    output_gate: bool = False
    own_gate: OutputGate | None = None
    out_norm: Norm | None = None
    softcap: float | None = None
    sinks: bool = False
    clip: float | None = None
    temperature: Temperature | None = None
    bidirectional_media: bool = False
    bidirectional: bool = False
    value_dim: int = 0
    value_scale: float = 1.0
    part: Part = WHOLE

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ModelError(
                f"config.json: {self.heads} attention heads are no multiple of {self.kv_heads} of "
                "keys and values"
            )

    @property
    def attribute(self) -> str:
        return "self_attn"

    @property
    def rotation(self) -> Rotation | None:
        return None if self.rope is None else (self.head_dim, self.rope)

    @property
    def spec(self) -> LayerSpec:
        if self.bidirectional:
            return Bidirectional(self.window)
        heads, dim, value_dim = self.kv_heads, self.head_dim, self.value_dim
        if self.chunk is not None:
            return ChunkedKV(heads, dim, self.chunk, value_dim=value_dim)
        if self.window is None:
            return FullKV(heads, dim, self.bidirectional_media, value_dim=value_dim)
        return WindowKV(
            heads,
            dim,
            self.window,
            bidirectional_media=self.bidirectional_media,
            value_dim=value_dim,
        )

    @property
    def plain_heads(self) -> bool:
        """Whether queries, keys and values need only products, norms per head, and rotation."""
        norm = self.qk_norm
        by_head = norm is None or (
            norm.over is Over.HEAD and not norm.after_rotation and not norm.norm.centred
        )
        return by_head and self.clip is None and not self.output_gate

    def module(self, hidden_size: int, layer: int) -> Module:
        return SelfAttention(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        value_dim = self.value_dim or dim
        cuts = {
            "q_proj": rows((heads, dim * (2 if self.output_gate else 1))),
            "k_proj": rows((kv_heads, dim)),
            "v_proj": rows((kv_heads, value_dim)),
            "o_proj": inputs((heads, value_dim)),
            "sinks": rows((heads, 1)),
        }
        if self.own_gate is not None:
            cuts["g_proj"] = rows((heads, 1 if self.own_gate.by_head else value_dim))
        if self.out_norm is not None:
            cuts["out_norm"] = rows((heads, value_dim))
        if self.qk_norm is not None:
            normed = zip(_QK_NORMS, (heads, kv_heads), strict=True)
            found = {name: self.qk_norm.cut(count, dim) for name, count in normed}
            cuts |= {name: cut for name, cut in found.items() if cut is not None}
        own = replace(
            self,
            heads=split.heads(heads),
            kv_heads=split.few(kv_heads, "heads of keys and values"),
            part=split.part,
        )
        return own, cuts


class SelfAttention(Module):
    """Computes an `Attention`."""

    same_rows = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, kind: Attention, hidden_size: int, layer: int) -> None:
        super().__init__()
        self._kind, self._layer = kind, layer
        width, kv_width = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
        value_dim = kind.value_dim or kind.head_dim
        gated = 2 if kind.output_gate else 1
        self.q_proj = nn.Linear(hidden_size, gated * width, bias=kind.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=kind.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kind.kv_heads * value_dim, bias=kind.qkv_bias)
        self.o_proj = nn.Linear(kind.heads * value_dim, hidden_size, bias=kind.out_bias)
        if kind.qk_norm is not None:
            self.q_norm = kind.qk_norm.module(kind.heads, kind.head_dim, kind.part)
            self.k_norm = kind.qk_norm.module(kind.kv_heads, kind.head_dim, kind.part)
        if kind.sinks:
            self.sinks = mx.zeros(kind.heads)
        if kind.own_gate is not None:
            self.g_proj = kind.own_gate.module(hidden_size, kind.heads, value_dim)
        if kind.out_norm is not None:
            self.out_norm = kind.out_norm.module_of(kind.part, kind.heads * value_dim)
        self._parts: tuple[HeadPart, ...] = ()
        """The queries, keys and values of plain heads. Filled in at the first step."""
        self._matrices: tuple[Matrix, ...] = ()
        """The projection matrices of queries, keys and values. Filled in at the first step."""

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotate | None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        kind, rows = self._kind, x.shape[0]
        gate = None
        if kind.plain_heads:
            q, k, v = self._at_once(x, rotate)
        else:
            q, k, v = self._projected(x, step)
            if kind.output_gate:
                q, gate = mx.split(q.reshape(rows, kind.heads, -1), 2, axis=-1)
            q, k = self._prepared(q, k, rotate)
            v = self._values(v)
        if kind.temperature is not None:
            q = (q * kind.temperature.of(step.positions)).astype(x.dtype)
        sinks = self.get("sinks")
        if kind.value_scale != 1:
            v = v * kind.value_scale
        # [T, heads, value_dim]
        out = step.attend(self._layer, q, k, v, scale=kind.scale, softcap=kind.softcap, sinks=sinks)
        if gate is not None:
            out = out * mx.sigmoid(gate)
        if kind.own_gate is not None:
            out = out * kind.own_gate.of(self.g_proj(x), kind.heads)
        out = out.reshape(rows, -1)
        if "out_norm" in self:
            out = self.out_norm(out)
        y: mx.array = self.o_proj(out)
        return y

    def _at_once(self, x: mx.array, rotate: Rotate | None) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values, normalised and rotated: `[T, heads, head_dim]`."""
        norm = self._kind.qk_norm
        if not self._parts:
            self._parts = self._described()
        eps = 0.0 if norm is None else norm.norm.eps
        q, k, v = current_device().operations.heads(x, self._parts, eps, rotate=rotate)
        return q, k, v

    def _described(self) -> tuple[HeadPart, ...]:
        kind, normed = self._kind, self._kind.qk_norm is not None
        rotated = partial(HeadPart, normed=normed, rotated=True)
        q_norm, k_norm = (self[name].get("weight") if normed else None for name in _QK_NORMS)
        return (
            rotated(matrix_of(self.q_proj), kind.heads, q_norm),
            rotated(matrix_of(self.k_proj), kind.kv_heads, k_norm),
            HeadPart(matrix_of(self.v_proj), kind.kv_heads),
        )

    def _projected(self, x: mx.array, step: ForwardContext) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values with all heads joined: `[T, width]`."""
        if not self._matrices:
            self._matrices = tuple(map(matrix_of, (self.q_proj, self.k_proj, self.v_proj)))
        q, k, v = current_device().operations.products(x, self._matrices)
        return q, k, v

    def _prepared(
        self, q: mx.array, k: mx.array, rotate: Rotate | None
    ) -> tuple[mx.array, mx.array]:
        """Split queries and keys by head, normalise and rotate them: `[T, heads, head_dim]`."""
        kind, norm, rows = self._kind, self._kind.qk_norm, q.shape[0]
        if norm is not None and norm.over is Over.ALL_HEADS:
            q, k, norm = self.q_norm(q), self.k_norm(k), None
        q = self._clipped(q).reshape(rows, kind.heads, kind.head_dim)
        k = self._clipped(k).reshape(rows, kind.kv_heads, kind.head_dim)
        if norm is not None and not norm.after_rotation:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        if norm is not None and norm.after_rotation:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    def _values(self, v: mx.array) -> mx.array:
        """Split values by head: `[T, heads, value_dim]`."""
        return self._clipped(v).reshape(len(v), self._kind.kv_heads, -1)

    def _clipped(self, x: mx.array) -> mx.array:
        clip = self._kind.clip
        return x if clip is None else _within(clip)(x)


@cache
def _within(bound: float) -> Activation:
    """Return a function that clips numbers to `[-bound, bound]`."""
    return fused(lambda x: mx.clip(x, -bound, bound))
