"""Generated kernels of rows compute what MLX does, on an emulated card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import mlx.core as mx
import pytest

from quire.device.device import open_device
from quire.executor.graphs.rows.regions import RowKernel, row_kernel
from quire.executor.graphs.rows.row_body import Cut
from quire.executor.graphs.source import NotGenerated
from quire.program.passes import prepared
from quire.program.trace import trace
from quire.program.values import FUSED, Constant, Form, Node, Program, Value
from tests.executor.graphs.emulated import difference
from tests.program.programs import CONFIGS, opened
from tests.support.emulated_metal import why_not
from tests.support.everyday import everyday
from tests.support.nvrtc import assert_compiles

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

EVERYDAY = {
    "llama": "bfloat16",
    "falcon_h1": "float32",
}
"""Families and the types of their activations."""
ONE_STEP = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-10}
"""Tolerance of an element, relative to the largest: in the narrow types one rounding of an
activation, which MLX rounds in between."""


def regions(program: Program) -> Iterator[Node]:
    """Yield the regions of rows of a program."""
    for node in program.nodes:
        if node.kind == FUSED and node.attributes["what"] == "rows":
            yield node


def prepared_body(name: str, folder: Path, dtype: str) -> Program:
    open_device("auto")
    return prepared(trace(opened(name, folder, dtype).model).body)


def assert_regions_agree(name: str, folder: Path, dtype: str) -> None:
    program = prepared_body(name, folder, dtype)
    kernels: dict[str, tuple[Node, RowKernel]] = {}
    for node in regions(program):
        kernel = row_kernel(program, node)
        kernels.setdefault(kernel.text, (node, kernel))
    assert kernels
    for node, kernel in kernels.values():
        for rows in (1, 5):
            assert difference(program, node, kernel, rows) <= ONE_STEP[dtype], str(kernel)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in EVERYDAY for dtype in EVERYDAY[name].split()]
)
def test_regions_compute_what_mlx_does(name: str, dtype: str, tmp_path: Path) -> None:
    assert_regions_agree(name, tmp_path, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_regions_of_any_family_compute_what_mlx_does(name: str, dtype: str, tmp_path: Path) -> None:
    assert_regions_agree(name, tmp_path, dtype)


@pytest.mark.parametrize(("name", "regions_", "kernels"), [("llama", 9, 5), ("gemma4_moe", 12, 7)])
def test_layers_share_kernels(name: str, regions_: int, kernels: int, tmp_path: Path) -> None:
    program = prepared_body(name, tmp_path, "bfloat16")
    texts = [row_kernel(program, node).text for node in regions(program)]
    assert (len(texts), len(set(texts))) == (regions_, kernels)


# -- single nodes ----------------------------------------------------------------------------------

T = Form(0, (("T", 1),))


def alone(
    kind: str,
    shapes: list[tuple[tuple[Form | int, ...], mx.Dtype]],
    out: tuple[tuple[Form | int, ...], mx.Dtype],
    arguments: tuple[object, ...] = (),
    **attributes: object,
) -> tuple[Program, Node]:
    """Return a program of one node, whose inputs are the step's."""
    values = {number: Value(*each) for number, each in enumerate(shapes)}
    values[len(shapes)] = Value(*out)
    roles = ("x", "y")[: len(shapes)] if attributes else ()
    inputs = tuple(range(len(shapes)))
    node = Node(kind, inputs, (len(shapes),), roles, arguments, attributes)
    fields = {f"in{id}": id for id in inputs}
    return Program(("T",), fields, {}, values, (node,), node.outputs), node


def weighted(rows: Form, parts: int, width: int = 64) -> tuple[Program, Node]:
    """Return a program of one weighted sum, `[rows, parts, width]` by `[rows, parts]`."""
    x, weights = ((rows, parts, width), mx.bfloat16), ((rows, parts), mx.float32)
    program, node = alone("weighted_sum", [x, weights], ((rows, width), mx.bfloat16))
    return program, replace(node, roles=("x", "weights"))


@pytest.mark.parametrize("rows", [T, Form(0, (("T", 2),))], ids=str)
def test_weighted_sums(rows: Form) -> None:
    """Llama 4 sums over twice as many rows where it has two experts a token."""
    program, node = weighted(rows, 3)
    assert difference(program, node, row_kernel(program, node), 3) <= 2**-7


def test_rows_of_all_experts_are_read_at_once(tmp_path: Path) -> None:
    """A thread has registers for eight elements of each, so it waits for all of them together."""
    program, node = weighted(T, 8, 2048)
    assert assert_compiles(row_kernel(program, node).text, tmp_path) >= 8 * 4 + 16


def through(program: Program, node: Node, view: str, source: Value, *arguments: object) -> Program:
    """Return a program whose node reads its last input through a view of another value."""
    *others, viewed = node.inputs
    root = max(program.values) + 1
    made = Node(view, (root,), (viewed,), arguments=arguments)
    attributes = {"what": "rows"}
    region = Node(FUSED, (*others, root), node.outputs, (), (made, node), attributes)
    return replace(program, values=program.values | {root: source}, nodes=(region,))


def test_one_constant_weighs_all_rows() -> None:
    """Llama 4 weighs the inputs of experts, and their outputs by ones."""
    program = through(*weighted(T, 2), "Broadcast", Value((), mx.float32), (T, 2))
    (region,) = program.nodes
    program = replace(program, constants={region.inputs[-1]: Constant("", mx.array(0.75))})
    assert difference(program, region, row_kernel(program, region), 3) <= 2**-7


