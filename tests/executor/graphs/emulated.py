"""Runs generated kernels on the CPU, beside what MLX computes of the same nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from quire.device.operations import Operations
from quire.executor.graphs.recorder import Kernel
from quire.executor.graphs.rows.regions import Argument, RowKernel
from quire.program.replay import run_node
from quire.program.values import Node, Program, bound
from tests.support.emulated_metal import guarded
from tests.support.emulated_steps import launch

Arrays = Mapping[int, mx.array]


def bits_of(array: mx.array) -> np.ndarray:
    """Return a copy of an array's elements; bfloat16 as integers."""
    wide = array.dtype == mx.bfloat16
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if wide else array))


def run_kernel(
    program: Program, kernel: RowKernel, given: Arrays, outputs: Sequence[int], rows: int, room: int
) -> dict[int, mx.array]:
    """Run a kernel that is launched for `room` rows, and return what it wrote of `rows`.

    Nothing behind the arrays may be read or written.
    """
    shapes = {
        id: bound(program.values[id].shape, dict.fromkeys(program.symbols, rows)) for id in outputs
    }
    memory: dict[int, np.ndarray] = {}
    for id, shape in shapes.items():
        zeros = mx.zeros(shape, program.values[id].dtype)
        memory[id] = guarded(np.full_like(bits_of(zeros), 3))
    constants = {id: each.array for id, each in program.constants.items()}
    kept: list[np.ndarray] = [guarded(np.array([rows], np.int32))]

    def address(argument: Argument) -> int:
        source = argument.source
        if isinstance(source, int) and source in memory:
            return int(memory[source].ctypes.data)
        array = {**constants, **given}[source] if isinstance(source, int) else source
        kept.append(guarded(bits_of(array)))
        return int(kept[-1].ctypes.data) + argument.offset

    addresses = [int(kept[0].ctypes.data), *map(address, kernel.arguments)]
    grid = kernel.grid(room)
    launch(Kernel(kernel.text, grid, kernel.threads, 0, tuple(addresses), ()))
    return {
        id: mx.array(each).view(program.values[id].dtype).reshape(shapes[id])
        for id, each in memory.items()
    }


def random_inputs(program: Program, node: Node, sizes: Mapping[str, int]) -> dict[int, mx.array]:
    """Return arrays for what a node reads of the step."""
    random = np.random.default_rng(0)
    found = {}
    for id in node.inputs:
        value = program.values[id]
        shape = bound(value.shape, sizes)
        if id in program.constants:
            continue
        if value.dtype in (mx.float32, mx.float16, mx.bfloat16):
            drawn = mx.array(random.normal(size=shape).astype(np.float32))
        else:
            drawn = mx.array(random.integers(0, 300, shape))
        found[id] = drawn.astype(value.dtype)
    return found


def expected_of(
    program: Program, node: Node, given: Arrays, sizes: Mapping[str, int]
) -> dict[int, mx.array]:
    """Return what MLX's operations compute of a node."""
    known = {id: each.array for id, each in program.constants.items()} | dict(given)
    run_node(program, node, known=known, operations=Operations(), sizes=sizes)
    return {id: known[id] for id in node.outputs}


def difference(program: Program, node: Node, kernel: RowKernel, rows: int) -> float:
    """Return the largest difference from MLX, relative to the largest element."""
    sizes = dict.fromkeys(program.symbols, rows)
    given = random_inputs(program, node, sizes)
    expected = expected_of(program, node, given, sizes)
    found = run_kernel(program, kernel, given, node.outputs, rows, rows + 2)
    worst = 0.0
    for id, own in found.items():
        a, b = (np.array(each.astype(mx.float32)) for each in (expected[id], own))
        same = np.isfinite(a) == np.isfinite(b)
        assert same.all(), "infinite elsewhere"
        a, b = (np.where(np.isfinite(each), each, 0).astype(np.float64) for each in (a, b))
        worst = max(worst, float(np.abs(a - b).max() / max(1e-30, np.abs(a).max())))
    return worst
