"""The recurrent layers' part of a step: read states, advance them by the rows, write them back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from quire.attention.step import Attention
from quire.cache.states import StateSlots
from quire.core.arrays import Ints
from quire.core.kv_format import KVFormat
from quire.device.device import current_device
from quire.device.dtypes import int32
from quire.device.recurrence import UNIT_EPS, WAITING, DeltaGates, settled
from quire.scheduler.plan import ScheduledSequence

Cut = Callable[[mx.array], mx.array]
"""A function that takes a segment's rows from a step's: `[T, ...]` -> `[n, t, ...]`."""


class States(Protocol):
    """The recurrent states of a segment's `n` sequences in one layer."""

    @property
    def names(self) -> Collection[str]:
        """Names of the parts."""
        ...

    def read(self, name: str) -> mx.array:
        """Return the states before this step, `[n, *shape]`; zeros for a sequence that starts."""
        ...

    def write(self, name: str, value: mx.array) -> None:
        """Store the states after this step, `[n, *shape]`."""
        ...


class RecurrentRows:
    """The rows of one step for recurrent layers.

    Args:
        segments: row indices `[n, t]` of `n` sequences with `t` rows that advance together. Every
            row of the step is in exactly one segment.
        states: the states of each segment in a layer, by the layer's index.
    """

    def __init__(self, segments: Sequence[Ints], states: Callable[[int], Sequence[States]]) -> None:
        self._shapes = [each.shape for each in segments]
        self._rows = [int32(each.reshape(-1)) for each in segments]
        self._states = states
        self.layers: list[int] = []
        """The layers whose states were read."""
        order = np.concatenate([each.reshape(-1) for each in segments])
        in_order = bool((order == np.arange(order.size)).all())
        self._inverse = None if in_order else int32(np.argsort(order).astype(np.int32))

    def rehearse(self, layer: int) -> None:
        """Make the arrays that a layer's group reads from the host."""
        self._states(layer)

    def joined(self, layer: int, advance: Callable[[States, Cut], mx.array]) -> mx.array:
        """Concatenate the results of `advance` for all segments, in the order of the step's
        rows.
        """
        self.layers.append(layer)
        parts = [
            advance(states, self._cut(number)).flatten(0, 1)
            for number, states in enumerate(self._states(layer))
        ]
        y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return y if self._inverse is None else y[self._inverse]

    def _cut(self, number: int) -> Cut:
        shape, rows = self._shapes[number], self._rows[number]
        whole = len(self._rows) == 1 and self._inverse is None

        def cut(x: mx.array) -> mx.array:
            return (x if whole else x[rows]).reshape(*shape, *x.shape[1:])

        return cut


class RecurrentLayers(ABC):
    """Implements the methods of `models.base.ForwardContext` for recurrent layers."""

    @property
    @abstractmethod
    def recurrent(self) -> RecurrentRows:
        """The step's rows."""

    def convolve(
        self, layer: int, x: mx.array, taps: mx.array, bias: mx.array | None, *, silu: bool
    ) -> mx.array:
        operations = current_device().operations

        def advance(states: States, cut: Cut) -> mx.array:
            new = cut(x)
            window = mx.concatenate([states.read("conv"), new], axis=1)
            states.write("conv", window[:, new.shape[1] :])
            return operations.causal_conv(window, taps, bias, silu=silu)

        return self.recurrent.joined(layer, advance)

    def delta_rule(
        self, layer: int, mixed: mx.array, gates: DeltaGates, key_heads: int
    ) -> mx.array:
        operations = current_device().operations

        def advance(states: States, cut: Cut) -> mx.array:
            own = replace(gates, steps=cut(gates.steps), betas=cut(gates.betas))
            state = states.read("delta")
            waiting = [states.read(name) for name in WAITING if name in states.names]
            if waiting:
                state = settled(state, *waiting)
                states.write(WAITING[0], mx.zeros_like(waiting[0]))
            y, after = operations.gated_delta(
                cut(mixed), own, state, key_heads=key_heads, eps=UNIT_EPS
            )
            states.write("delta", after)
            return y

        return self.recurrent.joined(layer, advance)

    def state_space(
        self,
        layer: int,
        values: mx.array,
        keys: mx.array,
        queries: mx.array,
        steps: mx.array,
        rates: mx.array,
    ) -> mx.array:
        operations = current_device().operations

        def advance(states: States, cut: Cut) -> mx.array:
            kept = states.read("state")
            state = kept.reshape(len(kept), *values.shape[1:], -1)
            v, k, q, s = (cut(each) for each in (values, keys, queries, steps))
            y, after = operations.state_space(v, k, q, steps=s, rates=rates, state=state)
            states.write("state", after.reshape(kept.shape))
            return y

        return self.recurrent.joined(layer, advance)


