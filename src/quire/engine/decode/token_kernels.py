"""The sources of the kernels for blocks that hold codes of single tokens; see `kernels`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from quire.attention.paged import cuda as paged
from quire.attention.paged import portable_kernels as portable
from quire.attention.paged import tokens
from quire.attention.paged.target import CUDA
from quire.cache.formats.tokens import TokenStore
from quire.device.cuda.encoding import Kind, coding_text
from quire.device.gpu_kernels import kernel_text
from quire.engine.decode import kernels

CODE_THREADS = 128
QUERY = mx.float32
"""The type of queries in the coordinates of coded keys."""
_ATTENTION = "quire.attention.paged"


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """What `code_tokens.cuh` is compiled for.

    Attributes:
        tables: signs that keys, values and queries are turned by, and the edges between levels of
            keys and of values; None where there are none.
        query_scale: of queries that are turned; 0 where they are not.
    """

    heads: int
    kv_heads: int
    dim: int
    block_tokens: int
    keys: Kind
    values: Kind
    query_scale: float
    tables: tuple[mx.array | None, ...]

    @staticmethod
    def of(store: TokenStore, heads: int) -> Code:
        """For a store whose vectors a kernel can turn, and so many query heads."""
        shape, turn = store.shape, store.coded().layout.key_rotation
        keys, values = store.codings
        return Code(
            heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_tokens,
            Kind.of(shape.head_dim, keys),
            Kind.of(shape.value_dim, values),
            0.0 if turn is None else turn.scale,
            (None if turn is None else turn.map, keys.edges, values.edges),
        )

    def grid(self, max_rows: int) -> tuple[int, int, int]:
        """Thread blocks: a warp takes a vector."""
        vectors = self.heads + 2 * self.kv_heads
        return max_rows, -(-vectors * 32 // CODE_THREADS), 1

    @property
    def text(self) -> str:
        """The source.

        Called with rows, queries, keys and values, blocks, offsets, signs, edges of keys and of
        values, turned queries, then words, scales and biases of keys and of values.
        """
        parameters = ["const int* rows", "const T* q", "const T* keys", "const T* values"]
        parameters += ["const int* blocks", "const int* offsets", "const float* signs"]
        parameters += ["const float* key_edges", "const float* value_edges", "QUERY* turned_q"]
        for of in ("key", "value"):
            parameters += [f"unsigned* {of}_words"]
            parameters += [f"__half* {of}_{part}" for part in ("scales", "biases")]
        defines: Mapping[str, object] = {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.dim,
            "BLOCK": self.block_tokens,
            "THREADS": CODE_THREADS,
            "CODEBOOK": int(self.keys.codebook),
            "QUERY": CUDA.types[QUERY],
            "QUERY_TURNED": int(self.query_scale != 0),
            "QUERY_SCALE": kernels.number(self.query_scale),
            **_coding("K", self.keys),
            **_coding("V", self.values),
        }
        body = kernel_text("quire.engine.decode", "code_tokens.cuh")
        head = kernels.HALF + coding_text()
        return kernels.source_text(parameters, body, CODE_THREADS, defines, head)


def parts(store: TokenStore) -> list[mx.array | None]:
    """What `Code` is called with last; no biases where there is a codebook."""
    biased = 0 if store.coded().layout.codebook else 1
    found: list[mx.array | None] = []
    for arrays in store.block_arrays:
        found += [*arrays[: 2 + biased], *[None] * (1 - biased)]
    return found


def _coding(of: str, kind: Kind) -> dict[str, object]:
    return {
        f"{of}_CODING": kind.constants,
        f"{of}_TURNED": int(kind.scale != 0),
        f"{of}_SCALE": kernels.number(kind.scale),
        f"{of}_REACH": kernels.number(kind.reach),
    }


@dataclass(frozen=True, slots=True)
class Attend:
    """A kernel that attends over token codes; see `attend`.

    Attributes:
        blocks: thread blocks for each row and split.
        shared: bytes beside what the source declares.
    """

    text: str
    blocks: int
    threads: int
    shared: int


def attend(shape: paged.Shape, codes: portable.Codes) -> Attend:
    """The kernel for a kind of layer; launched for rows, `blocks` and splits.

    Called with queries `[T, heads, key_dim]` of type `QUERY` in the coordinates of coded keys, the
    parts of keys and of values (see `CodedArrays`), tiles, table and numbers; and with where
    weighted sums of values `[T, heads, splits, value_dim]` and stats `[T, heads, splits, 2]` go.
    """
    parameters = [f"const {CUDA.types[QUERY]}* q"]
    kinds = ("unsigned", "__half", "float" if codes.codebook else "__half")
    for name, kind in zip(codes.inputs(), 2 * kinds, strict=True):
        parameters.append(f"const {kind}* {name}")
    parameters += ["const int* tiles", "const int* table", "const float* numbers"]
    parameters += ["float* partial", "float* stats"]
    defines = {**tokens.defines(shape, codes), "READY": "wait_for_others()"}
    head = kernels.HALF + tokens.head(QUERY)
    text = kernels.source_text(parameters, tokens.body(), paged.LANES, defines, head)
    blocks = shape.kv_heads * (shape.group // shape.part)
    return Attend(text, blocks, paged.LANES, tokens.shared_memory(shape, codes))


def combine(shape: paged.Shape, splits: int, *, turned: bool) -> str:
    """rows, partial, stats, signs, result.

    Args:
        turned: sums of values are turned back by the signs, which hold the turn's scale too.
    """
    parameters = ["const int* rows", "const float* partial", "const float* stats"]
    parameters += ["const float* signs", "T* result"]
    lines = [*kernels.of_splits(shape, splits), "constexpr int count = splits;"]
    if turned:
        lines.append("const int index = threadIdx.x;")
    defines: Mapping[str, object] = {
        "V_DIM": shape.value_dim,
        "HEADS": shape.heads,
        "SINKS": 0,
        "TURNED": int(turned),
        "THREADS": paged.LANES,
    }
    head = kernel_text(_ATTENTION, "cuda.h") + kernel_text(_ATTENTION, "portable_turn.h")
    body = "\n".join([*lines, paged.source("combine")])
    return kernels.source_text(parameters, body, paged.LANES, defines, head)
