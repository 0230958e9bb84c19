"""Copies of what a step writes over, for computing the step again another way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from quire.cache.formats.paging import block_rows
from quire.cache.pools import Pools
from quire.cache.specs import KVGroup, KVLayout
from quire.device.recurrence import WAITING, settled
from quire.executor.recurrent_rows import targets_of
from quire.scheduler.plan import ScheduledSequence


class _Kept(NamedTuple):
    """Some rows of an array of a layer, and their contents.

    Attributes:
        name: of the part of a state; empty for tails.
        used: in tails, whether a token is of the sequence after the step: `[rows, tokens, 1]`.
    """

    layer: int
    name: str
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
        """Return the current values of a layer's states and tails, however they are stored: states
        with the updates that wait, and tails with zeros behind sequences' last tokens.
        """
        own = [each for each in self._kept if each.layer == layer]
        contents = self.of_layer(layer)
        waiting = [x for each, x in zip(own, contents, strict=True) if each.name in WAITING]
        found = []
        for each, content in zip(own, contents, strict=True):
            if each.used is not None:
                found.append(mx.where(each.used, content, 0))
            elif waiting and each.name == "delta":
                found.append(settled(content, *waiting))
            elif each.name not in WAITING:
                found.append(content)
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
            _Kept(layer, name, array, rows=numbers, contents=array[numbers], used=None)
            for layer in group.layers
            for name, array in pool.parts(layer).items()
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
        _Kept(layer, "", array, rows=numbers, contents=array[numbers], used=used)
        for layer, store in pools.kv(number, format).layers.items()
        for array in store.own_tails()
    ]
