"""Loads the compiled CPU kernels, or reports why there are none."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.device.cpu.build import TARGET, sources_digest
from quire.device.cpu.cores import Cores, usable_cores


@dataclass(frozen=True, slots=True)
class CPUKernels:
    """The kernels, ready to be called.

    Attributes:
        ops: the extension module: products, attention, what pools take in, operations on rows.
        instructions: the chosen instruction set, one of `CPU_KERNELS`.
        threads: number of threads that share a kernel's work.
        why: the reason for their number, for people.
        activation_bits: see `EngineConfig.activation_bits`.
    """

    ops: Any
    instructions: str
    threads: int
    why: str = ""
    activation_bits: int = 16

    def __str__(self) -> str:
        """Return the instructions, and the threads with the reason for their number."""
        bits = "" if self.activation_bits == 16 else f", activations of {self.activation_bits} bits"
        count = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.instructions}{bits}, {count} ({self.why})"


class NoKernels(Exception):
    """Raised if the kernels are not available; the message says why and what to do."""


def load_kernels(
    threads: int = 0, instructions: str = "auto", activation_bits: int = 16
) -> CPUKernels:
    """Load the kernels. The extension is loaded and checked against MLX once a process.

    Args:
        threads: see `EngineConfig.threads`.
        instructions: see `EngineConfig.kernels`.
        activation_bits: see `EngineConfig.activation_bits`.

    Raises:
        NoKernels: it was not built, or from other sources, or for another MLX, or it computes
            something else than MLX, or `instructions` is "off".
        ModelError: this processor has not got the instructions.
    """
    if instructions == "off":
        raise NoKernels(f"the CPU kernels are switched off; {_WITHOUT}")
    ops, best = _extension()
    cores = Cores(threads, "as set") if threads else usable_cores()
    if not ops.use(best if instructions == "auto" else instructions, activation_bits):
        raise ModelError(
            f"{instructions} is not available on this processor or in this build; "
            f"available: {', '.join(ops.instruction_sets())}",
            setting="kernels",
        )
    if ops.threads() != cores.count:
        ops.set_threads(cores.count)
    return CPUKernels(
        ops, ops.instructions(), ops.threads(), why=cores.why, activation_bits=activation_bits
    )


_WITHOUT = "steps take about twice as long"
_REBUILD = "reinstall Quire, or run `just kernels` in a checkout"


@cache
def _extension() -> tuple[Any, str]:
    """Return the extension module, and its fastest instruction set that agrees with MLX.

    Raises:
        NoKernels: see `load_kernels`.
    """
    # MLX is loaded already: the extension needs its library.
    try:
        ops = importlib.import_module("quire.device.cpu._cpu")
    except ImportError as error:
        if TARGET.exists():
            raise NoKernels(f"the CPU kernels cannot be loaded: {error}; {_WITHOUT}") from error
        raise NoKernels(
            f"the CPU kernels were not built, so {_WITHOUT}: install a C++ compiler (g++ or "
            "clang++), then reinstall Quire without QUIRE_BUILD_KERNELS=off"
        ) from error
    if (mlx := version("mlx")) != ops.MLX_VERSION:
        raise NoKernels(
            f"the CPU kernels were built for MLX {ops.MLX_VERSION}, this is {mlx}, so {_WITHOUT}: "
            f"{_REBUILD}"
        )
    if getattr(ops, "SOURCES", "") != sources_digest():
        raise NoKernels(f"the CPU kernels were built from other sources, so {_WITHOUT}: {_REBUILD}")
    if not ops.instruction_sets():
        raise NoKernels(
            f"the CPU kernels were built for another processor, so {_WITHOUT}: {_REBUILD}"
        )
    # A machine may announce instructions that it does not have: AMX above all.
    for name in ops.instruction_sets():
        ops.use(name)
        if _multiplies(ops):
            return ops, name
    raise NoKernels(f"the CPU kernels do not agree with MLX on this machine, so {_WITHOUT}")


def _multiplies(ops: Any) -> bool:
    """Whether products agree with MLX's, for few and many rows, floats and codes.

    Codes are multiplied by rows that are rounded to 16 bits: here an error of about 1e-4.
    """
    x = mx.sin(mx.arange(20 * 64, dtype=mx.float32)).reshape(20, 64)
    weight = mx.cos(mx.arange(6 * 64, dtype=mx.float32)).reshape(6, 64)
    packed = mx.quantize(weight, group_size=64, bits=4)
    unpacked = mx.dequantize(*packed, group_size=64, bits=4)
    narrow = weight.astype(mx.bfloat16)
    pairs = [
        (ops.product(rows, *operands, **packing), rows @ matrix.T, 1e-3 if packing else 1e-4)
        for rows in (x, x[:3])
        for operands, packing, matrix in (
            ((weight,), {}, weight),
            ((narrow,), {}, narrow.astype(mx.float32)),
            (packed, {"group_size": 64, "bits": 4}, unpacked),
        )
    ]
    return all(mx.allclose(ours, theirs, atol=most).item() for ours, theirs, most in pairs)
