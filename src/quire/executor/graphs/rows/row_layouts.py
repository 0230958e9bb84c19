"""Finds the layouts in which products of a step should read rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.skinny_gemm import SkinnyGemm, takes_digits
from quire.device.cuda.warpgroup_gemm import WarpgroupGemm, takes_interleaved
from quire.device.cuda.wide_gemm import WideGemm
from quire.device.weights import GatedExperts, PlainExperts
from quire.executor.graphs.operands import (
    ProductMatrix,
    UnsupportedNode,
    is_readable,
    product_matrix,
)
from quire.executor.graphs.products.product_kernels import Gemm
from quire.executor.graphs.recorder import Recorder
from quire.program.passes import PRODUCTS, Uses
from quire.program.values import Node, Program, bound


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
        yield recorder.gemm(matrix, matrix.outputs, tile=expert_tile(recorder, program, node))


def expert_tile(recorder: Recorder, program: Program, node: Node) -> int:
    """Return the most pairs of row and expert in a tile of the products of a node's experts.

    Raises:
        UnsupportedNode: no kernel reads their matrices.
    """
    experts: GatedExperts | PlainExperts = node.weight("experts")
    top = program.values[node.inputs[1]].shape[1]
    assert isinstance(top, int), "a row has a fixed number of experts"
    return recorder.expert_tile(recorder.max_rows * top, ProductMatrix.of(experts.up.weight))
