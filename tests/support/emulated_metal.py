"""Runs sources written for `mx.fast.metal_kernel` on the CPU: what a Mac compiles, compiled here.

The text of a kernel is the same to the letter; `emulated_metal.h` stands for Metal's library, and
the signature is made by MLX's rules. Reading or writing outside an array, a barrier that some
threads miss and too much threadgroup memory are errors.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import mlx.core as mx
import numpy as np

from quire.device.gpu_kernels import Kernel
from tests.support.emulated_libraries import compiled

_TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
}
_POSITIONS = {
    "simdgroup_index_in_threadgroup": "emulated::current / 32",
    "thread_index_in_simdgroup": "emulated::current % 32",
    "thread_index_in_threadgroup": "emulated::current",
    "threadgroup_position_in_grid": "group",
    "threadgroups_per_grid": "groups",
}
_LIBC = ctypes.CDLL(None)


def why_not() -> str:
    """Return why nothing can be emulated here; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "Metal is emulated on Linux"
    return "" if shutil.which("g++") else "no C++ compiler (g++)"


@dataclass
class Emulated:
    """A kernel; called as those of `mx.fast`.

    Attributes:
        launches: grids and threadgroups so far.
        compiled: functions by the types of arrays.
    """

    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    body: str
    header: str
    launches: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    compiled: dict[tuple[str, ...], ctypes._NamedFuncPointer] = field(default_factory=dict)
    flags: ClassVar[tuple[str, ...]] = ()
    """More for the compiler."""
    parts: ClassVar[tuple[str, ...]] = ("emulated_metal.cpp",)
    """Sources that are compiled once, and linked to each kernel."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        assert len(inputs) == len(self.inputs)
        assert all(n % by == 0 for n, by in zip(grid, threadgroup, strict=True))
        self.launches.append((grid, threadgroup))
        types = [_TYPES[each.dtype] for each in inputs], [_TYPES[each] for each in output_dtypes]
        key = (*types[0], *types[1])
        if key not in self.compiled:
            self.compiled[key] = compiled(self._source(*types), self.flags, self.parts)
        run = self.compiled[key]
        given = [guarded(_to_numpy(each)) for each in inputs]
        results = [
            guarded(np.full(prod(shape) * dtype.size, 0xFF, np.uint8))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        arrays = [*given, *results]
        sizes = [each.size for each in inputs] + [prod(shape) for shape in output_shapes]
        error = run(
            (ctypes.c_void_p * len(arrays))(*(each.ctypes.data for each in arrays)),
            (ctypes.c_size_t * len(arrays))(*sizes),
            (ctypes.c_int * 3)(*(n // by for n, by in zip(grid, threadgroup, strict=True))),
            prod(threadgroup),
        )
        if error is not None:
            raise RuntimeError(f"{self.name}: {error.decode()}")
        return [
            mx.array(each).view(dtype).reshape(shape)
            for each, shape, dtype in zip(results, output_shapes, output_dtypes, strict=True)
        ]

    def _source(self, given: Sequence[str], results: Sequence[str]) -> str:
        """Return the source of the kernel as a function, with the loop that runs it over a grid."""
        buffers = [f"const {each}" for each in given] + list(results)
        names = [*self.inputs, *self.outputs]
        # As MLX does: the attributes that the body itself mentions.
        positions = [name for name in _POSITIONS if name in self.body]
        grouped = ("threadgroup_position_in_grid", "threadgroups_per_grid")
        parameters = [
            *(f"emulated::Buffer<{t}> {name}" for t, name in zip(buffers, names, strict=True)),
            *(f"{'uint3' if name in grouped else 'uint'} {name}" for name in positions),
        ]
        arguments = [
            *(
                f'{{({t}*)arrays[{n}], sizes[{n}], "{name}"}}'
                for n, (t, name) in enumerate(zip(buffers, names, strict=True))
            ),
            *(f"{'' if name in grouped else '(uint)'}({_POSITIONS[name]})" for name in positions),
        ]
        return "\n".join(
            [
                '#include "emulated_metal.h"',
                self.header,
                f"static void kernel({', '.join(parameters)}) {{",
                self.body,
                "}",
                "static void* const* arrays;",
                "static const size_t* sizes;",
                "static uint3 group, groups;",
                f"static void call() {{ kernel({', '.join(arguments)}); }}",
                'extern "C" const char* run(',
                "    void* const* a, const size_t* s, const int* g, int threads) {",
                "  arrays = a; sizes = s; emulated::count = threads;",
                "  groups = {(uint)g[0], (uint)g[1], (uint)g[2]};",
                "  return emulated::run(g, &group, call);",
                "}",
                "",
            ]
        )


def emulate(
    name: str, inputs: Sequence[str], outputs: Sequence[str], body: str, header: str
) -> Kernel:
    """Compile a kernel for the emulation, as `Target.compile` does."""
    return Emulated(name, inputs, outputs, body, header)


def guarded(array: np.ndarray) -> np.ndarray:
    """Return a copy that ends where the next address may not be touched, or up to 15 bytes
    before.
    """
    page = mmap.PAGESIZE
    size = -(-array.nbytes // 16) * 16
    pages = mmap.mmap(-1, -(-size // page) * page + page)
    whole = np.frombuffer(pages, np.uint8)
    if _LIBC.mprotect(ctypes.c_void_p(whole.ctypes.data + len(whole) - page), page, 0):
        raise OSError("a page could not be protected")
    end = len(whole) - page
    copy = whole[end - size : end - size + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _to_numpy(array: mx.array) -> np.ndarray:
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.array(bits))
