"""Vectors as affine codes of 4 or 8 bits, each by one warp."""

from __future__ import annotations

import logging
from functools import cache
from math import prod

import mlx.core as mx

from quire.device.gpu_kernels import Kernel, cuda_kernel, kernel_text
from quire.device.operations import Turn, VectorCoding

log = logging.getLogger("quire.device")

_PACKAGE = "quire.device.cuda"
_THREADS = 128
_LONGEST = 512
_TOLERANCE = 1.02


class Encoder:
    """Holds its kernel against MLX's coding once in a process; if it is worse, it codes nothing."""

    def __init__(self) -> None:
        self._sound: dict[tuple[int, ...], bool] = {}

    def encode(self, x: mx.array, coding: VectorCoding) -> list[mx.array] | None:
        """Codes, scales and biases of `[..., dim]`; None where the kernel does not serve."""
        if not _serves(x, coding):
            return None
        kind = _constants(x.shape[-1], coding)
        if kind not in self._sound:
            self._sound[kind] = self._tried(coding)
        return encoded(x, coding) if self._sound[kind] else None

    def _tried(self, coding: VectorCoding) -> bool:
        try:
            difference = encoding_differs(coding)
        except Exception as error:  # a compiler's or a driver's, of any type
            difference = str(error)
        if difference is not None:
            log.warning("codes by MLX's operations: %s", difference)
        return difference is None


def _serves(x: mx.array, coding: VectorCoding) -> bool:
    turn = coding.turn
    fast = turn is None or turn.map.ndim == 1
    plain = coding.edges is None and not coding.reach and coding.bits in (4, 8)
    fits = coding.size <= _LONGEST and coding.group_size % 32 == 0
    return fast and plain and fits and x.dtype in (mx.float32, mx.bfloat16) and x.size > 0


def encoded(x: mx.array, coding: VectorCoding) -> list[mx.array]:
    """As `Encoder.encode`, where it serves."""
    *lead, dim = x.shape
    count, groups = prod(lead), coding.size // coding.group_size
    turn = coding.turn or Turn(mx.zeros(1), 1.0)
    shapes = [(*lead, n) for n in (coding.size * coding.bits // 32, groups, groups)]
    return _kernel(_constants(dim, coding))(
        inputs=[x, turn.map, _number(turn.scale), mx.array([count])],
        grid=(-(-count * 32 // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.uint32, mx.float16, mx.float16],
    )


@cache
def _number(x: float) -> mx.array:
    return mx.array([x])


_CONSTANTS = ("DIM", "SIZE", "GROUP", "BITS", "REFITS", "TURNED")


def _constants(dim: int, coding: VectorCoding) -> tuple[int, ...]:
    """What the kernel is compiled for."""
    turned = int(coding.turn is not None)
    return dim, coding.size, coding.group_size, coding.bits, coding.refits, turned


@cache
def _kernel(constants: tuple[int, ...]) -> Kernel:
    named = (*zip(_CONSTANTS, constants, strict=True), ("THREADS", _THREADS))
    header = "".join(f"#define {name} {value}\n" for name, value in named)
    return cuda_kernel(
        "quire_encode_" + "_".join(map(str, constants)),
        ["x", "signs", "scale", "count"],
        ["words", "scales", "biases"],
        kernel_text(_PACKAGE, "encode.cuh"),
        header + kernel_text(_PACKAGE, "coding.cuh"),
    )


def encoding_differs(coding: VectorCoding) -> str | None:
    """How much worse than MLX's the codes of random vectors are; None if they are as good."""
    x = mx.random.normal((9, coding.size), key=mx.random.key(0)) * 3 + 1
    turned, turn = x, coding.turn
    if turn is not None:
        turned = mx.hadamard_transform(x * turn.map, turn.scale)
    words, scales, biases = encoded(x, coding)
    coded = words, scales.astype(mx.float32), biases.astype(mx.float32)
    group, bits = coding.group_size, coding.bits
    own, usual = (
        float(mx.linalg.norm(mx.dequantize(*parts, group_size=group, bits=bits) - turned))
        for parts in (coded, mx.quantize(turned, group_size=group, bits=bits))
    )
    # Written so that a NaN is too much.
    return None if own <= _TOLERANCE * usual else f"an error of {own:.3g}, MLX's is {usual:.3g}"
