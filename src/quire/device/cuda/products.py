"""Products of packed weights on tensor cores, in bfloat16.

MLX 0.32.4 compiles its products of codes for half a minute each from 8 rows on, reads a matrix once
for each of 2 to 7 rows, and gathers experts pair by pair.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import mlx.core as mx

from quire.device.cuda import packed
from quire.device.cuda.codes import SCALES, readable
from quire.device.cuda.packed import ACTIVATIONS
from quire.device.verified import Check, SoundKernels, Verification, disagreement
from quire.device.weights import PackedWeight, Packing, random_codes

log = logging.getLogger("quire.device")

MOST_ROWS = 512
"""Most rows for which products read the codes.

With more rows, cuBLAS on the unpacked matrix is faster. But it selects a kernel for each number of
rows, which takes tens of milliseconds in a step, and MLX rebuilds a step's graphs around its
kernels.
"""
_MOST_EXPERTS = 1024
_TOLERANCE = 1e-2
_WIDE = 16_384
"""Columns of the widest matrices in the comparison with MLX, as many as models have."""
_COLUMNS_OF_EXPERTS = {2048: (1, 9, 100), 2816: (1, 9), 4096: (1, 9)}
"""Columns of experts' matrices in it, each with the numbers of rows. From 2,816 to 4,096 the
same kernel asks for more shared memory."""
_BYTES = {"mxfp4": (119, 124), "mxfp8": (119, 124), "nvfp4": (16, 40)}
"""Least and largest scales in bytes in that comparison: of 1/256 to 1/8 (E8M0), and of 1/16 to 1/2
(E4M3)."""
_UNPACKED_BY_KERNEL = "affine", 4
"""Mode and bits of the codes that a kernel unpacks."""


class Kind(NamedTuple):
    """A kind of kernels.

    Attributes:
        name: "matrices", "gated experts", "experts" (products one by one) or "gates".
        packing: of the weights; None for gates.
    """

    name: str
    packing: Packing | None = None


class Products:
    """The product kernels. Each kind that is needed is checked against MLX's products once, and is
    not used if it differs.
    """

    def __init__(self) -> None:
        self._sound = SoundKernels(log, "Products of packed weights", "MLX multiplies")

    def sound(self, kind: Kind) -> bool:
        """Return whether a kind of kernels agrees with MLX's products on this machine. The first
        call compiles some of them.
        """
        verification = Verification(Check.PRODUCTS_AGREE, tuple(kind))
        return self._sound.holds(kind, lambda: difference_of(kind), verification)

    def linear(self, x: mx.array, weight: PackedWeight) -> mx.array | None:
        """Multiply rows, `[..., in]` -> `[..., out]`. Return None if no kernel supports the
        case.
        """
        rows = x.size // x.shape[-1]
        if not 1 < rows <= MOST_ROWS or x.dtype != mx.bfloat16 or not readable(weight):
            return None
        if not self.sound(Kind("matrices", weight.packing)):
            return None
        if rows <= packed.SKINNY_ROWS and not packed.fits(packed.skinny_gemm(rows, weight)):
            return None
        y = packed.linear(x.reshape(rows, -1), weight)
        return y.reshape(*x.shape[:-1], -1)

    def gated(
        self, x: mx.array, gate: PackedWeight, up: PackedWeight, activation: str
    ) -> mx.array | None:
        """Return `activation(gate(x)) * up(x)`, `[M, in]` -> `[M, out]`; None if no kernel supports
        it.
        """
        if not packed.SKINNY_ROWS < x.shape[0] <= MOST_ROWS or x.dtype != mx.bfloat16:
            return None
        if activation not in ACTIVATIONS or gate.packing != up.packing:
            return None
        if not (readable(gate) and readable(up)):
            return None
        if not self.sound(Kind("matrices", gate.packing)):
            return None
        return packed.many_rows(x, gate, up, gelu=ACTIVATIONS[activation])

    def unpacked(self, weight: PackedWeight, dtype: mx.Dtype) -> mx.array | None:
        """Return a matrix `[out, in]` unpacked; None if no kernel supports it."""
        packing = weight.packing
        if dtype != mx.bfloat16 or not readable(weight) or not _unpacks(packing):
            return None
        return packed.unpacked(weight) if self.sound(Kind("matrices", packing)) else None

    def gate(self, activation: str, x: mx.array, y: mx.array) -> mx.array | None:
        """Return `activation(x) * y` of arrays of one shape; None if no kernel supports it."""
        if x.dtype != mx.bfloat16 or y.dtype != mx.bfloat16 or x.shape != y.shape or x.size % 8:
            return None
        if activation not in ACTIVATIONS or not self.sound(Kind("gates")):
            return None
        return packed.gated(x, y, ACTIVATIONS[activation])

    def experts(
        self,
        x: mx.array,
        chosen: mx.array,
        matrices: tuple[PackedWeight, PackedWeight, PackedWeight],
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
        gate, _, down = matrices
        if activation not in ACTIVATIONS or len({each.packing for each in matrices}) > 1:
            return None
        if x.dtype != mx.bfloat16 or not all(map(_has_experts_kernels, matrices)):
            return None
        if not self.sound(Kind("gated experts", gate.packing)):
            return None
        cuts = packed.expert_gemm(gate, gated=True), packed.expert_gemm(down)
        if not all(map(packed.fits, cuts)):
            return None
        return packed.experts(x, chosen, matrices, gelu=ACTIVATIONS[activation])

    def multiplies_experts(self, weight: PackedWeight, dtype: mx.Dtype) -> bool:
        """Return whether `packed.expert_product` multiplies rows of a type by experts' matrices."""
        if dtype != mx.bfloat16 or not _has_experts_kernels(weight):
            return False
        fits = packed.fits(packed.expert_gemm(weight))
        return fits and self.sound(Kind("experts", weight.packing))


