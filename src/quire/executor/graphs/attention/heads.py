"""The source of the kernel between a layer's projections and its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from quire.cache.formats.base import vector_sizes
from quire.cache.formats.tokens import TokenStore
from quire.device.cuda.encoding import Kind, coding_text
from quire.executor.graphs.source import HALF, literal, own_text, written_source

THREADS = 128
_TABLES = ("signs", "edges")


@dataclass(frozen=True, slots=True)
class Coding:
    """How keys and values are coded in blocks that hold codes of single tokens.

    Attributes:
        values: equal to `keys` if values are the starts of keys.
        query_scale: scale of the rotation of queries into the coordinates of coded keys; 0 without
            one.
    """

    keys: Kind
    values: Kind
    query_scale: float

    @staticmethod
    def of(store: TokenStore, *, queries: bool = True) -> Coding:
        """Return the coding of a store.

        Args:
            queries: whether queries are rotated into the coordinates of coded keys.
        """
        turn = store.coded().layout.key_rotation if queries else None
        keys, *values = map(Kind.of, vector_sizes(store.shape), store.codings)
        scale = 0.0 if turn is None else turn.transform_scale
        return Coding(keys, values[0] if values else keys, scale)

    @property
    def parameters(self) -> list[str]:
        """Return the parameters: signs and bin edges of keys and of values, then words, scales and
        biases of each.
        """
        names = [f"const float* {of}_{table}" for table in _TABLES for of in ("key", "value")]
        for of in ("key", "value"):
            names += [f"unsigned* {of}_words"]
            names += [f"__half* {of}_{part}" for part in ("scales", "biases")]
        return names

    @property
    def defines(self) -> dict[str, object]:
        return {
            "ALIKE": int(self.keys == self.values),
            "QUERY_TURNED": int(self.query_scale != 0),
            "QUERY_SCALE": literal(self.query_scale, mx.float32),
            **_constants("K", self.keys),
            **_constants("V", self.values),
        }


def code_tables(store: TokenStore) -> list[mx.array | None]:
    """Return the leading parameters of a `Coding`: its signs and bin edges."""
    codings = store.codings if len(store.codings) > 1 else 2 * store.codings
    signs = [None if each.rotation is None else each.rotation.signs for each in codings]
    return [*signs, *(each.edges for each in codings)]


def code_parts(store: TokenStore) -> list[mx.array | None]:
    """Return the following parameters of a `Coding`; without biases if it has a codebook."""
    found: list[mx.array | None] = []
    for arrays in store.block_arrays:
        found += [*arrays, *[None] * (3 - len(arrays))]
    return found


def _constants(of: str, kind: Kind) -> dict[str, object]:
    return {
        f"{of}_CODING": kind.constants,
        f"{of}_TURNED": int(kind.scale != 0),
        f"{of}_SCALE": literal(kind.scale, mx.float32),
        f"{of}_REACH": literal(kind.reach, mx.float32),
    }


@dataclass(frozen=True, slots=True)
class Heads:
    """Parameters of `heads.cuh`.

    Attributes:
        kv_heads: number of key heads; 0 if the layer reads another layer's keys.
        value_dim: size of a value; 0 if values are the starts of keys.
        pairs: pairs of elements that RoPE rotates; 0 without RoPE.
        strides: elements from row to row, of the arrays that hold queries, keys and values.
        head_strides: elements from head to head in these arrays.
        normed: whether queries and keys are normalised; with a weight if one is given.
        coding: how keys and values are coded; None for plain blocks.
        workspace: whether some rows write to a workspace; see `Workspace`.
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
    workspace: bool = False

    def grid(self, max_rows: int) -> tuple[int, int, int]:
        """Return the number of thread blocks: one warp handles one vector."""
        vectors = self.heads + self.kv_heads * (2 if self.value_dim else 1)
        return max_rows, -(-vectors * 32 // THREADS), 1

    @property
    def text(self) -> str:
        """Return the source.

        Parameters: rows, q, k, v, the queries' destination, norms of q and k, cosines, sines,
        blocks and offsets. Then keys and values of the pool, and of the workspace if there is one,
        or the parameters of the coding.
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
            "EPS": literal(self.eps, mx.float32),
            "THREADS": THREADS,
            "CODED": int(self.coding is not None),
            "WORKSPACE": int(self.workspace),
        }
        head = "__device__ __forceinline__ float rounded(float x) { return (float)(T)x; }\n"
        if self.coding is None:
            parameters += ["T* keys", "T* values"]
            parameters += ["T* prompt_keys", "T* prompt_values"] * self.workspace
        else:
            parameters += self.coding.parameters
            defines = {**defines, **self.coding.defines}
            head = HALF + coding_text() + head
        body = own_text("heads.cuh")
        return written_source(parameters, body, THREADS, defines=defines, head=head)
