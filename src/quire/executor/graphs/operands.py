"""Reads the operands of program nodes (matrices, gates, heads) in the forms that kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import mlx.core as mx

from quire.device.activations import Gating
from quire.device.cuda.codes import fit_tiles, unreadable
from quire.device.cuda.packed import ACTIVATIONS
from quire.device.weights import PackedWeight, Packing
from quire.program.passes import Uses
from quire.program.values import Node, Program

PARTS = frozenset({"Split", "Slice"})
UNPACKED = Packing(64, 16, "affine")
"""Packing that represents an unpacked bfloat16 matrix."""


class UnsupportedNode(Exception):
    """Raised if no kernel computes a node of the program. The message names the node and the
    reason.
    """


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that lie within the rows of a longer value, `[T, n]` or `[T, heads, n]`.

    Attributes:
        source: the longer value.
        offset, row, head: offset of the first row, stride of rows and stride of heads, in elements.
    """

    source: int
    offset: int
    row: int
    head: int

    @staticmethod
    def whole(program: Program, value: int) -> Part:
        """Return a part that covers a whole value."""
        head = program.values[value].shape[-1]
        assert isinstance(head, int), "heads have a fixed size"
        return Part(value, 0, row_width(program, value), head=head)

    @staticmethod
    def of(program: Program, uses: Uses, value: int) -> Part:
        """Follow views back from a value to the computed value that it is a part of, perhaps
        itself.

        Raises:
            UnsupportedNode: the part does not lie at equal distances.
        """
        source, offset = uses.source(value), 0
        head = program.values[value].shape[-1]
        while (maker := uses.makers.get(source)) is not None and maker.kind in PARTS:
            offset += row_offset(program, maker, source)
            whole = program.values[maker.inputs[0]].shape
            if len(whole) == 3:
                head = whole[-1]
            source = uses.source(maker.inputs[0])
        assert isinstance(head, int), "heads have a fixed size"
        return Part(source, offset, row_width(program, source), head=head)


@dataclass(frozen=True, slots=True)
class HeadOperand:
    """The origin of queries, keys or values, and the norm and rotation applied to them.

    Attributes:
        part: the part of a product's output.
    """

    part: Part
    norm: Node | None
    rotate: Node | None

    @staticmethod
    def of(program: Program, attend: Node, role: str) -> HeadOperand | None:
        """Follow an operand of attention back to its product, within the fused node's program."""
        value = attend.input(role)
        if value is None:
            return None
        uses = Uses(program)
        found: dict[str, Node] = {}
        for kind in ("rotate", "rms_norm"):
            maker = uses.maker(value)
            if maker is not None and maker.kind == kind:
                found[kind] = maker
                value = maker.inputs[0]
        part = Part.of(program, uses, value)
        return HeadOperand(part, found.get("rms_norm"), found.get("rotate"))


def row_width(program: Program, value: int) -> int:
    """Return the number of elements of one of the rows of a value `[T, ...]`."""
    return prod(n for n in program.values[value].shape[1:] if isinstance(n, int))


def row_offset(program: Program, node: Node, value: int) -> int:
    """Return the offset of a part within each row `[T, n]`, or within each head `[T, heads, n]`.

    Raises:
        UnsupportedNode: it is a part of something else.
    """
    last = len(program.values[node.inputs[0]].shape) - 1
    if node.kind == "Split":
        cuts, axis = node.arguments
        if axis == last and last in (1, 2):
            return int((0, *cuts)[node.outputs.index(value)])
    elif not any(node.arguments[0][:-1]) and set(node.arguments[2]) == {1} and last in (1, 2):
        whole, part = (program.values[id].shape for id in (node.inputs[0], value))
        if whole[:-1] == part[:-1]:
            return int(node.arguments[0][-1])
    raise UnsupportedNode("attention over parts of rows")


@dataclass(frozen=True, slots=True)
class ProductMatrix:
    """A matrix `[out, in]` in a form that product kernels read, or one for each expert,
    `[experts, out, in]`.

    Attributes:
        arrays: codes, scales and, for affine codes, biases; for an unpacked matrix, the matrix
            alone.
        packing: packing of the codes; `UNPACKED` for a bfloat16 matrix.
    """

    arrays: tuple[mx.array, ...]
    packing: Packing

    @property
    def first(self) -> ProductMatrix:
        """The first matrix of a stack."""
        return replace(self, arrays=tuple(each[0] for each in self.arrays))

    @property
    def experts(self) -> int:
        """Number of experts; 1 for a plain matrix."""
        return prod(self.arrays[0].shape[:-2])

    @property
    def outputs(self) -> int:
        return int(self.arrays[0].shape[-2])

    @property
    def inputs(self) -> int:
        words = int(self.arrays[0].shape[-1])
        return words if self.packing == UNPACKED else words * 32 // self.packing.bits

    @staticmethod
    def of(weight: mx.array | PackedWeight) -> ProductMatrix:
        """Return a matrix, or a stack with one matrix for each expert.

        Raises:
            UnsupportedNode: no kernel reads it.
        """
        if isinstance(weight, PackedWeight):
            if (problem := unreadable(weight)) is not None:
                raise UnsupportedNode(problem)
            arrays = weight.codes, weight.scales, weight.biases
            own = tuple(each for each in arrays if each is not None)
            found = ProductMatrix(own, weight.packing)
        elif weight.dtype == mx.bfloat16:
            found = ProductMatrix((weight,), UNPACKED)
        else:
            raise UnsupportedNode(f"a product with a matrix of {weight.dtype}")
        if not fit_tiles(found.outputs, found.inputs):
            raise UnsupportedNode(f"a matrix of {found.outputs} x {found.inputs}")
        return found


def product_matrix(node: Node) -> ProductMatrix:
    """Return the matrix of a product."""
    return ProductMatrix.of(node.weight("weight"))


def is_readable(node: Node) -> bool:
    """Whether tensor core kernels take a product's matrix."""
    try:
        product_matrix(node)
    except UnsupportedNode:
        return False
    return True


def is_plain(gating: Gating) -> bool:
    """Whether a product's kernel can compute a gate when it stores its result."""
    return gating.plain and gating.activation in ACTIVATIONS


def attention_heads(program: Program, owner: Sequence[int]) -> dict[int, int]:
    """Return the query heads of each layer whose keys the program reads, by layer: its own, if the
    layer is part of the program.

    Args:
        owner: for each layer, the layer whose keys it reads.
    """
    found: dict[int, int] = {}
    for node in program.nodes:
        for each in node.parts:
            if each.kind == "attend":
                layer = owner[each.attributes["layer"]]
                q, own = each.input("q"), each.input("k") is not None
                heads = 0 if q is None else program.values[q].shape[1]
                assert isinstance(heads, int), "heads are a fixed number"
                if own or layer not in found:
                    found[layer] = heads
    return found


def check_heads(q: HeadOperand, k: HeadOperand | None, v: HeadOperand | None) -> None:
    """Raise `UnsupportedNode` if no kernel prepares heads this way."""
    if k is not None and (k.rotate is None) != (q.rotate is None):
        raise UnsupportedNode("attention that rotates queries alone")
    if k is not None and (k.norm is None) != (q.norm is None):
        raise UnsupportedNode("attention that normalises queries alone")
    weighted = v is not None and v.norm is not None and v.norm.weight("weight") is not None
    if v is not None and (v.rotate is not None or weighted):
        raise UnsupportedNode("attention with weighted norms of values")
