"""How wide GEMMs, products of more rows than a skinny GEMM takes, are cut into thread blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from quire.device.cuda.codes import scale_defines
from quire.device.cuda.driver import Card

ROWS = 64
"""Rows of a tile: pairs of row and expert for experts; the least number for a plain product."""
_WARPS = 8
_STAGES = (4, 3, 2)
_COSTS = {
    (8, 1): 0.30,
    (8, 2): 0.45,
    (8, 4): 0.73,
    (8, 8): 1.21,
    (16, 2): 0.75,
    (16, 4): 1.16,
    (16, 8): 1.90,
}
"""Microseconds that a thread block takes for 64 columns on an H100, by tiles of 8 rows and warps
side by side (benchmarks/results/gpu-runs.md)."""


@dataclass(frozen=True, slots=True)
class WideGemm:
    """Constants and launch of `wide_gemm.cuh`.

    Attributes:
        inputs, outputs: columns and rows of a matrix; with `gated`, of each of the two.
        bits: of a weight: 4 or 8 as codes, 16 as it is.
        group_size: columns that share a scale.
        rows: that it is launched for; of experts `ROWS` for each tile.
        experts: a matrix an expert.
        mode: of codes, in MLX's terms; other than affine ones are floats.
    """

    inputs: int
    outputs: int
    bits: int
    group_size: int
    rows: int
    card: Card
    gated: bool = False
    experts: bool = False
    mode: str = "affine"

    source: ClassVar[str] = "wide_gemm.cuh"
    resident: ClassVar[int | None] = None

    @property
    def tiles(self) -> int:
        """Number of tiles of 8 rows that a thread block multiplies."""
        return chosen(self)[0]

    @property
    def columns(self) -> int:
        """Number of warps side by side. The fewer they are, the more warps share a matrix's
        columns.
        """
        return chosen(self)[1]

    @property
    def blocks(self) -> int:
        """Number of thread blocks along the rows."""
        return self.blocks_for(self.rows)

    def grid(self, parts: int, tiles: int = 0) -> tuple[int, int, int]:
        """Return the thread blocks for `parts` tiles of W.

        Args:
            tiles: the most tiles of experts; 0 stands for those of the rows.
        """
        return parts, tiles or self.blocks, 1

    def blocks_for(self, rows: int) -> int:
        """Return the number of thread blocks along so many rows."""
        return -(-rows // (8 * self.tiles))

    def _above(self, tiles: int) -> int:
        return -(-self.rows // (8 * tiles))

    @property
    def width(self) -> int:
        """Outputs that a thread block computes."""
        return self._width(self.columns)

    def _width(self, columns: int) -> int:
        return columns * (16 if self.gated else 32)

    @property
    def threads(self) -> int:
        return 32 * _WARPS

    @property
    def stages(self) -> int:
        """Number of steps that are copied ahead, one more than run at a time."""
        fitting = (n for n in _STAGES if self._shared(*chosen(self), n) <= self.card.shared)
        return next(fitting, _STAGES[-1])

    @property
    def shared(self) -> int:
        """Bytes of shared memory that `wide_gemm.cuh` lays out."""
        return self._shared(*chosen(self), self.stages)

    def _shared(self, tiles: int, columns: int, stages: int) -> int:
        splits = _WARPS // columns
        step = splits * (columns * 32 * self.bits // 2 + tiles * 64) * 16
        return max(stages * step, splits * 8 * tiles * columns * 32 * 4)

    def cuts(self) -> list[tuple[int, int]]:
        """Pairs of tiles and columns that fit, the fastest first.

        Thread blocks run in waves of one for each multiprocessor.
        """

        def cost(cut: tuple[int, int]) -> float:
            blocks = self._above(cut[0]) * -(-self.outputs // self._width(cut[1]))
            return -(-blocks // self.card.multiprocessors) * _COSTS[cut]

        fitting = [
            cut
            for cut in _COSTS
            if self._shared(*cut, _STAGES[-1]) <= self.card.shared
            and (cut[0] == ROWS // 8 or not self.experts)
        ]
        return sorted(fitting, key=cost)

    @property
    def fits(self) -> bool:
        """Whether the card has enough shared memory."""
        return self.shared <= self.card.shared

    @property
    def defines(self) -> dict[str, int]:
        """The constants of `wide_gemm.cuh`, except those of activation and experts."""
        return {
            "BITS": self.bits,
            **scale_defines(self.mode),
            "GROUP": self.group_size,
            "COLUMNS": self.columns,
            "SPLITS": _WARPS // self.columns,
            "STAGES": self.stages,
            "TILES": self.tiles,
            "GATED": int(self.gated),
            "EXPERTS": int(self.experts),
        }


@cache
def chosen(gemm: WideGemm) -> tuple[int, int]:
    """Return the fastest cut; the smallest if none fits."""
    return next(iter(gemm.cuts()), (8, 4))
