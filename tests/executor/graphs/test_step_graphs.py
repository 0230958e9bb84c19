"""Graphs of one step, launched one behind the other."""

from __future__ import annotations

import io
from typing import Any, cast

import mlx.core as mx

from quire.device.cuda.driver import Graph
from quire.device.cuda.extension import Extension
from quire.executor.graphs.step_graphs import StepLaunch


class LazyExtension:
    """Computes graphs as MLX does on a card: only when an array that needs them is evaluated."""

    def replay(self, workspace: mx.array, rows: int, **_: Any) -> mx.array:
        return mx.sin(workspace[:rows])


class NoGraph:
    handle = 1


def test_the_last_output_needs_every_graph_before_it() -> None:
    """Nobody reads the outputs of graphs between: their kernels write to other buffers."""
    extension, graph = cast(Extension, LazyExtension()), cast(Graph, NoGraph())
    launch = StepLaunch(extension, mx.zeros((4, 8)), 2, first={"inputs": [], "targets": []})
    for _ in range(3):
        output = launch(graph)
    assert output.shape == (2, 8)
    drawn = io.StringIO()
    mx.export_to_dot(drawn, output)
    assert drawn.getvalue().count("Sin") == 3
