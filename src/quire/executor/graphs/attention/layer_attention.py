"""A layer's attention, as a program describes it, for the pools that record its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.cache.specs import AttentionSpec
from quire.executor.graphs.attention.chosen_keys import ChosenKeys
from quire.executor.graphs.places import Operand
from quire.executor.graphs.recorder import Buffer


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of a step's rows, `[T, pairs]` each, float32."""

    cosines: Buffer
    sines: Buffer
    pairs: int
    neighbours: bool


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's attention, as the program describes it.

    Attributes:
        heads: query heads.
        spec: sizes of keys and values.
        q, k, v: queries, keys and values as products wrote them; no keys and values if the layer
            reads another layer's.
        q_norm, k_norm: norm weights; None for norms without weights.
        normed: whether queries and keys are normalised by head.
        values_normed: whether values are normalised by head, without a weight.
        result: the output, `[T, heads, value_dim]`.
        digits: address of the output's digits, see `digits.cuh`; 0 if they are not wanted.
        sinks: `[heads]`, one extra score for each row's softmax; None without.
        prepared: queries that need no more, while keys and values are where they belong; None if
            a kernel is to rotate and to store them.
        chosen: the keys that an indexer chose for each row; None if rows attend to all that they
            see.
    """

    heads: int
    spec: AttentionSpec
    scale: float
    softcap: float | None
    q: Operand
    k: Operand | None
    v: Operand | None
    normed: bool
    values_normed: bool
    eps: float
    q_norm: mx.array | None
    k_norm: mx.array | None
    rotation: Rotation | None
    result: Buffer
    digits: int = 0
    sinks: mx.array | None = None
    chosen: ChosenKeys | None = None
    prepared: Buffer | None = None
