"""The sources of the kernels for blocks that hold codes of single tokens; see `kernels`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.attention.paged import cuda as paged
from quire.attention.paged import portable_kernels as portable
from quire.attention.paged import tokens
from quire.executor.graphs.attention import attention_kernels
from quire.executor.graphs.source import HALF, written_source


@dataclass(frozen=True, slots=True)
class Attend:
    """A kernel that attends over codes; its thread blocks have `paged.LANES` threads.

    Attributes:
        shared: bytes of shared memory beyond what the source declares.
    """

    text: str
    shared: int


def attend(shape: paged.Shape, codes: portable.Codes) -> Attend:
    """Return the kernel of a layer; its grid is rows, `shape.blocks` and splits.

    Parameters: queries `[T, heads, key_dim]` in the coordinates of coded keys, the arrays of keys
    and of values (see `CodedArrays`), tiles, table, numbers, weighted sums of values `[T, heads,
    splits, value_dim]`, and statistics `[T, heads, splits, 2]`.
    """
    parameters = ["const T* q", *code_parameters(codes)]
    parameters += ["const int* tiles", "const int* table", "const float* numbers"]
    parameters += ["float* partial", "float* stats"]
    defines = {**tokens.defines(shape, codes), "READY": "wait_for_others()"}
    head = HALF + tokens.head(shape.dtype)
    text = written_source(
        parameters, tokens.body(), paged.LANES, defines=defines, head=head, resident=shape.resident
    )
    return Attend(text, tokens.shared_memory(shape, codes))


def code_parameters(codes: portable.Codes) -> list[str]:
    """Return the parameters for the arrays of keys and of values."""
    kinds = ("unsigned", "__half", "float" if codes.codebook else "__half")
    both = zip(codes.inputs(), 2 * kinds, strict=True)
    return [f"const {kind}* {name}" for name, kind in both]


def combine(
    shape: paged.Shape, splits: int, value_dim: int, *, turned: bool, some: bool = False
) -> str:
    """Return the source that combines splits.

    Parameters: rows, partial, stats, signs, tiles if only `some` rows have them, result, and sinks
    if there are any.

    Args:
        value_dim: elements of the result, the first of a sum.
        turned: whether sums of values are rotated back. The signs include the rotation's scale.
    """
    parameters = ["const int* rows", "const float* partial", "const float* stats"]
    parameters += ["const float* signs", *["const int* tiles"] * some, "T* result"]
    parameters += attention_kernels.sinks_of(shape)
    lines = [
        *attention_kernels.of_splits(shape, splits, some=some),
        "constexpr int count = splits;",
    ]
    own = {"TURNED": int(turned), "R_DIM": value_dim}
    defines: Mapping[str, object] = {**attention_kernels.joined_defines(shape), **own}
    head = HALF + paged.joining(turned=turned)
    body = "\n".join([*lines, paged.source("combine")])
    return written_source(parameters, body, paged.LANES, defines=defines, head=head)
