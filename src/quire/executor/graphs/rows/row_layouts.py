"""Finds the layouts in which products of a step should read rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from quire.device.cuda import boxes
from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.skinny_gemm import SkinnyGemm, takes_digits
from quire.device.cuda.warpgroup_gemm import WarpgroupGemm, copies_boxes, takes_interleaved
from quire.device.cuda.wide_gemm import WideGemm
from quire.device.weights import GatedExperts, PlainExperts
from quire.executor.graphs.operands import (
    ProductMatrix,
    UnsupportedNode,
    is_readable,
    product_matrix,
)
from quire.executor.graphs.places import ValueRecording
from quire.executor.graphs.products.product_kernels import Gemm
from quire.executor.graphs.recorder import EXPERT_TILE, Recorder, expert_tile
from quire.executor.graphs.rows.regions import LaidOutRows
from quire.program.passes import PRODUCTS, Uses
from quire.program.values import Node, Program, bound


@dataclass(frozen=True, slots=True)
class Unscaled:
    """A norm's output before it is divided by the root of its mean square.

    Attributes:
        squares: address of the sums of squares of the norm's input, float32, one for 16 elements.
        eps: of the norm.
    """

    squares: int
    eps: float


class LayoutRecording(ValueRecording):
    """Knows the layouts in which products read rows, and which norms products have to scale."""

    def _begin(self, program: Program) -> None:
        super()._begin(program)
        self._unscaled: dict[int, Unscaled] = {}
        """Norms' outputs that their norms have not scaled."""

    def _multiplied(self, x: int, gemm: Gemm) -> list[int]:
        """Return the arguments `product_kernels.rows_of` of a product, in its layout."""
        source = self._uses.source(x)
        unscaled = self._unscaled.get(source)
        squares = [] if unscaled is None else [unscaled.squares]
        if isinstance(gemm, WideGemm) or gemm.layout is None:
            return [self._place(x).address, *squares]
        return [self._laid_out[source, gemm.layout], *squares]

    def _eps(self, x: int) -> float | None:
        """Return the epsilon of the norm that has not scaled a value; None if it is scaled."""
        unscaled = self._unscaled.get(self._uses.source(x))
        return None if unscaled is None else unscaled.eps

    def _wanted_layouts(self, node: Node) -> LaidOutRows:
        """Return the outputs of a region of rows that products should read in another layout."""
        wanted = {value: self._wanted_layout(value) for value in node.outputs}
        layouts = {value: layout for value, layout in wanted.items() if layout is not None}
        offsets = {value: self._bytes(self._program.values[value]) for value in layouts}
        return LaidOutRows(layouts, offsets)

    def _wanted_layout(
        self, value: int, written: Collection[RowLayout] = tuple(RowLayout)
    ) -> RowLayout | None:
        """Return the layout in which products should read a value's rows; None for plain rows.

        Args:
            written: layouts that the value's kernel can write.
        """
        if value in self._targets:
            return None
        wanted = layouts_for(self._recorder, self._program, uses=self._uses, value=value)
        return next((each for each in written if each in wanted), None)

    def _fitting(self, gemm: Gemm, x: int | None = None) -> Gemm:
        """Return a product that reads the rows of `x` in its layout, if they were written so, and
        in boxes only if the card can copy these by itself.

        Raises:
            UnsupportedNode: the card has too little shared memory for it.
        """
        layout = layout_for(gemm)
        if x is not None and layout and (self._uses.source(x), layout) in self._laid_out:
            gemm = with_layout(gemm, layout)
        if isinstance(gemm, WarpgroupGemm) and copies_boxes(gemm) and x is not None:
            gemm = replace(gemm, in_boxes=boxes.reaches(self._place(x).address))
        if not gemm.fits:
            shared = self._recorder.card.shared
            raise UnsupportedNode(
                f"{gemm.inputs} columns do not fit {shared} bytes of shared memory"
            )
        return gemm


def layout_for(gemm: Gemm) -> RowLayout | None:
    """Return the layout in which a product should read rows; None for plain rows."""
    if isinstance(gemm, SkinnyGemm) and takes_digits(gemm):
        return RowLayout.DIGITS
    if isinstance(gemm, WarpgroupGemm) and takes_interleaved(gemm):
        return RowLayout.INTERLEAVED
    return None


def with_layout(gemm: Gemm, layout: RowLayout | None) -> Gemm:
    """Return a product that reads rows in a layout from `layout_for`."""
    return gemm if isinstance(gemm, WideGemm) else replace(gemm, layout=layout)


def layouts_for(recorder: Recorder, program: Program, *, uses: Uses, value: int) -> set[RowLayout]:
    """Return the layouts in which products of a step should read a value's rows."""
    multiplying = [
        each
        for node in uses.readers(value)
        for each in node.parts
        if each.inputs and uses.source(each.inputs[0]) == value
    ]
    found = {
        layout_for(gemm) for each in multiplying for gemm in products_of(recorder, program, each)
    }
    return {each for each in found if each is not None}


def products_of(recorder: Recorder, program: Program, node: Node) -> Iterator[Gemm]:
    """Yield the product by which a node multiplies its first input, if kernels compute that."""
    if node.kind in PRODUCTS and is_readable(node):
        matrix = product_matrix(node)
        yield recorder.gemm(matrix, matrix.outputs)
    elif node.kind == "expert_outputs":
        experts: GatedExperts | PlainExperts = node.weight("experts")
        try:
            matrix = ProductMatrix.of(experts.up.weight)
        except UnsupportedNode:
            return
        rows = program.values[node.inputs[0]].shape[0]
        if bound((rows,), dict.fromkeys(program.symbols, 1)) != (1,):
            return  # weighted inputs: several for a row of the step, where layouts hold one
        yield recorder.gemm(matrix, matrix.outputs, tile=tile_of_experts(recorder, program, node))


def tile_of_experts(recorder: Recorder, program: Program, node: Node) -> int:
    """Return the most pairs of row and expert in a tile of the products of a node's experts.

    Raises:
        UnsupportedNode: no kernel reads their matrices.
    """
    experts: GatedExperts | PlainExperts = node.weight("experts")
    first, top = ProductMatrix.of(experts.up.weight), program.values[node.inputs[1]].shape[1]
    assert isinstance(top, int), "a row has a fixed number of experts"
    if recorder.batch_invariant:
        return EXPERT_TILE
    pairs = recorder.max_rows * top
    return expert_tile(recorder.card, pairs, first.experts, packing=first.packing)
