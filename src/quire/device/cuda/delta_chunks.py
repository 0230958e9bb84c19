"""The gated delta rule in chunks of a prompt's tokens, by a kernel for tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.device.cuda.delta_rule import DeltaRule
from quire.device.cuda.driver import Card
from quire.device.gpu_kernels import kernel_text

LEAST_ROWS = 20
"""Rows of a sequence from which on a chunk takes less time than its tokens one by one
(benchmarks/results/gpu-runs.md).
"""
_CHUNK = 64
"""Tokens of a chunk."""
_PAIR_WARPS = 8
"""Warps that compute the products of keys and queries of a chunk; a multiple of eight."""


def chunk_values(rule: DeltaRule, card: Card) -> int:
    """Return how many rows of a state a thread block of `delta_chunks.cuh` has.

    Fewer of them let more multiprocessors share a sequence, but a thread block leaves no room for
    another one beside it.
    """
    few, many = 32, 64
    crowded = rule.heads * rule.value_dim // few > card.multiprocessors
    return many if crowded and rule.value_dim % many == 0 else few


@dataclass(frozen=True, slots=True)
class DeltaChunks:
    """Compile-time constants of `delta_chunks.cuh`.

    Attributes:
        values: rows of a state of a thread block, eight a warp.
        mixed_row, steps_row, betas_row: elements from one row of an operand to the next.
    """

    rule: DeltaRule
    values: int
    mixed_row: int
    steps_row: int
    betas_row: int

    def served(self, card: Card, mixed: mx.Dtype, state: mx.Dtype) -> bool:
        """Return whether the kernel supports the shape and the types of operands."""
        rule = self.rule
        fits = rule.key_dim % 64 == 0 and rule.value_dim % self.values == 0 and not rule.by_channel
        types = mixed == mx.bfloat16 and state == mx.float32
        return fits and types and self.mixed_row % 8 == 0 and self.shared <= card.shared

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a thread block."""
        rows = 3 * 2 * _CHUNK * self.rule.key_dim * 2
        tiles = _CHUNK // 16
        products = 2 * 2 * (tiles * (tiles + 1) // 2) * 2 * 512
        return rows + products + 4 * (14 * _CHUNK + 4 + tiles * 16 * 20)

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return 32 * (_PAIR_WARPS + self.values // 8)

    @property
    def blocks(self) -> int:
        """Thread blocks that share a sequence."""
        return self.rule.heads * self._parts

    @property
    def _parts(self) -> int:
        return self.rule.value_dim // self.values

    @property
    def functions(self) -> str:
        """C functions that the kernel calls."""
        names = "lanes.cuh", "parts.cuh"
        return "".join(kernel_text(__package__, name) for name in names)

    @property
    def lines(self) -> list[str]:
        """Lines of the kernel's body."""
        numbers = {"VALUE_PARTS": self._parts, "VALUES": self.values, "LEAST": LEAST_ROWS}
        numbers["PAIR_WARPS"] = _PAIR_WARPS
        return [
            self.rule.defines(self.mixed_row, self.steps_row, self.betas_row),
            *(f"#define {name} {number}" for name, number in numbers.items()),
            kernel_text(__package__, "delta_chunks.cuh"),
        ]
