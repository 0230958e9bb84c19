"""Products of packed weights on tensor cores: affine codes of 4 bits, bfloat16.

MLX 0.32.4 reads a matrix once for each of 2 to 7 rows, and gathers experts pair by pair.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from quire.device.cuda import packed
from quire.device.cuda.packed import ACTIVATIONS, Packed
from quire.device.gpu_kernels import problem_of
from quire.device.verified import Check, Verification, disagreement, verified_kernels

log = logging.getLogger("quire.device")

MOST_ROWS = 512
"""Most rows for which products read
the codes.

With more rows, cuBLAS on the unpacked matrix is faster. But it selects a kernel for each number of
rows, which takes tens of milliseconds in a step, and MLX rebuilds a step's graphs around its
kernels.
"""
_MOST_EXPERTS = 1024
_TOLERANCE = 1e-2
_WIDE, _WIDE_OF_EXPERTS = 16_384, 4096
"""Columns of the matrices in the comparison with MLX, as many as models have."""
_GATES, _EXPERTS = "gates", "experts"
"""Kinds of kernels; others are products by weights' group size."""


class Products:
    """The product kernels. Each kind that is needed is checked against MLX's products once, and is
    not used if it differs.
    """

    def __init__(self) -> None:
        self._sound: dict[int | str, bool] = {}

    def sound(self, kind: int | str) -> bool:
        """Return whether a kind of kernels agrees with MLX's products on this machine. The first
        call compiles some of them.

        Args:
            kind: group size of the weights, `"gates"` or `"experts"`.
        """
        if kind not in self._sound:
            self._sound[kind] = _agrees(kind)
        return self._sound[kind]

    def linear(self, x: mx.array, weight: Packed) -> mx.array | None:
        """Multiply rows, `[..., in]` -> `[..., out]`. Return None if no kernel supports the
        case.
        """
        rows = x.size // x.shape[-1]
        if not 1 < rows <= MOST_ROWS or x.dtype != mx.bfloat16:
            return None
        if not (weight.readable_by_kernels and self.sound(weight.group_size)):
            return None
        if rows <= packed.SKINNY_ROWS and not packed.fits(packed.skinny_gemm(rows, weight)):
            return None
        y = packed.linear(x.reshape(rows, -1), weight)
        return y.reshape(*x.shape[:-1], -1)

    def gated(self, x: mx.array, gate: Packed, up: Packed, activation: str) -> mx.array | None:
        """Return `activation(gate(x)) * up(x)`, `[M, in]` -> `[M, out]`; None if no kernel supports
        it.
        """
        if not packed.SKINNY_ROWS < x.shape[0] <= MOST_ROWS or x.dtype != mx.bfloat16:
            return None
        if activation not in ACTIVATIONS or gate.group_size != up.group_size:
            return None
        if not (gate.readable_by_kernels and up.readable_by_kernels):
            return None
        if not self.sound(gate.group_size):
            return None
        return packed.many_rows(x, gate, up, gelu=ACTIVATIONS[activation])

    def unpacked(self, weight: Packed, dtype: mx.Dtype) -> mx.array | None:
        """Return a matrix `[out, in]` unpacked; None if no kernel supports it."""
        if dtype != mx.bfloat16 or not weight.readable_by_kernels:
            return None
        if not self.sound(weight.group_size):
            return None
        return packed.unpacked(weight)

    def gate(self, activation: str, x: mx.array, y: mx.array) -> mx.array | None:
        """Return `activation(x) * y` of arrays of one shape; None if no kernel supports it."""
        if x.dtype != mx.bfloat16 or y.dtype != mx.bfloat16 or x.shape != y.shape or x.size % 8:
            return None
        if activation not in ACTIVATIONS or not self.sound(_GATES):
            return None
        return packed.gated(x, y, ACTIVATIONS[activation])

    def experts(
        self,
        x: mx.array,
        chosen: mx.array,
        matrices: tuple[Packed, Packed, Packed],
        activation: str,
    ) -> mx.array | None:
        """Return the outputs of the chosen experts' gated MLPs.

        Args:
            x: `[T, hidden]`.
            chosen: `[T, k]`, uint32 or int32.
            matrices: gate, up and down.
            activation: activation of the gate.

        Returns:
            `[T, k, hidden]`; None if no kernel supports the case.
        """
        gate, up, down = matrices
        if x.dtype != mx.bfloat16 or activation not in ACTIVATIONS:
            return None
        if (
            not (gate.readable_by_kernels and up.readable_by_kernels and down.readable_by_kernels)
            or gate.group_size != up.group_size
        ):
            return None
        if gate.codes.shape[-2] % 64 or down.codes.shape[-2] % 128:
            return None
        if gate.codes.shape[0] > _MOST_EXPERTS or not self.sound(_EXPERTS):
            return None
        if not all(map(packed.fits, packed.expert_gemms(gate, down))):
            return None
        return packed.experts(x, chosen, matrices, gelu=ACTIVATIONS[activation])


# -- held against MLX's ----------------------------------------------------------------------------


