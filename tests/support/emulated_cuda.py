"""Runs sources written for `mx.fast.cuda_kernel` on the CPU, as far as attention needs.

Functions that are PTX in the sources come from `emulated_cuda.h`; all else is the same text. Copies
in the background arrive as late as they may. Errors are: a misaligned address, an index outside an
array of the kernel's own, or memory behind an array or behind the shared memory that was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from quire.device.gpu_kernels import Kernel
from tests.support.emulated_metal import Emulated

_TYPES = {
    "float16_t": "__half",
    "bfloat16_t": "__nv_bfloat16",
    "uint32_t": "unsigned",
    "int64_t": "long long",
}
_HEADER = Path(__file__).with_suffix(".h")
_OWN = set(re.findall(r"^static inline \w+ (\w+)\(", _HEADER.read_text(), re.MULTILINE))


def emulate(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
    header: str,
    shared_memory: int = 0,
    aligned: int = 16,
) -> Kernel:
    """Return an emulated kernel, as `cuda_kernel` does. Arrays are aligned to `aligned` bytes."""
    assert shared_memory <= 227 << 10, "more shared memory than a multiprocessor has"
    return EmulatedCUDA(
        name, inputs, outputs, body, header, shared_memory=shared_memory, aligned=aligned
    )


@dataclass
class EmulatedCUDA(Emulated):
    """A kernel; called as those of `mx.fast`."""

    shared_memory: int = 0
    aligned: int = 16
    flags: ClassVar = (
        *Emulated.flags,
        "-Wno-parentheses",
        "-Wno-sign-compare",
        "-fsanitize=alignment,bounds",
        "-fsanitize-undefined-trap-on-error",
    )
    parts: ClassVar = (*Emulated.parts, "emulated_cuda.cpp")

    def _source(self, given: Sequence[str], results: Sequence[str]) -> str:
        types = [*(f"const {_named(each)}" for each in given), *map(_named, results)]
        names = [*self.inputs, *self.outputs]
        parameters = [f"{t}* {name}" for t, name in zip(types, names, strict=True)]
        arguments = [f"({t}*)arrays[{n}]" for n, t in enumerate(types)]
        # As MLX does: the shape of an input that the body names. Splits are the one read.
        stats = names.index("stats") if "stats" in names else 0
        if "stats_shape" in self.body:
            parameters.append("const int* stats_shape")
            arguments.append("stats_shape")
        text = re.sub(r"#include <.*>", "", self.header) + "\f" + self.body
        text = re.sub(
            r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];",
            r"auto \2 = (\1*)emulated::dynamic;",
            text,
        )
        header, body = text.split("\f")
        return "\n".join(
            [
                f"#define ALIGNED {self.aligned}",
                '#include "emulated_cuda.h"',
                "".join(_without_own(header)),
                f"static void kernel({', '.join(parameters)}) {{",
                body,
                "}",
                "static void* const* arrays;",
                "static int stats_shape[3];",
                f"static void call() {{ kernel({', '.join(arguments)}); }}",
                'extern "C" const char* run(',
                "    void* const* a, const size_t* s, const int* g, int threads) {",
                "  arrays = a; emulated::count = threads;",
                f"  stats_shape[2] = s[{stats}] / g[0] / 2;",
                "  emulated::blocks = {(uint)g[0], (uint)g[1], (uint)g[2]};",
                f"  emulated::ask_for({self.shared_memory});",
                "  return emulated::run(g, &emulated::block, call, emulated::forget);",
                "}",
                "",
            ]
        )


def _named(element: str) -> str:
    return _TYPES.get(element, element)


def _without_own(header: str) -> Iterator[str]:
    """Yield what is left of a kernel's functions: the header here has its own of some."""
    while found := re.search(
        r"^(?:template <[^>]*>\n)?__device__ __forceinline__ [\w ]*?(\w+)\((?:[^()]|\([^)]*\))*\) ",
        header,
        re.MULTILINE,
    ):
        end = depth = 0
        for end in range(found.end(), len(header)):
            depth += {"{": 1, "}": -1}.get(header[end], 0)
            if depth == 0:
                break
        yield header[: found.start()]
        if found[1] not in _OWN:
            yield header[found.start() : end + 1].replace("__device__ ", "static ")
        header = header[end + 1 :]
    yield header
