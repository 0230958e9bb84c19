"""A model split by layers: each rank has consecutive layers, and hands its rows to the next."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

import mlx.core as mx

from quire.device.collectives import summed
from quire.models.base import ForwardContext, LanguageModel, Module
from quire.models.shares import Stage


class Elsewhere(Module):
    """A layer that another rank has."""


class LayeredModel(LanguageModel):
    """A model that can be split by layers."""

    @abstractmethod
    def staged(self, stage: Stage) -> tuple[Self, tuple[range, ...]]:
        """Return the model with a rank's layers alone, and the layers of each rank in `layout`.

        Raises:
            ModelError: layers that share keys would be on different ranks.
        """

    @abstractmethod
    def together(self, steps: Sequence[ForwardContext]) -> list[mx.array]:
        """Return normalised hidden states of several steps, by a rank of a split model."""


class Layers(Protocol):
    """A decoder of several layers, see `decoder.Decoder`."""

    layers: list[Module]

    def embed(self, step: ForwardContext) -> mx.array: ...

    def through(
        self, x: mx.array, step: ForwardContext, layers: Iterable[int]
    ) -> list[mx.array]: ...


def handed_on(decoder: Layers, stage: Stage, steps: Sequence[ForwardContext]) -> list[mx.array]:
    """Return the last layer's output of each step, the same on all ranks.

    While a rank computes one step, the next rank computes the one before. Whatever is exchanged is
    a sum over all ranks, to which the rank that has the rows contributes them and others zeros.
    Each exchange and each computation waits for the one before it, so that ranks exchange in one
    order, and a rank starts as soon as it has its rows.
    """
    rank, size = stage.part.rank, stage.part.size
    own = stage.parts(len(decoder.layers))[rank]
    rows = [decoder.embed(step) for step in steps]
    before: list[mx.array] = []

    def later(x: mx.array) -> mx.array:
        return mx.depends([x], before)[0] if before else x

    for giver in range(size):
        for number, step in enumerate(steps):
            if giver == rank == 0:
                rows[number] = decoder.through(later(rows[number]), step, own)[-1]
            given = rows[number] if giver == rank else mx.zeros_like(rows[number])
            rows[number] = summed(later(given), stage.part)
            if giver + 1 == rank:
                rows[number] = decoder.through(rows[number], step, own)[-1]
            before[:] = [rows[number]]
    return rows
