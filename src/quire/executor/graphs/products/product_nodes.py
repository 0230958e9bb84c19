"""Records products of a step's rows with matrices, and the gates that join them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.weights import Packing
from quire.executor.graphs.operands import (
    Part,
    ProductMatrix,
    UnsupportedNode,
    is_plain,
    is_readable,
    product_matrix,
)
from quire.executor.graphs.places import NodeKinds
from quire.executor.graphs.products import product_kernels
from quire.executor.graphs.products.ended_products import EndedRecording
from quire.executor.graphs.products.library_products import LibraryRecording
from quire.executor.graphs.products.plain_products import plain_product_kernel
from quire.executor.graphs.products.product_kernels import Gemm
from quire.executor.graphs.ranks.exchange import ExchangeRecording
from quire.executor.graphs.recorder import Buffer
from quire.executor.graphs.rows.regions import row_kernel
from quire.program.passes import PRODUCTS, Uses
from quire.program.values import Node


class ProductRecording(EndedRecording, ExchangeRecording, LibraryRecording):
    """Records products. Some send their rows to other ranks, a library computes some, and some
    compute what follows them.
    """

    @property
    def kinds(self) -> NodeKinds:
        products = dict.fromkeys(("linear", "packed_linear", "products"), self._products)
        gates = {"gated products": self._gated, "gated product": self._gated_product}
        return {**super().kinds, **products, **gates}

    def _products(self, node: Node) -> None:
        """Record products of the same rows with several matrices, each into its own buffer."""
        if self._ends_with_norm(node) or self._ends_with_heads(node):
            return
        nodes = [each for each in (node.arguments or [node]) if each.kind in PRODUCTS]
        for each in nodes:
            if not is_readable(each):
                self._generate(plain_product_kernel, each)
        alike: dict[Packing, list[tuple[Node, ProductMatrix]]] = {}
        for each in filter(is_readable, nodes):
            matrix = product_matrix(each)
            alike.setdefault(matrix.packing, []).append((each, matrix))
        for found in alike.values():
            own = [each for each, _ in found]
            if self._is_by_library(own):
                self._products_by_library(own)
            else:
                self._products_alike(own, [matrix for _, matrix in found])

    def _products_alike(self, nodes: Sequence[Node], weights: Sequence[ProductMatrix]) -> None:
        biases = [each.weight("bias") for each in nodes]
        recorder, x = self._recorder, nodes[0].inputs[0]
        reads = self._read([x])
        offsets = any(each is not None for each in biases)
        outputs = tuple(each.outputs for each in weights)
        gemm = self._fitting(recorder.gemm(weights[0], sum(outputs), sharing=True), x)
        arguments, writes = [recorder.rows, *self._multiplied(x, gemm)], list[Buffer]()
        for each, weight, bias in zip(nodes, weights, biases, strict=True):
            writes.append(self._written(each.outputs[0], reads))
            arguments += [*recorder.matrix(weight), writes[-1].address]
            arguments += [recorder.optional(bias)] * offsets
        inboxes = None
        if len(nodes) == 1 and isinstance(gemm, SkinnyGemm):
            inboxes = self._sending(nodes[0])
        if inboxes is not None:
            arguments.append(recorder.address(inboxes.table))
            reads = [*reads, recorder.exchanged]
        grid = gemm.grid(sum(product_kernels.parts(gemm, outputs)))
        source = product_kernels.linear(
            gemm, outputs, offsets=offsets, inboxes=inboxes, eps=self._eps(x)
        )
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=reads, writes=writes)

    def _gated(self, node: Node) -> None:
        gate, up, join = _ordered(node)
        if not _gates_products(gate, up, join) or self._is_by_library([gate, up]):
            self._products(node)
            self._generate(row_kernel, join)
            for each in (gate, up):
                self._recorder.release(self._buffer(each.outputs[0]))
            return
        weights, recorder = [product_matrix(gate), product_matrix(up)], self._recorder
        activation = join.attributes["gating"].activation
        reads = self._read(gate.inputs)
        outputs, (x, *_) = weights[0].outputs, gate.inputs
        gemm = self._fitting(recorder.gemm(weights[0], outputs, gated=True, sharing=True), x)
        (output,) = join.outputs
        layout = self._wanted_layout(output, [RowLayout.DIGITS])
        y = self._written(output, reads, layout=layout)
        arguments = [recorder.rows, *self._multiplied(x, gemm)]
        arguments += [*recorder.matrix(weights[0]), *recorder.matrix(weights[1]), y.address]
        arguments += [self._laid_out[output, layout]] if layout else []
        grid = gemm.grid(-(-outputs // gemm.width))
        source = product_kernels.gated(
            gemm, activation, stores_digits=layout is not None, eps=self._eps(x)
        )
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=reads, writes=[y])

    def _gated_product(self, node: Node) -> None:
        """Record a product and its gate, which multiplies a part of another value."""
        product = next(each for each in node.arguments if each.kind in PRODUCTS)
        join = next(each for each in node.arguments if each.kind == "gated")
        other = self._multiplied_part(node, join)
        recorder, x = self._recorder, product.inputs[0]
        gemm: Gemm | None = None
        if other is not None and _gates_products(product, product, join):
            weight = product_matrix(product)
            gemm = self._fitting(recorder.gemm(weight, weight.outputs, sharing=True), x)
        if other is None or not isinstance(gemm, SkinnyGemm):
            self._products(product)
            rest = tuple(each for each in node.arguments if each is not product)
            self._generate(row_kernel, replace(node, arguments=rest))
            recorder.release(self._buffer(product.outputs[0]))
            return
        reads = self._read([x, other.source])
        y = self._written(join.outputs[0], reads)
        address = self._place(other.source).address + 2 * other.offset
        arguments = [recorder.rows, *self._multiplied(x, gemm), *recorder.matrix(weight)]
        arguments += [y.address, address]
        activation = join.attributes["gating"].activation
        source = product_kernels.gated(gemm, activation, others=other.row, eps=self._eps(x))
        grid = gemm.grid(-(-weight.outputs // gemm.width))
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=reads, writes=[y])

    def _multiplied_part(self, node: Node, join: Node) -> Part | None:
        """Return the part of a value that a gate multiplies; None if kernels cannot read it."""
        inner, value = self._program.inside(node), join.input("y")
        assert value is not None, "gates multiply a value"
        try:
            return Part.of(inner, Uses(inner), value)
        except UnsupportedNode:
            return None


def _gates_products(gate: Node, up: Node, join: Node) -> bool:
    """Whether one kernel can compute both products and their gate."""
    both = gate, up
    biased = any(each.weight("bias") is not None for each in both)
    if biased or not is_plain(join.attributes["gating"]) or not all(map(is_readable, both)):
        return False
    return len({each.packing for each in map(product_matrix, both)}) == 1


def _ordered(node: Node) -> tuple[Node, Node, Node]:
    """Return the product of the gate, the product of the value, and the node that joins them."""
    join = next(each for each in node.arguments if each.kind == "gated")
    made = {each.outputs[0]: each for each in node.arguments}
    return made[join.inputs[0]], made[join.inputs[1]], join