def _agrees(kind: int | str) -> bool:
    """Return whether a kind of kernels agrees with MLX's products, here or at an earlier start."""
    verification = Verification(Check.PRODUCTS_AGREE, kind)
    if verified_kernels().holds(verification):
        return True
    difference = problem_of(_check_of(kind))
    if difference is None:
        verified_kernels().add(verification)
        return True
    what = f"groups of {kind}" if isinstance(kind, int) else kind
    log.warning(
        "kernels for packed weights are disabled, MLX multiplies them: %s: %s", what, difference
    )
    return False


def _check_of(kind: int | str) -> Callable[[], str | None]:
    """Return the function that says how a kind of kernels differs from MLX, if it does."""
    if isinstance(kind, int):
        return partial(_difference_of_products, kind)
    return {_GATES: _difference_of_gates, _EXPERTS: _difference_of_mixtures}[kind]


def _difference_of_products(group_size: int) -> str | None:
    """Compare products of random weights.

    Kernels of few rows are also run on a wide matrix after a narrow one, so that the same kernel
    asks for more shared memory.
    """
    weight = _random(144, 256, group_size, seed=0)
    difference = _compared(packed.unpacked(weight), _plain(weight))
    if difference:
        return f"numbers of codes: {difference}"
    for rows in (2, 8, 13, 50, 65, 130):
        x = mx.random.normal((rows, 256), key=mx.random.key(rows)).astype(mx.bfloat16)
        difference = _compared(packed.linear(x, weight), x @ _plain(weight).T)
        if difference:
            return f"{rows} rows: {difference}"
    gated = packed.many_rows(x, weight, other := _random(144, 256, group_size, seed=1))
    inner = [x @ _plain(each).T for each in (weight, other)]
    difference = _compared(gated, _spelled_out(inner[0], inner[1], 0))
    if difference:
        return f"gated: {difference}"
    wide = _random(144, _WIDE, group_size, seed=2)
    for rows in (2, 13, 50):
        x = mx.random.normal((rows, _WIDE), key=mx.random.key(rows)).astype(mx.bfloat16)
        difference = _compared(packed.linear(x, wide), x @ _plain(wide).T)
        if difference:
            return f"{rows} rows of {_WIDE}: {difference}"
    return None


def _difference_of_gates() -> str | None:
    for activation, gelu in ACTIVATIONS.items():
        x, y = mx.random.normal((2, 40, 24), key=mx.random.key(gelu)).astype(mx.bfloat16)
        difference = _compared(packed.gated(x, y, gelu), _spelled_out(x, y, gelu))
        if difference:
            return f"{activation}: {difference}"
    return None


def _difference_of_mixtures() -> str | None:
    for hidden, counts in ((256, (1, 9, 100)), (_WIDE_OF_EXPERTS, (1, 9))):
        for rows in counts:
            difference = _difference_of_experts(hidden, rows)
            if difference:
                return f"{rows} rows of {hidden}: {difference}"
    return None


def _difference_of_experts(hidden: int, rows: int) -> str | None:
    count = 8
    gate, up = (
        _random(64, hidden, 64, seed=1, experts=count),
        _random(64, hidden, 64, seed=2, experts=count),
    )
    down = _random(hidden, 64, 64, seed=3, experts=count)
    x = mx.random.normal((rows, hidden), key=mx.random.key(rows)).astype(mx.bfloat16)
    chosen = mx.argsort(mx.random.normal((rows, count), key=mx.random.key(rows)))[:, :3]
    chosen = chosen.astype(mx.int32)
    got = packed.experts(x, chosen, (gate, up, down), gelu=0)
    inner = [(x[:, None, None] @ _plain(m)[chosen].swapaxes(-1, -2)) for m in (gate, up)]
    product = _spelled_out(inner[0], inner[1], 0).astype(mx.bfloat16)
    expected = (product @ _plain(down)[chosen].swapaxes(-1, -2)).squeeze(-2)
    return _compared(got, expected)


def _spelled_out(x: mx.array, y: mx.array, gelu: int) -> mx.array:
    """Return `activation(x) * y`, computed in float32."""
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    if not gelu:
        return x * mx.sigmoid(x) * y
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + mx.tanh(inner)) * y


def _random(outputs: int, inputs: int, group_size: int, seed: int, experts: int = 0) -> Packed:
    shape = (experts, outputs, inputs) if experts else (outputs, inputs)
    matrix = (mx.random.normal(shape, key=mx.random.key(seed)) * inputs**-0.5).astype(mx.bfloat16)
    codes, scales, biases = mx.quantize(matrix, group_size=group_size, bits=4)
    return Packed(codes, scales, biases, group_size=group_size, bits=4)


def _plain(weight: Packed) -> mx.array:
    """Return the matrix as float32."""
    return mx.dequantize(
        weight.codes,
        weight.scales.astype(mx.float32),
        weight.biases.astype(mx.float32),
        group_size=weight.group_size,
        bits=weight.bits,
    )


def _compared(got: mx.array, expected: mx.array) -> str | None:
    return disagreement(got, expected, _TOLERANCE)