def _has_experts_kernels(weight: PackedWeight) -> bool:
    return readable(weight) and weight.codes.shape[0] <= _MOST_EXPERTS


def _unpacks(packing: Packing) -> bool:
    return (packing.mode, packing.bits) == _UNPACKED_BY_KERNEL


# -- held against MLX's ----------------------------------------------------------------------------


def difference_of(kind: Kind) -> str | None:
    """Return how a kind of kernels differs from MLX; None if it agrees."""
    if kind.packing is None:
        return _difference_of_gates()
    if kind.name == "matrices":
        return _difference_of_matrices(kind.packing)
    return _difference_of_experts(kind.packing, gated=kind.name == "gated experts")


def _difference_of_matrices(packing: Packing) -> str | None:
    """Compare products of random weights.

    Kernels of few rows are also run on a wide matrix after a narrow one, so that the same kernel
    asks for more shared memory.
    """
    weight = _random(144, 256, packing, seed=0)
    if _unpacks(packing) and (difference := _compared(packed.unpacked(weight), _plain(weight))):
        return f"numbers of codes: {difference}"
    for rows in (2, 8, 13, 50, 65, 130):
        x = mx.random.normal((rows, 256), key=mx.random.key(rows)).astype(mx.bfloat16)
        difference = _compared(packed.linear(x, weight), x @ _plain(weight).T)
        if difference:
            return f"{rows} rows: {difference}"
    gated = packed.many_rows(x, weight, other := _random(144, 256, packing, seed=1))
    inner = [x @ _plain(each).T for each in (weight, other)]
    difference = _compared(gated, _spelled_out(inner[0], inner[1], 0))
    if difference:
        return f"gated: {difference}"
    wide = _random(144, _WIDE, packing, seed=2)
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


def _difference_of_experts(packing: Packing, *, gated: bool) -> str | None:
    compared = _difference_of_gated_experts if gated else _difference_of_expert_product
    for hidden, counts in _COLUMNS_OF_EXPERTS.items():
        for rows in counts:
            x = mx.random.normal((rows, hidden), key=mx.random.key(rows)).astype(mx.bfloat16)
            chosen = mx.argsort(mx.random.normal((rows, 8), key=mx.random.key(rows)))[:, :3]
            difference = compared(x, chosen.astype(mx.int32), packing)
            if difference:
                return f"{rows} rows of {hidden}: {difference}"
    return None


def _difference_of_gated_experts(x: mx.array, chosen: mx.array, packing: Packing) -> str | None:
    hidden = x.shape[-1]
    gate, up = (_random(128, hidden, packing, seed=seed, experts=8) for seed in (1, 2))
    down = _random(hidden, 128, packing, seed=3, experts=8)
    got = packed.experts(x, chosen, (gate, up, down), gelu=0)
    inner = _spelled_out(_by_experts(x, chosen, gate), _by_experts(x, chosen, up), 0)
    return _compared(got, _by_experts(inner.astype(mx.bfloat16), chosen, down))


def _difference_of_expert_product(x: mx.array, chosen: mx.array, packing: Packing) -> str | None:
    """Compare a product of rows, and one of a row for each pair."""
    weight = _random(144, x.shape[-1], packing, seed=1, experts=8)
    pairs = mx.random.normal((*chosen.shape, x.shape[-1]), key=mx.random.key(2)).astype(x.dtype)
    for rows in (x, pairs):
        expected = _by_experts(rows, chosen, weight)
        if difference := _compared(packed.expert_product(rows, chosen, weight), expected):
            return difference
    return None


def _by_experts(x: mx.array, chosen: mx.array, weight: PackedWeight) -> mx.array:
    """Compute `packed.expert_product` with unpacked matrices, in float32."""
    rows = x[:, None, None] if x.ndim == 2 else x[:, :, None]
    return (rows @ _plain(weight)[chosen].swapaxes(-1, -2)).squeeze(-2)


def _spelled_out(x: mx.array, y: mx.array, gelu: int) -> mx.array:
    """Return `activation(x) * y`, computed in float32."""
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    if not gelu:
        return x * mx.sigmoid(x) * y
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + mx.tanh(inner)) * y


def _random(
    outputs: int, inputs: int, packing: Packing, seed: int, experts: int = 0
) -> PackedWeight:
    """Return a matrix, or one an expert, of random codes."""
    codes_key, scales_key = mx.random.split(mx.random.key(seed))
    lead = (experts, outputs) if experts else (outputs,)
    bits, groups = packing.bits, (*lead, inputs // packing.group_size)
    shape = *lead, inputs * bits // 32
    codes = random_codes(shape, codes_key)
    dtype, _ = SCALES[packing.mode, bits]
    if dtype == mx.uint8:
        powers = mx.random.randint(*_BYTES[packing.mode], groups, key=scales_key)
        scales = powers.astype(dtype)
    else:
        scales = mx.random.uniform(0.5, 1.0, groups, key=scales_key)
        scales = (scales * (inputs**-0.5 / 2 ** (bits - 1))).astype(dtype)
    if packing.mode == "affine":
        return PackedWeight(codes, scales, -(2**bits - 1) / 2 * scales, packing=packing)
    if bits == 8:
        codes = codes & 0xBFBFBFBF  # E4M3 below 2: some of the others are no numbers
    return PackedWeight(codes, scales, biases=None, packing=packing)


def _plain(weight: PackedWeight) -> mx.array:
    """Return the matrix as float32."""
    return weight.unpacked(mx.float32)


def _compared(got: mx.array, expected: mx.array) -> str | None:
    return disagreement(got, expected, _TOLERANCE)
