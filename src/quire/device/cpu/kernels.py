"""Finds the compiled CPU kernels and says why there are none."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import psutil

from quire.device.cpu.build import TARGET


@dataclass(frozen=True, slots=True)
class CPUKernels:
    """The kernels, ready to be called.

    Attributes:
        ops: the extension module: `product`, `expert_product`, `rms_norm`, `gate`.
        instructions: the instruction set that was chosen: "avx512", "avx2", "neon" or "scalar".
        threads: that share a kernel's work.
    """

    ops: Any
    instructions: str
    threads: int


class NoKernels(Exception):
    """The kernels are not to be had here; the message says why and what to do."""


def load_kernels(threads: int = 0) -> CPUKernels:
    """Loads the extension.

    Args:
        threads: that share a kernel's work; 0 is half of the cores, since the process that plans
            and the one that serves HTTP need some too.

    Raises:
        NoKernels: it was not built, or for another MLX.
    """
    importlib.import_module("mlx.core")  # first: the extension needs MLX's library
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
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    ops.set_threads(threads or max(1, cores // 2))
    return CPUKernels(ops, ops.instructions(), ops.threads())
