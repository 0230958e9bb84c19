"""A model split by layers: each rank has consecutive layers, and hands its rows to the next."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import mlx.core as mx

from quire.cache.specs import LayerSpec
from quire.device.collectives import summed
from quire.device.ranks import Part
from quire.models.base import ForwardContext, LanguageModel, Module
from quire.models.shares import Stage


class Elsewhere(Module):
    """A layer that another rank has."""


@dataclass(frozen=True, slots=True)
class Held:
    """The layers that one of several ranks has."""

    part: Part
    layers: range


class LayeredDecoder(Module):
    """A model without its head, which can be split by layers.

    Attributes:
        held: this rank's layers, of a model split by layers.
    """

    held: Held | None = None
    layers: list[Module]

    def __call__(self, step: ForwardContext) -> mx.array:
        """Return normalised hidden states `[T, hidden]`, see `whole`."""
        return self.whole(step) if self.held is None else self.together([step])[0]

    def together(self, steps: Sequence[ForwardContext]) -> list[mx.array]:
        """Return normalised hidden states of several steps, of which ranks compute one each at a
        time.
        """
        assert self.held is not None, "the model is split by layers"
        return [self.ended(x) for x in _handed_on(self, self.held, steps)]

    @abstractmethod
    def whole(self, step: ForwardContext) -> mx.array:
        """Return the output of a model that has all its layers."""

    @abstractmethod
    def embed(self, step: ForwardContext) -> mx.array:
        """Return the first layer's input, `[T, ...]`."""

    @abstractmethod
    def passed(self, x: mx.array, step: ForwardContext, layers: Iterable[int]) -> mx.array:
        """Return the output of consecutive layers of which the first has the input `x`, in its
        shape.
        """

    @abstractmethod
    def ended(self, x: mx.array) -> mx.array:
        """Convert the last layer's output to normalised hidden states `[T, hidden]`."""


class LayeredModel(LanguageModel):
    """A model that can be split by layers."""

    model: LayeredDecoder

    @property
    @abstractmethod
    def specs_by_layer(self) -> tuple[int, ...]:
        """Number of specs that each layer has in `own_layout`."""

    def staged(self, stage: Stage) -> tuple[Self, tuple[range, ...]]:
        """Return the model with a rank's layers alone, and the layers of each rank in `layout`.

        Raises:
            ModelError: layers that share keys leave too few parts.
        """
        firsts = [0, *accumulate(self.specs_by_layer)]
        joined = {
            layer for layer, first in enumerate(firsts) if _reads_before(self.own_layout, first)
        }
        parts = stage.parts(len(self.specs_by_layer), joined)
        here = parts[stage.part.rank]
        own = copy(self)
        own.model = copy(self.model)
        own.model.layers = [
            layer if number in here else Elsewhere()
            for number, layer in enumerate(self.model.layers)
        ]
        own.model.held = Held(stage.part, here)
        return own, tuple(range(firsts[each.start], firsts[each.stop]) for each in parts)

    def together(self, steps: Sequence[ForwardContext]) -> list[mx.array]:
        """Return normalised hidden states of several steps, by a rank of a split model."""
        return self.model.together(steps)


def _reads_before(layout: Sequence[LayerSpec], first: int) -> bool:
    """Return whether layers from `first` on read keys that layers before it wrote."""
    return any(layout[each].owner(each) < first for each in range(first, len(layout)))


def _handed_on(
    decoder: LayeredDecoder, held: Held, steps: Sequence[ForwardContext]
) -> list[mx.array]:
    """Return the last layer's output of each step, the same on all ranks.

    While a rank computes one step, the next rank computes the one before. Whatever is exchanged is
    a sum over all ranks, to which the rank that has the rows contributes them and others zeros.
    Each exchange and each computation waits for the one before it, so that ranks exchange in one
    order, and a rank starts as soon as it has its rows.
    """
    (rank, size), own = (held.part.rank, held.part.size), held.layers
    rows = [decoder.embed(step) for step in steps]
    before: list[mx.array] = []

    def later(x: mx.array) -> mx.array:
        return mx.depends([x], before)[0] if before else x

    for giver in range(size):
        for number, step in enumerate(steps):
            if giver == rank == 0:
                rows[number] = decoder.passed(later(rows[number]), step, own)
            given = rows[number] if giver == rank else mx.zeros_like(rows[number])
            rows[number] = summed(later(given), held.part)
            if giver + 1 == rank:
                rows[number] = decoder.passed(rows[number], step, own)
            before[:] = [rows[number]]
    return rows