def recurrent_rows(
    sequences: Sequence[ScheduledSequence], starts: Sequence[int], attention: Attention
) -> RecurrentRows:
    """Make one segment, by format, of all sequences with a single row, and one of each longer
    chunk.

    Args:
        sequences: in the order of the step's rows.
        starts: the first row of each.
    """
    runs: dict[tuple[KVFormat, int], list[int]] = {}
    for number, each in enumerate(sequences):
        alone = 0 if each.count == 1 else number + 1
        runs.setdefault((each.format, alone), []).append(number)
    members = [[sequences[number] for number in run] for run in runs.values()]
    segments: list[Ints] = []
    for run, own in zip(runs.values(), members, strict=True):
        rows = [range(starts[number], starts[number] + own[0].count) for number in run]
        segments.append(np.array(rows, dtype=np.int32))
    known: dict[int, list[StateSlots]] = {}

    def states(layer: int) -> list[StateSlots]:
        group = attention.layout.group[layer]
        if group not in known:
            known[group] = [_slots(group, own, attention) for own in members]
        return [replace(each, layer=layer) for each in known[group]]

    return RecurrentRows(segments, states)


def state_rows(group: int, sequences: Sequence[ScheduledSequence], starts: Sequence[int]) -> Ints:
    """Return which rows advance which states, as CPU segments read it.

    Returns:
        The number of sequences; for each its first row, rows, the slot of the state before (-1 for
        none), where its targets begin among these numbers, and how many there are; the targets:
        slots that get the state after the rows.
    """
    numbers, targets = [len(sequences)], list[int]()
    first_target = 1 + 5 * len(sequences)
    for each, start in zip(sequences, starts, strict=True):
        (slot, *_), own = each.block_ids(group), targets_of(each, group)
        source = slot if each.start else -1
        numbers += [start, each.count, source, first_target + len(targets), len(own)]
        targets += own
    return np.array(numbers + targets, dtype=np.int32)


def targets_of(sequence: ScheduledSequence, group: int) -> list[int]:
    """Return the slots that get a sequence's state after its rows."""
    drafted = [slot for owner, slot in sequence.drafted_states if owner == group]
    own = drafted or [sequence.block_ids(group)[0]]
    return own + [slot for owner, slot in sequence.snapshots if owner == group]


def _slots(group: int, sequences: list[ScheduledSequence], attention: Attention) -> StateSlots:
    slots = [each.block_ids(group)[0] for each in sequences]
    return StateSlots(
        pool=attention.pools.states(group, sequences[0].format),
        layer=-1,
        slots=int32(slots),
        fresh=np.array([each.start == 0 for each in sequences]),
        targets=_targets(group, sequences),
    )


def _targets(group: int, sequences: list[ScheduledSequence]) -> tuple[mx.array, mx.array] | None:
    if not any(each.snapshots or each.drafted_states for each in sequences):
        return None
    indices: list[int] = []
    targets: list[int] = []
    for number, each in enumerate(sequences):
        own = targets_of(each, group)
        indices += [number] * len(own)
        targets += own
    return int32(indices), int32(targets)
