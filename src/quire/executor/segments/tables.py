"""Makes the instructions of a segment between tokens and rows."""

from __future__ import annotations

import mlx.core as mx

from quire.device.cpu.matrices import Matrices
from quire.device.weights import Matrix, PackedWeight
from quire.executor.segments.places import UnsupportedNode
from quire.executor.segments.values import SegmentValues
from quire.program.values import Node


class TableInstructions(SegmentValues):
    """Collects the instructions that look up rows of tables, and that choose tokens."""

    _matrices: Matrices

    def _embed(self, node: Node) -> None:
        table = node.weight("table")
        if isinstance(table, mx.array):
            tokens = self._whole(node.inputs[0])
            self._native.look_up(tokens, table, self._new(node.outputs[0]))
        elif isinstance(table, PackedWeight) and table.packing.mode == "affine":
            matrix = self._matrices.of(Matrix(table, bias=None))
            if matrix is None:
                raise UnsupportedNode("tables with these scales")
            tokens = self._whole(node.inputs[0])
            self._native.embed(tokens, matrix, self._new(node.outputs[0]))
        else:
            raise UnsupportedNode("tables of such codes")

    def _best(self, node: Node) -> None:
        self._native.best(self._whole(node.inputs[0]), self._new(node.outputs[0]))

    def _likeliest(self, node: Node) -> None:
        logits = self._whole(node.inputs[0])
        self._native.likeliest(logits, *map(self._new, node.outputs))

    def _join(self, node: Node) -> None:
        if node.arguments[0] != 1:
            raise UnsupportedNode("joins of rows, or of inner axes")
        parts = [self._whole(id) for id in node.inputs]
        self._native.join(parts, self._new(node.outputs[0]))
