"""Runs functions of rows by segments: modules that treat each row alone and touch no state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import KVLayout
from quire.device.device import current_device
from quire.executor.segments.builder import Segment
from quire.executor.segments.exact import refused_nodes
from quire.executor.segments.stages import Stages, staged
from quire.models.base import LanguageModel, Module
from quire.program.folding import convert_tables, simplified
from quire.program.trace import Field, NotLinear, trace_rows
from quire.program.values import Value

log = logging.getLogger("quire.engine")


class RowSegments:
    """Computes a module's outputs by segments.

    Args:
        stages: the divided program.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def __call__(self, *rows: mx.array) -> list[mx.array]:
        """Return the outputs for arguments `[T, ...]`, in the order of the program's fields."""
        fields = dict(zip(self.stages.program.fields, rows, strict=True))
        return self.stages.run(fields, len(rows[0]), Segment.compute)


def open_row_segments(module: nn.Module, fields: Mapping[str, Field]) -> RowSegments | None:
    """Trace a module and divide it into segments; None where no kernels are in use.

    Args:
        fields: see `program.trace.trace_rows`.
    """
    kernels = current_device().kernels
    if kernels is None:
        return None
    try:
        program = convert_tables(simplified(trace_rows(module, fields)))
    except NotLinear as error:
        log.warning("%s goes operation by operation: %s", type(module).__name__, error)
        return None
    return RowSegments(
        staged(program, KVLayout.of(()), kernels.ops, refused=refused_nodes(kernels.ops))
    )


class LogitsSegment:
    """Computes a model's logits by a segment, or by the model's own code if one segment cannot.

    Args:
        hidden: the shape and the type of hidden states.
    """

    def __init__(self, model: LanguageModel, hidden: Value) -> None:
        self._model, self._hidden = model, hidden

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return the logits `[R, vocab]` of hidden states `[R, hidden]`."""
        return self._model.logits(hidden) if self.rows is None else self.rows(hidden)[0]

    @cached_property
    def rows(self) -> RowSegments | None:
        """The segment, made on first use; None if one cannot compute all."""
        row = tuple(size for size in self._hidden.shape[1:] if isinstance(size, int))
        found = open_row_segments(_Logits(self._model), {"hidden": (row, self._hidden.dtype)})
        if found is None or not all(isinstance(stage, Segment) for stage in found.stages.order):
            return None
        return found


class _Logits(Module):
    """A model's logits as a module of their own."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def __call__(self, hidden: mx.array) -> list[mx.array]:
        return [self.model.logits(hidden)]
