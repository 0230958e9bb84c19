"""Generated kernels of sums within rows compute what MLX does, on an emulated card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.executor.graphs.rows.small_sums import reduced_kernel, small_product_kernel
from quire.executor.graphs.source import NotGenerated
from quire.program.values import Form, Node, Program, Size, Value
from tests.executor.graphs.emulated import difference
from tests.support.emulated_metal import why_not
from tests.support.nvrtc import assert_compiles

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

T = Form(0, (("T", 1),))
SUM, MAXIMUM = 2, 5


def computed(
    kind: str,
    shapes: list[tuple[Size, ...]],
    out: tuple[Size, ...],
    arguments: tuple[Any, ...] = (),
    dtype: mx.Dtype = mx.bfloat16,
) -> tuple[Program, Node]:
    values = {number: Value(shape, dtype) for number, shape in enumerate([*shapes, out])}
    inputs = tuple(range(len(shapes)))
    node = Node(kind, inputs, (len(shapes),), (), arguments)
    return Program(("T",), {f"in{n}": n for n in inputs}, {}, values, (node,), node.outputs), node


@pytest.mark.parametrize(
    ("shape", "kind", "axis", "dtype"),
    [
        ((T, 300), SUM, 1, mx.bfloat16),
        ((T, 3, 40), MAXIMUM, 2, mx.float32),
        ((T, 4, 70), SUM, 1, mx.bfloat16),
        ((T, 2, 5, 3), SUM, 2, mx.float32),
    ],
    ids=str,
)
def test_axes_are_reduced(shape: tuple[Size, ...], kind: int, axis: int, dtype: mx.Dtype) -> None:
    out = (*shape[:axis], 1, *shape[axis + 1 :])
    program, node = computed("Reduce", [shape], out, (kind, (axis,)), dtype)
    for rows in (1, 5):
        # MLX's sums on a CPU are in the type of their terms.
        bound = 2e-2 if dtype == mx.bfloat16 else 1e-6
        assert difference(program, node, reduced_kernel(program, node), rows) < bound


def test_each_row_has_a_product_of_its_own() -> None:
    program, node = computed("Matmul", [(T, 3, 4), (T, 4, 70)], (T, 3, 70))
    for rows in (1, 5):
        assert difference(program, node, small_product_kernel(program, node), rows) < 1e-2


def test_sums_over_rows_and_long_products_are_refused() -> None:
    program, node = computed("Reduce", [(T, 8)], (1, 8), (SUM, (0,)))
    with pytest.raises(NotGenerated, match="over rows"):
        reduced_kernel(program, node)
    program, node = computed("Matmul", [(T, 3, 65), (T, 65, 8)], (T, 3, 8))
    with pytest.raises(NotGenerated, match="sums of 65"):
        small_product_kernel(program, node)


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    program, node = computed("Reduce", [(T, 300)], (T, 1), (MAXIMUM, (1,)))
    assert_compiles(reduced_kernel(program, node).text, tmp_path)
    program, node = computed("Matmul", [(T, 3, 4), (T, 4, 70)], (T, 3, 70))
    assert_compiles(small_product_kernel(program, node).text, tmp_path)
