"""Finds the compiled CPU kernels and says why there are none."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import psutil

from quire.device.cpu.build import TARGET, sources_digest


@dataclass(frozen=True, slots=True)
class CPUKernels:
    """The kernels, ready to be called.

    Attributes:
        ops: the extension module: products, attention, what pools take in, operations on rows.
        instructions: the instruction set that was chosen: "amx", "vnni", "avx512", "avx2", "neon"
            or "scalar".
        threads: that share a kernel's work.
    """

    ops: Any
    instructions: str
    threads: int


class NoKernels(Exception):
    """The kernels are not to be had here; the message says why and what to do."""


def load_kernels(threads: int = 0) -> CPUKernels:
    """The kernels; the extension is loaded and held against MLX once a process.

    Args:
        threads: that share a kernel's work; 0 is half of the cores, since the process that plans
            and the one that serves HTTP need some too.

    Raises:
        NoKernels: it was not built, or from other sources, or for another MLX, or it computes
            something else than MLX.
    """
    ops = _extension()
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if ops.threads() != (wanted := threads or max(1, cores // 2)):
        ops.set_threads(wanted)
    return CPUKernels(ops, ops.instructions(), ops.threads())


@cache
def _extension() -> Any:
    """The extension module, once it is known to compute what MLX does; raises `NoKernels`."""
    # MLX is loaded already: the extension needs its library.
    try:
        ops = importlib.import_module("quire.device.cpu._cpu")
    except ImportError as error:
        if TARGET.exists():
            raise NoKernels(f"the CPU kernels do not load: {error}") from error
        raise NoKernels(
            "the CPU kernels were not built: install a C++ compiler, then Quire again"
        ) from error
    if (mlx := version("mlx")) != ops.MLX_VERSION:
        raise NoKernels(
            f"the CPU kernels were built for MLX {ops.MLX_VERSION}, this is {mlx}: "
            "install Quire again"
        )
    if getattr(ops, "SOURCES", "") != sources_digest():
        raise NoKernels("the CPU kernels were built from other sources: install Quire again")
    # A machine may announce instructions that it does not have: AMX above all.
    if not _multiplies(ops) and not any(
        ops.use(s) and _multiplies(ops) for s in ("vnni", "avx512")
    ):
        raise NoKernels("the CPU kernels compute something else than MLX on this machine")
    return ops


def _multiplies(ops: Any) -> bool:
    """Whether products are MLX's, of few rows and of many, by floats and by codes."""
    x = mx.sin(mx.arange(20 * 64, dtype=mx.float32)).reshape(20, 64)
    weight = mx.cos(mx.arange(6 * 64, dtype=mx.float32)).reshape(6, 64)
    packed = mx.quantize(weight, group_size=64, bits=4)
    unpacked = mx.dequantize(*packed, group_size=64, bits=4)
    narrow = weight.astype(mx.bfloat16)
    pairs = [
        (ops.product(rows, *operands, **packing), rows @ matrix.T)
        for rows in (x, x[:3])
        for operands, packing, matrix in (
            ((weight,), {}, weight),
            ((narrow,), {}, narrow.astype(mx.float32)),
            (packed, {"group_size": 64, "bits": 4}, unpacked),
        )
    ]
    return all(mx.allclose(ours, theirs, atol=1e-4).item() for ours, theirs in pairs)
