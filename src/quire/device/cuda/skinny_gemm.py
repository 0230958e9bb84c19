"""How skinny GEMMs, products of few rows with large matrices, are cut into thread blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

from quire.device.cuda.codes import scale_defines
from quire.device.cuda.driver import Card
from quire.device.cuda.router_cuts import SHORT_ROUTER, shares_rows, whole_row
from quire.device.cuda.row_layout import RowLayout
from quire.device.weights import FP4, FP8

_RESERVED = 1 << 10
"""Bytes of shared memory that each thread block takes beside its own."""


class Cut(NamedTuple):
    """How a product is cut: a thread block computes `16 * parts` rows of the matrix. Its warps
    share the columns.

    Attributes:
        chunk: how many times 64 columns a warp copies at a time.
        stages: chunks that a warp copies ahead.
    """

    parts: int
    warps: int
    chunk: int
    stages: int


_SHORT_COLUMN = 1024
"""Most elements of a row of an expert's matrix that two warps share."""
_VERY_FEW = 4
"""Most rows whose experts have too few thread blocks for few warps each."""
VAST = 1 << 16
"""Fewest rows of a matrix that is cut as those of output heads are."""
_SHORT_DIGITS = 3072
"""Most elements of a row that 12 warps copy whole at once, 256 each."""
_TWO_ROUNDS = 8192
"""Most elements of a row that 16 warps copy whole in two rounds."""
_SHORT_ROW = 4096
"""Most elements of a row of which a thread block keeps all."""


