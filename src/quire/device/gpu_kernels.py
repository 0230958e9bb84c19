"""Kernels of a GPU: sources, compiled by MLX at first use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files

import mlx.core as mx

from quire.device.cuda.compiled import CompiledKernel, launching

Kernel = Callable[..., list[mx.array]]
"""A kernel made by `mx.fast`; called with `inputs`, `grid`, `threadgroup` and output shapes."""


def problem_of(check: Callable[[], str | None]) -> str | None:
    """Return the problem that a check reports or raises; None if there is none.

    Kernels that the check calls are launched, within `compiling_ahead`, too: it reads results.
    """
    try:
        with launching():
            return check()
    except Exception as error:  # a compiler's or a driver's, of any type
        return str(error)


def in_device_memory(array: mx.array) -> mx.array:
    """Return the array's elements in device memory, followed by 16 bytes of zeros: `[n]`.

    On CUDA, MLX 0.32.4 keeps arrays written by the host, and all arrays of up to 8 bytes, in memory
    shared with the host. A kernel's thread blocks that read two such numbers waited 8 to 10 us on
    an H200. A kernel's outputs are in device memory.
    """
    return mx.concatenate([array.reshape(-1), mx.zeros((16 // array.itemsize,), array.dtype)])


@cache
def kernel_text(package: str, name: str) -> str:
    """Return a file of a package's `sources/` without comments: MLX hashes the text at calls."""
    text = files(package).joinpath("sources", name).read_text()
    text = re.sub(r"\s*//.*", "", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"


def metal_kernel(
    name: str, inputs: Sequence[str], outputs: Sequence[str], body: str, header: str
) -> Kernel:
    """Return a Metal kernel."""
    kernel: Kernel = mx.fast.metal_kernel(  # type: ignore[assignment]  # its stub says object
        name=name, input_names=inputs, output_names=outputs, source=body, header=header
    )
    return kernel


def cuda_kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
    header: str,
    shared_memory: int = 0,
) -> Kernel:
    """Return a CUDA kernel, which is compiled once a machine.

    Args:
        name: name for people.
        shared_memory: bytes of shared memory requested at launch.
    """
    return CompiledKernel(
        inputs, outputs, body, header=f"// {name}\n{header}", shared_memory=shared_memory
    )
