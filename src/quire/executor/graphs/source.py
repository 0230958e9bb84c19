"""The frames of kernels' CUDA sources: of generated lines, and of hand-written bodies.

A kernel is a function `kernel` whose arguments are all addresses; the first is that of the step's
number of rows. It may be launched while the previous kernel still runs (programmatic dependent
launch), so work before `wait_for_others()` is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from quire.device.gpu_kernels import kernel_text
from quire.device.weights import FP4, FP8

C_TYPES: Mapping[mx.Dtype, str] = {
    mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.bool_: "bool",
}
"""C types of arrays' elements in memory."""
HALF = "#include <cuda_fp16.h>\n"
"""C line for kernels with the type `__half`."""
CODE_BITS = frozenset({2, 3, 4, 5, 6, 8})
"""Bits of the codes that generated kernels read."""
WEIGHT_TYPES: Mapping[mx.Dtype, str] = {**C_TYPES, mx.uint8: "unsigned char"}
"""C types of weights' elements, and of the bytes of 8-bit float scales."""
ROUNDED: Mapping[mx.Dtype, str] = {
    mx.float32: "as_float",
    mx.bfloat16: "as_bfloat16",
    mx.float16: "as_half",
}
"""Functions of `rows.cuh` that round a float to a type; kernels compute in float32."""


class FloatCodes(NamedTuple):
    """The functions of `rows.cuh` that read codes which are floats, and their scales."""

    code: str
    scale: str


FLOAT_CODES: Mapping[str, FloatCodes] = {
    "mxfp4": FloatCodes("e2m1_number", "e8m0_number"),
    "nvfp4": FloatCodes("e2m1_number", "e4m3_number"),
    "mxfp8": FloatCodes("e4m3_number", "e8m0_number"),
    FP8: FloatCodes("e4m3_number", "number"),
    FP4: FloatCodes("e2m1_number", "number"),
}
"""By MLX's modes of quantization."""

# A kernel may be launched while the one before still runs (programmatic dependent launch): what it
# does before it waits is hidden.
DEPENDENCIES = """
__device__ __forceinline__ void others_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
"""


def own_text(name: str) -> str:
    """Return a file of this package's `sources/`; see `kernel_text`."""
    return kernel_text("quire.executor.graphs", name)


class NotGenerated(Exception):
    """Raised if no kernel can be generated; the message says why."""


def generated_source(
    parameters: Sequence[str],
    body: Sequence[str],
    threads: int,
    constants: Mapping[str, int],
    functions: str = "",
    resident: int = 1,
) -> str:
    """Return the source of a kernel whose lines are generated; its numbers are those of `rows.cuh`.

    Args:
        parameters: C parameters after `rows`.
        body: C lines, which call `wait_for_others()` before they read other kernels' outputs.
        threads: threads of a thread block.
        constants: integers that the body uses, by name.
        functions: C functions that the body calls.
        resident: thread blocks that a multiprocessor must be able to run at once. One is enough for
            most: without a bound the compiler saves registers, and reads operands one after the
            other, those of eight experts in eight round trips.
    """
    half = any("__half" in each for each in parameters) or any("as_half" in each for each in body)
    head = ["#include <cuda_bf16.h>"]
    if half:
        head += ["#include <cuda_fp16.h>", "#define HALF"]
    head += [DEPENDENCIES, kernel_text("quire.device.cuda", "rows.cuh")]
    head += [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines = ["others_may_start();", *body]
    parameters = ["const int* rows", *parameters]
    return _source([*head, functions], parameters, lines, threads=threads, resident=resident)


def written_source(
    parameters: Sequence[str],
    body: str,
    threads: int,
    defines: Mapping[str, object],
    head: str = "",
    before: str = "",
    resident: int | None = None,
    *,
    starts_others: bool = True,
) -> str:
    """Return the source of a kernel whose body is hand-written: its constants are macros, and its
    type `T` is bfloat16.

    Args:
        parameters: all C parameters.
        body: C text. Unless it waits for earlier kernels, the kernel does so before it.
        threads: threads of a thread block.
        defines: macros that the body uses, by name.
        head: C functions that the body calls.
        before: C lines that may run before earlier kernels have finished.
        resident: thread blocks that a multiprocessor should hold at a time; None leaves the number
            of registers to the compiler.
        starts_others: whether the next kernel may start with this one; else the body says when.
    """
    macros = [f"#define {name} {value}" for name, value in defines.items()]
    waits = "wait_for_others();" in body or "READY" in defines
    lines = ["others_may_start();" * starts_others, before]
    lines += ["" if waits else "wait_for_others();", body]
    start = ["#include <cuda_bf16.h>", *macros, "typedef __nv_bfloat16 T;", DEPENDENCIES, head]
    return _source(start, parameters, lines, threads=threads, resident=resident)


def _source(
    head: Sequence[str],
    parameters: Sequence[str],
    lines: Sequence[str],
    threads: int,
    resident: int | None,
) -> str:
    bounds = f"{threads}, {resident}" if resident else f"{threads}"
    kernel = f"__launch_bounds__({bounds}) kernel({', '.join(parameters)}) {{"
    return "\n".join([*head, f'extern "C" __global__ void {kernel}', *lines, "}\n"])


def code_lines(element: str, bits: int, word: Callable[[str], str]) -> list[str]:
    """Return C lines that read the `code` of an element from its row, a stream of bits. Bits above
    the code are of later elements.

    Args:
        element: C expression of the element's number in the row.
        word: returns the C expression of a word of the row, from that of the word's number.
    """
    lines = [f"const int bit = {element} * {bits}, word = bit / 32, shift = bit % 32;"]
    lines += [f"unsigned code = {word('word')} >> shift;"]
    if 32 % bits:
        lines += [f"if (shift + {bits} > 32) code |= {word('word + 1')} << (32 - shift);"]
    return lines


def literal(value: float, dtype: mx.Dtype) -> str:
    """Return a number as a C literal of a type."""
    if dtype not in ROUNDED:
        return f"{int(value)}" if dtype != mx.uint32 else f"{int(value)}u"
    if value != value:
        return "__int_as_float(0x7FC00000)"
    if value in (float("inf"), float("-inf")):
        return f"__int_as_float({'0x7F800000' if value > 0 else '0xFF800000'})"
    text = f"{float(value)!r}f"
    return f"({text})" if text[0] == "-" else text


def literal_of(array: mx.array) -> str:
    """Return the only element of an array as a C literal."""
    value = array.item()
    assert not isinstance(value, complex), "numbers are real"
    return literal(value, array.dtype)
