"""How wide GEMMs, products of more rows than a skinny GEMM takes, are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.device.cuda.driver import Card

ROWS = 64
"""Rows of the left operand that a thread block multiplies."""
_WARPS = 8
_STAGES = (4, 3, 2)
_RESERVED = 1024
"""Bytes of shared memory that each thread block takes for itself."""


@dataclass(frozen=True, slots=True)
class WideGemm:
    """The constants of `wide_gemm.cuh`, and how it is launched.

    Attributes:
        inputs, outputs: columns and rows of a matrix; with `gated`, of each of the two.
        bits: of a weight: 4 or 8 as affine codes, 16 as it is.
        group_size: columns that share a scale.
        blocks: tiles of up to 64 rows: thread blocks, one above the other.
        experts: a matrix an expert.
    """

    inputs: int
    outputs: int
    bits: int
    group_size: int
    blocks: int
    card: Card
    gated: bool = False
    experts: bool = False

    source: ClassVar[str] = "wide_gemm.cuh"

    @property
    def columns(self) -> int:
        """Warps side by side. Where these are fewer, more warps share the columns of a matrix, and
        more thread blocks fill the card."""
        fitting = [n for n in (4, 2, 1) if self._shared(n, _STAGES[-1]) <= self.card.shared]
        wanted = self.card.multiprocessors
        filling = [n for n in fitting if self._across(n) * self.blocks >= wanted]
        return next(iter(filling or fitting[-1:]), 4)

    def _across(self, columns: int) -> int:
        return -(-self.outputs // (columns * (16 if self.gated else 32)))

    @property
    def width(self) -> int:
        """Outputs that a thread block makes."""
        return self.columns * (16 if self.gated else 32)

    @property
    def threads(self) -> int:
        return 32 * _WARPS

    @property
    def stages(self) -> int:
        """Steps that are copied ahead, one more than run at a time."""
        shared = self.card.shared // self.resident - _RESERVED * (self.resident - 1)
        return next((n for n in _STAGES if self._shared(self.columns, n) <= shared), _STAGES[-1])

    @property
    def resident(self) -> int:
        """Thread blocks that a multiprocessor holds at a time: two, so that one multiplies while
        the other one waits, unless their warps share columns or memory is short."""
        two = self._shared(self.columns, _STAGES[-1]) <= self.card.shared // 2 - _RESERVED
        return 2 if self.columns > 1 and two else 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory that `wide_gemm.cuh` lays out."""
        return self._shared(self.columns, self.stages)

    def _shared(self, columns: int, stages: int) -> int:
        splits = _WARPS // columns
        step = splits * (columns * 32 * self.bits // 2 + ROWS * 8) * 16
        return max(stages * step, splits * ROWS * columns * 32 * 4)

    @property
    def fits(self) -> bool:
        """Whether the card has the shared memory."""
        return self.shared <= self.card.shared

    @property
    def defines(self) -> dict[str, int]:
        """The constants of `wide_gemm.cuh`, but for those of activation and experts."""
        return {
            "BITS": self.bits,
            "GROUP": self.group_size,
            "COLUMNS": self.columns,
            "SPLITS": _WARPS // self.columns,
            "STAGES": self.stages,
            "GATED": int(self.gated),
            "EXPERTS": int(self.experts),
        }
