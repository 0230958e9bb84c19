"""How products of many rows are cut into thread blocks on Hopper, whose warpgroups multiply."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from quire.device.cuda.driver import Card
from quire.device.cuda.wgmma import multiplying
from quire.device.gpu_kernels import kernel_text

EXPERT_TILES = (16, 32, 64, 128)
"""How many pairs of row and expert a tile of experts' products may hold."""
_STAGES, _SPLITS = (8, 6, 5, 4), (1, 2, 4, 8)
_OVERHEAD = 4.0
"""Microseconds that thread blocks take to add up what they share."""
_COSTS = {(256, 2): 0.82, (128, 4): 0.92, (64, 4): 0.66, (128, 2): 0.56, (64, 2): 0.43}
"""Microseconds that a thread block takes for 64 columns on an H100, by rows and warpgroups
(benchmarks/gpu.md).
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut a product.

    Attributes:
        rows: of x in a thread block.
        warpgroups: of a thread block, each of which multiplies 64 rows of W.
        splits: thread blocks that share the columns.
    """

    rows: int
    warpgroups: int
    splits: int


@dataclass(frozen=True, slots=True)
class WarpgroupGemm:
    """Constants and launch of `warpgroup_gemm.cuh`.

    Attributes:
        inputs, outputs: columns and rows of a matrix; with `gated`, of each of the two.
        bits: of a weight: 4 or 8 as codes, 16 as it is.
        group_size: columns that share a scale.
        rows: that it is launched for; of experts `tile` for each tile.
        experts: a matrix an expert.
        mode: of codes, in MLX's terms; other than affine ones are floats.
        tile: pairs of row and expert in a tile of experts, one of `EXPERT_TILES`.
        max_splits: the most thread blocks of a cluster; 1 without clusters.
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
    tile: int = 64
    max_splits: int = 8

    source: ClassVar[str] = "warpgroup_gemm.cuh"
    resident: ClassVar[int | None] = None

    @property
    def cut(self) -> Cut:
        return chosen(self)

    @property
    def cluster(self) -> int:
        """Number of neighbouring thread blocks along the rows that share one tile."""
        return self.cut.splits

    @property
    def blocks(self) -> int:
        """Number of thread blocks along the rows."""
        return self.blocks_for(self.rows)

    def blocks_for(self, rows: int) -> int:
        """Return the number of thread blocks along so many rows, `rows` of the GEMM at most."""
        return -(-rows // self.cut.rows) * self.cut.splits

    @property
    def width(self) -> int:
        """Outputs that a thread block computes."""
        return self._width(self.cut)

    def _width(self, cut: Cut) -> int:
        return cut.warpgroups * (32 if self.gated else 64)

    @property
    def threads(self) -> int:
        return 128 * (self.cut.warpgroups + 1)

    @property
    def stages(self) -> int:
        """Number of steps of 64 columns in shared memory."""
        fitting = (n for n in _STAGES if self._shared(self.cut, n) <= self.card.shared)
        return next(fitting, _STAGES[-1])

    @property
    def shared(self) -> int:
        """Bytes of shared memory that `warpgroup_gemm.cuh` lays out."""
        return self._shared(self.cut, self.stages)

    def _shared(self, cut: Cut, stages: int) -> int:
        w_rows = 64 * cut.warpgroups
        step = (w_rows * self.bits // 2 + cut.rows * 8) * 16
        return max(stages * step, cut.rows * (w_rows + 4) * 4) + stages * 16

    def cuts(self) -> list[Cut]:
        """Return the cuts that fit, the fastest first.

        Thread blocks run in waves of one for each multiprocessor. Experts have so many tiles that
        none is split.
        """
        shapes = [(self.tile, 4)] if self.experts else list(_COSTS)
        most = 1 if self.experts else self.max_splits
        found = [Cut(*shape, splits) for shape in shapes for splits in _SPLITS if splits <= most]
        fitting = [cut for cut in found if self._shared(cut, _STAGES[-1]) <= self.card.shared]
        return fitting if self.experts else sorted(fitting, key=self._microseconds)

    def _microseconds(self, cut: Cut) -> float:
        tiles = -(-self.rows // cut.rows) * -(-self.outputs // self._width(cut))
        # Not all multiprocessors are in groups from which clusters of more than two are made.
        most = self.card.multiprocessors * (9 if cut.splits > 2 else 10) // 10
        waves = -(-tiles // (most // cut.splits))
        steps = -(-self.inputs // 64 // cut.splits)
        return waves * (steps * _COSTS[cut.rows, cut.warpgroups] + _OVERHEAD * (cut.splits > 1))

    @property
    def fits(self) -> bool:
        """Whether the card has such instructions and enough shared memory."""
        return self.card.warpgroups and self.shared <= self.card.shared

    @property
    def defines(self) -> dict[str, int]:
        """The constants of `warpgroup_gemm.cuh`, except those of activation and experts."""
        return {
            "BITS": self.bits,
            "FLOATS": int(self.mode != "affine"),
            "GROUP": self.group_size,
            "ROWS": self.cut.rows,
            "WARPGROUPS": self.cut.warpgroups,
            "SPLITS": self.cut.splits,
            "STAGES": self.stages,
            "GATED": int(self.gated),
            "EXPERTS": int(self.experts),
        }

    @property
    def functions(self) -> str:
        """The functions that `warpgroup_gemm.cuh` calls."""
        text = "".join(kernel_text(__package__, f"{name}.cuh") for name in ("warpgroup", "pairs"))
        return text + multiplying(self.cut.rows, in_registers=self.bits < 16)


@cache
def chosen(gemm: WarpgroupGemm) -> Cut:
    """Return the fastest cut; the smallest if none fits."""
    return next(iter(gemm.cuts()), Cut(64, 2, 1))
