"""Records products of many rows with plain matrices as calls of cuBLASLt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from quire.device.cuda.cublas import Library, LibraryProduct, library_version
from quire.device.cuda.driver import Card
from quire.device.verified import Check, Verification, disagreement, problem_unless_verified
from quire.device.weights import GatedExperts, PlainExperts
from quire.executor.graphs.attention.coding_check import KernelRunner
from quire.executor.graphs.operands import UNPACKED, product_matrix
from quire.executor.graphs.places import ValueRecording
from quire.executor.graphs.recorder import Kernel
from quire.program.values import FUSED, Node, Program, Weight

log = logging.getLogger("quire.engine")

LEAST_ROWS, LEAST_ROWS_BESIDE_EXPERTS = 64, 256
"""Rows of the smallest graph whose products are cuBLASLt's: of dense models, and of mixtures.

It multiplies as many rows as the graph has, where own kernels skip those that a step lacks; a gate
is a kernel of its own behind it; and no kernel of such a graph starts early. Still such graphs are
faster with it (Llama 8B: benchmarks/results/gpu-runs.md; gpt-oss-20b on an H200:
benchmarks/results/gpu-h200-2026-11-27-gpt-oss-graphs.json).
"""
_TOLERANCE = 1e-2
_CHECKED = tuple(LibraryProduct(192, 256, outputs=320, biased=biased) for biased in (False, True))
"""The products that are compared with MLX's."""
_GRID = 1, 1, 1
"""Stands in a kernel for the thread blocks that the library chooses."""


def open_library(runner: KernelRunner, card: Card, least_rows: int = LEAST_ROWS) -> Library | None:
    """Return the library for graphs of `least_rows` rows and more; None if it is missing or does
    not agree with MLX, and on cards without warpgroups, on which it was not measured.
    """
    version = library_version() if card.warpgroups else None
    if version is None:
        return None
    verification = Verification(Check.PRODUCTS_AGREE, ("cuBLASLt", version, _CHECKED))
    problem = problem_unless_verified(
        verification, lambda: next(filter(None, map(partial(_difference, runner), _CHECKED)), None)
    )
    if problem is not None:
        log.warning("cuBLASLt is not used in CUDA graphs: %s", problem)
        return None
    return Library(version, least_rows)


def least_library_rows(program: Program) -> int | None:
    """Return the rows of the smallest graph of a program whose products should be the library's;
    None if there is none: weights other than experts' are packed. With the library no kernel of a
    graph starts early, which was not measured beside such.
    """
    nodes = [
        each
        for node in program.nodes
        for each in (node, *(node.arguments if node.kind == FUSED else ()))
    ]
    attributes = [each for node in nodes for each in node.attributes.values()]
    weights = [each.value for each in attributes if isinstance(each, Weight)]
    dense = [each for each in weights if not isinstance(each, GatedExperts | PlainExperts)]
    if not all(isinstance(each, mx.array) for each in dense):
        return None
    return LEAST_ROWS if len(dense) == len(weights) else LEAST_ROWS_BESIDE_EXPERTS


def _difference(runner: KernelRunner, product: LibraryProduct) -> str | None:
    """Return how a product of the library differs from MLX's; None if close enough."""
    x, weight, bias = (
        mx.random.normal(shape, key=mx.random.key(n)).astype(mx.bfloat16)
        for n, shape in enumerate(
            [
                (product.rows, product.inputs),
                (product.outputs, product.inputs),
                (product.outputs,),
            ]
        )
    )
    y = mx.zeros((product.rows, product.outputs), mx.bfloat16)
    mx.eval(x, weight, bias, y)
    *given, added, result = map(runner.address, (x, weight, bias, y))
    arguments = *given, result, *[added] * product.biased
    runner.run(Kernel(product, _GRID, 1, shared=0, arguments=arguments, after=()))
    expected = x.astype(mx.float32) @ weight.astype(mx.float32).T + bias * product.biased
    return disagreement(y, expected, _TOLERANCE)


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
        biases = [each.weight("bias") for each in nodes]
        if any(each is not None and each.dtype != mx.bfloat16 for each in biases):
            return False
        plain = all(each.packing == UNPACKED for each in matrices)
        return plain and all(self._library_product(each).is_supported for each in nodes)

    def _library_product(self, node: Node) -> LibraryProduct:
        matrix, biased = product_matrix(node), node.weight("bias") is not None
        rows = self._recorder.max_rows
        return LibraryProduct(rows, matrix.inputs, matrix.outputs, biased=biased)

    def _products_by_library(self, nodes: Sequence[Node]) -> None:
        """Record products of the same rows, each into its own buffer."""
        recorder, x = self._recorder, nodes[0].inputs[0]
        reads = self._read([x])
        for node in nodes:
            matrix, y = product_matrix(node), self._written(node.outputs[0], reads)
            product, bias = self._library_product(node), node.weight("bias")
            arguments = [self._place(x).address, *recorder.matrix(matrix), y.address]
            arguments += [] if bias is None else [recorder.weight(bias)]
            recorder.add(product, _GRID, 1, arguments=arguments, reads=reads, writes=[y])
