"""Recurrent states in CUDA graphs: their arrays, and which rows advance which state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.core.kv_format import KVFormat
from quire.device.dtypes import DTYPES
from quire.executor.graphs.records import StepRecord, by_row
from quire.executor.recurrent_rows import targets_of
from quire.scheduler.plan import ScheduledSequence

MAX_TARGETS = 4
"""Most slots that a sequence's state may be written to in one step."""


@dataclass(frozen=True, slots=True)
class StateArray:
    """The array `[slots, *shape]` of one part of a layer's recurrent states."""

    address: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


LayerStates = Mapping[str, StateArray]
"""The states of a layer, by name."""


def layer_states(
    pools: Pools, layout: KVLayout, format: KVFormat, address: Callable[[mx.array], int]
) -> dict[int, LayerStates]:
    """Return the arrays of recurrent states, by layer."""
    return {
        layer: {
            name: StateArray(address(array), array.shape[1:], array.dtype)
            for name, array in pools.states(group.index, format).parts(layer).items()
        }
        for group in layout.groups
        if group.spec.recurrent is not None
        for layer in group.layers
    }


def unplaced_states(layout: KVLayout, dtype: mx.Dtype) -> dict[int, LayerStates]:
    """Return state arrays without addresses, for recordings that are never run.

    Args:
        dtype: the model's, for parts that declare none.
    """
    return {
        layer: {
            name: StateArray(0, shape, DTYPES[type] if type else dtype)
            for name, shape, type in group.spec.recurrent.arrays
        }
        for group in layout.groups
        if group.spec.recurrent is not None
        for layer in group.layers
    }


@dataclass(frozen=True)
class StateInputs:
    """Addresses of a step's inputs for a group of recurrent states.

    Attributes:
        firsts: each sequence's first row.
        counts: how many rows each sequence has; 0 behind the last sequence.
        sources: the slot of each sequence's state before the step; -1 for none.
        targets: `MAX_TARGETS` slots that get each sequence's state after its rows, or -1.
    """

    firsts: int = by_row()
    counts: int = by_row()
    sources: int = by_row()
    targets: int = by_row(MAX_TARGETS)


def write_states(inputs: StepRecord, group: int, rows: Sequence[ScheduledSequence]) -> bool:
    """Write which rows advance which states into a step's inputs.

    Args:
        inputs: one record, by the fields of `StateInputs`.

    Returns:
        False if a state goes to more slots than there is room for.
    """
    first = 0
    for number, each in enumerate(rows):
        slots = targets_of(each, group)
        if len(slots) > MAX_TARGETS:
            return False
        inputs["firsts"][0, number] = first
        inputs["counts"][0, number] = each.count
        inputs["sources"][0, number] = each.block_ids(group)[0] if each.start else -1
        own = inputs["targets"][0, number]
        own[:] = -1
        own[: len(slots)] = slots
        first += each.count
    return True
