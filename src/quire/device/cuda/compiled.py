"""CUDA kernels that are compiled once per machine.

MLX 0.32.4 compiles kernels of `mx.fast.cuda_kernel` anew in each process, a second or more each.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from math import prod
from typing import NamedTuple

import mlx.core as mx

from quire.device.cuda.driver import Compiler
from quire.device.private import kernel_folder

_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.uint8: "unsigned char",
}


@cache
def compiler() -> Compiler:
    """Return the process's compiler, which caches kernels beside those of MLX in a private
    folder.
    """
    folder = kernel_folder()
    return Compiler(None if folder is None else folder / "quire")


_ahead = ContextVar("_ahead", default=False)
"""Whether kernels that are called are only compiled, see `compiling_ahead`."""


def compiling_ahead() -> AbstractContextManager[None]:
    """Compile the kernels that are called meanwhile in the background, side by side.

    They are not launched: what they return is zeros, so nothing computed meanwhile may be kept. Who
    calls them again afterwards waits for the compiler only where it has not come so far.
    """
    return _calling(ahead=True)


def launching() -> AbstractContextManager[None]:
    """Launch the kernels that are called meanwhile, within `compiling_ahead`, too."""
    return _calling(ahead=False)


@contextmanager
def _calling(*, ahead: bool) -> Iterator[None]:
    token = _ahead.set(ahead)
    try:
        yield
    finally:
        _ahead.reset(token)


class _Kind(NamedTuple):
    """Types and sizes that a kernel's source contains; there is one binary for each choice.

    Attributes:
        inputs, outputs: element types.
        ranks: numbers of inputs whose shapes the body reads, and of their dimensions.
        threads: of a thread block.
    """

    inputs: tuple[mx.Dtype, ...]
    outputs: tuple[mx.Dtype, ...]
    ranks: tuple[tuple[int, int], ...]
    threads: int


class CompiledKernel:
    """A kernel that is called like those of `mx.fast`, and compiled for each choice of types.

    Args:
        body: names inputs and outputs; `NAME_shape` is an input's shape.
        shared_memory: bytes of shared memory requested at launch.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        body: str,
        header: str,
        shared_memory: int,
    ) -> None:
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._body, self._header = body, header
        self._shared_memory = shared_memory
        self._shaped = [
            number
            for number, name in enumerate(self._inputs)
            if re.search(rf"\b{name}_shape\b", body)
        ]
        self._loaded: dict[_Kind, tuple[str, bytes]] = {}
        """Name and binary of the kernel, which MLX requires at each call and loads at the first."""

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        """Launch the kernel, with the arguments of `mx.fast.cuda_kernel`."""
        types = tuple(each.dtype for each in inputs), tuple(output_dtypes)
        ranks = {number: inputs[number].ndim for number in self._shaped}
        kind = _Kind(*types, tuple(ranks.items()), prod(threadgroup))
        if _ahead.get():
            if kind not in self._loaded:
                compiler().start([self._named(kind)[1]])
            return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]
        name, binary = self._compiled(kind)
        outs: list[mx.array] = mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=binary,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[size for number in self._shaped for size in inputs[number].shape],
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=self._shared_memory,
            ensure_row_contiguous=True,
        )
        return outs

    def _compiled(self, kind: _Kind) -> tuple[str, bytes]:
        """Return the kernel's name and binary for these types."""
        if kind not in self._loaded:
            name, text = self._named(kind)
            self._loaded[kind] = name, compiler().binary(text) + self._size_mark()
        return self._loaded[kind]

    def _named(self, kind: _Kind) -> tuple[str, str]:
        """Return the kernel's name and source for these types."""
        ranks = dict(kind.ranks)
        text = self.text(kind.inputs, kind.outputs, ranks, threads=kind.threads)
        name = "quire_" + hashlib.sha256(text.encode()).hexdigest()[:32]
        return name, text.replace(_NAME, name)

    def _size_mark(self) -> bytes:
        """Return bytes to append to a binary, so that MLX loads it once per shared memory size.

        MLX 0.32.4 requests a kernel's shared memory from the driver only at the first launch of its
        module (`JitModule::get_kernel_and_dims`), so a later launch that needs more would fail. MLX
        identifies a module by its name and all bytes of its binary (`CustomKernel::eval_gpu`). The
        driver ignores appended bytes: it gets no length (`cuModuleLoadDataEx`) and reads as far as
        the binary's header says. So nothing is compiled twice, and each size is requested exactly.
        """
        asked = self._shared_memory
        return b"" if asked <= _UNASKED_SHARED else f" shared {asked}".encode()

    def text(
        self,
        inputs: Sequence[mx.Dtype],
        outputs: Sequence[mx.Dtype],
        ranks: dict[int, int],
        threads: int,
    ) -> str:
        """Return the source, with `_NAME` in place of the kernel's name.

        Args:
            ranks: number of dimensions of the inputs whose shapes the body reads, by input number.
        """
        given = zip(self._inputs, inputs, strict=True)
        made = zip(self._outputs, outputs, strict=True)
        parameters = [f"const {_TYPES[dtype]}* {name}" for name, dtype in given]
        parameters += [f"{_TYPES[dtype]}* {name}" for name, dtype in made]
        shapes = []
        for number, rank in ranks.items():
            sizes = [f"{self._inputs[number]}_size_{axis}" for axis in range(rank)]
            parameters += [f"int {size}" for size in sizes]
            shapes.append(
                f"const int {self._inputs[number]}_shape[{rank}] = {{{', '.join(sizes)}}};"
            )
        return "\n".join(
            [
                "#include <cuda_bf16.h>",
                "#include <cuda_fp16.h>",
                self._header,
                f'extern "C" __global__ void __launch_bounds__({threads}) {_NAME}(',
                ",\n".join(parameters) + ") {",
                *shapes,
                self._body,
                "}\n",
            ]
        )


_NAME = "QUIRE_KERNEL"
_UNASKED_SHARED = 48_000
"""Most bytes of shared memory that MLX uses without asking the driver."""
