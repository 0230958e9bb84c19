"""The sources of the kernels for blocks that hold codes of single tokens; see `kernels`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.attention.paged import cuda as paged
from quire.attention.paged import portable_kernels as portable
from quire.attention.paged import tokens
from quire.device.gpu_kernels import kernel_text
from quire.executor.graphs import kernels

_ATTENTION = "quire.attention.paged"


@dataclass(frozen=True, slots=True)
class Attend:
    """A kernel that attends over token codes, with its launch; see `attend`.

    Attributes:
        blocks: thread blocks of each row and split.
        shared: bytes of shared memory beyond what the source declares.
    """

    text: str
    blocks: int
    threads: int
    shared: int


def attend(shape: paged.Shape, codes: portable.Codes) -> Attend:
    """Return the kernel of a layer; its grid is rows, `blocks` and splits.

    Parameters: queries `[T, heads, key_dim]` in the coordinates of coded keys, the arrays of keys
    and of values (see `CodedArrays`), tiles, table, numbers, weighted sums of values `[T, heads,
    splits, value_dim]`, and statistics `[T, heads, splits, 2]`.
    """
    parameters = ["const T* q"]
    kinds = ("unsigned", "__half", "float" if codes.codebook else "__half")
    for name, kind in zip(codes.inputs(), 2 * kinds, strict=True):
        parameters.append(f"const {kind}* {name}")
    parameters += ["const int* tiles", "const int* table", "const float* numbers"]
    parameters += ["float* partial", "float* stats"]
    defines = {**tokens.defines(shape, codes), "READY": "wait_for_others()"}
    head = kernels.HALF + tokens.head(shape.dtype)
    text = kernels.source_text(
        parameters, tokens.body(), paged.LANES, defines=defines, head=head, resident=shape.resident
    )
    blocks = shape.kv_heads * (shape.group // shape.part)
    return Attend(text, blocks, paged.LANES, shared=tokens.shared_memory(shape, codes))


def combine(shape: paged.Shape, splits: int, *, turned: bool) -> str:
    """Return the source that combines splits.

    Parameters: rows, partial, stats, signs, result, and sinks if there are any.

    Args:
        turned: whether sums of values are rotated back. The signs include the rotation's scale.
    """
    parameters = ["const int* rows", "const float* partial", "const float* stats"]
    parameters += ["const float* signs", "T* result", *kernels.sinks_of(shape)]
    lines = [*kernels.of_splits(shape, splits), "constexpr int count = splits;"]
    if turned:
        lines.append("const int index = threadIdx.x;")
    defines: Mapping[str, object] = {
        **kernels.joined_defines(shape),
        "TURNED": int(turned),
        "THREADS": paged.LANES,
    }
    head = kernel_text(_ATTENTION, "cuda.h") + kernel_text(_ATTENTION, "portable_turn.h")
    head += paged.source("splits")
    body = "\n".join([*lines, paged.source("combine")])
    return kernels.source_text(parameters, body, paged.LANES, defines=defines, head=head)
