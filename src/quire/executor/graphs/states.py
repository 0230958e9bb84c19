"""Recurrent states in CUDA graphs: their arrays, and which rows advance which state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from quire.cache.formats.paging import block_rows
from quire.cache.pools import Pools
from quire.cache.specs import KVGroup, KVLayout
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


class _Kept(NamedTuple):
    """Some rows of an array of a layer, and their contents.

    Attributes:
        used: in tails, whether a token is of the sequence after the step: `[rows, tokens, 1]`.
    """

    layer: int
    array: mx.array
    rows: mx.array
    contents: mx.array
    used: mx.array | None


class KeptStates:
    """Copies of the recurrent states and tails of a step's sequences, for putting them back.

    Args:
        rows: the sequences of a step, all of one format.
    """

    def __init__(self, pools: Pools, layout: KVLayout, rows: Sequence[ScheduledSequence]) -> None:
        self._kept = [each for group in layout.groups for each in _written_rows(pools, group, rows)]
        mx.eval([each.contents for each in self._kept])

    def restore(self) -> None:
        """Copy the states back into their slots, and the tails into theirs."""
        _write(self._kept)

    def of_layer(self, layer: int | None) -> list[mx.array]:
        """Return copies of a layer's states and tails as they are now."""
        found = [each.array[each.rows] for each in self._kept if each.layer == layer]
        mx.eval(found)
        return found

    def written(self, layer: int | None) -> list[mx.array]:
        """Return copies as `of_layer` does, with zeros behind sequences' last tokens in tails:
        nothing reads what is there.
        """
        masks = [each.used for each in self._kept if each.layer == layer]
        found = [
            each if used is None else mx.where(used, each, 0)
            for each, used in zip(self.of_layer(layer), masks, strict=True)
        ]
        mx.eval(found)
        return found

    def write(self, layer: int | None, contents: list[mx.array]) -> None:
        """Write what `of_layer` returned."""
        own = [each for each in self._kept if each.layer == layer]
        _write([each._replace(contents=new) for each, new in zip(own, contents, strict=True)])


def _write(kept: Iterable[_Kept]) -> None:
    arrays = []
    for each in kept:
        each.array[each.rows] = each.contents
        arrays.append(each.array)
    mx.eval(arrays)


def _written_rows(pools: Pools, group: KVGroup, rows: Sequence[ScheduledSequence]) -> list[_Kept]:
    """Return the rows of the sequences' states or tails in each array of a group's layers."""
    number, format = group.index, rows[0].format
    if group.spec.recurrent is not None:
        slots = {each.block_ids(number)[0] for each in rows}
        slots |= {slot for each in rows for slot in targets_of(each, number)}
        numbers = block_rows(np.array(sorted(slots), np.int32), 1)
        pool = pools.states(number, format)
        return [
            _Kept(layer, array, numbers, contents=array[numbers], used=None)
            for layer in group.layers
            for array in pool.parts(layer).values()
        ]
    if not format.has_tail or group.spec.attention is None:
        return []
    found = [(each.tail_block(number), each.start + each.count) for each in rows]
    tails = [(tail, end % pools.block_size) for tail, end in found if tail is not None]
    heads = pools.shape(number).kv_heads
    numbers = block_rows(np.array([tail for tail, _ in tails], np.int32), heads)
    counts = mx.repeat(mx.array([count for _, count in tails], mx.int32), heads)
    used = mx.arange(pools.block_size)[:, None] < counts[:, None, None]
    return [
        _Kept(layer, array, numbers, contents=array[numbers], used=used)
        for layer, store in pools.kv(number, format).layers.items()
        for array in store.own_tails()
    ]
