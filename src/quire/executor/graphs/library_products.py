"""Records products of many rows with plain matrices as calls of cuBLASLt."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from quire.device.cuda.cublas import Library, LibraryProduct, library_version
from quire.device.cuda.driver import Card
from quire.device.verified import Check, Verification, disagreement, problem_unless_verified
from quire.executor.graphs.coding_check import KernelRunner
from quire.executor.graphs.operands import UNPACKED, ProductMatrix, product_matrix
from quire.executor.graphs.places import ValueRecording
from quire.executor.graphs.recorder import Kernel
from quire.program.values import FUSED, Node, Program, Weight

log = logging.getLogger("quire.engine")

LEAST_ROWS = 128
"""Rows of the smallest graph whose products are cuBLASLt's.

It multiplies as many rows as the graph has, where own kernels skip those that a step lacks; a gate
is a kernel of its own behind it; and no kernel of such a graph starts early. Still graphs of 128
rows and more are faster with it (Llama 8B on an H100: benchmarks/results/gpu-runs.md).
"""
_TOLERANCE = 1e-2
_SHAPE = LibraryProduct(rows=192, inputs=256, outputs=320)
"""The product that is compared with MLX's."""
_GRID = 1, 1, 1
"""Stands in a kernel for the thread blocks that the library chooses."""


def open_library(runner: KernelRunner, card: Card) -> Library | None:
    """Return the library; None if it is missing or does not agree with MLX, and on cards without
    warpgroups, on which it was not measured.
    """
    version = library_version() if card.warpgroups else None
    if version is None:
        return None
    verification = Verification(Check.PRODUCTS_AGREE, ("cuBLASLt", version))
    problem = problem_unless_verified(verification, lambda: _difference(runner))
    if problem is not None:
        log.warning("cuBLASLt is not used in CUDA graphs: %s", problem)
        return None
    return Library(version, LEAST_ROWS)


def has_plain_weights(program: Program) -> bool:
    """Return whether all weights of a program are plain arrays: no codes, no experts. With the
    library no kernel of a graph starts early, which was not measured beside others.
    """
    nodes = [
        each
        for node in program.nodes
        for each in (node, *(node.arguments if node.kind == FUSED else ()))
    ]
    weights = [each for node in nodes for each in node.attributes.values()]
    return all(isinstance(each.value, mx.array) for each in weights if isinstance(each, Weight))


def _difference(runner: KernelRunner) -> str | None:
    """Return how the library's product differs from MLX's; None if close enough."""
    x, weight = (
        mx.random.normal((n, _SHAPE.inputs), key=mx.random.key(n)).astype(mx.bfloat16)
        for n in (_SHAPE.rows, _SHAPE.outputs)
    )
    y = mx.zeros((_SHAPE.rows, _SHAPE.outputs), mx.bfloat16)
    mx.eval(x, weight, y)
    arguments = tuple(map(runner.address, (x, weight, y)))
    runner.run(Kernel(_SHAPE, _GRID, 1, shared=0, arguments=arguments, after=()))
    return disagreement(y, x.astype(mx.float32) @ weight.astype(mx.float32).T, _TOLERANCE)


class LibraryRecording(ValueRecording):
    """Records products of plain matrices by cuBLASLt, in graphs of as many rows as pay for it."""

    def _is_by_library(self, nodes: Sequence[Node]) -> bool:
        """Return whether the library is to compute some products."""
        library = self._recorder.library
        if library is None or not library.serves(self._recorder.max_rows):
            return False
        if self._recorder.rows != self._recorder.inputs.rows:
            return False  # it would multiply as many rows as the graph has, of which few are wanted
        matrices = [product_matrix(each) for each in nodes]
        if any(each.weight("bias") is not None for each in nodes):
            return False
        plain = all(each.packing == UNPACKED for each in matrices)
        return plain and all(self._library_product(each).is_supported for each in matrices)

    def _library_product(self, matrix: ProductMatrix) -> LibraryProduct:
        return LibraryProduct(self._recorder.max_rows, matrix.inputs, matrix.outputs)

    def _products_by_library(self, nodes: Sequence[Node]) -> None:
        """Record products of the same rows, each into its own buffer."""
        recorder, x = self._recorder, nodes[0].inputs[0]
        reads = self._read([x])
        for node in nodes:
            matrix, y = product_matrix(node), self._written(node.outputs[0], reads)
            product = self._library_product(matrix)
            arguments = self._place(x).address, *recorder.matrix(matrix), y.address
            recorder.add(product, _GRID, 1, arguments=arguments, reads=reads, writes=[y])
