"""Runs functions of rows by segments: modules that treat each row alone and touch no state."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import KVLayout
from quire.device.device import current_device
from quire.executor.segments.builder import Segment
from quire.executor.segments.runner import refused_nodes
from quire.executor.segments.stages import Stages, staged
from quire.program.passes import simplified
from quire.program.replay import run_node
from quire.program.trace import NotLinear, trace_rows

log = logging.getLogger("quire.engine")


class RowSegments:
    """Computes a module's outputs by segments.

    Args:
        stages: the divided program.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def __call__(self, *rows: mx.array) -> list[mx.array]:
        """Return the outputs for arguments `[T, width]`, in the order of the program's fields."""
        program = self.stages.program
        known = {id: each.array for id, each in program.constants.items()}
        known.update(zip(program.fields.values(), rows, strict=True))
        operations, sizes = current_device().operations, {"T": len(rows[0])}
        for stage in self.stages.order:
            if isinstance(stage, Segment):
                given = [known[id] for id in stage.given]
                found = stage.native.run(given, [], [], [], [])
                known.update(zip(stage.outputs, found, strict=True))
            else:
                run_node(program, stage, known, operations=operations, sizes=sizes)
        return [known[id] for id in program.outputs]


def open_row_segments(
    module: nn.Module, widths: Mapping[str, int], dtype: mx.Dtype
) -> RowSegments | None:
    """Trace a module and divide it into segments; None where no kernels are in use.

    Args:
        widths, dtype: see `program.trace.trace_rows`.
    """
    kernels = current_device().kernels
    if kernels is None:
        return None
    try:
        program = simplified(trace_rows(module, widths, dtype))
    except NotLinear as error:
        log.warning("a draft head goes operation by operation: %s", error)
        return None
    return RowSegments(
        staged(program, KVLayout.of(()), kernels.ops, refused=refused_nodes(kernels.ops))
    )
