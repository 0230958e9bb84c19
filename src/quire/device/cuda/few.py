"""How products of few rows are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_MULTIPROCESSORS = 132
"""Of the cards for which products are cut."""
_MOST_SHARED = 220 << 10


class Cut(NamedTuple):
    """A thread block makes `16 * parts` rows of a matrix; its warps share the columns.

    Attributes:
        chunk: times 64 columns, which a warp copies at a time.
        stages: chunks that a warp copies ahead.
    """

    parts: int
    warps: int
    chunk: int
    stages: int


@dataclass(frozen=True, slots=True)
class Few:
    """How `few.cuh` multiplies up to `rows` rows: what it is compiled for, and how it is launched.

    The figures are those that were fastest on an H200 (`benchmarks/gpu.md`).

    Attributes:
        outputs: of all matrices together by which a launch multiplies; with `gated`, of one of two.
        experts: a matrix an expert.
        batch_invariant: a row's sums are added up in one order, however many rows there are.
    """

    inputs: int
    outputs: int
    group_size: int
    rows: int
    gated: bool = False
    experts: bool = False
    batch_invariant: bool = False

    @property
    def tiles(self) -> int:
        """Times 8 rows in a thread block."""
        if self.experts:
            return 1
        return next(n for n in (1, 2, 4) if self.rows <= 8 * n or n == 4)

    @property
    def cut(self) -> Cut:
        wanted = self._wanted
        fits = self._shared(wanted) <= _MOST_SHARED
        return wanted if fits else Cut(1, wanted.warps, wanted.chunk, wanted.stages)

    @property
    def _wanted(self) -> Cut:
        if self.experts:
            alone = self.rows == 1 and not self.batch_invariant
            return Cut(2, 4, 2, 2) if self.gated else Cut(1, 4, 2, 3) if alone else Cut(2, 4, 1, 3)
        if self.gated:
            return self._gated
        blocks = self.outputs // 32
        parts = 1 if 2 * blocks <= _MULTIPROCESSORS else 2
        one_each = blocks <= _MULTIPROCESSORS and not self.batch_invariant
        if self.tiles > 1 or self.batch_invariant:
            return Cut(parts, 16 if one_each and self.tiles == 2 else 8, 1, 2)
        if one_each:
            return Cut(parts, 16, 2, 2)
        if 2 * blocks <= 3 * _MULTIPROCESSORS - 24:  # else few would have a second thread block
            return Cut(1, 8, 4, 2) if self.rows <= 2 else Cut(1, 8, 2, 3)
        return Cut(2, 8, 2, 3)

    @property
    def _gated(self) -> Cut:
        if self.batch_invariant:
            return Cut(1, 8, 1, 2)
        blocks = self.outputs // 16
        if self.tiles > 1:
            return Cut(2 if self.tiles == 4 and blocks > 4 * _MULTIPROCESSORS else 1, 8, 1, 2)
        return Cut(1, 8, 2, 3) if blocks <= 2 * _MULTIPROCESSORS else Cut(1, 4, 4, 2)

    @property
    def width(self) -> int:
        """Rows of a matrix that a thread block makes."""
        return 16 * self.cut.parts

    @property
    def threads(self) -> int:
        return 32 * self.cut.warps

    @property
    def blocks(self) -> int:
        """Thread blocks, one above the other, for all rows."""
        return -(-self.rows // (8 * self.tiles))

    @property
    def shared(self) -> int:
        """Bytes of shared memory that `few.cuh` lays out."""
        return self._shared(self.cut)

    def _shared(self, cut: Cut) -> int:
        matrices = cut.parts * (2 if self.gated else 1)
        groups = self.inputs // self.group_size
        ring = cut.warps * cut.stages * cut.chunk * (512 * matrices + 128 * self._columns)
        scales = 64 * matrices * (groups if groups % 8 else groups + 8)
        return max(ring + scales, 512 * cut.warps * matrices * self.tiles)

    @property
    def _columns(self) -> int:
        """Rows that a thread block keeps."""
        return min(8 * self.tiles, self.rows)

    @property
    def defines(self) -> dict[str, int]:
        """The constants of `few.cuh`, but for those of activation and experts."""
        cut = self.cut
        return {
            "TILES": self.tiles,
            "ROWS": self._columns,
            "PARTS": cut.parts,
            "WARPS": cut.warps,
            "CHUNK": cut.chunk,
            "STAGES": cut.stages,
            "WHOLE": int(self.inputs % (64 * cut.chunk) == 0),
            "EXPERTS": int(self.experts),
            "GATED": int(self.gated),
            "GROUP": self.group_size,
        }
