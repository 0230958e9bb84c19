"""Finds the products of one row that multiply by digits, see `digits.cuh`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from quire.device.cuda.skinny_gemm import SkinnyGemm, takes_digits
from quire.device.weights import GatedExperts, PlainExperts
from quire.executor.graphs.operands import (
    ProductMatrix,
    UnsupportedNode,
    is_readable,
    product_matrix,
)
from quire.executor.graphs.product_kernels import Gemm
from quire.executor.graphs.recorder import Recorder
from quire.program.passes import PRODUCTS, Uses
from quire.program.values import Node


def can_read_digits(gemm: Gemm) -> TypeGuard[SkinnyGemm]:
    """Return whether a product can read digits."""
    return isinstance(gemm, SkinnyGemm) and takes_digits(gemm)


def read_as_digits(recorder: Recorder, value: int, uses: Uses) -> bool:
    """Return whether a step has a product that can read the digits of a value's rows."""
    readers = (matrix for node in uses.readers(value) for matrix in _matrices(node, value, uses))
    return any(can_read_digits(recorder.gemm(each, each.outputs)) for each in readers)


def _matrices(reader: Node, value: int, uses: Uses) -> Iterator[ProductMatrix]:
    """Yield the matrices by which a node multiplies rows of a value."""
    for each in reader.parts:
        if not each.inputs or uses.source(each.inputs[0]) != value:
            continue
        if each.kind in PRODUCTS and is_readable(each):
            yield product_matrix(each)
        elif each.kind == "expert_outputs":
            experts: GatedExperts | PlainExperts = each.weight("experts")
            try:
                yield ProductMatrix.of(experts.up.weight)
            except UnsupportedNode:
                continue