def test_weights_at_distances_of_all_rows_are_refused() -> None:
    program = through(*weighted(T, 2), "Transpose", Value((2, T), mx.float32), (1, 0))
    with pytest.raises(NotGenerated, match="depends on the number of rows"):
        row_kernel(program, *program.nodes)


@pytest.mark.parametrize("width", everyday([2816, 8192, 5376, 40, 5120], (40, 5376).__contains__))
def test_norms_of_whole_rows(width: int) -> None:
    shape = ((T, width), mx.bfloat16)
    program, node = alone("rms_norm", [shape], shape, weight=None, eps=1e-6)
    kernel = row_kernel(program, node)
    assert difference(program, node, kernel, 3) <= 2**-7
    assert kernel.text.count("sum_up<LANES, 1>(") == 1


@pytest.mark.parametrize("kind", everyday(["rms_norm", "layer_norm"], "rms_norm".__eq__))
def test_kernels_compile_without_spilling(kind: str, tmp_path: Path) -> None:
    shape = ((T, 8192), mx.bfloat16)
    program, node = alone(kind, [shape], shape, weight=None, bias=None, eps=1e-6)
    assert_compiles(row_kernel(program, node).text, tmp_path)


def test_elements_of_wide_rows_are_many_thread_blocks() -> None:
    shape = ((T, 4104), mx.float32)
    program, node = alone("Tanh", [shape], shape)
    kernel = row_kernel(program, node)
    assert kernel.grid(2) == (10, 1, 1)
    assert difference(program, node, kernel, 2) <= 2e-6


def test_one_view_is_a_copy() -> None:
    program, node = alone(
        "Transpose", [((T, 4, 6), mx.float16)], ((T, 6, 4), mx.float16), ((0, 2, 1),)
    )
    assert difference(program, node, row_kernel(program, node), 3) == 0


def test_starts_of_slices_are_arguments() -> None:
    texts, offsets = set(), []
    for start in (0, 64, 128):
        program, node = alone(
            "Slice",
            [((T, 192), mx.bfloat16)],
            ((T, 64), mx.bfloat16),
            ((0, start), (T, start + 64), (1, 1)),
        )
        kernel = row_kernel(program, node)
        assert difference(program, node, kernel, 3) == 0
        texts.add(kernel.text)
        offsets.append(kernel.arguments[0].offset)
    assert len(texts) == 1
    assert offsets == [0, 128, 256]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    everyday(
        product(
            ["Remainder", "FloorDivide", "Maximum", "Minimum", "Add", "Multiply", "Equal"],
            [mx.float32, mx.int32],
        ),
        lambda kind, dtype: (kind, dtype) in [("Remainder", mx.float32), ("Equal", mx.int32)],
    ),
    ids=str,
)
def test_operations_of_two(kind: str, dtype: mx.Dtype) -> None:
    shape = ((T, 24), dtype)
    out = ((T, 24), mx.bool_ if kind == "Equal" else dtype)
    program, node = alone(kind, [shape, shape], out)
    if kind in ("Remainder", "FloorDivide") and dtype == mx.int32:
        pytest.skip("divides by zero")
    assert difference(program, node, row_kernel(program, node), 2) <= 2e-6


@pytest.mark.parametrize(
    ("kind", "arguments"),
    everyday(
        [
            *((kind, ()) for kind in ("Negative", "Sigmoid", "Exp", "Square", "Erf", "Expm1")),
            *((kind, ()) for kind in ("Abs", "Sign", "Round", "Floor", "Log1p", "Tanh")),
            *(("Sqrt", (reciprocal,)) for reciprocal in (False, True)),
            *(("Log", (base,)) for base in range(3)),
        ],
        lambda kind, arguments: kind == "Erf" or arguments == (True,),
    ),
)
def test_operations_of_one(kind: str, arguments: tuple[object, ...]) -> None:
    shape = ((T, 24), mx.float32)
    program, node = alone(kind, [shape], shape, arguments)
    assert difference(program, node, row_kernel(program, node), 2) <= 2e-6


@pytest.mark.parametrize(
    "name", everyday(["silu", "gelu", "gelu_new", "quick_gelu", "relu2"], "gelu_new".__eq__)
)
def test_activations(name: str) -> None:
    shape = ((T, 24), mx.float32)
    program, node = alone("activate", [shape], shape, name=name)
    assert difference(program, node, row_kernel(program, node), 2) <= 2e-6


@pytest.mark.parametrize(
    ("kind", "shape", "out", "why"),
    [
        ("Softmax", (T, 8), (T, 8), "Softmax is not known"),
        ("Negative", (8,), (8,), "has no rows"),
        ("Transpose", (8, T), (T, 8), "depends on the number of rows"),
    ],
)
def test_what_no_kernel_computes_is_refused(
    kind: str, shape: tuple[Form | int, ...], out: tuple[Form | int, ...], why: str
) -> None:
    arguments = ((1, 0),) if kind == "Transpose" else ()
    program, node = alone(kind, [(shape, mx.float32)], (out, mx.float32), arguments)
    with pytest.raises(NotGenerated, match=why):
        row_kernel(program, node)


def test_rows_are_cut_alike_whatever_their_number() -> None:
    assert Cut.of(128 * 32, 128) == Cut(4096, 128, 8, 1, 16, 8)
    assert replace(Cut.of(8192, 8192), width=0) == Cut(0, 8192, 8, 2, 512, 1)
