"""Factors of adapters for the experts of mixtures, by the tensors of a checkpoint.

PEFT adapts the parameters of stacked experts (`target_parameters`): two linear layers for all
experts of a stack, whose names do not say which parameter they are for; the shapes do. mlx-lm
adapts its own stacks, `switch_mlp.gate_proj` and others. A checkpoint may hold a tensor for each
expert instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.weights.names import Weights, without_wrapper

Factors = tuple[mx.array, mx.array]
"""`[..., rank, in]` and `[..., out, rank]`, the second one scaled."""

_STACK = re.compile(r"(.*\.experts)(?:\.base_layer)*")
"""A module of PEFT that stands for a parameter of stacked experts."""
_SWITCH = re.compile(r"(.*)\.(?:switch_mlp|experts\.switch_glu)\.(gate|up|down)_proj")
_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's matrices in checkpoints."""


@dataclass(frozen=True)
class ExpertFactors:
    """Finds the tensors of a checkpoint that factors of experts change.

    Args:
        read: the checkpoint's tensors by its own names.
        file: the adapter's, for errors.
    """

    read: Weights
    file: Path

    @staticmethod
    def are_in(module: str, first: mx.array) -> bool:
        """Return whether a module's factors are those of a stack of experts."""
        return first.ndim == 3 or ExpertFactors.is_stack(module)

    @staticmethod
    def is_stack(module: str) -> bool:
        """Return whether PEFT names a parameter of stacked experts so."""
        return _STACK.fullmatch(module) is not None

    def spread(
        self, module: str, first: mx.array, second: mx.array, rank: int
    ) -> dict[str, Factors]:
        """Return the factors by the checkpoint's own names.

        Args:
            first, second: of mlx-lm `[experts, rank, in]` and `[experts, out, rank]`; of PEFT
                `[experts * rank, in]` and `[out, rank * experts]`. The second is scaled.

        Raises:
            ModelError: the checkpoint has no such experts.
        """
        if first.ndim == 3:
            return self._of_switch(module, first, second)
        count = first.shape[0] // rank
        stack = _STACK.fullmatch(module)
        assert stack is not None, "`are_in` has said so"
        inner = first.reshape(count, rank, -1)
        outer = second.reshape(len(second), rank, count).transpose(2, 0, 1)
        return self._of_parameter(stack[1], inner, outer)

    def _of_switch(self, module: str, first: mx.array, second: mx.array) -> dict[str, Factors]:
        named = self.names.get(without_wrapper(f"{module}.weight"))
        if named is not None:
            return {named: (first, second)}
        found = _SWITCH.fullmatch(module)
        if found is not None:
            part = ("gate", "up", "down").index(found[2])
            for names in _PARTS:
                one_by_one = self._one_by_one(f"{found[1]}.experts", names[part], len(first))
                if one_by_one is not None:
                    return dict(zip(one_by_one, zip(first, second, strict=True), strict=True))
        raise self._missing(module)

    def _of_parameter(self, base: str, inner: mx.array, outer: mx.array) -> dict[str, Factors]:
        """Return the factors of a parameter of stacked experts.

        Args:
            inner, outer: `[experts, rank, in]` and `[experts, out, rank]`. Earlier releases of PEFT
                have them the other way round where a parameter is `[experts, out, in]`.
        """
        turned = outer.swapaxes(-1, -2), inner.swapaxes(-1, -2)
        for first, second in ((inner, outer), turned):
            shape = (len(first), second.shape[1], first.shape[2])
            for name, array in self._stacked(base):
                if array.shape == shape:
                    return {name: (first, second)}
            one_by_one = self._parts(base, first, second)
            if one_by_one is not None:
                return one_by_one
        raise self._missing(base)

    def _stacked(self, base: str) -> Iterator[tuple[str, mx.array]]:
        """Yield the checkpoint's tensors of stacked experts."""
        prefix = without_wrapper(f"{base}.")
        for plain, name in self.names.items():
            if plain.startswith(prefix) and self.read[name].ndim == 3:
                yield name, self.read[name]

    def _parts(self, base: str, first: mx.array, second: mx.array) -> dict[str, Factors] | None:
        """Return the factors by the matrices of single experts; None if there are none that fit.

        Gate and up are the first and the last half of a stacked parameter's rows.
        """
        count, width = len(first), second.shape[1] // 2
        for names in _PARTS:
            found = [self._one_by_one(base, each, count) for each in names]
            if any(each is None for each in found):
                continue
            gate, up, down = (each or [] for each in found)
            pairs = list(zip(first, second, strict=True))
            if self._fits(down[0], *pairs[0]):
                return dict(zip(down, pairs, strict=True))
            if self._fits(gate[0], first[0], second[0, :width]):
                halves = [(one, other[:width]) for one, other in pairs]
                others = [(one, other[width:]) for one, other in pairs]
                return dict(zip((*gate, *up), (*halves, *others), strict=True))
        return None

    def _fits(self, name: str, first: mx.array, second: mx.array) -> bool:
        return self.read[name].shape == (len(second), first.shape[1])

    def _one_by_one(self, base: str, part: str, count: int) -> list[str] | None:
        """Return the names of one matrix of each expert; None if the checkpoint has not all."""
        names = (f"{base}.{number}.{part}.weight" for number in range(count))
        found = [self.names.get(without_wrapper(name)) for name in names]
        known = [name for name in found if name is not None]
        return known if len(known) == count else None

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The checkpoint's names by those of a text-only checkpoint."""
        return {without_wrapper(name): name for name in self.read}

    def _missing(self, module: str) -> ModelError:
        return ModelError(
            f"{self.file}: the checkpoint has no experts that the factors of {module!r} fit; "
            "experts in codes take no adapter of PEFT's target_parameters"
        )