@dataclass(frozen=True, slots=True)
class SkinnyGemm:
    """Constants and launch of `skinny_gemm.cuh` for up to `rows` rows.

    The cuts are those that were fastest on an H200 (`benchmarks/results/gpu-runs.md`). A card with
    less shared memory takes the first narrower cut that fits.

    Attributes:
        outputs: of all matrices together by which a launch multiplies; with `gated`, of one of two.
        experts: a matrix an expert.
        batch_invariant: a row's sums are added up in one order, however many rows there are.
        bits: of a weight: 4 or 8 as codes, 16 as it is.
        mode: of codes, in MLX's terms; other than affine ones are floats.
        tile: most pairs of row and expert in a tile of experts: 1, 8, 16 or 24.
        layout: of the rows that it reads: digits if `takes_digits`; None for plain rows.
    """

    inputs: int
    outputs: int
    group_size: int
    rows: int
    card: Card
    gated: bool = False
    experts: bool = False
    batch_invariant: bool = False
    bits: int = 4
    mode: str = "affine"
    tile: int = 8
    layout: RowLayout | None = None

    source: ClassVar[str] = "skinny_gemm.cuh"
    resident: ClassVar[int | None] = None

    @property
    def keeps_row(self) -> bool:
        """Whether a thread block has all of the only row in shared memory, in pairs as codes of 4
        bits are unpacked, which takes fewer instructions.

        On an H100 experts' products and gates of few thread blocks gain by it. Others do not
        (`benchmarks/results/gpu-h100-2026-11-27-one-row.json`).
        """
        if (
            self.layout is not None
            or not _is_single(self)
            or self.bits != 4
            or self.mode != "affine"
        ):
            return False
        if self.inputs > _SHORT_ROW:
            return False
        return not self._is_odd if self.experts else self.gated and _is_narrow(self)

    @property
    def tiles(self) -> int:
        """Number of tiles of 8 rows that a thread block multiplies."""
        return _chosen(self)[0]

    @property
    def cut(self) -> Cut:
        return _chosen(self)[1]

    @property
    def fits(self) -> bool:
        """Whether the card has enough shared memory."""
        return self.shared <= self.card.shared

    @property
    def width(self) -> int:
        """Rows of a matrix that a thread block computes."""
        return 16 * self.cut.parts

    @property
    def threads(self) -> int:
        return 32 * self.cut.warps

    @property
    def blocks(self) -> int:
        """Number of thread blocks along the rows."""
        return -(-self.rows // (8 * self.tiles))

    def grid(self, parts: int, tiles: int = 0) -> tuple[int, int, int]:
        """Return the thread blocks for `parts` tiles of W.

        Args:
            tiles: the most tiles of experts; 0 stands for those of the rows.
        """
        return parts, tiles or self.blocks, 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory that `skinny_gemm.cuh` lays out."""
        return self.shared_of(self.tiles, self.cut)

    def shared_of(self, tiles: int, cut: Cut) -> int:
        """Return the bytes of shared memory with another cut."""
        matrices = cut.parts * (2 if self.gated else 1)
        columns = _columns(self, tiles)
        row = 128 if self.layout is None else self.layout.bytes
        rows = 0 if self.keeps_row else row * columns
        ring = cut.warps * cut.stages * cut.chunk * (128 * self.bits * matrices + rows)
        scales = 16 * matrices * self._row_of_scales + 2 * self.inputs * self.keeps_row
        return max(ring + scales, 512 * cut.warps * matrices * tiles)

    @property
    def _row_of_scales(self) -> int:
        """Bytes of a row's scales and biases, padded where rows would start in one bank."""
        if self.bits == 16:
            return 0
        arrays, size = {"affine": (2, 2), FP8: (1, 4), FP4: (1, 2)}.get(self.mode, (1, 1))
        row = self.inputs // self.group_size * size
        return arrays * (row if row % 16 else row + 16)

    @property
    def defines(self) -> dict[str, int]:
        """The constants of `skinny_gemm.cuh`, except those of activation and experts."""
        tiles, cut = self.tiles, self.cut
        return {
            "BITS": self.bits,
            **scale_defines(self.mode),
            "TILES": tiles,
            "ROWS": _columns(self, tiles),
            "PARTS": cut.parts,
            "WARPS": cut.warps,
            "CHUNK": cut.chunk,
            "STAGES": cut.stages,
            "WHOLE": int(self.inputs % (64 * cut.chunk) == 0),
            "EXPERTS": int(self.experts),
            "GATED": int(self.gated),
            "GROUP": self.group_size,
            "ONE_ROW": int(self.keeps_row),
            "DIGITS": int(self.layout is RowLayout.DIGITS),
        }

    def cuts(self) -> Iterator[tuple[int, Cut]]:
        """Pairs of tiles and cut, fastest first.

        With `batch_invariant`, all have the same warps and chunks.
        """
        tiles = next(n for n in (1, 2, 4) if self.rows <= 8 * n or n == 4)
        if self.experts:
            tiles = max(1, self.tile // 8)
        elif _shares_rows(self):
            tiles = 1
        while tiles:
            wanted = self._wanted(tiles)
            wanted = wanted._replace(chunk=max(1, wanted.chunk * 4 // self.bits))
            chunk, least = wanted.chunk, min(2, wanted.stages)
            while chunk:
                for stages in range(wanted.stages * wanted.chunk // chunk, least - 1, -1):
                    for parts in range(wanted.parts, 0, -1):
                        yield tiles, Cut(parts, wanted.warps, chunk, stages=stages)
                chunk = 0 if self.batch_invariant else chunk // 2
            tiles = 0 if self.experts else tiles // 2

    @property
    def _is_odd(self) -> bool:
        """Whether chunks of 128 columns of experts would leave a rest, and there are many."""
        return self.experts and self.inputs % 128 != 0 and self.inputs > 16 * 64

    def _wanted(self, tiles: int) -> Cut:
        if tiles == 1 and _is_vast(self):
            return Cut(2, 4, 4, stages=2)
        if _shares_rows(self):
            return Cut(1, *whole_row(self.inputs // 64))
        alone = _is_single(self) and not self.batch_invariant
        if alone and self.bits == 4 and (self.mode == "affine" or self._is_odd):
            return self._of_one_row()
        if self.experts and alone:
            return Cut(2, 4, 2, stages=2) if self.gated else Cut(1, 4, 2, stages=3)
        if self.experts:
            return _cut_of_experts(self, tiles)
        if self.gated:
            return self._gated(tiles)
        blocks, most = self.outputs // 32, self.card.multiprocessors
        parts = 1 if 2 * blocks <= most else 2
        one_each = blocks <= most and not self.batch_invariant
        if tiles > 1 or self.batch_invariant:
            long = parts == 1 and self.inputs >= 4096 and self.bits == 4
            wide = one_each and (tiles == 2 or long or _is_short_router(self))
            return Cut(parts, 16 if wide else 8, 1, stages=2)
        if one_each:
            return Cut(parts, 16, 2, stages=2)
        if 2 * blocks <= 3 * most - 24:  # else few would have a second thread block
            return Cut(1, 8, 4, stages=2) if self.rows <= 2 else self._of_three_blocks()
        return self._of_many_blocks()

    def _of_three_blocks(self) -> Cut:
        """Return the cut for a matrix of at most three thread blocks a multiprocessor."""
        cut, narrow = Cut(1, 8, 2, stages=3), Cut(1, 4, 2, stages=4)
        at_once = not self._up_to_eight or _fits(self, cut, 3) or not _fits(self, narrow, 3)
        return cut if at_once else narrow

    def _of_many_blocks(self) -> Cut:
        """Return the cut for a matrix of more thread blocks.

        For eight rows, a multiprocessor should hold all its thread blocks at a time, and one more,
        as those of the next kernel start early. `benchmarks/results/gpu-h100-2026-11-27-cuts.json`
        has the times.
        """
        cut, blocks, most = Cut(2, 8, 2, stages=3), self.outputs // 32, self.card.multiprocessors
        if not self._up_to_eight or 2 * blocks <= 3 * most:
            return cut
        each, shorter, narrow = (
            min(3, -(-blocks // most)),
            Cut(2, 8, 2, stages=2),
            Cut(2, 4, 2, stages=3),
        )
        wanted = (cut, each + 1), (shorter, each + 1), (cut, each), (shorter, each), (narrow, each)
        return next((one for one, many in wanted if _fits(self, one, many)), cut)

    @property
    def _up_to_eight(self) -> bool:
        """Whether it multiplies integers of 4 bits by five to eight rows."""
        return 4 < self.rows <= 8 and self.bits == 4 and self.mode == "affine"

    def _of_one_row(self) -> Cut:
        """Return the cut for one row, which waits for the slowest warp of each thread block.

        Those of `benchmarks/gpu/lone_step.py --cuts` on an H100, for the shapes of Gemma 4 26B-A4B
        and Llama 3.1 8B; of odd experts by the shape of gpt-oss-20b.
        """
        most, groups = self.card.multiprocessors, self.inputs // 64
        if self._is_odd and self.rows == 1:
            return Cut(2, 8, 1, stages=2) if self.gated else Cut(2, 8, 1, stages=3)
        if self.layout is not None:
            return _cut_of_digits(self)
        if self.experts:
            return Cut(1, 8, 2, stages=4) if self.gated else Cut(1, 4, 2, stages=4)
        if self.gated:
            return Cut(1, 8, 4, stages=3) if _is_narrow(self) else Cut(1, 4, 4, stages=2)
        if self.outputs // 32 > most:
            few = self.outputs // 16 <= 3 * most - 24
            return Cut(1, 8, 4, stages=2) if few else Cut(1, 8, 2, stages=2)
        if self.outputs // 16 > most and groups <= 48:
            return Cut(1, 4, 2, stages=4)
        if self.outputs // 16 <= most:
            return Cut(1, 16, 2, stages=2)
        return Cut(1, 16, 4, stages=2) if groups <= 128 else Cut(2, 16, 2, stages=2)

    def _gated(self, tiles: int) -> Cut:
        if self.batch_invariant:
            return Cut(1, 8, 1, stages=2)
        blocks, most = self.outputs // 16, self.card.multiprocessors
        if tiles > 1:
            return Cut(2 if tiles == 4 and blocks > 4 * most else 1, 8, 1, stages=2)
        if blocks <= 2 * most:
            return Cut(1, 8, 2, stages=3)
        if self.rows <= 2 or self.bits != 4 or self.mode != "affine":
            return Cut(1, 4, 4, stages=2)
        return Cut(1, 4, 2, stages=2 if self._up_to_eight else 3)


def _shares_rows(gemm: SkinnyGemm) -> bool:
    plain = not (gemm.experts or gemm.gated or gemm.batch_invariant)
    return plain and shares_rows(gemm.inputs, gemm.outputs, rows=gemm.rows, card=gemm.card)


def _is_single(gemm: SkinnyGemm) -> bool:
    """Whether a thread block multiplies a single row."""
    return gemm.rows == 1 or gemm.tile == 1


def takes_digits(gemm: SkinnyGemm) -> bool:
    """Return whether a product should read digits: single rows, by codes that `suit_digits`.

    Two rows of a thread block take longer by digits than by floats.
    """
    alone = _is_single(gemm) and not gemm.batch_invariant
    return alone and suit_digits(gemm.bits, gemm.mode, gemm.group_size)


def suit_digits(bits: int, mode: str, group_size: int) -> bool:
    """Return whether codes can be multiplied by digits: 4 bits in groups of at least 64."""
    return bits == 4 and mode == "affine" and group_size % 64 == 0


def _fits(gemm: SkinnyGemm, cut: Cut, blocks: int) -> bool:
    """Whether a multiprocessor holds so many thread blocks of a cut at a time."""
    room = gemm.card.shared + _RESERVED
    return blocks * (gemm.shared_of(1, cut) + _RESERVED) <= room


@cache
def _chosen(gemm: SkinnyGemm) -> tuple[int, Cut]:
    """Return the first cut that fits; the last one if none does."""
    last = None
    for last in gemm.cuts():
        if gemm.shared_of(*last) <= gemm.card.shared:
            return last
    assert last is not None, "there are cuts"
    return last


def _cut_of_experts(gemm: SkinnyGemm, tiles: int) -> Cut:
    """Return the cut for several rows. Of short columns, few warps have a part each.

    `benchmarks/results/gpu-h200-2026-11-27-skinny-experts.json` has the times, for very few rows
    `gpu-h100-2026-11-27-mxfp4-cuts.json` beside it, for tiles of 24 pairs
    `gpu-h200-2026-11-27-tiles-of-24.json`, for fewer stages `gpu-h200-2026-11-28-routing.json`.
    """
    if tiles == 1 and gemm.inputs <= _SHORT_COLUMN and gemm.inputs % 128 == 0 and not gemm.gated:
        return Cut(2 if gemm.rows <= 8 else 4, 2, 2, stages=2)
    if gemm.inputs <= _SHORT_COLUMN:
        return Cut(4, 2, 1, stages=2) if tiles == 1 else Cut(4, 1, 1, stages=4)
    if gemm.rows <= _VERY_FEW and not gemm.batch_invariant:
        return _cut_in_four(gemm, 1, chunk=2) if gemm.gated else Cut(1, 4, 4, stages=2)
    if not gemm.gated:
        if tiles > 1:
            return Cut(4, 4, 1, stages=2)
        return Cut(4, 5, 1, stages=2) if gemm._is_odd and gemm.bits == 4 else Cut(2, 4, 1, stages=3)
    if not gemm._is_odd:
        return Cut(2, 2, 2, stages=2)
    if tiles == 1:
        return Cut(2, 4, 2, stages=2)
    return Cut(4 if tiles == 2 else 2, 4, 1, stages=2)


def _cut_of_digits(gemm: SkinnyGemm) -> Cut:
    """Return the cut for digits of one row.

    Short rows of a matrix are copied whole at once, so that little of them is left to copy once x
    is there, and no shared memory is held for more: the next kernels' thread blocks then have
    theirs early. Most cuts for 26B-A4B and Llama 3.1 8B are those of searches by the time of whole
    graphs on H200s (`benchmarks/results/gpu-h200-2026-11-27-joint-cuts.json`, `-llama.json`).
    """
    most, groups, blocks = gemm.card.multiprocessors, gemm.inputs // 64, gemm.outputs // 16
    is_short = gemm.inputs <= _SHORT_DIGITS
    if gemm.experts:
        return _cut_of_expert_digits(gemm)
    if gemm.gated and not _is_narrow(gemm):
        return Cut(1, 8, 2, stages=2)
    if gemm.gated:
        return Cut(2, 8, 2, stages=3) if blocks >= most else Cut(1, 16, 4, stages=2)
    if blocks <= most:
        return Cut(1, 8, 2, stages=3)
    if blocks > 2 * most:
        wide, each = Cut(2, 8, 4, stages=2), -(-blocks // (2 * most))
        if _fits(gemm, wide, each):
            return wide
        return Cut(2, -(-groups // 4), 4, stages=1) if is_short else Cut(2, 8, 2, stages=2)
    few, chunks = 5 * blocks <= 7 * most, -(-groups // 4)
    rounds = -(-chunks // 16)
    if few and 2048 <= gemm.inputs <= _TWO_ROUNDS:
        return Cut(2, -(-chunks // rounds), 4, stages=rounds)
    if few:
        return Cut(1, 16, 4 if groups > 64 else 2, stages=2)
    if is_short:
        return Cut(1, 4, 4, stages=2)
    return Cut(2, 8, 4, stages=2) if rounds == 1 else Cut(1, -(-chunks // rounds), 4, stages=2)


def _cut_of_expert_digits(gemm: SkinnyGemm) -> Cut:
    """Return the cut for an expert's matrix: of one row, each warp copies all it reads at once.

    Of several rows there are enough thread blocks, and few warps each are faster
    (`benchmarks/results/gpu-h200-2026-11-27-single-pairs.json`).
    """
    if gemm.rows > 1 and gemm.inputs <= _SHORT_COLUMN and not gemm.gated:
        return Cut(2, -(-gemm.inputs // 256), 4, stages=1)
    if gemm.rows > 1:
        return _cut_in_four(gemm, 1, chunk=4) if gemm.gated else _cut_in_four(gemm, 2, chunk=2)
    if gemm.inputs > _SHORT_DIGITS:
        return Cut(1, 4, 4, stages=2) if gemm.gated else Cut(2, 4, 4, stages=2)
    warps = -(-gemm.inputs // 256)
    return Cut(1, warps, 4, stages=1) if gemm.gated else Cut(1, warps, 2, stages=2)


def _cut_in_four(gemm: SkinnyGemm, parts: int, chunk: int) -> Cut:
    """Return a cut whose warps copy four chunks each, at most 16 warps."""
    return Cut(parts, min(16, -(-gemm.inputs // (256 * chunk))), chunk, stages=2)


def _is_vast(gemm: SkinnyGemm) -> bool:
    """Whether it is the product of a head in integers of 4 bits. Few warps for a thread block are
    then the fastest, as the card has many at a time.

    `benchmarks/results/gpu-h100-2026-11-27-heads.json` has the times.
    """
    one = not (gemm.experts or gemm.gated or gemm.layout or gemm.batch_invariant)
    return one and gemm.outputs >= VAST and gemm.bits == 4 and gemm.mode == "affine"


def _is_short_router(gemm: SkinnyGemm) -> bool:
    """Whether it has few thread blocks and short columns. The router of 26B-A4B, of 2,816 columns,
    takes longer by 16 warps (benchmarks/results/gpu-runs.md).
    """
    few = gemm.outputs <= 4 * gemm.card.multiprocessors
    return few and gemm.inputs <= SHORT_ROUTER and gemm.card.warpgroups


def _is_narrow(gemm: SkinnyGemm) -> bool:
    """Whether each multiprocessor gets at most two tiles of 16 rows of the matrix."""
    return gemm.outputs // 16 <= 2 * gemm.card.multiprocessors


def _columns(gemm: SkinnyGemm, tiles: int) -> int:
    """Return how many of a tile's rows a thread block stores."""
    return 1 if _is_single(gemm) else min(8 * tiles, gemm.rows)
