"""Recurrent states in CUDA graphs: their arrays, and which rows advance which state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.cache.formats.paging import block_rows
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.cache.states import StatePool
from quire.core.arrays import Ints
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
        counts: for the first row of each sequence, how many rows the sequence has; 0 for other
            rows.
        sources: for the first row of each sequence, the slot of the state before it; -1 for none.
        targets: for these rows, `MAX_TARGETS` slots that get the state after the rows, or -1.
    """

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
    for each in rows:
        slots = targets_of(each, group)
        if len(slots) > MAX_TARGETS:
            return False
        inputs["counts"][0, first] = each.count
        inputs["sources"][0, first] = each.block_ids(group)[0] if each.start else -1
        own = inputs["targets"][0, first]
        own[:] = -1
        own[: len(slots)] = slots
        first += each.count
    return True


class KeptStates:
    """Copies of the recurrent states and tails of a step's sequences, for putting them back.

    Args:
        rows: the sequences of a step, all of one format.
    """

    def __init__(self, pools: Pools, layout: KVLayout, rows: Sequence[ScheduledSequence]) -> None:
        self._kept: list[tuple[StatePool, tuple[int, ...], Ints, list[mx.array]]] = []
        for group in layout.groups:
            if group.spec.recurrent is None:
                continue
            slots = {each.block_ids(group.index)[0] for each in rows}
            slots |= {slot for each in rows for slot in targets_of(each, group.index)}
            numbers = np.array(sorted(slots), np.int32)
            pool = pools.states(group.index, rows[0].format)
            contents = pool.export(numbers)
            mx.eval(contents)
            self._kept.append((pool, group.layers, numbers, contents))
        self._tails = [
            (array, numbers, array[numbers])
            for group in layout.groups
            if rows[0].format.has_tail and group.spec.attention is not None
            for array, numbers in _tail_rows(pools, group.index, rows=rows)
        ]
        mx.eval([contents for *_, contents in self._tails])

    def restore(self) -> None:
        """Copy the states back into their slots, and the tails into theirs."""
        for array, rows, tails in self._tails:
            array[rows] = tails
        mx.eval([array for array, *_ in self._tails])
        for pool, layers, numbers, contents in self._kept:
            pool.restore(numbers, contents)
            mx.eval(pool.arrays(layers))


def _tail_rows(
    pools: Pools, group: int, rows: Sequence[ScheduledSequence]
) -> list[tuple[mx.array, mx.array]]:
    """Return the arrays of a group's tails, each with the rows that hold the tails of sequences."""
    found = [each.tail_block(group) for each in rows]
    tails = np.array([each for each in found if each is not None], np.int32)
    numbers = block_rows(tails, pools.shape(group).kv_heads)
    stores = pools.kv(group, rows[0].format).layers.values()
    return [(array, numbers) for store in stores for array in store.own_tails()]
