"""Generated kernels that join arrays compute what MLX does, on an emulated card."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.executor.graphs.rows.joined import joined_kernel
from quire.executor.graphs.source import NotGenerated
from quire.program.values import FUSED, Form, Node, Program, Size, Value
from tests.executor.graphs.emulated import difference
from tests.support.emulated_metal import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

T = Form(0, (("T", 1),))


def joined(
    shapes: list[tuple[Size, ...]], out: tuple[Size, ...], axis: int
) -> tuple[Program, Node]:
    values = {number: Value(shape, mx.bfloat16) for number, shape in enumerate(shapes)}
    values[len(shapes)] = Value(out, mx.bfloat16)
    inputs = tuple(range(len(shapes)))
    node = Node("Concatenate", inputs, (len(shapes),), (), (axis,))
    fields = {f"in{id}": id for id in inputs}
    return Program(("T",), fields, {}, values, (node,), node.outputs), node


@pytest.mark.parametrize(
    ("shapes", "out", "axis"),
    [
        ([(T, 4, 128), (T, 4, 64)], (T, 4, 192), -1),
        ([(T, 1, 512), (T, 1, 64)], (T, 1, 576), 2),
        ([(T, 1, 64), (T, 2, 64), (T, 3, 64)], (T, 6, 64), 1),
        ([(T, 5), (T, 3000), (T, 7)], (T, 3012), 1),
        ([(T, 2, 3), (T, 2, 5)], (T, 2, 8), 2),
    ],
)
def test_arrays_are_joined(
    shapes: list[tuple[Size, ...]], out: tuple[Size, ...], axis: int
) -> None:
    program, node = joined(shapes, out, axis)
    for rows in (1, 5):
        assert difference(program, node, joined_kernel(program, node), rows) == 0


def test_views_are_read_through() -> None:
    program, join = joined([(T, 4, 32), (T, 4, 16)], (T, 4, 48), 2)
    values = {**program.values, 3: Value((T, 1, 16), mx.bfloat16)}
    view = Node("Broadcast", (3,), (1,), (), ((T, 4, 16),))
    node = Node(FUSED, (0, 3), (2,), (), (view, join), {"what": "joined"})
    program = Program(("T",), {"in0": 0, "in3": 3}, {}, values, (node,), (2,))
    assert difference(program, node, joined_kernel(program, node), 3) == 0


def test_joined_rows_are_refused() -> None:
    twice = Form(0, (("T", 2),))
    program, node = joined([(T, 8), (T, 8)], (twice, 8), 0)
    with pytest.raises(NotGenerated, match="rows are joined"):
        joined_kernel(program, node)
