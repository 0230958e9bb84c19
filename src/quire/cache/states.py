"""Recurrent states: one slot for each sequence or snapshot, for all layers of a group."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.cache.formats.paging import ANY_ROOM, Room, block_rows, resize
from quire.cache.specs import RecurrentState
from quire.core.arrays import Ints
from quire.device.cache_operations import RowCopies
from quire.device.device import current_device
from quire.device.dtypes import DTYPES, from_host


class StatePool:
    """Slots of recurrent state, `[slots, *shape]` for each part of each layer.

    Args:
        dtype: type of parts that declare none, which is the model's.
    """

    def __init__(self, layers: tuple[int, ...], spec: RecurrentState, dtype: mx.Dtype) -> None:
        self._parts = {
            (layer, name): mx.zeros((0, *shape), dtype=DTYPES[type] if type else dtype)
            for layer in layers
            for name, shape, type in spec.arrays
        }

    @staticmethod
    def slot_bytes(layers: int, spec: RecurrentState, dtype: mx.Dtype) -> int:
        """Return the bytes of one sequence's state in so many layers."""
        return layers * sum(
            math.prod(shape) * (DTYPES[type] if type else dtype).size
            for _, shape, type in spec.arrays
        )

    def resize(
        self, capacity: int, moves: tuple[tuple[int, int], ...], room: Room = ANY_ROOM
    ) -> None:
        """Move slots, then cut or extend the arrays to `capacity` slots."""
        places, arrays = list(self._parts), list(self._parts.values())
        self._parts.clear()  # `arrays` has the only references
        resize(arrays, 1, capacity, moves=moves, room=room)
        self._parts.update(zip(places, arrays, strict=True))

    def read(self, layer: int, name: str, slots: mx.array) -> mx.array:
        """Return the states in slots `[n]`: `[n, *shape]`."""
        return self._parts[layer, name][slots]

    def write(self, layer: int, name: str, slots: mx.array, value: mx.array) -> None:
        """Write `[n, *shape]` into slots `[n]`."""
        current_device().operations.write_rows(self._parts[layer, name], value, slots)

    def arrays(self, layers: Container[int] | None = None) -> list[mx.array]:
        """Return the arrays that hold the slots of these layers; of all by default."""
        if layers is None:
            return list(self._parts.values())
        return [array for (layer, _), array in self._parts.items() if layer in layers]

    def replace(self, others: Iterator[mx.array]) -> None:
        """Take other arrays in place of all that `arrays` returns."""
        self._parts.update(zip(list(self._parts), others, strict=False))

    def parts(self, layer: int) -> dict[str, mx.array]:
        """Return a layer's arrays `[slots, *shape]`, by part name."""
        return {name: array for (own, name), array in self._parts.items() if own == layer}

    def export(self, slots: Ints) -> list[mx.array]:
        """Return the contents of slots (lazy)."""
        rows = block_rows(slots, 1)
        return [part[rows] for part in self._parts.values()]

    def copies(self, sources: Ints, targets: Ints) -> list[RowCopies]:
        """Return the rows to copy for slots `targets` to become copies of `sources`."""
        pools = list(self._parts.values())
        return [RowCopies(pools, block_rows(sources, 1), block_rows(targets, 1))]

    def restore(self, slots: Ints, contents: list[mx.array]) -> None:
        """Write contents that `export` returned into slots."""
        rows = block_rows(slots, 1)
        for part, content in zip(self._parts.values(), contents, strict=True):
            part[rows] = content


@dataclass(frozen=True)
class StateSlots:
    """The states of some sequences of one format in one layer, read and written by a step.

    Attributes:
        slots: `[n]` slots of the states.
        fresh: `[n]` true for sequences that start.
        targets: (indices of sequences, slots) of the states to write; None writes each to the slot
            it was read from.
    """

    pool: StatePool
    layer: int
    slots: mx.array
    fresh: np.ndarray[tuple[int], np.dtype[np.bool_]]
    targets: tuple[mx.array, mx.array] | None = None

    @property
    def names(self) -> Collection[str]:
        """Names of the layer's parts."""
        return self.pool.parts(self.layer)

    def read(self, name: str) -> mx.array:
        """Return the states before this step, `[n, *shape]`; zeros for a sequence that starts."""
        state = self.pool.read(self.layer, name, self.slots)
        if not self.fresh.any():
            return state
        starts = from_host(self.fresh).reshape(-1, *[1] * (state.ndim - 1))
        return mx.where(starts, mx.zeros_like(state), state)

    def write(self, name: str, value: mx.array) -> None:
        """Store the states after this step, `[n, *shape]`."""
        slots = self.slots
        if self.targets is not None:
            indices, slots = self.targets
            value = value[indices]
        self.pool.write(self.layer, name, slots, value=value)
