"""The result of a step's layers: hidden states, and logits where a graph made them."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from quire.device.device import current_device


class Computed(NamedTuple):
    """The outcome of a step's layers, for all its rows or for the wanted ones.

    Attributes:
        hidden: normalised hidden states `[T, hidden]`.
        logits: `[T, vocab]`; None if they are still to be computed from `hidden`.
        graphed: whether a graph computed them. The next step then overwrites their memory.
        in_place: whether computing the output writes to the pools where they lie, although the
            step before still holds them.
        awaited: whether other ranks wait for what computes the output, even if this one reads no
            row of it.
        recorded: whether a graph was recorded or verified for it.
    """

    hidden: mx.array
    logits: mx.array | None = None
    graphed: bool = False
    in_place: bool = False
    awaited: bool = False
    recorded: bool = False

    @property
    def output(self) -> mx.array:
        """The array that is computed last."""
        return self.hidden if self.logits is None else self.logits

    def rows(self, index: mx.array) -> Computed:
        """Return the outcome for some of the rows, in the order of `index`."""
        rows = current_device().operations.wanted_rows
        logits = None if self.logits is None else rows(self.logits, index)
        return self._replace(hidden=rows(self.hidden, index), logits=logits)
