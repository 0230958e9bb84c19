"""How products of many rows are cut into thread blocks on Hopper, whose warpgroups multiply."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from quire.device.cuda.codes import scale_defines
from quire.device.cuda.driver import Card
from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.wgmma import multiplying
from quire.device.gpu_kernels import kernel_text

EXPERT_TILES = (16, 32, 64, 128)
"""How many pairs of row and expert a tile of experts' products may hold."""
_STAGES = (8, 6, 5, 4)
_LEAST_STEPS = 4
"""Fewest steps of 64 columns for which a thread block is worth its start."""
_FEW_PAIRS = 32
"""Most pairs of a tile of experts' gates for which two thread blocks of two warpgroups are faster
than one of four (benchmarks/results/gpu-h100-2026-11-27-uneven-experts.json).
"""
_MOST_TURNED = 32
"""Most rows of a tile whose columns the copying threads put in the order of unpacked codes: of more
rows, that takes longer than it saves (benchmarks/results/gpu-h100-2026-11-27-mxfp4-experts.json).
"""
_MOST_INTERLEAVED = 64
"""Most rows of a tile of which products read interleaved rows; larger ones were not measured."""
_FEWEST_IN_BOXES = 1024
"""Fewest rows that the card copies by itself: with fewer it gains nothing, or loses 2 to 6%
(benchmarks/results/gpu-h100-2026-11-28-boxes.json).
"""
_COSTS_OF_CODES = {
    (256, 2): (0.7, 8.4),
    (128, 4): (0.86, 18.0),
    (128, 3): (0.54, 12.3),
    (128, 2): (0.42, 10.0),
    (64, 4): (0.56, 9.4),
    (64, 3): (0.39, 8.6),
    (64, 2): (0.31, 7.0),
    (64, 1): (0.34, 6.0),
    (32, 4): (0.58, 7.2),
    (32, 3): (0.48, 5.1),
    (32, 2): (0.37, 5.0),
}
"""Microseconds that a thread block takes for 64 columns, and for its start and what it shares, on
an H100, by rows and warpgroups (benchmarks/results/gpu-runs.md). One warpgroup has half a
multiprocessor. Tiles of 256 rows took 0.8 of a microsecond alone; with 0.7 they are chosen where
whole steps are faster with them (benchmarks/results/gpu-h200-2026-11-28-cuts.json).
"""
_COSTS = {
    (256, 2): (0.87, 15.0),
    (128, 2): (0.52, 11.3),
    (64, 2): (0.48, 9.4),
    (64, 1): (0.63, 6.4),
    (32, 2): (0.45, 8.1),
}
"""Microseconds as in `_COSTS_OF_CODES`, for weights in bfloat16: more than two warpgroups gain
nothing there. One warpgroup has half a multiprocessor.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """The tiles of a product.

    Attributes:
        rows: of x in a tile.
        warpgroups: of a thread block, each of which multiplies 64 rows of W.
    """

    rows: int
    warpgroups: int


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
        sharing: whether thread blocks have equal shares of all tiles' columns, and add up what they
            have of one tile. They need memory for that: see `sums` and `flags`.
        layout: of the rows that it reads: interleaved if `takes_interleaved`; None for plain rows.
        in_boxes: whether x lies where the card can copy boxes of it by itself.
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
    sharing: bool = False
    layout: RowLayout | None = None
    in_boxes: bool = True

    source: ClassVar[str] = "warpgroup_gemm.cuh"

    @property
    def cut(self) -> Cut:
        return chosen(self)

    @property
    def resident(self) -> int | None:
        """Thread blocks that a multiprocessor should hold at a time; None if that is open."""
        return _resident(self, self.cut)

    @property
    def blocks(self) -> int:
        """Number of thread blocks along the rows, unless they share tiles."""
        return self.blocks_for(self.rows)

    def blocks_for(self, rows: int) -> int:
        """Return the number of tiles along so many rows, `rows` of the GEMM at most."""
        return -(-rows // self.cut.rows)

    def grid(self, parts: int, tiles: int = 0) -> tuple[int, int, int]:
        """Return the thread blocks for `parts` tiles of W.

        Args:
            tiles: the most tiles of experts; 0 stands for those of the rows.
        """
        if self.experts:
            return min(parts * tiles, _at_once(self, self.cut)), 1, 1
        if self.sharing:
            return self._together(self.cut, parts * self.blocks), 1, 1
        return parts, self.blocks, 1

    def _together(self, cut: Cut, tiles: int) -> int:
        """Return how many thread blocks share so many tiles of a cut."""
        steps, most = tiles * (self.inputs // 64), _at_once(self, cut)
        # The kernel multiplies steps by thread blocks in 32 bits.
        return max(1, min(most, steps // _LEAST_STEPS, (2**32 - 1) // steps))

    def sums(self, blocks: int) -> int:
        """Bytes of the sums that so many thread blocks may leave to others."""
        return blocks * self.cut.rows * 64 * self.cut.warpgroups * 4

    def flags(self, blocks: int) -> int:
        """Number of flags, 0 at first, by which so many thread blocks announce such sums."""
        return blocks * 4 * self.cut.warpgroups

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
        room = self.card.shared // (self.resident or 1)
        fitting = (n for n in _STAGES if self._shared(self.cut, n) <= room)
        return next(fitting, _STAGES[-1])

    @property
    def shared(self) -> int:
        """Bytes of shared memory that `warpgroup_gemm.cuh` lays out."""
        return self._shared(self.cut, self.stages)

    def _shared(self, cut: Cut, stages: int) -> int:
        step = (64 * cut.warpgroups * self.bits // 2 + cut.rows * 8) * 16
        return stages * step + stages * 16

    def cuts(self) -> list[Cut]:
        """Return the cuts that fit, the fastest first."""
        if self.experts:
            cuts = [Cut(self.tile, 2 if self.gated and self.tile <= _FEW_PAIRS else 4)]
        else:
            cuts = sorted((Cut(*shape) for shape in self._costs), key=self._microseconds)
        return [cut for cut in cuts if self._shared(cut, _STAGES[-1]) <= self.card.shared]

    @property
    def _costs(self) -> dict[tuple[int, int], tuple[float, float]]:
        return _COSTS if self.bits == 16 else _COSTS_OF_CODES

    def _microseconds(self, cut: Cut) -> float:
        tiles = -(-self.rows // cut.rows) * -(-self.outputs // self._width(cut))
        steps, (each, once) = self.inputs // 64, self._costs[cut.rows, cut.warpgroups]
        if not self.sharing:
            return -(-tiles // _at_once(self, cut)) * (steps * each + once)
        return -(-tiles * steps // self._together(cut, tiles)) * each + once

    @property
    def fits(self) -> bool:
        """Whether the card has such instructions and enough shared memory."""
        return self.card.warpgroups and self.shared <= self.card.shared

    @property
    def defines(self) -> dict[str, int]:
        """The constants of `warpgroup_gemm.cuh`, except those of activation and experts."""
        return {
            "BITS": self.bits,
            **scale_defines(self.mode),
            "GROUP": self.group_size,
            "ROWS": self.cut.rows,
            "WARPGROUPS": self.cut.warpgroups,
            "STAGES": self.stages,
            "GATED": int(self.gated),
            "EXPERTS": int(self.experts),
            "SHARING": int(self.sharing),
            "X_BOXES": int(copies_boxes(self)),
            "TURNS_X": int(_turns_x(self)),
            "INTERLEAVED": int(_turns_x(self) or self.layout is RowLayout.INTERLEAVED),
            "LEAST_STEPS": _LEAST_STEPS,
        }

    @property
    def functions(self) -> str:
        """The functions that `warpgroup_gemm.cuh` calls."""
        text = "".join(kernel_text(__package__, f"{name}.cuh") for name in ("warpgroup", "pairs"))
        return text + multiplying(self.cut.rows, in_registers=self.bits < 16)


@cache
def chosen(gemm: WarpgroupGemm) -> Cut:
    """Return the fastest cut; the smallest if none fits."""
    return next(iter(gemm.cuts()), Cut(64, 2))


def _resident(gemm: WarpgroupGemm, cut: Cut) -> int | None:
    """Return `resident` of a product with another cut."""
    return 2 if cut.warpgroups == 1 or (gemm.experts and cut.warpgroups == 2) else None


def _at_once(gemm: WarpgroupGemm, cut: Cut) -> int:
    """Return how many thread blocks of a cut the card runs at a time."""
    return (_resident(gemm, cut) or 1) * gemm.card.multiprocessors


def copies_boxes(gemm: WarpgroupGemm) -> bool:
    """Return whether the card copies tiles of x by itself. Then there are as many rows in memory as
    the GEMM is launched for.
    """
    shares = gemm.in_boxes and gemm.sharing and gemm.rows >= _FEWEST_IN_BOXES
    return shares and not gemm.experts and gemm.rows % gemm.cut.rows == 0


def takes_interleaved(gemm: WarpgroupGemm) -> bool:
    """Return whether a product should read interleaved rows. Those of small tiles are interleaved
    by its own threads, which is as fast.
    """
    return _unpacks_interleaved(gemm) and _MOST_TURNED < gemm.cut.rows <= _MOST_INTERLEAVED


def _turns_x(gemm: WarpgroupGemm) -> bool:
    """Return `TURNS_X` of `warpgroup_gemm.cuh`."""
    return _unpacks_interleaved(gemm) and gemm.layout is None and gemm.cut.rows <= _MOST_TURNED


def _unpacks_interleaved(gemm: WarpgroupGemm) -> bool:
    """Return whether the kernel can unpack codes for interleaved columns of x."""
    return gemm.experts and gemm.bits == 4 and gemm.mode != "affine"
