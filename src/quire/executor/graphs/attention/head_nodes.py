"""Records nodes that work on heads outside of attention: products by head, and rotations."""

from __future__ import annotations

import mlx.core as mx

from quire.executor.graphs.operands import ProductMatrix, UnsupportedNode
from quire.executor.graphs.places import NodeKinds, buffers_of
from quire.executor.graphs.products import product_kernels
from quire.executor.graphs.rows.row_layouts import LayoutRecording
from quire.executor.graphs.source import C_TYPES, generated_source, own_text
from quire.program.values import Node

_THREADS = 128


class HeadRecording(LayoutRecording):
    """Records nodes that work on single heads."""

    @property
    def kinds(self) -> NodeKinds:
        return {**super().kinds, "by_head": self._by_head, "rotate": self._rotate}

    def _by_head(self, node: Node) -> None:
        """Record the products of heads, each with its own matrix."""
        recorder, weight = self._recorder, ProductMatrix.of(node.weight("matrices").weight)
        heads, outputs = weight.experts, weight.outputs
        x = self._rows_of(node.inputs[0])
        if x.dtype != mx.bfloat16 or x.buffer is None:
            raise UnsupportedNode(f"products by head of {x.dtype}")
        gemm = self._fitting(recorder.gemm(weight.first, outputs))
        y = self._written(node.outputs[0], [x.buffer])
        arguments = [recorder.rows, x.address, *recorder.matrix(weight), y.address]
        grid = -(-outputs // gemm.width), gemm.blocks, heads
        source = product_kernels.by_head(gemm, heads, x.row, x_head=x.head)
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=[x.buffer], writes=[y])

    def _rotate(self, node: Node) -> None:
        """Record the rotation of heads by position (RoPE)."""
        recorder, value = self._recorder, self._program.values[node.outputs[0]]
        x, cosines, sines = (self._rows_of(each) for each in node.inputs)
        heads, dim = self._width(node.outputs[0], 1), self._width(node.outputs[0], 2)
        constants = {
            "HEADS": heads,
            "DIM": dim,
            "PAIRS": cosines.row,
            "NEIGHBOURS": int(node.attributes["neighbours"]),
            "X_ROW": x.row,
            "X_HEAD": x.head,
            "THREADS": _THREADS,
        }
        parameters = [x.parameter("x"), cosines.parameter("cosines"), sines.parameter("sines")]
        parameters += [f"{C_TYPES[value.dtype]}* y"]
        body = [own_text("rotate.cuh")]
        text = generated_source(parameters, body, _THREADS, constants=constants)
        operands = x, cosines, sines
        reads = buffers_of(operands)
        y = self._written(node.outputs[0], reads)
        arguments = [recorder.rows, *(each.address for each in operands), y.address]
        grid = -(-heads * dim // 2 // _THREADS), recorder.max_rows, 1
        recorder.add(text, grid, _THREADS, arguments=arguments, reads=reads, writes=[y])
