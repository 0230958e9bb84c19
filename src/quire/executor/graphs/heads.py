"""The source of the kernel between a layer's projections and its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from quire.cache.formats.tokens import TokenStore
from quire.device.cuda.encoding import Kind, coding_text
from quire.device.gpu_kernels import kernel_text
from quire.executor.graphs import kernels

THREADS = 128


@dataclass(frozen=True, slots=True)
class Coding:
    """How keys and values are coded, if blocks hold codes of single tokens.

    Attributes:
        query_scale: of the turn of queries into the coordinates of coded keys; 0 without one.
    """

    keys: Kind
    values: Kind
    query_scale: float

    @staticmethod
    def of(store: TokenStore) -> Coding:
        """For a store whose vectors a kernel can turn."""
        shape, turn = store.shape, store.coded().layout.key_rotation
        keys, values = store.codings
        return Coding(
            Kind.of(shape.head_dim, keys),
            Kind.of(shape.value_dim, values),
            0.0 if turn is None else turn.scale,
        )

    @property
    def parameters(self) -> list[str]:
        """Signs, edges of keys and of values, then words, scales and biases of each."""
        names = ["const float* signs", "const float* key_edges", "const float* value_edges"]
        for of in ("key", "value"):
            names += [f"unsigned* {of}_words"]
            names += [f"__half* {of}_{part}" for part in ("scales", "biases")]
        return names

    @property
    def defines(self) -> dict[str, object]:
        return {
            "ALIKE": int(self.keys == self.values),
            "QUERY_TURNED": int(self.query_scale != 0),
            "QUERY_SCALE": kernels.number(self.query_scale),
            **_constants("K", self.keys),
            **_constants("V", self.values),
        }


def code_tables(store: TokenStore) -> list[mx.array | None]:
    """What a `Coding` is given first, where there are such."""
    turn, (keys, values) = store.coded().layout.key_rotation, store.codings
    return [None if turn is None else turn.map, keys.edges, values.edges]


def code_parts(store: TokenStore) -> list[mx.array | None]:
    """What it is given then; no biases where there is a codebook."""
    biased = 0 if store.coded().layout.codebook else 1
    found: list[mx.array | None] = []
    for arrays in store.block_arrays:
        found += [*arrays[: 2 + biased], *[None] * (1 - biased)]
    return found


def _constants(of: str, kind: Kind) -> dict[str, object]:
    return {
        f"{of}_CODING": kind.constants,
        f"{of}_TURNED": int(kind.scale != 0),
        f"{of}_SCALE": kernels.number(kind.scale),
        f"{of}_REACH": kernels.number(kind.reach),
    }


@dataclass(frozen=True, slots=True)
class Heads:
    """What `heads.cuh` is compiled for.

    Attributes:
        kv_heads: 0 where the layer reads another one's keys.
        value_dim: 0 where values are the beginnings of keys.
        pairs: of elements that turn with a row's position; 0 without rotation.
        strides: elements from row to row of what queries, keys and values are part of.
        head_strides: elements from head to head there.
        normed: queries and keys are normalised, by a weight if they are given one.
        coding: None where blocks hold keys and values as they are.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    block_size: int
    pairs: int
    neighbours: bool
    strides: tuple[int, int, int]
    head_strides: tuple[int, int, int]
    normed: bool
    values_normed: bool
    eps: float
    coding: Coding | None

    def grid(self, max_rows: int) -> tuple[int, int, int]:
        """Thread blocks: a warp takes a vector."""
        vectors = self.heads + self.kv_heads * (2 if self.value_dim else 1)
        return max_rows, -(-vectors * 32 // THREADS), 1

    @property
    def text(self) -> str:
        """The source.

        Called with rows, q, k, v, where queries go, norms of q and k, cosines, sines, blocks and
        offsets; then with keys and values of the pool, or with the parameters of its coding.
        """
        parameters = ["const int* rows", "const T* q", "const T* k", "const T* v", "T* q_out"]
        parameters += ["const T* q_norm", "const T* k_norm"]
        parameters += ["const float* cosines", "const float* sines"]
        parameters += ["const int* blocks", "const int* offsets"]
        defines: Mapping[str, object] = {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.dim,
            "VALUE_DIM": self.value_dim or self.dim,
            "VALUE_HEADS": self.kv_heads if self.value_dim else 0,
            "BLOCK": self.block_size,
            "PAIRS": self.pairs,
            "NEIGHBOURS": int(self.neighbours),
            **dict(zip(("Q_STRIDE", "K_STRIDE", "V_STRIDE"), self.strides, strict=True)),
            **dict(zip(("Q_HEAD", "K_HEAD", "V_HEAD"), self.head_strides, strict=True)),
            "QK_NORM": int(self.normed),
            "V_NORM": int(self.values_normed),
            "EPS": kernels.number(self.eps),
            "THREADS": THREADS,
            "CODED": int(self.coding is not None),
        }
        head = "__device__ __forceinline__ float rounded(float x) { return (float)(T)x; }\n"
        if self.coding is None:
            parameters += ["T* keys", "T* values"]
        else:
            parameters += self.coding.parameters
            defines = {**defines, **self.coding.defines}
            head = kernels.HALF + coding_text() + head
        body = kernel_text("quire.executor.graphs", "heads.cuh")
        return kernels.source_text(parameters, body, THREADS, defines, head)
